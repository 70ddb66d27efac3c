"""Shared by the kernel tests: the calls of the matrix, and how a backend is run."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.pallas_kernels import ColumnExperts, Experts, fp4, moe_fp4
from dspark_jax.runtime.backend import compiler_options

from helpers.quick import quick_options

LIMIT = 3.0  # low enough that both clamps act on these inputs


def dequantised(experts: Experts) -> Experts:
    return Experts(
        fp4.np_dequantise(experts.w13, experts.s13),
        None,
        fp4.np_dequantise(experts.w2, experts.s2),
        None,
    )


def columns_first(experts: Experts) -> ColumnExperts:
    w13, _, w2, _ = dequantised(experts)
    return ColumnExperts(*(np.ascontiguousarray(np.swapaxes(w, 1, 2)) for w in (w13, w2)))


# name -> (backend, how experts are held, rounds activations to bfloat16)
BACKENDS = {
    "reference": ("reference", None, False),
    "xla": ("xla", dequantised, False),
    "xla-columns": ("xla", columns_first, False),
    "xla-packed": ("xla", None, False),
    "tpu": ("pallas_tpu_interpret", None, True),
    "gpu": ("pallas_gpu_interpret", None, True),
}


class Call(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    experts: Experts  # packed, NumPy
    first_expert: int


@functools.cache
def program(name: str, regime: str, activation_quant: bool, first_expert: int):
    backend, _, _ = BACKENDS[name]
    options = dict(
        swiglu_limit=LIMIT,
        first_expert=first_expert,
        activation_quant=activation_quant,
        regime=regime,
        backend=backend,
    )
    return jax.jit(functools.partial(moe_fp4, **options), compiler_options=compiler(name))


def compiler(name: str) -> dict | None:
    """Compiler options of a backend; nobody runs an interpreted kernel for speed."""
    return quick_options() if BACKENDS[name][0].endswith("interpret") else compiler_options()


def run(name: str, call: Call, *, regime="decode", activation_quant=False) -> np.ndarray:
    held = BACKENDS[name][1]
    experts = held(call.experts) if held else call.experts
    function = program(name, regime, activation_quant, call.first_expert)
    return np.asarray(function(call.x, call.ids, call.weights, call.mask, experts))


def random_experts(rng, experts: int, width: int, inner: int) -> Experts:
    """Random codes; scales within 2 ** -9 .. 2 ** -3, and the smallest there is for some blocks."""
    packed = lambda *shape: rng.integers(0, 256, shape, np.uint8)
    scales = lambda *shape: rng.integers(118, 125, shape).astype(np.uint8)
    s13 = scales(experts, 2 * inner, width // 32)
    s13[:, ::5, 0] = 0
    return Experts(
        packed(experts, 2 * inner, width // 2),
        s13,
        packed(experts, width, inner // 2),
        scales(experts, width, inner // 32),
    )


def make_call(
    seed: int,
    ids: np.ndarray,
    *,
    held: int,
    width: int,
    inner: int,
    first_expert: int = 0,
    padded=(),
) -> Call:
    """A call with bfloat16-exact float32 inputs; rows in `padded` do not count: they are NaN, and
    their ids mean nothing.
    """
    rng = np.random.default_rng(seed)
    rows = len(ids)
    x = rng.standard_normal((rows, width)).astype(jnp.bfloat16).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    mask, ids = np.ones(rows, bool), ids.astype(np.int32)
    for row in padded:
        mask[row], x[row], weights[row], ids[row] = (
            False,
            np.nan,
            np.nan,
            -(2**31) if row % 2 else 2**31 - 1,
        )
    return Call(x, ids, weights, mask, random_experts(rng, held, width, inner), first_expert)


def routes(seed: int, rows: int, active: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:active] for _ in range(rows)])


def counted(*counts: int) -> np.ndarray:
    """One route a row: expert e gets counts[e] rows, in a shuffled order."""
    ids = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(0).permutation(ids)[:, None]


def matrix() -> dict[str, Call]:
    small = dict(held=8, width=128, inner=128)
    return {
        "one row": make_call(1, routes(1, 1, 2, 8), **small),
        "tile edges": make_call(2, counted(0, 1, 7, 8, 9, 15, 16, 17), padded=(0, 40, 72), **small),
        "prefill tile edges": make_call(3, counted(63, 64, 65, 0, 1), held=5, width=64, inner=32),
        "all on one expert": make_call(4, np.full((20, 1), 5), padded=(3,), **small),
        "foreign experts": make_call(
            5, routes(5, 12, 4, 16), held=4, width=64, inner=96, first_expert=6, padded=(11,)
        ),
        "no power of two": make_call(6, routes(6, 9, 3, 5), held=5, width=160, inner=96),
        "wide": make_call(7, routes(7, 4, 2, 3), held=3, width=768, inner=256, padded=(1,)),
        "real width": make_call(9, routes(9, 3, 2, 2), held=2, width=4096, inner=128),
        "wide, no multiple of the lanes": make_call(
            8, routes(8, 3, 2, 3), held=3, width=544, inner=64
        ),
    }
