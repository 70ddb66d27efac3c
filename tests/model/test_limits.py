"""The sizes of a call, and what untrained hyper-connections hold: rules that several parts of the
library share and that are written down once.
"""

import dataclasses

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints.tensor_spec import hyper_connection_base
from dspark_jax.config import tiny, v4_flash_0731
from dspark_jax.model.dspark import make_limits, most_rows
from dspark_jax.model.parameters import Maker, RandomSource


@pytest.mark.parametrize(
    "config, chunk, rows",
    [
        (tiny(), None, 64),  # the window
        (v4_flash_0731(), None, 128),
        (dataclasses.replace(tiny(), sliding_window=300), None, 128),
        (dataclasses.replace(tiny(), sliding_window=4), None, 6),  # a verify block of 5 drafts
        (tiny(), 3, 6),
        (tiny(), 200, 200),
    ],
)
def test_a_call_carries_a_chunk_or_a_verify_block(config, chunk, rows):
    assert most_rows(config, chunk) == make_limits(config, prefill_chunk=chunk).rows == rows


@pytest.mark.parametrize("name", ["max_seq_len", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 1.5, "8"])
def test_sizes_that_cannot_be_are_refused(name, value):
    with pytest.raises(dspark.ConfigError, match=f"{name}: .* is not an integer from 1 to 1048576"):
        make_limits(tiny(), **{name: value})


def test_untrained_hyper_connections():
    """Two copies: read alike, written alike, each mostly itself. In front of a head: zeros."""
    assert hyper_connection_base(8).tolist() == [0, 0, 0, 0, 4, 0, 0, 4]
    assert hyper_connection_base(4).tolist() == [0] * 4
    make = Maker(RandomSource(0), ("layers.0.", "layers.1."))
    base = make("hc_attn_base", (24,), "f32", init="hc_base")[...]
    assert np.array_equal(base, np.stack([hyper_connection_base(24)] * 2))
