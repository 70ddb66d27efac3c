"""What a decoder does to text that is in one piece already.

A decoder is a row of stages. Those up to the first that joins tokens (`Fuse`, `ByteLevel`) make
text of tokens; the rest work on the text as a whole. A `Replace` there finds its pattern wherever
it lies, across tokens too, so that no decoding of a few tokens can tell what becomes of them:
[Fuse, Replace("ab", "X")] makes "X" of the tokens "a" and "b". Such stages are followed here in the
text as it comes; what may still change is held back.
"""

from __future__ import annotations

import functools
import json

_JOINING = "Fuse", "ByteLevel"


def stages_of(tokenizer) -> list[dict]:
    """The stages of a tokenizer's decoder, as tokenizer.json has them; none without a decoder.

    A `Fuse` before `ByteLevel`, which joins by itself, is left out. (With it a token that is not
    spelled in bytes would turn the whole text into spellings.)
    """
    if tokenizer.decoder is None:
        return []
    stages = _flat(json.loads(tokenizer.decoder.__getstate__()))
    kinds = [stage["type"] for stage in stages]
    pairs = zip(kinds, [*kinds[1:], ""])
    return [s for s, pair in zip(stages, pairs) if pair != ("Fuse", "ByteLevel")]


def _flat(stage: dict) -> list[dict]:
    parts = stage.get("decoders") if stage["type"] == "Sequence" else None
    return [stage] if parts is None else [flat for part in parts for flat in _flat(part)]


def divided(stages: list[dict]) -> tuple[list[dict], list[dict]]:
    """(what is left to the tokenizer, what is followed here): the second part is empty where
    nothing in it looks for a pattern across tokens.
    """
    joined = next((i for i, stage in enumerate(stages, 1) if stage["type"] in _JOINING), None)
    if joined is None or not any(map(_looks_across, stages[joined:])):
        return stages, []
    rest = [stage for stage in stages[joined:] if stage["type"] != "Fuse"]  # it is in one piece
    return stages[:joined], rest


def _looks_across(stage: dict) -> bool:
    return stage["type"] == "Replace" and len(stage["pattern"].get("String", "..")) != 1


def decoder_of(stages: list[dict]):
    """The tokenizers library's decoder of these stages."""
    from tokenizers import decoders

    decoder = decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": stages}).encode())
    return decoder


class StagedText:
    """Text through these stages, as it comes: add(text, last) -> what is settled of it."""

    def __init__(self, stages: list[dict]):
        self._stages = [_literal(stage) or _Whole(stage) for stage in stages]

    def add(self, text: str, last: bool) -> str:
        for stage in self._stages:
            text = stage.add(text, last)
        return text


def _literal(stage: dict) -> _Literal | None:
    wanted = stage["pattern"].get("String") if stage["type"] == "Replace" else None
    return _Literal(wanted, stage["content"]) if wanted else None


class _Literal:
    """Replaces a literal. Held back is what may be the beginning of one."""

    def __init__(self, wanted: str, content: str):
        self._wanted, self._content, self._held = wanted, content, ""

    def add(self, text: str, last: bool) -> str:
        *found, rest = (self._held + text).split(self._wanted)
        held = 0 if last else self._beginning(rest)
        self._held = rest[len(rest) - held :]
        return self._content.join([*found, rest[: len(rest) - held]])

    def _beginning(self, text: str) -> int:
        """How many characters at the end of a text the wanted one begins with."""
        longest = min(len(text), len(self._wanted) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(self._wanted[:n])), 0)


class _Whole:
    """Any other stage, such as a regular expression: what becomes of a text may depend on all that
    follows, so it is shown at the end.
    """

    def __init__(self, stage: dict):
        self._decode = functools.partial(_decoded, decoder_of([stage]))
        self._parts: list[str] = []

    def add(self, text: str, last: bool) -> str:
        self._parts.append(text)
        return self._decode("".join(self._parts)) if last else ""


def _decoded(decoder, text: str) -> str:
    return decoder.decode([text])
