"""print(model), print(model.module) and a model in a notebook's cell say what it is."""

import dataclasses
import re

import jax
import pytest

from dspark_jax.loading.description import parts
from dspark_jax.loading.summary import inspect_checkpoint

from helpers.support import GOLDENS


def test_a_model_says_its_config_mesh_storage_and_parts(golden_float):
    text, c = repr(golden_float), golden_float.config
    for said in (
        f"{c.num_hidden_layers} layers",
        f"vocabulary {c.vocab_size}",
        f"{c.n_draft_stages} stages, block {c.dspark_block_size}",
        "1x1 (data x model) of cpu",
        "float32, activation quantisation off",
        "experts held    dequantised",
        "up to 128 a stream, prefill chunk 16",
        "tokenizer       none",
    ):
        assert said in text
    assert str(golden_float) == text and max(map(len, text.splitlines())) <= 100


def test_its_parameters_are_those_of_the_files(golden_float):
    """Counted from the arrays held, against what the files' headers say, part by part."""
    stored: dict[tuple[str, str], int] = {}
    for part in inspect_checkpoint(GOLDENS).parts:
        key = part.module, part.part
        stored[key] = stored.get(key, 0) + part.parameters
    assert {key: numbers for key, (numbers, _) in parts(golden_float).items()} == stored
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(golden_float.split[1]))
    assert sum(size for _, size in parts(golden_float).values()) == held


def test_the_module_prints_too(golden_float):
    """Weights that are held columns first are shown in the official shape."""
    text = repr(golden_float.module)
    c = golden_float.config
    assert re.search(rf"head=ColumnsFirst\(.*\n?.*shape=\({c.vocab_size}, {c.hidden_size}\)", text)


def test_a_tokenizers_own_limits_do_not_change_requests(golden_float, tmp_path):
    """Truncation and padding, left in tokenizer.json by training."""
    from dspark_jax.decode.request import encode
    from dspark_jax.loading.load import read_tokenizer

    from helpers.round_parts import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=32)
    assert len(tokenizer.encode("eleven char").ids) == 32
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = read_tokenizer(tmp_path, golden_float.config)
    model = dataclasses.replace(golden_float, tokenizer=read)
    assert encode(model, "eleven char") == [list(b"eleven char")]


def test_a_copy_runs(golden_float):
    """Programs know a model by its structure, which a copied module would not have."""
    import copy

    assert copy.deepcopy(golden_float) is golden_float


def test_a_tokenizer_that_is_a_pointer_is_called_that(golden_float, tmp_path):
    from dspark_jax.errors import CheckpointError
    from dspark_jax.loading.load import read_tokenizer

    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="tokenizer.json: this is a Git LFS pointer"):
        read_tokenizer(tmp_path, golden_float.config)
