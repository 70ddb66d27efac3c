"""Prefill, chunks and single steps are one computation: pitfalls 2, 3 (rows of one call) and 9.
Bits, on CPU.

What everything is compared with is plain decode: one row a call, from an empty cache.
"""

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.state_parts import (
    block_at,
    committed,
    different_state,
    differing,
    feed,
    joined,
    random_tokens,
    same_bits,
    streams_of,
    with_limits,
)

LENGTH, ROWS = 48, 16  # tokens of the stream; rows of the batched program, and as many streams
RATIOS, WINDOW = (4, 8), 16  # of the golden config


class Plain:
    """A stream decoded one row a call: tokens [1, LENGTH], logits and hidden by position, the cache
    at every length.
    """

    def __init__(self, model):
        self.model, self.tokens = model, random_tokens(4, 1, LENGTH)
        self.caches = [dspark.new_cache(model)]
        logits, hidden = [], []
        for token in self.tokens[0]:
            row, captured, cache = dspark.extend(model, self.caches[-1], [[token]], [1])
            self.caches.append(dspark.commit(cache, [1]))
            logits.append(np.asarray(row)[0, 0])
            hidden.append(np.asarray(captured)[0, 0])
        self.logits, self.hidden = np.stack(logits), np.stack(hidden)

    def wrong_state(self, cache) -> dict:
        """In which streams the committed state is not that of plain decode at the same position."""
        config = self.model.config
        expected = joined([self.caches[p] for p in np.asarray(cache.position)])
        return different_state(committed(cache, config), committed(expected, config))

    def assert_prefix(self, logits, hidden):
        """[S, ...] of the first S positions."""
        assert same_bits(logits, self.logits[: len(logits)]) and same_bits(
            hidden, self.hidden[: len(hidden)]
        )


@pytest.fixture(scope="module")
def plain(float_model):
    return Plain(float_model)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "length", sorted({1, 2, *(r + d for r in RATIOS for d in (-1, 0)), WINDOW, WINDOW + 1})
)
def test_prompt_length(plain, length):
    """Pitfall 9: prompts of length 1, 2, ratio-1, ratio, window, window+1: every row, the state,
    and the two steps after.
    """
    logits, hidden, cache = dspark.prefill(plain.model, plain.tokens[0, :length].tolist())
    assert cache.position.tolist() == [length]
    plain.assert_prefix(logits[0], hidden[0])
    assert plain.wrong_state(cache) == {}
    after = feed(plain.model, cache, plain.tokens, length + 2, 1, 1)
    assert same_bits(after.logits[0, length : length + 2], plain.logits[length : length + 2])
    assert plain.wrong_state(after.cache) == {}


@pytest.mark.heavy
def test_prefill_then_steps(plain):
    """Pitfall 2: prefill(N - m) and m steps equal plain decode of N tokens, m = 1..2*ratio: all
    entries and the next logits.
    """
    steps = np.arange(1, 2 * RATIOS[1] + 1)
    prefilled = [
        dspark.prefill(plain.model, plain.tokens[0, : LENGTH - m].tolist())[2] for m in steps
    ]
    fed = feed(plain.model, joined(prefilled), plain.tokens.repeat(ROWS, 0), LENGTH, 1, ROWS)
    for stream, m in enumerate(steps):
        assert same_bits(fed.logits[stream, LENGTH - m :], plain.logits[LENGTH - m :])
    assert plain.wrong_state(fed.cache) == {}


def assert_chunking(plain, sizes):
    """Chunk sizes (see `feed`) of 16 streams with the same tokens."""
    fed = feed(
        plain.model,
        dspark.new_cache(plain.model, ROWS),
        plain.tokens.repeat(ROWS, 0),
        LENGTH,
        sizes,
        ROWS,
    )
    for logits, hidden in zip(fed.logits, fed.hidden):
        plain.assert_prefix(logits, hidden)
    assert plain.wrong_state(fed.cache) == {}


def test_every_chunk_size(plain):
    """Pitfall 2: chunks of 1, 2, .. 16 rows, one size a stream."""
    assert_chunking(plain, np.arange(1, ROWS + 1))


def test_mixed_chunks(plain):
    """Pitfall 2: sixteen random orders of chunk sizes 0 to 16."""
    sizes = np.random.default_rng(5).integers(0, ROWS + 1, (1000, ROWS))
    assert_chunking(plain, lambda call: sizes[call])


@pytest.mark.heavy
@pytest.mark.parametrize("float_model", ["golden"], indirect=True)
def test_prefill_chunk(plain):
    """Another prefill_chunk, which divides neither ratio, window nor prompt; the same rings."""
    logits, hidden, cache = dspark.prefill(
        with_limits(plain.model, prefill_chunk=5), plain.tokens[0].tolist()
    )
    plain.assert_prefix(logits[0], hidden[0])
    assert plain.wrong_state(cache) == {}


@pytest.mark.parametrize("starts", [range(8), range(14, 24), range(26, 33)])
def test_later_rows_are_not_seen(plain, starts):
    """Pitfall 3: stream t changes every token after row t of one 16-row call: rows up to t keep
    their bits, row t + 1 does not.

    Starts: every alignment to both ratios, the wraps of compressor inputs (24) and windows (32).
    """
    for start in starts:
        cache = streams_of(plain.caches[start], [0] * ROWS)
        block = block_at(plain.tokens.repeat(ROWS, 0), cache.position, ROWS)
        later = np.arange(ROWS) > np.arange(ROWS)[:, None]
        block = np.where(later, (block + 1 + random_tokens(6, ROWS, ROWS) % 255) % 256, block)
        logits, hidden = (
            np.asarray(x) for x in dspark.extend(plain.model, cache, block, [ROWS] * ROWS)[:2]
        )
        for row in range(ROWS):
            wrong = differing(
                logits[:, row], np.broadcast_to(plain.logits[start + row], logits[:, row].shape)
            )
            wrong |= differing(
                hidden[:, row], np.broadcast_to(plain.hidden[start + row], hidden[:, row].shape)
            )
            assert wrong.tolist() == [stream < row for stream in range(ROWS)]


def test_later_tokens_do_not_reach_prefill(plain):
    """Pitfall 3 in the prefill program: a prompt changed from token j on gives the same rows before
    j.
    """
    for j in (1, 3, 4, 7, 8, 15, 16, 17, 31, 47):
        changed = plain.tokens[0].copy()
        changed[j:] = (changed[j:] + 1) % 256
        logits, hidden, _ = dspark.prefill(plain.model, changed.tolist())
        plain.assert_prefix(logits[0, :j], hidden[0, :j])
        assert not same_bits(logits[0, j], plain.logits[j])
