"""FP4 weights: e2m1 codes two a byte, with one e8m0 scale for 32 consecutive columns (spec section
3).

    code    4 bits: sign, two exponent bits, one mantissa bit; codes 0..7 are
            0, 0.5, 1, 1.5, 2, 3, 4, 6
    byte j  column 2j in the low nibble, column 2j+1 in the high nibble
    scale   byte b means 2 ** (b - 127); 0 is 2 ** -127 (not zero), 255 is NaN and refused

    W[i, j] = e2m1(code[i, j]) * 2 ** (scale[i, j // 32] - 127)

Every product is exact in float32 and, because e2m1 needs two significant bits, in bfloat16. A
product below 2 ** -126 is flushed to zero by the device functions, as the arithmetic that follows
would flush it anyway. The `np_*` functions are the NumPy twins: they run on the host, keep
subnormals and are what the tests compare with.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.pallas_kernels.activation import E2M1_MAX, power_of_two_scale

BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Between neighbouring magnitudes; a tie goes to the even code.
_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def pack(codes: jax.Array) -> jax.Array:
    """Codes uint8 [..., K] in 0..15 to bytes uint8 [..., K / 2]."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: jax.Array) -> jax.Array:
    """Bytes uint8 [..., K / 2] to codes uint8 [..., K] in 0..15."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """Codes (any integer dtype; the lowest four bits count) to float32 values, by integer
    arithmetic only: without a table, so that every backend fuses it. From magnitude 2 on, a code is
    a float's lowest exponent bits and highest mantissa bit.
    """
    code = codes.astype(jnp.int32)
    magnitude = code & 7
    bits = jnp.where(magnitude < 2, -magnitude & 0x3F000000, (magnitude << 22) + 0x3F000000)
    return jax.lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)


def decode_e8m0(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale bytes to two float32 factors, the scale as their product: multiply by one, then by the
    other.

    No single factor does for every byte 0..254: byte 0 itself is subnormal, which arithmetic
    flushes to zero, and twice byte 254 is infinite. Both factors are at most 1 or both at least 1,
    so that nothing is lost between them.
    """
    byte = scales.astype(jnp.int32)
    first = byte >> 1
    power = lambda exponent: jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    return power(first - 63), power(byte - first - 64)


def dequantise(packed: jax.Array, scales: jax.Array, dtype=jnp.float32) -> jax.Array:
    """uint8 [..., N, K / 2] and uint8 [..., N, K / 32] to `dtype` [..., N, K]; exact in float32 and
    bfloat16.
    """
    values = decode_e2m1(unpack(packed))
    first, second = decode_e8m0(scales[..., None])
    blocks = values.reshape(*scales.shape, BLOCK) * first * second
    return blocks.reshape(values.shape).astype(dtype)


def quantise(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Floats [..., K], K a multiple of 32, to (packed uint8 [..., K / 2], scales uint8 [..., K /
    32]).

    The scale is the smallest power of two with amax / scale <= 6, values round to the nearest code,
    ties to the even one.
    """
    blocks = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = power_of_two_scale(jnp.maximum(amax, E2M1_MAX * 2.0**-126), E2M1_MAX)
    magnitude = jnp.abs(blocks) / scale
    code = sum(
        (magnitude > t if i % 2 == 0 else magnitude >= t).astype(jnp.uint8)
        for i, t in enumerate(_THRESHOLDS)
    )
    code = code | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
    exponent = (jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
    return pack(code.reshape(weights.shape)), exponent[..., 0]


def check_scales(scales: np.ndarray, name: str = "scale") -> None:
    """Refuses e8m0 NaN. scales: uint8 on the host."""
    if (bad := np.argwhere(np.asarray(scales) == 255)).size:
        raise ValueError(
            f"{name}: e8m0 byte 255 (NaN) at {tuple(map(int, bad[0]))}; the file is damaged or "
            "its scales are not e8m0"
        )


def np_unpack(packed: np.ndarray) -> np.ndarray:
    """Twin of `unpack`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def np_dequantise(packed: np.ndarray, scales: np.ndarray, dtype=np.float32) -> np.ndarray:
    """Twin of `dequantise`, exact down to the subnormals of `dtype`; refuses 255."""
    check_scales(scales)
    values = E2M1[np_unpack(packed)].astype(dtype).reshape(*scales.shape, BLOCK)
    return np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(
        *packed.shape[:-1], -1
    )


def np_quantise(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twin of `quantise`, written with float64 logarithms and distances instead of bits and
    thresholds.
    """
    blocks = np.asarray(weights, np.float64).reshape(*weights.shape[:-1], -1, BLOCK)
    amax = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), E2M1_MAX * 2.0**-126)
    exponent = np.ceil(np.log2(amax / E2M1_MAX))
    distance = np.abs(np.abs(blocks / 2.0**exponent)[..., None] - E2M1[:8])
    nearest = distance.min(axis=-1, keepdims=True) == distance
    # Of two equally near codes the even one.
    even_first = nearest * np.where(np.arange(8) % 2 == 0, 2, 1)
    code = even_first.argmax(axis=-1).astype(np.uint8) | (np.signbit(blocks).astype(np.uint8) << 3)
    pairs = code.reshape(*weights.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponent[..., 0] + 127).astype(np.uint8)
