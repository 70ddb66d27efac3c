"""Simulated activation quantisation (spec section 3: QA and QF), with straight-through gradients.

The official kernels quantise activations on the fly; here a value is replaced by its quantised and
dequantised self.

    act_quant(x, block)    QA: e4m3, one power-of-two scale for `block` consecutive channels
    fp4_act_quant(x)       QF: e2m1, one power-of-two scale for 32 consecutive channels

Channels are the last axis. Both keep shape and dtype, compute in float32 and pass gradients through
unchanged.
"""

import functools

import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def power_of_two_scale(amax: jax.Array, largest: float) -> jax.Array:
    """2 ** ceil(log2(amax / largest)) in float32, by exponent arithmetic on the bits so that no
    rounding of log2 matters.
    """
    bits = jax.lax.bitcast_convert_type(amax * jnp.float32(1.0 / largest), jnp.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def round_to_e2m1(x: jax.Array) -> jax.Array:
    """float32 values within [-6, 6] to the nearest e2m1 value, ties to the even code."""
    a = jnp.abs(x)
    step = jnp.where(a < 2.0, 0.5, jnp.where(a < 4.0, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(a / step) * step


def round_to_e4m3(x: jax.Array) -> jax.Array:
    """float32 values within [-448, 448] to the nearest e4m3 value, ties to even.

    Arithmetic instead of a conversion to float8 and back: XLA may drop such a pair as excess
    precision (seen on a GPU).
    """
    biased = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
    exponent = jnp.maximum(biased, 121) - 3  # below 2 ** -6 all steps are equal
    step = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return jnp.round(x * inverse) * step


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
    return round_to_e4m3(scaled) * scale


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
    # Straight through: a rounding has derivative zero almost everywhere, which would stop all
    # training.
    _f.defjvp(lambda primals, tangents, _f=_f: (_f(primals[0]), tangents[0]))


def act_quant(x: jax.Array, block: int) -> jax.Array:
    """QA: e4m3 in blocks of 128 (inputs of linears) or 64 (key/value channels). x [..., width]; a
    last block may be shorter.
    """
    return {128: _qa128, 64: _qa64}[block](x)


def act_quant_of_part(x: jax.Array, block: int, axis_name: str) -> jax.Array:
    """QA of channels that are cut over the devices of a mesh axis: x [..., k] is this device's
    part, under `jax.shard_map`.

    Blocks count from the first channel of all. One that lies on several devices takes the largest
    magnitude of them all.
    """
    devices = jax.lax.axis_size(axis_name)
    if devices == 1 or x.shape[-1] % block == 0:
        return act_quant(x, block)
    return _qa_cut(x, block, axis_name)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _qa_cut(x, block, axis_name):
    width, blocks = x.shape[-1], -(-x.shape[-1] * jax.lax.axis_size(axis_name) // block)
    block_of = (jax.lax.axis_index(axis_name) * width + jnp.arange(width)) // block
    mine = block_of == jnp.arange(blocks)[:, None]
    values = x.astype(jnp.float32)
    largest = jnp.max(jnp.where(mine, jnp.abs(values)[..., None, :], 0), axis=-1)
    return _e4m3(values, jax.lax.pmax(largest, axis_name)[..., block_of]).astype(x.dtype)


_qa_cut.defjvp(
    lambda block, axis_name, primals, tangents: (_qa_cut(primals[0], block, axis_name), tangents[0])
)
