"""The embedded checkpoint does what it was trained for, and speculation pays on it."""
import pytest

import dspark_jax as dspark
from dspark_jax.bench import PROMPTS
from dspark_jax.train.measure import PROMPTS as MEASURED

COUNTING = {"1 2 3 4 5 6 7": range(8, 20), "41 42 43 44 45": range(46, 58), "108 109 110 111": range(112, 120)}
CYCLES = ("red green blue red green blue", "a b c a b c a b c", "tick tock tick tock tick tock", "cat dog bird cat dog bird",
          "north east south west north east south west", "one two three one two three one two three")


@pytest.fixture(scope="module")
def tiny():
    return dspark.load(max_seq_len=512)


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
    assert dspark.generate(tiny, "def add(a, b):", max_new_tokens=12).texts[0].startswith("\n    return a + b\n")


def test_most_drafts_are_accepted_on_repetition(tiny):
    out = dspark.generate(tiny, list(MEASURED["repeat"]), max_new_tokens=96, stop_token_ids=[])
    assert out.stats["accept_rate"] >= 0.6, out.stats["accepted_by_position"]


@pytest.mark.parametrize("kind", PROMPTS)
def test_all_modes_give_the_same_tokens_in_fewer_rounds(tiny, kind):
    outs = {mode: dspark.generate(tiny, PROMPTS[kind], 48, mode, stop_token_ids=[]) for mode in ("plain", "sequential", "block")}
    assert outs["plain"].tokens == outs["sequential"].tokens == outs["block"].tokens
    assert outs["block"].stats["rounds"] < 47
