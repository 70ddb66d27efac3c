"""The text that a drafter's training starts from: files of the user, and prompts drawn from them.

A file whose name ends in .jsonl has a document a line, an object with "text" or "prompt"; any other
is one document of UTF-8 text.
"""

from __future__ import annotations

import bisect
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark_jax.checkpoints.paths import expanded, no_file
from dspark_jax.errors import ConfigError

KEYS = ("text", "prompt")
CHARACTERS = 16  # of text that are looked at for each token that a prompt is to have, at first


@dataclass(frozen=True)
class TextFile:
    """name: without its folder. size: in bytes. checksum: crc32 of its bytes."""

    name: str
    size: int
    checksum: int
    documents: tuple[str, ...]

    @property
    def identity(self) -> list:
        """What tells whether it is the same file."""
        return [self.name, self.size, self.checksum]


def read(paths: Sequence[str]) -> list[TextFile]:
    """Raises one ConfigError that names every file that is missing, empty, or no text."""
    files, found = [], []
    for path in paths:
        try:
            files.append(_read(path))
        except ConfigError as error:
            found.append(str(error))
    if found:
        raise ConfigError("\n  ".join(["--data:", *found]) if len(found) > 1 else found[0])
    return files


def _read(name: str) -> TextFile:
    path = expanded(name)
    if (other := no_file(path)) is not None:
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
    documents = _lines(name, text) if path.suffix.lower() == ".jsonl" else (text,)
    documents = tuple(document for document in documents if document.strip())
    if not documents:
        raise ConfigError(f"--data {name}: there is no text in it")
    return TextFile(path.name, len(content), zlib.crc32(content), documents)


def _lines(name: str, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"--data {name}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not readable as JSON: {error}") from None
        held = [value.get(key) for key in KEYS] if isinstance(value, dict) else []
        document = next((each for each in held if isinstance(each, str)), None)
        if document is None:
            raise ConfigError(f'{where}: expected an object with "text" or "prompt", a string')
        documents.append(document)
    return documents


class Prompts:
    """Beginnings for the main model to go on from: prompt `number` is a pure function of the seed
    and the number.

    Documents come as often as they are long. A prompt begins at a document's start or at a line's,
    and has between `least` and `most` tokens, fewer where its document ends.
    """

    def __init__(self, files: Sequence[TextFile], tokenizer, seed: int, least: int, most: int):
        self._documents = [document for file in files for document in file.documents]
        self._ends = list(itertools.accumulate(map(len, self._documents)))
        self._tokenizer, self._seed, self._least, self._most = tokenizer, seed, least, most

    def tokens(self, number: int) -> list[int]:
        """Never none."""
        rng = np.random.default_rng([self._seed, 0, number])
        wanted = int(rng.integers(self._least, self._most + 1))
        at = int(rng.integers(self._ends[-1]))
        index = bisect.bisect_right(self._ends, at)
        document = self._documents[index]
        at -= self._ends[index] - len(document)
        start = document.rfind("\n", 0, at) + 1
        if not document[start:].strip():
            start = 0
        return self._encoded(document, start, wanted)

    def _encoded(self, document: str, start: int, wanted: int) -> list[int]:
        length = CHARACTERS * wanted
        while True:
            ids = self._tokenizer.encode(document[start : start + length]).ids[:wanted]
            if len(ids) == wanted or start + length >= len(document):
                return ids
            length *= 2


def require_enough(files: Sequence[TextFile], tokenizer, least: int) -> None:
    """Raises ConfigError where all files together hold fewer than `least` tokens, or one of them
    text of which the tokenizer makes none.
    """
    total = 0
    for file in files:
        count = 0
        for document in file.documents:
            # Every token of a prompt comes from some characters; the first are enough to count.
            count += len(tokenizer.encode(document[: CHARACTERS * least]).ids)
            if count >= least:
                break
        if not count:
            raise ConfigError(f"--data {file.name}: the tokenizer makes no token of it")
        total += count
    if total < least:
        raise ConfigError(
            f"--data: {total} tokens in all, and a draft block with its anchor is {least}; give "
            "more text"
        )
