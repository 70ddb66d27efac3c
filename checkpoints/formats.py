"""Number formats of the official checkpoints on the host, in NumPy (spec section 3).

    e8m0  scale byte b means 2 ** (b - 127): 0 is 2 ** -127 (a subnormal float32, exact here),
          255 is NaN, refused by the reader
    fp8   e4m3 values, one e8m0 scale for a block of 128 x 128, edge blocks partial
    fp4   e2m1 codes, two a byte, column 2j in the low nibble; one e8m0 scale for 32 consecutive
          columns

Dequantising is exact in float32. Quantising picks the smallest power of two with amax / scale <=
the format's maximum and rounds to nearest, ties to even; quantising what was dequantised gives the
same values again.
"""

import ml_dtypes
import numpy as np

FP8_BLOCK = 128
FP4_BLOCK = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_NAN = 255
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# [256, 2]: both columns of a byte.
_E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)
_E2M1_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbouring magnitudes


def dequantise_fp8(
    weight: np.ndarray, scale: np.ndarray, first_row: int = 0, first_column: int = 0
) -> np.ndarray:
    """e4m3 bytes uint8 [N, K] with the e8m0 bytes uint8 of the blocks they lie in, to float32 [N,
    K].

    `first_row`, `first_column` say where the values begin inside the first block, when they are a
    slice of a larger tensor.
    """
    rows, columns = weight.shape
    out = E4M3[weight]
    factors = np.repeat(E8M0[scale], FP8_BLOCK, axis=1)[:, first_column : first_column + columns]
    start = 0
    for block in range(scale.shape[0]):
        stop = min((block + 1) * FP8_BLOCK - first_row, rows)
        out[start:stop] *= factors[block]
        start = stop
    return out


def dequantise_fp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Bytes uint8 [N, K / 2] and scale bytes uint8 [N, K / 32] to float32 [N, K]."""
    values = _E2M1_PAIRS[packed].reshape(*scale.shape, FP4_BLOCK)
    values *= E8M0[scale][..., None]
    return values.reshape(packed.shape[0], -1)


def quantise_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Floats [N, K] to (e4m3 bytes uint8 [N, K], e8m0 bytes uint8 [ceil(N / 128),
    ceil(K / 128)]).
    """
    values = np.asarray(values, np.float32)
    rows, columns = values.shape
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    codes, scale = np.empty(values.shape, np.uint8), np.empty(grid, np.uint8)
    for i in range(grid[0]):
        band = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
        column_max = np.abs(values[band]).max(axis=0)
        column_max = np.pad(column_max, (0, grid[1] * FP8_BLOCK - columns)).reshape(
            grid[1], FP8_BLOCK
        )
        scale[i] = _scale_bytes(column_max.max(axis=1), E4M3_MAX)
        scaled = values[band] / np.repeat(E8M0[scale[i]], FP8_BLOCK)[:columns]
        codes[band] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, scale


def quantise_fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Floats [N, K], K a multiple of 32, to (bytes uint8 [N, K / 2], e8m0 bytes uint8
    [N, K / 32]).
    """
    rows, columns = values.shape
    blocks = np.asarray(values, np.float32).reshape(rows, columns // FP4_BLOCK, FP4_BLOCK)
    scale = _scale_bytes(np.abs(blocks).max(axis=-1), E2M1_MAX)
    magnitude = np.abs(blocks) / E8M0[scale][..., None]
    code = np.zeros(blocks.shape, np.uint8)
    for i, step in enumerate(_E2M1_STEPS):
        code += magnitude > step if i % 2 == 0 else magnitude >= step  # a tie goes to the even code
    code |= np.signbit(blocks).astype(np.uint8) << 3
    code = code.reshape(rows, columns)
    return code[:, 0::2] | code[:, 1::2] << 4, scale


def _scale_bytes(amax: np.ndarray, largest: float) -> np.ndarray:
    """e8m0 bytes of 2 ** ceil(log2(amax * fl32(1 / largest))), read off the float32 bits; at least
    2 ** -126 (all-zero block).
    """
    floor = np.float32(largest * 2.0**-126)
    ratio = np.maximum(amax.astype(np.float32), floor) * np.float32(1.0 / largest)
    bits = ratio.view(np.uint32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return np.maximum(exponent, 1).astype(np.uint8)
