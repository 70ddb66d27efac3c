"""What a caller asks for, checked before anything is compiled or computed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np

from dspark_jax.decode import options
from dspark_jax.decode.gate_config import FLOAT32_TINY, GateConfig
from dspark_jax.decode.options import Checked, Options, all_ids, check_text, counted, plain, shown
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.load import Model
from dspark_jax.runtime.sharding import DATA


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A checked prompt and what was asked for it.

    ids: token ids, without those of a prefix; never empty without one. max_new_tokens: 1 or more.
    stop_token_ids: each ends the stream and is its last token. stop: strings that end it, none of
    them empty.
    temperature: 0: greedy. top_k: 0 .. vocabulary - 1; 0: all. top_p: (0, 1]. min_p: [0, 1).
    seed: 0 .. 2**32 - 1, and index: the key of the noise is fold_in(key(seed), index). The index is
      0 where each prompt was given a seed of its own, else the prompt's number in the call.
    bias: (token id, what is added to its logit), by id; -inf: the token is never chosen.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop: tuple[str, ...]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    bias: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request.

    streams: how many run at a time on each row of the mesh's data axis, a power of two.
    logprobs: None: not asked for; n: of every emitted token and of the n most likely in its place.
    prompt_logprobs: of the prompts' tokens as well. prefix: a Session, not an empty one, whose
    tokens stand before each prompt, or None.
    """

    prompts: tuple[Prompt, ...]
    mode: str
    gate: GateConfig
    streams: int
    logprobs: int | None
    prompt_logprobs: bool
    prefix: object | None = None

    @property
    def sampled(self) -> bool:
        """Whether any token is drawn; else no program holds a sampler."""
        return any(prompt.temperature > 0 for prompt in self.prompts)


def make_request(model: Model, prompts, *, prefix=None, **asked) -> Request:
    """asked: the fields of Options, with its defaults. prefix: a Session.

    Raises PromptError or ConfigError for anything that cannot be served, naming it; warns of what
    the model was not made for.
    """
    config, before = model.config, _prefix_length(model, prefix)
    encoded = encode(model, prompts, begins=before == 0)
    checked = options.check(
        Options(**asked), len(encoded), config.dspark_block_size, config.vocab_size
    )
    made = _prompts(model, encoded, checked)
    for i, prompt in enumerate(made):
        _check_prompt(model, i, prompt, before)
    _warn_of_two_beginnings(model, prompts, encoded)
    longest = max(len(prompt.ids) + prompt.max_new_tokens for prompt in made)
    _warn_beyond_positions(model, before + longest)
    return Request(
        made,
        checked.mode,
        checked.gate,
        options.slots(checked.streams, len(made), model.mesh.shape[DATA]),
        checked.logprobs,
        checked.prompt_logprobs,
        prefix if before else None,
    )


def check_options(*, block_size: int | None = None, count: int | None = None, **asked) -> None:
    """Raises ConfigError or PromptError for what can be refused without a model. block_size: the
    model's, count: of prompts, where they are known. asked: the fields of Options.
    """
    options.check(Options(**asked), count, block_size)


def _prefix_length(model: Model, prefix) -> int:
    """Tokens that stand before each prompt."""
    if prefix is None:
        return 0
    tokens = getattr(prefix, "tokens", None)
    if not hasattr(prefix, "model") or not isinstance(tokens, (list, tuple)):
        raise ConfigError(f"prefix: expected a dspark.Session, got {shown(prefix)}")
    if prefix.model is not model:
        raise ConfigError(
            "prefix: this session is of another model; what it remembers is of use to its own only"
        )
    return len(tokens)


def encode(model: Model, prompts, begins: bool = True) -> list[list[int]]:
    """str, list of str, list of ids or list of lists of ids -> lists of ids. Arrays of NumPy and of
    jax are taken as the lists that they hold.

    begins: whether each begins a stream. Strings are then encoded as tokenizer.json says; in the
    midst of a stream nothing is added to them, and nothing at all is a prompt too.
    """
    prompts = plain(prompts)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, range):
        prompts = list(prompts)
    if not isinstance(prompts, (list, tuple)):
        raise PromptError(
            "prompts: expected a string, strings, token ids or lists of token ids, got "
            f"{type(prompts).__name__}"
        )
    if not prompts and begins:
        raise PromptError("the prompt is empty: at least one token is needed")
    prompts = _with_plain_entries(prompts)
    if not any(isinstance(prompt, (str, list, tuple)) for prompt in prompts):
        prompts = [prompts]
    return [_encode_one(model, i, prompt, begins) for i, prompt in enumerate(prompts)]


def _with_plain_entries(values) -> list:
    if set(map(type, values)) <= {int, str}:  # quick for long prompts
        return list(values)
    return [_as_int(plain(value)) for value in values]


def _as_int(value):
    """Subclasses of int as int, but for truth values; anything else as it is."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _encode_one(model: Model, i: int, prompt, begins: bool) -> list[int]:
    if isinstance(prompt, (list, tuple)):
        return _with_plain_entries(prompt)
    if not isinstance(prompt, str):
        raise PromptError(
            f"prompt {i}: expected a string or a list of token ids, got {type(prompt).__name__}"
        )
    if model.tokenizer is None:
        raise PromptError(
            f"prompt {i} is text, but this checkpoint has no tokenizer.json; give token ids"
        )
    check_text(prompt, f"prompt {i}")
    return model.tokenizer.encode(prompt, add_special_tokens=begins).ids


def _prompts(model: Model, encoded: list[list[int]], checked: Checked) -> tuple[Prompt, ...]:
    columns, vocabulary = dict(checked.columns), model.config.vocab_size
    if model.tokenizer is None and any(columns["stop"]):
        raise PromptError(
            "stop: this checkpoint has no tokenizer.json, so there is no text to find a string in; "
            "use stop_token_ids"
        )
    usual = frozenset(model.config.eos_token_id)
    columns["stop_token_ids"] = [usual if ids is None else ids for ids in columns["stop_token_ids"]]
    # The numbers become 32 bits wide. So many best ones are all of them, and a temperature that
    # float32 does not hold in full is as good as none.
    columns["top_k"] = [0 if k >= vocabulary else k for k in columns["top_k"]]
    columns["temperature"] = [0.0 if t < FLOAT32_TINY else t for t in columns["temperature"]]
    columns["ids"] = map(tuple, encoded)
    columns["index"] = [0] * len(encoded) if checked.own_seeds else range(len(encoded))
    return tuple(Prompt(**dict(zip(columns, row))) for row in zip(*columns.values()))


def _check_prompt(model: Model, i: int, prompt: Prompt, before: int) -> None:
    """before: tokens of the prefix."""
    ids, vocabulary = prompt.ids, model.config.vocab_size
    if not ids and not before:
        raise PromptError(f"prompt {i}: the prompt is empty: at least one token is needed")
    require_ids(f"prompt {i}", ids, vocabulary)
    most = model.limits.max_seq_len
    if before + len(ids) + prompt.max_new_tokens > most:
        held = [f"a prefix of {counted(before, 'token')}"] if before else []
        held += [counted(len(ids), "token")] if ids else []
        raise PromptError(
            f"prompt {i}: {', '.join(held)} and max_new_tokens "
            f"{shown(prompt.max_new_tokens)} together exceed max_seq_len {most}; "
            "ask for fewer tokens or load with a larger max_seq_len"
        )


def require_ids(what: str, ids: Sequence, vocabulary: int) -> None:
    """Raises PromptError, beginning with `what`, for what is no token id of this vocabulary."""
    if not all_ids(ids, vocabulary):
        raise PromptError(f"{what}: {_what_is_wrong(ids, vocabulary)}")


def _what_is_wrong(ids: Sequence, vocabulary: int) -> str:
    """With ids that are not all of the vocabulary: the first that has no integer, else the first
    that is outside.
    """
    for at, token in enumerate(ids):
        if type(token) is not int:
            return (
                f"token ids must be integers; {shown(token)} at index {at} is a "
                f"{type(token).__name__}"
            )
    at = next(at for at, token in enumerate(ids) if not 0 <= token < vocabulary)
    return _outside(ids[at], at, vocabulary)


def _outside(token: int, at: int, vocabulary: int) -> str:
    return (
        f"token id {shown(token)} at index {at} is outside the vocabulary (0 to {vocabulary - 1})"
    )


def _warn_beyond_positions(model: Model, length: int) -> None:
    """It runs and stays exact, but what a model writes beyond the context that it was made for is
    rarely of use.
    """
    most = model.config.max_position_embeddings
    if length > most:
        warnings.warn(
            f"prompt and max_new_tokens come to {length} tokens, the model was made for "
            f"max_position_embeddings = {most}: "
            "expect poor text after that",
            stacklevel=4,
        )


def _warn_of_two_beginnings(model: Model, prompts, encoded: list[list[int]]) -> None:
    """A text may begin with the token that the tokenizer puts before every text."""
    first, texts = model.config.bos_token_id, plain(prompts)
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
            _outside(int(tokens.ravel()[wrong[0]]), wrong[0], model.config.vocab_size)
        )
