"""A stream in a used cache, and one of blocks with rejections, are as new: pitfalls 6 and 12. Bits,
on CPU.
"""

import pytest

import dspark_jax as dspark

from helpers.state_parts import assert_same_stream, feed, random_tokens, same_bits, speculate

WINDOW, BLOCK = 16, 6  # of the golden config: sliding_window, dspark_block_size + 1


def assert_same_draft(a, b):
    assert (
        same_bits(a.tokens, b.tokens)
        and same_bits(a.logits, b.logits)
        and same_bits(a.confidence, b.confidence)
    )


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


def test_drafts_after_three_windows(golden_reference):
    """Pitfall 12: after three windows in blocks with rejections, a draft equals that of a cold
    prefill of the same tokens.
    """
    model, tokens = golden_reference, random_tokens(11, 1, 80)
    for end in range(3 * WINDOW, 3 * WINDOW + 9):
        warm = speculate(model, tokens, 1, end, seed=end, block=BLOCK, width=BLOCK)
        cold = dspark.prefill(model, tokens[0, :end].tolist())[2]
        assert_same_stream(model, warm.cache, cold)
        assert_same_draft(
            dspark.draft(model, warm.cache, tokens[:, end]),
            dspark.draft(model, cold, tokens[:, end]),
        )
