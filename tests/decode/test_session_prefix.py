"""`generate(model, prompts, prefix=session)`: many continuations of what a session holds have the
bits of runs over the joined ids, and the session is none the wiser.
"""

import jax
import numpy as np
import pytest

import dspark_jax as dspark

from helpers.ask_parts import GATE, OFF, Ask, answers, bits, cells, differing, events_of, run
from helpers.round_parts import byte_tokenizer, same_bits, scripted, with_nan_tokens

PREFIX = np.random.default_rng(9).integers(0, 256, 45).tolist()
DRAWN = {"temperature": 4.0, "seed": 5, "top_p": 0.95}


def asks() -> list[Ask]:
    """Some of nothing: the first token is said by the prefix."""
    rng, made = np.random.default_rng(10), []
    for number, length in enumerate((0, 1, 5, 16, 0, 17, 40, 3, 19, 0, 12)):
        drawn = DRAWN | {"seed": number} if number % 2 else {}
        made.append(Ask(rng.integers(0, 256, length).tolist(), 6 + 2 * number, **drawn))
    return made


ASKS = asks()


@pytest.fixture(scope="module")
def model(short_reference):
    return scripted(short_reference, tokenizer=byte_tokenizer())


def joined(asks, session) -> list[Ask]:
    return [ask._replace(ids=session.tokens + ask.ids) for ask in asks]


def session_of(model, computed: str) -> dspark.Session:
    """computed: how much of it is."""
    session = dspark.Session(model)
    if computed == "nothing":
        return session.feed(PREFIX[:1])
    session.feed(PREFIX[:20])
    mode = {"all but one": "block", "all but a turn": "plain"}[computed]
    session.generate(23, mode=mode, stop_token_ids=[])
    assert len(session.pending) == (1 if mode == "block" else 24)
    return session


def held(session):
    if session.cache is None:
        return []
    return [np.asarray(leaf).copy() for leaf in jax.tree.leaves(session.cache)]


@cells
@pytest.mark.parametrize("computed", ["nothing", "all but one", "all but a turn"])
def test_continuations_are_those_of_the_joined_ids(model, mode, streams, computed):
    session = session_of(model, computed)
    before, cache = (list(session.tokens), session.pending), held(session)
    for gate in [OFF] if mode == "plain" else [OFF, GATE]:
        wanted = answers(model, joined(ASKS, session), mode, streams, gate)
        got = answers(model, ASKS, mode, streams, gate, prefix=session)
        assert not differing(got, wanted)
        assert [answer.rounds for answer in got] == [answer.rounds for answer in wanted]
    assert (session.tokens, session.pending) == before
    assert all(same_bits(a, b) for a, b in zip(held(session), cache, strict=True))


@pytest.mark.heavy
def test_one_place(model):
    """Where prompts are prefilled in the place that they run in."""
    session = session_of(model, "all but one")
    made = [ask for ask in ASKS if len(ask.ids) < 17]
    wanted = answers(model, joined(made, session), "block", 4)
    assert not differing(answers(model, made, "block", 1, prefix=session), wanted)
    assert not differing(answers(model, made, "block", 1, prefix=session), wanted)


def test_one_seed_gives_each_continuation_noise_of_its_own(model):
    session = session_of(model, "all but one")
    made = [Ask([], 10, temperature=4.0)] * 8
    together = answers(model, made, "block", 4, prefix=session, seed=7)
    assert not differing(together, answers(model, joined(made, session), "block", 4, seed=7))
    assert len({tuple(answer.tokens) for answer in together}) == 8


def test_log_probabilities_of_prompts_after_a_prefix(model):
    """Of every token of a prompt, the first too; none of the prefix."""
    for computed in ("nothing", "all but one", "all but a turn"):
        session = session_of(model, computed)
        options = {"prompt_logprobs": True, "temperature": 4.0, "max_new_tokens": 1}
        whole = run(model, joined(ASKS, session), "block", 4, **options).prompt_logprobs
        own = run(model, ASKS, "block", 4, prefix=session, **options).prompt_logprobs
        assert [len(told) for told in own] == [len(ask.ids) for ask in ASKS]
        for ask, told, all_of_it in zip(ASKS, own, whole):
            assert bits(told) == bits(all_of_it[session.position :])
            assert not ask.ids or told[0].logprob < 0


def test_text_goes_on_from_the_prefix(model):
    """Nothing is put before it, and no text at all is a prompt too."""
    session = dspark.Session(model).feed("caf\u00e9")
    options = {"max_new_tokens": 9, "streams": 4, "stop_token_ids": [], "logprobs": 2, **DRAWN}
    out = dspark.generate(model, ["", " au lait"], prefix=session, **options)
    wanted = dspark.generate(model, ["caf\u00e9", "caf\u00e9 au lait"], **options)
    assert out.tokens == wanted.tokens and out.texts == wanted.texts
    assert [per["prompt_tokens"] for per in out.stats["per_prompt"]] == [0, 8]
    assert dspark.generate(model, "", prefix=session, **options).tokens == wanted.tokens[:1]


def test_an_empty_session_is_no_prefix(model):
    made = ASKS[1:4]
    out = answers(model, made, "block", 4, prefix=dspark.Session(model))
    assert not differing(out, answers(model, made, "block", 4))
    with pytest.raises(dspark.PromptError, match="prompt 0: the prompt is empty"):
        run(model, ASKS[:1], "block", 4, prefix=dspark.Session(model))


@cells
def test_a_session_may_go_on_while_it_is_continued(model, mode, streams):
    """A run takes the session as it is when the run is begun."""
    session = session_of(model, "all but one")
    wanted = answers(model, joined(ASKS, session), mode, streams)
    events = events_of(model, ASKS, mode=mode, streams=streams, prefix=session)
    session.feed(PREFIX[:3])
    own = [[] for _ in ASKS]
    for count, event in enumerate(events):
        own[event.prompt] += event.tokens
        if count % 5 == 0 and session.position < 70:
            session.feed(PREFIX[:4])
    assert own == [answer.tokens for answer in wanted]
    fresh = dspark.Session(model).feed(session.tokens)
    outs = [one.generate(9, stop_token_ids=[]) for one in (session, fresh)]
    assert outs[0].tokens == outs[1].tokens and outs[0].rounds == outs[1].rounds


def test_what_is_not_finite_is_named_by_its_position_after_the_prefix(model):
    made = [Ask([3, 4, 77], 5, **DRAWN), Ask([3, 4], 5, **DRAWN)]
    damaged = with_nan_tokens(model, [77])
    session = dspark.Session(damaged).feed([token for token in PREFIX if token != 77][:40])
    with pytest.raises(dspark.NumericsError, match="prompt 0: the logits at position 42 are") as e:
        run(damaged, made, "block", 4, prefix=session, forbidden_tokens=[77])
    assert list(map(len, e.value.output.tokens)) == [0, 5]
