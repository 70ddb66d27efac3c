"""The routed experts written as the mathematics reads: dequantise the experts of every pair and
einsum.

Slow and large; for comparison. Runs in float64 if `x` is float64 (with jax_enable_x64), else in
float32.
"""

import jax
import jax.numpy as jnp

from dspark_jax.pallas_kernels import fp4
from dspark_jax.pallas_kernels.expert import gated, maybe_quantise
from dspark_jax.pallas_kernels.routing import sum_routes
from dspark_jax.pallas_kernels.xla import ColumnExperts


def moe_fp4_reference(
    x, ids, weights, mask, experts, *, swiglu_limit, here, activation_quant, regime
):
    """See `pallas_kernels.moe.moe_fp4`. Gathers 3 * F * D floats for each of the T * A pairs."""
    del regime  # one way to compute both
    local = ids - here.first
    held = mask[:, None] & (local >= 0) & (local < here.count)
    local = jnp.where(held, local, 0) + here.offset
    if isinstance(experts, ColumnExperts):
        w13, w2 = (jnp.swapaxes(w[local], -1, -2) for w in experts)
    elif experts.s13 is None:
        w13, w2 = experts.w13[local], experts.w2[local]
    else:
        w13 = fp4.dequantise(experts.w13[local], experts.s13[local])
        w2 = fp4.dequantise(experts.w2[local], experts.s2[local])
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x = maybe_quantise(jnp.where(mask[:, None], x, 0).astype(dtype), activation_quant)
    dot = lambda spec, a, b: jnp.einsum(
        spec, a, b.astype(dtype), precision=jax.lax.Precision.HIGHEST
    )
    hidden = gated(
        *jnp.split(dot("td,tafd->taf", x, w13), 2, axis=-1),
        jnp.where(held, weights, 0)[..., None].astype(dtype),
        swiglu_limit,
    )
    out = dot("taf,tadf->tad", maybe_quantise(hidden, activation_quant), w2)
    return sum_routes(
        jnp.where(held[..., None], out, 0).reshape(-1, out.shape[-1]), x.shape[0]
    ).astype(jnp.float32)
