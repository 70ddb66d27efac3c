"""Sessions in files: safetensors, with the tokens, what is computed of them, and what it is
computed by.

Of the compressed entries those are kept that belong to computed tokens; so a session may be read by
a model that was loaded with another max_seq_len.
"""

from __future__ import annotations

import json
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.paths import no_file
from dspark_jax.decode.identity import identity
from dspark_jax.decode.steps import new_cache
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading.load import Model
from dspark_jax.model.cache import Cache
from dspark_jax.runtime import files
from dspark_jax.runtime.settings import own_settings
from dspark_jax.runtime.sharding import cache_shardings, fetch

FORMAT = "dspark session 1"


class Saved(NamedTuple):
    """tokens: all of them. computed: how many of these the cache holds; None: there is none."""

    seed: int
    tokens: list[int]
    computed: int
    cache: Cache | None


def write(path, model: Model, seed: int, tokens: list[int], computed: int, cache) -> None:
    from safetensors.flax import save

    arrays = {"tokens": jnp.asarray(np.array(tokens, np.int32))}
    if cache is not None:
        held = fetch(model.mesh, cache)
        arrays |= {
            name: jnp.asarray(leaf) for name, leaf in _trimmed(held, computed, model).items()
        }
    about = {
        "format": FORMAT,
        "seed": str(seed),
        "computed": str(computed),
        "made_by": json.dumps(_made_by(model)),
    }
    files.write_bytes(path, save(arrays, about | {"checksum": _checksum(about, arrays)}))


def read(path, model: Model) -> Saved:
    about, arrays = _opened(files.real_path(path))
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path}: this is not a session that Session.save wrote")
    if about.pop("checksum", None) != _checksum(about, arrays):
        raise CheckpointError(
            f"{path}: damaged: what it holds is not what was written; feed the tokens again"
        )
    _require_same(path, json.loads(about["made_by"]), _made_by(model))
    tokens = np.asarray(arrays.pop("tokens")).tolist()
    if len(tokens) > model.limits.max_seq_len:
        raise ConfigError(
            f"{path}: its {len(tokens)} tokens do not fit into max_seq_len "
            f"{model.limits.max_seq_len}; load the model with a larger one"
        )
    cache = _filled(model, arrays) if arrays else None
    return Saved(int(about["seed"]), tokens, int(about["computed"]), cache)


def _opened(path) -> tuple[dict, dict]:
    from safetensors import SafetensorError, safe_open
    from safetensors.flax import load_file

    if (other := no_file(path)) is not None:
        raise CheckpointError(f"{path}: this is {other}")
    try:
        with safe_open(path, "flax") as file:
            about = file.metadata() or {}
        return about, load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error


def _checksum(about: dict, arrays: dict) -> str:
    """Of everything that is written."""
    total = zlib.crc32(repr(sorted(about.items())).encode())
    for name, array in sorted(arrays.items()):
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(np.asarray(array).tobytes(), total)
    return str(total)


def _made_by(model: Model) -> dict:
    """What the numbers in a cache depend on."""
    return identity(model) | {"most rows of a call (prefill_chunk)": model.limits.rows}


def _require_same(path, then: dict, now: dict) -> None:
    wrong = [
        f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key]
    ]
    if wrong:
        raise ConfigError(
            f"{path}: this session was made by another model or version: {'; '.join(wrong)}; load "
            "what made it, or feed the tokens again"
        )


def _trimmed(cache: Cache, computed: int, model: Model) -> dict[str, np.ndarray]:
    """Name -> leaf; of compressed entries those of computed tokens."""
    named = {}
    for name, leaf in _named(cache):
        if name.endswith("entries"):
            leaf = leaf[:, :, : _entries(name, computed, model)]
        named[name] = leaf
    return named


def _entries(name: str, computed: int, model: Model) -> int:
    """How many compressed entries of this leaf's layers belong to the computed tokens."""
    from dspark_jax.model.segments import segments

    _, segment, member, _ = name.split(".")
    ratio = segments(model.config)[int(segment)].unit[int(member)].ratio
    return computed // ratio


def _named(cache: Cache) -> list[tuple[str, object]]:
    """("layers.0.1.entries", leaf), ("drafter.rings", leaf), ("position", leaf), in the order of
    the cache's leaves.
    """
    paths = jax.tree_util.tree_flatten_with_path(cache)[0]
    return [
        (".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path), leaf)
        for path, leaf in paths
    ]


def _filled(model: Model, arrays: dict) -> Cache:
    """The cache of the model with these arrays in it, each at the beginning of its leaf."""
    with own_settings(model.mesh):
        empty = new_cache(model)
        leaves = [_into(leaf, np.asarray(arrays[name])) for name, leaf in _named(empty)]
        cache = jax.tree.unflatten(jax.tree.structure(empty), leaves)
        return jax.device_put(cache, cache_shardings(model.mesh, empty))


def _into(leaf: jax.Array, values: np.ndarray) -> np.ndarray:
    whole = np.zeros(leaf.shape, leaf.dtype)
    whole[tuple(slice(n) for n in values.shape)] = values
    return whole
