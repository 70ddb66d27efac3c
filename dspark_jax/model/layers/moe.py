"""Mixture of experts (spec section 8): hash or score routing, FP4 routed experts through
`pallas_kernels.moe_fp4`, one shared expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax import pallas_kernels
from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.numerics import Numerics, dot
from dspark_jax.model.parameters import ColumnsFirst
from dspark_jax.runtime.backend import target
from dspark_jax.runtime.sharding import model_index, sum_over_model


class Experts(nnx.Module):
    """The routed experts, gate rows first. Packed: uint8 codes and e8m0 scales; dequantised: floats
    and no scales.
    """

    def __init__(self, config: ModelConfig, make):
        e, f, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        gate_up, down = "ffn.experts.{e}.w1|ffn.experts.{e}.w3", "ffn.experts.{e}.w2"
        axes = ("experts", None, None)
        part = "packed" if make.packed_experts else "value"
        gemm = not (make.packed_experts or pallas_kernels.is_wide(d, f, packed=False))
        self.w13 = make(gate_up, (e, 2 * f, d), "fp4", axes, part=part, product=gemm)
        self.w2 = make(down, (e, d, f), "fp4", axes, part=part, product=gemm)
        self.packed = make.packed_experts
        if self.packed:
            self.s13 = make(gate_up, (e, 2 * f, d), "fp4", axes, part="scale")
            self.s2 = make(down, (e, d, f), "fp4", axes, part="scale")

    def arrays(self) -> pallas_kernels.Experts | pallas_kernels.ColumnExperts:
        if isinstance(self.w13, ColumnsFirst):
            return pallas_kernels.ColumnExperts(self.w13.columns, self.w2.columns)
        scales = (self.s13[...], self.s2[...]) if self.packed else (None, None)
        return pallas_kernels.Experts(
            w13=self.w13[...], s13=scales[0], w2=self.w2[...], s2=scales[1]
        )

    def of_all_layers(self) -> pallas_kernels.Experts | pallas_kernels.ColumnExperts:
        """The experts of n stacked layers as n*E experts, without a copy: layer l's expert e is
        number l*E + e.
        """
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), self.arrays())


class SharedExpert(nnx.Module):
    """Every token's expert. Tensors `ffn.shared_experts.w1`, `.w3` [F, D], `.w2` [D, F], fp8."""

    def __init__(self, config: ModelConfig, numerics: Numerics, make):
        f, d = config.moe_intermediate_size, config.hidden_size
        self.numerics, self.limit = numerics, config.swiglu_limit
        self.w1 = make("ffn.shared_experts.w1", (f, d), "fp8", product=True)
        self.w3 = make("ffn.shared_experts.w3", (f, d), "fp8", product=True)
        self.w2 = make("ffn.shared_experts.w2", (d, f), "fp8", product=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> [..., D] of the compute dtype."""
        gate = self.numerics.linear(x, self.w1).astype(jnp.float32)
        up = self.numerics.linear(x, self.w3).astype(jnp.float32)
        hidden = jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)
        return self.numerics.linear(hidden.astype(self.numerics.dtype), self.w2)


def router_scores(logits: jax.Array) -> jax.Array:
    """sqrt(softplus(logits)), float32.

    From about -87 down softplus is a subnormal number, which XLA flushes to zero, and all weights
    would be 0 / 0. There the root is exp(logit / 2) to the last bit, which is far from subnormal.
    """
    smallest = -80.0
    usual = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, smallest)))
    return jnp.where(logits < smallest, jnp.exp(logits / 2), usual)


class MoE(nnx.Module):
    """Router, routed experts and shared expert of one layer. Tensors `ffn.*` of spec section 2.

    hashed: the experts of a token are looked up by its id (`ffn.gate.tid2eid`), else chosen by
      biased scores.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, hashed: bool, make):
        e, a = config.n_routed_experts, config.num_experts_per_tok
        d, v = config.hidden_size, config.vocab_size
        self.numerics, self.active, self.hashed = numerics, a, hashed
        self.scaling, self.limit = config.routed_scaling_factor, config.swiglu_limit
        self.gate = make("ffn.gate.weight", (e, d), "bf16", product=True)
        if hashed:
            self.table = make("ffn.gate.tid2eid", (v, a), "i64", init=f"hash{e}")
        else:
            self.bias = make("ffn.gate.bias", (e,), "f32", init="zeros")
        self.experts = Experts(config, make)
        self.shared = SharedExpert(config, numerics, make)

    def route(self, x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [..., D], token ids [...] -> chosen experts [..., A] int32, their weights [..., A]
        float32, all scores [..., E].
        """
        scores = router_scores(dot(x, self.gate))
        if self.hashed:
            chosen = self.table[...][ids]
            picked = jnp.take_along_axis(scores, chosen, axis=-1)
        else:
            biased, chosen = jax.lax.top_k(scores + self.bias[...], self.active)
            # The weights are without the bias; one that is NaN, which comes first in top_k, must
            # show all the same.
            picked = jnp.where(
                jnp.isnan(biased), jnp.nan, jnp.take_along_axis(scores, chosen, axis=-1)
            )
        return chosen, self.scaling * picked / jnp.sum(picked, axis=-1, keepdims=True), scores

    def __call__(
        self, x: jax.Array, ids: jax.Array, mask: jax.Array, regime: str, layer=None
    ) -> tuple[jax.Array, tuple]:
        """x [B, T, D], ids and mask [B, T] (False: the row does no expert work) -> [B, T, D],
        (chosen experts, weights, scores).

        regime: "decode" or "prefill", see `pallas_kernels.moe_fp4`. layer: the experts hold all
          layers of the stack, this is the one.
        """
        chosen, weights, scores = self.route(x, ids)
        routed = sum_over_model(self.routed(x, chosen, weights, mask, regime, layer))
        y = routed + self.shared(x).astype(jnp.float32)
        return y.astype(self.numerics.dtype), (chosen, weights, scores)

    def routed(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        mask: jax.Array,
        regime: str,
        layer=None,
    ) -> jax.Array:
        """What the experts held here add, [B, T, D] float32: all of them, or on a mesh this
        device's.
        """
        tables, offset = self.experts.arrays(), 0
        count = tables.w13.shape[-3]
        if layer is not None:
            tables, offset = self.experts.of_all_layers(), layer * count
        y = pallas_kernels.moe_fp4(
            _flat(x),
            _flat(chosen),
            _flat(weights),
            _flat(mask),
            tables,
            swiglu_limit=self.limit,
            first_expert=count * model_index(),
            held=count,
            offset=offset,
            activation_quant=self.numerics.activation_quant,
            regime=regime,
            backend=pallas_kernels.default_backend(tables, target()),
        )
        return y.reshape(x.shape)


def _flat(a: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B*T, ...]"""
    return a.reshape(-1, *a.shape[2:])
