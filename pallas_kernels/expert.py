"""What lies between the two GEMMs of an expert (spec section 8), shared by every backend."""

import jax
import jax.numpy as jnp

from dspark_jax.pallas_kernels.activation import act_quant

QUANT_BLOCK = 128


def gated(gate: jax.Array, up: jax.Array, weight: jax.Array, swiglu_limit: float) -> jax.Array:
    """The two branches f32 [..., F] and the route weight, broadcast against them, to the second
    GEMM's input f32 [..., F].

    The gate is clamped from above only; the weight multiplies here, before the second quantisation.
    """
    gate = jnp.minimum(gate, swiglu_limit)
    up = jnp.clip(up, -swiglu_limit, swiglu_limit)
    return weight * (gate * jax.nn.sigmoid(gate) * up)


def maybe_quantise(x: jax.Array, activation_quant: bool) -> jax.Array:
    """QA(x; 128) or x. Same shape and dtype."""
    return act_quant(x, QUANT_BLOCK) if activation_quant else x
