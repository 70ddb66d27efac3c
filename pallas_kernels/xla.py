"""The routed experts in plain XLA: what runs on CPU, and what training differentiates.

Tiles of rows that share an expert (`routing`) are computed one after the other under a dynamic trip
count, so that time goes with the active experts. How a tile is multiplied depends on the expert's
width alone, never on the number of rows:

* narrow experts (up to 512 columns): a GEMM of the tile against the expert, which is held columns
  first: a CPU multiplies a few rows several times faster so. Long sums are cut (`products`),
  because XLA's CPU backend cuts them itself, differently for 8 rows and for 64. In the prefill
  regime all tiles go in one batched matmul, which is fast for thousands of rows; experts must then
  be dequantised. Held rows first, they are multiplied whole, for training: this is the path that
  has a gradient;
* wide experts: one row a tile, as a multiplication and a reduction that XLA fuses with the slice
  that picks the expert (and with the FP4 arithmetic if the expert is packed), so that the expert is
  read in place. A GEMM would first copy the slice (67 MB for one real w13) and then repack it:
  measured, that takes as long as 20 fused rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.pallas_kernels import fp4, routing
from dspark_jax.pallas_kernels.expert import gated, maybe_quantise
from dspark_jax.pallas_kernels.products import dot_columns

DECODE_TILE = 8
PREFILL_TILE = 64
WIDEST_GEMM = 512
# The fused reduction's inner shape: 8 terms are added per lane, 16 lanes fill an AVX-512 register.
# Others took 3-5 times as long.
TERMS, LANES = 8, 16


def is_wide(width: int, inner: int, packed: bool) -> bool:
    """Whether experts of D = width and F = inner count as wide."""
    step = TERMS * LANES * (2 if packed else 1)
    return max(width, inner) > WIDEST_GEMM and width % step == 0 and inner % step == 0


class ColumnExperts(NamedTuple):
    """Dequantised experts held columns first: what the xla backend computes narrow ones with on a
    CPU. See `moe.Experts`.
    """

    w13: jax.Array  # float [E, D, 2F], gate columns first, then up
    w2: jax.Array  # float [E, F, D]
    s13 = s2 = None


def _whole_gemm(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., R, K], w [..., N, K] to f32 [..., R, N]."""
    return jnp.einsum(
        "...rk,...nk->...rn",
        x,
        w.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _gemm(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [R, K], w [K, N] to f32 [R, N]; the bits of a row do not depend on R."""
    return dot_columns(x, w.astype(x.dtype))


def _tile(gemm, x, weight, w13, w2, swiglu_limit, activation_quant):
    """One tile or a batch of them: x [..., R, D], weight [..., R, 1], experts as gemm takes them,
    to f32 [..., R, D].
    """
    hidden = gated(*jnp.split(gemm(x, w13), 2, axis=-1), weight, swiglu_limit)
    return gemm(maybe_quantise(hidden, activation_quant).astype(x.dtype), w2)


def _batched(tiles, weight, experts, plan, swiglu_limit, activation_quant):
    gemm = jax.vmap(_gemm) if isinstance(experts, ColumnExperts) else _whole_gemm
    w13, w2 = experts.w13[plan.tile_expert], experts.w2[plan.tile_expert]
    return _tile(gemm, tiles, weight, w13, w2, swiglu_limit, activation_quant)


def _looped(tiles, plan, one_tile):
    """one_tile(i) gives f32 [R, D]; runs the active tiles only."""
    body = lambda i, out: jax.lax.dynamic_update_index_in_dim(out, one_tile(i), i, 0)
    return jax.lax.fori_loop(0, plan.n_tiles, body, jnp.zeros(tiles.shape, jnp.float32))


def _narrow(tiles, weight, experts, plan, swiglu_limit, activation_quant):
    def one_tile(i):
        take = lambda a: jax.lax.dynamic_index_in_dim(a, plan.tile_expert[i], keepdims=False)
        if isinstance(experts, ColumnExperts):
            w13, w2 = take(experts.w13), take(experts.w2)
        elif experts.s13 is None:
            w13, w2 = take(experts.w13).T, take(experts.w2).T
        else:
            w13 = fp4.dequantise(take(experts.w13), take(experts.s13)).T
            w2 = fp4.dequantise(take(experts.w2), take(experts.s2)).T
        return _tile(_gemm, tiles[i], weight[i], w13, w2, swiglu_limit, activation_quant)

    return _looped(tiles, plan, one_tile)


def _fused_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """f32 x [K], float w [N, K] to f32 [N]: TERMS products per lane, then the lanes. w may be an
    unmaterialised slice.
    """
    terms = w.reshape(w.shape[0], -1, TERMS, LANES).astype(jnp.float32)
    xs = x.reshape(-1, TERMS, LANES)
    return _sum_lanes([terms[:, :, t] * xs[:, t] for t in range(TERMS)])


def _fused_dot_packed(x: jax.Array, packed: jax.Array, scales: jax.Array) -> jax.Array:
    """f32 x [K], uint8 packed [N, K/2], uint8 scales [N, K/32] to f32 [N]; a lane holds one byte,
    and 16 bytes share a scale.
    """
    rows = packed.shape[0]
    even, odd = (x.reshape(-1, 2)[:, half].reshape(-1, TERMS, LANES) for half in (0, 1))
    codes = packed.reshape(rows, -1, TERMS, LANES)
    scales = scales.reshape(rows, -1, TERMS, 1)
    terms = []
    for t in range(TERMS):
        low, high = fp4.decode_e2m1(codes[:, :, t]), fp4.decode_e2m1(codes[:, :, t] >> 4)
        first, second = fp4.decode_e8m0(scales[:, :, t])
        terms.append((low * even[:, t] + high * odd[:, t]) * first * second)
    return _sum_lanes(terms)


def _sum_lanes(terms):
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return jnp.sum(total.reshape(total.shape[0], -1), axis=-1)


def _wide(tiles, weight, experts, plan, swiglu_limit, activation_quant):
    def one_tile(i):
        def dot(x, w, s):
            take = lambda a: jax.lax.dynamic_index_in_dim(a, plan.tile_expert[i], keepdims=False)
            return _fused_dot(x, take(w)) if s is None else _fused_dot_packed(x, take(w), take(s))

        gate_up = dot(tiles[i, 0].astype(jnp.float32), experts.w13, experts.s13)
        hidden = gated(*jnp.split(gate_up, 2), weight[i, 0], swiglu_limit)
        hidden = maybe_quantise(hidden, activation_quant).astype(tiles.dtype).astype(jnp.float32)
        return dot(hidden, experts.w2, experts.s2)[None]

    return _looped(tiles, plan, one_tile)


def moe_fp4_xla(x, ids, weights, mask, experts, *, swiglu_limit, here, activation_quant, regime):
    """See `pallas_kernels.moe.moe_fp4`."""
    columns_first, packed = isinstance(experts, ColumnExperts), experts.s13 is not None
    wide = not columns_first and is_wide(experts.w2.shape[1], experts.w13.shape[1] // 2, packed)
    batched = regime == "prefill" and not packed and not wide
    tile = 1 if wide else PREFILL_TILE if regime == "prefill" else DECODE_TILE
    plan = routing.schedule(ids, mask, here, tile)
    tiles = routing.to_tiles(maybe_quantise(x, activation_quant), plan)
    weight = routing.to_tiles(weights.reshape(-1, 1).astype(jnp.float32), plan)
    run = _batched if batched else _wide if wide else _narrow
    out = run(tiles, weight, experts, plan, swiglu_limit, activation_quant)
    return routing.sum_routes(routing.from_tiles(out, plan), x.shape[0])
