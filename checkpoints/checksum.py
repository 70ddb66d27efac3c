"""A 64-bit checksum of an array that can be added up from the checksums of its slices, whichever
process read them.

    checksum = sum over rows i and 8-byte words j of
                   word[i, j] * row_weight[i] * word_weight[j]      modulo 2 ** 64

with the array seen as rows of its last axis and with odd weights that are pseudo-random in i and j.
A changed byte always changes it (odd weights have inverses), and exchanged or displaced words do
but for an accident of 1 in 2 ** 63 or so. It guards against faults, not against forgery. A word
that a slice cuts counts by its bytes, so that the cuts leave no trace.
"""

import numpy as np

_BLOCK = 1 << 20  # bytes that are widened at a time where words are cut


def checksum(values: np.ndarray, shape: tuple[int, ...], origin: tuple[int, ...]) -> int:
    """Of the slice `values` of an array of `shape` that begins at `origin`; `total` over all slices
    is the array's.
    """
    values = np.atleast_1d(values)
    shape, origin = (shape, origin) if shape else ((1,), (0,))
    data = np.ascontiguousarray(values).reshape(-1, values.shape[-1]).view(np.uint8)
    rows = np.zeros((), np.int64)
    for size, start, count in zip(shape[:-1], origin[:-1], values.shape[:-1], strict=True):
        rows = rows[..., None] * size + np.arange(start, start + count)
    sums = _row_sums(data, origin[-1] * values.itemsize)
    return int((sums * _weights(rows.reshape(-1), 1)).sum(dtype=np.uint64))


def total(checksums) -> int:
    return sum(checksums) % 2**64


def _row_sums(data: np.ndarray, first: int) -> np.ndarray:
    """uint64 [rows] of data uint8 [rows, n], the bytes first .. first + n of their rows."""
    width = data.shape[1]
    if first % 8 == 0 and width % 8 == 0:
        return np.einsum(
            "ij,j->i", data.view("<u8"), _weights(np.arange(first // 8, (first + width) // 8), 2)
        )
    at = np.arange(first, first + width)
    weights = _weights(at // 8, 2) << (8 * (at % 8)).astype(np.uint64)
    step = max(1, _BLOCK // max(1, width))
    sums = [data[i : i + step].astype(np.uint64) @ weights for i in range(0, len(data), step)]
    return np.concatenate(sums) if sums else np.zeros(0, np.uint64)


def _weights(index: np.ndarray, salt: int) -> np.ndarray:
    """Odd pseudo-random uint64 of each index (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        x = index.astype(np.uint64) * np.uint64(2) + np.uint64(salt)
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)
