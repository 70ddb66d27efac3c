"""Held-out text for `dspark calibrate`: files in, prompts of token ids out.

A file is one document; of a .jsonl file every line is one: {"text": "..."}, {"prompt": "..."} or
{"prompt": [token ids]}; other keys are left alone. A document is cut into pieces of a prompt and
what is generated after it, so that prompts do not overlap what comes before them.
"""

from __future__ import annotations

import json
from pathlib import PurePath

from dspark_jax.errors import ConfigError, PromptError


def documents(paths: list[str]) -> list[str | list[int]]:
    """The documents of these files, in order; never none.

    Raises ConfigError or PromptError, naming the file and the line.
    """
    found: list[str | list[int]] = []
    for path in paths:
        text = _text(path)
        if PurePath(path).suffix.lower() == ".jsonl":
            found += _of_lines(path, text)
        elif text.strip():
            found.append(text)
    if not found:
        raise PromptError(f"--data: there is no text in {', '.join(paths)}")
    return found


def prompts(model, texts: list[str | list[int]], count: int, length: int, gap: int) -> list:
    """At most `count` prompts of up to `length` token ids, from places spread evenly over all
    texts; `gap` tokens, those that are generated, lie between two of one text.

    Raises PromptError for text without a tokenizer and for fewer than two prompts.
    """
    found = []
    for text in texts:
        ids = text if isinstance(text, list) else _encoded(model, text)
        starts = range(0, max(len(ids) - length, 0) + 1, length + gap)
        found += [ids[at : at + length] for at in starts if ids]
    if len(found) < 2:
        raise PromptError(
            f"--data: one prompt of up to {length} tokens is all there is in it; half of the "
            "prompts are for fitting and half for judging, so give more text"
        )
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _encoded(model, text: str) -> list[int]:
    if model.tokenizer is None:
        raise PromptError(
            "--data is text, but this checkpoint has no tokenizer.json; give token ids, as "
            '{"prompt": [5, 6, 7]} in the lines of a .jsonl file'
        )
    return model.tokenizer.encode(text, add_special_tokens=True).ids


def _text(path: str) -> str:
    from dspark_jax.checkpoints.paths import expanded, no_file

    file = expanded(path)
    if (other := no_file(file, pipe=True)) is not None:
        raise ConfigError(f"--data {path}: this is {other}")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--data {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"--data {path}: not valid UTF-8 ({error.reason})") from None


def _of_lines(path: str, text: str) -> list[str | list[int]]:
    lines = [line for line in enumerate(text.split("\n"), 1) if line[1].strip()]
    return [_of_line(f"--data {path}, line {number}", line) for number, line in lines]


def _of_line(where: str, line: str) -> str | list[int]:
    from dspark_jax.decode.options import all_ids
    from dspark_jax.decode.request import check_text

    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON: {error}") from None
    text = given.get("text", given.get("prompt")) if isinstance(given, dict) else None
    if isinstance(text, str) and text:
        check_text(text, where)
        return text
    if isinstance(text, list) and text and all_ids(text, None):
        return text
    raise ConfigError(
        f'{where}: expected an object with text, such as {{"text": "..."}}, or with token ids, '
        'such as {"prompt": [5, 6, 7]}'
    )
