"""Many streams at a time: each has the bits that it has alone in a plain decode, whatever the mode,
the gate, the number of places, its neighbours and the moment of its arrival; a place that becomes
free is taken at once.

A part of the table; all of it, on the embedded checkpoint, is in test_streams_full.py. Every
program that draws tokens also serves greedy prompts, so that one request mixes both.
"""

import numpy as np
import pytest

from helpers.ask_parts import (
    ALL_CELLS,
    GATE,
    LEAST,
    OFF,
    QUICK_CELLS,
    Ask,
    among_strangers,
    answers,
    cells,
    differing,
    events_of,
    longest_first,
    passed_rounds,
    run,
)
from helpers.round_parts import BLOCK, perfect, scripted
from helpers.support import MAX_SEQ_LEN

# Around ratios of 4 and 8 and chunks of 16; the last one is continued up to the end of the cache.
LENGTHS = 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 31, 32, 33, 48, 98


def asks(seed: int, lengths=LENGTHS, most=30) -> list[Ask]:
    """Every other one greedy; of the others every other one with top-p alone, and the rest with so
    much noise that few tokens are the most likely ones.
    """
    rng, made = np.random.default_rng(seed), []
    for number, length in enumerate(lengths):
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": int(rng.integers(1 << 32))}
        if number % 4 == 3:
            drawn |= {"temperature": 4.0, "top_k": 100, "min_p": 0.01}
        tokens = rng.integers(0, 256, length).tolist()
        count = MAX_SEQ_LEN - length if length > 90 else int(rng.integers(2, most + 1))
        made.append(Ask(tokens, count, **(drawn if number % 2 else {})))
    return made


ASKS = asks(0)
STRANGERS = asks(1, (2, 40, 12, 26, 6), most=12)


@pytest.fixture(scope="module")
def model(scripted_model):
    return scripted_model


@pytest.fixture(scope="module")
def alone(model):
    """The plain decode of one stream after the other, each the only one of four places. That one
    place gives the same is in `make heavy`.
    """
    return [answer for ask in ASKS for answer in answers(model, [ask], "plain", 4)]


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(QUICK_CELLS, id="block"),
        pytest.param(ALL_CELLS, id="every mode", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize("gate", [OFF, GATE, LEAST], ids=["off", "random n", "margin, at least 3"])
def test_every_stream_has_the_bits_that_it_has_alone(model, alone, gate, which):
    """And the rounds, scored to the last bit alike, are the same in every cell."""
    scores = np.random.default_rng(2).normal(2, 3, MAX_SEQ_LEN)
    model = scripted(model, confidence=scores if gate.enabled else ())
    rounds = []
    for mode, streams in which:
        if mode == "plain" and gate is not OFF:
            continue
        for got in (
            answers(model, ASKS, mode, streams, gate),
            among_strangers(model, ASKS, STRANGERS, mode, streams, gate),
        ):
            assert not differing(got, alone), (mode, streams)
            rounds += [[answer.rounds for answer in got]] if mode != "plain" else []
    assert all(each == rounds[0] for each in rounds)
    verified = {record.verified for records in rounds[0] for record in records}
    assert verified >= {OFF: {BLOCK}, GATE: {0, 1, 2, 3, 4}, LEAST: {0, 3, 4}}[gate]


@pytest.mark.heavy
def test_one_place_gives_the_bits_of_one_among_four(model, alone):
    assert not differing(answers(model, ASKS, "plain", 1), alone)


@pytest.mark.heavy
def test_a_greedy_stream_has_the_same_bits_beside_drawn_ones(model, alone):
    """In programs that draw nothing, of one stream, with log-probabilities and without."""
    greedy = [number for number, ask in enumerate(ASKS) if not ask.temperature]
    wanted = [alone[number] for number in greedy]
    own = [ASKS[number] for number in greedy]
    assert not differing(answers(model, own, "block", 1), wanted)


def test_noise_is_the_prompts_own(model, alone):
    """Another seed gives other tokens, an equal one the same; one seed for all gives each prompt
    noise of its own, the first one that of a prompt alone.
    """
    number = next(n for n, ask in enumerate(ASKS) if ask.temperature and ask.max_new_tokens > 9)
    ask, tokens = ASKS[number], alone[number].tokens
    twice = [ask._replace(seed=ask.seed + 1), ask, ask]
    got = [answer.tokens for answer in answers(model, twice, "plain", 4)]
    assert got[1] == got[2] == tokens != got[0]
    out = run(model, twice, "plain", 4, seed=ask.seed)
    assert out.tokens[0] == tokens and len(set(map(tuple, out.tokens))) == 3


@cells
def test_a_place_is_taken_as_soon_as_it_is_free(model, mode, streams):
    """As many rounds pass as in a simulation of the places."""
    out = run(model, ASKS, mode, streams)
    rounds = [
        len(tokens) - 1 if mode == "plain" else len(records)
        for tokens, records in zip(out.tokens, out.rounds)
    ]
    assert out.stats["streams"] == streams
    passed = passed_rounds([rounds[number] for number in longest_first(ASKS)], streams)
    assert out.stats["busy_share"] == sum(rounds) / (passed * streams)
    assert passed_rounds([1, 3, 0, 1, 1], 2) == 3 and passed_rounds([1, 3, 3], 2) == 4


@cells
def test_limits_and_stop_tokens_of_each_prompt(model, alone, mode, streams):
    """Each is cut out of what is emitted without; results are in the order of the prompts."""
    rng, own, wanted, reasons = np.random.default_rng(3), [], [], []
    for number, (ask, answer) in enumerate(zip(ASKS, alone)):
        length = int(rng.integers(1, len(answer.tokens) + 1))
        stops = [answer.tokens[int(rng.integers(len(answer.tokens)))], 256 - 1][: number % 3]
        own.append(ask._replace(max_new_tokens=length, stop_token_ids=stops))
        at = [i for i, token in enumerate(answer.tokens[:length]) if token in stops]
        wanted.append(answer.tokens[: at[0] + 1] if at else answer.tokens[:length])
        reasons.append(wanted[-1][-1] if at else None)
    out = run(model, own, mode, streams)
    assert out.tokens == wanted and out.stop_reasons == reasons
    assert out.finish_reasons == ["length" if reason is None else "stop" for reason in reasons]
    assert {1} < set(map(len, wanted)) and {None} < set(reasons)


def test_events_of_several_prompts_come_as_they_are_known(model):
    """Prompts begin in order, their events add up to the output, and only the last says why."""
    out = run(model, ASKS, "block", 4)
    events = list(events_of(model, ASKS, streams=4))
    begun = list(dict.fromkeys(event.prompt for event in events))
    assert begun == list(range(len(ASKS)))
    assert [event.prompt for event in events] != sorted(event.prompt for event in events)
    for number in begun:
        own = [event for event in events if event.prompt == number]
        assert [token for event in own for token in event.tokens] == out.tokens[number]
        assert [each for event in own for each in event.logprobs] == out.logprobs[number]
        assert own[0].record is None and [event.record for event in own[1:]] == out.rounds[number]
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + ["length"]


def test_drafts_that_are_all_right_are_accepted_beside_others(model, alone):
    """The drafter knows one prompt's continuation; its neighbours' drafts are wrong."""
    number = len(ASKS) - 1
    oracle = perfect(model, ASKS[number].ids, alone[number].tokens)
    got = answers(oracle, ASKS[-8:], "block", 4)
    assert not differing(got, alone[-8:])
    accepted = [record.accepted for record in got[-1].rounds]
    assert accepted[:-1] == [BLOCK] * (len(accepted) - 1)
