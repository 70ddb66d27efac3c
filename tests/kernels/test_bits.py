"""A row has the same bits run to run, whatever the other rows are, and however many there are."""

import numpy as np
import pytest
from cases import BACKENDS, make_call, routes, run

from dspark_jax.pallas_kernels import xla

ROWS = 12
SIZES = {"narrow": dict(held=8, width=128, inner=128), "wide": dict(held=3, width=768, inner=256)}


def few(call, rows):
    """The same experts, other rows."""
    return call._replace(
        x=call.x[rows], ids=call.ids[rows], weights=call.weights[rows], mask=call.mask[rows]
    )


# Only the xla backend has a second way of multiplying for wide experts.
CHOICES = [
    *((name, "narrow", False) for name in BACKENDS),
    ("xla", "narrow", True),
    ("xla", "wide", False),
    ("xla-packed", "wide", False),
]


def in_make_test(regime, name, size, activation_quant) -> bool:
    """Each backend at its usual sizes, and the ways that models of the tests go."""
    usual = {"xla-columns", "xla-packed", "tpu"}
    if regime == "prefill":
        return (name, size) in (("xla-columns", "narrow"), ("xla", "wide"))
    return (name in usual and size == "narrow") or (name, size) == ("xla", "wide")


@pytest.mark.parametrize(
    "name, size, activation_quant, regime",
    [
        pytest.param(*c, r, marks=() if in_make_test(r, *c) else pytest.mark.heavy)
        for c in CHOICES
        for r in ("decode", "prefill")
    ],
)
def test_rows_do_not_depend_on_company(name, size, activation_quant, regime):
    held = SIZES[size]["held"]
    call = make_call(11, routes(11, ROWS, 2, held), **SIZES[size])
    options = dict(regime=regime, activation_quant=activation_quant)
    y = run(name, call, **options)
    assert np.isfinite(y).all() and np.abs(y).max() > 0
    assert np.array_equal(y, run(name, call, **options)), "a rerun differs"
    turned = np.arange(ROWS)[::-1]
    assert np.array_equal(y[turned], run(name, few(call, turned), **options)), (
        "a row depends on its place"
    )
    for rows in ([0], [4, 5, 6, 7, 8, 9]):
        assert np.array_equal(y[rows], run(name, few(call, np.array(rows)), **options)), (
            f"rows {rows} alone differ"
        )
    crowded = few(call, np.zeros(ROWS, int))
    assert np.array_equal(run(name, crowded, **options), np.broadcast_to(y[0], y.shape)), (
        "a row depends on others of its expert"
    )
    masked = call._replace(
        mask=np.arange(ROWS) == 5, x=np.where(np.arange(ROWS)[:, None] == 5, call.x, np.nan)
    )
    assert np.array_equal(run(name, masked, **options)[5], y[5]), "a row depends on padded ones"


LIGHT = {(40, 128, 128)}  # the rest is run by `make heavy`


@pytest.mark.parametrize(
    "rows, width, inner",
    [
        pytest.param(rows, *size, marks=() if (rows, *size) in LIGHT else pytest.mark.heavy)
        for rows in (2, 40, 200)
        for size in ((128, 128), (512, 128), (160, 96), (768, 256))
    ],
)
def test_regimes_and_storages_agree_on_cpu(width, inner, rows):
    """Only the xla backend promises this, and the golden and embedded models rely on it. Packed
    experts give the bits of dequantised ones if they are narrow; wide ones are added in another
    order.
    """
    call = make_call(12, routes(12, rows, 2, 4), held=4, width=width, inner=inner)
    held = "xla" if xla.is_wide(width, inner, packed=False) else "xla-columns"
    y, packed = run(held, call), run("xla-packed", call)
    assert np.array_equal(y, run(held, call, regime="prefill"))
    assert np.array_equal(packed, run("xla-packed", call, regime="prefill"))
    if width <= xla.WIDEST_GEMM:
        assert np.array_equal(y, packed)
    else:
        assert 0 < np.linalg.norm(y - packed) < 1e-6 * np.linalg.norm(y)


def test_order_of_routes_is_the_order_of_additions():
    """Another order of summing routes changes some bits: equal bits above mean one order."""
    call = make_call(13, routes(13, 64, 4, 8), held=8, width=128, inner=128)
    swapped = call._replace(ids=call.ids[:, ::-1].copy(), weights=call.weights[:, ::-1].copy())
    y, z = run("xla", call), run("xla", swapped)
    assert not np.array_equal(y, z)
    np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-5)
