"""The embedded checkpoint as users run it: the same tokens in every mode, in fewer rounds."""

import pytest

import dspark_jax as dspark
from dspark_jax.commands.bench import PROMPTS


@pytest.fixture(scope="module")
def tiny():
    return dspark.load(max_seq_len=512)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", PROMPTS)
def test_all_modes_give_the_same_tokens_in_fewer_rounds(tiny, kind):
    """A plain decode of this model carries two rows a step, and a block six."""
    assert tiny.limits.decode_rows == 2
    outs = {
        mode: dspark.generate(tiny, PROMPTS[kind], 48, mode, stop_token_ids=[])
        for mode in ("plain", "sequential", "block")
    }
    assert outs["plain"].tokens == outs["sequential"].tokens == outs["block"].tokens
    assert outs["block"].stats["rounds"] <= 47 / 2
