"""Sessions: after any turns, however each of them ended, the next one is that of a fresh run over
the same ids: tokens, log-probabilities, and every round, scored to the last bit alike.
"""

import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode import engine as engines
from dspark_jax.decode import run as runs
from dspark_jax.decode import session as sessions

from helpers.ask_parts import GATE, OFF, Answer, bits, modes, speculative_modes
from helpers.round_parts import BLOCK, byte_tokenizer, perfect, scripted, with_nan_tokens
from helpers.support import MAX_SEQ_LEN

DRAWN = {"temperature": 4.0, "top_p": 0.95}
HEAVY = pytest.mark.heavy
# Greedy tokens are chosen by programs of their own, here those of test_generate.py.
choices = pytest.mark.parametrize(
    "drawn", [pytest.param({}, id="greedy"), pytest.param(DRAWN, id="drawn", marks=HEAVY)]
)
PROMPT = np.random.default_rng(8).integers(0, 256, 60).tolist()


@pytest.fixture(scope="module")
def model(short_reference):
    return scripted(short_reference, tokenizer=byte_tokenizer())


def session_of(model, ids=PROMPT[:19], seed=3):
    return dspark.Session(model, seed).feed(ids)


def options_of(mode="block", **options):
    told = 2 if options.get("temperature") else None
    return {"mode": mode, "stop_token_ids": [], "logprobs": told} | options


def answer(out) -> Answer:
    told = bits(out.logprobs[0]) if out.logprobs else ()
    return Answer(out.tokens[0], told, out.rounds[0])


def fresh(model, ids, seed, **options):
    return dspark.generate(model, ids, streams=1, seed=[seed], **options)


def check_turn(session, length=12, seed=None, **options):
    """The session's next turn is that of a fresh run over its ids, and grows by its tokens."""
    before, options = list(session.tokens), options_of(**options) | {"max_new_tokens": length}
    wanted = fresh(session.model, before, session.seed if seed is None else seed, **options)
    out = session.generate(seed=seed, **options)
    assert answer(out) == answer(wanted)
    assert session.tokens == before + out.tokens[0] and session.position == len(session.tokens)
    for name in ("tokens", "rounds", "accepted", "accept_rate", "accepted_by_position", "gate"):
        assert out.stats[name] == wanted.stats[name]
    assert out.finish_reasons == wanted.finish_reasons
    return out


# Turns


@modes
@choices
def test_turns_are_those_of_a_fresh_run(model, mode, drawn):
    """Fed tokens and emitted ones in turn, up to the last place of the cache."""
    session = session_of(model, PROMPT[:21])
    for fed, length, gate in ((1, 13, OFF), (2, 7, GATE), (17, 1, OFF), (16, 20, GATE)):
        check_turn(session, length, mode=mode, gate=gate, **drawn)
        session.feed(PROMPT[:fed])
    check_turn(session, MAX_SEQ_LEN - session.position, mode=mode, **drawn)
    assert session.position == MAX_SEQ_LEN


# pairs of mode and options
FEW_TURNS = [(mode, {}) for mode in ("plain", "block", "plain", "plain", "block")]
TURNS = [("plain", DRAWN), ("block", DRAWN), ("plain", DRAWN), ("sequential", DRAWN)]
TURNS += [("block", {}), ("plain", DRAWN), ("block", {}), ("sequential", DRAWN)]


@pytest.mark.parametrize(
    "turns", [pytest.param(FEW_TURNS, id="few"), pytest.param(TURNS, id="all", marks=HEAVY)]
)
def test_modes_and_ways_to_choose_may_change_from_turn_to_turn(model, turns):
    session = session_of(model)
    for number, (mode, drawn) in enumerate(turns):
        check_turn(session, 4 + number, seed=number, mode=mode, **drawn)
        if number % 3 == 2:
            session.feed(PROMPT[number : number + 3])


@choices
def test_a_turn_follows_a_turn_without_anything_fed(model, drawn):
    """Ten and ten tokens are twenty."""
    whole = fresh(model, PROMPT[:19], 3, **options_of(max_new_tokens=20, **drawn))
    session = session_of(model)
    parts = [check_turn(session, 10, **drawn).tokens[0] for _ in range(2)]
    assert parts[0] + parts[1] == whole.tokens[0]
    if drawn:  # with the noise of its place
        assert session.generate(1, **options_of(**drawn)).tokens[0] != whole.tokens[0][:1]


@choices
def test_drafts_are_as_good_as_before(model, drawn):
    """A cache without the drafter's part would give tokens all the same."""
    plain = fresh(model, PROMPT[:19], 3, **options_of("block", max_new_tokens=60, **drawn))
    session = session_of(model)
    outs = [session.generate(20, **options_of(**drawn)) for _ in range(3)]
    accepted = sum(out.stats["accepted"] for out in outs)
    assert accepted >= plain.stats["accepted"] - 2 * BLOCK and plain.stats["accepted"] > 10


# How turns end


@choices
@speculative_modes
@pytest.mark.parametrize("ends", ["length", "stop"])
def test_the_surplus_of_a_round_is_cut(model, mode, ends, drawn):
    """At every place of a block of which all was accepted."""
    continued = fresh(model, PROMPT[:19], 3, **options_of("plain", max_new_tokens=40, **drawn))
    tokens = continued.tokens[0]
    oracle = perfect(model, PROMPT[:19], tokens, tokenizer=model.tokenizer)
    firsts = [t for t in range(2, 16) if tokens[t] not in tokens[:t]]
    assert {(t - 1) % (BLOCK + 1) for t in firsts} == set(range(BLOCK + 1))
    for t in firsts:
        session = session_of(oracle)
        limit = (t + 1, []) if ends == "length" else (40, [tokens[t]])
        out = check_turn(session, limit[0], mode=mode, stop_token_ids=limit[1], **drawn)
        assert out.tokens[0] == tokens[: t + 1] and out.finish_reasons == [ends]
        assert {record.accepted for record in out.rounds[0]} == {BLOCK}
        check_turn(session, 9, mode=mode, **drawn)


@HEAVY
@modes
def test_a_turn_that_a_string_ended(model, mode):
    session = session_of(model)
    letters = {"forbidden_tokens": sorted(set(range(256)) - set(b"abc")), "temperature": 9.0}
    options = options_of(mode, stop=["ab", "ca", "cc"], **letters)
    for _ in range(4):
        before = list(session.tokens)
        out = session.generate(30, **options)
        assert out.finish_reasons == ["stop"] and out.stop_reasons[0] in ("ab", "ca", "cc")
        assert session.tokens == before + out.tokens[0]
        assert bytes(out.tokens[0]).decode() == out.texts[0] + out.stop_reasons[0]
    check_turn(session, mode=mode, **DRAWN)


@choices
@modes
def test_events_and_a_stream_that_was_closed_early(model, mode, drawn):
    """The tokens grow with every event. Closed after each of the first events, and read to the end
    without looking for it.
    """
    options = options_of(mode, max_new_tokens=14, **drawn)
    whole = fresh(model, PROMPT[:19], 3, **options)
    for count in (0, 1, 2, 4, 99):
        session, seen = session_of(model), []
        events = session.stream(**options)
        for event in events if count else ():
            seen += event.tokens
            assert session.tokens == PROMPT[:19] + seen
            count -= 1
            if not count:
                break
        events.close()
        assert session.tokens == PROMPT[:19] + seen and seen == whole.tokens[0][: len(seen)]
        check_turn(session, mode=mode, **drawn)
    assert seen == whole.tokens[0]


@choices
@modes
def test_a_turn_that_was_not_finite(model, mode, drawn):
    """What was sound stays; a fork from before is as it was; the damage is found again."""
    whole = fresh(model, PROMPT[:19], 3, **options_of(max_new_tokens=25, **drawn)).tokens[0]
    index = next(t for t in range(4, 25) if whole[t] not in [*PROMPT[:19], *whole[:t], 255])
    damaged = with_nan_tokens(model, [whole[index]])
    session = session_of(damaged)
    check_turn(session, 2, mode=mode, **drawn)
    other, said = session.fork(seed=3), []
    for _ in range(2):
        with pytest.raises(dspark.NumericsError) as error:
            session.generate(30, **options_of(mode, **drawn))
        said.append(str(error.value))
        assert session.tokens == PROMPT[:19] + whole[: index + 1]
        assert other.tokens == PROMPT[:19] + whole[:2]
        check_turn(other, 1, mode=mode, **drawn) if len(said) == 2 else None
    assert f"the logits at position {19 + index} are not finite" in said[0]
    assert error.value.output.tokens == [[]]


@choices
@modes
@pytest.mark.parametrize("calls", [1, 3])
def test_a_turn_that_was_interrupted(model, mode, calls, monkeypatch, drawn):
    heard, fetch = [], engines.fetch

    def interrupted(*arguments):
        heard.append(1)
        if len(heard) == calls:
            signal.raise_signal(signal.SIGINT)
        return fetch(*arguments)

    session = session_of(model)
    check_turn(session, 3, mode=mode, **drawn)
    before = list(session.tokens)
    monkeypatch.setattr(runs, "ROUNDS_PER_CALL", 2)
    monkeypatch.setattr(engines, "fetch", interrupted)
    with pytest.raises(dspark.Interrupted) as error:
        session.generate(40, **options_of(mode, **drawn))
    monkeypatch.undo()
    said = error.value.output.tokens[0]
    assert session.tokens == before + said and calls <= len(said) < 40
    check_turn(session, mode=mode, **drawn)


@choices
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_feeding_that_was_interrupted(model, chunks, monkeypatch, drawn):
    """The tokens are there; what was not computed is computed with what comes next."""
    session = session_of(model)
    chunk, seen = sessions._chunk, []

    def interrupted(*arguments):
        if len(seen) == chunks:
            signal.raise_signal(signal.SIGINT)
        seen.append(1)
        return chunk(*arguments)

    monkeypatch.setattr(sessions, "_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.feed(PROMPT)
    monkeypatch.undo()
    assert session.tokens == PROMPT[:19] + PROMPT and len(session.pending) == 61 - 16 * (chunks + 1)
    check_turn(session, **drawn)


# Forks


@choices
@modes
def test_forks_go_on_by_themselves(model, mode, drawn):
    """In turn, event by event: each has noise of its own, and none disturbs another."""
    session = session_of(model)
    check_turn(session, 5, mode=mode, **drawn)
    family = [session, session.fork(), session.fork(seed=3)]
    family.append(family[1].fork())
    assert [one.seed for one in family] == [3, 4, 3, 5]
    assert all(one.tokens == session.tokens for one in family)
    options = options_of(mode, max_new_tokens=9, **drawn)
    wanted = [answer(fresh(model, one.tokens, one.seed, **options)).tokens for one in family]
    streams, seen = [one.stream(**options) for one in family], [[] for _ in family]
    while any(len(tokens) < 9 for tokens in seen):
        for events, tokens in zip(streams, seen):
            event = next(events, None)
            tokens += event.tokens if event else []
    assert seen == wanted and seen[0] == seen[2]
    assert len(set(map(tuple, seen))) == (3 if drawn else 1)
    for events in streams:
        events.close()
    for number, one in enumerate(family):
        one.feed(PROMPT[: 1 + 20 * (number % 2)])
    for one in reversed(family):
        check_turn(one, mode=mode, **drawn)


@choices
@modes
def test_amid_a_stream_a_session_may_be_forked_but_not_continued(model, mode, drawn):
    session = session_of(model)
    options = options_of(mode, max_new_tokens=12, **drawn)
    events = session.stream(**options)
    for _ in range(3):
        next(events)
    before, other = list(session.tokens), session.fork()
    for what, use in (
        ("feed", lambda: session.feed([1])),
        ("generate", lambda: session.generate(1)),
        ("stream", lambda: session.stream(1)),
    ):
        with pytest.raises(dspark.ConfigError, match=f"{what}: a stream of this session has not"):
            use()
    assert session.tokens == before == other.tokens
    check_turn(other.feed([7]), mode=mode, **drawn)
    list(events)
    assert session.tokens[:19] == PROMPT[:19] and session.position == 19 + 12
    check_turn(session.feed([8]), mode=mode, **drawn)
    session.stream(**options)  # dropped before it began
    check_turn(session, mode=mode, **drawn)


def test_a_seed_is_given_to_one_session_of_a_family(model):
    """Whatever seeds were asked for before."""
    session = dspark.Session(model, seed=5)
    given = [session.fork(seed=7), session.fork(seed=6)]
    counted = [session.fork(), given[0].fork(), session.fork(seed=8), given[1].fork()]
    assert [one.seed for one in counted] == [8, 9, 8, 10]
    last = dspark.Session(model, seed=(1 << 32) - 1)
    assert [last.fork().seed for _ in range(2)] == [0, 1]
    many = [session.fork().seed for _ in range(3000)]
    assert len({7, 6, 8, 9, 10, *many}) == 3005


@choices
def test_threads_wait_for_each_other(model, drawn):
    """Four turns at once are four turns in a row; a fork in between is whole."""
    whole = fresh(model, PROMPT[:19], 3, **options_of(max_new_tokens=80, **drawn)).tokens[0]
    session, forks, all_ready = session_of(model), [], threading.Barrier(8)

    def turn():
        all_ready.wait(60)
        session.generate(20, **options_of(**drawn))

    def fork():
        all_ready.wait(60)
        forks.append(session.fork())

    threads = [threading.Thread(target=target) for target in (turn, fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.tokens == PROMPT[:19] + whole
    assert len({one.seed for one in forks}) == 4
    for one in forks:
        assert one.tokens == session.tokens[: one.position] and one.position % 20 == 19
        check_turn(one, 5, **drawn)


@choices
def test_a_fork_outlives_its_session(model, drawn):
    session = session_of(model)
    other = session.fork()
    session.feed(PROMPT[:5])
    check_turn(session, **drawn)
    del session
    check_turn(other, **drawn)
    early = dspark.Session(model)
    late = early.fork()
    check_turn(late.feed([5]), **drawn)
    assert early.tokens == []


# What is refused


@choices
@pytest.mark.parametrize("fed", [0, 1, 19])
@pytest.mark.parametrize(
    "prompt,says",
    [
        ([3, 256], "token id 256 at index 1 is outside the vocabulary"),
        ([-1], "token id -1 at index 0 is outside the vocabulary"),
        ([3, 1.5], "token ids must be integers"),
        ([3, True], "token ids must be integers"),
        ([], "at least one token"),
        ("", "at least one token"),
        ([[]], "at least one token"),
        ([[1], [2]], "one text or one list of token ids, got 2"),
        (["a", "b"], "one text or one list of token ids, got 2"),
        (7, "expected a string"),
        (None, "expected a string"),
        ([1] * 129, "do not fit into max_seq_len 128"),
    ],
)
def test_what_cannot_be_fed_changes_nothing(model, fed, prompt, says, drawn):
    session = dspark.Session(model)
    if fed:
        session.feed(PROMPT[:fed])
    pending = session.pending
    with pytest.raises(dspark.PromptError, match=says) as error:
        session.feed(prompt)
    assert "\n" not in str(error.value)
    assert session.tokens == PROMPT[:fed] and session.pending == pending
    check_turn(session.feed([4, 5]), 3, **drawn)


def test_text_needs_a_tokenizer(short_reference):
    session = dspark.Session(scripted(short_reference))
    with pytest.raises(dspark.PromptError, match="this checkpoint has no tokenizer.json"):
        session.feed("a")
    assert session.tokens == []


@choices
def test_a_session_that_is_full_or_empty(model, drawn):
    session = session_of(model, PROMPT + PROMPT)
    with pytest.raises(dspark.PromptError, match="9 tokens after the 120 of this session"):
        session.feed([1] * 9)
    with pytest.raises(dspark.PromptError, match="a prefix of 120 tokens and max_new_tok"):
        session.generate(9)
    check_turn(session, 8, **drawn)
    with pytest.raises(dspark.PromptError, match="together exceed max_seq_len 128"):
        session.stream(1)
    for use in (dspark.Session(model).generate, dspark.Session(model).stream):
        with pytest.raises(dspark.PromptError, match="this session is empty"):
            use(5)
    for seed in (-1, 1 << 32, True, 1.0, None):
        with pytest.raises(dspark.ConfigError, match="seed: "):
            dspark.Session(model, seed)
    for seed in (np.int64(3), np.array(3), jnp.int32(3)):
        assert dspark.Session(model, seed).seed == 3
    with pytest.raises(dspark.ConfigError, match="prompt_logprobs: a turn of a session has no"):
        session_of(model).generate(1, prompt_logprobs=True)
    for what, name in (("generate", "foo"), ("stream", "progress"), ("generate", "prefix")):
        says = f"Session.{what}.. got an unexpected keyword argument '{name}'"
        with pytest.raises(TypeError, match=says):
            getattr(session_of(model), what)(1, **{name: True})
    with pytest.raises(dspark.ConfigError, match="a session is one stream"):
        session_of(model).generate(1, streams=2)


@choices
def test_text_is_fed_as_it_is_encoded(model, drawn):
    session = dspark.Session(model).feed("caf\u00e9")
    session.feed([7]).feed("b")
    assert session.tokens == [*"caf\u00e9".encode(), 7, *b"b"]
    assert str(session) == "Session(7 of 128 tokens)"
    check_turn(session, **drawn)
