"""Streamed text adds up to the whole, for decoders of all kinds, cut anywhere, at a cost that does
not grow.
"""

import itertools

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from dspark_jax.decode.text import IncrementalText, decode

from helpers.round_parts import byte_tokenizer

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"\u2581Hello": 256, "\u2581world": 257, "\u2581": 258, "lo": 259, "##ly": 260, ".": 261}
HELLO, WORLD, BLANK, LO = 256, 257, 258, 259
GRIN, NIHAO = list("\U0001f600".encode()), list("\u4f60\u597d".encode())

LLAMA = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
DECODERS = {
    "llama": decoders.Sequence(LLAMA),
    "fallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "words": decoders.WordPiece(),
    "fuse": decoders.Fuse(),
    "none": None,
}


def tokenizer_with(decoder) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({**BYTES, **WORDS}, unk_token="."))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


class Has:
    """All of a model that text needs."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer


def streamed(model, tokens, sizes) -> list[str]:
    text, shown, at = IncrementalText(model), [], 0
    for size in sizes:
        shown.append(text.add(tokens[at : at + size], last=at + size >= len(tokens)))
        at += size
        if at >= len(tokens):
            return shown
    raise AssertionError("sizes are too few")


AB = decoders.Replace("ab", "X")
ACROSS = {
    "one": [decoders.Fuse(), AB],
    "begins within itself": [decoders.Fuse(), decoders.Replace("aba", "ab")],
    "in a row": [decoders.Fuse(), decoders.Replace("ab", "c"), decoders.Replace("ca", "Q")],
    "llama": [*LLAMA[:3], decoders.Replace("lo w", "LOW"), LLAMA[3]],
    "after bytes": [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u4f60A", "!")],
    "deeper": [decoders.Sequence([decoders.Fuse(), decoders.Sequence([AB, decoders.Fuse()])])],
    "pattern": [decoders.Fuse(), decoders.Replace(Regex("[ab]+"), "*")],
    "nothing": [decoders.Fuse(), decoders.Replace("b", "")],
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_is_replaced_across_tokens_is_replaced_however_cut(name):
    """A decoder of tokens never sees both sides of such a place."""
    words = ["a", "b", "ab", "ba", "c", "\u2581world", "lo", " ", "<0xE4>", "<0xBD>", "<0xA0>", "A"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(ACROSS[name])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    model, rng = Has(tokenizer), np.random.default_rng(2)
    parts = [*([i] for i in range(8)), [8, 9, 10], [11], [tokenizer.token_to_id("<end>")], [6, 5]]
    for _ in range(300):
        chosen = rng.integers(0, len(parts), rng.integers(1, 14))
        tokens = [token for part in chosen for token in parts[part]]
        whole = tokenizer.decode(tokens)
        assert decode(model, tokens) == whole, tokens
        sizes = rng.integers(1, 4, len(tokens)).tolist()
        assert "".join(streamed(model, tokens, sizes)) == whole, (tokens, sizes)


def test_only_what_may_be_replaced_is_held_back():
    tokenizer = tokenizer_with(decoders.Sequence([decoders.Fuse(), decoders.Replace("lo.", "!")]))
    shown = streamed(Has(tokenizer), [LO, LO, 261, HELLO, LO, HELLO], [1] * 6)
    assert shown == ["", "lo", "!", "\u2581Hel", "lo", "lo\u2581Hello"]


FUSE, JOIN_BYTES = decoders.Fuse(), decoders.ByteLevel()


@pytest.mark.parametrize(
    "stages",
    [
        [JOIN_BYTES],
        [FUSE, JOIN_BYTES],
        [JOIN_BYTES, FUSE],
        [FUSE, JOIN_BYTES, FUSE, AB],
        [JOIN_BYTES, AB],
    ],
)
def test_bytes_that_are_joined_first(stages):
    """The bytes of a character come one by one, and a token is not spelled in bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.Sequence(stages)
    tokenizer.add_tokens(["<|a b|>"])
    tokens = [*NIHAO, tokenizer.token_to_id("<|a b|>"), *GRIN]
    shown = streamed(Has(tokenizer), tokens, [1] * len(tokens))
    assert shown == ["", "", "\u4f60", "", "", "\u597d", "<|a b|>", "", "", "", "\U0001f600"]


def test_the_reported_case():
    tokens = [HELLO, *GRIN, *GRIN, WORLD]
    shown = streamed(Has(tokenizer_with(DECODERS["llama"])), tokens, itertools.repeat(1))
    assert "".join(shown) == "Hello\U0001f600\U0001f600 world"
    assert shown == ["Hello", "", "", "", "\U0001f600", "", "", "", "\U0001f600", " world"]


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_add_up_to_what_the_tokenizer_says(name):
    """Random words, whole characters as bytes and special tokens, cut at random places."""
    model, rng = Has(tokenizer_with(DECODERS[name])), np.random.default_rng(0)
    end = model.tokenizer.token_to_id("<end>")
    parts = [[HELLO], [WORLD], [BLANK], [LO], [260], [261], [end], GRIN, NIHAO, [0x20], [0x41]]
    for _ in range(300):
        chosen = rng.integers(0, len(parts), rng.integers(1, 12))
        tokens = [token for part in chosen for token in parts[part]]
        whole = model.tokenizer.decode(tokens)
        assert decode(model, tokens) == whole, tokens
        sizes = rng.integers(1, 5, len(tokens)).tolist()
        assert "".join(streamed(model, tokens, sizes)) == whole, (tokens, sizes)


@pytest.mark.parametrize("name", ["llama", "fallback", "metaspace"])
def test_broken_bytes_are_replaced_alike_however_cut(name):
    model, rng = Has(tokenizer_with(DECODERS[name])), np.random.default_rng(1)
    alphabet = [HELLO, LO, 0x41, 0x80, 0xC3, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0xFF, 0xEF, 0xBF]
    for _ in range(300):
        tokens = rng.choice([*alphabet, 0xBD], size=rng.integers(1, 25)).tolist()
        whole = decode(model, tokens)
        sizes = rng.integers(1, 5, len(tokens)).tolist()
        assert "".join(streamed(model, tokens, sizes)) == whole, (tokens, sizes)
        raw = b"".join(bytes([t]) if t < 256 else {HELLO: b" Hello", LO: b"lo"}[t] for t in tokens)
        if name == "fallback":
            raw = raw.replace(b" Hello", "\u2581Hello".encode())
        expected = raw.decode(errors="replace")
        if name != "fallback" and tokens[0] == HELLO:
            expected = expected[1:]
        assert whole == expected, tokens


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), tokenizer_with(DECODERS["llama"])])
def test_only_open_bytes_are_held_back(tokenizer):
    """20 characters of two, three bytes each, given 1, then 6, 6, 6 ... bytes at a time."""
    tokens = NIHAO * 20
    shown = streamed(Has(tokenizer), tokens, [1, *[6] * 20])
    given = itertools.accumulate([1, *[6] * 20])
    for count, so_far in zip(given, itertools.accumulate(shown), strict=True):
        assert so_far == bytes(tokens[:count]).decode(errors="ignore")
    assert "".join(shown) == "\u4f60\u597d" * 20


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), tokenizer_with(DECODERS["llama"])])
@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xF0])
def test_broken_text_costs_no_more_the_longer_it_is(tokenizer, byte):
    """Decoded pieces are counted in tokens, since seconds depend on the machine."""
    counted = Counting(tokenizer)
    text = IncrementalText(Has(counted))
    shown = "".join(text.add([byte], last=i == 15_999) for i in range(16_000))
    assert shown == bytes([byte] * 16_000).decode(errors="replace")
    assert counted.tokens <= 4 * 16_000


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens):
        self.tokens += len(tokens)
        return self._tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["llama", "metaspace", "none"])
@pytest.mark.parametrize("token", [BLANK, 9_999], ids=["blank", "outside"])
def test_tokens_without_text_of_their_own_cost_no_more_either(name, token):
    counted = Counting(tokenizer_with(DECODERS[name]))
    text = IncrementalText(Has(counted))
    shown = "".join(text.add([token], last=i == 1_999) for i in range(2_000))
    assert shown == tokenizer_with(DECODERS[name]).decode([token] * 2_000)
    assert counted.tokens <= 40 * 2_000
