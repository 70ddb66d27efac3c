"""Rejected rows leave no trace: pitfall 1, the block transaction and overwrite safety of the
published design. Bits, on CPU.

Many cases run as streams of one batch, so that a full product costs a hundred calls of one program.
The rings are as small as the library makes them for the width in use: `rows` is the widest call.
"""

import functools

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.state_parts import (
    block_at,
    committed,
    different_state,
    differing,
    feed,
    pick,
    random_tokens,
    streams_of,
    with_limits,
)

WINDOW, RATIO, BLOCK = (
    16,
    8,
    6,
)  # of the golden config: sliding_window, the larger ratio, dspark_block_size + 1
STARTS = range(2 * RATIO + WINDOW + 1)
FOLLOWING = 2 * RATIO
LONGEST = 8  # rows of the longest overshoot: two more than a verify block
LENGTH = 80  # tokens of a clean stream
GROUPS = 11
BATCH = (
    len(STARTS) // GROUPS * 42
)  # 42 streams a start: 21 pairs of width and accepted length, two junk suffixes each


class Clean:
    """One stream without any rejection: the cache and the committed state at every length, and the
    logits of every position.
    """

    def __init__(self, model, batch: int, length: int, width: int):
        self.model, self.width, self.batch = model, width, batch
        self.tokens = random_tokens(1, length)
        tokens = np.broadcast_to(self.tokens, (batch, length))
        ends = np.minimum(np.arange(batch), length)  # stream n is the first n tokens
        fed = feed(model, dspark.new_cache(model, batch), tokens, ends, width, width)
        self.cache, self.state, self.logits = (
            fed.cache,
            committed(fed.cache, model.config),
            fed.logits[-1],
        )

    def at(self, lengths):
        """A batch of streams of these lengths, and the tokens of each."""
        return streams_of(self.cache, lengths), np.broadcast_to(
            self.tokens, (len(lengths), len(self.tokens))
        )

    def wrong_state(self, cache) -> dict:
        """In which streams the committed state is not what the clean stream has at the same
        position.
        """
        return different_state(
            committed(cache, self.model.config), pick(self.state, cache.position)
        )

    def wrong_steps(self, cache, singles: int, total: int) -> tuple[list[int], dict]:
        """Goes on for `total` tokens, the first `singles` one at a time: the streams whose logits,
        or state, are not clean.
        """
        batch = len(cache.position)
        tokens = np.broadcast_to(self.tokens, (batch, len(self.tokens)))
        start = np.asarray(cache.position)
        fed = feed(
            self.model,
            cache,
            tokens,
            start + total,
            lambda call: 1 if call < singles else self.width,
            self.width,
        )
        rows = start[:, None] + np.arange(total)
        wrong = differing(
            np.take_along_axis(fed.logits, rows[..., None], axis=1), self.logits[rows]
        )
        return np.flatnonzero(wrong).tolist(), self.wrong_state(fed.cache)


@functools.cache
def clean_blocks(model) -> Clean:
    """The rings are made for calls of one verify block."""
    return Clean(with_limits(model, rows=BLOCK), BATCH, LENGTH, BLOCK)


@pytest.fixture(scope="module")
def clean(float_model):
    return clean_blocks(float_model)


def junk(tokens, accepted, seed: int) -> np.ndarray:
    """tokens [B, T] with other tokens from accepted[b] on; an even and an odd seed differ in every
    place.
    """
    shift = random_tokens(seed, *tokens.shape) // 4 * 2 + 1 + seed % 2
    return np.where(np.arange(tokens.shape[1]) >= accepted[:, None], (tokens + shift) % 256, tokens)


def reject(clean, cases):
    """Runs cases (start, width, accepted) with two junk suffixes each, checks the accepted rows,
    commits them -> cache. As many cases as make a batch: some run again.
    """
    cases = np.resize(np.array(cases, np.int32), (clean.batch // 2, 3))
    starts, widths, accepted = np.repeat(cases, 2, axis=0).T
    cache, tokens = clean.at(starts)
    block = block_at(tokens, starts, clean.width)
    first, second = (junk(block, accepted, seed) for seed in (2, 3))
    assert ((first != second) == (np.arange(clean.width) >= accepted[:, None])).all()
    first[1::2] = second[1::2]
    logits, _, cache = dspark.extend(clean.model, cache, first, widths)
    for i in range(accepted.max()):
        kept = np.flatnonzero(accepted > i)
        assert not differing(np.asarray(logits)[kept, i], clean.logits[starts[kept] + i]).any()
    return dspark.commit(cache, accepted)


@pytest.mark.parametrize(
    "group",
    [pytest.param(n, marks=pytest.mark.heavy if n % 3 else ()) for n in range(GROUPS)],
)
def test_junk_suffix_leaves_no_trace(clean, group):
    """Pitfall 1, the full product: start 0..2*ratio+window, width 1..block+1, accepted length, two
    suffixes; then 2*ratio steps.

    The first steps go one row at a time, while slots of junk are still about; the rest in blocks.
    """
    starts, widths = STARTS[group::GROUPS], range(1, BLOCK + 1)
    cases = [
        (start, width, accepted)
        for start in starts
        for width in widths
        for accepted in range(width)
    ]
    cache = reject(clean, cases)
    assert clean.wrong_state(cache) == {}
    assert clean.wrong_steps(cache, singles=BLOCK, total=FOLLOWING) == ([], {})


@pytest.fixture(scope="module", params=["short", pytest.param("golden", marks=pytest.mark.heavy)])
def blocks(request):
    """What `make test` has at hand; on the golden model reference mode, and rings made for calls of
    LONGEST rows, which wrap at 24 (windows) and 16 (compressor inputs).
    """
    if request.param == "short":
        return clean_blocks(request.getfixturevalue("short_float"))
    model = request.getfixturevalue("golden_reference")
    return Clean(with_limits(model, rows=LONGEST), 128, LENGTH, LONGEST)


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_block_transaction(blocks, first):
    """Two blocks with one accepted prefix leave one committed state: every prefix length, every
    alignment, every wrap of a ring.

    The blocks have as many rows as the rings were made for, which have no slot to spare.
    """
    cases = [
        (start, blocks.width, accepted)
        for start in range(first, first + 8)
        for accepted in range(blocks.width)
    ]
    cache = reject(blocks, cases)
    state, pairs = committed(cache, blocks.model.config), np.arange(0, blocks.batch, 2)
    assert different_state(pick(state, pairs), pick(state, pairs + 1)) == {}
    assert blocks.wrong_state(cache) == {}


def test_overshoot_is_overwritten(blocks):
    """Overwrite safety: 1 to 5 rows and a whole call never committed, at 21 positions around the
    wraps, then on as if nothing was.
    """
    overshoot, starts = (
        np.resize(a, blocks.batch)
        for a in np.meshgrid((1, 2, 3, 4, 5, blocks.width), np.arange(10, 31))
    )
    cache, tokens = blocks.at(starts)
    wrong = junk(block_at(tokens, starts, blocks.width), np.zeros_like(starts), seed=2)
    cache = dspark.extend(blocks.model, cache, wrong, overshoot)[2]
    assert blocks.wrong_state(cache) == {}
    assert blocks.wrong_steps(cache, singles=blocks.width, total=40) == ([], {})
