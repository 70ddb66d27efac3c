"""Manifold hyper-connections (spec section 4): M residual streams, mixed by a doubly stochastic
matrix around each sub-layer.

The streams are a tuple of M arrays [B, T, D], not one array: each mix is then a fused sum, which on
a CPU is three times faster. All weights are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.numerics import dot_parts

Streams = tuple[jax.Array, ...]


def _projections(streams: Streams, fn: nnx.Variable, eps: float) -> jax.Array:
    """(fn x) / rms(x) for x the concatenation of the streams; fn [O, M*D] -> [O, B, T] float32."""
    parts = [s.astype(jnp.float32) for s in streams]
    squares = sum(jnp.sum(s * s, axis=-1) for s in parts)
    width = len(streams) * streams[0].shape[-1]
    return jnp.moveaxis(
        dot_parts(parts, fn) * jax.lax.rsqrt(squares / width + eps)[..., None], -1, 0
    )


def sinkhorn(scores: jax.Array, iterations: int, eps: float) -> jax.Array:
    """[M, M, ...] scores -> nearly doubly stochastic [M, M, ...]; the first index is the old
    stream, the second the new one.
    """

    def columns(c):
        return c / (_total(c, 0) + eps)

    def rows_then_columns(_, c):
        return columns(c / (_total(c, 1) + eps))

    # A loop, not twenty copies of its body: half the program to compile, and no slower.
    return jax.lax.fori_loop(
        0, iterations - 1, rows_then_columns, columns(jax.nn.softmax(scores, axis=1) + eps)
    )


def _total(c: jax.Array, axis: int) -> jax.Array:
    """Sum over a short axis, kept, as additions that fuse with their neighbours."""
    slices = [jax.lax.slice_in_dim(c, i, i + 1, axis=axis) for i in range(c.shape[axis])]
    return sum(slices[1:], slices[0])


def _weighted(weights, streams: Streams) -> jax.Array:
    return sum(w[..., None] * s.astype(jnp.float32) for w, s in zip(weights, streams))


class HyperConnection(nnx.Module):
    """The mixing around one sub-layer. Tensors `hc_{name}_fn` [(2+M)M, M*D], `hc_{name}_base`
    [(2+M)M], `hc_{name}_scale` [3].
    """

    def __init__(self, config: ModelConfig, name: str, dtype: str, make):
        m, d = config.hc_mult, config.hidden_size
        self.copies, self.iterations = m, config.hc_sinkhorn_iters
        self.hc_eps, self.rms_eps, self.dtype = config.hc_eps, config.rms_norm_eps, dtype
        self.fn = make(f"hc_{name}_fn", ((2 + m) * m, m * d), "f32", product=True)
        self.base = make(f"hc_{name}_base", ((2 + m) * m,), "f32", init="hc_base")
        self.scale = make(f"hc_{name}_scale", (3,), "f32", init="ones")

    def weights(self, streams: Streams):
        """pre [M, B, T], post [M, B, T], mix [M, M, B, T] for streams M x [B, T, D]."""
        m = self.copies
        projected = _projections(streams, self.fn, self.rms_eps)
        base, scale = self.base[...][:, None, None], self.scale[...]
        pre = jax.nn.sigmoid(projected[:m] * scale[0] + base[:m]) + self.hc_eps
        post = 2.0 * jax.nn.sigmoid(projected[m : 2 * m] * scale[1] + base[m : 2 * m])
        scores = projected[2 * m :] * scale[2] + base[2 * m :]
        scores = scores.reshape(m, m, *scores.shape[1:])
        return pre, post, sinkhorn(scores, self.iterations, self.hc_eps)

    def collapse(self, streams: Streams):
        """The sub-layer's input [B, T, D], and the weights that `expand` needs afterwards."""
        pre, post, mix = self.weights(streams)
        return _weighted(pre, streams).astype(self.dtype), (post, mix)

    def expand(self, streams: Streams, y: jax.Array, weights) -> Streams:
        """Puts the sub-layer's output y [B, T, D] back: stream k becomes post_k y + sum_j mix[j, k]
        stream_j.
        """
        post, mix = weights
        y = y.astype(jnp.float32)
        return tuple(
            (post[k][..., None] * y + _weighted(mix[:, k], streams)).astype(self.dtype)
            for k in range(self.copies)
        )


class Collapse(nnx.Module):
    """The streams to one vector in front of a head. Tensors `hc_head_fn` [M, M*D], `hc_head_base`
    [M], `hc_head_scale` [1].
    """

    def __init__(self, config: ModelConfig, dtype: str, make):
        m, d = config.hc_mult, config.hidden_size
        self.hc_eps, self.rms_eps, self.dtype = config.hc_eps, config.rms_norm_eps, dtype
        self.fn = make("hc_head_fn", (m, m * d), "f32", product=True)
        self.base = make("hc_head_base", (m,), "f32", init="zeros")
        self.scale = make("hc_head_scale", (1,), "f32", init="ones")

    def __call__(self, streams: Streams) -> jax.Array:
        projected = _projections(streams, self.fn, self.rms_eps)
        weights = (
            jax.nn.sigmoid(projected * self.scale[...] + self.base[...][:, None, None])
            + self.hc_eps
        )
        return _weighted(weights, streams).astype(self.dtype)
