"""`dspark` on a small checkpoint with a tokenizer of single bytes, in this process."""

import functools
import io
import sys

import pytest

import dspark_jax as dspark
from dspark_jax.commands.main import main

from helpers.quick import compiled_quickly
from helpers.round_parts import byte_tokenizer
from helpers.small_model import PROMPT, write_small_checkpoint
from helpers.support import MAX_SEQ_LEN


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_small_checkpoint(path, byte_tokenizer())
    return path


@pytest.fixture(scope="module", autouse=True)
def quick():
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def loading():
    return functools.lru_cache(maxsize=None)(dspark.load)


@pytest.fixture(autouse=True)
def load_once(loading, monkeypatch):
    monkeypatch.setattr(dspark, "load", loading)


@pytest.fixture
def command(directory, capsys, monkeypatch):
    """command(*arguments, stdin=None) -> exit status, standard output, standard error of `dspark
    generate`, 20 tokens of at most 128.
    """

    def run(*arguments, stdin=None, prompt=(PROMPT,)):
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
        status = main(
            [
                "generate",
                *prompt,
                "--checkpoint",
                str(directory),
                "--max-seq-len",
                str(MAX_SEQ_LEN),
                "--max-new-tokens",
                "20",
                *arguments,
            ]
        )
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def model(directory, loading):
    return loading(
        str(directory),
        None,
        max_seq_len=MAX_SEQ_LEN,
        dtype=None,
        activation_quant=True,
        calibration=None,
    )


@pytest.fixture(scope="module")
def expected(model):
    return dspark.generate(model, PROMPT, 20)
