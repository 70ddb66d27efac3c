"""Simulated activation quantisation (spec section 3: QA and QF), with straight-through gradients.

The official kernels quantise activations on the fly; here a value is replaced by its quantised and dequantised self.

    act_quant(x, block)    e4m3 with one power-of-two scale for `block` consecutive channels of the last axis (QA)
    fp4_act_quant(x)       e2m1 with one power-of-two scale for 32 consecutive channels of the last axis (QF)

Both keep shape and dtype, compute in float32 and pass gradients through unchanged.
"""
import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def power_of_two_scale(amax: jax.Array, largest: float) -> jax.Array:
    """2 ** ceil(log2(amax / largest)) in float32, by exponent arithmetic on the bits so that no rounding of log2 matters."""
    bits = jax.lax.bitcast_convert_type(amax * jnp.float32(1.0 / largest), jnp.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def round_to_e2m1(x: jax.Array) -> jax.Array:
    """float32 values within [-6, 6] to the nearest e2m1 value, ties to the even code."""
    a = jnp.abs(x)
    step = jnp.where(a < 2.0, 0.5, jnp.where(a < 4.0, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(a / step) * step


def _in_blocks(x: jax.Array, block: int, quantise) -> jax.Array:
    width = x.shape[-1]
    pad = -width % block
    values = x.astype(jnp.float32)
    if pad:
        values = jnp.pad(values, [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    blocks = values.reshape(*x.shape[:-1], -1, block)
    out = quantise(blocks, jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)).reshape(values.shape)
    return out[..., :width].astype(x.dtype)


def _e4m3(blocks, amax):
    scale = power_of_two_scale(jnp.maximum(amax, 1e-4), E4M3_MAX)
    scaled = jnp.clip(blocks / scale, -E4M3_MAX, E4M3_MAX)
    return scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def _e2m1(blocks, amax):
    scale = power_of_two_scale(jnp.maximum(amax, 6.0 * 2.0**-126), E2M1_MAX)
    return round_to_e2m1(jnp.clip(blocks / scale, -E2M1_MAX, E2M1_MAX)) * scale


@jax.custom_jvp
def _qa128(x):
    return _in_blocks(x, 128, _e4m3)


@jax.custom_jvp
def _qa64(x):
    return _in_blocks(x, 64, _e4m3)


@jax.custom_jvp
def fp4_act_quant(x: jax.Array) -> jax.Array:
    """QF: e2m1 in blocks of 32 channels. x [..., width]; a last block may be shorter."""
    return _in_blocks(x, 32, _e2m1)


for _f in (_qa128, _qa64, fp4_act_quant):
    # Straight through: a rounding has derivative zero almost everywhere, which would stop all training.
    _f.defjvp(lambda primals, tangents, _f=_f: (_f(primals[0]), tangents[0]))


def act_quant(x: jax.Array, block: int) -> jax.Array:
    """QA: e4m3 in blocks of 128 (inputs of linears) or 64 (key/value channels). x [..., width]; a last block may be shorter."""
    return {128: _qa128, 64: _qa64}[block](x)
