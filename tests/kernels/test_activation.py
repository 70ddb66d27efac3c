"""The arithmetic roundings of activation quantisation against conversions done by ml_dtypes on the
host, bit for bit.
"""

import jax
import ml_dtypes
import numpy as np

from dspark_jax.pallas_kernels.activation import round_to_e2m1, round_to_e4m3


def values(largest):
    """All multiples of a small step, so every tie is met, and random numbers of every magnitude."""
    rng = np.random.default_rng(0)
    grid = np.arange(-4096, 4097) / 4096
    spread = rng.standard_normal(20000) * 2.0 ** rng.integers(-16, 9, 20000)
    return np.clip(np.concatenate([grid * largest, grid / 16, spread]), -largest, largest).astype(
        np.float32
    )


def test_e4m3():
    x = values(448)
    expected = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(
        np.asarray(jax.jit(round_to_e4m3)(x)).view(np.int32), expected.view(np.int32)
    )


def test_e2m1():
    x = values(6)
    assert np.array_equal(
        np.asarray(jax.jit(round_to_e2m1)(x)), x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
