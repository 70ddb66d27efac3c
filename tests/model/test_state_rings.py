"""Which slots a row sees: rings that never alias (pitfall 4) and compressed entries of the past
only (pitfall 3).
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decode import steps
from dspark_jax.model.cache import held_position, in_window, write
from dspark_jax.model.layers.cached import Rows, _advance
from dspark_jax.model.segments import segments

from helpers.quick import quick_jit
from helpers.state_parts import block_at, differing, feed, random_tokens, streams_of, with_limits

WINDOW, BLOCK = 16, 6  # of the golden config: sliding_window, dspark_block_size + 1
BATCH = 126
NO_ENTRY = -100


def test_held_positions():
    """A ring of 4 slots, seen from positions 0 to 5: the newest position congruent to the slot,
    negative where there was none.
    """
    assert held_position(jnp.arange(6), 4).tolist() == [
        [0, -3, -2, -1],
        [0, 1, -2, -1],
        [0, 1, 2, -1],
        [0, 1, 2, 3],
        [4, 1, 2, 3],
        [4, 5, 2, 3],
    ]


def test_window_mask():
    """A window of 3 in a ring of 5 slots, seen from positions 0 to 7."""
    expected = """
        X . . . .
        X X . . .
        X X X . .
        . X X X .
        . . X X X
        X . . X X
        X X . . X
        X X X . .
    """
    assert [
        "".join(" X" if seen else " ." for seen in row).strip()
        for row in np.asarray(in_window(jnp.arange(8), 5, 3))
    ] == [line.strip() for line in expected.strip().splitlines()]


def ring_before(size: int, starts) -> np.ndarray:
    """[B, size]: which position each slot holds after starts[b] tokens, -1: none yet."""
    held = starts[:, None] - 1 - (starts[:, None] - 1 - np.arange(size)) % size
    return np.maximum(held, -1).astype(np.int32)


def ring_after(size: int, starts, width: int) -> np.ndarray:
    """The same after `width` more rows, written by the library."""
    now = starts[:, None] + np.arange(width)
    return np.asarray(
        quick_jit(write)(ring_before(size, starts)[None], 0, now % size, now >= 0, now)[0]
    )


def seen(ring, newest) -> list[set[int]]:
    """The positions that the library's mask lets a row at newest[b] see."""
    mask = np.asarray(quick_jit(in_window, static_argnums=(1, 2))(newest, ring.shape[1], WINDOW))
    return [set(slots[visible].tolist()) for slots, visible in zip(ring, mask)]


@pytest.mark.parametrize("width", range(1, BLOCK + 1))
def test_window_ring_is_not_aliased(width):
    """Every position and row of a call sees its window and nothing else with W + width - 1 slots;
    with one fewer it does not.
    """
    size = WINDOW + width - 1
    starts = np.arange(3 * size)
    ring, smaller = (ring_after(slots, starts, width) for slots in (size, size - 1))
    for row in range(width):
        expected = [set(range(max(0, p - WINDOW + 1), p + 1)) for p in (starts + row).tolist()]
        assert seen(ring, starts + row) == expected
        if row == 0:
            assert seen(smaller, starts) != expected


@pytest.mark.parametrize("width", range(1, BLOCK + 1))
def test_stage_ring_is_not_aliased(width):
    """A draft sees the window up to the seed though `width` rejected rows lie beyond it: W + width
    slots, and no fewer.
    """
    size = WINDOW + width
    starts = np.arange(1, 3 * size)
    expected = [set(range(max(0, p - WINDOW), p)) for p in starts.tolist()]
    assert seen(ring_after(size, starts, width), starts - 1) == expected
    assert seen(ring_after(size - 1, starts, width), starts - 1) != expected


def pooled_tokens(ratio: int, members: int, width: int, size: int, starts) -> np.ndarray:
    """Which tokens the library pools for each entry [B, entries, members], or NO_ENTRY, when
    `width` rows follow starts[b].

    It is the library's bookkeeping, run on positions in place of values.
    """
    compressor = types.SimpleNamespace(
        ratio=ratio,
        members=members,
        project=lambda x, positions: positions[..., None],
        pool=lambda inputs, first: inputs[..., 0],
    )
    positions = starts[:, None] + np.arange(width)
    entries = np.full(
        (1, len(starts), int(starts.max() + width) // ratio + 1, members), NO_ENTRY, np.int32
    )

    def advance(positions, inputs, entries):
        rows = Rows(positions, positions >= 0, jnp.full(len(starts), width), None, None)
        return _advance(compressor, lambda x: x, None, rows, inputs, entries, 0)[1]

    return np.asarray(
        quick_jit(advance)(positions, ring_before(size, starts)[None, ..., None], entries)[0]
    )


@pytest.mark.parametrize("ratio, members", [(4, 8), (8, 8)])
@pytest.mark.parametrize("width", [1, BLOCK, 16])
def test_compressor_ring_is_not_aliased(ratio, members, width):
    """Every position: the entries that a call completes, and no others, pool their own tokens. One
    slot fewer shows.
    """
    size = members + width - 1
    starts = np.arange(3 * size)
    expected = np.full((len(starts), (starts.max() + width) // ratio + 1, members), NO_ENTRY)
    for b, start in enumerate(starts):
        for entry in range(start // ratio, (start + width) // ratio):
            expected[b, entry] = np.arange((entry + 1) * ratio - members, (entry + 1) * ratio)

    absent = (expected < 0) & (
        expected != NO_ENTRY
    )  # before token 0 a ring holds anything, and `Compressor.pool` masks it

    def right(size):
        return np.array_equal(
            np.where(absent, expected, pooled_tokens(ratio, members, width, size, starts)), expected
        )

    assert right(size) and not right(size - 1)


@pytest.fixture(scope="module")
def tight(float_model):
    return with_limits(float_model, rows=BLOCK)


def first_row_with(model, cache, starts, tail_seed: int) -> np.ndarray:
    """Logits of the first row of a block whose other rows hold other tokens for each seed."""
    tokens = block_at(random_tokens(1, 1, 80).repeat(len(starts), 0), starts, BLOCK)
    tokens[:, 1:] = random_tokens(tail_seed, len(starts), BLOCK - 1)
    return np.asarray(dspark.extend(model, cache, tokens, np.full(len(starts), BLOCK))[0])[:, 0]


def aliased_starts(model, cache) -> list[int]:
    """At which positions (0 to 62) the first row of a full block sees what the other rows wrote."""
    starts = np.minimum(np.arange(BATCH), 62)
    tokens = random_tokens(1, 1, 80).repeat(BATCH, 0)
    cache = feed(model, cache, tokens, starts, BLOCK, BLOCK).cache
    wrong = differing(
        first_row_with(model, cache, starts, 2), first_row_with(model, cache, starts, 3)
    )
    return sorted(set(starts[wrong].tolist()))


def test_rings_are_as_large_as_needed(tight):
    """The whole model, every position through the first wraps of every ring: no row sees a later
    one of its own call.
    """
    assert aliased_starts(tight, dspark.new_cache(tight, BATCH)) == []


@pytest.mark.heavy
@pytest.mark.parametrize("float_model", ["golden"], indirect=True)
def test_one_slot_fewer_shows(tight, monkeypatch):
    """Rings of one slot fewer than a call of BLOCK rows needs: from the first wrap on, rows see
    what must be hidden.
    """
    # which refuses a cache of other sizes
    monkeypatch.setattr(steps, "_require_own_cache", lambda *arguments: None)
    fewer = dspark.new_cache(with_limits(tight, rows=BLOCK - 2), BATCH)
    assert fewer.drafter.rings.shape[2] == WINDOW + BLOCK - 2
    wrong = aliased_starts(tight, fewer)
    assert wrong and wrong[0] > 0
    assert set(range(WINDOW + BLOCK, 63)) <= set(wrong)


# up to here a row of a ratio-4 layer sees at most index_topk = 8 entries, so that every visible one
# is attended to
LAST = 34


@pytest.fixture(scope="module")
def by_length(tight):
    """The tokens and a cache whose stream n has the first n of them."""
    tokens = random_tokens(1, 1, LAST + 1).repeat(BATCH, 0)
    return tokens, feed(
        tight,
        dspark.new_cache(tight, BATCH),
        tokens,
        np.minimum(np.arange(BATCH), LAST),
        BLOCK,
        BLOCK,
    ).cache


def changed_by(model, by_length, queries, change) -> np.ndarray:
    """change(cache, numbers [B] of the queries in its streams) -> cache. bool: does it change the
    logits at queries[i]?
    """
    tokens, cache = by_length
    changed = []
    for at in range(0, len(queries), BATCH):
        numbers = np.minimum(at + np.arange(BATCH), len(queries) - 1)
        before = streams_of(cache, queries[numbers])
        block, valid = block_at(tokens, queries[numbers], BLOCK), np.ones(BATCH, np.int32)
        plain, other = (
            dspark.extend(model, c, block, valid)[0][:, 0]
            for c in (before, change(before, numbers))
        )
        changed.append(differing(plain, other))
    return np.concatenate(changed)[: len(queries)]


def in_layers(model, cache, ratio: int, change):
    """change(LayerCache) -> LayerCache, applied to the layers of one ratio."""
    return cache.replace(
        layers=tuple(
            tuple(
                change(layer) if kind.ratio == ratio else layer
                for kind, layer in zip(plan.unit, members)
            )
            for plan, members in zip(segments(model.config), cache.layers)
        )
    )


def add_one(array, slots):
    """array [n, B, S, ...] plus 1 in slot slots[b] of every stream."""
    return array.at[:, np.arange(len(slots)), slots].add(1.0)


@pytest.mark.parametrize("ratio", [4, 8])
def test_stored_entries_in_sight(tight, by_length, ratio):
    """A row at p sees entry e, completed before, exactly if e < p // ratio: else changing it
    changes not one bit.
    """
    queries, entries = (
        a.ravel()
        for a in np.meshgrid(np.arange(LAST + 1), np.arange(LAST // ratio + 2), indexing="ij")
    )

    def change(cache, numbers):
        return in_layers(
            tight,
            cache,
            ratio,
            lambda layer: layer.replace(entries=add_one(layer.entries, entries[numbers])),
        )

    assert np.array_equal(changed_by(tight, by_length, queries, change), entries < queries // ratio)


@pytest.mark.parametrize("ratio", [4, 8])
def test_own_entry_in_sight(tight, by_length, ratio):
    """The entry that a row itself completes is in its sight: with the above, entries in sight at p
    are exactly (p + 1) // ratio.

    The last input before the row, changed, shows at once only through an entry that the row
    completes.
    """
    queries = np.arange(1, LAST + 1)

    def change(cache, numbers):
        def inputs(layer):
            return layer.replace(
                inputs=add_one(layer.inputs, (queries[numbers] - 1) % layer.inputs.shape[2])
            )

        return in_layers(tight, cache, ratio, inputs)

    assert np.array_equal(changed_by(tight, by_length, queries, change), (queries + 1) % ratio == 0)


def test_indexer_sees_the_past_only(tight, by_length):
    """Index entries from p // 4 on, and the entries they stand for, may hold anything."""
    queries = np.arange(LAST + 1)

    def change(cache, numbers):
        def later(array):
            return array + (np.arange(array.shape[2]) >= queries[numbers, None] // 4)[..., None]

        return in_layers(
            tight,
            cache,
            4,
            lambda layer: layer.replace(
                entries=later(layer.entries), index_entries=later(layer.index_entries)
            ),
        )

    assert not changed_by(tight, by_length, queries, change).any()
