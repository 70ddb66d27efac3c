"""`dspark train drafter`: each input that cannot be used is one error that says what to do, before
anything is begun.
"""

import os
import shutil
import sys
import types

import pytest

from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.replace import replace_tensors
from dspark_jax.commands import allocator, train
from dspark_jax.commands.main import main
from dspark_jax.train import drafter_run, loop

from helpers.round_parts import byte_tokenizer, compilations
from helpers.small_model import CONFIG, write_small_checkpoint

TEXT = "some text of the user's\n" * 20
SMALL = ("--length", "24", "--prompt-tokens", "8", "--sequences", "4", "--rows", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("train")
    write_small_checkpoint(path / "model", byte_tokenizer())
    write_small_checkpoint(path / "mute")
    source = OfficialCheckpoint.open(path / "model")
    replace_tensors(source, path / "bare", "mtp.", [])
    (path / "bare" / "mtp.safetensors").unlink(missing_ok=True)
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture
def refused(folder, capsys, tmp_path):
    """refused(*options, status, checkpoint, data) -> the one line of the error."""

    def run(*options, status=2, checkpoint="model", data="text.txt"):
        where = ("--checkpoint", str(folder / checkpoint), "--data", str(folder / data))
        arguments = ["train", "drafter", *where, "--out", str(tmp_path / "out"), *SMALL, *options]
        with compilations() as compiled:
            assert main(arguments) == status
        assert not compiled
        out, err = capsys.readouterr()
        assert out == "" and "dspark train" in err
        return err

    return run


def test_no_tokenizer(refused):
    assert "has no tokenizer.json" in refused(checkpoint="mute", status=1)


def test_no_drafter(refused):
    assert "train one from nothing with --init none" in refused(checkpoint="bare")


@pytest.mark.parametrize(
    "content, message",
    [(b"", "there is no text in it"), (b"\xff\xfe\x01", "not text in UTF-8"), (b"ab", "2 tokens")],
)
def test_no_text(refused, folder, content, message):
    (folder / "other.txt").write_bytes(content)
    assert message in refused(data="other.txt")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--length", "13"), "--length 13: a prompt of --prompt-tokens 8"),
        (("--rows", "0"), "--rows: 0 is not a positive"),
        (("--steps", "0"), "--steps: 0 is less than 1"),
        (("--greedy", "1.5"), "--greedy: 1.5 is not a share"),
        (("--decay", "0"), "--decay: 0 is not a positive number"),
        (("--muon-rate", "nan"), "--muon-rate: nan is not a positive number"),
        (("--ce-weight", "0", "--l1-weight", "0"), "the drafter learns nothing"),
        (("--devices", "999"), "--devices 999: there are"),
    ],
)
def test_numbers(refused, options, message):
    assert message in refused(*options)


def test_a_folder_that_holds_something(refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert "there is something in it already" in refused()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes").touch()
    told = refused("--out", str(tmp_path / "new"), "--run", str(tmp_path / "others"))
    assert "others: this is not the folder of a run, there is notes in it" in told


@pytest.mark.parametrize(
    "out, run, says",
    [
        ("new", "new", "--out {0}/new: it must not be the folder of --run"),
        ("new", "new/run", "--run {0}/new/run: it must not be the folder of --out, nor lie in it"),
        ("run/new", "run", "--out {0}/run/new: it must not be the folder of --run, nor lie in it"),
        ("model/new", "run", "--out {0}/model/new: it must not be the folder of --checkpoint"),
        ("new", "model/run", "--run {0}/model/run: it must not be the folder of --checkpoint"),
    ],
)
def test_folders_within_each_other(refused, folder, tmp_path, out, run, says):
    shutil.copytree(folder / "model", tmp_path / "model")
    where = ("--out", str(tmp_path / out), "--run", str(tmp_path / run))
    assert says.format(tmp_path) in refused(*where, checkpoint=tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


def test_a_full_disk(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(drafter_run.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=9))
    assert "9 bytes are free there, about" in refused()
    assert not os.listdir(tmp_path)


def test_without_optax(refused, monkeypatch):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'dspark-jax[train]'" in refused(status=1)


def test_other_settings_than_before(refused, monkeypatch, folder, tmp_path):
    """Also other text, or another model, in the place of those that it was begun with."""
    monkeypatch.setattr(drafter_run, "_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    data, model = tmp_path / "data.txt", tmp_path / "model"
    data.write_text(TEXT)
    shutil.copytree(folder / "model", model)
    where = {"checkpoint": model, "data": data}
    assert "the same command goes on" in refused(status=130, **where)
    assert "the same command goes on" in refused(status=130, **where)
    told = refused("--seed", "1", "--decay", "4", **where)
    assert "--seed: 0, now 1" in told and "--decay" not in told  # nothing was trained with it
    assert "the same command goes on" in refused("--decay", "3", status=130, **where)
    (tmp_path / "out-run" / "drafter" / "7").mkdir(parents=True)  # a state
    told = refused("--seed", "1", "--decay", "4", **where)
    assert "--seed: 0, now 1" in told and "--decay: 3.0, now 4.0" in told
    assert "--rows" not in told
    data.write_text(TEXT + "more")
    assert "--data" in refused(**where)
    data.write_text(TEXT)
    weights = model / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert "checkpoint (its fingerprint)" in refused(**where)


def test_too_little_memory(monkeypatch):
    """Of the compiled step, before the first is run."""
    sizes = types.SimpleNamespace(temp_size_in_bytes=3e9)
    program = types.SimpleNamespace(memory_analysis=lambda: sizes)
    monkeypatch.setattr(loop, "available_memory", lambda: 5e9)
    assert loop.fitting(program, devices=1) is program
    with pytest.raises(
        loop.ConfigError, match=r"needs 6.0 GB .*5.0 GB are available; lower --rows"
    ):
        loop.fitting(program, devices=2)


def test_the_block_is_the_configs():
    assert CONFIG.dspark_block_size + 8 + 1 == 14  # of which --length 13 above is one short


@pytest.mark.parametrize(
    "arguments, variables, anew",
    [
        (["train", "drafter"], {}, True),
        (["train", "drafter"], {"GLIBC_TUNABLES": "mine"}, True),
        (["train", "drafter"], allocator.SETTINGS, False),
        (["train", "drafter", "--help"], {}, False),
        (["generate", "train"], {}, False),
        ([], {}, False),
    ],
)
def test_training_begins_anew_with_settings_of_malloc(monkeypatch, arguments, variables, anew):
    begun = []
    monkeypatch.setattr(allocator.os, "environ", variables)
    monkeypatch.setattr(allocator.os, "execve", lambda *what: begun.append(what))
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    allocator.settle(arguments)
    assert len(begun) == anew
    for program, command, environment in begun:
        assert command == [program, *sys.orig_argv[1:]]
        assert environment == {**allocator.SETTINGS, **variables}
