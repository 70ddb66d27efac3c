"""Streams side by side do not touch each other: pitfall 7. Bits, on CPU."""

import numpy as np
import pytest

import dspark_jax as dspark

from helpers.state_parts import (
    assert_same_stream,
    random_tokens,
    same_bits,
    speculate,
    streams_of,
)

BLOCK = 6  # of the golden config: dspark_block_size + 1


# Sixteen streams run in the program of test_state_prefill.py, which has 16 rows.
@pytest.mark.parametrize(
    "name, streams, width",
    [
        pytest.param("short_float", 16, 16, marks=pytest.mark.heavy),
        pytest.param("golden_reference", 3, BLOCK, marks=pytest.mark.heavy),
    ],
)
def test_ragged_batch(request, name, streams, width):
    """Streams of different lengths, blocks and accepted counts in one batch: each equals its solo
    run.
    """
    model, tokens = request.getfixturevalue(name), random_tokens(9, streams, 80)
    prompts, ends = (np.linspace(*bounds, streams).astype(int) for bounds in ((2, 40), (30, 72)))
    together = speculate(model, tokens, prompts, ends, seed=10, block=BLOCK, width=width)
    drafts = dspark.draft(model, together.cache, tokens[np.arange(streams), ends])
    for stream, end in enumerate(ends):
        logits, hidden, solo = dspark.prefill(model, tokens[stream, :end].tolist())
        assert same_bits(together.logits[stream, :end], logits[0])
        assert same_bits(together.hidden[stream, :end], hidden[0])
        assert_same_stream(model, streams_of(together.cache, [stream]), solo)
        draft = dspark.draft(model, solo, tokens[stream, end : end + 1])
        for part in ("tokens", "logits", "confidence"):
            assert same_bits(getattr(drafts, part)[stream], getattr(draft, part)[0])
