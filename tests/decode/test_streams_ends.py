"""Streams that end by themselves while others go on: by a stop string, by numbers that are not
finite, by Ctrl-C, by a caller who wants no more. And that requests of every kind compile nothing.

They run the programs of test_streams.py.
"""

import dataclasses
import gc
import signal

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode import engine as engines
from dspark_jax.decode import run as runs
from dspark_jax.decode.request import make_request

from helpers.ask_parts import (
    GATE,
    OFF,
    QUICK_CELLS,
    Ask,
    answers,
    cells,
    differing,
    events_of,
    longest_first,
    passed_rounds,
    run,
    speculative_cells,
)
from helpers.round_parts import BLOCK, byte_tokenizer, compilations, scripted, with_nan_tokens

LETTERS = b"abcd"
ONLY_LETTERS = {
    "forbidden_tokens": sorted(set(range(256)) - set(LETTERS)),
    "temperature": [0.0] + [20.0] * 11,
}
STOPS = ["abc", "bcd", "dadd", "ca"]


def asks(seed: int, lengths, most=40, vocabulary=256) -> list[Ask]:
    """All but the first are drawn."""
    rng, made = np.random.default_rng(seed), []
    for number, length in enumerate(lengths):
        drawn = {"temperature": 1.2, "seed": number} if number else {}
        tokens = rng.integers(0, vocabulary, length).tolist()
        made.append(Ask(tokens, int(rng.integers(most // 2, most + 1)), **drawn))
    return made


ASKS = asks(0, (5, 17, 2, 33, 8, 21, 16, 1, 12, 3, 40, 7))


@pytest.fixture(scope="module")
def model(short_reference):
    return scripted(short_reference, tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def letters(model):
    """What the prompts are continued with where only LETTERS may be."""
    return run(model, ASKS, "plain", 4, **ONLY_LETTERS)


def first_stop(text: str, stops) -> tuple[int, str | None]:
    """Where it ends, and what with: the longest of those that end with the same letter."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return len(text), None


def held_back(text: str, stops) -> int:
    """Letters at the end that could still become part of a stop string."""
    begun = [stop[:length] for stop in stops for length in range(1, len(stop))]
    return max((len(part) for part in begun if text.endswith(part)), default=0)


@cells
def test_stop_strings_end_streams(model, letters, mode, streams):
    """Each prompt with strings of its own; and the same ones given to all."""
    own = [STOPS[number % 3 :] if number % 4 else [] for number in range(len(ASKS))]
    for stop, given in ((own, own), ([STOPS] * len(ASKS), STOPS)):
        out = run(model, ASKS, mode, streams, stop=given, **ONLY_LETTERS)
        for number, stops in enumerate(stop):
            text = letters.texts[number]
            end, by = first_stop(text, stops)
            assert out.tokens[number] == letters.tokens[number][:end]
            assert out.logprobs[number] == letters.logprobs[number][:end]
            assert out.texts[number] == text[: end - len(by or "")]
            assert out.stop_reasons[number] == by
            assert out.finish_reasons[number] == ("stop" if by else "length")
        assert len(set(out.stop_reasons)) > 2
    assert set(letters.finish_reasons) == {"length"} and set("".join(letters.texts)) == set(
        LETTERS.decode()
    )


@cells
def test_a_stop_string_frees_its_place(model, letters, mode, streams):
    """The host learns of it a round later, while the device is at the next one."""
    options = {"stop": STOPS, "logprobs": 2, **ONLY_LETTERS}
    columns = {"max_new_tokens": 40, "seed": [ask.seed for ask in ASKS]}
    request = make_request(
        model, [ask.ids for ask in ASKS], mode=mode, streams=streams, **columns, **options
    )
    driver = runs.Run(model, request)
    driver.complete()
    out = driver.output()
    assert out.stop_reasons.count(None) <= 2
    rounds = [
        len(tokens) - 1 if mode == "plain" else len(records)
        for tokens, records in zip(out.tokens, out.rounds)
    ]
    passed = driver.engine.slot_rounds / streams
    assert passed <= passed_rounds([count + 2 for count in rounds], streams)


@cells
def test_a_stream_shows_nothing_that_could_become_a_stop_string(model, letters, mode, streams):
    shown = [""] * len(ASKS)
    tokens = [0] * len(ASKS)
    ended = set()
    events = events_of(model, ASKS, mode=mode, streams=streams, stop=STOPS, **ONLY_LETTERS)
    for event in events:
        number = event.prompt
        assert number not in ended, "nothing after the last event"
        shown[number] += event.text
        tokens[number] += len(event.tokens)
        text = letters.texts[number][: tokens[number]]
        end, by = first_stop(letters.texts[number], STOPS)
        if event.finish_reason is None:
            assert shown[number] == text[: len(text) - held_back(text, STOPS)]
            continue
        ended.add(number)
        assert tokens[number] == end and shown[number] == text[: end - len(by or "")]
        assert event.stop_reason == by and event.finish_reason == ("stop" if by else "length")
    assert ended == set(range(len(ASKS)))


# What is not finite


@pytest.fixture(scope="module")
def damage(model):
    """Asks of which one has a token in its prompt that only it has, and another one draws one that
    no other may draw: the asks, what is asked of them all, these two tokens with their prompts, and
    the answers of a sound model. Short prompts follow these two, in whose places there is more than
    they are written over.
    """
    in_prompt, prefilled, drawing = 230, 1, 3
    lengths = (5, 33, 2, 20, 2, 17, 40, 16, 8, 3)
    made = [ask._replace(max_new_tokens=15) for ask in asks(4, lengths, vocabulary=200)]
    for number, length in ((1, 40), (2, 39), (3, 38), (4, 37)):
        made[number] = made[number]._replace(max_new_tokens=length)
    made[prefilled].ids[3] = in_prompt
    # At position 23: the slot before that of position 0, in rings of 24 for a compressor's inputs.
    index = 23 - lengths[drawing]
    for seed in range(99):
        made[drawing] = made[drawing]._replace(temperature=4.0, seed=seed)
        options = {"forbidden_tokens": [in_prompt], "max_new_tokens": index + 1}
        *before, drawn = run(model, [made[drawing]], "plain", 4, **options).tokens[0]
        if drawn not in [*before, *range(200), 255]:
            break
    never = [[in_prompt] if n == drawing else [in_prompt, drawn] for n in range(len(made))]
    options = {"forbidden_tokens": never}
    wanted = answers(model, made, "plain", 4, **options)
    assert wanted[drawing].tokens.index(drawn) == index
    return made, options, {prefilled: in_prompt, drawing: drawn}, wanted


@cells
def test_what_is_not_finite_ends_one_stream(model, damage, mode, streams):
    """In a prompt, and where a token was drawn: the other prompts, those too that take the places
    of the damaged ones, have all of their tokens.
    """
    made, options, tokens, wanted = damage
    damaged = with_nan_tokens(model, list(tokens.values()))
    with pytest.raises(dspark.NumericsError) as error:
        run(damaged, made, mode, streams, **options)
    (prefilled, _), (drawing, drawn) = tokens.items()
    last = wanted[drawing].tokens.index(drawn)
    assert str(error.value).startswith(
        f"prompt {prefilled}: the logits at position {len(made[prefilled].ids) - 1} are not finite"
    )
    assert str(error.value).endswith(f"(so ended prompts {drawing} too)")
    out = error.value.output
    for number, answer in enumerate(wanted):
        kept = {prefilled: 0, drawing: last + 1}.get(number, len(answer.tokens))
        assert out.tokens[number] == answer.tokens[:kept] and len(out.logprobs[number]) == kept
        assert out.finish_reasons[number] == ("error" if number in tokens else "length")
    assert out.stats["tokens"] == sum(map(len, out.tokens))
    own = [[ask] for ask in made]
    with pytest.raises(dspark.NumericsError) as alone:
        forbidden = options["forbidden_tokens"][drawing : drawing + 1]
        run(damaged, own[drawing], mode, streams, forbidden_tokens=forbidden)
    position = len(made[drawing].ids) + last
    assert f"prompt 0: the logits at position {position} are not finite" in str(alone.value)


@speculative_cells
def test_drafts_that_are_not_finite_end_one_stream(model, mode, streams):
    """At a position that only the longest prompt reaches."""
    longest = max(range(len(ASKS)), key=lambda number: len(ASKS[number].ids))
    position = len(ASKS[longest].ids) + 9
    made = [
        ask
        if number == longest
        else ask._replace(max_new_tokens=min(ask.max_new_tokens, position - BLOCK - len(ask.ids)))
        for number, ask in enumerate(ASKS)
    ]
    wanted = answers(model, made, mode, streams)
    scores = np.full(position + 1, np.nan)  # the drafter's own
    scores[position] = np.inf
    damaged = scripted(model, confidence=scores, tokenizer=model.tokenizer)
    with pytest.raises(dspark.NumericsError) as error:
        run(damaged, made, mode, streams)
    out = error.value.output
    lost = out.tokens.pop(longest), wanted.pop(longest).tokens, out.finish_reasons.pop(longest)
    assert lost == (lost[1][: len(lost[0])], lost[1], "error") and 3 < len(lost[0]) < 10
    assert out.tokens == [answer.tokens for answer in wanted]
    assert set(out.finish_reasons) == {"length"}
    anchor = len(ASKS[longest].ids) + len(lost[0]) - 1
    assert f"prompt {longest}: the drafts of the round at position {anchor} are" in str(error.value)


# Given up


@cells
@pytest.mark.parametrize("calls", [1, 4])
def test_ctrl_c_keeps_what_every_prompt_had(model, mode, streams, calls, monkeypatch):
    """Pressed while the host waits for a call of two rounds."""
    wanted = answers(model, ASKS, mode, streams)
    heard, fetch = [], engines.fetch

    def interrupted(*arguments):
        heard.append(1)
        if len(heard) == calls:
            signal.raise_signal(signal.SIGINT)
        return fetch(*arguments)

    monkeypatch.setattr(runs, "ROUNDS_PER_CALL", 2)
    monkeypatch.setattr(engines, "fetch", interrupted)
    with pytest.raises(dspark.Interrupted) as error:
        run(model, ASKS, mode, streams)
    monkeypatch.undo()
    out = error.value.output
    for answer, tokens, reason in zip(wanted, out.tokens, out.finish_reasons):
        assert tokens == answer.tokens[: len(tokens)]
        assert reason == ("length" if len(tokens) == len(answer.tokens) else "interrupted")
    begun = [number for number, tokens in enumerate(out.tokens) if tokens]
    assert begun == sorted(longest_first(ASKS)[:streams]), "those that had a place"
    most = 1 + 2 * (calls - 1) * (1 if mode == "plain" else 1 + BLOCK)
    assert all(calls <= len(out.tokens[number]) <= most for number in begun)
    assert out.stats["tokens"] == sum(map(len, out.tokens))
    assert not differing(answers(model, ASKS, mode, streams), wanted), "nothing is left behind"


@cells
def test_a_stream_that_is_closed_early_leaves_nothing(model, mode, streams):
    wanted = answers(model, ASKS, mode, streams)
    gc.collect()
    before = len(jax.live_arrays())
    events = events_of(model, ASKS, mode=mode, streams=streams)
    seen = [next(events) for _ in range(streams + 3)]
    assert len(jax.live_arrays()) > before
    events.close()
    del events
    gc.collect()
    assert len(jax.live_arrays()) <= before
    assert {event.prompt for event in seen} == set(range(streams))
    assert not differing(answers(model, ASKS, mode, streams), wanted)


# Compilation


def test_mixed_requests_compile_nothing(model):
    """Numbers and lengths of prompts, settings, gates, stop tokens and strings, biases and drafters
    are data. On the embedded checkpoint after warm_up: test_streams_full.py.
    """
    ways = [*QUICK_CELLS, ("plain", 4)]
    for mode, streams in ways:
        run(model, ASKS[:1], mode, streams, temperature=1.0)
    rng = np.random.default_rng(5)
    with compilations() as compiled:
        for _ in range(24):
            anything(model, rng, *ways[rng.integers(2)])
    assert not compiled


def anything(model, rng, mode, streams):
    """A request of this mode and so many places that draws tokens."""
    made = asks(int(rng.integers(1 << 30)), rng.integers(1, 50, rng.integers(2, 12)), 12)
    gate = dataclasses.replace(GATE, plain_ms=float(rng.integers(50, 400)))
    out = run(
        model,
        made,
        mode,
        streams,
        gate if rng.integers(2) else OFF,
        logprobs=int(rng.integers(8)),
        top_k=int(rng.integers(20)),
        top_p=float(rng.uniform(0.1, 1)),
        min_p=float(rng.uniform(0, 0.5)),
        stop_token_ids=rng.integers(0, 256, rng.integers(8)).tolist(),
        stop=["a", "bc"] if rng.integers(2) else None,
        logit_bias={int(rng.integers(256)): float(rng.normal())},
        forbidden_tokens=rng.integers(0, 256, rng.integers(4)).tolist(),
    )
    assert out.stats["compile_seconds"] == 0
