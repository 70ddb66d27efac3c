"""The converter and the storage formats proved without the library: what the parity comparison
stands on.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.numpy import load_file, save_file

from . import hf
from .convert import from_official, to_official
from .patterns import PATTERNS
from .storage import read_official, snap

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def golden():
    """(config dict, {table name: array}) of the golden checkpoint."""
    return json.loads((GOLDENS / "config.json").read_text()), read_official(GOLDENS)


@pytest.mark.parametrize("prompt", range(3))
def test_golden_checkpoint_in_hugging_face(golden, prompt, measured):
    """Read, renamed and run by Hugging Face, the golden checkpoint gives the golden logits, cached
    and uncached.
    """
    expected = load_file(GOLDENS / "expected_float.safetensors")
    ids, rest = expected[f"p{prompt}.ids"].tolist(), expected[f"p{prompt}.decode_ids"].tolist()
    logits = np.concatenate(
        [expected[f"p{prompt}.prefill_logits"], expected[f"p{prompt}.decode_logits"]]
    )
    model = hf.build(*golden)
    forwards = hf.cached_forward(model, ids, rest), hf.full_forward(model, ids + rest)
    error = max(np.abs(theirs - logits).max() for theirs in forwards)
    measured("Hugging Face on the golden checkpoint", float(error))
    assert error < 2e-5


def test_hugging_face_loads_the_same_model(golden, tmp_path):
    """Its own loader, given the dequantised tensors under their official names, puts each where
    `from_official` does.
    """
    config, tensors = golden
    save_file(
        {_stored(name): np.ascontiguousarray(value) for name, value in tensors.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    wanted = hf.hf_config(config)
    wanted.save_pretrained(tmp_path)
    loaded, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    theirs, ours = loaded.state_dict(), hf.build(config, tensors).state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not torch.equal(theirs[name], ours[name])] == []


def _stored(name):
    """The file's name of a table name: quantised matrices are listed without their `.weight`."""
    quantised = name.rsplit(".", 1)[-1] in (
        "wq_a",
        "wq_b",
        "wkv",
        "wo_a",
        "wo_b",
        "w1",
        "w2",
        "w3",
        "main_proj",
    )
    return name + ".weight" if quantised else name


def test_tensors_and_shapes_are_the_golden_ones(golden):
    config, tensors = golden
    _, ours = hf.random_checkpoint(config, seed=0)
    assert {name: value.shape for name, (_, value) in ours.items()} == {
        name: value.shape for name, value in tensors.items()
    }


@pytest.mark.parametrize("name", PATTERNS)
def test_there_and_back(name):
    model, _ = hf.random_checkpoint(PATTERNS[name].config, seed=0)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    back = from_official({key: value for key, (_, value) in to_official(state).items()})
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[key], state[key]) for key in state)


def test_snapped_values_stay(golden):
    """The golden checkpoint's values are representable by construction, and snapping a snapped
    random matrix changes nothing.
    """
    _, tensors = golden
    for storage, name in (
        ("fp8", "layers.0.attn.wq_b"),
        ("fp4", "layers.4.ffn.experts.3.w2"),
        ("bf16", "embed.weight"),
    ):
        np.testing.assert_array_equal(snap(tensors[name], storage), tensors[name])
        values = np.random.default_rng(0).standard_normal((200, 160)).astype(np.float32)
        once = snap(values, storage)
        assert np.abs(once - values).max() > 0
        np.testing.assert_array_equal(snap(once, storage), once)


def test_fp4_rounds_ties_to_even_codes():
    """Spec section 3; the block's largest value 6 makes the scale 1."""
    row = np.zeros((1, 32), np.float32)
    row[0, :9] = 6, 0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5, -0.3
    assert snap(row, "fp4")[0, :9].tolist() == [6, 0, 1, 1, 2, -2, 4, 4, -0.5]


def test_hugging_face_takes_one_other_ratio():
    with pytest.raises(ValueError, match=r"\[8, 16\]"):
        hf.hf_config(PATTERNS["window"].config | {"compress_ratios": [8, 16, 0, 0]})
