"""The drafter: head parity with planted mistakes, what a draft depends on, every loaded tensor used
(float mode).
"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.config import ModelConfig
from dspark_jax.model import dspark_drafter
from dspark_jax.model.dspark_drafter import DraftCache, DSparkDrafter
from dspark_jax.model.layers.attention import absorb, finish, start
from dspark_jax.model.layers.rope import rotation

from helpers.golden_parts import (
    draft_case,
    draft_of,
    draft_parts,
    run,
    run_changed,
)
from helpers.support import GOLDENS, MAX_SEQ_LEN, max_error

LOGITS, VALUES = 1e-4, 2e-5  # absolute, as in test_goldens_float.py
NOTICED = 100  # a mistake deviates by at least so many tolerances
CONFIG = ModelConfig.from_file(GOLDENS)
K, NOISE = CONFIG.dspark_block_size, CONFIG.dspark_noise_token_id


# Head parity


@pytest.fixture(scope="module")
def heads(golden_float):
    """Weights of the heads, float64."""
    drafter = golden_float.module.drafter
    return {
        name: np.asarray(getattr(drafter, name)[...], np.float64)
        for name in ("markov_w1", "markov_w2", "confidence")
    }


@pytest.mark.parametrize("case", [0, 1, 2])
def test_markov_head(expected_float, heads, case):
    """Row i gets the bias of its predecessor's token, the anchor before row 0; computed by hand
    from the golden base logits.
    """
    name = f"d{case}."
    base, logits, ids = (
        expected_float[name + part] for part in ("base_logits", "logits", "draft_ids")
    )
    anchor = expected_float[name + "committed"]

    def with_bias_of(tokens):
        return base + heads["markov_w1"][tokens] @ heads["markov_w2"].T

    assert max_error(with_bias_of(np.append(anchor, ids[:-1])), logits) < LOGITS
    assert np.array_equal(logits.argmax(-1), ids)
    mistakes = {
        "no Markov bias": base,
        "biases from the input token": with_bias_of(np.append(anchor, [NOISE] * (K - 1))),
        "biases from the row's own token": with_bias_of(ids),
        "all from the anchor": with_bias_of(np.repeat(anchor, K)),
    }
    for mistake, values in mistakes.items():
        assert max_error(values, logits) > NOTICED * LOGITS, mistake


@pytest.mark.parametrize("case", [0, 1, 2])
def test_confidence_head(expected_float, heads, case):
    """From the head's input before its norm and the predecessor's embedding; raw."""
    name = f"d{case}."
    y, ids, expected = (
        expected_float[name + part] for part in ("head_hidden", "draft_ids", "confidence")
    )
    previous = np.append(expected_float[name + "committed"], ids[:-1])

    def confidence(y, tokens):
        return np.concatenate([y, heads["markov_w1"][tokens]], axis=-1) @ heads["confidence"][0]

    assert max_error(confidence(y, previous), expected) < VALUES
    normed = y / np.sqrt(np.mean(y.astype(np.float64) ** 2, axis=-1, keepdims=True))
    mistakes = {
        "after the norm": confidence(normed, previous),
        "own token": confidence(y, ids),
        "sigmoid": 1 / (1 + np.exp(-confidence(y, previous))),
    }
    for mistake, values in mistakes.items():
        assert max_error(values, expected) > NOTICED * VALUES, mistake


def test_confidences_are_summed_in_float32():
    """In a bfloat16 model, too: products of bfloat16 numbers, exact in float32, against their sum
    in float64.
    """
    drafter = dspark.load(GOLDENS, max_seq_len=MAX_SEQ_LEN, dtype="bfloat16").module.drafter
    rng = np.random.default_rng(0)
    y, previous = (
        jnp.asarray(rng.normal(0, 3, (2, K, CONFIG.hidden_size)), jnp.bfloat16),
        rng.integers(0, 256, (2, K)),
    )
    actual = drafter.confidences(y, jnp.asarray(previous))
    w1, weight = (
        np.asarray(parameter[...]).astype(np.float64)
        for parameter in (drafter.markov_w1, drafter.confidence)
    )
    products = np.concatenate([np.asarray(y, np.float64), w1[previous]], axis=-1) * weight[0]
    assert actual.dtype == jnp.float32
    assert np.all(np.abs(actual - products.sum(-1)) < 1e-6 * np.abs(products).sum(-1))


def test_the_confidence_of_a_draft_that_is_not_finite_is_nan(golden_float, expected_float):
    """Also where the confidence head's input is sound: the damage is in the norm of the logits, or
    in the Markov head of one token.
    """
    base, _ = draft_of(golden_float, expected_float)
    assert np.isfinite(base.confidence).all()

    def damaged(a):
        a[base.tokens[2]] = np.nan
        return a

    draft, _ = draft_of(golden_float, expected_float, change={"drafter.markov_w1": damaged})
    assert np.isnan(draft.confidence).tolist() == [False, False, False, True, False]
    draft, _ = draft_of(
        golden_float,
        expected_float,
        change={"drafter.norm.weight": lambda a: np.full_like(a, np.nan)},
    )
    assert np.isnan(draft.confidence).all()


def mean_of_streams(a):
    return np.full_like(a, np.log(1 / 3))  # sigmoid gives one quarter to each of four streams


def test_draft_heads_notice_mistakes(golden_float, expected_float):
    draft, _ = draft_of(golden_float, expected_float)
    golden = expected_float["d1.logits"]
    assert (
        max_error(draft.logits, golden) < LOGITS
        and max_error(draft.confidence, expected_float["d1.confidence"]) < VALUES
    )
    embedding = np.array(golden_float.module.main.embed[...])
    mistakes = {
        "mean instead of the head's gate": {
            "drafter.collapse.fn": np.zeros_like,
            "drafter.collapse.base": mean_of_streams,
        },
        "no Markov bias": {"drafter.markov_w2": np.zeros_like},
        "no norm weight": {"drafter.norm.weight": np.ones_like},
        "embedding as head": {"main.head": lambda a: embedding},
        "one swapped expert": {
            "drafter.stages.0.ffn.experts.w13": lambda a: a[:, [1, 0, *range(2, 8)]]
        },
        "stages in another order": {"drafter.stages.0.attn.wkv": lambda a: a[::-1]},
    }
    for mistake, change in mistakes.items():
        assert (
            max_error(draft_of(golden_float, expected_float, change=change)[0].logits, golden)
            > NOTICED * LOGITS
        ), mistake


def golden_rings(expected):
    return np.stack([expected[f"d1.ring.{stage}"][None] for stage in range(3)])


def compressed_table(monkeypatch):
    monkeypatch.setattr(
        dspark_drafter,
        "rotation",
        lambda config, compressed, positions: rotation(config, True, positions),
    )


def causal_block(monkeypatch):
    def attend(self, attn, x, turn, ring, visible):
        _, q = attn.queries(x, turn)
        running = absorb(start(attn.sink[...], q), q, ring, visible)
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((K, K), bool)), (x.shape[0], K, K))
        running = absorb(running, q, attn.keys(x, turn), causal)
        return attn.output(finish(running, self.numerics.dtype), turn), None

    monkeypatch.setattr(DSparkDrafter, "_attend", attend)


def draft_from_rings(runner, model, rings, position, token):
    return runner(draft_parts, CONFIG, model.module, rings, position, token)["draft"].logits[0]


@pytest.mark.heavy
@pytest.mark.parametrize("mistake", [compressed_table, causal_block])
def test_stages_notice(golden_float, expected_float, monkeypatch, mistake):
    case, rings = draft_case(expected_float, 1), golden_rings(expected_float)
    assert (
        max_error(
            draft_from_rings(run, golden_float, rings, case.position, case.token),
            expected_float["d1.logits"],
        )
        < LOGITS
    )
    mistake(monkeypatch)
    wrong = draft_from_rings(run_changed, golden_float, rings, case.position, case.token)
    assert max_error(wrong, expected_float["d1.logits"]) > NOTICED * LOGITS


def test_anchor_stands_one_after_the_seed(golden_float, expected_float):
    """The block turned one position early or late over the same keys, or the seed's key missing, is
    noticed.
    """
    case, rings = draft_case(expected_float, 1), golden_rings(expected_float)
    without = rings.copy()
    without[:, :, case.start % 16] = without[:, :, (case.start - 15) % 16]
    for wrong_rings, position in (
        (rings, case.position - 1),
        (rings, case.position + 1),
        (without, case.position),
    ):
        wrong = draft_from_rings(run, golden_float, wrong_rings, position, case.token)
        assert max_error(wrong, expected_float["d1.logits"]) > NOTICED * LOGITS


# What a draft depends on


def test_draft_sensitivity(golden_float, expected_float):
    """Anchor, position, every slot of every ring, and every captured hidden change the draft."""
    case, rings = draft_case(expected_float, 1), golden_rings(expected_float)
    least = 1e-3

    def logits(rings=rings, position=case.position, token=case.token):
        return draft_from_rings(run, golden_float, rings, position, token)

    base = logits()
    assert np.abs(logits(token=(case.token + 1) % 256) - base).max(axis=-1).min() > least
    assert np.abs(logits(position=case.position + 1) - base).max(axis=-1).min() > least
    for stage in range(3):
        for slot in range(16):
            other = rings.copy()
            other[stage, 0, slot] = np.roll(other[stage, 0, slot], 1)
            assert np.abs(logits(other) - base).max(axis=-1).min() > least, (stage, slot)
    for row in range(16):
        hidden = case.hidden[None].copy()
        hidden[0, row] = np.roll(hidden[0, row], 1)
        changed = draft_of(golden_float, expected_float, hidden=hidden)[0].logits
        assert np.abs(changed - base).max(axis=-1).min() > least, row


def test_only_relative_positions_matter(golden_float, expected_float):
    """All positions moved alike, far beyond where they were: rotary scores depend on differences
    only.
    """
    positions = draft_case(expected_float, 1).positions[None].astype(np.int32)
    base, _ = draft_of(golden_float, expected_float)
    moved, _ = draft_of(golden_float, expected_float, positions=positions + 16 * 4000)
    assert max_error(moved.logits, base.logits) < 10 * LOGITS


def test_only_the_window_up_to_the_seed_is_seen(golden_float, played_float, expected_float):
    """Ring slots of other positions hold anything at all: the same bits."""
    cache, token = played_float[1].caches[9], expected_float["d1.committed"]
    size, seed = cache.drafter.rings.shape[2], int(cache.position[0]) - 1
    seen = (seed - np.arange(16)) % size
    rings = np.full(cache.drafter.rings.shape, 1e3, np.float32)
    rings[:, :, seen] = np.asarray(cache.drafter.rings)[:, :, seen]

    def draft(rings):
        changed = cache.replace(drafter=DraftCache(jnp.asarray(rings)))
        return dspark.draft(golden_float, changed, token)

    right, junk = dspark.draft(golden_float, cache, token), draft(rings)
    assert np.array_equal(right.logits, junk.logits) and np.array_equal(
        right.confidence, junk.confidence
    )
    rings[:, :, (seed - 15) % size] = 0
    assert max_error(draft(rings).logits, right.logits) > 1e-3


def test_draft_after_many_steps_equals_a_cold_one(golden_float, played_float, expected_float):
    """Every committed position primed the rings: after four windows of decoding, as after a prefill
    of the same tokens.
    """
    tokens = np.concatenate([expected_float["p2.ids"], expected_float["p2.decode_ids"]])
    _, _, cold = dspark.prefill(golden_float, tokens.tolist())
    warm = played_float[2].caches[24]
    assert int(cold.position[0]) == int(warm.position[0]) == 65
    a, b = (
        dspark.draft(golden_float, cache, expected_float["d2.committed"]) for cache in (cold, warm)
    )
    assert np.array_equal(a.tokens, b.tokens) and max_error(a.logits, b.logits) < VALUES


# Arguments


def test_fewer_drafts_are_the_leading_ones(golden_float, played_float, expected_float):
    cache, token = played_float[1].caches[9], expected_float["d1.committed"]
    whole = dspark.draft(golden_float, cache, token)
    for count in range(1, K + 1):
        fewer = dspark.draft(golden_float, cache, token, count=jnp.int32(count))
        assert fewer.tokens.shape == (1, count)
        for name in ("tokens", "logits", "confidence"):
            assert np.array_equal(getattr(fewer, name), getattr(whole, name)[:, :count])


@pytest.mark.parametrize(
    "count, problem",
    [
        *((n, f"{n} drafts asked for, dspark_block_size is {K}") for n in (K + 1, 0, -1)),
        (2.5, "2.5 is not an integer"),
        (jnp.float32(2), "is not an integer"),
    ],
)
def test_more_drafts_than_the_block_are_refused(golden_float, played_float, count, problem):
    with pytest.raises(dspark.ConfigError, match=f"count: .*{re.escape(problem)}"):
        dspark.draft(golden_float, played_float[1].caches[0], [1], count=count)


def test_draft_needs_a_committed_token(golden_float):
    with pytest.raises(dspark.PromptError, match="position 0"):
        dspark.draft(golden_float, dspark.new_cache(golden_float), [1])


@pytest.mark.parametrize("token", [-1, 256])
def test_anchor_outside_the_vocabulary_is_refused(golden_float, played_float, token):
    with pytest.raises(dspark.PromptError, match=f"token id {token}"):
        dspark.draft(golden_float, played_float[1].caches[0], [token])
