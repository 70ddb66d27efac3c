"""Indexer (spec section 7): scores the compressed entries of a ratio-4 layer for every row; the
best `index_topk` are attended to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.compressor import Compressor
from dspark_jax.model.layers.numerics import Numerics, dot, dot_columns
from dspark_jax.model.layers.rope import rotate
from dspark_jax.model.segments import LayerKind
from dspark_jax.pallas_kernels.activation import fp4_act_quant
from dspark_jax.pallas_kernels.products import precision
from dspark_jax.runtime.sharding import sum_over_model


def hadamard(x: jax.Array) -> jax.Array:
    """Orthonormal Walsh-Hadamard transform over the last axis, natural order. x [..., N], N a power
    of two.
    """
    width = x.shape[-1]
    index = np.arange(width)
    signs = 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)
    matrix = jnp.asarray(signs / np.sqrt(width), jnp.float32)
    return dot_columns(x.astype(jnp.float32), matrix).astype(x.dtype)


class Indexer(nnx.Module):
    """Tensors `attn.indexer.*` of spec section 2."""

    def __init__(self, config: ModelConfig, numerics: Numerics, kind: LayerKind, make):
        heads, width = config.index_n_heads, config.index_head_dim
        self.heads, self.width, self.numerics = heads, width, numerics
        self.wq_b = make(
            "attn.indexer.wq_b",
            (heads * width, config.q_lora_rank),
            "fp8",
            ("index_heads", None),
            product=True,
        )
        self.weights_proj = make(
            "attn.indexer.weights_proj.weight",
            (heads, config.hidden_size),
            "bf16",
            ("index_heads", None),
            product=True,
        )
        self.compressor = Compressor(config, numerics, "attn.indexer.compressor", width, kind, make)

    def queries(self, low: jax.Array, rotation) -> jax.Array:
        """low [B, T, rank] -> [B, T, Hi, di]."""
        q = self.numerics.linear(low, self.wq_b).reshape(*low.shape[:2], -1, self.width)
        cos, sin = rotation
        return self.quantise(rotate(q, (cos[:, :, None], sin[:, :, None])))

    def head_weights(self, x: jax.Array) -> jax.Array:
        """x [B, T, D] -> [B, T, Hi] float32."""
        return dot(x, self.weights_proj) * jnp.float32(self.width**-0.5 * self.heads**-0.5)

    def quantise(self, x: jax.Array) -> jax.Array:
        """Queries and entries alike: Hadamard, then e2m1 in blocks of 32."""
        x = hadamard(x)
        return fp4_act_quant(x) if self.numerics.activation_quant else x

    def scores(self, q: jax.Array, weights: jax.Array, entries: jax.Array) -> jax.Array:
        """q [B, T, Hi, di], weights [B, T, Hi], entries [B, S, di] -> [B, T, S] float32."""
        products = jnp.einsum(
            "bthc,bsc->bths", q, entries, precision=precision(q), preferred_element_type=jnp.float32
        )
        scores = jnp.einsum(
            "bth,bths->bts", weights, jax.nn.relu(products), precision=jax.lax.Precision.HIGHEST
        )
        return sum_over_model(scores)
