"""The golden model with activation quantisation, which is discontinuous: one rounding flip changes
an element by 6 to 12 %.

Tight: each part is fed the golden input of just that part. Nearly all elements then agree to
float32 rounding, and a few flips stay below a deviation of 0.8 % (rms / rms), which every single
mistake exceeds (goldens/README.md has the table). Loose: end to end all ids agree, and the
deviations stay within three times what other float32 evaluations showed (envelope_reference.json).
"""

import json

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import pallas_kernels
from dspark_jax.model.layers import indexer, numerics
from dspark_jax.model.layers.attention import Attention
from dspark_jax.model.layers.indexer import Indexer, hadamard
from dspark_jax.pallas_kernels import xla
from dspark_jax.pallas_kernels.activation import act_quant

from helpers.golden_parts import (
    attention,
    draft_case,
    draft_parts,
    embed,
    layer_block,
    main_head,
    moe,
    pad_rows,
    rings_of,
    rotary_rows,
    run,
    run_changed,
    speculate,
    stage_keys,
    whole_layer,
)
from helpers.support import GOLDENS, rms, rms_error, same_sets

TIGHT = 0.008  # rms / rms, from goldens/README.md
TYPICAL = 1e-5  # median deviation / rms: what a rounding flip elsewhere does not touch
ENVELOPE = json.loads((GOLDENS / "envelope_reference.json").read_text())["tensors"]
LAYERS, NONE_DONE = range(7), np.zeros(1, np.int32)


def assert_tight(actual, expected, what=""):
    expected = np.asarray(expected, np.float64)
    assert rms_error(actual, expected) < TIGHT, what
    assert np.median(np.abs(np.asarray(actual, np.float64) - expected)) < TYPICAL * rms(expected), (
        what
    )


# Teacher-forced parts


IN_MAKE_TEST = (2,)  # compressed, with an indexer, routed by token id


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(layer, marks=() if layer in IN_MAKE_TEST else pytest.mark.heavy)
        for layer in LAYERS
    ],
)
def test_block(golden_reference, expected_reference, layer):
    """Every layer from the golden output of the one before it, prompt 0."""
    model, ids = golden_reference, expected_reference["p0.ids"]
    config, count = model.config, np.array([len(ids)], np.int32)
    streams = (
        pad_rows(expected_reference[f"p0.block_out.{layer - 1}"])
        if layer
        else run(embed, config, model.module.main, pad_rows(ids))
    )
    out = run(whole_layer, config, layer_block(model, layer), streams, pad_rows(ids), count)
    assert_tight(out["out"][0, : len(ids)], expected_reference[f"p0.block_out.{layer}"])
    assert same_sets(out["chosen"][0, : len(ids)], expected_reference[f"p0.moe_idx.{layer}"])


def test_head(golden_reference, expected_reference):
    model, streams = golden_reference, expected_reference["p0.block_out.6"]
    logits = run(main_head, model.config, model.module.main, pad_rows(streams))
    assert_tight(logits[0, : len(streams)], expected_reference["p0.prefill_logits"])


def attend(runner, model, expected, layer):
    """Attention of prompt 2 from its golden input: output without padding, cache, indexer."""
    x = expected[f"p2.attn_in.{layer}"]
    rows = run(
        rotary_rows,
        model.config,
        layer_block(model, 0).attn_norm,
        NONE_DONE,
        np.array([len(x)], np.int32),
    )
    y, cache, index = runner(attention, model.config, layer_block(model, layer), pad_rows(x), rows)
    return y[0, : len(x)], cache, index


@pytest.mark.parametrize("layer, ratio", [(2, 4), (3, 8)])
def test_attention(golden_reference, expected_reference, layer, ratio):
    y, cache, _ = attend(run, golden_reference, expected_reference, layer)
    assert_tight(y, expected_reference[f"p2.attn_out.{layer}"])
    complete = len(y) // ratio
    assert_tight(
        cache.entries[0, 0, :complete], expected_reference[f"p2.comp_kv.{layer}"][:complete]
    )


def index_of(runner, model, expected):
    """Indexer keys [10, di], scores [41, 10] and picks [41, K] of prompt 2."""
    _, cache, (scores, ids, found) = attend(runner, model, expected, 2)
    return cache.index_entries[0, 0, :10], scores[0, :41, :10], np.where(found, ids, -1)[0, :41]


def test_indexer(golden_reference, expected_reference):
    keys, scores, picks = index_of(run, golden_reference, expected_reference)
    expected = expected_reference["p2.index_score.2"]
    assert_tight(keys, expected_reference["p2.index_kv.2"][:10])
    assert_tight(scores[expected > -np.inf], expected[expected > -np.inf])
    assert same_sets(picks, expected_reference["p2.index_topk.2"])


def moe_of(runner, model, expected, change=lambda block: None):
    x = expected["p1.moe_in.4"]
    block = layer_block(model, 4)
    change(block)
    mask = pad_rows(np.ones(len(x), bool))
    y, (chosen, weights, _) = runner(
        moe, model.config, block, pad_rows(x), pad_rows(expected["p1.ids"]), mask
    )
    return y[0, : len(x)], chosen[0, : len(x)], weights[0, : len(x)]


def test_moe(golden_reference, expected_reference):
    y, chosen, weights = moe_of(run, golden_reference, expected_reference)
    assert_tight(y, expected_reference["p1.moe_out.4"])
    assert np.array_equal(chosen, expected_reference["p1.moe_idx.4"])
    assert_tight(weights, expected_reference["p1.moe_w.4"])


def draft_of(runner, model, expected, case):
    inputs = draft_case(expected, case)
    main_x, keys = runner(
        stage_keys, model.config, model.module.drafter, inputs.hidden[None], inputs.positions[None]
    )
    rings = rings_of(keys, inputs)
    parts = runner(draft_parts, model.config, model.module, rings, inputs.position, inputs.token)
    return main_x[0, min(inputs.start, 15)], rings, parts


@pytest.mark.heavy
@pytest.mark.parametrize("case", [0, 1, 2])
def test_draft(golden_reference, expected_reference, case):
    main_x, rings, parts = draft_of(run, golden_reference, expected_reference, case)
    name = f"d{case}."
    assert_tight(main_x, expected_reference[name + "main_x"])
    for stage in range(3):
        if case == 1:
            assert_tight(rings[stage, 0], expected_reference[f"d1.ring.{stage}"])
        assert_tight(parts["stage_out"][stage, 0], expected_reference[f"{name}stage_out.{stage}"])
        assert same_sets(parts["chosen"][stage, 0], expected_reference[f"{name}moe_idx.{stage}"])
    for part in ("head_hidden", "base_logits"):
        assert_tight(parts[part][0], expected_reference[name + part], part)
    assert_tight(parts["draft"].logits[0], expected_reference[name + "logits"])
    assert_tight(parts["draft"].confidence[0], expected_reference[name + "confidence"])
    assert np.array_equal(parts["draft"].tokens[0], expected_reference[name + "draft_ids"])


# The same comparisons notice every single mistake. `make test` makes some of them.


def no_linear_quantisation(monkeypatch):
    monkeypatch.setattr(
        numerics, "act_quant", lambda x, block: x if block == 128 else act_quant(x, block)
    )
    monkeypatch.setattr(numerics, "act_quant_of_part", lambda x, *_: x, raising=False)
    monkeypatch.setattr(xla, "maybe_quantise", lambda x, _: x)


def no_key_quantisation(monkeypatch):
    monkeypatch.setattr(Attention, "quantise_key", lambda self, key: key)


def whole_key_quantised(monkeypatch):
    monkeypatch.setattr(Attention, "quantise_key", lambda self, key: act_quant(key, 64))


def no_index_quantisation(monkeypatch):
    monkeypatch.setattr(Indexer, "quantise", lambda self, x: hadamard(x))


def weight_after_w2(monkeypatch):
    right = pallas_kernels.moe_fp4

    def wrong(x, ids, weights, mask, experts, **options):
        routes = range(ids.shape[1])
        outs = [
            right(x, ids[:, a : a + 1], weights[:, a : a + 1] * 0 + 1, mask, experts, **options)
            for a in routes
        ]
        return sum(weights[:, a : a + 1] * outs[a] for a in routes)

    monkeypatch.setattr(pallas_kernels, "moe_fp4", wrong)


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    "mistake", [no_linear_quantisation, pytest.param(weight_after_w2, marks=HEAVY)]
)
def test_moe_notices(golden_reference, expected_reference, monkeypatch, mistake):
    mistake(monkeypatch)
    y, _, _ = moe_of(run_changed, golden_reference, expected_reference)
    assert rms_error(y, expected_reference["p1.moe_out.4"]) > 2 * TIGHT


@HEAVY
def test_moe_notices_a_shared_expert_without_clamp(golden_reference, expected_reference):
    def unclamped(block):
        block.ffn.shared.limit = float("inf")

    y, _, _ = moe_of(run_changed, golden_reference, expected_reference, unclamped)
    assert rms_error(y, expected_reference["p1.moe_out.4"]) > 2 * TIGHT


@pytest.mark.parametrize(
    "layer, mistake",
    [
        pytest.param(2, no_linear_quantisation, marks=HEAVY),
        pytest.param(2, no_key_quantisation, marks=HEAVY),
        pytest.param(2, no_index_quantisation, marks=HEAVY),
        pytest.param(3, no_linear_quantisation, marks=HEAVY),
        pytest.param(3, no_key_quantisation, marks=HEAVY),
        (3, whole_key_quantised),
    ],
)
def test_attention_notices(golden_reference, expected_reference, monkeypatch, layer, mistake):
    mistake(monkeypatch)
    y, _, _ = attend(run_changed, golden_reference, expected_reference, layer)
    assert rms_error(y, expected_reference[f"p2.attn_out.{layer}"]) > 2 * TIGHT


@HEAVY
def test_indexer_notices_a_missing_hadamard(golden_reference, expected_reference, monkeypatch):
    monkeypatch.setattr(indexer, "hadamard", lambda x: x)
    keys, scores, _ = index_of(run_changed, golden_reference, expected_reference)
    expected = expected_reference["p2.index_score.2"]
    assert rms_error(keys, expected_reference["p2.index_kv.2"][:10]) > 10 * TIGHT
    assert rms_error(scores[expected > -np.inf], expected[expected > -np.inf]) > 2 * TIGHT


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(no_linear_quantisation, marks=HEAVY),
        pytest.param(no_key_quantisation, marks=HEAVY),
        pytest.param(weight_after_w2, marks=HEAVY),
    ],
)
def test_stages_notice(golden_reference, expected_reference, monkeypatch, mistake):
    mistake(monkeypatch)
    _, _, parts = draft_of(run_changed, golden_reference, expected_reference, 1)
    assert rms_error(parts["stage_out"][2, 0], expected_reference["d1.stage_out.2"]) > TIGHT


@HEAVY
def test_stages_notice_a_shared_expert_without_clamp(
    golden_reference, expected_reference, monkeypatch
):
    monkeypatch.setattr(golden_reference.module.drafter.stages[0].ffn.shared, "limit", float("inf"))
    _, _, parts = draft_of(run_changed, golden_reference, expected_reference, 1)
    assert rms_error(parts["stage_out"][2, 0], expected_reference["d1.stage_out.2"]) > 2 * TIGHT


# End to end


def assert_within_envelope(actual, expected, name):
    deviation = rms(np.asarray(actual, np.float64) - expected[name])
    assert deviation < 3 * ENVELOPE[name]["rms_dev"], (name, deviation)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_prefill_and_decode(played_reference, expected_reference, prompt):
    played, name = played_reference[prompt], f"p{prompt}."
    ids = np.append(played.prefill_logits[-1].argmax(), played.decode_logits[:-1].argmax(-1))
    assert np.array_equal(ids, expected_reference[name + "decode_ids"])
    for part in ("prefill_logits", "prefill_hidden", "decode_logits"):
        assert_within_envelope(getattr(played, part), expected_reference, name + part)
    if prompt:
        rows = len(expected_reference[name + "decode_hidden"])
        assert_within_envelope(
            played.decode_hidden[:rows], expected_reference, name + "decode_hidden"
        )


def test_compressed_entries(played_reference, expected_reference):
    cache = played_reference[2].caches[24]
    for layer, memory in {2: cache.layers[1][0], 3: cache.layers[2][0]}.items():
        count = len(expected_reference[f"p2.comp_kv.{layer}"])
        assert_within_envelope(
            memory.entries[0, 0, :count], expected_reference, f"p2.comp_kv.{layer}"
        )
    assert_within_envelope(
        cache.layers[1][0].index_entries[0, 0, :16], expected_reference, "p2.index_kv.2"
    )


@pytest.mark.parametrize("case, steps", [(0, 0), (1, 9), (2, 24)])
def test_drafts(golden_reference, played_reference, expected_reference, case, steps):
    name = f"d{case}."
    draft = dspark.draft(
        golden_reference,
        played_reference[case].caches[steps],
        expected_reference[name + "committed"],
    )
    assert np.array_equal(draft.tokens[0], expected_reference[name + "draft_ids"])
    assert_within_envelope(draft.logits[0], expected_reference, name + "logits")
    assert_within_envelope(draft.confidence[0], expected_reference, name + "confidence")


@pytest.mark.parametrize("prompt", [1, 2])
def test_speculative_log(golden_reference, expected_reference, prompt):
    log = speculate(golden_reference, expected_reference[f"p{prompt}.ids"], rounds=8)
    for name in ("pos", "committed", "draft_ids", "accepted", "verify_ids", "emitted"):
        assert np.array_equal(log[name], expected_reference[f"spec{prompt}.{name}"]), name
    assert_within_envelope(log["confidence"], expected_reference, f"spec{prompt}.confidence")


def test_the_loose_bounds_notice_gross_mistakes(expected_reference):
    """They cannot tell the modes apart (the tight checks do), but they notice a shifted row or a
    missing Markov term.
    """
    name = "p1.decode_logits"
    with pytest.raises(AssertionError, match=name):
        assert_within_envelope(
            np.roll(expected_reference[name], 1, axis=0), expected_reference, name
        )
    with pytest.raises(AssertionError, match="d1.logits"):
        assert_within_envelope(
            expected_reference["d1.base_logits"], expected_reference, "d1.logits"
        )
