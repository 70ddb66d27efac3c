"""Which token a row of logits becomes: the filters, the noise, biases, extremes, and that tokens
come as often as they should. What a row says besides: margin, soundness, likelihood.
"""

import jax
import numpy as np
import pytest
from scipy.stats import chi2

from dspark_jax.decode import sampling
from dspark_jax.decode.sampling import Choice
from dspark_jax.runtime import backend

from helpers import sampling_parts as parts

NAN, INF = np.nan, np.inf
LOGITS = np.array(
    [
        [1, 3, 2, 3],
        [0, -INF, -1, -4],
        [-5, -5, -7, -5],
        [-INF] * 4,
        [0, NAN, 9, 1],
        [0, INF, 1, 2],
    ],
    np.float32,
)

choose = backend.jit(sampling.choose)
filtered = backend.jit(sampling.filtered)
likelihood = backend.jit(sampling.likelihood, static_argnums=2)


def rows_of(streams, rows, vocabulary, seed=5):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((streams, rows, vocabulary)) * 3).astype(np.float32)


def greedy(logits):
    streams, rows, vocabulary = logits.shape
    choice = parts.unbiased(None, streams, vocabulary)
    return np.asarray(choose(choice, logits, np.zeros((streams, rows), np.int32)))


# --- which is the best ---------------------------------------------------------------------------


def test_the_token_is_the_best_id_and_the_lowest_of_equals():
    tokens = greedy(LOGITS[:, None])
    assert tokens.dtype == np.int32 and tokens[:3, 0].tolist() == [1, 0, 0]


def test_the_margin_is_the_distance_to_the_second_best():
    margins = sampling.margin(LOGITS)
    assert margins.dtype == np.float32 and margins.tolist()[:3] == [0, 1, 0]


def test_a_row_without_a_finite_best_is_not_sound():
    """A NaN anywhere, an infinite best, nothing but -inf; a -inf below the best does no harm."""
    assert sampling.finite(LOGITS).tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("jit", [jax.jit, backend.jit])
def test_a_nan_shows_however_a_maximum_treats_it(jit):
    """That of XLA's own fusions, which large arrays meet, passes over it."""
    logits = rows_of(4, 64, 40)
    logits[1, 2, 3] = NAN
    assert np.argwhere(~np.asarray(jit(sampling.finite)(logits))).tolist() == [[1, 2]]


def test_any_leading_shape():
    rows = LOGITS.reshape(2, 3, 4)
    for function in (sampling.margin, sampling.finite):
        assert function(rows).shape == (2, 3)
        flat = np.asarray(function(LOGITS))
        assert np.asarray(function(rows)).tobytes() == flat.tobytes()


# --- filters -------------------------------------------------------------------------------------


def test_the_filters_leave_what_they_should():
    """1,008 rows, against a sorted list in float64; rows within 1e-6 of a border are left out."""
    logits, rows = parts.filter_cases()
    left = np.asarray(filtered(parts.settings_of(rows), logits[:, None]))[:, 0]
    out = 0
    for row, settings, mine in zip(logits, rows, left):
        kept, closest = parts.left_by(row, **settings)
        if closest > parts.BORDER:
            assert np.array_equal(np.isfinite(mine), kept), settings
            scaled = (row.astype(np.float64) - row.max())[kept] / settings["temperature"]
            np.testing.assert_allclose(mine[kept], scaled, rtol=1e-6, atol=1e-6)
        else:
            out += 1
    assert out < 0.05 * len(rows)


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 4}, [0, 1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.25}, [1]),  # of 1/4, 1/4, 1/4, 1/8, 1/16, 1/16: reached by the first
        ({"top_p": 0.375}, [1, 3]),
        ({"top_p": 0.8125}, [1, 3, 4, 0]),
        ({"top_p": 0.9375}, [1, 3, 4, 0, 2]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of what top-k leaves
        ({"top_p": 1e-45}, [1]),
        ({"min_p": 0.5}, [1, 3, 4, 0]),
        ({"min_p": 0.5, "top_k": 2}, [1, 3]),
        ({"min_p": 0.999}, [1, 3, 4]),
        ({}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_of_equals_the_lowest_id_is_kept(settings, kept):
    """Odds 1/2, 1, 1/4, 1, 1, 1/4, of which a float32 holds every sum exactly."""
    logits = np.log2(np.array([[[0.5, 1, 0.25, 1, 1, 0.25]]], np.float32)) + np.float32(4)
    temperature = np.float32(1 / np.log(2))  # natural logarithms from those to base 2
    left = filtered(parts.sampling(1, temperature=temperature, **settings), logits)
    assert np.flatnonzero(np.isfinite(left[0, 0])).tolist() == sorted(kept)


def test_without_a_temperature_nothing_is_left_out():
    settings = parts.sampling(2, temperature=[0, 1], top_k=1, top_p=0.5, min_p=0.5)
    left = np.isfinite(filtered(settings, rows_of(2, 3, 40)))
    assert left[0].all() and np.all(left[1].sum(axis=-1) == 1)


# --- how often -----------------------------------------------------------------------------------

STREAMS, ROWS, KINDS = 200, 100, 64  # 20,000 tokens of one row of logits


@pytest.fixture(scope="module")
def row():
    return (np.random.default_rng(3).standard_normal(KINDS) * 2).astype(np.float32)


def drawn(row, **settings):
    """20,000 tokens: 200 seeds and prompts, 100 positions each."""
    streams = np.arange(STREAMS)
    draws = parts.sampling(STREAMS, seed=streams // 2, prompt=streams % 2, **settings)
    logits = np.broadcast_to(row, (STREAMS, ROWS, KINDS))
    positions = np.tile(np.arange(ROWS, dtype=np.int32), (STREAMS, 1))
    tokens = choose(parts.unbiased(draws, STREAMS, KINDS), logits, positions)
    return np.bincount(np.asarray(tokens).ravel(), minlength=KINDS)


def softmax(row, temperature):
    odds = np.exp((row.astype(np.float64) - row.max()) / temperature)
    return odds / odds.sum()


def chance(counts, probabilities):
    """How likely so large a chi-square is; what is expected fewer than 10 times is counted as one
    kind.
    """
    expected = counts.sum() * probabilities
    rare = expected < 10
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    return chi2.sf(np.sum((counts - expected) ** 2 / expected), len(counts) - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_come_as_often_as_the_softmax_says(row, temperature):
    assert chance(drawn(row, temperature=temperature), softmax(row, temperature)) > 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_temperature_that_is_a_little_off_is_noticed(row, temperature):
    assert chance(drawn(row, temperature=1.05 * temperature), softmax(row, temperature)) < 1e-3


def test_what_is_left_comes_as_often_as_its_share(row):
    settings = {"temperature": 1.0, "top_k": 30, "top_p": 0.95}
    left = np.where(parts.left_by(row, **settings)[0], softmax(row, 1.0), 0)
    counts = drawn(row, **settings)
    assert chance(counts, left / left.sum()) > 1e-3 and not np.any(counts[left == 0])


def test_a_huge_temperature_draws_evenly(row):
    assert chance(drawn(row, temperature=1e30), np.full(KINDS, 1 / KINDS)) > 1e-3


# --- noise ---------------------------------------------------------------------------------------

MANY = 4096
SEEDS, PROMPTS, PLACES = (0, 1, 2**32 - 1), (0, 1, 7), (0, 1, 2, 4000)


@pytest.fixture(scope="module")
def noise():
    """[3 seeds, 3 prompts, 4 positions, MANY]"""
    seeds, prompts = np.meshgrid(SEEDS, PROMPTS, indexing="ij")
    streams = parts.sampling(9, seed=seeds.ravel(), prompt=prompts.ravel())
    places = np.tile(np.array(PLACES, np.int32), (9, 1))
    values = backend.jit(lambda s, p: sampling.gumbel(s, p, MANY))(streams, places)
    return np.asarray(values).reshape(3, 3, 4, MANY)


def test_the_noise_is_that_of_the_documented_key(noise):
    """Computed plainly: one key, one position. That also shows it equal for equal keys."""
    plain = jax.jit(lambda key: jax.random.gumbel(key, (MANY,), np.float32))
    for i, seed in enumerate(SEEDS):
        for j, prompt in enumerate(PROMPTS):
            for k, place in enumerate(PLACES):
                stream = jax.random.fold_in(jax.random.key(np.uint32(seed)), prompt)
                expected = plain(jax.random.fold_in(stream, place))
                assert noise[i, j, k].tobytes() == np.asarray(expected).tobytes()


def test_noise_of_other_seeds_prompts_and_positions_is_uncorrelated(noise):
    """Also with that of the next ids. 5 standard deviations of chance are allowed."""
    rows = noise.reshape(36, MANY)
    for shift in range(3):
        r = np.corrcoef(rows, np.roll(rows, shift, axis=1))[:36, 36:]
        assert np.max(np.abs(r - np.eye(36) * (shift == 0))) < 5 / np.sqrt(MANY)


def test_noise_has_a_gumbels_mean_and_spread(noise):
    count = noise.size
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * count)
    assert abs(noise.std() / (np.pi / np.sqrt(6)) - 1) < 5 * 1.05 / np.sqrt(count)


def test_an_ids_noise_does_not_depend_on_the_vocabulary(noise):
    streams = parts.sampling(1, seed=SEEDS[2], prompt=PROMPTS[1])
    few = backend.jit(lambda s, p: sampling.gumbel(s, p, 1000))(streams, np.int32([[PLACES[3]]]))
    assert np.asarray(few)[0, 0].tobytes() == noise[2, 1, 3, :1000].tobytes()


# --- biases --------------------------------------------------------------------------------------


PLACES_OF_64 = np.tile(np.arange(64, dtype=np.int32), (4, 1))
HOT_AND_COLD = parts.sampling(4, temperature=[0, 0.5, 5, 3e38], top_k=[0, 0, 20, 0])


def test_forbidden_tokens_are_never_chosen():
    """Even at a temperature whose reciprocal float32 holds as 0."""
    logits = rows_of(4, 64, 40)
    bias = np.zeros((4, 40), np.float32)
    bias[:, ::2] = -INF
    logits[..., ::2] += 8
    for settings in (None, HOT_AND_COLD):
        tokens = np.asarray(choose(Choice(bias, settings), logits, PLACES_OF_64))
        assert np.all(tokens % 2 == 1)
    assert all(len(np.unique(row)) > 5 for row in tokens)


def test_a_large_bias_forces_a_token():
    logits = rows_of(4, 64, 40)
    bias = np.zeros((4, 40), np.float32)
    bias[:3, 17] = 1000
    tokens = np.asarray(choose(Choice(bias, HOT_AND_COLD), logits, PLACES_OF_64))
    assert np.all(tokens[:3] == 17) and not np.all(tokens[3] == 17)


def test_biases_make_the_margin():
    logits = np.array([[[0, 5, 3]], [[0, 5, 3]], [[0, 5, 3]]], np.float32)
    bias = np.array([[0, 0, 1], [0, -INF, 0], [-INF, 0, -INF]], np.float32)
    biased = sampling.biased(Choice(bias, None), logits)
    margins = sampling.margin(biased)
    assert margins[:2, 0].tolist() == [1, 3] and np.isfinite(margins).all() and margins[2, 0] > 1e38
    assert np.array_equal(sampling.biased(Choice(bias, None), logits[:, 0]), biased[:, 0])


# --- extremes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-45, 1e-30, 1e-5])
def test_no_temperature_and_a_tiny_one_are_greedy(temperature):
    logits = rows_of(4, 64, 40)
    settings = parts.sampling(4, temperature=temperature, top_k=[0, 3, 0, 0], top_p=[1, 1, 0.9, 1])
    tokens = choose(parts.unbiased(settings, 4, 40), logits, PLACES_OF_64)
    assert np.asarray(tokens).tobytes() == greedy(logits).tobytes()


def test_unsound_rows_choose_a_token_whatever_the_settings():
    """The same one at every temperature; the others' are untouched."""
    logits = np.tile(rows_of(1, 64, 40), (4, 1, 1))
    settings = parts.sampling(4, temperature=[0, 1, 1, 1e30], top_p=[1, 0.9, 1, 1], min_p=0.01)
    choice = parts.unbiased(settings, 4, 40)
    sound = np.asarray(choose(choice, logits, PLACES_OF_64))
    broken = logits.copy()
    broken[:, 1, 7] = NAN
    broken[:, 3] = NAN
    broken[:, 5, 9] = INF
    broken[:, 7] = -INF
    tokens = np.asarray(choose(choice, broken, PLACES_OF_64))
    odd = np.isin(np.arange(64), (1, 3, 5, 7))
    assert np.all((tokens >= 0) & (tokens < 40)) and np.ptp(tokens[:, odd], axis=0).max() == 0
    assert np.array_equal(tokens[:, ~odd], sound[:, ~odd])
    assert np.array_equal(backend.jit(sampling.finite)(broken), np.tile(~odd, (4, 1)))


# --- likelihood ----------------------------------------------------------------------------------


def log_softmax(logits):
    below = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return below - np.log(np.sum(np.exp(below), axis=-1, keepdims=True))


def test_log_probabilities_are_those_of_float64():
    """Also where nearly all, or all but one, are hardly possible or not at all."""
    logits = rows_of(4, 16, 1000)
    logits[1, :, ::3] = -1e30
    logits[2, :, ::3] = -INF
    logits[3] *= 20
    logits[3, 8:, 1:] = -INF
    tokens = np.random.default_rng(0).integers(0, 1000, (4, 16)).astype(np.int32)
    tokens[:, 0] = logits[:, 0].argmax(-1)
    said = likelihood(logits, tokens, 5)
    expected = log_softmax(logits)
    chosen = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    best = np.take_along_axis(expected, np.asarray(said.best_ids), -1)
    np.testing.assert_allclose(said.chosen, chosen, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(said.best, best, rtol=1e-6, atol=1e-6)
    assert said.chosen.dtype == said.best.dtype == np.float32 and said.best_ids.dtype == np.int32
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :5]
    assert np.array_equal(said.best_ids, order)


def test_of_a_near_certain_token_the_rest_still_shows():
    """A sum with the best's own 1 in it would say 0."""
    logits = np.array([[[0, -20, -21, -25]]], np.float32)
    said = likelihood(logits, np.zeros((1, 1), np.int32), 1)
    rest = np.exp([-20.0, -21, -25]).sum()
    np.testing.assert_allclose([said.chosen[0, 0], said.best[0, 0, 0]], -np.log1p(rest), rtol=1e-6)


def test_the_most_likely_are_in_order_and_the_lowest_first_of_equals():
    said = likelihood(LOGITS[:3, None], np.int32([[0], [3], [2]]), 4)
    assert said.best_ids[:, 0].tolist() == [[1, 3, 2, 0], [0, 2, 3, 1], [0, 1, 3, 2]]
    assert said.best[1, 0, 3] == -INF
    assert np.all(np.diff(said.best[:, 0], axis=-1)[np.isfinite(said.best[:, 0, 1:])] <= 0)


def test_none_of_the_most_likely_may_be_wanted():
    said = likelihood(LOGITS[:3, None], np.int32([[0], [3], [2]]), 0)
    assert said.best.shape == said.best_ids.shape == (3, 1, 0) and said.chosen.shape == (3, 1)
