"""The routed experts on a TPU: two Pallas kernels (gate + up, then down) lowered through Mosaic.

The grid walks blocks of output columns, and for each of them the tiles of rows (`routing`). The
tiles' experts are known to the pipeline before the kernel starts (scalar prefetch), so exactly the
routed experts are copied from HBM, double-buffered, each block once even when several tiles share
it; beyond the last active tile the block indices stand still, and nothing is copied or computed.

Mosaic has no four-bit floats on v5e, v5p and v6e. Packed bytes are widened in VMEM and turned into
float32 bit patterns by integer arithmetic; the scale of 32 columns reaches its lanes through a
product with a constant 0/1 matrix, which is exact and uses the otherwise idle matrix unit. The
products are bfloat16 with float32 accumulation, even columns (low nibbles) and odd columns apart,
so nothing is interleaved. A row's columns are summed in one fixed order whatever its tile holds.

On v5p, XLA lays a uint8 argument whose last dimension is below 128 out transposed by default; at
the real size that is s2 (F / 32 = 64), and each call then copies it (17 MB). Hold it in row-major
layout there.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.pallas_kernels import fp4, routing
from dspark_jax.pallas_kernels.expert import gated, maybe_quantise

DECODE_TILE = 16  # the smallest tile of bfloat16 rows
PREFILL_TILE = 64
BLOCK_N = 128
VMEM_LIMIT = 16 << 20  # bytes; what the smallest of the three generations gives a kernel by default
LARGEST_SCALE = 253  # e8m0 byte up to which weights are right: twice the scale must be a float32


def _half_e2m1(code):
    """int32 codes 0..15 to half their value in float32: from code 2 on, a code is a float's
    exponent and first mantissa bit.
    """
    magnitude = code & 7
    bits = jnp.where(magnitude < 2, magnitude * 0x3E800000, (magnitude << 22) + 0x3E800000)
    return jax.lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)


def _doubled_scale(scales):
    """e8m0 bytes up to LARGEST_SCALE to twice the scale in float32, so that byte 0, 2 ** -127,
    becomes a normal number.
    """
    return jax.lax.bitcast_convert_type((scales.astype(jnp.int32) + 1) << 23, jnp.float32)


def _products(x, packed, scales, spread):
    """x bfloat16 [2, R, K/2] by parity, packed uint8 [N, K/2], scales uint8 [N, K/32], spread
    [K/32, K/2] to f32 [R, N].
    """
    doubled = _doubled_scale(scales).astype(jnp.bfloat16)
    doubled = jax.lax.dot_general(
        doubled, spread, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    byte = packed.astype(jnp.int32)
    total = None
    for parity, code in enumerate((byte & 15, byte >> 4)):
        w = (_half_e2m1(code) * doubled).astype(jnp.bfloat16)
        part = jax.lax.dot_general(
            x[parity], w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = part if total is None else total + part
    return total


def _gate_up_kernel(
    tile_expert, n_tiles, x, weight, gate_w, gate_s, up_w, up_s, spread, out, *, swiglu_limit
):
    del tile_expert

    @pl.when(pl.program_id(1) < n_tiles[0])
    def _():
        gate = _products(x[0], gate_w[0], gate_s[0], spread[...])
        up = _products(x[0], up_w[0], up_s[0], spread[...])
        out[0] = gated(gate, up, weight[0], swiglu_limit).astype(out.dtype)


def _down_kernel(tile_expert, n_tiles, x, w, s, spread, out):
    del tile_expert

    @pl.when(pl.program_id(1) < n_tiles[0])
    def _():
        out[0] = _products(x[0], w[0], s[0], spread[...])


def _spread(columns):
    """bfloat16 [K/32, K/2]: row g is one where column byte k belongs to scale g."""
    group = jnp.arange(columns // 2) // (fp4.BLOCK // 2)
    return (jnp.arange(columns // fp4.BLOCK)[:, None] == group).astype(jnp.bfloat16)


def _tile_block(*shape):
    """The block of one tile of rows. Beyond the last active tile it stays where it is."""
    return pl.BlockSpec(
        (1, *shape),
        lambda n, i, experts, count: (
            jnp.minimum(i, jnp.maximum(count[0] - 1, 0)),
            *(0 for _ in shape),
        ),
    )


def _expert_block(rows, columns, offset=0):
    """`rows` rows of the tile's expert, all columns."""
    return pl.BlockSpec(
        (1, rows, columns), lambda n, i, experts, count: (experts[i], n + offset, 0)
    )


def _call(kernel, plan, operands, in_specs, block_n, columns, dtype, interpret):
    """Runs `kernel` over (blocks of columns, tiles); result [tiles, tile, columns]."""
    tiles, tile = plan.slot_used.shape
    clamp = lambda i, count: jnp.minimum(i, jnp.maximum(count[0] - 1, 0))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(columns // block_n, tiles),
        in_specs=in_specs,
        out_specs=pl.BlockSpec(
            (1, tile, block_n), lambda n, i, experts, count: (clamp(i, count), 0, n)
        ),
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=spec,
        out_shape=jax.ShapeDtypeStruct((tiles, tile, columns), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
    )
    return call(plan.tile_expert, plan.n_tiles.reshape(1), *operands)


def _by_parity(x):
    """[tiles, R, K] to bfloat16 [tiles, 2, R, K/2]: even columns, odd columns."""
    return jnp.moveaxis(x.astype(jnp.bfloat16).reshape(*x.shape[:-1], -1, 2), -1, 1)


def _block_n(*sizes):
    return max(b for b in (8, 16, 32, 64, BLOCK_N) if all(size % b == 0 for size in sizes))


def moe_fp4_tpu(
    x, ids, weights, mask, experts, *, swiglu_limit, here, activation_quant, regime, interpret=False
):
    """See `pallas_kernels.moe.moe_fp4`. Experts packed. Activations are rounded to bfloat16 before
    each product.

    Compiled, D and F must be multiples of 256 (whole lanes of packed columns). interpret: run on
    any platform, for tests.
    """
    width, inner = experts.w2.shape[1], experts.w2.shape[2] * 2
    tile = PREFILL_TILE if regime == "prefill" else DECODE_TILE
    block_n = _block_n(width, inner)
    plan = routing.schedule(ids, mask, here, tile)
    tiles = routing.to_tiles(maybe_quantise(x, activation_quant), plan)
    weight = routing.to_tiles(weights.reshape(-1, 1).astype(jnp.float32), plan)
    call = functools.partial(_call, block_n=block_n, interpret=interpret)

    packed = functools.partial(_expert_block, block_n, width // 2)
    scales = functools.partial(_expert_block, block_n, width // fp4.BLOCK)
    whole = lambda k: pl.BlockSpec((k // fp4.BLOCK, k // 2), lambda n, i, experts, count: (0, 0))
    up = inner // block_n
    hidden = call(
        functools.partial(_gate_up_kernel, swiglu_limit=swiglu_limit),
        plan,
        (
            _by_parity(tiles),
            weight,
            experts.w13,
            experts.s13,
            experts.w13,
            experts.s13,
            _spread(width),
        ),
        [
            _tile_block(2, tile, width // 2),
            _tile_block(tile, 1),
            packed(0),
            scales(0),
            packed(up),
            scales(up),
            whole(width),
        ],
        columns=inner,
        dtype=jnp.float32,
    )
    hidden = _by_parity(maybe_quantise(hidden, activation_quant))
    out = call(
        _down_kernel,
        plan,
        (hidden, experts.w2, experts.s2, _spread(inner)),
        [
            _tile_block(2, tile, inner // 2),
            _expert_block(block_n, inner // 2),
            _expert_block(block_n, inner // fp4.BLOCK),
            whole(inner),
        ],
        columns=width,
        dtype=jnp.float32,
    )
    return routing.sum_routes(routing.from_tiles(out, plan), x.shape[0])
