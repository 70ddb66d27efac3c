"""Text of the user in files, for what needs much of it: training of a drafter, and calibration.

A file is one document of UTF-8 text; where its name ends in .jsonl every line is one, an object
with "text" or "prompt".
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_jax.checkpoints.paths import expanded, no_file
from dspark_jax.decode.options import all_ids, check_text
from dspark_jax.errors import ConfigError, PromptError

KEYS = ("text", "prompt")
Document = str | list[int]


@dataclass(frozen=True)
class TextFile:
    """name: without its folder. size: in bytes. checksum: crc32 of its bytes. documents: at least
    one, none of them empty.
    """

    name: str
    size: int
    checksum: int
    documents: tuple[Document, ...]

    @property
    def identity(self) -> list:
        """What tells whether it is the same file."""
        return [self.name, self.size, self.checksum]


def read(paths: Sequence[str], ids: bool = False) -> list[TextFile]:
    """ids: whether a document may be a list of token ids, of "prompt".

    Raises one ConfigError that names every file that is missing, empty, or no text.
    """
    files, found = [], []
    for path in paths:
        try:
            files.append(_read(path, ids))
        except (ConfigError, PromptError) as error:
            found.append(str(error))
    if found:
        raise ConfigError("\n  ".join(["--data:", *found]) if len(found) > 1 else found[0])
    return files


def _read(name: str, ids: bool) -> TextFile:
    path = expanded(name)
    if (other := no_file(path, pipe=True)) is not None:
        raise ConfigError(f"--data {name}: this is {other}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {name}: cannot be read ({error.strerror})") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--data {name}: not text in UTF-8 (byte {error.start}: {error.reason})"
        ) from None
    if "\0" in text:
        raise ConfigError(f"--data {name}: holds a NUL character, so it is not text")
    lined = path.suffix.lower() == ".jsonl"
    documents = _lines(name, text, ids) if lined else [text] * bool(text.strip())
    if not documents:
        raise ConfigError(f"--data {name}: there is no text in it")
    return TextFile(path.name, len(content), zlib.crc32(content), tuple(documents))


def _lines(name: str, text: str, ids: bool) -> list[Document]:
    lines = [line for line in enumerate(text.split("\n"), 1) if line[1].strip()]
    return [_document(f"--data {name}, line {number}", line, ids) for number, line in lines]


def _document(where: str, line: str, ids: bool) -> Document:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON: {error}") from None
    held = [value.get(key) for key in KEYS] if isinstance(value, dict) else []
    given = next((each for each in held if each is not None), None)
    if isinstance(given, str) and given.strip():
        check_text(given, where)
        return given
    if ids and isinstance(given, list) and given and all_ids(given, None):
        return given
    also = ', or with token ids, such as {"prompt": [5, 6, 7]}' if ids else ""
    raise ConfigError(
        f'{where}: expected an object with text, such as {{"text": "..."}} or '
        f'{{"prompt": "..."}}{also}'
    )
