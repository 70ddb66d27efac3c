"""The table of streams on the embedded checkpoint, plain and block: 40 prompts x 128 tokens x gates
x greedy and drawn x 4 places (last first, among strangers) and 8; without a gate also 1. No token
and no bit of a log-probability differs. Sequential, and a long stream: test_streams_soak.py.
"""

import dataclasses

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.ask_parts import GATE, OFF, answers, differing
from helpers.round_parts import compilations
from helpers.table_parts import all_asks, alone, check_mode, load, text_ids

pytestmark = pytest.mark.heavy
REQUESTS = 200


@pytest.fixture(scope="module")
def model():
    return load(512)


@pytest.fixture(scope="module")
def wanted(model):
    return alone(model)


@pytest.mark.parametrize("mode", ["block", "plain"])
def test_every_stream_has_the_bits_that_it_has_alone(model, wanted, mode):
    check_mode(model, wanted, mode)


def test_programs_that_draw_nothing_give_the_same(model, wanted):
    """Greedy prompts by themselves."""
    assert not differing(answers(model, all_asks(model)[::2], "block", 8), wanted[::2])


def test_mixed_requests_after_warm_up_compile_nothing(model):
    """Of one prompt up to twelve, in the places that `generate` chooses for them."""
    dspark.warm_up(model, [1, 2, 4, 8], sampled=True, logprobs=True)
    rng, ids = np.random.default_rng(1), text_ids(model)
    with compilations() as compiled:
        for _ in range(REQUESTS):
            out = anything(model, rng, ids)
            assert out.stats["compile_seconds"] == 0
    assert not compiled


def anything(model, rng, ids):
    count = int(rng.integers(1, 13))
    lengths = rng.integers(1, 150, count)
    prompts = [ids[length : 2 * length] for length in lengths.tolist()]
    gate = dataclasses.replace(GATE, plain_ms=float(rng.integers(50, 400)))
    temperatures = rng.choice([0.0, 0.7, 1.5], count)
    temperatures[0] = 1.0
    vocabulary = model.config.vocab_size
    return dspark.generate(
        model,
        prompts,
        rng.integers(1, 12, count).tolist(),
        gate=gate if rng.integers(2) else OFF,
        temperature=temperatures.tolist(),
        top_k=int(rng.integers(20)),
        top_p=float(rng.uniform(0.1, 1)),
        min_p=float(rng.uniform(0, 0.5)),
        seed=int(rng.integers(1 << 32)),
        logprobs=int(rng.integers(9)),
        stop_token_ids=rng.integers(0, vocabulary, rng.integers(9)).tolist(),
        stop=["e", "\n"] if rng.integers(2) else None,
        logit_bias={int(rng.integers(vocabulary)): float(rng.normal())},
        forbidden_tokens=rng.integers(0, vocabulary, rng.integers(4)).tolist(),
    )
