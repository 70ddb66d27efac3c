"""Checkpoints: the official safetensors layout in and out (`official`, `writer`), random ones of any size (`synthetic`).

`tiny/` is the embedded checkpoint that this project trained. This package knows the config and the sharding, not the model.
"""
# The library imports this package and this package the library's errors. Entered here first, the library must be complete before
# any module below begins, or it would find that module half-made.
import dspark_jax.errors  # noqa: F401
