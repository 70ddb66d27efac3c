"""Streams do not touch each other, neither in a used cache nor side by side: pitfalls 6, 7 and 12.
Bits, on CPU.
"""

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.state_parts import (
    committed,
    different_state,
    feed,
    random_tokens,
    same_bits,
    streams_of,
)

WINDOW, BLOCK = 16, 6  # of the golden config: sliding_window, dspark_block_size + 1


def assert_same_draft(a, b):
    assert (
        same_bits(a.tokens, b.tokens)
        and same_bits(a.logits, b.logits)
        and same_bits(a.confidence, b.confidence)
    )


def assert_same_stream(model, cache, other):
    config = model.config
    assert different_state(committed(cache, config), committed(other, config)) == {}


@pytest.mark.parametrize("length", [5, 21, 60])
def test_second_request_on_a_used_cache(golden_reference, length):
    """Pitfall 6: after A (43 tokens and an uncommitted block), position 0 again: B, shorter or
    longer, runs as in a new cache.
    """
    model, a, b = golden_reference, random_tokens(7, 1, 64), random_tokens(8, 1, 64)
    used = feed(model, dspark.new_cache(model), a, 43, BLOCK, BLOCK).cache
    used = dspark.extend(model, used, a[:, 43 : 43 + BLOCK], [BLOCK])[2]
    used = used.replace(position=0 * used.position)
    second = feed(model, used, b, length, BLOCK, BLOCK)
    alone = feed(model, dspark.new_cache(model), b, length, BLOCK, BLOCK)
    assert same_bits(second.logits, alone.logits) and same_bits(second.hidden, alone.hidden)
    assert_same_stream(model, second.cache, alone.cache)
    assert_same_draft(
        dspark.draft(model, second.cache, b[:, length]),
        dspark.draft(model, alone.cache, b[:, length]),
    )


def speculate(model, tokens, prompts, ends, seed: int):
    """Prompts of prompts[b] tokens, then blocks of random width and acceptance up to ends[b], with
    junk in the rejected rows.

    Returns the logits [B, S, V] of every committed position, and the cache.
    """
    rng = np.random.default_rng(seed)
    fed = feed(model, dspark.new_cache(model, len(tokens)), tokens, prompts, BLOCK, BLOCK)
    while (np.asarray(fed.cache.position) < ends).any():
        at = np.asarray(fed.cache.position)
        widths = rng.integers(0, BLOCK + 1, len(tokens))
        accepted = np.minimum(rng.integers(0, widths + 1), np.maximum(ends - at, 0)).astype(
            np.int32
        )
        kept = np.arange(BLOCK) < accepted[:, None]
        rows = np.minimum(at[:, None] + np.arange(BLOCK), tokens.shape[1] - 1)
        block = np.where(
            kept, np.take_along_axis(tokens, rows, axis=1), rng.integers(0, 256, kept.shape)
        )
        logits, hidden, cache = dspark.extend(model, fed.cache, block, widths)
        fed.keep(at, accepted, np.asarray(logits), np.asarray(hidden))
        fed.cache = dspark.commit(cache, accepted)
    return fed


def test_ragged_batch(golden_reference):
    """Pitfall 7: three streams of different lengths, widths and accepted counts in one batch: each
    equals its solo run.
    """
    model, tokens = golden_reference, random_tokens(9, 3, 80)
    ends = np.array([30, 51, 72])
    together = speculate(model, tokens, np.array([2, 17, 40]), ends, seed=10)
    drafts = dspark.draft(model, together.cache, tokens[np.arange(3), ends])
    for stream, end in enumerate(ends):
        logits, hidden, solo = dspark.prefill(model, tokens[stream, :end].tolist())
        assert same_bits(together.logits[stream, :end], logits[0]) and same_bits(
            together.hidden[stream, :end], hidden[0]
        )
        assert_same_stream(model, streams_of(together.cache, [stream]), solo)
        draft = dspark.draft(model, solo, tokens[stream, end : end + 1])
        assert same_bits(drafts.tokens[stream], draft.tokens[0]) and same_bits(
            drafts.logits[stream], draft.logits[0]
        )
        assert same_bits(drafts.confidence[stream], draft.confidence[0])


def test_drafts_after_three_windows(golden_reference):
    """Pitfall 12: after three windows in blocks with rejections, a draft equals that of a cold
    prefill of the same tokens.
    """
    model, tokens = golden_reference, random_tokens(11, 1, 80)
    for end in range(3 * WINDOW, 3 * WINDOW + 9):
        warm = speculate(model, tokens, 1, end, seed=end)
        cold = dspark.prefill(model, tokens[0, :end].tolist())[2]
        assert_same_stream(model, warm.cache, cold)
        assert_same_draft(
            dspark.draft(model, warm.cache, tokens[:, end]),
            dspark.draft(model, cold, tokens[:, end]),
        )
