"""Token ids to text, whole or as they come: streamed pieces add up to the whole, however cut.

A tokenizer's decoder may be stateful: it may strip the blank before the first word, put bytes
together to characters, or join words. So new tokens are decoded after those of the last piece, and
what that piece gave by itself is taken away. A character whose bytes have not all come yet, at most
three of them, is held back; so is what a decoder may still replace across tokens.

Bytes that are not UTF-8 become U+FFFD: as Python's errors="replace" does it, whatever comes after.
(A `ByteFallback` decoder, given all at once, would replace the valid characters beside them too;
a stream has shown these already.)
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable

from dspark_jax.decode.text_stages import StagedText, decoder_of, divided, stages_of
from dspark_jax.loading.load import Model

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Tokens of a piece that ends with U+FFFD for another reason than bytes still to come.
_LONGEST_PIECE = 64
# Tokens of a context, where its last ones give no text by themselves.
_LONGEST_CONTEXT = 8


def decode(model: Model, tokens: list[int]) -> str:
    """The text of new tokens; special tokens are left out."""
    return IncrementalText(model).add(tokens, last=True)


class IncrementalText:
    """Text of tokens that come in pieces."""

    def __init__(self, model: Model):
        self._decoder = None if model.tokenizer is None else _Text(model.tokenizer)

    def add(self, tokens: list[int], last: bool = False) -> str | None:
        """The text that these tokens add, or None without a tokenizer. last: no more will come."""
        return None if self._decoder is None else self._decoder.add(tokens, last)


class _Text:
    """Of tokens, then through the stages that see the text as a whole (text_stages.py)."""

    def __init__(self, tokenizer):
        stages, across = divided(stages_of(tokenizer))
        kinds = [stage["type"] for stage in stages]
        self._across = StagedText(across) if across else None
        if kinds and set(kinds) <= {"Fuse", "ByteLevel"} and "ByteLevel" in kinds:
            self._tokens = _ByteLevelText(tokenizer)
        else:
            own = functools.partial(_decoded, tokenizer, decoder_of(stages))
            decode = own if across else tokenizer.decode
            self._tokens = _GeneralText(tokenizer, decode, "ByteFallback" in kinds)

    def add(self, tokens: list[int], last: bool) -> str:
        text = self._tokens.add(tokens, last)
        return text if self._across is None else self._across.add(text, last)


def _decoded(tokenizer, decoder, tokens: list[int]) -> str:
    """As `tokenizer.decode`, by another decoder, of tokens none of which is special."""
    spelled = [tokenizer.id_to_token(token) for token in tokens]
    return decoder.decode([text for text in spelled if text is not None])


def _special_ids(tokenizer) -> frozenset[int]:
    return frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The characters that a byte-level vocabulary writes bytes with: printable bytes stand for
    themselves, the others for 256, 257, ... in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class _ByteLevelText:
    """A decoder that only puts bytes together: no context is needed, the bytes tell everything."""

    def __init__(self, tokenizer):
        self._tokenizer, self._special = tokenizer, _special_ids(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[int], last: bool) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, tokens)), last)

    def _bytes(self, token: int) -> bytes:
        text = None if token in self._special else self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        table = _byte_of_character()
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


class _GeneralText:
    """Any other decoder. Pieces end where a character does.

    Byte tokens ("<0xE6>") wait in _utf8 until they are a character; only then does the decoder see
    them, so that it never meets bytes that are not UTF-8.

    _context: tokens of the last piece that gave text, decoded again in front of the next piece.
    _open: whole characters and words that are not shown yet.
    _waiting: tokens of the bytes in _utf8.
    """

    def __init__(self, tokenizer, decode: Callable[[list[int]], str], has_byte_tokens: bool):
        self._tokenizer, self._special = tokenizer, _special_ids(tokenizer)
        self._decode_all, self._has_byte_tokens = decode, has_byte_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._open: list[int] = []
        self._waiting: list[int] = []

    def add(self, tokens: list[int], last: bool) -> str:
        shown = []
        for token in tokens:
            if token in self._special:
                continue
            byte = self._byte(token)
            if byte is None:
                shown.append(self._end_of_bytes())
                self._open.append(token)
            else:
                shown.append(self._add_byte(token, byte))
        if last:
            shown.append(self._end_of_bytes())
        shown.append(self._show(last))
        return "".join(shown)

    def _byte(self, token: int) -> bytes | None:
        if not self._has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        return bytes.fromhex(match[1]) if match else None

    def _add_byte(self, token: int, byte: bytes) -> str:
        whole = self._utf8.getstate()[0] + byte == _REPLACEMENT.encode()
        text = self._utf8.decode(byte)
        self._waiting.append(token)
        if not text:
            return ""
        if whole or _REPLACEMENT not in text:
            self._open += self._waiting
            self._waiting = []
            return ""
        # What was waiting is broken. This byte may be too, or be whole, or begin a character.
        broken = self._show(True) + _REPLACEMENT * text.count(_REPLACEMENT)
        self._waiting = [token] if self._utf8.getstate()[0] else []
        self._open = [] if text.endswith(_REPLACEMENT) else [token]
        self._context = self._context or self._neutral()
        return broken

    def _end_of_bytes(self) -> str:
        """No more bytes come for the character that is open, if one is."""
        if not self._waiting:
            return ""
        broken = self._show(True) + self._utf8.decode(b"", True)
        self._utf8.reset()
        self._waiting, self._context = [], self._context or self._neutral()
        return broken

    def _neutral(self) -> list[int]:
        """A context for what follows broken bytes: it is not the beginning of the text."""
        token = self._tokenizer.token_to_id("<0x61>")
        return [] if token is None else [token]

    def _show(self, settled: bool) -> str:
        """The text of _open, which then is the context of what follows."""
        if not self._open:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._open)
        unfinished = text.endswith(_REPLACEMENT) and not self._has_byte_tokens
        if unfinished and not settled and len(self._open) < _LONGEST_PIECE:
            return ""
        new = text[len(before) :]
        self._context = self._next_context(bool(before))
        self._open = []
        return new

    def _next_context(self, anchored: bool) -> list[int]:
        """What is shown now, if it gives text by itself. A blank that is stripped, say, does not:
        it is added to the context, up to a limit, so that a run of such tokens costs no more.

        anchored: the present context gives text.
        """
        if self._decode(self._open):
            return self._open
        both = self._context + self._open
        if len(both) <= _LONGEST_CONTEXT:
            return both
        return self._context if anchored else both[-_LONGEST_CONTEXT:]

    def _decode(self, tokens: list[int]) -> str:
        return self._decode_all(tokens) if tokens else ""
