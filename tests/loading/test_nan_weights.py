"""A damaged weight must show: any tensor of the main model that is NaN makes the logits NaN (the
drafter's: test_generate_faults.py).

Otherwise values that only choose (scores of the indexer and of the router) would change the output
without a word.
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
    return {
        jax.tree_util.keystr(path): place
        for place, (path, leaf) in enumerate(leaves)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def with_nan(model, place: int):
    graphdef, state = model.split
    leaves, tree = jax.tree.flatten(state)
    leaves[place] = jnp.full_like(leaves[place], jnp.nan)
    return dataclasses.replace(model, module=nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)))


@pytest.mark.heavy
def test_every_tensor_shows(golden_float, expected_float):
    ids = expected_float["p2.ids"].tolist()  # 41 tokens, 10 entries of which the indexer chooses 4
    assert len(ids) > 4 * golden_float.config.index_topk
    seen = {
        name: place for name, place in floats(golden_float).items() if name.startswith("['main']")
    }
    silent = [
        name
        for name, place in seen.items()
        if not np.isnan(dspark.prefill(with_nan(golden_float, place), ids)[0][0, -1]).all()
    ]
    assert len(seen) > 100 and silent == []
