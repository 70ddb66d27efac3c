"""Text that ends before a stop string, as tokens come: what belongs to it, what may be shown.

The stop string that counts is the one that completes first, character by character; of those that
complete with the same character, the one that begins first. It lies in the new text alone: the
prompt's text is never seen here. Characters are compared as code points.

Tokens are decoded one at a time, so that how they are cut into pieces changes nothing, and the
token that completes a stop string is the first one with which the decoder gives all of it. Where
the bytes tell everything (ByteLevel, ByteFallback) it gives a character with its last byte, and
U+FFFD with the byte or token that shows the bytes before it to be broken, or at the end. Another
decoder's text is held back while it ends with U+FFFD (decode/text.py): there, a stop string in such
text completes with a later token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dspark_jax.decode.text import IncrementalText
from dspark_jax.loading.load import Model


@dataclass(frozen=True)
class Piece:
    """What became of some tokens of a stream."""

    kept: int  # so many of them, the first ones, belong to the stream; all, unless it ended before
    text: str | None  # what may be shown now, after what was shown before; None without a tokenizer
    stop: str | None  # the stop string that ended the stream


class StopText:
    """Text of tokens that come in pieces, up to the first stop string.

    The texts of the pieces add up to that of all tokens, ended before the stop string. What could
    still become part of one is held back, and so are bytes of a character that is not whole.
    """

    def __init__(self, model: Model, stops: tuple[str, ...] = ()):
        """stops: any number of strings, none of them empty. Without a tokenizer none is found."""
        self._text = IncrementalText(model)
        self._search = _Search(stops) if stops and model.tokenizer is not None else None
        self._stop: str | None = None

    def add(self, tokens: list[int], last: bool = False) -> Piece:
        """What these tokens add. last: no more will come, so that nothing is held back.

        After the stream was ended by a stop string, further tokens are not kept.
        """
        if self._search is None:
            return Piece(len(tokens), self._text.add(tokens, last), None)
        if self._stop is not None:
            return Piece(0, "", self._stop)
        shown = []
        for kept, text in self._texts(tokens, last):
            new, self._stop = self._search.add(text)
            shown.append(new)
            if self._stop is not None:
                return Piece(kept, "".join(shown), self._stop)
        if last:
            shown.append(self._search.held)
        return Piece(len(tokens), "".join(shown), None)

    def _texts(self, tokens: list[int], last: bool) -> Iterator[tuple[int, str]]:
        """How many tokens have come, and the text that the last of them added."""
        for count, token in enumerate(tokens, 1):
            yield count, self._text.add([token])
        if last:
            yield len(tokens), self._text.add([], last=True)


class _Search:
    """All stop strings in one pass over the text (Aho and Corasick, 1975).

    A state is a beginning of a stop string: the longest one that the text so far ends with. Exactly
    that much has to be held back. State 0 is the empty one.

    _next: the states that a character makes longer.
    _shorter: the longest state, but itself, that the state ends with.
    _length: in characters.
    _found: the longest stop string that the state ends with, or None.
    held: the text of the present state, not shown yet.
    """

    def __init__(self, stops: tuple[str, ...]):
        self._next: list[dict[str, int]] = [{}]
        self._length = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._found[self._state_of(stop)] = stop
        self._shorter = [0] * len(self._next)
        self._link()
        self._state, self.held = 0, ""

    def _state_of(self, stop: str) -> int:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._length.append(self._length[state] + 1)
                self._found.append(None)
            state = self._next[state][character]
        return state

    def _link(self) -> None:
        """From short states to long ones, since a state's links need those of shorter ones."""
        order = list(self._next[0].values())
        for state in order:
            for character, longer in self._next[state].items():
                self._shorter[longer] = end = self._after(self._shorter[state], character)
                self._found[longer] = self._found[longer] or self._found[end]
                order.append(longer)

    def _after(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def add(self, text: str) -> tuple[str, str | None]:
        """What may be shown now, and the stop string that this text completes, if it does."""
        whole = self.held + text
        for end, character in enumerate(text, len(self.held) + 1):
            self._state = self._after(self._state, character)
            stop = self._found[self._state]
            if stop is not None:
                return whole[: end - len(stop)], stop
        border = len(whole) - self._length[self._state]
        self.held = whole[border:]
        return whole[:border], None
