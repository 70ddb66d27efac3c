"""Requests that are checked and never run, of what a model has to have for that."""

import dataclasses
import types

import pytest

import dspark_jax as dspark
from dspark_jax.decode.request import make_request

from helpers.round_parts import byte_tokenizer, compilations
from helpers.small_model import CONFIG

ROOM = 128  # tokens: max_seq_len
PROMPTS = [[1], [2, 3], [4]]


def stub(rows=1, tokenizer=None, room=ROOM, **config):
    """As much of a model as a request is checked against."""
    return types.SimpleNamespace(
        config=dataclasses.replace(CONFIG, **config),
        tokenizer=tokenizer,
        limits=types.SimpleNamespace(max_seq_len=room),
        mesh=types.SimpleNamespace(shape={"data": rows, "model": 1}),
    )


MODEL = stub(tokenizer=byte_tokenizer())


def made(prompts=PROMPTS, model=MODEL, **options):
    with compilations() as compiled:
        request = make_request(model, prompts, **{"max_new_tokens": 4} | options)
    assert not compiled
    return request


def of(name, **options):
    """That field of each of the three prompts."""
    return [getattr(prompt, name) for prompt in made(**options).prompts]


def refused(prompts=PROMPTS, model=MODEL, **options) -> str:
    """What is said of it."""
    with pytest.raises((dspark.ConfigError, dspark.PromptError)) as error:
        made(prompts, model, **options)
    said = str(error.value)
    assert "\n" not in said
    return said
