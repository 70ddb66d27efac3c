"""The main model with its drafter: the cache, the steps and the sizes of a call that both share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError
from dspark_jax.model.cache import Cache, new_layers
from dspark_jax.model.drafter import Choose, Draft, Drafter, most_likely
from dspark_jax.model.dspark_drafter import DSparkDrafter
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import MAX_POSITIONS
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import Source
from dspark_jax.runtime.backend import decode_rows

MAX_SEQ_LEN = 4096  # the default
LARGEST_PREFILL_CHUNK = 128
STREAMS_AT_ONCE = 8  # on a row of the mesh, at most, where the caller does not say how many


def drafter_class(config: ModelConfig) -> type[Drafter]:
    """The drafter that a config describes. So far there is one."""
    return DSparkDrafter


class DSpark(nnx.Module):
    """The main model and its drafter."""

    def __init__(self, config: ModelConfig, numerics: Numerics, source: Source):
        self.main = MainModel(config, numerics, source)
        self.drafter = drafter_class(config)(config, numerics, source)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes fixed at load, in tokens.

    max_seq_len: most tokens of one stream. prefill_chunk: rows of one prefill call. rows: most rows
      any call may carry.
    decode_rows: rows of a one-token decode (see runtime/backend.py); calls with fewer are padded.
    """

    max_seq_len: int
    prefill_chunk: int
    rows: int
    decode_rows: int


def new_cache(config: ModelConfig, batch: int, max_seq_len: int, rows: int, dtype) -> Cache:
    """An empty cache for `batch` streams of at most `max_seq_len` tokens, fed at most `rows` tokens
    a call.
    """
    sizes = (config, batch, max_seq_len, rows, dtype)
    position = jnp.zeros((batch,), jnp.int32)
    return Cache(position, new_layers(*sizes), drafter_class(config).new_cache(*sizes))


def extend_step(module: DSpark, cache: Cache, tokens: jax.Array, valid: jax.Array, regime: str):
    """Main model and priming of the drafter: y [B, T, D] before the head, hidden [B, T, N*D],
    cache.
    """
    y, hidden, cache, rows = module.main.extend(cache, tokens, valid, regime)
    primed = module.drafter.prime(module.main, cache.drafter, tokens, hidden, rows)
    return y, hidden, cache.replace(drafter=primed)


def draft_step(
    module: DSpark,
    cache: Cache,
    token: jax.Array,
    hidden: jax.Array | None = None,
    choose: Choose = most_likely,
) -> Draft:
    """Drafts after `token` [B], which stands at the cache's position; see `Drafter.draft`."""
    return module.drafter.draft(module.main, cache.drafter, cache.position, token, hidden, choose)


def default_prefill_chunk(config: ModelConfig) -> int:
    return min(config.sliding_window, LARGEST_PREFILL_CHUNK)


def most_rows(config: ModelConfig, chunk: int | None = None) -> int:
    """The most rows that a call carries: a prefill chunk (None: the default one) or a verify
    block.
    """
    chunk = default_prefill_chunk(config) if chunk is None else chunk
    return max(chunk, config.dspark_block_size + 1)


def make_limits(
    config: ModelConfig, max_seq_len: int = MAX_SEQ_LEN, prefill_chunk: int | None = None
) -> Limits:
    chunk = default_prefill_chunk(config) if prefill_chunk is None else prefill_chunk
    for name, value, most in (
        ("max_seq_len", max_seq_len, MAX_POSITIONS),
        ("prefill_chunk", chunk, MAX_POSITIONS),
    ):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or not 1 <= value <= most:
            raise ConfigError(f"{name}: {value!r} is not an integer from 1 to {most}")
    rows = most_rows(config, int(chunk))
    group_width = config.num_attention_heads * config.head_dim // config.o_groups
    one_token = decode_rows(
        config.dspark_block_size, max(config.head_dim, config.sliding_window + rows, group_width)
    )
    return Limits(int(max_seq_len), max(int(chunk), one_token), rows, one_token)
