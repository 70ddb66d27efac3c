"""Logits of this library against Hugging Face transformers' `DeepseekV4ForCausalLM`, float32, no
activation quantisation.

A random tiny Hugging Face model is written as an official checkpoint (weights snapped to what that
storage holds, so both sides have identical values), loaded through the public API and compared at
every position: prompts in one prefill, decoding through both caches, and blocks of rows of which
only some are committed. Then every tensor of the Hugging Face model is disturbed in turn, and each
must make the comparison fail.
"""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dspark_jax as dspark
from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.checkpoints.writer import write_official

from . import hf
from .patterns import PATTERNS
from .storage import read_official

LIMIT = 1e-4  # largest absolute difference of a logit; logits have rms ~1
# every choice of experts and entries is clear with it: see test_choices_of_this_seed_are_clear
SEED = 2


class Pair:
    """One pattern's Hugging Face model, its weights as official tensors, the folder they were
    written to, and our model.
    """

    def __init__(self, name, folder):
        self.name, self.pattern, self.folder = name, PATTERNS[name], folder
        self.config = self.pattern.config
        self.theirs, self.tensors = hf.random_checkpoint(self.config, seed=SEED)
        specs = (
            (TensorSpec(name, value.shape, storage), value)
            for name, (storage, value) in self.tensors.items()
        )
        write_official(folder, self.config, specs)
        self.ours = dspark.load(
            folder, max_seq_len=self.pattern.longest + self.block, activation_quant=False
        )
        self.ids = (
            np.random.default_rng(1)
            .integers(0, self.config["vocab_size"], self.pattern.longest)
            .tolist()
        )

    @property
    def block(self):
        """Rows of one verify call: the anchor and the drafts."""
        return self.config["dspark_block_size"] + 1

    def extend(self, cache, ids):
        """Logits [len(ids), V] of one call of `block` rows, the last ones padding; nothing is
        committed.
        """
        rows = np.zeros((1, self.block), np.int32)
        rows[0, : len(ids)] = ids
        logits, _, cache = dspark.extend(self.ours, cache, rows, np.array([len(ids)], np.int32))
        return np.asarray(logits)[0, : len(ids)], cache


@pytest.fixture(scope="module", params=PATTERNS)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("official"))


def worst(ours, theirs):
    """Largest absolute difference; shapes must agree, and a NaN on either side is infinite."""
    assert ours.shape == theirs.shape
    return float(np.nan_to_num(np.abs(ours - theirs), nan=np.inf).max())


def test_files_hold_the_values_of_the_hugging_face_model(pair):
    stored = read_official(pair.folder)
    assert stored.keys() == pair.tensors.keys()
    assert [
        name for name, (_, value) in pair.tensors.items() if not np.array_equal(stored[name], value)
    ] == []
    assert json.loads((pair.folder / "config.json").read_text()) == pair.config


def test_choices_of_this_seed_are_clear(pair):
    """Otherwise rounding alone could choose another expert or entry, and the comparison would mean
    nothing.
    """
    assert hf.closest_choice(pair.theirs, pair.ids) > 1e-5


def test_prefill(pair, measured):
    for length in pair.pattern.lengths:
        ids = pair.ids[:length]
        logits, hidden, cache = dspark.prefill(pair.ours, ids)
        error = worst(np.asarray(logits)[0], hf.full_forward(pair.theirs, ids))
        measured(f"{pair.name}: prefill logits", error)
        assert error < LIMIT, f"prompt of {length} tokens"
        assert np.asarray(cache.position).tolist() == [length]


def test_captured_hidden(pair, measured):
    """The mean over the streams of the output of every tapped layer, concatenated."""
    taps = pair.config["dspark_target_layer_ids"]
    outputs = hf.block_outputs(pair.theirs, pair.ids, taps)
    _, hidden, _ = dspark.prefill(pair.ours, pair.ids)
    error = worst(
        np.asarray(hidden)[0], np.concatenate([outputs[layer].mean(1) for layer in taps], -1)
    )
    measured(f"{pair.name}: captured hidden", error)
    assert error < LIMIT


def test_prefill_then_decode(pair, measured):
    """One token at a time through our cache, against Hugging Face with its cache and without."""
    for start, steps in pair.pattern.decode:
        prompt, rest = pair.ids[:start], pair.ids[start : start + steps]
        logits, _, cache = dspark.prefill(pair.ours, prompt)
        rows = [np.asarray(logits)[0]]
        for token in rest:
            logits, cache = pair.extend(cache, [token])
            cache = dspark.commit(cache, np.array([1], np.int32))
            rows.append(logits)
        ours = np.concatenate(rows)
        for what, theirs in (
            ("cached", hf.cached_forward(pair.theirs, prompt, rest)),
            ("uncached", hf.full_forward(pair.theirs, prompt + rest)),
        ):
            error = worst(ours, theirs)
            measured(f"{pair.name}: decode logits, their {what} forward", error)
            assert error < LIMIT, f"{start} + {steps} tokens, their {what} forward"


def test_blocks_with_rejected_rows(pair, measured):
    """Blocks whose last rows are wrong tokens, never committed: the committed rows equal their
    forward of the right tokens.
    """
    start, steps = pair.pattern.decode[-1]
    end = start + steps
    theirs = hf.full_forward(pair.theirs, pair.ids[:end])
    _, _, cache = dspark.prefill(pair.ours, pair.ids[:start])
    at, right = start, 1
    while at < end:
        right = min(right, end - at)
        junk = [
            (token + 1) % pair.config["vocab_size"]
            for token in pair.ids[at : at + pair.block - right]
        ]
        logits, cache = pair.extend(cache, pair.ids[at : at + right] + junk)
        error = worst(logits[:right], theirs[at : at + right])
        measured(f"{pair.name}: block logits", error)
        assert error < LIMIT, f"{right} rows from position {at}"
        cache = dspark.commit(cache, np.array([right], np.int32))
        at, right = at + right, right % pair.block + 1


@pytest.mark.parametrize("pair", ["golden", "other shapes"], indirect=True)
def test_every_disturbed_tensor_is_noticed(pair):
    """Each tensor of the Hugging Face model in turn with its rows moved by one (experts swapped,
    heads shifted): never < LIMIT.

    Tensors with a single row are negated instead. These two patterns have every kind of tensor.
    """
    ours = np.asarray(dspark.prefill(pair.ours, pair.ids)[0])[0]
    assert worst(ours, hf.full_forward(pair.theirs, pair.ids)) < LIMIT
    unnoticed = [
        name for name, logits in hf.disturbed(pair.theirs, pair.ids) if worst(ours, logits) < LIMIT
    ]
    assert unnoticed == []


def test_one_swapped_expert_is_noticed(pair):
    """Two experts of the last layer exchanged on one side: the logits must part, and agree again
    when it is undone.
    """
    ours = np.asarray(dspark.prefill(pair.ours, pair.ids)[0])[0]
    last = len(pair.pattern.ratios) - 1
    with hf.swapped_experts(pair.theirs, last, 0, 1):
        assert worst(ours, hf.full_forward(pair.theirs, pair.ids)) > LIMIT
    assert worst(ours, hf.full_forward(pair.theirs, pair.ids)) < LIMIT
