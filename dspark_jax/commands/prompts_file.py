"""The file of `dspark generate --prompts`: one prompt a line, or an object of JSON a line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from pathlib import PurePath
from typing import Any

from dspark_jax.commands.asking import standard_input
from dspark_jax.errors import ConfigError, DsparkError, PromptError

STANDARD_INPUT = "-"
NUMBERS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
LISTS = ("stop", "stop_token_ids", "forbidden_tokens")
SETTINGS = (*NUMBERS, *LISTS, "logit_bias")


@dataclasses.dataclass(frozen=True)
class Line:
    """A prompt and what its line says of it.

    number: of the line, from 1. prompt: text, or token ids (at least one). settings: those that the
    line gives, by the names that `dspark.generate` has for them. about: {"id": ...} where the line
    has one, to be repeated in its result.
    """

    number: int
    prompt: str | list[int]
    settings: dict[str, Any]
    about: dict[str, Any]


def read(path: str) -> list[Line]:
    """The lines of a file, or of standard input for "-"; never none.

    Raises ConfigError or PromptError, naming file and line.
    """
    name, text = shown_name(path), _text(path)
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise PromptError(f"{name}: there is no prompt in it")
    made = _from_json if _is_jsonl(path, text) else _from_text
    return [
        _checked(made, f"{name}, line {number}", number, line)
        for number, line in enumerate(lines, 1)
    ]


def shown_name(path: str) -> str:
    return "standard input" if path == STANDARD_INPUT else path


def at_line(where: str, error: DsparkError) -> DsparkError:
    """The same error, said of a line."""
    return type(error)(f"{where}: {str(error).removeprefix('prompt 0: ')}")


def _text(path: str) -> str:
    if path == STANDARD_INPUT:
        return standard_input().removeprefix("\ufeff")
    from dspark_jax.checkpoints.paths import expanded

    try:
        return expanded(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start].count(b"\n")
        raise PromptError(f"{path}, line {before + 1}: not valid UTF-8 ({error.reason})") from None


def _is_jsonl(path: str, text: str) -> bool:
    ending = PurePath(path).suffix.lower()
    return ending == ".jsonl" or (ending != ".txt" and text.lstrip().startswith("{"))


def _checked(made, where: str, number: int, line: str) -> Line:
    if not line.strip():
        raise PromptError(
            f"{where}: this line is blank; every line is a prompt (one with line breaks in it "
            'needs JSON lines, {"prompt": "..."})'
        )
    try:
        return made(number, line)
    except DsparkError as error:
        raise at_line(where, error) from None


def _from_text(number: int, line: str) -> Line:
    from dspark_jax.decode.request import check_text

    check_text(line, "prompt 0")
    return Line(number, line, {}, {})


def _from_json(number: int, line: str) -> Line:
    try:
        given = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not readable as JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError('expected an object, such as {"prompt": "..."}')
    for key in given:
        if key not in ("prompt", "id", *SETTINGS):
            raise ConfigError(f"{key!r} is unknown; {_what_is_known(key)}")
    settings = {
        name: _setting(name, given[name]) for name in SETTINGS if given.get(name) is not None
    }
    about = {"id": _repeatable(given["id"])} if "id" in given else {}
    return Line(number, _prompt(given.get("prompt")), settings, about)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key given twice: {next(n for n in names if names.count(n) > 1)!r}")
    return found


def _no_number(constant: str):
    raise ValueError(f"{constant} is no number of JSON")


def _what_is_known(key: str) -> str:
    near = difflib.get_close_matches(key, SETTINGS, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"known are prompt, id and {', '.join(SETTINGS)}; anything else can go into id"


def _repeatable(value):
    """Numbers beyond float64 are read as infinity, which JSON cannot say."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise ConfigError("id: too large a number, or too many brackets, to be repeated") from None
    return value


def _prompt(prompt) -> str | list[int]:
    from dspark_jax.decode.options import all_ids, shown
    from dspark_jax.decode.request import check_text

    if isinstance(prompt, str):
        check_text(prompt, "prompt 0")
        return prompt
    if not isinstance(prompt, list):
        raise PromptError(f"prompt: expected text or a list of token ids, got {shown(prompt)}")
    if not prompt:
        raise PromptError("the prompt is empty: at least one token is needed")
    if not all_ids(prompt, None):
        at = next(at for at, token in enumerate(prompt) if not all_ids([token], None))
        raise PromptError(f"prompt: {shown(prompt[at])} at index {at} is not a token id")
    return prompt


def _setting(name: str, value):
    """As `dspark.generate` takes it for one prompt, where a list of lists would be for several."""
    from dspark_jax.decode.options import shown

    if name in LISTS:
        if isinstance(value, list) and any(isinstance(each, list | None) for each in value):
            raise ConfigError(f"{name}: {shown(value)} is no list for one prompt")
        return value
    if isinstance(value, list):
        raise ConfigError(f"{name}: {shown(value)} is a list; a line has one prompt")
    return _bias(value) if name == "logit_bias" and isinstance(value, dict) else value


def _bias(value: dict[str, Any]) -> dict[int, Any]:
    """The keys of JSON are text."""
    for key in value:
        if not re.fullmatch("[0-9]{1,18}", key):
            raise PromptError(f"logit_bias: {key!r} is not a token id")
    return {int(key): number for key, number in value.items()}
