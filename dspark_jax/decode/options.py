"""The options of a request: every one is checked on its own, and what may differ from prompt to
prompt is laid out, one value a prompt.

Wherever a number, a string or a list is expected, an array or scalar of NumPy or jax that holds one
will do. A truth value is no number.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dspark_jax.decode import gate_config
from dspark_jax.decode.gate_config import FLOAT32_MAX, GateConfig
from dspark_jax.decode.modes import MODES
from dspark_jax.errors import ConfigError, PromptError

MOST_STREAMS = 8  # that run at a time on a row of the mesh where the caller leaves it open
MOST_LOGPROBS = 128  # most likely tokens that may be asked for at one place
SEEDS = 2**32

_ARRAYS = np.ndarray, np.generic, jax.Array
_IDS = list, tuple, set, frozenset, range
_NUMBER = int, float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """As the caller gave them, unchecked; `generate` says what each is. The home of the defaults.

    Those up to forbidden_tokens may be one per prompt: a list of numbers, of dicts, of lists of ids
    or of lists of strings.
    """

    max_new_tokens: Any = 128
    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    seed: Any = 0
    stop_token_ids: Any = None
    stop: Any = None
    logit_bias: Any = None
    forbidden_tokens: Any = None
    mode: Any = "block"
    gate: Any = dataclasses.field(default_factory=GateConfig)
    streams: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = False


@dataclasses.dataclass(frozen=True)
class Checked:
    """columns: an option -> its values, one a prompt, or a single one where it is not known how
    many prompts there are. They are max_new_tokens, temperature, top_k, top_p, min_p, seed, stop (a
    tuple of strings), stop_token_ids (a frozenset, or None: the config's) and bias (pairs of id
    and what is added to its logit, by id). own_seeds: whether each prompt was given a seed.
    """

    columns: dict[str, list]
    own_seeds: bool
    mode: str
    gate: GateConfig
    streams: int | None
    logprobs: int | None
    prompt_logprobs: bool


def check(
    asked: Options,
    count: int | None = None,
    block_size: int | None = None,
    vocabulary: int | None = None,
) -> Checked:
    """count: of prompts, block_size and vocabulary: the model's; None: not known, and nothing is
    refused for it.

    Raises ConfigError, or PromptError for token ids and texts, naming the option, the prompt where
    it was given one per prompt, and what would do.
    """
    mode = _mode(asked.mode)
    _check_gate(asked.gate, block_size)
    return Checked(
        columns=_columns(asked, count, vocabulary),
        own_seeds=isinstance(plain(asked.seed), (list, tuple)),
        mode=mode,
        gate=asked.gate,
        streams=_streams(asked.streams),
        logprobs=_logprobs(asked.logprobs, vocabulary),
        prompt_logprobs=_truth("prompt_logprobs", asked.prompt_logprobs),
    )


def slots(streams: int | None, prompts: int, rows: int) -> int:
    """How many streams run at a time on each of the mesh's `rows`: as many as asked for, or as the
    prompts can fill, rounded up to a power of two, so that few programs are compiled.
    """
    wanted = min(MOST_STREAMS, -(-prompts // rows)) if streams is None else streams
    return 1 << (wanted - 1).bit_length()


# Options of the whole request


def _mode(mode) -> str:
    mode = plain(mode)
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigError(f"mode: {shown(mode)} is unknown; use one of {', '.join(MODES)}")
    return str(mode)


def _check_gate(gate, block_size: int | None) -> None:
    if not isinstance(gate, GateConfig):
        raise ConfigError(f"gate: expected a dspark.GateConfig, got {type(gate).__name__}")
    gate_config.validate(gate, _least_block(gate) if block_size is None else block_size)


def _least_block(gate: GateConfig) -> int:
    """The shortest draft block that these numbers can go with."""
    return gate.min_draft if isinstance(gate.min_draft, int) and gate.min_draft > 1 else 1


def _streams(streams) -> int | None:
    streams = plain(streams)
    if streams is None:
        return None
    wanted = "is not a positive integer; None: as many as there are prompts, at most "
    return _number("streams", streams, int, lambda n: n >= 1, f"{wanted}{MOST_STREAMS}")


def _logprobs(logprobs, vocabulary: int | None) -> int | None:
    logprobs = plain(logprobs)
    if logprobs is None:
        return None
    most = MOST_LOGPROBS if vocabulary is None else min(vocabulary, MOST_LOGPROBS)
    wanted = (
        f"is not an integer from 0 to {most}: of how many of the most likely tokens (0: of the "
        "emitted ones only; None: of none)"
    )
    return _number("logprobs", logprobs, int, lambda n: 0 <= n <= most, wanted)


def _truth(what: str, value) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise ConfigError(f"{what}: {shown(value)} is neither True nor False")
    return value


# Options that may be one per prompt


def _columns(asked: Options, count: int | None, vocabulary: int | None) -> dict[str, list]:
    def column(name: str, several: Callable, checked: Callable) -> list:
        value = plain(getattr(asked, name))
        if not several(value):
            return [checked(name, value)] * (1 if count is None else count)
        if count is not None and len(value) != count:
            raise ConfigError(
                f"{name}: {counted(len(value), 'value')} for {counted(count, 'prompt')}; give "
                "one for all prompts, or one for each"
            )
        return [checked(f"{name} of prompt {i}", plain(each)) for i, each in enumerate(value)]

    def ids(what, value):
        return _ids(what, value, vocabulary)

    columns = {name: column(name, _is_list, rule) for name, rule in _NUMBERS.items()}
    columns["stop_token_ids"] = column("stop_token_ids", _holds_lists, ids)
    columns["stop"] = column("stop", _holds_lists, _stop_strings)
    columns["bias"] = _joined(
        column("logit_bias", _is_list, lambda *given: _logit_bias(*given, vocabulary)),
        column("forbidden_tokens", _holds_lists, lambda *given: _forbidden(*given, vocabulary)),
    )
    return columns


def _is_list(value) -> bool:
    return isinstance(value, (list, tuple))


def _holds_lists(value) -> bool:
    """Whether a list has an entry per prompt and is not itself the list that serves all."""
    if not _is_list(value) or set(map(type, value)) <= {int, str}:
        return False
    return any(each is None or isinstance(each, _IDS) for each in map(plain, value))


def _number(what: str, value, kinds, good: Callable[[Any], bool], wanted: str):
    if isinstance(value, bool) or not isinstance(value, kinds) or not good(value):
        raise ConfigError(f"{what}: {shown(value)} {wanted}")
    return int(value) if kinds is int else float(value)


def _rule(kinds, good: Callable[[Any], bool], wanted: str) -> Callable:
    return lambda what, value: _number(what, value, kinds, good, wanted)


# NaN fails every comparison. A temperature is divided by in float32.
_NUMBERS: dict[str, Callable] = {
    "max_new_tokens": _rule(int, lambda n: n >= 1, "is not a positive integer"),
    "temperature": _rule(
        _NUMBER, lambda t: 0 <= t <= FLOAT32_MAX, "is not a finite number of 0 or more (0: greedy)"
    ),
    "top_k": _rule(int, lambda k: k >= 0, "is not an integer of 0 or more (0: all tokens)"),
    "top_p": _rule(
        _NUMBER, lambda p: 0 < p <= 1, "is not a number above 0 and at most 1 (1: all tokens)"
    ),
    "min_p": _rule(
        _NUMBER, lambda p: 0 <= p < 1, "is not a number of at least 0 and below 1 (0: all tokens)"
    ),
    "seed": _rule(
        int,
        lambda s: 0 <= s < SEEDS,
        f"is not an integer from 0 to {SEEDS - 1}; a seed is never drawn at random, so that every "
        "run can be repeated",
    ),
}


def _stop_strings(what: str, value) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)  # in an order that is the same in every process
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)):
        raise ConfigError(f"{what}: expected a string or a list of strings, got {shown(value)}")
    strings = [plain(each) for each in strings]
    for each in strings:
        if not isinstance(each, str):
            raise ConfigError(f"{what}: {shown(each)} is not a string")
        if not each:
            raise ConfigError(
                f"{what}: an empty string stands everywhere and would end every text at once; "
                "leave it out"
            )
        check_text(each, what)
    return tuple(dict.fromkeys(map(str, strings)))


def _ids(what: str, value, vocabulary: int | None) -> frozenset[int] | None:
    if value is None:
        return None
    if not isinstance(value, _IDS):
        raise PromptError(f"{what}: expected a list of token ids, got {shown(value)}")
    if all_ids(value, vocabulary):
        return frozenset(value)
    return frozenset(_id(what, plain(token), vocabulary) for token in value)


def _id(what: str, token, vocabulary: int | None) -> int:
    least_is_wrong = isinstance(token, bool) or not isinstance(token, int) or token < 0
    if least_is_wrong or (vocabulary is not None and token >= vocabulary):
        known = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}"
        raise PromptError(f"{what}: {shown(token)} is not a token id ({known})")
    return int(token)


def _forbidden(what: str, value, vocabulary: int | None) -> frozenset[int]:
    ids = _ids(what, value, vocabulary) or frozenset()
    if vocabulary is not None and len(ids) == vocabulary:
        raise ConfigError(
            f"{what}: all {vocabulary} tokens of the vocabulary are forbidden; leave at least one"
        )
    return ids


def _logit_bias(what: str, value, vocabulary: int | None) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{what}: expected a dict from token ids to what is added to their logits, got "
            f"{shown(value)}"
        )
    wanted = "is not a finite number of float32; forbidden_tokens rules tokens out"
    return {
        _id(what, plain(token), vocabulary): _number(
            f"{what}: token {shown(token)}",
            plain(added),
            _NUMBER,
            lambda number: -FLOAT32_MAX <= number <= FLOAT32_MAX,
            wanted,
        )
        for token, added in value.items()
    }


def _joined(biases: list[dict], forbidden: list[frozenset]) -> list[tuple]:
    """What is added to the logits of each prompt, made once for prompts that share it."""
    made: dict[tuple[int, int], tuple] = {}
    for bias, never in zip(biases, forbidden):
        if (id(bias), id(never)) not in made:
            all_of_it = bias | dict.fromkeys(never, -np.inf)
            made[id(bias), id(never)] = tuple(sorted(all_of_it.items()))
    return [made[id(bias), id(never)] for bias, never in zip(biases, forbidden)]


# What several checks share


def plain(value):
    """An array or scalar of NumPy or jax as Python's lists and numbers, anything else as it is, and
    so is an array that nobody can read, as one that is traced.
    """
    if not isinstance(value, _ARRAYS):
        return value
    try:
        value = np.asanyarray(value)  # the masked numbers of a masked array stay so
    except (TypeError, ValueError, RuntimeError):
        return value
    if value.dtype.kind == "f":
        value = value.astype(np.float64)  # some have numbers that Python does not know
    return value.tolist()


def all_ids(tokens, vocabulary: int | None) -> bool:
    """Whether these are Python's integers, all of the vocabulary (None: 0 or more): quick for long
    lists, and without a word about what else they are.
    """
    if not set(map(type, tokens)) <= {int}:
        return False
    return not tokens or (min(tokens) >= 0 and (vocabulary is None or max(tokens) < vocabulary))


def check_text(text: str, what: str) -> None:
    """Bytes that are no UTF-8 reach a program as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what}: character {error.start}, {text[error.start]!r}, is no valid Unicode; give "
            "text in UTF-8"
        ) from None


def shown(value) -> str:
    """For a message: short, on one line, of whatever it is."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python does not write integers of thousands of digits
        bits = f"of {value.bit_length()} bits" if isinstance(value, int) else "too large to show"
        return f"an integer {bits}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
