"""What stands in place of a checkpoint's files and is none: pipes, devices, sockets, directories,
links into nowhere. It is called what it is before it is opened: reading a pipe waits for a writer.
And what is no path at all.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading

import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.checkpoints.official import INDEX, SINGLE, OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint, is_converted
from dspark_jax.checkpoints.paths import checkpoint_directory, expanded, no_file
from dspark_jax.commands.main import main
from dspark_jax.config import ModelConfig
from dspark_jax.decode import session_file
from dspark_jax.decode.replay import replay
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading.load import read_tokenizer
from dspark_jax.loading.summary import inspect_checkpoint
from dspark_jax.runtime.files import real_path

from helpers.official_files import CONFIG, GOLDENS, SMALL, write_small
from helpers.small_model import write_small_checkpoint

KINDS = {
    "pipe": "a pipe, not a file",
    "device": "a device, not a file",
    "directory": "a directory, not a file",
    "socket": "a socket, not a file",
    "dangling": "a link to what does not exist",
}


@contextlib.contextmanager
def standing(kind, path):
    """Puts it there. A pipe has a writer that says nothing: who reads it sees an empty file."""
    writer = contextlib.nullcontext()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
        writer = subprocess.Popen(["sh", "-c", 'while :; do : >"$0"; done', str(path)])
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to(os.devnull if kind == "device" else "nowhere")
    with writer:
        try:
            yield
        finally:
            if kind == "pipe":
                writer.kill()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Short, since the name of a socket must be."""
    monkeypatch.chdir(tmp_path)
    return write_small(tmp_path)


def shards(directory):
    (directory / SINGLE).unlink()
    return sorted(write_small(directory, max_shard_bytes=1).glob("*.safetensors"))[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [SINGLE, INDEX, "shard", "config.json", "tokenizer.json"])
def test_what_is_no_file_is_called_what_it_is(directory, name, kind):
    if name in (INDEX, "shard"):
        shard = shards(directory)
        name = shard.name if name == "shard" else name
    with standing(kind, directory / name):
        with pytest.raises(
            (CheckpointError, ConfigError), match=f"{name}.*: this is {KINDS[kind]}"
        ):
            read_json(directory)
            OfficialCheckpoint.open(directory)
            read_tokenizer(directory, CONFIG)


def test_files_links_to_files_and_what_is_absent_are_none_of_these(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    assert [no_file(tmp_path / name) for name in ("file", "link", "absent", "file/x")] == [None] * 4


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json"])
def test_texts_of_a_conversion(converted, tmp_path, name, capsys):
    target = tmp_path / "converted"
    shutil.copytree(converted, target)
    with standing("pipe", target / name):
        assert main(["convert", "--verify", "--quiet", str(target)]) == 1
    said = capsys.readouterr().err
    assert f"{name}: " in said and "this is a pipe, not a file" in said


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_inspect_load_and_convert_refuse_a_tokenizer_alike(tmp_path, kind, capsys):
    write_small_checkpoint(tmp_path / "model")
    path = tmp_path / "model"
    with standing(kind, path / "tokenizer.json"):
        said = f"tokenizer.json: this is {KINDS[kind]}"
        assert said in inspect_checkpoint(path).problem
        with pytest.raises(CheckpointError, match=said):
            dspark.load(path)
        assert main(["convert", "--quiet", str(path), str(tmp_path / "to")]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "to").exists()


def test_generate_says_of_a_link_what_load_does(tmp_path, capsys):
    write_small_checkpoint(tmp_path)
    with standing("dangling", tmp_path / "tokenizer.json"):
        assert main(["generate", "hi", "--checkpoint", str(tmp_path)]) == 1
    assert f"tokenizer.json: this is {KINDS['dangling']}" in capsys.readouterr().err
    assert main(["generate", "hi", "--checkpoint", "a" * 5000]) == 1
    assert "(5000 characters): cannot be read: File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "socket"])
def test_what_stands_in_place_of_a_session(directory, kind):
    with standing(kind, directory / "x"):
        with pytest.raises(CheckpointError, match=f": this is {KINDS[kind]}"):
            session_file.read(directory / "x", model=None)


@pytest.fixture
def through_a_pipe(tmp_path):
    """through_a_pipe(text) -> a pipe that gives it, as the shell's <(...) is one."""

    def make(text):
        os.mkfifo(pipe := tmp_path / "pipe")
        threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
        return pipe

    return make


def test_a_config_comes_through_a_pipe(through_a_pipe):
    assert ModelConfig.from_file(through_a_pipe(json.dumps(CONFIG.to_dict()))) == CONFIG


def test_rounds_come_through_a_pipe(through_a_pipe):
    with pytest.raises(ConfigError, match="block_size must be a whole number"):
        replay(through_a_pipe("{}"))


@pytest.mark.parametrize("read", [read_json, replay])
@pytest.mark.parametrize("kind", ["device", "socket"])
def test_a_device_that_was_named_itself_is_not(directory, read, kind):
    with standing(kind, directory / "x"):
        with pytest.raises(ConfigError, match=f"x: this is {KINDS[kind]}"):
            read(directory / "x")


@pytest.mark.parametrize("change", ["removed", "cut", "emptied", "grown"])
def test_a_file_that_changes_between_opening_and_reading(directory, change):
    """Else the process would end at the first byte past the file's end."""
    file = directory / SINGLE
    with OfficialCheckpoint.open(directory) as checkpoint:
        if change == "removed":
            file.unlink()
        else:
            size = {"cut": file.stat().st_size - 1, "emptied": 0}.get(change, 10**6)
            os.truncate(file, size)
        wanted = (
            "cannot be read any more" if change in ("removed", "emptied") else "when it was opened"
        )
        with pytest.raises(CheckpointError, match=f"{SINGLE}: .*{wanted}"):
            checkpoint.read(SMALL[0])


@pytest.fixture
def deny(tmp_path):
    """deny(path): nobody may read it until the test ends. Skipped for root."""
    paths = []

    def denied(path):
        paths.append((path, path.stat().st_mode))
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("file modes do not bind this user (root)")

    yield denied
    for path, mode in paths:
        path.chmod(mode)


def test_a_directory_that_may_not_be_read(directory, deny):
    deny(directory)
    for read in (OfficialCheckpoint.open, ConvertedCheckpoint.open, dspark.load):
        with pytest.raises(
            CheckpointError, match=f"{directory}: cannot be read: Permission denied"
        ):
            read(directory)


@pytest.mark.parametrize("name", [SINGLE, "config.json", "tokenizer.json"])
def test_what_may_not_be_read(directory, deny, name):
    (directory / "tokenizer.json").write_text("{}")
    deny(directory / name)
    with pytest.raises((CheckpointError, ConfigError), match="Permission denied"):
        read_json(directory)
        OfficialCheckpoint.open(directory)
        read_tokenizer(directory, CONFIG)


# Paths


@pytest.mark.parametrize("wrong", [5, b"tiny", [], False, True, 1.5, {}, object()])
def test_what_is_no_path(wrong):
    for read in (dspark.load, inspect_checkpoint, OfficialCheckpoint.open, read_json, real_path):
        with pytest.raises(ConfigError, match="a path is expected, a str or a pathlib.Path; got"):
            read(wrong)


def test_an_empty_path_is_not_the_working_directory(directory, capsys):
    for read in (dspark.load, inspect_checkpoint, ConvertedCheckpoint.open, read_json, real_path):
        with pytest.raises(ConfigError, match="a path is empty; name a file or a directory"):
            read("")
    for command in (
        ["inspect", ""],
        ["convert", str(GOLDENS), ""],
        ["convert", "", "x"],
        ["replay", ""],
    ):
        assert main(command) == 2
        assert ": a path is empty; " in capsys.readouterr().err
    assert main(["plan", "--config", ""]) == 2 and "a path is empty" in capsys.readouterr().err
    assert expanded(".") == expanded(directory.__class__("")) == directory.__class__(".")


def test_a_name_that_no_file_can_have(directory):
    for read in (dspark.load, inspect_checkpoint, ConvertedCheckpoint.open):
        with pytest.raises(CheckpointError) as error:
            read("a" * 5000)
        assert str(error.value).endswith(
            "... (5000 characters): cannot be read: File name too long"
        )
        assert len(str(error.value)) < 300
        with pytest.raises(ConfigError, match="a path cannot hold a NUL character"):
            read("a\0b")
    assert not is_converted("a" * 5000)


def test_a_link_to_itself_and_a_file_used_as_a_directory(directory):
    (directory / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="loop: cannot be read: Too many levels"):
        checkpoint_directory("loop")
    with pytest.raises(CheckpointError, match="config.json/x: no such checkpoint directory"):
        checkpoint_directory("config.json/x")


@pytest.mark.parametrize("command", ["replay", "plan --config"])
def test_a_home_is_expanded(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.json").write_text("[1")
    assert main([*command.split(), "~/x.json"]) == 2
    assert f"{tmp_path}/x.json" in capsys.readouterr().err


def test_nested_without_end(tmp_path, capsys):
    (tmp_path / "x").write_text("[" * 100_000)
    assert main(["replay", str(tmp_path / "x")]) == 2
    assert f"rounds file {tmp_path}/x is not JSON" in capsys.readouterr().err
    (tmp_path / INDEX).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{INDEX}: not understood: maximum recursion"):
        OfficialCheckpoint.open(tmp_path)


# Indexes


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '"x"'])
def test_an_index_of_another_shape(directory, content):
    (directory / SINGLE).unlink()
    for text in (content, f'{{"weight_map": {content}}}'):
        (directory / INDEX).write_text(text)
        with pytest.raises(CheckpointError) as error:
            OfficialCheckpoint.open(directory)
        assert str(error.value).endswith(
            f'{INDEX}: not understood: it must be an object whose "weight_map" names the shard of '
            "every tensor; copy it again"
        )


@pytest.mark.parametrize(
    "shard", ["", ".", "..", "../x", "/etc/passwd", "a/b", "x\0y", None, 1, True, [1], {}]
)
def test_a_shard_that_is_no_file_of_the_directory(directory, shard):
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": shard}}))
    with pytest.raises(CheckpointError) as error:
        OfficialCheckpoint.open(directory)
    assert str(error.value).endswith(
        f"weight_map: embed.weight is said to be in {shard!r}, which names no file of this "
        "directory"
    )


@pytest.mark.parametrize("shard", ["a" * 300, "\udcff", "absent"])
def test_a_shard_that_is_not_there(directory, shard):
    (directory / SINGLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": shard}}))
    with pytest.raises(CheckpointError, match=f"{shard}: missing; the index names it"):
        OfficialCheckpoint.open(directory)
