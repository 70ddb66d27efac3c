"""The routed experts of one MoE layer (spec section 8, without the shared expert), one op over
several backends.

    y[t] = sum over routes a, in route order, of  w2_e . QA( weights[t, a] * silu(min(g, c)) * clip(u, -c, c) ),
           g, u = w1_e . QA(x[t]), w3_e . QA(x[t]),  e = ids[t, a],  c = swiglu_limit,  QA only if activation_quant

Promised by every backend: within a regime a row has the same bits whatever the other rows are and
however many there are; a row with mask False does no work and may hold NaN; experts that are not
held here contribute exactly zero.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.pallas_kernels import pallas_mosaic, pallas_triton
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


BACKENDS = {
    "reference": moe_fp4_reference,
    "xla": moe_fp4_xla,
    "pallas_tpu": pallas_mosaic.moe_fp4_tpu,
    "pallas_gpu": pallas_triton.moe_fp4_gpu,
    "pallas_tpu_interpret": functools.partial(
        pallas_mosaic.moe_fp4_tpu, interpret=True
    ),  # the same kernels on any platform, slowly
    "pallas_gpu_interpret": functools.partial(pallas_triton.moe_fp4_gpu, interpret=True),
}
# What a packed column must be a multiple of: whole lanes of packed bytes on a TPU, whole scales in
# the smallest block on a GPU.
_KERNELS = {"tpu": ("pallas_tpu", 256), "gpu": ("pallas_gpu", 32)}
_LARGEST_SCALES = {"tpu": pallas_mosaic.LARGEST_SCALE, "gpu": pallas_triton.LARGEST_SCALE}


def default_backend(experts: Experts | ColumnExperts, platform: str | None = None) -> str:
    """The one place where a platform chooses: its kernel for packed experts of a size it can tile,
    else plain XLA.

    platform: "cpu", "gpu" or "tpu"; None: this process's own. It differs where programs are
      compiled for a machine not at hand.
    """
    name, multiple = _KERNELS.get(platform or jax.default_backend(), ("xla", 1))
    if experts.s13 is None:
        return "xla"
    fits = experts.w2.shape[1] % multiple == 0 and experts.w13.shape[1] // 2 % multiple == 0
    return name if fits else "xla"


def largest_scale(platform: str) -> int:
    """The largest e8m0 byte of packed experts that a platform's kernel computes with; 254, of all
    there are, on "cpu".
    """
    return _LARGEST_SCALES.get(platform, 254)


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
    if name.startswith("pallas") and experts.s13 is None:
        raise ValueError(
            f"backend {name!r} takes packed FP4 experts; these are dequantised (use 'xla')"
        )
    if name == "reference" and isinstance(experts, ColumnExperts):
        experts = Experts(
            jnp.swapaxes(experts.w13, 1, 2), None, jnp.swapaxes(experts.w2, 1, 2), None
        )
    return BACKENDS[name](
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
