"""Attention with one key/value head, sinks and a grouped low-rank output (spec section 5).

`Attention` holds the projections. Which keys a row may see is the caller's business (cached.py for
decoding, whole_sequence.py for whole sequences, dspark_drafter.py for a draft block): it feeds
keys, block after block, to a running softmax, whose result does not depend on how many fully masked
blocks came along. A masked key contributes exactly zero.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.norm import RMSNorm, inverse_rms
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import rotate
from dspark_jax.pallas_kernels.products import precision


class Running(NamedTuple):
    """A softmax-weighted sum under way, all float32: highest score so far, sum of weights, weighted
    sum of values.
    """

    highest: jax.Array  # [B, T, H]
    total: jax.Array  # [B, T, H]
    values: jax.Array  # [B, T, H, C]


def start(sink: jax.Array, q: jax.Array) -> Running:
    """The sink [H] takes part in the denominator only, so it is where the running sum starts. q [B,
    T, H, C].
    """
    highest = jnp.broadcast_to(sink.astype(jnp.float32), q.shape[:3])
    return Running(highest, jnp.ones_like(highest), jnp.zeros(q.shape, jnp.float32))


def absorb(running: Running, q: jax.Array, keys: jax.Array, visible: jax.Array) -> Running:
    """Adds keys (which are the values too) to the sum.

    q [B, T, H, C]; keys [B, S, C], or [B, T, S, C] when every row has its own; visible bool [B, T,
    S]. A key that is not finite makes the rows that see it NaN, and no others, though zero times
    NaN is NaN.
    """
    broken = ~jnp.isfinite(keys).all(axis=-1)
    keys = jnp.where(broken[..., None], 0, keys)
    poison = jnp.where(
        jnp.any(visible & (broken if keys.ndim == 4 else broken[:, None]), axis=-1), jnp.nan, 0
    )
    own = "bthc,btsc->bths" if keys.ndim == 4 else "bthc,bsc->bths"
    back = "bths,btsc->bthc" if keys.ndim == 4 else "bths,bsc->bthc"
    options = dict(precision=precision(q), preferred_element_type=jnp.float32)
    scores = jnp.einsum(own, q, keys, **options) * jnp.float32(q.shape[-1] ** -0.5)
    scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
    highest = jnp.maximum(running.highest, jax.lax.stop_gradient(scores.max(axis=-1)))
    keep = jnp.exp(running.highest - highest)
    weights = jnp.exp(scores - highest[..., None])
    total = running.total * keep + weights.sum(axis=-1)
    values = running.values * keep[..., None] + jnp.einsum(
        back, weights.astype(keys.dtype), keys, **options
    )
    return Running(highest, total + poison[..., None], values)


def finish(running: Running, dtype) -> jax.Array:
    """[B, T, H, C] of the compute dtype."""
    return (running.values / running.total[..., None]).astype(dtype)


class Attention(nnx.Module):
    """Projections of one attention sub-layer. Tensors `attn.*` of spec section 2. H is the heads at
    hand, a part of them on a mesh.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, make):
        d, rank = config.hidden_size, config.q_lora_rank
        h, c = config.num_attention_heads, config.head_dim
        groups, group_rank = config.o_groups, config.o_lora_rank
        self.numerics, self.eps = numerics, config.rms_norm_eps
        self.width, self.group_rank = c, group_rank
        self.plain = c - config.qk_rope_head_dim
        self.wq_a = make("attn.wq_a", (rank, d), "fp8", product=True)
        self.q_norm = RMSNorm("attn.q_norm", rank, self.eps, numerics.dtype, make)
        self.wq_b = make("attn.wq_b", (h * c, rank), "fp8", ("heads", None), product=True)
        self.wkv = make("attn.wkv", (c, d), "fp8", product=True)
        self.kv_norm = RMSNorm("attn.kv_norm", c, self.eps, numerics.dtype, make)
        self.sink = make("attn.attn_sink", (h,), "f32", ("heads",), init="zeros")
        self.wo_a = make(
            "attn.wo_a", (groups * group_rank, h * c // groups), "fp8", ("groups", None)
        )
        self.wo_b = make(
            "attn.wo_b", (d, groups * group_rank), "fp8", (None, "groups"), product=True
        )

    def queries(self, x: jax.Array, rotation) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> low-rank queries [B, T, rank] (the indexer shares them) and rotated heads
        [B, T, H, C].
        """
        low = self.q_norm(self.numerics.linear(x, self.wq_a))
        q = self.numerics.linear(low, self.wq_b).reshape(*x.shape[:2], -1, self.width)
        q = (q.astype(jnp.float32) * inverse_rms(q, self.eps)).astype(self.numerics.dtype)
        cos, sin = rotation
        return low, rotate(q, (cos[:, :, None], sin[:, :, None]))

    def keys(self, x: jax.Array, rotation) -> jax.Array:
        """x [B, T, D] -> [B, T, C]: rotated, and quantised except for the rotary channels, as it is
        stored.
        """
        return self.quantise_key(rotate(self.kv_norm(self.numerics.linear(x, self.wkv)), rotation))

    def quantise_key(self, key: jax.Array) -> jax.Array:
        """key [..., C]: e4m3 in blocks of 64 over the channels that are not rotary."""
        plain, rotary = key[..., : self.plain], key[..., self.plain :]
        return jnp.concatenate([self.numerics.quantise(plain, 64), rotary], axis=-1)

    def output(self, o: jax.Array, rotation) -> jax.Array:
        """o [B, T, H, C] -> [B, T, D]: rotated back by the query's position, then the grouped
        low-rank output.
        """
        cos, sin = rotation
        o = rotate(o, (cos[:, :, None], sin[:, :, None]), inverse=True)
        wo_a = self.wo_a[...]
        wo_a = wo_a.reshape(-1, self.group_rank, wo_a.shape[-1])
        o = o.reshape(*o.shape[:2], *wo_a.shape[::2])
        z = jnp.einsum(
            "btgk,grk->btgr", o, wo_a, precision=precision(o), preferred_element_type=jnp.float32
        )
        z = z.astype(self.numerics.dtype).reshape(*o.shape[:2], -1)
        return self.numerics.summed_linear(z, self.wo_b)
