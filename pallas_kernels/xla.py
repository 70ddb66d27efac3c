"""The routed experts in plain XLA: what runs on CPU, and what training differentiates.

Tiles of rows that share an expert (`routing`) are multiplied one after the other under a dynamic trip count, so that time goes with the
active experts. Small experts in the prefill regime instead take all tiles in one batched matmul, which is faster for
thousands of rows and has a gradient.

Experts may be dequantised floats or packed FP4.
"""
import jax
import jax.numpy as jnp

from pallas_kernels import fp4, routing
from pallas_kernels.expert import gated, maybe_quantise

DECODE_TILE = 8
PREFILL_TILE = 64
# Experts up to this many weights are gathered per tile and batched; beyond it a copy of an expert per tile would not fit.
BATCHED_EXPERT_SIZE = 1 << 20


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., R, K], w [..., N, K] to f32 [..., R, N]."""
    batch = tuple(range(x.ndim - 2))
    dims = (((x.ndim - 1,), (w.ndim - 1,)), (batch, batch))
    return jax.lax.dot_general(x, w.astype(x.dtype), dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _tile(x, weight, w13, w2, swiglu_limit, activation_quant):
    """One tile or a batch of them: x [..., R, D], weight [..., R, 1], w13 [..., 2F, D], w2 [..., D, F] to f32 [..., R, D]."""
    hidden = gated(_dot(x, w13), weight, swiglu_limit)
    return _dot(maybe_quantise(hidden, activation_quant).astype(x.dtype), w2)


def _experts_at(experts, index):
    """Dequantised (w13, w2) of one local expert."""
    take = lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False)
    if experts.s13 is None:
        return take(experts.w13), take(experts.w2)
    return fp4.dequantise(take(experts.w13), take(experts.s13)), fp4.dequantise(take(experts.w2), take(experts.s2))


def _looped(tiles, weight, experts, plan, swiglu_limit, activation_quant):
    def body(i, out):
        w13, w2 = _experts_at(experts, plan.tile_expert[i])
        y = _tile(tiles[i], weight[i], w13, w2, swiglu_limit, activation_quant)
        return jax.lax.dynamic_update_index_in_dim(out, y, i, 0)

    return jax.lax.fori_loop(0, plan.n_tiles, body, jnp.zeros(tiles.shape, jnp.float32))


def _batched(tiles, weight, experts, plan, swiglu_limit, activation_quant):
    return _tile(tiles, weight, experts.w13[plan.tile_expert], experts.w2[plan.tile_expert], swiglu_limit, activation_quant)


def moe_fp4_xla(x, ids, weights, mask, experts, *, swiglu_limit, first_expert, activation_quant, regime):
    """See `pallas_kernels.moe.moe_fp4`."""
    held = experts.w2.shape[0]
    tile = DECODE_TILE if regime == "decode" else PREFILL_TILE
    plan = routing.schedule(ids, mask, first_expert, held, tile)
    tiles = routing.to_tiles(maybe_quantise(x, activation_quant), plan)
    weight = routing.to_tiles(weights.reshape(-1, 1).astype(jnp.float32), plan)
    small = experts.s13 is None and experts.w13[0].size <= BATCHED_EXPERT_SIZE
    run = _batched if regime == "prefill" and small else _looped
    out = run(tiles, weight, experts, plan, swiglu_limit, activation_quant)
    return routing.sum_routes(routing.from_tiles(out, plan), x.shape[0])
