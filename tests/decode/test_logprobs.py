"""Log-probabilities against float64 ones of the logits that `dspark.prefill` gives; and what acts
on the choice of tokens and on the drafter, but never on log-probabilities.
"""

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.ask_parts import Ask, bits, cells, run, speculative_cells
from helpers.round_parts import BLOCK, compilations, scripted

# Of numbers up to 20, from float32 logits; measured: 1.9e-6.
TOLERANCE = 4e-6
BIAS = {7: 4.0, 130: -3.0, 200: 2.5, 201: 2.5}
NEVER = [*range(0, 256, 3)]


def asks() -> list[Ask]:
    rng, made = np.random.default_rng(6), []
    for number, length in enumerate((5, 17, 2, 33, 8, 40, 16, 1)):
        drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 70 + number} if number % 2 else {}
        made.append(Ask(rng.integers(0, 256, length).tolist(), 24, **drawn))
    return made


ASKS = asks()


@pytest.fixture(scope="module")
def model(short_reference):
    return scripted(short_reference)


def raw_logits(model, ids) -> np.ndarray:
    """[S, V]: what each token says of the one after it."""
    return np.asarray(dspark.prefill(model, ids)[0][0])


def check(told, logits, best: int) -> None:
    """told: a TokenLogprob for each row of logits."""
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
    exact -= logits.max(-1, keepdims=True)
    assert len(told) == len(exact)
    for each, row, own in zip(told, exact, logits):
        wanted = np.argsort(-own, kind="stable")[:best].tolist()
        assert [token for token, _ in each.best] == wanted
        values = [each.logprob, *(value for _, value in each.best)]
        assert np.abs(np.array(values) - row[[each.token, *wanted]]).max() < TOLERANCE
        assert all(np.float32(value) == value for value in values)


@cells
def test_log_probabilities_are_those_of_the_raw_logits(model, mode, streams):
    """Whatever the temperature, the filters and the bias."""
    out = run(model, ASKS, mode, streams, logprobs=5, logit_bias=BIAS, forbidden_tokens=NEVER)
    for ask, tokens, told in zip(ASKS, out.tokens, out.logprobs):
        assert [each.token for each in told] == tokens
        check(told, raw_logits(model, ask.ids + tokens)[len(ask.ids) - 1 : -1], 5)
    assert out.prompt_logprobs is None


def test_so_many_as_were_asked_for(model):
    """0: of the emitted tokens only. As many as a program tells, or fewer, are cut from these."""
    outs = [run(model, ASKS, "block", 4, logprobs=n) for n in (8, 3, 0)]
    for out, n in zip(outs, (8, 3, 0)):
        cut = [[each._replace(best=each.best[:n]) for each in told] for told in outs[0].logprobs]
        assert out.logprobs == cut
    with compilations() as compiled:
        run(model, ASKS, "block", 4, logprobs=7)
    assert not compiled


@pytest.mark.heavy
@pytest.mark.parametrize("best", [None, 3])
def test_prompt_log_probabilities(model, best):
    """Of every token but the first, beside those that are emitted or alone. (None: the programs of
    rounds hold no log-probabilities, those of the prompt do.)
    """
    made = [ask._replace(max_new_tokens=1) for ask in ASKS]
    out = run(model, made, "block", 4, logprobs=best, prompt_logprobs=True)
    assert (out.logprobs is None) == (best is None)
    for ask, told in zip(made, out.prompt_logprobs):
        assert told[0] == (ask.ids[0], None, ()) and [each.token for each in told] == ask.ids
        check(told[1:], raw_logits(model, ask.ids)[:-1], best or 0)


def test_prompt_log_probabilities_have_the_bits_of_emitted_ones(model):
    """What was emitted, given back as a prompt: every token at every place of a chunk of 16, as the
    prompt grows from the front.
    """
    ask = ASKS[5]
    out = run(model, [ask], "block", 4, temperature=0.9)
    ids = ask.ids + out.tokens[0]
    made = [ask._replace(ids=ids[: len(ids) - cut], temperature=0.9) for cut in range(17)]
    grown = run(model, made, "block", 4, max_new_tokens=1, prompt_logprobs=True).prompt_logprobs
    assert bits(grown[0][len(ask.ids) :]) == bits(out.logprobs[0])
    assert all(bits(told) == bits(grown[0][: len(told)]) for told in grown)


# Bias


@cells
def test_a_bias_acts_on_what_is_chosen(model, mode, streams):
    """Greedy tokens are the best by biased logits; forbidden ones never occur."""
    options = {"logit_bias": BIAS, "forbidden_tokens": NEVER}
    out = run(model, ASKS, mode, streams, **options)
    added = np.zeros(256, np.float32)
    added[list(BIAS)] = list(BIAS.values())
    added[NEVER] = -np.inf
    for ask, tokens in zip(ASKS, out.tokens):
        assert not set(tokens) & set(NEVER)
        if not ask.temperature:
            logits = raw_logits(model, ask.ids + tokens)[len(ask.ids) - 1 : -1]
            assert tokens == (logits + added).argmax(-1).tolist()
    without = run(model, ASKS, mode, streams)
    assert all(tokens != others for tokens, others in zip(out.tokens, without.tokens))
    own = [[], NEVER, [], NEVER, [], [], [], []]
    mixed = run(model, ASKS, mode, streams, forbidden_tokens=own, logit_bias=None)
    for number, never in enumerate(own):
        if not never:
            assert mixed.tokens[number] == without.tokens[number]
        assert not set(mixed.tokens[number]) & set(never)


@speculative_cells
def test_a_bias_acts_on_the_drafter_and_on_the_margin(model, mode, streams):
    """One token is left: every draft is right, and it won by the largest number. Two are left: the
    margin is the difference of their biased logits.
    """

    def all_but(*tokens):
        return sorted(set(range(256)) - set(tokens))

    options = {"max_new_tokens": 19, "temperature": [0.0, 2.0] * 4}
    out = run(model, ASKS, mode, streams, forbidden_tokens=all_but(9), **options)
    for tokens, records in zip(out.tokens, out.rounds):
        assert tokens == [9] * 19
        assert [record.accepted for record in records] == [BLOCK] * 3
        assert {record.margin for record in records} == {float(np.finfo(np.float32).max)}
    options |= {"temperature": [0.0] * 7 + [1.0], "logit_bias": {9: 0.5}}
    out = run(model, ASKS, mode, streams, forbidden_tokens=all_but(9, 11), **options)
    for ask, tokens, records in zip(ASKS, out.tokens, out.rounds):
        logits = raw_logits(model, ask.ids + tokens)[len(ask.ids) - 1 : -1]
        margins = np.abs(logits[:, 9] + np.float32(0.5) - logits[:, 11])
        at = np.cumsum([0, *(record.accepted + 1 for record in records)])[: len(records)]
        assert [record.margin for record in records] == margins[at].tolist()
