"""The main model with its drafter, the sizes of one call, and the one step that both share."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError
from dspark_jax.model.cache import Cache
from dspark_jax.model.drafter import Drafter
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import MAX_POSITIONS
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import Source
from dspark_jax.runtime.backend import decode_rows

MAX_SEQ_LEN = 4096  # unless said otherwise
LARGEST_PREFILL_CHUNK = 128


class DSpark(nnx.Module):
    """The main model and its drafter."""

    def __init__(self, config: ModelConfig, numerics: Numerics, source: Source):
        self.main = MainModel(config, numerics, source)
        self.drafter = Drafter(config, numerics, source)


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


def extend_step(module: DSpark, cache: Cache, tokens: jax.Array, valid: jax.Array, regime: str):
    """Main model and priming of the drafter: y [B, T, D] before the head, hidden [B, T, N*D],
    cache.
    """
    y, hidden, cache, rows = module.main.extend(cache, tokens, valid, regime)
    return y, hidden, module.drafter.prime(cache, hidden, rows)


def default_prefill_chunk(config: ModelConfig) -> int:
    return min(config.sliding_window, LARGEST_PREFILL_CHUNK)


def most_rows(config: ModelConfig, chunk: int) -> int:
    """The most rows that a call carries: a prefill chunk or a verify block."""
    return max(chunk, config.dspark_block_size + 1)


def make_limits(
    config: ModelConfig, max_seq_len: int = MAX_SEQ_LEN, prefill_chunk: int | None = None
) -> Limits:
    chunk = default_prefill_chunk(config) if prefill_chunk is None else prefill_chunk
    for name, value, most in (
        ("max_seq_len", max_seq_len, MAX_POSITIONS),
        ("prefill_chunk", chunk, MAX_POSITIONS),
    ):
        if not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
            raise ConfigError(f"{name}: {value!r} is not an integer from 1 to {most}")
    rows = most_rows(config, int(chunk))
    group_width = config.num_attention_heads * config.head_dim // config.o_groups
    one_token = decode_rows(
        config.dspark_block_size, max(config.head_dim, config.sliding_window + rows, group_width)
    )
    return Limits(int(max_seq_len), max(int(chunk), one_token), rows, one_token)
