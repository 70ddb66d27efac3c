"""The cache is updated in place: no copy of a cache-sized buffer in the compiled step (pitfall 29, the copy clause)."""

import re

import jax
import jax.numpy as jnp
import pytest

import dspark_jax as dspark
from dspark_jax import api, cache as caches
from dspark_jax.platform import jit
from state_parts import with_limits

LONG = 65536  # tokens; the entries are then most of the cache, and longer than any weight


@pytest.fixture(scope="module")
def compiled(golden_float):
    """One round's use of a cache, extend and commit, with the cache donated, compiled for a long cache of two streams."""
    model = with_limits(golden_float, max_seq_len=LONG)
    step = api._program(model, "extend").__wrapped__

    def extend_and_commit(state, cache, tokens, valid):
        logits, hidden, cache = step(state, cache, tokens, valid)
        return logits, hidden, caches.commit(cache, valid)

    cache = jax.eval_shape(lambda: dspark.new_cache(model, 2))
    rows = jax.ShapeDtypeStruct((2, model.config.dspark_block_size + 1), jnp.int32)
    return cache, jit(extend_and_commit, donate_argnums=1).lower(model.split[1], cache, rows, rows.update(shape=(2,))).compile()


def extents(shape) -> tuple[int, ...]:
    """A shape without its ones, sorted: what a transposed or reshaped copy of an array keeps, too."""
    return tuple(sorted(n for n in shape if n > 1))


def copied(text: str) -> list[tuple[int, ...]]:
    """The extents of everything that the program copies, alone or as the result of a fusion that is named after a copy."""
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|copy-start)\(", text) + re.findall(r"%\S*copy\S* = \w+\[([\d,]*)\]\S* fusion\(", text)
    return [extents(int(n) for n in shape.split(",") if n) for shape in shapes]


def test_finds_a_copy():
    """The search sees the copy that an undonated update makes."""
    text = jit(lambda a: (a.at[3].set(1.0), a)).lower(jnp.zeros((50, 7))).compile().as_text()
    assert (7, 50) in copied(text)


def test_no_cache_sized_copy(compiled):
    """No copy has the shape of a cache's array (nor of one layer of it), up to the order of its axes."""
    cache, program = compiled
    arrays = [a.shape for a in jax.tree.leaves(cache) if a.ndim > 1]
    entries = [layer.entries.shape[2] for members in cache.layers for layer in members if layer.entries is not None]
    copies = copied(program.as_text())
    assert copies, "the compiled text has no copy at all: its syntax has changed"
    assert not {extents(s) for s in arrays} & set(copies)
    assert [shape for shape in copies if shape and max(shape) >= min(entries)] == []


def test_cache_is_aliased(compiled):
    """Every array of the donated cache is the result's, and what the step needs besides does not grow with the cache."""
    cache, program = compiled
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
    header = program.as_text().splitlines()[0]
    assert header.count("-alias)") == len(jax.tree.leaves(cache))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4
