"""What numbers that a model computed depend on: they may be used again only with the same."""

from __future__ import annotations

import zlib

import jax
import numpy as np

from dspark_jax._version import __version__
from dspark_jax.loading.load import Model
from dspark_jax.runtime.sharding import fetch

SMALL = 1 << 16  # elements; of a vector that is compared


def identity(model: Model) -> dict:
    """The weights (the vectors among them are compared), precision and version.

    Every process of a mesh must call it.
    """
    vectors = [leaf for leaf in jax.tree.leaves(model.split[1]) if leaf.size < SMALL]
    weights = 0
    for leaf in fetch(model.mesh, vectors):
        weights = zlib.crc32(np.asarray(leaf).tobytes(), weights)
    return {
        "version of dspark-jax": __version__,
        "config": zlib.crc32(repr(model.config).encode()),
        "weights": weights,
        "dtype": model.numerics.dtype,
        "activation_quant": model.numerics.activation_quant,
    }
