"""The routed experts on a Hopper-class GPU: two Pallas kernels (gate + up, then down) lowered
through Triton.

Why Triton and not Mosaic GPU: the same kernel text runs in interpret mode on a CPU and lowers for
CUDA on a CPU-only jaxlib, the tiles are small (few rows, memory-bound), and the unpacking needs
plain integer arithmetic in registers. JAX 0.11 calls the Triton lowering deprecated; everything
that depends on it is in this file.

A program computes `block_n` output columns of one tile of `tile` rows that share an expert. It
reads that expert's packed rows once, `block_k` columns at a time, turns nibbles into bfloat16 in
registers and multiplies on the tensor cores with float32 accumulation. Even columns are the low
nibbles and odd columns the high ones, so the activations come split by parity and nothing is
interleaved. Rows of a tile are independent columns of the product, and one program owns each
output: no atomics, no split over K, the same order of additions for every row.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from dspark_jax.pallas_kernels import fp4, routing
from dspark_jax.pallas_kernels.expert import gated, maybe_quantise


class Blocks(NamedTuple):
    """Tile sizes of one regime. `block_k` counts logical columns."""

    tile: int
    block_n: int
    block_k: int
    warps: int
    stages: int


WEIGHT_SHIFT = 32  # compiled kernels compute with w * 2 ** -32 and x * 2 ** 32, see _unpack_ptx
# e8m0 byte (2 ** 33) up to which weights are right in compiled kernels; to 253 in interpreted ones
LARGEST_SCALE = 160

DECODE = Blocks(tile=8, block_n=32, block_k=256, warps=2, stages=4)
PREFILL = Blocks(tile=64, block_n=64, block_k=128, warps=4, stages=3)


def _unpack_plain(packed, scales):
    """uint8 [N, K/2] and uint8 scales, repeated to [N, K/2], to bfloat16 (even columns, odd
    columns), each [N, K/2]; exact.
    """
    doubled = jax.lax.bitcast_convert_type((scales.astype(jnp.int16) + 1) << 7, jnp.bfloat16)
    code = packed.astype(jnp.int16)
    return _half_e2m1(code & 15) * doubled, _half_e2m1(code >> 4) * doubled


def _half_e2m1(code):
    """int16 codes to half their value in bfloat16: from magnitude 2 on, a code is a float's
    exponent and first mantissa bit.
    """
    magnitude = code & 7
    bits = jnp.where(magnitude < 2, magnitude * 0x3E80, (magnitude << 6) + 0x3E80)
    return jax.lax.bitcast_convert_type((bits | ((code & 8) << 12)).astype(jnp.int16), jnp.bfloat16)


# Four bytes to four weights. $0,$1: two bfloat16 each; $2: the bytes, $3,$4: their scales, two
# bfloat16 each (the four bytes may come from different rows). The nibble to take is the upper one
# of its byte (after the shift, for the even columns). A byte is moved to the top of a half word;
# sign and magnitude then go to bfloat16's sign and to its lowest exponent and highest mantissa
# bits, which is the e2m1 value times 2^-126 (0.5 is a subnormal, which this instruction set keeps).
# Left to the compiler the same arithmetic takes several times the instructions, and the kernel is
# bound by them before it is by the memory.
_UNPACK_PTX = """{
.reg .b32 w, t<2>, m<2>;
shl.b32 w, $2, SHIFT;
prmt.b32 t0, w, 0, 0x1404;
prmt.b32 t1, w, 0, 0x3424;
shr.b32 m0, t0, 6;
shr.b32 m1, t1, 6;
and.b32 m0, m0, 0x01c001c0;
and.b32 m1, m1, 0x01c001c0;
lop3.b32 m0, t0, 0x80008000, m0, 0xea;
lop3.b32 m1, t1, 0x80008000, m1, 0xea;
mul.rn.bf16x2 $0, m0, $3;
mul.rn.bf16x2 $1, m1, $4;
}"""


def _unpack_ptx(packed, scales):
    """`_unpack_plain` in PTX, with weights 2 ** -WEIGHT_SHIFT times too small so that value and
    scale need one multiplication.

    Exact for weights down to 2 ** -100; scales above byte LARGEST_SCALE become infinite.
    """
    from jax.experimental.pallas import triton

    exponent = jnp.minimum(scales.astype(jnp.int16), LARGEST_SCALE + 1) + (126 - WEIGHT_SHIFT)
    scale = jax.lax.bitcast_convert_type(exponent << 7, jnp.bfloat16)
    result = [jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)]
    half = lambda shift: triton.elementwise_inline_asm(
        _UNPACK_PTX.replace("SHIFT", shift),
        args=[packed, scale],
        constraints="=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=result,
    )
    return half("4")[0], half("0")[0]


def _tile_weights(w_ref, s_ref, expert, first, k, blocks, interpret):
    """Column block k of rows first .. first + block_n of an expert, by parity: two bfloat16
    [block_n, block_k / 2].
    """
    half, groups = blocks.block_k // 2, blocks.block_k // fp4.BLOCK
    rows = pl.ds(first, blocks.block_n)
    packed = w_ref[expert, rows, pl.ds(k * half, half)]
    scales = s_ref[expert, rows, pl.ds(k * groups, groups)]
    scales = jnp.broadcast_to(scales[:, :, None], (*scales.shape, fp4.BLOCK // 2)).reshape(
        packed.shape
    )
    return (_unpack_plain if interpret else _unpack_ptx)(packed, scales)


def _products(x_ref, rows, w_ref, s_ref, expert, firsts, blocks, interpret):
    """w[expert, f : f + block_n] . x[rows]^T for every f in firsts: f32 [block_n, tile] each.
    x_ref: bfloat16 [2, T, K/2].
    """
    half = blocks.block_k // 2

    def step(k, accumulators):
        xs = [x_ref[parity, rows, pl.ds(k * half, half)] for parity in (0, 1)]
        return tuple(
            functools.reduce(
                _multiply_add,
                zip(_tile_weights(w_ref, s_ref, expert, first, k, blocks, interpret), xs),
                acc,
            )
            for first, acc in zip(firsts, accumulators)
        )

    zero = jnp.zeros((blocks.block_n, blocks.tile), jnp.float32)
    return jax.lax.fori_loop(0, w_ref.shape[2] // half, step, (zero,) * len(firsts))


def _multiply_add(acc, operands):
    w, x = operands
    return acc + jax.lax.dot_general(
        w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _gate_up_kernel(
    tile_expert, n_tiles, rows, route_weight, x, w13, s13, out, *, blocks, interpret, swiglu_limit
):
    first, tile = pl.program_id(0) * blocks.block_n, pl.program_id(1)

    @pl.when(tile < n_tiles[0])
    def _():
        expert, row = tile_expert[tile], rows[tile, :]
        gate, up = _products(
            x, row, w13, s13, expert, (first, first + w13.shape[1] // 2), blocks, interpret
        )
        hidden = gated(gate, up, route_weight[tile, :][None, :], swiglu_limit)
        slots = tile * blocks.tile + jnp.arange(blocks.tile)[None, :]
        column = (first + jnp.arange(blocks.block_n))[:, None]
        if out.dtype == jnp.float32:
            out[slots, column] = hidden
        else:
            out[column % 2, slots, column // 2] = _bf16(hidden, interpret)


def _down_kernel(tile_expert, n_tiles, x, w2, s2, out, *, blocks, interpret):
    first, tile = pl.program_id(0) * blocks.block_n, pl.program_id(1)

    @pl.when(tile < n_tiles[0])
    def _():
        row = tile * blocks.tile + jnp.arange(blocks.tile)
        (down,) = _products(x, row, w2, s2, tile_expert[tile], (first,), blocks, interpret)
        out[pl.ds(tile * blocks.tile, blocks.tile), pl.ds(first, blocks.block_n)] = down.T


def _call(kernel, blocks, columns, rows, out_shape, operands, interpret):
    """Runs `kernel` over (column blocks, tiles of rows), every operand whole in device memory."""
    extra = {"interpret": True} if interpret else {"compiler_params": _compiler_params(blocks)}
    call = pl.pallas_call(
        functools.partial(kernel, blocks=blocks, interpret=interpret),
        grid=(columns // blocks.block_n, rows // blocks.tile),
        out_shape=out_shape,
        **extra,
    )
    return call(*operands)


def _compiler_params(blocks):
    from jax.experimental.pallas import triton  # imported late: it is the one deprecated piece

    return triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)


def _bf16(x, interpret):
    """bfloat16, times the factor that the weights lack."""
    return x.astype(jnp.bfloat16) * jnp.bfloat16(1 if interpret else 2.0**WEIGHT_SHIFT)


def _by_parity(x, interpret):
    """[R, K] to [2, R, K/2]: `_bf16` of the even columns, of the odd columns."""
    return jnp.moveaxis(_bf16(x, interpret).reshape(x.shape[0], -1, 2), -1, 0)


def _fit(blocks: Blocks, width: int, inner: int) -> Blocks:
    """The largest power-of-two blocks up to `blocks` that divide an expert of small or odd size."""
    largest = lambda most, *sizes: max(
        b for b in (16, 32, 64, 128, 256, 512, 1024) if b <= most and all(s % b == 0 for s in sizes)
    )
    return blocks._replace(
        block_n=largest(blocks.block_n, width, inner), block_k=largest(blocks.block_k, width, inner)
    )


class Work(NamedTuple):
    """What the kernels read besides the experts."""

    tile_expert: jax.Array  # [tiles] int32
    n_tiles: jax.Array  # [1] int32
    row_of_slot: jax.Array  # [tiles, tile] int32
    slot_weight: jax.Array  # [tiles, tile] f32
    x: jax.Array  # bfloat16 [2, T, D/2] by parity


def prepare(
    x, ids, weights, mask, here, activation_quant, blocks, interpret=False
) -> tuple[Work, routing.Schedule]:
    """Sorts the pairs into tiles; arguments as `moe_fp4`."""
    plan = routing.schedule(ids, mask, here, blocks.tile)
    row_of_slot = plan.pair_of_slot // ids.shape[1]
    slot_weight = weights.reshape(-1).astype(jnp.float32)[plan.pair_of_slot]
    x = _by_parity(maybe_quantise(x, activation_quant), interpret)
    return Work(plan.tile_expert, plan.n_tiles.reshape(1), row_of_slot, slot_weight, x), plan


def run_tiles(work: Work, experts, *, swiglu_limit, activation_quant, blocks, interpret=False):
    """The two kernels: f32 [tiles * tile, D], meaningless in unused slots."""
    width, inner, slots = experts.w2.shape[1], experts.w2.shape[2] * 2, work.row_of_slot.size
    gate_up = functools.partial(_gate_up_kernel, swiglu_limit=swiglu_limit)
    by_parity = jax.ShapeDtypeStruct((2, slots, inner // 2), jnp.bfloat16)
    whole = lambda columns: jax.ShapeDtypeStruct((slots, columns), jnp.float32)
    hidden = _call(
        gate_up,
        blocks,
        inner,
        slots,
        whole(inner) if activation_quant else by_parity,
        (*work, experts.w13, experts.s13),
        interpret,
    )
    if activation_quant:
        hidden = _by_parity(maybe_quantise(hidden, True), interpret)
    return _call(
        _down_kernel,
        blocks,
        width,
        slots,
        whole(width),
        (*work[:2], hidden, experts.w2, experts.s2),
        interpret,
    )


def blocks_for(regime: str, experts, blocks: Blocks | None = None) -> Blocks:
    """The regime's tile sizes, or those given, reduced to what divides the experts."""
    return _fit(
        blocks or (PREFILL if regime == "prefill" else DECODE),
        experts.w2.shape[1],
        experts.w2.shape[2] * 2,
    )


def moe_fp4_gpu(
    x,
    ids,
    weights,
    mask,
    experts,
    *,
    swiglu_limit,
    here,
    activation_quant,
    regime,
    blocks: Blocks | None = None,
    interpret=False,
):
    """See `pallas_kernels.moe.moe_fp4`. Experts packed, D and F multiples of 32. Activations are
    rounded to bfloat16 before each product.

    blocks: overrides the regime's tile sizes, for tuning. interpret: run on any platform, for
      tests.
    """
    blocks = blocks_for(regime, experts, blocks)
    work, plan = prepare(x, ids, weights, mask, here, activation_quant, blocks, interpret)
    out = run_tiles(
        work,
        experts,
        swiglu_limit=swiglu_limit,
        activation_quant=activation_quant,
        blocks=blocks,
        interpret=interpret,
    )
    return routing.sum_routes(
        routing.from_tiles(out.reshape(-1, blocks.tile, out.shape[-1]), plan), ids.shape[0]
    )
