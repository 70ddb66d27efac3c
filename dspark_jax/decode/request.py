"""What a caller asks for, checked before anything is compiled or computed."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from dspark_jax.decode import gate_config
from dspark_jax.decode.gate_config import GateConfig
from dspark_jax.decode.modes import MODES
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.load import Model


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
    gate_config.validate(gate, model.config.dspark_block_size)
    if (
        not isinstance(max_new_tokens, (int, np.integer))
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise ConfigError(f"max_new_tokens: {max_new_tokens!r} is not a positive integer")
    encoded = encode(model, prompts)
    for i, ids in enumerate(encoded):
        _check_prompt(model, i, ids, max_new_tokens)
    _warn_beyond_positions(model, max(map(len, encoded)) + int(max_new_tokens))
    return Request(
        tuple(tuple(int(t) for t in ids) for ids in encoded),
        int(max_new_tokens),
        mode,
        gate,
        _stop_ids(model, stop_token_ids),
    )


def encode(model: Model, prompts) -> list[list[int]]:
    """str, list of str, list of ids or list of lists of ids -> lists of ids. Strings are encoded as
    tokenizer.json says.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(
            "prompts: expected a string, strings, token ids or lists of token ids, got "
            f"{type(prompts).__name__}"
        )
    if not prompts:
        raise PromptError("the prompt is empty: at least one token is needed")
    if all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in prompts):
        return [list(prompts)]
    return [_encode_one(model, i, p) for i, p in enumerate(prompts)]


def _encode_one(model: Model, i: int, prompt) -> list[int]:
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, (list, tuple)):
        return list(prompt)
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
        if any(isinstance(t, bool) or not isinstance(t, (int, np.integer)) for t in ids):
            raise PromptError("token ids must be integers")
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


def _stop_ids(model: Model, stop_token_ids) -> frozenset[int]:
    if stop_token_ids is None:
        return frozenset(model.config.eos_token_id)
    if not isinstance(stop_token_ids, (list, tuple, set, frozenset, np.ndarray)):
        raise PromptError(f"stop_token_ids: expected a list of token ids, got {stop_token_ids!r}")
    for token in stop_token_ids:
        if (
            not isinstance(token, (int, np.integer))
            or isinstance(token, bool)
            or not 0 <= token < model.config.vocab_size
        ):
            raise PromptError(
                f"stop_token_ids: {token!r} is not a token id (0 to {model.config.vocab_size - 1})"
            )
    return frozenset(int(t) for t in stop_token_ids)


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
