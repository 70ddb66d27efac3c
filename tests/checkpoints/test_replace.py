"""Tensors replaced in a checkpoint: the others keep every byte, and so do the files beside them."""

import errno
import os

import numpy as np
import pytest

from dspark_jax.checkpoints import replace
from dspark_jax.checkpoints.errors import CheckpointError
from dspark_jax.checkpoints.official import INDEX, OfficialCheckpoint
from dspark_jax.checkpoints.tensor_spec import TensorSpec

from helpers.official_files import SMALL, values_for, write_small

OLD = [TensorSpec("draft.0.w", (130, 8), "fp8"), TensorSpec("draft.0.b", (3,), "f32")]
NEW = [TensorSpec("draft.0.w", (130, 8), "fp8"), TensorSpec("draft.0.c", (5,), "bf16")]


def new_items():
    return [(spec, values_for(spec, seed=9)) for spec in NEW]


def stored(checkpoint: OfficialCheckpoint) -> dict:
    """Name -> dtype, shape and bytes."""
    found = {}
    for file in checkpoint.files.values():
        raw = file.path.read_bytes()
        for name, entry in file.entries.items():
            found[name] = entry.dtype, entry.shape, raw[entry.start : entry.stop]
    return found


@pytest.mark.parametrize("shard", [None, 20_000], ids=["one file", "shards"])
def test_everything_else_keeps_its_bytes(tmp_path, shard):
    write_small(tmp_path / "old", SMALL + OLD, max_shard_bytes=shard)
    (tmp_path / "old" / "tokenizer.json").write_text('{"odd":   "spacing"}')
    for name in ("README.md", "calibration.json"):
        (tmp_path / "old" / name).write_text("not a part of it")
    source, told = OfficialCheckpoint.open(tmp_path / "old"), []
    assert (INDEX in os.listdir(tmp_path / "old")) == (shard is not None)
    replace.replace_tensors(
        source, tmp_path / "new", "draft.", new_items(), lambda done, all: told.append((done, all))
    )
    target = OfficialCheckpoint.open(tmp_path / "new")
    target.check(SMALL + NEW)
    before, after = stored(source), stored(target)
    kept = [name for name in before if not name.startswith("draft.")]
    assert kept and all(after[name] == before[name] for name in kept)
    for spec, values in new_items():
        np.testing.assert_allclose(target.read(spec), values, rtol=0.1, atol=0.01)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    assert not {"README.md", "calibration.json"} & set(os.listdir(tmp_path / "new"))
    assert told[-1][0] == told[-1][1] == sum(len(raw) for _, _, raw in after.values())


def test_replaced_twice(tmp_path):
    """The shard that a replacement made is replaced by the next one."""
    write_small(tmp_path / "a", SMALL + OLD, max_shard_bytes=20_000)
    for before, after in (("a", "b"), ("b", "c")):
        source = OfficialCheckpoint.open(tmp_path / before)
        replace.replace_tensors(source, tmp_path / after, "draft.", new_items())
    assert stored(OfficialCheckpoint.open(tmp_path / "b")) == stored(
        OfficialCheckpoint.open(tmp_path / "c")
    )


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    write_small(tmp_path / "old", SMALL + OLD)
    source = OfficialCheckpoint.open(tmp_path / "old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(replace, "_copy", full)
    with pytest.raises(CheckpointError, match="new: cannot be written .No space left"):
        replace.replace_tensors(source, tmp_path / "new", "draft.", new_items())
    assert not os.listdir(tmp_path / "new")
