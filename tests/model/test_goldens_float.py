"""The golden model without activation quantisation, end to end: every tensor of
goldens/expected_float.safetensors.

Where a check must notice a mistake, the mistake is made and the same comparison is seen to fail.
"""

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.golden_parts import (
    VERIFY,
    draft_case,
    draft_parts,
    embed,
    feed,
    layer_block,
    main_head,
    pad_rows,
    rings_of,
    run,
    speculate,
    stage_keys,
    whole_layer,
)
from helpers.support import max_error, same_sets

LOGITS = 1e-4  # absolute, of values with rms 4
VALUES = 2e-5  # absolute, of values with rms 1
PROMPTS, LAYERS, TAPS, WIDTH = (0, 1, 2), range(7), (4, 5, 6), 128
KEPT = ("out", "attn_in", "attn_out", "moe_in", "moe_out", "chosen", "weights")


@pytest.fixture(scope="module")
def unrolled(golden_float, expected_float):
    """unrolled[prompt][layer]: what each layer computes, layer after layer by hand, NumPy without
    padding; [7]: the logits.
    """
    return [unroll(golden_float, expected_float[f"p{p}.ids"]) for p in PROMPTS]


def unroll(model, ids):
    config, count, outs = model.config, len(ids), []
    streams = run(embed, config, model.module.main, pad_rows(ids))
    for layer in LAYERS:
        out = run(
            whole_layer,
            config,
            layer_block(model, layer),
            streams,
            pad_rows(ids),
            np.array([count], np.int32),
        )
        streams = out["out"]
        index = out.pop("index")
        outs.append({name: out[name][0, :count] for name in KEPT})
        if index is not None:
            outs[-1]["scores"], outs[-1]["picks"] = (
                index[0][0, :count],
                np.where(index[2], index[1], -1)[0, :count],
            )
    return [*outs, run(main_head, config, model.module.main, streams)[0, :count]]


# Main model, end to end


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill(played_float, expected_float, prompt):
    played = played_float[prompt]
    assert max_error(played.prefill_logits, expected_float[f"p{prompt}.prefill_logits"]) < LOGITS
    assert max_error(played.prefill_hidden, expected_float[f"p{prompt}.prefill_hidden"]) < VALUES
    assert played.prefill_logits[-1].argmax() == expected_float[f"p{prompt}.decode_ids"][0]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_decode(played_float, expected_float, prompt):
    played, logits = played_float[prompt], expected_float[f"p{prompt}.decode_logits"]
    assert max_error(played.decode_logits, logits) < LOGITS
    assert np.array_equal(
        played.decode_logits.argmax(-1)[:-1], expected_float[f"p{prompt}.decode_ids"][1:]
    )
    if prompt:
        hidden = expected_float[f"p{prompt}.decode_hidden"]
        assert max_error(played.decode_hidden[: len(hidden)], hidden) < VALUES


def test_decode_one_row_at_a_time(golden_float, played_float, expected_float):
    """As the reference does it: prefill, then single tokens."""
    cache, rows = played_float[0].caches[0], []
    for token in expected_float["p0.decode_ids"]:
        logits, _, cache = feed(golden_float, cache, [token])
        rows.append(logits[0])
    assert max_error(rows, expected_float["p0.decode_logits"]) < LOGITS


def test_compressed_entries_after_prefill_and_decode(played_float, expected_float):
    cache = played_float[2].caches[24]
    of_layer = {2: cache.layers[1][0], 3: cache.layers[2][0]}
    for layer, memory in of_layer.items():
        expected = expected_float[f"p2.comp_kv.{layer}"]
        entries = np.asarray(memory.entries[0, 0])
        assert max_error(entries[: len(expected)], expected) < VALUES
        assert not entries[
            len(expected) :
        ].any()  # an entry exists only when its last token has come
    keys = expected_float["p2.index_kv.2"]
    assert max_error(of_layer[2].index_entries[0, 0, : len(keys)], keys) < VALUES


# Main model, layer by layer


@pytest.mark.heavy
def test_block_outputs(unrolled, expected_float):
    for layer in LAYERS:
        assert (
            max_error(unrolled[0][layer]["out"], expected_float[f"p0.block_out.{layer}"]) < VALUES
        ), layer


def test_routing_of_every_layer(unrolled, expected_float):
    for prompt in PROMPTS:
        for layer in LAYERS:
            assert same_sets(
                unrolled[prompt][layer]["chosen"], expected_float[f"p{prompt}.moe_idx.{layer}"]
            ), (prompt, layer)


def test_attention_of_both_compressed_kinds(unrolled, expected_float):
    for layer in (2, 3):
        for name in ("attn_in", "attn_out"):
            expected = expected_float[f"p2.{name}.{layer}"]
            assert max_error(unrolled[2][layer][name][: len(expected)], expected) < VALUES, (
                layer,
                name,
            )


def test_indexer(unrolled, expected_float):
    scores, picks = unrolled[2][2]["scores"], unrolled[2][2]["picks"]
    expected = expected_float["p2.index_score.2"]
    visible = expected > -np.inf
    assert np.array_equal(visible, np.arange(10) < (np.arange(41)[:, None] + 1) // 4)
    assert max_error(scores[:, :10][visible], expected[visible]) < VALUES
    assert same_sets(picks, expected_float["p2.index_topk.2"])


def test_moe(unrolled, expected_float):
    layer = unrolled[1][4]
    assert max_error(layer["moe_in"], expected_float["p1.moe_in.4"]) < VALUES
    assert max_error(layer["moe_out"], expected_float["p1.moe_out.4"]) < VALUES
    assert np.array_equal(layer["chosen"], expected_float["p1.moe_idx.4"])
    assert max_error(layer["weights"], expected_float["p1.moe_w.4"]) < VALUES


def test_layers_by_hand_give_the_model(unrolled, played_float, expected_float):
    for prompt in PROMPTS:
        assert max_error(unrolled[prompt][7], expected_float[f"p{prompt}.prefill_logits"]) < LOGITS
        assert max_error(unrolled[prompt][7], played_float[prompt].prefill_logits) < LOGITS


# Captured hidden


def tap(hidden, i):
    return hidden[:, i * WIDTH : (i + 1) * WIDTH]


@pytest.mark.parametrize("i", range(3))
def test_hidden_capture(unrolled, played_float, expected_float, i):
    """Each target layer on its own: the plain mean of the streams of that layer's output, at that
    position.
    """
    for prompt in PROMPTS:
        mean = unrolled[prompt][TAPS[i]]["out"].mean(axis=1)
        for hidden in (
            played_float[prompt].prefill_hidden,
            expected_float[f"p{prompt}.prefill_hidden"],
        ):
            assert max_error(tap(hidden, i), mean) < VALUES


@pytest.mark.parametrize("i", range(3))
def test_hidden_capture_notices_mistakes(unrolled, expected_float, i):
    layers, hidden = unrolled[1], tap(expected_float["p1.prefill_hidden"], i)
    out = layers[TAPS[i]]["out"]
    mean = out.mean(axis=1)
    wrong = {
        "the layer's input": layers[TAPS[i] - 1]["out"].mean(axis=1),
        "the next position": np.roll(mean, -1, axis=0),
        "sum of streams": out.sum(axis=1),
        "first stream": out[:, 0],
        "half of the streams": out[:, :2].mean(axis=1),
        "after a norm": mean / np.sqrt(np.mean(mean**2, axis=-1, keepdims=True)),
    }
    for name, values in wrong.items():
        assert max_error(values, hidden) > 1000 * VALUES, name


def test_hidden_of_every_position_is_its_own(played_float, expected_float):
    for prompt in (1, 2):
        hidden = expected_float[f"p{prompt}.decode_hidden"]
        found = played_float[prompt].decode_hidden[: len(hidden)]
        assert np.abs(found[1:] - hidden[:-1]).max(axis=-1).min() > 1000 * VALUES


# Drafter


@pytest.mark.parametrize("case, steps", [(0, 0), (1, 9), (2, 24)])
def test_draft(golden_float, played_float, expected_float, case, steps):
    cache, name = played_float[case].caches[steps], f"d{case}."
    assert int(cache.position[0]) == expected_float[name + "start"][0] + 1
    draft = dspark.draft(golden_float, cache, expected_float[name + "committed"])
    assert np.array_equal(draft.tokens[0], expected_float[name + "draft_ids"])
    assert max_error(draft.logits[0], expected_float[name + "logits"]) < LOGITS
    assert max_error(draft.confidence[0], expected_float[name + "confidence"]) < VALUES


@pytest.mark.parametrize("case", [0, 1, 2])
def test_draft_part_by_part(golden_float, expected_float, case):
    """From the golden hidden states alone: main_x, the rings, every stage, the heads."""
    inputs, name, config = draft_case(expected_float, case), f"d{case}.", golden_float.config
    seed = min(inputs.start, 15)
    main_x, keys = run(
        stage_keys, config, golden_float.module.drafter, inputs.hidden[None], inputs.positions[None]
    )
    assert np.array_equal(inputs.hidden[seed], expected_float[name + "main_hidden"])
    assert max_error(main_x[0, seed], expected_float[name + "main_x"]) < VALUES
    parts = run(
        draft_parts,
        config,
        golden_float.module,
        rings_of(keys, inputs),
        inputs.position,
        inputs.token,
    )
    for stage in range(3):
        assert (
            max_error(parts["stage_out"][stage, 0], expected_float[f"{name}stage_out.{stage}"])
            < VALUES
        )
        assert same_sets(parts["chosen"][stage, 0], expected_float[f"{name}moe_idx.{stage}"])
    assert max_error(parts["head_hidden"][0], expected_float[name + "head_hidden"]) < VALUES
    assert max_error(parts["base_logits"][0], expected_float[name + "base_logits"]) < LOGITS
    assert max_error(parts["draft"].logits[0], expected_float[name + "logits"]) < LOGITS
    assert np.array_equal(parts["draft"].tokens[0], expected_float[name + "draft_ids"])


def test_stage_rings(golden_float, played_float, expected_float):
    """Primed by the main model for every committed position: in the cache after prefill and 9
    steps; from the hidden alone.
    """
    inputs = draft_case(expected_float, 1)
    _, keys = run(
        stage_keys,
        golden_float.config,
        golden_float.module.drafter,
        inputs.hidden[None],
        inputs.positions[None],
    )
    stages = np.asarray(played_float[1].caches[9].drafter.rings)
    for stage in range(3):
        expected = expected_float[f"d1.ring.{stage}"]
        assert max_error(rings_of(keys, inputs)[stage, 0], expected) < VALUES
        cached = np.zeros_like(expected)
        for position in inputs.positions:
            cached[position % 16] = stages[stage, 0, position % stages.shape[2]]
        assert max_error(cached, expected) < VALUES


@pytest.mark.heavy
def test_draft_from_an_explicit_hidden(golden_float, played_float, expected_float):
    """The seed's own hidden changes nothing; another one changes this draft and leaves the cache
    alone.
    """
    cache, token = played_float[1].caches[9], expected_float["d1.committed"]
    before = np.array(cache.drafter.rings)
    same = dspark.draft(golden_float, cache, token, hidden=expected_float["d1.main_hidden"][None])
    assert max_error(same.logits[0], expected_float["d1.logits"]) < LOGITS
    other = dspark.draft(golden_float, cache, token, hidden=expected_float["d2.main_hidden"][None])
    assert max_error(other.logits[0], expected_float["d1.logits"]) > 100 * LOGITS
    assert np.array_equal(before, cache.drafter.rings)


# Speculative loop


@pytest.mark.parametrize("prompt", [1, 2])
def test_speculative_log(golden_float, expected_float, prompt):
    log = speculate(golden_float, expected_float[f"p{prompt}.ids"], rounds=8)
    for name in ("pos", "committed", "draft_ids", "accepted", "verify_ids", "emitted"):
        assert np.array_equal(log[name], expected_float[f"spec{prompt}.{name}"]), name
    assert max_error(log["confidence"], expected_float[f"spec{prompt}.confidence"]) < VALUES
    assert log["verify_ids"].shape == (8, VERIFY)


def test_speculation_emits_what_plain_decoding_does(expected_float):
    for prompt in (1, 2):
        assert np.array_equal(
            expected_float[f"spec{prompt}.emitted"][:24], expected_float[f"p{prompt}.decode_ids"]
        )
