"""A row's token, noise and log-probabilities have the same bits whatever stands beside it: however
many rows and streams, their logits, their settings.
"""

import itertools

import jax
import numpy as np
import pytest

from dspark_jax.decode import sampling
from dspark_jax.decode.sampling import Choice
from dspark_jax.runtime import backend

from helpers import sampling_parts as parts

STREAMS, ROWS = 8, 6
# Odd ones, narrower than a vector, with remainders of 1, and whole vectors.
SHAPES = list(itertools.product((1, 2, 3, 8), (1, 2, 6)))
FEW = {7: [(3, 1)], 1000: [(1, 1), (1, 6)]}
MANY = {7: SHAPES, 257: SHAPES, 129: [(1, 1), (3, 1)], 512: [(1, 1), (3, 1)]}
SETTINGS = {
    "temperature": [0.8, 0, 0.8, 1, 0, 1.3, 0.7, 2],
    "top_k": [0, 0, 0, 5, 3, 40, 0, 0],
    "top_p": [1, 1, 0.95, 1, 0.5, 0.9, 1, 0.99],
    "min_p": [0, 0, 0, 0, 0.1, 0.02, 0.1, 0],
}


@backend.jit
def everything(choice, logits, positions, tokens):
    return (
        sampling.choose(choice, logits, positions),
        sampling.filtered(choice.sampling, sampling.biased(choice, logits)),
        sampling.gumbel(choice.sampling, positions, logits.shape[-1]),
        sampling.likelihood(logits, tokens, 3),
        sampling.margin(logits),
    )


def company(vocabulary):
    """The arguments of `everything` for 8 streams of 6 rows: ties, biases, all kinds of settings,
    filters beside none.
    """
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((STREAMS, ROWS, vocabulary)) * 3).astype(np.float32)
    logits[..., ::3] = np.round(logits[..., ::3])
    bias = np.where(rng.random((STREAMS, vocabulary)) < 0.1, 1.5, 0).astype(np.float32)
    settings = parts.sampling(STREAMS, seed=np.arange(8) // 2, prompt=np.arange(8) % 2, **SETTINGS)
    positions = rng.integers(0, 4000, (STREAMS, ROWS)).astype(np.int32)
    tokens = rng.integers(0, vocabulary, (STREAMS, ROWS)).astype(np.int32)
    return Choice(bias, settings), logits, positions, tokens


def bits(tree, streams, rows=slice(None)):
    """Of some streams and rows of `everything`."""
    return [np.asarray(leaf)[streams, rows].tobytes() for leaf in jax.tree.leaves(tree)]


def some_streams(tree, which):
    return jax.tree.map(lambda leaf: leaf[which], tree)


def check(vocabulary, shapes):
    whole = company(vocabulary)
    expected = everything(*whole)
    for streams, rows in shapes:
        for first in range(0, STREAMS - streams + 1, 3):
            some, last = slice(first, first + streams), slice(ROWS - rows, ROWS)
            choice, *arrays = some_streams(whole, some)
            here = everything(choice, *(array[:, last] for array in arrays))
            assert bits(here, slice(None)) == bits(expected, some, last), (streams, rows)


@pytest.mark.parametrize(
    "vocabulary", [pytest.param(n, marks=pytest.mark.heavy if n > 100 else ()) for n in FEW]
)
def test_the_number_of_rows_and_streams_changes_no_bit(vocabulary):
    check(vocabulary, FEW[vocabulary])


@pytest.mark.heavy
@pytest.mark.parametrize("vocabulary", MANY)
def test_no_number_of_rows_and_streams_changes_a_bit(vocabulary):
    check(vocabulary, MANY[vocabulary])


@pytest.mark.parametrize("vocabulary", FEW)
def test_the_others_logits_and_settings_change_no_bit(vocabulary):
    """Streams 0 to 3 beside junk, and beside streams that all, or none of them, filter."""
    whole = company(vocabulary)
    expected = bits(everything(*whole), slice(4))
    for temperature, filters in ((1.0, {}), (0.0, {}), (0.5, {"top_k": 2, "top_p": 0.1})):
        choice, logits, *rest = jax.tree.map(np.copy, whole)
        logits[4:, 0::3], logits[4:, 1::3], logits[4:, 2::3] = np.nan, -1e30, np.inf
        choice.bias[4:, 1:] = -np.inf
        others = parts.sampling(4, temperature=temperature, seed=99, **filters)
        for mine, theirs in zip(jax.tree.leaves(choice.sampling), jax.tree.leaves(others)):
            mine[4:] = theirs
        assert bits(everything(choice, logits, *rest), slice(4)) == expected


def test_streams_that_filter_nothing_have_the_bits_of_a_batch_without_filters():
    """The work of the filters is skipped where no stream asks for it."""
    choice, *arrays = company(1000)
    plain = [0, 1]  # of SETTINGS, drawn freely and greedy
    alone = Choice(choice.bias, some_streams(choice.sampling, plain * 4))
    expected = everything(choice, *arrays)
    here = everything(alone, *arrays)
    assert bits(here, plain) == bits(expected, plain)


def test_a_cold_stream_has_the_token_of_the_greedy_program():
    choice, logits, positions, tokens = company(1000)
    mixed = np.asarray(everything(choice, logits, positions, tokens)[0])
    greedy = backend.jit(sampling.choose)(Choice(choice.bias, None), logits, positions)
    cold = choice.sampling.temperature == 0
    assert cold.sum() == 2 and np.array_equal(mixed[cold], np.asarray(greedy)[cold])
    assert not np.array_equal(mixed[~cold], np.asarray(greedy)[~cold])
