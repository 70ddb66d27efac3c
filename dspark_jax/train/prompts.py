"""Prompts for the main model, drawn from the user's text (decode/documents.py)."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from dspark_jax.decode.documents import TextFile
from dspark_jax.errors import ConfigError

CHARACTERS = 16  # of text that are looked at for each token that a prompt is to have, at first


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
