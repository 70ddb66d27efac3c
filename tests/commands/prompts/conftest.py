"""`dspark generate --prompts` on a small checkpoint with a tokenizer of single bytes, in this
process.
"""

import io
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands.main import main
from dspark_jax.decode import run

from helpers.prompts_parts import USUAL, json_file
from helpers.quick import compiled_quickly
from helpers.round_parts import byte_tokenizer
from helpers.small_model import write_small_checkpoint
from helpers.support import MAX_SEQ_LEN


@pytest.fixture(scope="module", autouse=True)
def quick():
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_small_checkpoint(path, byte_tokenizer())
    return dspark.load(path, max_seq_len=MAX_SEQ_LEN)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(model, here, capsys, monkeypatch):
    """command(*arguments, stdin=None) -> status, standard output, standard error; two prompts at a
    time, 12 tokens of each, sampled.
    """

    def run(*arguments, stdin=None, loaded=model):
        monkeypatch.setattr(dspark, "load", lambda *_, **__: loaded)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        status = main(["generate", *USUAL, *arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refused(here, monkeypatch, capsys):
    """refused(*arguments) -> the one line that is said of them, before a model is loaded."""

    def load(*_, **__):
        raise AssertionError("loaded")

    def run(*arguments, stdin=None):
        monkeypatch.setattr(dspark, "load", load)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        assert main(["generate", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("dspark generate: ")

    return run


@pytest.fixture
def whole(command, here):
    """What a run that nothing happened to writes, of JSON lines."""
    json_file(here / "p.jsonl")
    assert command("--prompts", "p.jsonl", "--output", "whole")[0] == 0
    return (here / "whole").read_text()


@pytest.fixture
def runs(monkeypatch):
    """How many prompts each run has had."""
    counts = []

    def counted(self):
        counts.append((len(self.prompts), self.request.streams))
        return complete(self)

    complete = run.Run.__iter__
    monkeypatch.setattr(run.Run, "__iter__", counted)
    return counts
