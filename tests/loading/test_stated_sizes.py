"""A wrong size in config.json is one line with its cause, not a list of every tensor."""

import json
import shutil

import pytest

import dspark_jax as dspark
from dspark_jax.loading.load import make_limits
from dspark_jax.loading.stated_sizes import WITNESSES
from dspark_jax.loading.summary import inspect_checkpoint

from helpers.support import GOLDENS

OTHER = {
    "vocab_size": 512,
    "hidden_size": 256,
    "q_lora_rank": 96,
    "head_dim": 80,
    "num_attention_heads": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 256,
}


@pytest.fixture
def with_config(tmp_path):
    def make(**changes):
        shutil.copy(GOLDENS / "model.safetensors", tmp_path)
        values = json.loads((GOLDENS / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        return tmp_path

    return make


@pytest.mark.parametrize("key", WITNESSES)
def test_one_line_names_the_key_and_both_sizes(with_config, key):
    right = json.loads((GOLDENS / "config.json").read_text())[key]
    path = with_config(**{key: OTHER[key]})
    with pytest.raises(dspark.CheckpointError) as error:
        dspark.load(path, max_seq_len=64)
    text = str(error.value)
    assert f"{key} is {OTHER[key]}, the tensors say {right} (" in text
    assert "config.json does not belong to these tensors" in text and "\n" not in text
    assert inspect_checkpoint(path).problem == text


@pytest.mark.parametrize("value", [True, False, 2.0, "64", None])
def test_lengths_are_integers(golden_float, value):
    with pytest.raises(dspark.ConfigError, match="max_seq_len: .* is not an integer from 1 to"):
        make_limits(golden_float.config, value)
