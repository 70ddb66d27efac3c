"""RMS norm (spec section 3, norm): float32 inside, no "1 + w"."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """(mean(x^2) + eps)^(-1/2) over the last axis, kept, float32."""
    x = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x [..., width] -> [..., width] of `dtype`. Tensor `<name>.weight` [width], bf16."""

    def __init__(self, name: str, width: int, eps: float, dtype: str, make):
        self.eps, self.dtype = eps, dtype
        self.weight = make(f"{name}.weight", (width,), "bf16", init="ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * inverse_rms(x, self.eps) * self.weight[...]).astype(
            self.dtype
        )
