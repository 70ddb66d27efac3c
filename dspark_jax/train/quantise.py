"""What the checkpoint's storage does to a parameter, inside the training step, with
straight-through gradients.

    fp8    e4m3 with one power-of-two scale for a block of 128 x 128 (edge blocks may be partial)
    fp4    e2m1 with one power-of-two scale for 32 consecutive columns
    bf16   round to bfloat16
    f32    nothing

The values are those that checkpoints/writer.py stores, bit for bit, so a model that was trained
through this ships unchanged.
"""

import jax
import jax.numpy as jnp

from dspark_jax.pallas_kernels import fp4
from dspark_jax.pallas_kernels.activation import E4M3_MAX, power_of_two_scale

FP8_BLOCK = 128
SMALLEST_FP8_AMAX = E4M3_MAX * 2.0**-126  # an all-zero block gets the smallest normal scale


def _fp8(w: jax.Array) -> jax.Array:
    """w [..., N, K] float32."""
    n, k = w.shape[-2:]
    pad = [(0, 0)] * (w.ndim - 2) + [(0, -n % FP8_BLOCK), (0, -k % FP8_BLOCK)]
    padded = jnp.pad(w, pad)
    rows, columns = padded.shape[-2] // FP8_BLOCK, padded.shape[-1] // FP8_BLOCK
    blocks = padded.reshape(*w.shape[:-2], rows, FP8_BLOCK, columns, FP8_BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True)
    scale = power_of_two_scale(jnp.maximum(amax, SMALLEST_FP8_AMAX), E4M3_MAX)
    rounded = (
        jnp.clip(blocks / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        * scale
    )
    return rounded.reshape(padded.shape)[..., :n, :k]


def _fp4(w: jax.Array) -> jax.Array:
    """w [..., K] float32, K a multiple of 32."""
    return fp4.dequantise(*fp4.quantise(w))


def _bf16(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16).astype(jnp.float32)


def _straight_through(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: (f(primals[0]), tangents[0]))
    return wrapped


_STORAGE = {
    "fp8": _straight_through(_fp8),
    "fp4": _straight_through(_fp4),
    "bf16": _straight_through(_bf16),
    "f32": lambda w: w,
}


def stored(w: jax.Array, storage: str) -> jax.Array:
    """w float32 as it reads back from a checkpoint that stores it as `storage`; gradients pass
    unchanged.
    """
    return _STORAGE[storage](w)


def parameters(params: dict[str, jax.Array], storages: dict[str, str]) -> dict[str, jax.Array]:
    """`stored` over a parameter dictionary; both dictionaries have the same keys."""
    return {name: stored(w, storages[name]) for name, w in params.items()}
