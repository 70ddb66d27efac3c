"""The FP4 format: nibble order, values, scales, rounding; device functions against their NumPy
twins, those by hand.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.pallas_kernels import fp4, largest_scale, pallas_mosaic, pallas_triton, xla


def test_low_nibble_is_the_first_column():
    assert fp4.np_dequantise(np.array([[0x21] * 16], np.uint8), np.array([[127]], np.uint8))[
        0, :2
    ].tolist() == [0.5, 1.0]
    assert fp4.dequantise(np.array([[0x21] * 16], np.uint8), np.array([[127]], np.uint8))[
        0, :2
    ].tolist() == [0.5, 1.0]


def test_codes_are_e2m1():
    codes = np.arange(16, dtype=np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(fp4.E2M1, values)
    assert np.array_equal(np.asarray(fp4.decode_e2m1(codes)), values)


def test_pack_and_unpack_are_inverse():
    packed = np.random.default_rng(0).integers(0, 256, (3, 5, 16), np.uint8)
    assert np.array_equal(np.asarray(fp4.pack(fp4.unpack(packed))), packed)
    assert np.array_equal(np.asarray(fp4.unpack(packed)), fp4.np_unpack(packed))


COLUMNS = 256


def every_product(largest_scale):
    """One row for every code under every scale: packed [N, 128], scales [N, 8], and its weight, in
    all columns, float64 [N].
    """
    scale, code = (a.ravel().astype(np.uint8) for a in np.indices((largest_scale + 1, 16)))
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * 2.0 ** (scale - 127.0)
    repeated = lambda byte, count: np.repeat(byte[:, None], count, axis=1)
    return (
        repeated(17 * code, COLUMNS // 2),
        repeated(scale, COLUMNS // 32),
        np.where(code >= 8, -magnitude, magnitude),
    )


def assert_representable_ones_are_exact(y, exact):
    """y float32 [N]: bit for bit where the weight is a normal float32, infinite above, and below at
    most the smallest of them.
    """
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    normal = (exact == 0) | (np.abs(exact) >= 2.0**-126)
    assert np.array_equal(y[normal], expected[normal])
    assert np.abs(y[~normal]).max() < 2.0**-126
    assert normal.sum() > 4000 and np.isfinite(expected).sum() > 4000


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantise_is_exact(dtype):
    packed, scales, exact = every_product(254)
    y = np.asarray(jax.jit(fp4.dequantise, static_argnums=2)(packed, scales, dtype)).astype(
        np.float32
    )
    assert (y == y[:, :1]).all()
    assert_representable_ones_are_exact(y[:, 0], exact)


def test_packed_product_on_cpu_is_exact_for_every_scale():
    packed, scales, exact = every_product(254)
    for column in (0, 101):
        x = (np.arange(COLUMNS) == column).astype(np.float32)
        assert_representable_ones_are_exact(
            np.asarray(jax.jit(xla._fused_dot_packed)(x, packed, scales)), exact
        )


def test_tpu_product_is_exact_for_every_scale_that_is_not_refused():
    packed, scales, exact = every_product(largest_scale("tpu"))
    for parity in (0, 1):
        x = np.zeros((2, 1, COLUMNS // 2), jnp.bfloat16)
        x[parity, 0, 70] = 1
        y = np.asarray(
            jax.jit(pallas_mosaic._products)(x, packed, scales, pallas_mosaic._spread(COLUMNS))
        )[0]
        # A row holds one weight throughout: where that is infinite, zero times the others is NaN.
        assert_representable_ones_are_exact(
            np.where(np.isnan(y), np.copysign(np.inf, exact), y).astype(np.float32), exact
        )


def test_gpu_weights_are_exact_for_every_scale_that_is_not_refused():
    packed, scales, exact = every_product(253)
    assert largest_scale("gpu") <= 253
    for half in jax.jit(pallas_triton._unpack_plain)(packed, scales.repeat(16, 1)):
        half = np.asarray(half).astype(np.float32)
        assert (half == half[:, :1]).all()
        assert_representable_ones_are_exact(half[:, 0], exact)


def test_the_smallest_scale_is_not_zero():
    values = fp4.np_dequantise(
        np.full((1, 16), 0x77, np.uint8), np.zeros((1, 1), np.uint8), np.float64
    )
    assert values[0, 0] == 6 * 2.0**-127
    assert fp4.dequantise(np.full((1, 16), 0x77, np.uint8), np.zeros((1, 1), np.uint8))[
        0, 0
    ] == np.float32(6 * 2.0**-127)


def test_nan_scale_is_refused_by_name():
    scales = np.full((2, 3), 120, np.uint8)
    fp4.check_scales(scales)
    scales[1, 2] = 255
    with pytest.raises(ValueError, match=r"experts\.7\.w2: e8m0 byte 255 .* at \(1, 2\)"):
        fp4.check_scales(scales, "experts.7.w2")
    with pytest.raises(ValueError, match="255"):
        fp4.np_dequantise(np.zeros((2, 48), np.uint8), scales)


@pytest.mark.parametrize("quantise", [fp4.quantise, fp4.np_quantise])
def test_quantise_rounds_ties_to_the_even_code(quantise):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -2.5])
    row = np.zeros((1, 32), np.float32)
    row[0, : len(ties)], row[0, -1] = ties, 6.0
    packed, scales = (np.asarray(a) for a in quantise(row))
    assert scales.tolist() == [[127]]
    assert fp4.np_dequantise(packed, scales)[0, : len(ties)].tolist() == [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
        -1,
        -2,
    ]


def test_quantise_equals_its_twin_and_is_idempotent():
    rng = np.random.default_rng(1)
    weights = (rng.standard_normal((4, 8, 96)) * 2.0 ** rng.integers(-20, 20, (4, 8, 1))).astype(
        np.float32
    )
    weights[0, 0] = 0
    packed, scales = (np.asarray(a) for a in jax.jit(fp4.quantise)(weights))
    twin = fp4.np_quantise(weights)
    assert np.array_equal(packed, twin[0]) and np.array_equal(scales, twin[1])
    values = fp4.np_dequantise(packed, scales)
    assert np.abs(values - weights).max(axis=-1).max() <= np.abs(weights).max() / 3
    again = fp4.np_dequantise(*fp4.np_quantise(values))
    assert np.array_equal(again, values)
