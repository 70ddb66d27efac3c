"""What a checkpoint's path may be is one rule; a file that is something else is called that."""

import json
import shutil

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint, is_converted
from dspark_jax.checkpoints.paths import OWN_FILES, checkpoint_directory
from dspark_jax.commands import main
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading.summary import inspect_checkpoint

from helpers import convert_parts as parts
from helpers.official_files import edit_header, write_small
from helpers.support import GOLDENS

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
PAGE = b"<!DOCTYPE html><html><body>404</body></html>"


def test_a_directory_or_one_of_its_own_files(tmp_path, monkeypatch):
    for name in OWN_FILES:
        (tmp_path / name).write_text("")
        assert checkpoint_directory(tmp_path / name) == tmp_path
    assert checkpoint_directory(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert checkpoint_directory(f"~/{tmp_path.name}") == tmp_path


def readers():
    return {
        "load": dspark.load,
        "inspect": inspect_checkpoint,
        "official": OfficialCheckpoint.open,
        "converted": ConvertedCheckpoint.open,
    }


@pytest.mark.parametrize("reader", readers())
def test_everything_that_reads_refuses_the_same(reader, tmp_path):
    other = tmp_path / "other.safetensors"
    shutil.copy(GOLDENS / "model.safetensors", other)
    with pytest.raises(CheckpointError, match="a file, where a checkpoint directory is expected"):
        readers()[reader](other)
    with pytest.raises(CheckpointError, match="nothing: no such checkpoint directory"):
        readers()[reader](tmp_path / "nothing")


def test_the_file_of_tensors_stands_for_its_directory():
    assert inspect_checkpoint(GOLDENS / "model.safetensors").path.endswith("model.safetensors")
    with OfficialCheckpoint.open(GOLDENS / "model.safetensors") as checkpoint:
        assert checkpoint.path == GOLDENS
    assert not is_converted(GOLDENS / "config.json")


@pytest.mark.parametrize(
    "content, said",
    [
        (POINTER, "a Git LFS pointer, not the file itself: run `git lfs pull`"),
        (PAGE, "a web page, not the file itself"),
        (b"\n <html>", "a web page"),
        (b"PK\x03\x04" + bytes(40), "a zip archive, such as PyTorch saves"),
        (b"", "empty"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_lies_in_place_of_a_file_is_called_what_it_is(tmp_path, name, content, said):
    write_small(tmp_path)
    (tmp_path / name).write_bytes(content)
    error = CheckpointError if name == "model.safetensors" else ConfigError
    with pytest.raises(error, match=f"{name}: this is {said}"):
        OfficialCheckpoint.open(tmp_path)
        read_json(tmp_path)


def test_int32_is_as_good_as_int64(tmp_path):
    """Hash tables of expert ids, which the official files store as int64."""
    ours = tmp_path / "ours"
    shutil.copytree(GOLDENS, ours, ignore=shutil.ignore_patterns("expected*", "prim*", "env*"))
    narrowed = narrow(ours / "model.safetensors")
    assert narrowed
    usual, here = (OfficialCheckpoint.open(path) for path in (GOLDENS, ours))
    from dspark_jax.config import ModelConfig
    from dspark_jax.loading.load import expected_tensors

    specs = expected_tensors(ModelConfig.from_dict(usual.config_dict))
    here.check(list(specs.values()))
    for name in narrowed:
        assert here.entry(name).dtype == "I32"
        assert np.array_equal(here.read(specs[name]), usual.read(specs[name]))


def narrow(path) -> list[str]:
    """Stores the int64 tensors of a file as int32, and returns their names."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names, out, at = [], [], 0
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        part = data[slice(*entry["data_offsets"])]
        if entry["dtype"] == "I64":
            names.append(name)
            part, entry["dtype"] = np.frombuffer(part, np.int64).astype(np.int32).tobytes(), "I32"
        entry["data_offsets"] = [at, at + len(part)]
        out.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(out))
    return names


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    "name", ["a[1]", pytest.param("what?", marks=HEAVY), pytest.param("*", marks=HEAVY)]
)
def test_a_name_that_reads_as_a_pattern_is_a_name(tmp_path, name, source, monkeypatch):
    target = tmp_path / name
    parts.convert(source, target)
    assert main.main(["convert", "--verify", "--quiet", str(target)]) == 0
    checkpoint = ConvertedCheckpoint.open(target)
    assert [unit for unit in checkpoint.units if checkpoint.verify(unit)] == []


def test_a_unit_is_done_only_when_it_reads_back(tmp_path, source, monkeypatch):
    """A library that writes nothing and says nothing: the conversion stops, a rerun does it."""
    from dspark_jax.checkpoints import convert

    write = convert.write_unit

    def forgetful(path, unit, arrays):
        write(path, unit, arrays)
        for file in path.rglob("d/*"):
            file.unlink()

    monkeypatch.setattr(convert, "write_unit", forgetful)
    with pytest.raises(CheckpointError, match="what was written does not read back"):
        parts.convert(source, tmp_path / "new")
    assert not list((tmp_path / "new").rglob("*.done"))
    monkeypatch.setattr(convert, "write_unit", write)
    parts.convert(source, tmp_path / "new")
    assert main.main(["convert", "--verify", "--quiet", str(tmp_path / "new")]) == 0


def test_a_header_edited_by_hand_is_still_checked(tmp_path):
    """The shortcuts above do not make damaged files pass."""
    write_small(tmp_path)
    edit_header(tmp_path / "model.safetensors", lambda header: header.popitem())
    with pytest.raises(CheckpointError):
        OfficialCheckpoint.open(tmp_path)


def test_nested_without_end_is_an_error_of_the_file(tmp_path):
    write_small(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="config.json: not readable as JSON"):
        read_json(tmp_path)


def test_a_home_that_nobody_has_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~x").mkdir()
    assert checkpoint_directory("./~x").name == "~x"
    with pytest.raises(CheckpointError, match="~nosuchuser: no such checkpoint directory"):
        checkpoint_directory("~nosuchuser")
