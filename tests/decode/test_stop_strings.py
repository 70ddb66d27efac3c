"""A stream's text ends before the first stop string, with the token that completes it, however the
tokens are cut into pieces, and nothing is shown that could become part of one.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from test_text import DECODERS, GRIN, HELLO, LO, NIHAO, Counting, tokenizer_with
from tokenizers import AddedToken, Tokenizer, decoders, models

from dspark_jax.decode.stop_strings import StopText
from dspark_jax.decode.text import IncrementalText

from helpers.round_parts import byte_tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
DAY = "\u65e5"  # e6 97 a5
END = b"<end>"
CHUNKS = [
    *(b"a", b"b", b"c", b"ab", b"abc", b"xabcy", b"\n", b"\n\n", b"\n\na", b"stop", b"x"),
    *(b"c\xe6", b"\xe6", b"\x97", b"\x97\xa5", b"\xa5", b"\xa5b", b"\xe6\x97", b"\xff"),
    *(b"\xf0\x9f", b"\x98\x80\n", b"\xef\xbf", b"\xbd", END),
]


def chunk_tokenizer() -> Tokenizer:
    """Byte-level, with tokens of several bytes: id = place in CHUNKS, <end> is special."""
    stand_in = byte_tokenizer().id_to_token
    words = {"".join(map(stand_in, chunk)): i for i, chunk in enumerate(CHUNKS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


CHUNK = chunk_tokenizer()
TOKENIZERS = {name: tokenizer_with(decoder) for name, decoder in DECODERS.items()}
TOKENIZERS["bytes"] = byte_tokenizer()
# Their byte tokens become characters; in the others they are words like any other.
OF_BYTES = ("llama", "fallback", "metaspace", "bytes")


def pieces(tokenizer, stops, tokens, sizes):
    text, at, found = StopText(SimpleNamespace(tokenizer=tokenizer), tuple(stops)), 0, []
    for size in sizes:
        found.append(text.add(tokens[at : at + size], last=at + size >= len(tokens)))
        at += size
        if at >= len(tokens):
            return found
    raise AssertionError("sizes are too few")


def total(found):
    """(tokens kept, text, stop string) of all pieces."""
    stops = [piece.stop for piece in found]
    assert stops == sorted(stops, key=bool), "a stream that was ended goes on"
    return sum(piece.kept for piece in found), "".join(piece.text for piece in found), stops[-1]


def ways_to_cut(count):
    for borders in itertools.product((False, True), repeat=count - 1):
        ends = [*(i + 1 for i, border in enumerate(borders) if border), count]
        yield [end - begin for begin, end in zip([0, *ends], ends)]


@pytest.mark.parametrize(
    "stops, chunks, kept, text, stop",
    [
        (["\n\n"], [b"a", b"b"], 2, "ab", None),
        (["\n\n"], [b"a", b"\n", b"b", b"\n"], 4, "a\nb\n", None),
        (["\n\n"], [b"a", b"\n\na", b"b"], 2, "a", "\n\n"),
        (["\n\n"], [b"a", b"\n", b"\n", b"b"], 3, "a", "\n\n"),
        (["\n\n"], [b"\n", b"\n\n", b"b"], 2, "", "\n\n"),
        (["\n"], [b"ab", b"\n", b"\n"], 2, "ab", "\n"),
        (["b"], [b"xabcy", b"b"], 1, "xa", "b"),
        (["stop"], [b"stop", b"a"], 1, "", "stop"),
        (["stop"], [b"stop"], 1, "", "stop"),
        (["cya"], [b"ab", b"xabcy", b"abc", b"b"], 3, "abxab", "cya"),
        (["abcabcstop"], [b"x", b"a", b"b", b"c", b"abc", b"stop", b"a"], 6, "x", "abcabcstop"),
        # The first to complete; with the same character, the first to begin.
        (["ab", "abc", "b"], [b"xabcy"], 1, "x", "ab"),
        (["abc", "b"], [b"abc"], 1, "a", "b"),
        (["b", "abc"], [b"a", b"c", b"abc"], 3, "aca", "b"),
        (["bc", "abc", "c"], [b"ab", b"c", b"a"], 2, "", "abc"),
        (["c", "bc", "xabd"], [b"x", b"ab", b"c"], 3, "xa", "bc"),
        # One that had begun gives way to another inside it, or to itself, begun later.
        (["abcx", "bcy"], [b"abc", b"xabcy"], 2, "", "abcx"),
        (["xabcx", "bcy"], [b"x", b"ab", b"xabcy"], 3, "xabxa", "bcy"),
        (["ababc"], [b"ab", b"ab", b"abc", b"a"], 3, "ab", "ababc"),
        # Characters of several tokens, begun and ended inside of one.
        ([DAY], [b"a", b"c\xe6", b"\x97", b"\xa5b", b"a"], 4, "ac", DAY),
        ([DAY + "b"], [b"\xe6", b"\x97\xa5", b"\xe6\x97", b"\xa5b"], 4, DAY, DAY + "b"),
        (["c"], [b"c\xe6", b"\x97\xa5"], 1, "", "c"),
        (["\n"], [b"\xf0\x9f", b"\x98\x80\n", b"a"], 2, "\U0001f600", "\n"),
        # Bytes are broken once another one shows it, or the end.
        ([BROKEN], [b"a", b"\xe6", b"\x97\xa5", b"\xe6", b"a", b"b"], 5, "a" + DAY, BROKEN),
        ([BROKEN], [b"a", b"\xff", b"b"], 2, "a", BROKEN),
        ([BROKEN], [b"\xe6\x97", END, b"\xe6", b"b"], 3, "", BROKEN),
        ([BROKEN], [b"a", b"\xe6", b"\x97"], 3, "a", BROKEN),
        (["a" + BROKEN, BROKEN], [b"a", b"\xe6", END], 3, "", "a" + BROKEN),
        ([BROKEN], [b"\xef\xbf", b"\xbd", b"a"], 2, "", BROKEN),
        ([BROKEN + "b"], [b"\xe6", b"abc", b"\xff", b"b", b"a"], 4, BROKEN + "abc", BROKEN + "b"),
        # Special tokens give no text, and do not stand between.
        (["\n\n"], [b"a", b"\n", END, b"\n", END], 4, "a", "\n\n"),
        (["<end>"], [b"a", END, b"b"], 3, "ab", None),
        ([DAY], [b"\xe6", END, b"\x97\xa5", b"a"], 3, "", DAY),
        (["\n\n"], [END], 1, "", None),
    ],
)
def test_where_a_stream_ends_however_it_is_cut(stops, chunks, kept, text, stop):
    tokens = [CHUNKS.index(chunk) for chunk in chunks]
    for sizes in ways_to_cut(len(tokens)):
        assert total(pieces(CHUNK, stops, tokens, sizes)) == (kept, text, stop), sizes


def test_only_what_could_become_a_stop_string_is_held_back():
    chunks = [b"ab", b"\n", b"a", b"xabcy", b"\n", b"\n\n", b"a"]
    tokens = [CHUNKS.index(chunk) for chunk in chunks]
    found = pieces(CHUNK, ["\n\n\n", "yx", "bb", "abcx"], tokens, itertools.repeat(1))
    assert [piece.text for piece in found] == ["", "ab", "\n", "axabc", "y", "", ""]
    assert [piece.kept for piece in found] == [1, 1, 1, 1, 1, 1, 0]
    assert [piece.stop for piece in found] == [None] * 5 + ["\n\n\n"] * 2


def test_all_is_shown_at_the_end_also_by_a_last_piece_without_tokens():
    for tokens in ([], [CHUNKS.index(b"\n")]):
        text = StopText(SimpleNamespace(tokenizer=CHUNK), ("\n\n\n",))
        assert text.add([CHUNKS.index(b"\n"), CHUNKS.index(b"\xe6")]).text == ""
        piece = text.add(tokens, last=True)
        assert (piece.kept, piece.stop) == (len(tokens), None)
        assert piece.text == "\n" + BROKEN + "\n" * len(tokens)


def expected(settled, whole, stops):
    """(kept, text, stop) by looking at every place of the text.

    settled: for each number of tokens, beginning with 0, the text that can no longer change.
    """
    assert all(whole.startswith(text) for text in settled)
    occurrences = [
        (begin + len(stop), begin, stop)
        for stop in stops
        for begin in range(len(whole))
        if whole.startswith(stop, begin)
    ]
    if not occurrences:
        return len(settled) - 1, whole, None
    end, begin, stop = min(occurrences)
    complete = (count for count, text in enumerate(settled) if len(text) >= end)
    return next(complete, len(settled) - 1), whole[:begin], stop


def may_be_shown(text, stops):
    held = (
        n for n in range(len(text), 0, -1) for s in stops if n < len(s) and text.endswith(s[:n])
    )
    return text[: len(text) - next(held, 0)]


def check(tokenizer, tokens, settled, whole, rng) -> bool:
    """Compares everything for some stop strings and some cut; whether one was found."""
    stops = []
    for _ in range(rng.integers(1, 5)):
        begin, length = rng.integers(0, max(1, len(whole))), rng.integers(1, 6)
        other = ["", "", "x", "\n", BROKEN][rng.integers(5)]
        stops.append(whole[begin : begin + length] + other or "a")
    if rng.integers(2):  # rarely found at all, but often begun
        stops = [stop + "Z" for stop in stops]
    kept, text, stop = expected(settled, whole, stops)
    sizes = rng.integers(1, 5, len(tokens)).tolist()
    found = pieces(tokenizer, stops, tokens, sizes)
    assert total(found) == (kept, text, stop), (tokens, sizes, stops)
    came, shown = 0, ""
    for piece, size in zip(found, sizes):
        came, shown = came + size, shown + piece.text
        if came < (len(tokens) if stop is None else kept):
            assert shown == may_be_shown(settled[came], stops), (tokens, sizes, stops)
            assert piece.kept == size and piece.stop is None
    return stop is not None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_decoder_any_stop_strings_any_cut(name):
    """Whole characters, so that the tokenizer itself says what the text of the first tokens is."""
    tokenizer, rng, found = TOKENIZERS[name], np.random.default_rng(0), 0
    parts = [NIHAO[:3], NIHAO[3:], GRIN, [0x0A], [0x0A], [0x20], [0x41]]
    if name != "bytes":
        parts += [[HELLO], [257], [258], [LO], [260], [261], [tokenizer.token_to_id("<end>")]]
    for _ in range(300):
        tokens, whole_until = [], [0]  # whole_until: of so many tokens, how many are characters
        for part in rng.integers(0, len(parts), rng.integers(1, 12)):
            begun = len(tokens)
            tokens += parts[part]
            inside = range(begun + 1, len(tokens))
            whole_until += [begun if name in OF_BYTES else i for i in inside] + [len(tokens)]
        settled = [tokenizer.decode(tokens[:count]) for count in whole_until]
        found += check(tokenizer, tokens, settled, tokenizer.decode(tokens), rng)
    assert 80 < found < 220


CONTINUATIONS = [
    b"A",
    *(bytes(c) for n in (1, 2, 3) for c in itertools.product(b"\x80\x90\xa0\xbe", repeat=n)),
]


def unchanged(raw: bytes) -> str:
    """The text of bytes that is the same whatever bytes come."""
    texts = [(raw + more).decode(errors="replace") for more in CONTINUATIONS]
    alike = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts))
    return "".join(characters[0] for characters in alike)


@pytest.mark.parametrize("name", ["chunks", "fallback"])
def test_broken_bytes_any_stop_strings_any_cut(name):
    rng, found = np.random.default_rng(1), 0
    if name == "chunks":
        tokenizer, bytes_of = CHUNK, {i: c for i, c in enumerate(CHUNKS) if c != END}
    else:
        tokenizer, bytes_of = TOKENIZERS[name], {HELLO: "\u2581Hello".encode(), LO: b"lo"}
        # Without 0xED: Python tells that half of a surrogate is broken one byte late.
        alphabet = b"A\n\x80\xc3\xe6\x97\xa5\xf0\x9f\xff\xef\xbf\xbd"
        bytes_of |= {byte: bytes([byte]) for byte in alphabet}
    end = tokenizer.token_to_id("<end>")
    for _ in range(300):
        tokens = rng.choice([*bytes_of, end], size=rng.integers(1, 16)).tolist()
        raw = list(itertools.accumulate((bytes_of.get(t, b"") for t in tokens), initial=b""))
        whole = raw[-1].decode(errors="replace")
        found += check(tokenizer, tokens, [unchanged(each) for each in raw], whole, rng)
    assert 80 < found < 220


@pytest.mark.parametrize("name", TOKENIZERS)
def test_without_stop_strings_it_is_the_decoder_itself_a_piece_at_a_time(name):
    counted, plain = Counting(TOKENIZERS[name]), Counting(TOKENIZERS[name])
    with_stops = StopText(SimpleNamespace(tokenizer=counted))
    text = IncrementalText(SimpleNamespace(tokenizer=plain))
    for i in range(20):
        tokens = [*GRIN[i % 3 :], *NIHAO, 0xFF, 0x41, 0xE6]
        piece = with_stops.add(tokens, last=i == 19)
        assert piece.text == text.add(tokens, last=i == 19)
        assert (piece.kept, piece.stop) == (len(tokens), None)
    assert counted.tokens == plain.tokens and (name == "bytes" or counted.tokens)


@pytest.mark.parametrize("stops", [(), ("a",)])
def test_without_a_tokenizer_there_is_no_text(stops):
    piece = StopText(SimpleNamespace(tokenizer=None), stops).add([1, 2, 3], last=True)
    assert (piece.kept, piece.text, piece.stop) == (3, None, None)


@pytest.mark.parametrize("name", ["llama", "words", "none"])
def test_the_cost_does_not_grow_with_the_text(name):
    """Counted in decoded tokens; the stop string is always about to come, and never does."""
    counted = Counting(TOKENIZERS[name])
    text = StopText(SimpleNamespace(tokenizer=counted), ("lo" * 3_000 + "x", "\n", "olx"))
    shown = "".join(text.add([LO] * 4, last=i == 499).text for i in range(500))
    assert shown == TOKENIZERS[name].decode([LO] * 2_000)
    assert counted.tokens <= 8 * 2_000
