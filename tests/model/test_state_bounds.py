"""The end of a cache (pitfall 5), and what `extend` and `commit` refuse."""

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.model.cache import entry_capacity
from dspark_jax.model.segments import segments

from helpers.state_parts import (
    committed,
    different_state,
    feed,
    random_tokens,
    same_bits,
    with_limits,
)

LENGTH, BLOCK = 256, 6  # 256 tokens fill the 64 entry slots of a ratio-4 layer to the last


@pytest.fixture(scope="module")
def model(golden_reference):
    """Its arrays have the same shapes as with max_seq_len 128, so that it shares the compiled
    programs.
    """
    model = with_limits(golden_reference, max_seq_len=LENGTH)
    shapes = [
        [a.shape for a in (x.entries, x.index_entries) if a is not None]
        for m in dspark.new_cache(model).layers
        for x in m
    ]
    assert {shape[2] for layer in shapes for shape in layer} == {64} == {LENGTH // 4}
    return model


@pytest.fixture(scope="module")
def full(model):
    """A stream that fills the cache: tokens [1, LENGTH], and what prefill gives."""
    tokens = random_tokens(12, 1, LENGTH)
    return tokens, *dspark.prefill(model, tokens[0].tolist())


def test_last_position_works(model, full):
    """The cache filled block by block holds what prefill wrote, the last slot of every buffer
    included, and nothing has moved.
    """
    tokens, logits, _, cache = full
    fed = feed(model, dspark.new_cache(model), tokens, LENGTH, BLOCK, BLOCK)
    assert fed.cache.position.tolist() == [LENGTH] and np.isfinite(np.asarray(logits)).all()
    assert same_bits(fed.logits, logits)
    assert different_state(committed(fed.cache, model.config), committed(cache, model.config)) == {}


@pytest.mark.parametrize("left", range(1, BLOCK))
def test_block_across_the_end(model, full, left):
    """Rows of a call that stick out over the end are not valid: they write nothing and move
    nothing; one row more is an error.
    """
    tokens, logits, _, cache = full
    before = cache.replace(position=cache.position - left)
    block = np.full((1, BLOCK), 7, np.int32)
    block[:, :left] = tokens[:, -left:]
    with pytest.raises(
        dspark.PromptError, match="rows up to position 256 do not fit into max_seq_len 256"
    ):
        dspark.extend(model, before, block, [left + 1])
    rows, _, after = dspark.extend(model, before, block, [left])
    assert same_bits(rows[0, :left], logits[0, -left:])
    assert (
        different_state(
            committed(dspark.commit(after, [left]), model.config), committed(cache, model.config)
        )
        == {}
    )


def test_one_past_the_end(model, full):
    tokens, _, _, cache = full
    with pytest.raises(
        dspark.PromptError, match="rows up to position 256 do not fit into max_seq_len 256"
    ):
        dspark.extend(model, cache, [[1]], [1])
    with pytest.raises(
        dspark.PromptError,
        match="257 tokens do not fit into max_seq_len 256; load with a larger one",
    ):
        dspark.prefill(model, [*tokens[0].tolist(), 1])


@pytest.mark.parametrize(
    "max_seq_len, ratio, slots",
    [(1, 4, 64), (256, 4, 64), (259, 4, 64), (260, 4, 128), (512, 8, 64), (520, 8, 128)],
)
def test_entry_capacity(golden_reference, max_seq_len, ratio, slots):
    """Every entry that max_seq_len tokens complete has a slot, in blocks of 64."""
    assert (
        entry_capacity(golden_reference.config, ratio, max_seq_len) == slots >= max_seq_len // ratio
    )


@pytest.mark.parametrize(
    "tokens, valid, message",
    [
        ([[1] * 17], [1], "17 rows in one call, the cache was made for at most 16"),
        ([[1, 256]], [1], r"token id 256 at index 1 is outside the vocabulary \(0 to 255\)"),
        ([[-1, 0]], [1], r"token id -1 at index 0 is outside the vocabulary \(0 to 255\)"),
        ([[1, 2]], [3], r"valid \[3\] must lie between 0 and the 2 rows given"),
        ([[1, 2]], [-1], r"valid \[-1\] must lie between 0 and the 2 rows given"),
        (
            [[1, 2]],
            [1, 1],
            r"tokens \(1, 2\) and valid \(2,\) do not fit a cache of 1 streams; they must be "
            r"\[1, T\] and \[1\]",
        ),
        (
            [[1, 2], [3, 4]],
            [1],
            r"tokens \(2, 2\) and valid \(1,\) do not fit a cache of 1 streams",
        ),
        ([1, 2], [1], r"tokens \(2,\) and valid \(1,\) do not fit"),
        ([[]], [0], "at least one token is needed"),
        ([[1.5, 2.0]], [1], "token ids must be integers, got float64"),
        ([[1, 2**32 + 1]], [1], "token id 4294967297 at index 1 is outside the vocabulary"),
    ],
)
def test_extend_refuses(golden_reference, tokens, valid, message):
    with pytest.raises(dspark.PromptError, match=message):
        dspark.extend(golden_reference, dspark.new_cache(golden_reference), tokens, valid)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "at least one token is needed"),
        ([3, 256], r"token id 256 at index 1 is outside the vocabulary \(0 to 255\)"),
        ([-1], r"token id -1 at index 0 is outside the vocabulary"),
        ([1.0], "token ids must be integers, got float64"),
    ],
)
def test_prefill_refuses(golden_reference, tokens, message):
    with pytest.raises(dspark.PromptError, match=message):
        dspark.prefill(golden_reference, tokens)


def test_extend_and_commit_keep_their_arguments(golden_reference):
    """`extend` writes slots and moves no position; `commit` adds to the position and does nothing
    else; neither donates.
    """
    cache = dspark.new_cache(golden_reference)
    before = [
        np.asarray(a).copy()
        for a in (cache.position, cache.drafter.rings, cache.layers[0][0].window)
    ]
    written = dspark.extend(golden_reference, cache, [[1, 2, 3, 4, 5, 6]], [6])[2]
    assert written.position.tolist() == [0] and not same_bits(
        written.drafter.rings, cache.drafter.rings
    )
    moved = dspark.commit(written, [4])
    assert (
        moved.position.tolist() == [4]
        and moved.layers is written.layers
        and moved.drafter is written.drafter
    )
    assert all(
        same_bits(a, b)
        for a, b in zip(before, (cache.position, cache.drafter.rings, cache.layers[0][0].window))
    )


@pytest.mark.parametrize("valid", [0, 1, 2])
def test_rows_beyond_valid_write_nothing(golden_reference, valid):
    """Of six rows from position 14 on, the first `valid` write their slots and the entries they
    complete, and nothing else.
    """
    cache = feed(
        golden_reference,
        dspark.new_cache(golden_reference),
        random_tokens(13, 1, 14),
        14,
        BLOCK,
        BLOCK,
    ).cache
    written = dspark.extend(golden_reference, cache, random_tokens(14, 1, BLOCK), [valid])[2]

    def slots(array, other):
        """Which slots of [n, B, S, ...] differ."""
        unequal = np.asarray(array) != np.asarray(other)
        return set(np.flatnonzero(unequal.any(axis=(0, 1, *range(3, unequal.ndim)))).tolist())

    def ring(array):
        return {position % array.shape[2] for position in range(14, 14 + valid)}

    assert slots(cache.drafter.rings, written.drafter.rings) == ring(cache.drafter.rings)
    for plan, before, after in zip(segments(golden_reference.config), cache.layers, written.layers):
        for kind, old, new in zip(plan.unit, before, after):
            assert slots(old.window, new.window) == ring(old.window)
            for name in ("inputs", "index_inputs"):
                if getattr(old, name) is not None:
                    assert slots(getattr(old, name), getattr(new, name)) == ring(getattr(old, name))
            for name in ("entries", "index_entries"):
                if getattr(old, name) is not None:
                    assert slots(getattr(old, name), getattr(new, name)) == (
                        {15 // kind.ratio} if valid == 2 else set()
                    )
