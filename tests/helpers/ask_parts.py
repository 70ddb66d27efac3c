"""Requests of many prompts, each with settings of its own, in any order and among any others, and
what came of each.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

import dspark_jax as dspark

OFF = dspark.GateConfig()
# With a drafter of random confidence they choose many lengths; both skip drafts by margin.
GATE = dspark.GateConfig(
    enabled=True,
    margin=1.0,
    draft_ms=30,
    verify_base_ms=200,
    verify_slope_ms=55,
    decay=0.5,
    margin_threshold=0.1,
)
LEAST = dataclasses.replace(
    GATE, verify_base_ms=250, verify_slope_ms=60, margin_threshold=0.9, min_draft=3
)

# Those of test_generate.py: the published one, and others that choose shorter drafts or none.
GATES = [
    dspark.GateConfig(enabled=True),
    dspark.GateConfig(
        enabled=True, margin=1.0, draft_ms=10, verify_base_ms=200, verify_slope_ms=100
    ),
    dspark.GateConfig(
        enabled=True,
        margin=1.0,
        draft_ms=30,
        verify_base_ms=250,
        verify_slope_ms=60,
        decay=0.5,
        margin_threshold=0.9,
    ),
    dspark.GateConfig(
        enabled=True,
        margin=1.0,
        draft_ms=10,
        verify_base_ms=200,
        verify_slope_ms=100,
        min_draft=3,
        margin_threshold=2,
    ),
]

# Mode and places. Each pair compiles programs of its own: `make test` has one with several places,
# and all modes with one stream at a time (test_generate.py).
QUICK_CELLS = (("block", 4),)
ALL_CELLS = *QUICK_CELLS, ("plain", 4), ("sequential", 4)
SEQUENTIAL = pytest.param("sequential", marks=pytest.mark.heavy)
_HEAVY_CELLS = [pytest.param(*cell, marks=pytest.mark.heavy) for cell in ALL_CELLS[1:]]
cells = pytest.mark.parametrize("mode,streams", [*QUICK_CELLS, *_HEAVY_CELLS])
speculative_cells = pytest.mark.parametrize("mode,streams", [*QUICK_CELLS, *_HEAVY_CELLS[1:]])
modes = pytest.mark.parametrize("mode", ["plain", "block", SEQUENTIAL])
speculative_modes = pytest.mark.parametrize("mode", ["block", SEQUENTIAL])


class Ask(NamedTuple):
    """A prompt and what is asked for it; the names are those of `dspark.generate`."""

    ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()


class Answer(NamedTuple):
    """Of one Ask. logprobs: the bits of all of them, and the ids that they are of."""

    tokens: list[int]
    logprobs: tuple
    rounds: list[dspark.RoundRecord]


def settings(asks: Sequence[Ask]) -> dict:
    """One value a prompt, of everything but the ids."""
    rows = [ask._asdict() for ask in asks]
    columns = {name: [row[name] for row in rows] for name in Ask._fields[1:]}
    return columns | {"stop_token_ids": [list(ids) for ids in columns["stop_token_ids"]]}


def run(model, asks: Sequence[Ask], mode="block", streams=1, gate=OFF, **options):
    """The output of `generate`, with the log-probabilities of two tokens a place."""
    return dspark.generate(
        model,
        [ask.ids for ask in asks],
        mode=mode,
        gate=gate,
        **{"streams": streams, "logprobs": 2} | settings(asks) | options,
    )


def events_of(model, asks: Sequence[Ask], **options):
    """The iterator of `stream`, likewise."""
    prompts = [ask.ids for ask in asks]
    return dspark.stream(model, prompts, **{"logprobs": 2} | settings(asks) | options)


def answers(model, asks: Sequence[Ask], *arguments, **options) -> list[Answer]:
    out = run(model, asks, *arguments, **options)
    return [Answer(*of) for of in zip(out.tokens, map(bits, out.logprobs), out.rounds)]


def bits(logprobs: Sequence[dspark.TokenLogprob]) -> tuple:
    ids = [(each.token, *(token for token, _ in each.best)) for each in logprobs]
    values = [(each.logprob, *(value for _, value in each.best)) for each in logprobs]
    first = [value is None for value, *_ in values]  # a prompt's first token has none
    numbers = [0.0 if value is None else value for row in values for value in row]
    return ids, first, np.array(numbers, np.float32).tobytes()


def differing(got: Sequence[Answer], wanted: Sequence[Answer]) -> list[tuple[int, str]]:
    """Which prompts differ, in tokens or in a bit of a log-probability, and in what."""
    assert len(got) == len(wanted)
    return [
        (number, name)
        for number, (one, other) in enumerate(zip(got, wanted))
        for name in ("tokens", "logprobs")
        if getattr(one, name) != getattr(other, name)
    ]


def among_strangers(model, asks, strangers, mode, streams, gate=OFF) -> list[Answer]:
    """The answers to `asks` as events of a stream, which has prompts in their turn: here last first
    and between strangers.
    """
    mixed: list = []
    for number, ask in reversed(list(enumerate(asks))):
        mixed += [(number, ask), (None, strangers[number % len(strangers)])]
    tokens, logprobs, rounds = ([[] for _ in asks] for _ in range(3))
    options = {"mode": mode, "streams": streams, "gate": gate}
    for event in events_of(model, [ask for _, ask in mixed], **options):
        number = mixed[event.prompt][0]
        if number is not None:
            tokens[number] += event.tokens
            logprobs[number] += event.logprobs
            rounds[number] += [event.record] if event.record else []
    return [Answer(*of) for of in zip(tokens, map(bits, logprobs), rounds)]


def longest_first(asks: Sequence[Ask]) -> list[int]:
    """The numbers of prompts in the order in which `generate` begins them."""
    return sorted(range(len(asks)), key=lambda number: -asks[number].max_new_tokens)


def passed_rounds(rounds: Sequence[int], places: int) -> int:
    """How many rounds pass until all prompts are done, which take so many each, where a place that
    becomes free is taken before the next round.
    """
    waiting, left, passed = [count for count in rounds if count], [], 0
    while waiting or left:
        while waiting and len(left) < places:
            left.append(waiting.pop(0))
        left = [count - 1 for count in left if count > 1]
        passed += 1
    return passed
