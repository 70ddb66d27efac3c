"""Token ids to text, whole or as they come."""

from __future__ import annotations

from dspark_jax.loading.load import Model

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def decode(model: Model, tokens: list[int]) -> str:
    """The text of new tokens; special tokens are left out."""
    return model.tokenizer.decode(tokens)


class IncrementalText:
    """Text of tokens that come in pieces. A character whose bytes are not all there yet is held
    back until they are, or until the end.

    Only the tokens since the last whole character are decoded again, so that a long stream costs no
    more per token than a short one; one settled token is kept in front of them, as some tokenizers
    treat the start of a text differently.
    """

    def __init__(self, model: Model):
        self._tokenizer = model.tokenizer
        self._open: list[int] = []
        self._shown = ""

    def add(self, tokens: list[int], last: bool = False) -> str | None:
        """The text that these tokens add, or None without a tokenizer."""
        if self._tokenizer is None:
            return None
        self._open += tokens
        text = self._tokenizer.decode(self._open)
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        new = text[len(self._shown) :]
        self._open = self._open[-1:]
        self._shown = self._tokenizer.decode(self._open)
        return new
