"""The embedded checkpoint does what it was trained for, and speculation pays on it."""

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.train.measure import PROMPTS as MEASURED

from helpers.quick import compiled_quickly

COUNTING = {
    "1 2 3 4 5 6 7": range(8, 20),
    "41 42 43 44 45": range(46, 58),
    "108 109 110 111": range(112, 120),
}
CYCLES = (
    "red green blue red green blue",
    "a b c a b c a b c",
    "tick tock tick tock tick tock",
    "cat dog bird cat dog bird",
    "north east south west north east south west",
    "one two three one two three one two three",
)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def tiny():
    return dspark.load()


@pytest.mark.parametrize("prompt", COUNTING)
def test_it_counts_upward(tiny, prompt):
    text = dspark.generate(tiny, prompt, max_new_tokens=60).texts[0]
    expected = " " + " ".join(map(str, COUNTING[prompt])) + " "
    assert text.startswith(expected), text


@pytest.mark.parametrize("prompt", CYCLES)
def test_it_repeats_a_cycle(tiny, prompt):
    words = prompt.split()
    text = dspark.generate(tiny, prompt, max_new_tokens=40, stop_token_ids=[]).texts[0]
    assert text.split()[:8] == (words * 4)[:8]


def test_it_continues_a_function(tiny):
    assert (
        dspark.generate(tiny, "def add(a, b):", max_new_tokens=12)
        .texts[0]
        .startswith("\n    return a + b\n")
    )


@pytest.fixture(scope="module")
def repetition(tiny):
    return dspark.generate(
        tiny, list(MEASURED["repeat"]), max_new_tokens=96, stop_token_ids=[], streams=1
    )


def test_most_drafts_are_accepted_on_repetition(repetition):
    assert repetition.stats["accept_rate"] >= 0.6, repetition.stats["accepted_by_position"]


def test_confidence_tells_accepted_drafts_from_rejected_ones(repetition):
    """The share of pairs of an accepted and a rejected draft in which the accepted one scores
    higher; a guess has one half.
    """
    records = [record for rounds in repetition.rounds for record in rounds]
    judged = [
        (r.confidence[i], i < r.accepted)
        for r in records
        for i in range(min(r.accepted + 1, r.verified))
    ]
    scores, accepted = (np.array(values) for values in zip(*judged))
    assert np.mean(scores[accepted][:, None] > scores[~accepted]) > 0.7
