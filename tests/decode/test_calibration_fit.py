"""The fit on rounds whose chances are known, and every number of it against plain loops."""

import math

import numpy as np
import pytest

from dspark_jax.decode import calibration_fit as fits
from dspark_jax.decode.gate import BUCKET_EDGES
from dspark_jax.loading.calibration import Scale, raw

TRUE = Scale((0.5, 2.0, 1.0, 3.0), (-0.4, 0.6, 0.0, -0.2))
BLOCK = 4


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def simulated(count, seed, scale=TRUE):
    """Rounds of a drafter whose scores mean sigmoid(score / temperature + offset)."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0.3, 2.0, (count, BLOCK))
    chance = [
        [sigmoid(s / t + o) for s, t, o in zip(row, scale.temperatures, scale.offsets)]
        for row in scores
    ]
    right = rng.random((count, BLOCK)) < np.array(chance)
    return scores, np.cumprod(right, axis=1).sum(axis=1)


@pytest.fixture(scope="module")
def rounds():
    return simulated(20_000, seed=1)


@pytest.fixture(scope="module")
def found(rounds):
    return fits.fit(*rounds)


def test_the_scale_is_recovered(found):
    np.testing.assert_allclose(np.log(found.temperatures), np.log(TRUE.temperatures), atol=0.15)
    np.testing.assert_allclose(found.offsets, TRUE.offsets, atol=0.15)


def test_temperatures_alone_are_recovered_where_there_is_no_offset():
    true = Scale(TRUE.temperatures, (0.0,) * BLOCK)
    found = fits.fit(*simulated(20_000, 2, true), offsets=False)
    np.testing.assert_allclose(np.log(found.temperatures), np.log(true.temperatures), atol=0.15)
    assert found.offsets == true.offsets


def test_held_out_errors_become_small_and_buckets_rise(found):
    held_out = simulated(10_000, seed=3)
    before, after = (fits.errors(*held_out, scale) for scale in (raw(BLOCK), found))
    assert before["all"] > 0.02 and max(before["by_position"]) > 0.05
    assert after["all"] < 0.01 and max(after["by_position"]) < 0.03
    buckets = fits.reliability(*held_out, found, BUCKET_EDGES)
    for rows in buckets.values():
        assert len(rows) == 6 and min(row["count"] for row in rows) > 50 and fits.rises(rows)
        assert all(abs(row["predicted"] - row["observed"]) < 0.05 for row in rows)


def test_without_offsets_a_bias_stays(rounds, found):
    """A score of 0 says one half at every temperature."""
    biased = simulated(4_000, 4, Scale((1.0,) * BLOCK, (-1.5,) * BLOCK))
    alone, both = (fits.fit(*biased, offsets=with_offsets) for with_offsets in (False, True))
    assert fits.errors(*biased, alone)["all"] > 5 * fits.errors(*biased, both)["all"]


def test_a_drafter_that_can_tell_is_not_made_to_say_nothing():
    """Its chances rise with the score, but along no sigmoid. At a high temperature all drafts would
    be said to be right as often as they are on average: without error in bins of equal width, and
    worth nothing.
    """
    rng = np.random.default_rng(5)
    scores = rng.choice([-0.6, 0.0, 0.6], (6000, 1)) + rng.normal(0, 0.02, (6000, 1))
    chance = np.where(scores < -0.3, 0.3, np.where(scores < 0.3, 0.35, 0.9))
    accepted = (rng.random((6000, 1)) < chance).astype(int)[:, 0]
    flat = Scale((20.0,), (math.log(accepted.mean() / (1 - accepted.mean())),))
    found = fits.fit(scores, accepted)
    assert fits.errors(scores, accepted, flat)["all"] < fits.errors(scores, accepted, found)["all"]
    low, high = fits.right(np.array([[-0.6], [0.6]]), found)[:, 0]
    assert low < 0.35 and high > 0.75


def test_a_position_that_says_nothing_keeps_its_scores():
    scores, accepted = simulated(500, seed=6)
    assert fits.fit(scores, np.full(500, BLOCK)) == raw(BLOCK), "all were accepted"
    never = fits.fit(scores, np.minimum(accepted, 2))  # the third is never right
    assert never.temperatures[2:] == (1.0, 1.0) and never.offsets[2:] == (0.0, 0.0)
    assert never.temperatures[0] != 1.0
    whole = fits.fit(scores, np.where(accepted > 0, BLOCK, 0))  # all seen were right but the first
    assert whole.temperatures[0] != 1.0 and whole.temperatures[1:] == (1.0,) * (BLOCK - 1)


def slow_products(scores, scale):
    rows = []
    for row in scores.tolist():
        product, rows_products = 1.0, []
        for s, t, o in zip(row, scale.temperatures, scale.offsets):
            product *= sigmoid(s / t + o)
            rows_products.append(product)
        rows.append(rows_products)
    return rows


def slow_error(pairs):
    """The ECE in 15 bins of equal width, of (predicted, happened)."""
    total = 0.0
    for i in range(15):
        inside = [
            pair for pair in pairs if i / 15 <= pair[0] < (i + 1) / 15 or (i == 14 and pair[0] == 1)
        ]
        if inside:
            mean = sum(p for p, _ in inside) / len(inside)
            share = sum(h for _, h in inside) / len(inside)
            total += len(inside) / len(pairs) * abs(mean - share)
    return total


def test_errors_and_buckets_equal_plain_loops():
    scores, accepted = simulated(700, seed=7)
    scale = Scale((0.8, 1.7, 1.2, 0.6), (0.1, -0.3, 0.2, -0.9))
    products = slow_products(scores, scale)
    pairs = [[(row[k], float(a > k)) for row, a in zip(products, accepted)] for k in range(BLOCK)]
    everything = [pair for column in pairs for pair in column]
    found = fits.errors(scores, accepted, scale)
    assert found["by_position"] == pytest.approx([slow_error(p) for p in pairs], rel=1e-9)
    assert found["all"] == pytest.approx(slow_error(everything), rel=1e-9)
    seen = [
        (sigmoid(s / t + o), float(a > k))
        for row, a in zip(scores.tolist(), accepted)
        for k, (s, t, o) in enumerate(zip(row, scale.temperatures, scale.offsets))
        if k <= a
    ]
    buckets = fits.reliability(scores, accepted, scale, BUCKET_EDGES)
    limits = [0, *(sigmoid(edge) for edge in BUCKET_EDGES), 1.1]
    for name, given in (("products", everything), ("drafts", seen)):
        for low, high, row in zip(limits, limits[1:], buckets[name]):
            inside = [pair for pair in given if low <= pair[0] < high]
            assert row["count"] == len(inside)
            if inside:
                assert row["predicted"] == pytest.approx(sum(p for p, _ in inside) / len(inside))
                assert row["observed"] == pytest.approx(sum(h for _, h in inside) / len(inside))


def slow_cost(scores, accepted, k, temperature, before):
    """What the search makes small, by loops: 15 bins of equal counts in the order of the scores,
    the offset found by a walk in ever smaller steps.
    """
    happened = [float(a > k) for a in accepted]
    predict = lambda offset: [
        b * sigmoid(s / temperature + offset) for b, s in zip(before, scores[:, k].tolist())
    ]
    offset = 0.0
    for step in [2.0**-i for i in range(-3, 30)]:
        offset += step if sum(predict(offset)) < sum(happened) else -step
    predicted, order = predict(offset), sorted(range(len(scores)), key=lambda i: scores[i, k])
    gaps = [0.0] * 15
    for place, i in enumerate(order):
        gaps[place * 15 // len(scores)] += predicted[i] - happened[i]
    return sum(map(abs, gaps))


def test_no_temperature_nearby_or_far_is_better_by_a_plain_loop():
    scores, accepted = simulated(600, seed=8)
    found = fits.fit(scores, accepted)
    products = slow_products(scores, found)
    for k in (0, 2):
        before = [1.0 if k == 0 else row[k - 1] for row in products]
        best = slow_cost(scores, accepted, k, found.temperatures[k], before)
        for factor in (0.2, 0.5, 0.8, 0.93, 1.07, 1.25, 2.0, 5.0):
            other = slow_cost(scores, accepted, k, found.temperatures[k] * factor, before)
            assert other >= best - 1e-4, (k, factor)


def test_empty_buckets_do_not_count_as_a_fall():
    row = lambda observed, count: {"predicted": 0.5, "observed": observed, "count": count}
    assert fits.rises([row(0.1, 4), row(None, 0), row(0.1, 3), row(0.8, 1)])
    assert not fits.rises([row(0.2, 4), row(None, 0), row(0.1, 3)])
