"""Attention, experts and head on golden inputs (float mode), with planted mistakes, and what a
layer promises.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax.model.layers.attention
from dspark_jax.config import ModelConfig
from dspark_jax.model.layers import cached, compressor
from dspark_jax.model.layers.compressor import Compressor
from dspark_jax.model.layers.moe import MoE
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import rotate, rotation
from dspark_jax.model.parameters import Maker, RandomSource

from helpers.golden_parts import (
    attention,
    embed,
    layer_block,
    main_head,
    moe,
    pad_rows,
    rotary_rows,
    run,
    run_changed,
    whole_layer,
    with_values,
)
from helpers.support import GOLDENS, max_error, product_weight, same_sets

VALUES, LOGITS = 2e-5, 1e-4  # absolute, as in test_goldens_float.py
NOTICED = 100  # a mistake deviates by at least so many tolerances
CONFIG = ModelConfig.from_file(GOLDENS)


# Attention


def rows_of(model, count):
    return run(
        rotary_rows,
        model.config,
        layer_block(model, 0).attn_norm,
        np.zeros(1, np.int32),
        np.array([count], np.int32),
    )


def attend(model, expected, layer, runner=run, change=None, fill=0.0, swap_tables=False):
    """Attention output [n, D] of prompt 2 from its golden input."""
    x = expected[f"p2.attn_in.{layer}"]
    block, rows = layer_block(model, layer), rows_of(model, len(x))
    if swap_tables:
        rows = rows._replace(plain=rows.compressed, compressed=rows.plain)
    y, _, _ = runner(
        attention,
        model.config,
        with_values(block, change or {}),
        pad_rows(x),
        rows,
        np.float32(fill),
    )
    return y[0, : len(x)]


@pytest.mark.parametrize("layer", [2, 3])
def test_attention(golden_float, expected_float, layer):
    expected = expected_float[f"p2.attn_out.{layer}"]
    assert max_error(attend(golden_float, expected_float, layer), expected) < VALUES
    mistakes = {
        "rotary table of window layers": attend(
            golden_float, expected_float, layer, swap_tables=True
        ),
        "no sink": attend(
            golden_float, expected_float, layer, change={"attn.sink": lambda a: a - 1e9}
        ),
        "sinks of other heads": attend(
            golden_float, expected_float, layer, change={"attn.sink": lambda a: np.roll(a, 1)}
        ),
        "no ape": attend(
            golden_float, expected_float, layer, change={"compressor.ape": np.zeros_like}
        ),
        "no norm weight": attend(
            golden_float, expected_float, layer, change={"attn.kv_norm.weight": np.ones_like}
        ),
    }
    for name, values in mistakes.items():
        assert max_error(values, expected) > NOTICED * VALUES, name


HEAVY = pytest.mark.heavy  # `make test` makes some of these mistakes, `make heavy` the others


def entries_seen_late(monkeypatch):
    monkeypatch.setattr(cached, "_seen", lambda rows, ratio: rows.positions // ratio)


def entries_seen_early(monkeypatch):
    monkeypatch.setattr(cached, "_seen", lambda rows, ratio: (rows.positions + 2) // ratio)


def entry_turned_at_its_last_token(monkeypatch):
    monkeypatch.setattr(
        compressor,
        "rotation",
        lambda config, compressed, first: rotation(config, compressed, first + 3),
    )


def overlap_half_lost(monkeypatch):
    monkeypatch.setattr(Compressor, "_own_half", lambda self, x: x[..., self.width :])


def output_not_turned_back(monkeypatch):
    monkeypatch.setattr(
        dspark_jax.model.layers.attention,
        "rotate",
        lambda x, turn, inverse=False: x if inverse else rotate(x, turn),
    )


def window_one_too_wide(monkeypatch):
    right = cached.in_window
    monkeypatch.setattr(
        cached, "in_window", lambda newest, size, window: right(newest, size, window + 1)
    )


@pytest.mark.parametrize(
    "layer, mistake",
    [
        pytest.param(2, entries_seen_late, marks=HEAVY),
        (2, overlap_half_lost),
        (3, entries_seen_early),
        pytest.param(3, entry_turned_at_its_last_token, marks=HEAVY),
        pytest.param(3, output_not_turned_back, marks=HEAVY),
        (3, window_one_too_wide),
    ],
)
def test_attention_notices(golden_float, expected_float, monkeypatch, layer, mistake):
    mistake(monkeypatch)
    y = attend(golden_float, expected_float, layer, runner=run_changed)
    assert max_error(y, expected_float[f"p2.attn_out.{layer}"]) > NOTICED * VALUES


@pytest.mark.parametrize("layer", [2, 3])
def test_what_is_masked_contributes_exactly_zero(golden_float, expected_float, layer):
    """Slots that hold no token, entries that do not exist yet, picks beyond what exists: the same
    bits whatever lies there.
    """
    clean = attend(golden_float, expected_float, layer)
    for fill in (1e3, -7.5):
        assert np.array_equal(attend(golden_float, expected_float, layer, fill=fill), clean)


def test_rows_beyond_the_valid_ones_change_nothing(golden_float, expected_float):
    x = expected_float["p2.attn_in.2"]
    block, rows = layer_block(golden_float, 2), rows_of(golden_float, 30)
    junk = np.concatenate([x[:30], 100 * x[:11]])
    for inputs in (x, junk):
        y, cache, _ = run(
            attention, golden_float.config, block, pad_rows(inputs), rows, np.float32(0)
        )
        assert max_error(y[0, :30], expected_float["p2.attn_out.2"][:30]) < VALUES
        assert not cache.entries[0, 0, 7:].any()


# Mixture of experts


@pytest.mark.parametrize("topk", [1, 3, 6])
def test_indexer_ties_go_to_the_lower_entry(monkeypatch, topk):
    """Within a block of scores and across blocks, for rows that see few entries and many."""
    scores = np.array([[2, 5, 5, 1, 5, 2, 7, 7, 5, 2, 7, 0, 5, 7, 2, 9], [3] * 16], np.float32)
    monkeypatch.setattr(cached, "entry_block", lambda config: 4)
    indexer = types.SimpleNamespace(
        queries=lambda low, turn: None,
        head_weights=lambda x: None,
        scores=lambda q, weights, entries: jnp.broadcast_to(entries[:, None, :, 0], (2, 60, 4)),
    )
    positions = jnp.broadcast_to(jnp.arange(60), (2, 60))
    rows = cached.Rows(positions, jnp.ones((2, 60), bool), jnp.full(2, 60), None, None)
    config = types.SimpleNamespace(index_topk=topk)
    ids, found, _ = cached._choose(
        indexer,
        config,
        jnp.zeros((2, 60, 1)),
        None,
        rows,
        jnp.asarray(scores)[None, ..., None],
        0,
        4,
    )
    for stream, row in np.ndindex(2, 60):
        seen = (row + 1) // 4
        expected = np.argsort(-scores[stream, :seen], kind="stable")[:topk]
        assert np.asarray(found[stream, row]).sum() == len(expected)
        assert np.array_equal(
            np.asarray(ids[stream, row])[np.asarray(found[stream, row])], expected
        ), (stream, row)


def moe_of(model, expected, change=None):
    x = expected["p1.moe_in.4"]
    block = with_values(layer_block(model, 4), change or {})
    y, routing = run(
        moe,
        model.config,
        block,
        pad_rows(x),
        pad_rows(expected["p1.ids"]),
        pad_rows(np.ones(len(x), bool)),
    )
    return y[0, : len(x)], routing[0][0, : len(x)], routing[1][0, : len(x)]


def swap_experts(a):
    return a[[1, 0, *range(2, len(a))]]


def swap_gate_and_up(a):
    gate, up = np.split(a, 2, axis=1)
    return np.concatenate([up, gate], axis=1)


def test_moe(golden_float, expected_float):
    y, chosen, weights = moe_of(golden_float, expected_float)
    assert max_error(y, expected_float["p1.moe_out.4"]) < VALUES
    assert np.array_equal(chosen, expected_float["p1.moe_idx.4"])
    assert max_error(weights, expected_float["p1.moe_w.4"]) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"ffn.experts.w13": swap_experts},
        {"ffn.experts.w2": swap_experts},
        {"ffn.experts.w13": swap_experts, "ffn.experts.w2": swap_experts},
        {"ffn.experts.w13": swap_gate_and_up},
        {"ffn.bias": np.zeros_like},
        {"ffn.gate": swap_experts},
        {"ffn.shared.w2": np.zeros_like},
    ],
    ids=[
        "first half of an expert",
        "second half of an expert",
        "one swapped expert",
        "gate and up",
        "no bias",
        "swapped scores",
        "no shared expert",
    ],
)
def test_moe_notices(golden_float, expected_float, change):
    assert (
        max_error(moe_of(golden_float, expected_float, change)[0], expected_float["p1.moe_out.4"])
        > NOTICED * VALUES
    )


def test_weights_come_from_unbiased_scores(golden_float, expected_float):
    """Adding a constant to every bias changes neither the choice nor the weights."""
    y, chosen, weights = moe_of(golden_float, expected_float, {"ffn.bias": lambda a: a + 3})
    assert (
        np.array_equal(chosen, expected_float["p1.moe_idx.4"])
        and max_error(weights, expected_float["p1.moe_w.4"]) < 1e-6
    )


def test_only_hash_layers_look_at_token_ids(golden_float, expected_float):
    ids, count = expected_float["p0.ids"], np.array([6], np.int32)
    for layer, hashed in ((1, True), (4, False)):
        streams = pad_rows(expected_float[f"p0.block_out.{layer - 1}"])
        block, golden = layer_block(golden_float, layer), expected_float[f"p0.block_out.{layer}"]
        right = run(whole_layer, CONFIG, block, streams, pad_rows(ids), count)["out"][0, :6]
        other = run(whole_layer, CONFIG, block, streams, pad_rows((ids + 1) % 256), count)["out"][
            0, :6
        ]
        assert max_error(right, golden) < VALUES
        assert (max_error(other, golden) > NOTICED * VALUES) == hashed


def test_router_decides_near_ties_in_float32():
    """Scores that differ by less than bfloat16 can hold: the choice equals that of float64, for
    bfloat16 inputs too.
    """
    rng = np.random.default_rng(3)
    config = dataclasses.replace(CONFIG, n_routed_experts=16)
    layer = MoE(
        config,
        Numerics("bfloat16", False),
        False,
        Maker(RandomSource(0, jnp.bfloat16), ("",), stacked=False),
    )
    gate = np.repeat(rng.standard_normal((1, 128)), 16, axis=0) / 8
    gate += rng.standard_normal((16, 128)) * 0.002  # a few units in the last place of bfloat16
    layer.gate[...] = gate = jnp.asarray(gate, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((64, 128)), jnp.bfloat16)
    logits = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    scores = np.sqrt(np.log1p(np.exp(logits)))
    ranked = np.sort(scores, axis=-1)
    clear = ranked[:, -2] - ranked[:, -3] > 2e-6  # float32 can tell
    expected = np.argsort(-scores, axis=-1, kind="stable")[:, :2]
    assert clear.sum() > 50
    assert same_sets(layer.route(x, np.zeros(64, np.int32))[0][clear], expected[clear])
    coarse = np.asarray(jnp.asarray(scores, jnp.bfloat16), np.float32)
    assert not same_sets(np.argsort(-coarse, axis=-1, kind="stable")[:, :2][clear], expected[clear])


def test_router_ties_go_to_the_lower_expert():
    layer = MoE(CONFIG, Numerics(), False, Maker(RandomSource(0), ("",), stacked=False))
    layer.gate[...] = jnp.zeros((8, 128))
    chosen, weights, _ = layer.route(np.ones((3, 128), np.float32), np.zeros(3, np.int32))
    assert chosen.tolist() == [[0, 1]] * 3 and np.allclose(
        weights, CONFIG.routed_scaling_factor / 2
    )


# Embedding and head


def head_of(model, expected, change=None):
    main = with_values(model.module.main, change or {})
    return run(main_head, model.config, main, pad_rows(expected["p0.block_out.6"]))[0, :6]


def test_head(golden_float, expected_float):
    expected = expected_float["p0.prefill_logits"]
    assert max_error(head_of(golden_float, expected_float), expected) < LOGITS
    embedding = np.array(golden_float.module.main.embed[...])
    mistakes = {
        # Every stream weighs one half, and the norm takes the factor away.
        "mean instead of the head's gate": {
            "collapse.fn": np.zeros_like,
            "collapse.base": np.zeros_like,
        },
        "no norm weight": {"norm.weight": np.ones_like},
        "rows of other tokens": {"head": lambda a: np.roll(a, 1, axis=0)},
        "embedding as head": {"head": lambda a: embedding},
    }
    for name, change in mistakes.items():
        assert (
            max_error(head_of(golden_float, expected_float, change), expected) > NOTICED * LOGITS
        ), name


def test_streams_start_equal(golden_float):
    streams = run(embed, CONFIG, golden_float.module.main, pad_rows(np.arange(6)))
    assert np.array_equal(streams, np.repeat(streams[:, :, :1], 4, axis=2))
    assert np.array_equal(streams[0, :6, 0], golden_float.module.main.embed[...][:6])


@pytest.mark.parametrize("columns_first", [False, True])
def test_precision_is_full_float32(columns_first):
    """A default matmul would round operands on an accelerator; every product asks for the highest
    precision.
    """
    weight = product_weight(np.ones((64, 160), np.float32), columns_first)
    text = str(
        jax.make_jaxpr(lambda x: Numerics(activation_quant=False).linear(x, weight))(
            np.ones((2, 160), np.float32)
        )
    )
    assert text.count("dot_general") == text.count(
        "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    )
    assert "HIGHEST" in text and "preferred_element_type=float32" in text
