"""What a caller asks for, checked before anything is compiled or computed."""

from __future__ import annotations

import dataclasses
import reprlib
import warnings

import jax
import numpy as np

from dspark_jax.decode import gate_config
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.modes import MODES
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.load import Model

_ARRAYS = np.ndarray, np.generic, jax.Array


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request. prompts: token ids. stop_token_ids: each ends a stream and is its last."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    mode: str
    gate: GateConfig
    stop_token_ids: frozenset[int]


def make_request(
    model: Model, prompts, max_new_tokens, mode, gate, temperature, top_k, top_p, stop_token_ids
) -> Request:
    """Raises PromptError or ConfigError for anything that cannot be served, naming it; warns of
    what the model was not made for.
    """
    options = max_new_tokens, mode, gate, temperature, top_k, top_p
    check_options(*options, model.config.dspark_block_size)
    max_new_tokens = int(max_new_tokens)  # sums of small NumPy integers would wrap
    encoded = encode(model, prompts)
    _warn_of_two_beginnings(model, prompts, encoded)
    for i, ids in enumerate(encoded):
        _check_prompt(model, i, ids, max_new_tokens)
    _warn_beyond_positions(model, max(map(len, encoded)) + max_new_tokens)
    return Request(
        tuple(tuple(int(t) for t in ids) for ids in encoded),
        max_new_tokens,
        mode,
        gate,
        _stop_ids(model, stop_token_ids),
    )


def check_options(
    max_new_tokens, mode, gate, temperature, top_k, top_p, block_size: int | None = None
) -> None:
    """Raises ConfigError for what can be refused without a model. block_size: the model's, where it
    is known.
    """
    if mode not in MODES:
        raise ConfigError(f"mode: {mode!r} is unknown; use one of {', '.join(MODES)}")
    if temperature != 0 or top_k != 0 or top_p != 1:
        raise ConfigError(
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}: this version decodes "
            "greedily only; "
            "leave them at 0, 0 and 1"
        )
    if not isinstance(gate, GateConfig):
        raise ConfigError(f"gate: expected a dspark.GateConfig, got {type(gate).__name__}")
    gate_config.validate(gate, _least_block(gate) if block_size is None else block_size)
    if (
        not isinstance(max_new_tokens, (int, np.integer))
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise ConfigError(f"max_new_tokens: {max_new_tokens!r} is not a positive integer")


def _least_block(gate: GateConfig) -> int:
    """The shortest draft block that these numbers can go with."""
    return gate.min_draft if isinstance(gate.min_draft, int) and gate.min_draft > 1 else 1


def encode(model: Model, prompts) -> list[list[int]]:
    """str, list of str, list of ids or list of lists of ids -> lists of ids. Arrays of NumPy and of
    jax are taken as the lists that they hold. Strings are encoded as tokenizer.json says.
    """
    prompts = _without_arrays(prompts)
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(
            "prompts: expected a string, strings, token ids or lists of token ids, got "
            f"{type(prompts).__name__}"
        )
    if not prompts:
        raise PromptError("the prompt is empty: at least one token is needed")
    prompts = [_without_arrays(prompt) for prompt in prompts]
    if not any(isinstance(prompt, (str, list, tuple)) for prompt in prompts):
        prompts = [prompts]
    return [_encode_one(model, i, p) for i, p in enumerate(prompts)]


def _without_arrays(value):
    """An array or scalar of NumPy or jax as Python's lists and numbers, anything else as it is."""
    return np.asarray(value).tolist() if isinstance(value, _ARRAYS) else value


def _encode_one(model: Model, i: int, prompt) -> list[int]:
    if isinstance(prompt, (list, tuple)):
        return [_without_arrays(token) for token in prompt]
    if not isinstance(prompt, str):
        raise PromptError(
            f"prompt {i}: expected a string or a list of token ids, got {type(prompt).__name__}"
        )
    if model.tokenizer is None:
        raise PromptError(
            f"prompt {i} is text, but this checkpoint has no tokenizer.json; give token ids"
        )
    check_text(prompt, f"prompt {i}")
    return model.tokenizer.encode(prompt).ids


def check_text(text: str, what: str) -> None:
    """Bytes that are no UTF-8 reach a program as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what}: character {error.start}, {text[error.start]!r}, is no valid Unicode; give "
            "text in UTF-8"
        ) from None


def _check_prompt(model: Model, i: int, ids: list[int], max_new_tokens: int) -> None:
    try:
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise PromptError(
                    f"token ids must be integers; {reprlib.repr(token)} at index {at} is a "
                    f"{type(token).__name__}"
                )
        check_ids(model, ids)
    except PromptError as error:
        raise PromptError(f"prompt {i}: {error}") from None
    most = model.limits.max_seq_len
    if len(ids) + max_new_tokens > most:
        raise PromptError(
            f"prompt {i}: {len(ids)} tokens and max_new_tokens {max_new_tokens} together exceed "
            f"max_seq_len {most}; "
            "ask for fewer tokens or load with a larger max_seq_len"
        )


def _warn_beyond_positions(model: Model, length: int) -> None:
    """It runs and stays exact, but what a model writes behind the context that it was made for is
    rarely of use.
    """
    most = model.config.max_position_embeddings
    if length > most:
        warnings.warn(
            f"prompt and max_new_tokens come to {length} tokens, the model was made for "
            f"max_position_embeddings = {most}: "
            "expect poor text behind that",
            stacklevel=4,
        )


def _warn_of_two_beginnings(model: Model, prompts, encoded: list[list[int]]) -> None:
    """A text may begin with the token that the tokenizer puts before every text."""
    first, texts = model.config.bos_token_id, _without_arrays(prompts)
    texts = [texts] if isinstance(texts, str) else texts
    for i, (text, ids) in enumerate(zip(texts, encoded)):
        if not isinstance(text, str) or ids[:2] != [first, first]:
            continue
        as_written = model.tokenizer.encode(text, add_special_tokens=False).ids
        if ids[1 : len(as_written) + 1] == as_written:
            warnings.warn(
                f"prompt {i} begins with {model.tokenizer.id_to_token(first)}, and the tokenizer "
                "puts it before every text: it stands there twice; leave it out of the text",
                stacklevel=4,
            )


def _stop_ids(model: Model, stop_token_ids) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset(model.config.eos_token_id)
    stop_token_ids = _without_arrays(stop_token_ids)
    if not isinstance(stop_token_ids, (list, tuple, set, frozenset)):
        raise PromptError(f"stop_token_ids: expected a list of token ids, got {stop_token_ids!r}")
    stop_token_ids = [_without_arrays(token) for token in stop_token_ids]
    for token in stop_token_ids:
        if (
            not isinstance(token, int)
            or isinstance(token, bool)
            or not 0 <= token < model.config.vocab_size
        ):
            raise PromptError(
                f"stop_token_ids: {token!r} is not a token id (0 to {model.config.vocab_size - 1})"
            )
    return frozenset(stop_token_ids)


def check_ids(model: Model, tokens) -> None:
    """JAX would clamp an id outside the vocabulary without a word."""
    tokens = np.asarray(tokens)
    if tokens.size == 0:
        raise PromptError("the prompt is empty: at least one token is needed")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise PromptError(f"token ids must be integers, got {tokens.dtype}")
    wrong = np.flatnonzero((tokens < 0) | (tokens >= model.config.vocab_size))
    if wrong.size:
        raise PromptError(
            f"token id {tokens.ravel()[wrong[0]]} at index {wrong[0]} is outside the vocabulary "
            f"(0 to {model.config.vocab_size - 1})"
        )
