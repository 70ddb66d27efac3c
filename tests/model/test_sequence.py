"""The differentiable whole-sequence path gives what prefill, decode and draft give (float mode),
and the goldens.
"""

import types

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.model import whole_sequence
from dspark_jax.model.segments import segments

from helpers.golden_parts import run
from helpers.support import max_error, same_sets

LENGTH, RELATIVE = 72, 1e-5


def both_paths(config, module, tokens, anchors):
    logits, hidden, aux = whole_sequence.forward(module.main, tokens)
    return (
        logits,
        hidden,
        aux,
        *whole_sequence.draft_forward(module.drafter, module.main, hidden, tokens, anchors),
    )


@pytest.fixture(scope="module")
def whole(golden_float, expected_float):
    """The three golden prompts with their greedy continuation, and from the anchor of each draft
    case on the golden draft.

    Two anchors a sequence: another one, and the draft case's own.
    """
    tokens, anchors = np.zeros((3, LENGTH), np.int32), np.zeros((3, 2), np.int32)
    for i, other in enumerate((3, 17, 40)):
        fed = np.concatenate([expected_float[f"p{i}.ids"], expected_float[f"p{i}.decode_ids"]])
        anchor = int(expected_float[f"d{i}.start"][0]) + 1
        drafted = [expected_float[f"d{i}.committed"][0], *expected_float[f"d{i}.draft_ids"]]
        tokens[i, :anchor], tokens[i, anchor : anchor + 6] = fed[:anchor], drafted
        anchors[i] = other, anchor
    out = run(both_paths, golden_float.config, golden_float.module, tokens, anchors)
    named = dict(zip(("logits", "hidden", "aux", "draft", "confidence"), out))
    return types.SimpleNamespace(tokens=tokens, anchors=anchors, **named)


def relative(actual, expected):
    return max_error(actual, expected) / np.abs(expected).max()


@pytest.mark.heavy
@pytest.mark.parametrize("prompt", range(3))
def test_forward_equals_prefill_and_decode(whole, played_float, expected_float, prompt):
    """Also with other tokens after them: what comes later changes nothing."""
    played, count = played_float[prompt], len(expected_float[f"p{prompt}.ids"])
    steps = whole.anchors[prompt, 1] - count
    for name in ("logits", "hidden"):
        values = getattr(whole, name)[prompt]
        assert relative(values[:count], getattr(played, f"prefill_{name}")) < RELATIVE
        assert relative(values[:count], expected_float[f"p{prompt}.prefill_{name}"]) < RELATIVE
        if steps:
            assert (
                relative(values[count : count + steps], getattr(played, f"decode_{name}")[:steps])
                < RELATIVE
            )


def test_forward_routes_and_scores_like_decoding(whole, golden_float, expected_float):
    for plan, outs in zip(segments(golden_float.config), whole.aux):
        for member, aux in enumerate(outs):
            for repeat, layer in enumerate(plan.layer_ids(member)):
                for prompt in range(3):
                    expected = expected_float[f"p{prompt}.moe_idx.{layer}"]
                    assert same_sets(aux.chosen[repeat, prompt, : len(expected)], expected), (
                        layer,
                        prompt,
                    )
    scores, expected = (
        whole.aux[1][0].index_scores[0, 2, :41, :10],
        expected_float["p2.index_score.2"],
    )
    assert np.array_equal(scores > -np.inf, expected > -np.inf)
    assert relative(scores[expected > -np.inf], expected[expected > -np.inf]) < RELATIVE


def test_index_targets_are_shares_of_attention(whole):
    for outs in whole.aux:
        for aux in outs:
            if aux.index_target is None:
                continue
            invisible = aux.index_scores == -np.inf
            assert (aux.index_target >= 0).all() and not aux.index_target[invisible].any()
            assert (aux.index_target.sum(-1) < 1).all() and aux.index_target.max() > 0.01


@pytest.mark.parametrize("case", range(3))
def test_draft_forward_equals_draft(whole, expected_float, case):
    assert relative(whole.draft[case, 1], expected_float[f"d{case}.logits"]) < RELATIVE
    assert relative(whole.confidence[case, 1], expected_float[f"d{case}.confidence"]) < RELATIVE


@pytest.mark.parametrize("case", range(3))
def test_draft_forward_at_another_anchor(whole, golden_float, case):
    """Row 0 does not depend on what follows; anchors inside the first window, at its end and after
    it.
    """
    anchor = int(whole.anchors[case, 0])
    _, _, cache = dspark.prefill(golden_float, whole.tokens[case, :anchor].tolist())
    draft = dspark.draft(golden_float, cache, whole.tokens[case, anchor : anchor + 1])
    assert relative(whole.draft[case, 0, 0], draft.logits[0, 0]) < RELATIVE
    assert abs(whole.confidence[case, 0, 0] - draft.confidence[0, 0]) < RELATIVE
    assert relative(whole.draft[case, 0, 0], whole.draft[case, 1, 0]) > 1000 * RELATIVE
