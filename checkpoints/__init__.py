"""Checkpoints: the official safetensors layout in and out (`official`, `writer`), sharded Orbax
(`convert`, `orbax_io`), random ones of any size (`synthetic`).

`tiny/` is the embedded checkpoint that this project trained. This package imports nothing of the
library around it: it is installed as `dspark_jax.checkpoints`, so that a user's own `checkpoints`
folder cannot take its place.
"""
