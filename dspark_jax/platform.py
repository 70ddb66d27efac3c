"""What differs between backends: compiler options, and the fewest rows that a call may carry.

A row's bits must not depend on how many rows a call carries. XLA's CPU backend picks the order of a reduction by shape in its YNNPACK
fusions; with these off, any row count from 2 up gives the same bits. The option's name is not stable, so it is tried, and the promise
is checked on a small program; where either fails, every call carries the rows of a whole verify block.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

_FUSIONS_OFF = {"xla_cpu_experimental_ynn_fusion_type": ""}


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


@functools.lru_cache(maxsize=None)
def compiler_options() -> dict[str, str] | None:
    """Options for `jax.jit` on this backend."""
    if not on_cpu():
        return None
    try:
        jax.jit(lambda x: x + 1, compiler_options=_FUSIONS_OFF)(jnp.zeros(2)).block_until_ready()
    except Exception:  # the exception's type for an unknown option differs between releases
        return None
    return _FUSIONS_OFF


@functools.lru_cache(maxsize=None)
def rows_agree() -> bool:
    """Whether a probe (products, softmax, sums at model-like sizes) gives the same bits for 2, 6 and 64 rows."""
    if compiler_options() is None:
        return False
    rng = np.random.default_rng(0)
    x, w, v = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((64, 256), (384, 256), (128, 384)))

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def probe(x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        return jax.nn.softmax(x @ w.T, axis=-1) @ v.T

    whole = np.asarray(probe(x))
    return all(np.array_equal(whole[:rows], probe(x[:rows])) for rows in (2, 6))


def fewest_rows(block_size: int) -> int:
    """The row count of a one-token decode: what every smaller call is padded to."""
    return 2 if rows_agree() else block_size + 1


def jit(function, **options):
    """`jax.jit` with this backend's compiler options."""
    return jax.jit(function, compiler_options=compiler_options(), **options)
