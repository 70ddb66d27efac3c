"""Rotary positions (spec section 3, RoPE): two tables, exact to float32 for every position up to
2^20.

A float32 product `position * frequency` is off by up to 0.03 rad at a million positions. So a
position is split into 1024 * high + low, both angles' cosines and sines come from small tables
computed in float64, and the angle-sum formulas join them.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import ModelConfig

MAX_POSITIONS = 1 << 20
_STEP = 1024


def inverse_frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """[rope / 2] float64. compressed: base `compress_rope_theta` with YaRN, for ratio > 0; else
    base `rope_theta`, plain.
    """
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = float(base) ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if not compressed:
        return frequencies
    scaling = config.rope_scaling

    def correction(rotations):
        turns = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
        return width * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - interpolated) + frequencies / scaling.factor * interpolated


@functools.cache
def _tables(config: ModelConfig, compressed: bool) -> np.ndarray:
    """[2 (high, low), 2 (cos, sin), 1024, rope / 2] float32."""
    frequencies = inverse_frequencies(config, compressed)
    angles = [np.arange(_STEP)[:, None] * scale * frequencies for scale in (_STEP, 1)]
    return np.stack([np.stack([np.cos(a), np.sin(a)]) for a in angles]).astype(np.float32)


def rotation(
    config: ModelConfig, compressed: bool, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each [..., rope / 2] float32, of int32 positions [...] in [0, 2^20); a position
    outside is clamped.
    """
    (cos_high, sin_high), (cos_low, sin_low) = jnp.asarray(_tables(config, compressed))
    positions = jnp.clip(positions, 0, MAX_POSITIONS - 1)
    high, low = positions // _STEP, positions % _STEP
    ch, sh, cl, sl = cos_high[high], sin_high[high], cos_low[low], sin_low[low]
    return ch * cl - sh * sl, sh * cl + ch * sl


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array], inverse: bool = False) -> jax.Array:
    """Rotates neighbouring pairs of the last `rope` channels. x [..., C]; cos, sin broadcastable to
    [..., rope / 2].
    """
    cos, sin = rotation
    sin = -sin if inverse else sin
    width = 2 * cos.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].astype(jnp.float32)
    pairs = turned.reshape(*turned.shape[:-1], -1, 2)
    u, v = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([u * cos - v * sin, u * sin + v * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([plain, turned.astype(x.dtype)], axis=-1)
