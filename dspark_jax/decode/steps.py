"""The parts of a step, one call each: new_cache, extend, commit, prefill, draft. None of them
changes its arguments.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config import ModelConfig
from dspark_jax.decode.request import check_ids
from dspark_jax.errors import ConfigError, PromptError
from dspark_jax.loading.load import Model, require_model
from dspark_jax.model import cache as caches
from dspark_jax.model import dspark
from dspark_jax.model.cache import Cache
from dspark_jax.model.drafter import Draft
from dspark_jax.model.layers.rope import MAX_POSITIONS
from dspark_jax.runtime.backend import jit
from dspark_jax.runtime.scalars import plain, whole_number
from dspark_jax.runtime.settings import own_settings, under_own_settings
from dspark_jax.runtime.sharding import (
    cache_shardings,
    cache_specs,
    on_mesh,
    parameter_specs,
    stream_spec,
)

MOST_STREAMS = 2**31 - 1  # whatever the memory; they are counted with 32 bits


@under_own_settings
def new_cache(model: Model, batch: int = 1) -> Cache:
    """An empty cache for `batch` streams.

    Raises ConfigError for a number of streams that is none, does not divide over the mesh or has no
      room in memory.
    """
    require_model(model, "new_cache")
    batch = whole_number("new_cache: batch", batch, 1, MOST_STREAMS)
    shapes = _cache_shapes(model, batch)
    leaves, structure = jax.tree.flatten(shapes)
    places = tuple(jax.tree.leaves(cache_shardings(model.mesh, shapes)))
    try:
        return _zeros(tuple(leaves), structure, places)()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        raise ConfigError(
            f"new_cache: {batch} streams of max_seq_len {model.limits.max_seq_len} need "
            f"{needed / 2**30:.3g} GiB, more than there is; ask for fewer, or load with a smaller "
            "max_seq_len"
        ) from None


def _cache_shapes(model: Model, batch: int) -> Cache:
    config, limits = model.config, model.limits
    drafter = dspark.drafter_class(config)
    return _shapes(config, drafter, batch, limits.max_seq_len, limits.rows, model.numerics.dtype)


@functools.lru_cache
def _shapes(
    config: ModelConfig, drafter: type, batch: int, max_seq_len: int, rows: int, dtype: str
) -> Cache:
    """drafter: of this config; its part of the cache depends on it."""
    del drafter
    return jax.eval_shape(
        lambda: dspark.new_cache(config, batch, max_seq_len, rows, jnp.dtype(dtype))
    )


@functools.cache
def _zeros(shapes: tuple[jax.ShapeDtypeStruct, ...], structure, places: tuple):
    """One program for all leaves: a `jnp.zeros` of each would compile one for each shape."""
    return jax.jit(
        lambda: structure.unflatten([jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]),
        out_shardings=structure.unflatten(places),
    )


@under_own_settings
def extend(model: Model, cache: Cache, tokens, valid) -> tuple[jax.Array, jax.Array, Cache]:
    """Computes the first valid [B] of tokens [B, T] at positions `cache.position` on, and writes
    their slots; the position stays.

    Returns logits [B, T, V] float32, captured hidden [B, T, N*D], and the written cache. Row i sees
    positions up to its own only. Outputs of rows from `valid` on are undefined.

    Raises PromptError for another model's cache, ids outside the vocabulary, more rows than the
      cache was made for, or rows beyond its end.
    """
    require_model(model, "extend")
    _require_own_cache(model, cache, "extend")
    tokens, valid = _array("extend: tokens", tokens), _array("extend: valid", valid)
    check_rows(model, cache, tokens, valid)
    tokens, valid = tokens.astype(np.int32), valid.astype(np.int32)
    width = max(tokens.shape[1], model.limits.decode_rows)
    padded = np.pad(tokens, [(0, 0), (0, width - tokens.shape[1])])
    logits, hidden, cache = _program(model, "extend")(model.split[1], cache, padded, valid)
    return logits[:, : tokens.shape[1]], hidden[:, : tokens.shape[1]], cache


def commit(cache: Cache, n) -> Cache:
    """Adds n [B] to the position and does nothing else; 0 <= n <= the valid rows of the last
    extend.

    Raises PromptError for what is no cache, for another shape, for what is no integer, and for a
      negative number that the host knows.
    """
    _require_cache(cache, "commit")
    with own_settings(_mesh_of(cache)):
        return _commit(cache, n)


def _mesh_of(cache: Cache) -> Mesh | None:
    """The mesh that a cache lies on; None while it is traced."""
    return getattr(getattr(cache.position, "sharding", None), "mesh", None)


def _commit(cache: Cache, n) -> Cache:
    if any(isinstance(part, jax.core.Tracer) for part in jax.tree.leaves(n)):
        n = jnp.asarray(n)
    elif not isinstance(n, jax.Array):  # what the device holds is not waited for
        n = _array("commit: n", n)
    batch = cache.position.shape[0]
    if n.shape != (batch,):
        raise PromptError(
            f"commit: n {n.shape} does not fit a cache of {batch} streams; it must be [{batch}]"
        )
    if not jnp.issubdtype(n.dtype, jnp.integer):
        raise PromptError(f"commit: n must be integers, got {n.dtype}")
    if isinstance(n, np.ndarray) and (n < 0).any():
        raise PromptError(
            f"commit: n {n.tolist()} must be 0 or more; a committed row cannot be taken back"
        )
    if isinstance(n, np.ndarray) and (n > MAX_POSITIONS).any():
        raise PromptError(
            f"commit: n {n.tolist()} is more than any cache holds ({MAX_POSITIONS} tokens)"
        )
    return caches.commit(cache, jnp.asarray(n, jnp.int32))


@under_own_settings
def prefill(model: Model, tokens: list[int]) -> tuple[jax.Array, jax.Array, Cache]:
    """One stream of any length from an empty cache: logits [1, S, V], hidden [1, S, N*D], and the
    cache committed at S.
    """
    require_model(model, "prefill")
    tokens = _array("prefill: tokens", tokens)
    if tokens.ndim != 1:
        raise PromptError(
            f"prefill: tokens {tokens.shape} must be one list of token ids, of one stream"
        )
    check_ids(model, tokens)
    if len(tokens) > model.limits.max_seq_len:
        raise PromptError(
            f"{len(tokens)} tokens do not fit into max_seq_len {model.limits.max_seq_len}; load "
            "with a larger one"
        )
    cache, chunk, outputs = new_cache(model), model.limits.prefill_chunk, []
    for at in range(0, len(tokens), chunk):
        part = tokens[None, at : at + chunk].astype(np.int32)
        count = part.shape[1]
        padded = np.pad(part, [(0, 0), (0, chunk - count)])
        logits, hidden, cache = _program(model, "prefill")(
            model.split[1], cache, padded, np.array([count], np.int32)
        )
        outputs.append((logits[:, :count], hidden[:, :count]))
        cache = commit(cache, [count])
    logits, hidden = (jnp.concatenate(parts, axis=1) for parts in zip(*outputs))
    return logits, hidden, cache


@under_own_settings
def draft(model: Model, cache: Cache, token, hidden=None, count: int | None = None) -> Draft:
    """Drafts from the anchor `token` [B], which stands at `cache.position` and is not computed yet;
    the seed is the position before.

    hidden [B, N*D]: replaces the seed's captured hidden for this draft. count: only the leading
    drafts, at most the block size.
    Returns a Draft: tokens [B, K], logits [B, K, V], confidence [B, K].
    Raises PromptError for another model's cache, for a token or a hidden of another shape than its
      streams need, and for ids outside the vocabulary; ConfigError for a count that is none.
    """
    require_model(model, "draft")
    count = _checked_count(count, model.config.dspark_block_size)
    _require_own_cache(model, cache, "draft")
    token, batch = _array("draft: token", token), cache.position.shape[0]
    if token.shape != (batch,):
        raise PromptError(
            f"draft: token {token.shape} does not fit a cache of {batch} streams; it must be "
            f"[{batch}]"
        )
    check_ids(model, token)
    token = token.astype(np.int32)
    hidden = None if hidden is None else _checked_hidden(model, batch, hidden)
    if np.min(cache.position) < 1:
        raise PromptError(
            "draft: position 0 has no committed token before it; prefill at least one token first"
        )
    result = _program(model, "draft")(model.split[1], cache, token, hidden)
    return jax.tree.map(lambda a: a[:, :count], result)


def _checked_count(count, most: int) -> int:
    number = most if count is None else plain(count)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(f"count: {count!r} is not an integer; use 1 to {most}")
    if not 1 <= number <= most:
        raise ConfigError(
            f"count: {number} drafts asked for, dspark_block_size is {most}; use 1 to {most}"
        )
    return number


def _checked_hidden(model: Model, batch: int, hidden):
    hidden = hidden if isinstance(hidden, jax.Array) else _array("draft: hidden", hidden)
    shape = batch, model.config.n_hidden_taps * model.config.hidden_size
    if hidden.shape != shape or not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise PromptError(
            f"draft: hidden {hidden.shape} of {hidden.dtype} must be {list(shape)} of floats: "
            "the captured hidden of one row "
            "of each stream"
        )
    return hidden


def _require_cache(cache, what: str) -> None:
    if not isinstance(cache, Cache):
        raise PromptError(
            f"{what}: expected a cache that dspark.new_cache or dspark.prefill returned, got a "
            f"{type(cache).__name__}"
        )


def _require_own_cache(model: Model, cache, what: str) -> None:
    """Another one would be written to at other places, or past its end without a word."""
    _require_cache(cache, what)
    expected, held = _cache_shapes(model, cache.position.shape[0]), jax.tree.leaves(cache)
    if jax.tree.structure(cache) != jax.tree.structure(expected) or any(
        (leaf.shape, leaf.dtype) != (own.shape, own.dtype)
        for leaf, own in zip(held, jax.tree.leaves(expected))
    ):
        raise PromptError(
            f"{what}: this cache was made for another model, or for one loaded with another "
            "max_seq_len, prefill_chunk or dtype; make one with dspark.new_cache"
        )
    if any(_lies_elsewhere(leaf, model.mesh) for leaf in held):
        raise PromptError(
            f"{what}: this cache lies on other devices than the model; make one with "
            "dspark.new_cache"
        )


def _lies_elsewhere(leaf, mesh: Mesh) -> bool:
    """Whether jax would refuse it. What was put nowhere in particular goes where it is needed."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return leaf.sharding.device_set != set(mesh.devices.flat)


def _array(what: str, value) -> np.ndarray:
    """`value` on the host; what is no array, such as rows of different lengths, is refused."""
    try:
        return np.asarray(value)
    except ValueError:
        raise PromptError(
            f"{what}: the rows differ in length; give one array, and pad its rows"
        ) from None


def check_rows(model: Model, cache: Cache, tokens: np.ndarray, valid: np.ndarray) -> None:
    batch = cache.position.shape[0]
    if tokens.ndim != 2 or tokens.shape[0] != batch or valid.shape != (batch,):
        raise PromptError(
            f"extend: tokens {tokens.shape} and valid {valid.shape} do not fit a cache of "
            f"{batch} streams; they must be [{batch}, T] and [{batch}]"
        )
    if tokens.shape[1] > model.limits.rows:
        raise PromptError(
            f"extend: {tokens.shape[1]} rows in one call, the cache was made for at most "
            f"{model.limits.rows}"
        )
    if not np.issubdtype(valid.dtype, np.integer):
        raise PromptError(f"extend: valid must be integers, got {valid.dtype}")
    if (valid < 0).any() or (valid > tokens.shape[1]).any():
        raise PromptError(
            f"extend: valid {valid.tolist()} must lie between 0 and the {tokens.shape[1]} rows "
            "given"
        )
    check_ids(model, tokens)
    ends = np.asarray(cache.position) + valid.astype(np.int64)
    if (ends > model.limits.max_seq_len).any():
        raise PromptError(
            f"extend: rows up to position {int(ends.max()) - 1} do not fit into max_seq_len "
            f"{model.limits.max_seq_len}"
        )


def _extend(regime, module, cache, tokens, valid):
    y, hidden, cache = dspark.extend_step(module, cache, tokens, valid, regime)
    return module.main.logits(y), hidden, cache


def _draft(module, cache, token, hidden):
    return dspark.draft_step(module, cache, token, hidden)


def _program(model: Model, name: str):
    return _compiled(model.split[0], model.mesh, name)


@functools.cache
def _compiled(graphdef: nnx.GraphDef, mesh: Mesh, name: str):
    """One jitted function per structure of model and mesh, so that models of one config share their
    compiled programs.
    """
    function = {
        "extend": functools.partial(_extend, "decode"),
        "prefill": functools.partial(_extend, "prefill"),
        "draft": _draft,
    }[name]

    def program(state, cache, *arguments):
        rows, cached = stream_spec(mesh, cache.position.shape[0]), cache_specs(mesh, cache)
        out = rows if name == "draft" else (rows, rows, cached)
        device = on_mesh(
            mesh,
            lambda state, *rest: function(nnx.merge(graphdef, state), *rest),
            (parameter_specs(state), cached, *[rows] * len(arguments)),
            out,
        )
        return device(state, cache, *arguments)

    return jit(program)
