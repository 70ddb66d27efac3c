"""The routed experts of one MoE layer (spec section 8, without the shared expert), one op over
several backends.

    y[t]  sum over routes a, in route order, of
              w2_e . QA( weights[t, a] * silu(min(g, c)) * clip(u, -c, c) )
    g, u  w1_e . QA(x[t]), w3_e . QA(x[t])
    e, c  ids[t, a], swiglu_limit; QA only if activation_quant

Promised by every backend: within a regime a row has the same bits whatever the other rows are and
however many there are; a row with mask False does no work and may hold NaN; experts that are not
held here contribute exactly zero.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from dspark_jax.pallas_kernels import pallas_mosaic, pallas_triton
from dspark_jax.pallas_kernels.pallas_mosaic import moe_fp4_tpu
from dspark_jax.pallas_kernels.pallas_triton import moe_fp4_gpu
from dspark_jax.pallas_kernels.reference import moe_fp4_reference
from dspark_jax.pallas_kernels.routing import Held
from dspark_jax.pallas_kernels.xla import ColumnExperts, moe_fp4_xla


class Experts(NamedTuple):
    """The E experts held here. Packed FP4 with its scales, or dequantised floats with s13 = s2 =
    None.

    Dequantised narrow ones may also be held columns first, as `ColumnExperts`, for backend "xla".
    """

    w13: jax.Array  # uint8 [E, 2F, D/2] or float [E, 2F, D]; gate (w1) rows first, then up (w3)
    s13: jax.Array | None  # uint8 [E, 2F, D/32], e8m0; bytes up to largest_scale(platform)
    w2: jax.Array  # uint8 [E, D, F/2] or float [E, D, F]
    s2: jax.Array | None  # uint8 [E, D, F/32]


class Backend(NamedTuple):
    """One way to compute the op.

    run: takes (x, ids, weights, mask, experts, *, swiglu_limit, here, activation_quant, regime) as
      `moe_fp4` does, `here` a routing.Held; keeps the promises above.
    multiple: D and F of packed experts must be multiples of it for `default_backend` to choose it.
    largest_scale: the e8m0 byte up to which packed experts are right.
    packed_only: refuses dequantised experts.
    """

    run: Callable[..., jax.Array]
    multiple: int = 1
    largest_scale: int = 254
    packed_only: bool = False


# A new backend:
# 1. a module with a function such as Backend.run, scheduled by `routing` (or any way that keeps the
#    promises above);
# 2. an entry in BACKENDS, and one in KERNELS where it is what a platform uses by itself;
# 3. a line in the tests' table (tests/kernels/cases.py): the matrix against the oracle, the equal
#    bits and the routing are then tested for it too.
BACKENDS = {
    "reference": Backend(moe_fp4_reference),
    "xla": Backend(moe_fp4_xla),
    # On a TPU whole lanes, 128 packed bytes; on a GPU whole scales.
    "pallas_tpu": Backend(moe_fp4_tpu, 256, pallas_mosaic.LARGEST_SCALE, packed_only=True),
    "pallas_gpu": Backend(moe_fp4_gpu, 32, pallas_triton.LARGEST_SCALE, packed_only=True),
}
# The same kernels on any platform, slowly.
BACKENDS |= {
    f"{name}_interpret": BACKENDS[name]._replace(
        run=functools.partial(BACKENDS[name].run, interpret=True)
    )
    for name in ("pallas_tpu", "pallas_gpu")
}
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # platform -> its own kernel; others use "xla"


def default_backend(experts: Experts | ColumnExperts, platform: str | None = None) -> str:
    """The one place where a platform chooses: its kernel for packed experts of a size it can tile,
    else plain XLA.

    platform: "cpu", "gpu" or "tpu"; None: this process's own. It differs where programs are
      compiled for a machine not at hand.
    """
    name = KERNELS.get(platform or jax.default_backend(), "xla")
    if experts.s13 is None:
        return "xla"
    width, inner = experts.w2.shape[1], experts.w13.shape[1] // 2
    multiple = BACKENDS[name].multiple
    return name if width % multiple == 0 and inner % multiple == 0 else "xla"


def largest_scale(platform: str) -> int:
    """The largest e8m0 byte of packed experts that a platform's kernel computes with; on "cpu" 254,
    the largest there is.
    """
    return BACKENDS[KERNELS.get(platform, "xla")].largest_scale


def moe_fp4(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    mask: jax.Array,
    experts: Experts | ColumnExperts,
    *,
    swiglu_limit: float,
    first_expert: int | jax.Array = 0,
    held: int | None = None,
    offset: int | jax.Array = 0,
    activation_quant: bool = False,
    regime: str = "decode",
    backend: str | None = None,
) -> jax.Array:
    """Routed experts of T rows.

    x: [T, D] in the compute dtype. ids: [T, A] int32, global expert ids. weights: [T, A] float32
    route weights. mask: [T] bool, rows that count.
    experts: those with global ids first_expert .. first_expert + held - 1, in rows offset .. offset
    + held - 1 of the tables; these may hold more (the experts of every layer of a stack, say),
    which costs nothing. held: None for all of E.
    regime: "decode" (few rows; verification too) or "prefill".
    backend: a key of BACKENDS, None for the platform's own. Returns float32 [T, D]; rows that do
      not count are zero.

    Differentiable in x, weights and dequantised experts through backend "xla" with regime
      "prefill".
    """
    if regime not in ("decode", "prefill"):
        raise ValueError(f"regime {regime!r}: choose 'decode' or 'prefill'")
    name = backend or default_backend(experts)
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if BACKENDS[name].packed_only and experts.s13 is None:
        raise ValueError(
            f"backend {name!r} takes packed FP4 experts; these are dequantised (use 'xla')"
        )
    return BACKENDS[name].run(
        x,
        ids,
        weights,
        mask,
        experts,
        swiglu_limit=swiglu_limit,
        here=Held(first_expert, held or experts.w2.shape[0], offset),
        activation_quant=activation_quant,
        regime=regime,
    )
