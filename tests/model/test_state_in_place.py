"""The cache is updated in place: no copy of a cache-sized buffer in the compiled step (pitfall 29,
the copy clause).
"""

import re

import jax
import jax.numpy as jnp
import pytest

import dspark_jax as dspark
from dspark_jax.decode import steps
from dspark_jax.model import cache as caches
from dspark_jax.runtime import backend

from helpers.quick import compiled_quickly
from helpers.state_parts import with_limits

LONG = 65536  # tokens; the entries are then most of the cache, and longer than any weight


@pytest.fixture(scope="module")
def compiled(float_model):
    """One round's use of a cache, extend and commit, with the cache donated, compiled for a long
    cache of two streams.
    """
    model = with_limits(float_model, max_seq_len=LONG)
    step = steps._program(model, "extend").__wrapped__

    def extend_and_commit(state, cache, tokens, valid):
        logits, hidden, cache = step(state, cache, tokens, valid)
        return logits, hidden, caches.commit(cache, valid)

    cache = jax.eval_shape(lambda: dspark.new_cache(model, 2))
    rows = jax.ShapeDtypeStruct((2, model.config.dspark_block_size + 1), jnp.int32)
    with compiled_quickly():  # which changes no instruction of the text
        return cache, backend.jit(extend_and_commit, donate_argnums=1).lower(
            model.split[1], cache, rows, rows.update(shape=(2,))
        ).compile()


IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice"}


def extents(shape) -> tuple[int, ...]:
    """A shape without its ones, sorted: a transposed or reshaped copy of an array has it, too."""
    return tuple(sorted(n for n in shape if n > 1))


def made(text: str) -> list[tuple[tuple[int, ...], str]]:
    """Extents and operation of every array that a compiled program makes; a fusion or call goes by
    the operation of its root.
    """
    instruction = re.compile(r"\s+(ROOT )?%\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(.*")
    computations, roots, inner = {}, {}, set()
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0]
            computations[name] = []
        elif match := instruction.match(line):
            root, shape, operation = match.groups()
            called = re.search(r"(?:calls|to_apply)=(%[^\s,]+)", line)
            called = called.group(1) if called and operation in ("fusion", "call") else None
            computations[name].append(
                (extents(int(n) for n in shape.split(",") if n), operation, called)
            )
            inner |= {called} if operation == "fusion" else set()
            if root:
                roots[name] = operation
    return [
        (shape, roots.get(called, operation))
        for name, lines in computations.items()
        if name not in inner
        for shape, operation, called in lines
    ]


def test_finds_what_is_made():
    """The search sees the copy that an undonated update makes, and a pass over a whole donated
    array that is not a copy.
    """
    array = jnp.zeros((50, 7))
    update = backend.jit(lambda a: (a.at[3].set(1.0), a)).lower(array)
    assert ((7, 50), "copy") in made(update.compile().as_text())
    scaled = backend.jit(lambda a, b: a * b, donate_argnums=0).lower(array, 2.0)
    assert ((7, 50), "multiply") in made(scaled.compile().as_text())


@pytest.mark.heavy
def test_nothing_cache_sized_is_made(compiled):
    """No array of the cache is copied; what is as long as its entries is only ever written to in
    place: no select, no sum.
    """
    cache, program = compiled
    arrays = {extents(a.shape) for a in jax.tree.leaves(cache) if a.ndim > 1}
    slots = min(
        layer.entries.shape[2]
        for members in cache.layers
        for layer in members
        if layer.entries is not None
    )
    results = made(program.as_text())
    assert {operation for shape, operation in results if shape in arrays} >= {
        "parameter",
        "get-tuple-element",
    }
    assert [
        shape for shape, operation in results if shape in arrays and operation.startswith("copy")
    ] == []
    long = [(shape, operation) for shape, operation in results if max(shape, default=0) >= slots]
    assert [(shape, operation) for shape, operation in long if operation not in IN_PLACE] == []


@pytest.mark.heavy
def test_cache_is_aliased(compiled):
    """Every array of the donated cache is the result's, and what the step needs besides does not
    grow with the cache.
    """
    cache, program = compiled
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache))
    header = program.as_text().splitlines()[0]
    assert header.count("-alias)") == len(jax.tree.leaves(cache))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size // 4
