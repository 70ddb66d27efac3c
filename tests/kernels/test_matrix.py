"""Every backend against float64 over one matrix of calls: tile edges, idle and crowded experts, odd
sizes, NaN padding.
"""

import functools

import numpy as np
import pytest
from cases import BACKENDS, LIMIT, matrix, run

from dspark_jax.pallas_kernels import BACKENDS as library
from dspark_jax.pallas_kernels import oracle

CALLS = matrix()


@functools.cache
def lines(case, activation_quant):
    """float64 with the accelerators' roundings to bfloat16, and without."""
    call = CALLS[case]
    options = dict(
        swiglu_limit=LIMIT, first_expert=call.first_expert, activation_quant=activation_quant
    )
    return tuple(oracle.line(*call[:5], round_bf16=rounds, **options) for rounds in (True, False))


WAYS = [
    (n, r) for n in BACKENDS for r in ("decode", "prefill") if (n, r) != ("reference", "prefill")
]
INPUTS = [
    *((case, False) for case in CALLS),
    ("tile edges", True),
    ("foreign experts", True),
    ("real width", True),
]


def in_make_test(name, regime, case, activation_quant) -> bool:
    """Every backend at tile edges and with experts of others; `make heavy` runs the rest."""
    return (case, activation_quant) in (
        ("tile edges", True),
        *([("foreign experts", False)] if regime == "decode" else []),
        *([("prefill tile edges", False)] if (name, regime) == ("xla-columns", "prefill") else []),
        *([("real width", True)] if (name, regime) == ("tpu", "decode") else []),
    )


@pytest.mark.parametrize(
    "name, regime, case, activation_quant",
    [
        pytest.param(*way, *given, marks=() if in_make_test(*way, *given) else pytest.mark.heavy)
        for given in INPUTS
        for way in WAYS
    ],
)
def test_against_float64(name, regime, case, activation_quant):
    call = CALLS[case]
    rounded, exact = lines(case, activation_quant)
    y = run(name, call, regime=regime, activation_quant=activation_quant)
    assert np.all(y[~call.mask] == 0)
    error = oracle.error(y, rounded if BACKENDS[name][2] else exact, call.mask)
    assert error < 1e-6
    if BACKENDS[name][2]:
        error = oracle.error(y, exact, call.mask)
        assert error < 5e-3
    assert rounded.slack[call.mask].min() < 1e-6 or case == "wide", (
        "no row is held to the strict bound"
    )


def test_every_backend_is_in_the_matrix():
    """By itself, or interpreted where it needs a device that is not at hand."""
    compiled = {name.removesuffix("_interpret") for name in library if name.endswith("_interpret")}
    assert {backend for backend, _, _ in BACKENDS.values()} == set(library) - compiled


@pytest.mark.parametrize("name", BACKENDS)
def test_a_swapped_expert_shows(name):
    call = CALLS["foreign experts"]
    row = 0
    wrong_ids = call.ids.copy()
    route = int(np.flatnonzero((call.ids[row] >= 6) & (call.ids[row] < 10))[0])
    wrong_ids[row, route] = 6 + (call.ids[row, route] - 6 + 1) % 4
    only = np.arange(len(call.mask)) == row
    exact = lines("foreign experts", False)[1]
    right, wrong = run(name, call), run(name, call._replace(ids=wrong_ids))
    assert oracle.error(wrong, exact, only) > 30 * max(oracle.error(right, exact, only), 5e-3)


def by_hand(packed, scales):
    """One expert's matrix, float64, from its codes [N, K / 2] and scales [N, K / 32]."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    magnitudes = values[codes & 7] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
    return np.where(codes >= 8, -1, 1) * magnitudes


def test_the_line_itself():
    """The float64 line against the sum written out for one row, without its caches and slack."""
    call = CALLS["one row"]
    out = np.zeros(128)
    for expert, weight in zip(call.ids[0], call.weights[0].astype(np.float64)):
        w13, s13, w2, s2 = (table[expert] for table in call.experts)
        gate, up = np.split(by_hand(w13, s13) @ call.x[0].astype(np.float64), 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        out += by_hand(w2, s2) @ (weight * gate / (1 + np.exp(-gate)) * up)
    np.testing.assert_allclose(lines("one row", False)[1].out[0], out, rtol=1e-12)
