"""A damaged weight must show: any tensor that is NaN makes the logits (or the draft's logits or confidence) NaN, wherever it is used.

Values that only choose (scores of the indexer and of the router) would else change the output without a word.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax as dspark


def floats(model) -> dict:
    """Name -> place among the leaves of all arrays of floating point numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(model.split[1])
    return {jax.tree_util.keystr(path): place for place, (path, leaf) in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def with_nan(model, place: int):
    graphdef, state = model.split
    leaves, tree = jax.tree.flatten(state)
    leaves[place] = jnp.full_like(leaves[place], jnp.nan)
    return dataclasses.replace(model, module=nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)))


@pytest.mark.parametrize("part", ["main", "drafter"])
def test_every_tensor_shows(golden_float, expected_float, part):
    ids = expected_float["p2.ids"].tolist()  # 41 tokens, 10 entries of which the indexer chooses 4
    assert len(ids) > 4 * golden_float.config.index_topk
    seen = {name: place for name, place in floats(golden_float).items() if name.startswith(f"['{part}']")}
    silent = [name for name, place in seen.items() if not shows(with_nan(golden_float, place), ids, part)]
    assert len(seen) > 25 and silent == []


def shows(model, ids, part: str) -> bool:
    logits, _, cache = dspark.prefill(model, ids[:-1])
    if part == "main":
        return bool(np.isnan(logits[0, -1]).all())
    draft = dspark.draft(model, cache, ids[-1:])
    return bool(np.isnan(draft.logits).any() or np.isnan(draft.confidence).any()) and bool(np.isfinite(logits).all())
