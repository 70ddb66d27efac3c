"""Another drafter is a class with three methods: here one that looks up what followed the anchor
last time. It has a memory of its own, of another shape and type than DSpark's, and no parameters.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import dspark_jax as dspark
from dspark_jax.model import dspark as model_of
from dspark_jax.model.cache import write
from dspark_jax.model.drafter import Draft, Drafter, most_likely
from dspark_jax.model.dspark_drafter import DSparkDrafter
from dspark_jax.runtime.sharding import cache_specs, make_mesh

from helpers.quick import compiled_quickly

LENGTH = 60


@struct.dataclass
class SeenTokens:
    tokens: jax.Array  # [1, B, max_seq_len + rows] int32, slot = position


class LookUp(nnx.Module):
    """Proposes what followed the anchor where it last stood in the stream."""

    def __init__(self, config, numerics=None, source=None):
        self.config = config

    @staticmethod
    def new_cache(config, batch, max_seq_len, rows, dtype):
        return SeenTokens(jnp.zeros((1, batch, max_seq_len + rows), jnp.int32))

    def prime(self, main, cache, tokens, hidden, rows):
        return SeenTokens(write(cache.tokens, 0, rows.positions, rows.mask, tokens))

    def draft(self, main, cache, position, token, hidden=None, choose=most_likely):
        seen, places = cache.tokens[0], jnp.arange(cache.tokens.shape[2])
        found = (seen == token[:, None]) & (places < position[:, None])
        at = jnp.max(jnp.where(found, places, -1), axis=1, keepdims=True)
        at = at + 1 + jnp.arange(self.config.dspark_block_size)
        known = at < position[:, None]
        tokens = jnp.where(known, jnp.take_along_axis(seen, at, axis=1), token[:, None])
        logits = jax.nn.one_hot(tokens, self.config.vocab_size)
        return Draft(tokens, logits, jnp.where(known, 2.0, -2.0))


@pytest.fixture(scope="module", autouse=True)
def quick():
    with compiled_quickly():
        yield


@pytest.fixture
def looking_up(small_model, monkeypatch):
    monkeypatch.setattr(model_of, "drafter_class", lambda config: LookUp)
    graphdef, state = nnx.split(small_model.module)
    module = nnx.merge(graphdef, state)
    module.drafter = LookUp(small_model.config)
    return dataclasses.replace(small_model, module=module)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["block", "sequential"])
def test_another_drafter_runs_and_changes_no_token(looking_up, prompts, mode):
    def plain(prompt, length):
        return dspark.generate(looking_up, prompt, length, "plain", stop_token_ids=[]).tokens

    prompt = prompts[0] + plain(prompts[0], LENGTH)[0]  # so that there is something to look up
    expected = plain(prompt, 10)
    out = dspark.generate(looking_up, prompt, 10, mode, stop_token_ids=[])
    assert out.tokens == expected
    assert out.stats["proposed"] > 0


def test_its_memory_is_cut_by_streams(looking_up):
    cache = dspark.new_cache(looking_up, 2)
    assert cache.drafter.tokens.shape[:2] == (1, 2) and cache.drafter.tokens.dtype == np.int32
    specs = cache_specs(make_mesh(1, 1), cache)
    assert tuple(specs.drafter.tokens) == tuple(specs.layers[0][0].window) == (None, "data")


@pytest.mark.parametrize("method", ["new_cache", "prime", "draft"])
@pytest.mark.parametrize("drafter", [DSparkDrafter, LookUp])
def test_arguments_are_those_of_the_protocol(drafter, method):
    names = lambda of: list(inspect.signature(getattr(of, method)).parameters)
    assert names(drafter) == names(Drafter)
