"""What a drafter is: anything that proposes the next K tokens of a stream and says how sure it is.

The loop of rounds, the gate and the cache know a drafter by the three methods below and by nothing
else. DSpark's is `dspark_drafter.py`; another one is a file beside it and an entry in
`dspark.drafter_class`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.cached import Rows
from dspark_jax.model.main import MainModel

# (logits [B, V], the position [B] that the token will stand at) -> the token, int32 [B]
Choose = Callable[[jax.Array, jax.Array], jax.Array]


def most_likely(logits: jax.Array, position: jax.Array) -> jax.Array:
    """The greedy Choose."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@struct.dataclass
class Draft:
    """tokens: [B, K] int32 proposed ids. logits: [B, K, V] float32, those that the tokens were
    chosen by. confidence: [B, K] float32, raw; what the gate reads.

    The confidence of a draft whose largest logit is not finite is NaN: damaged weights show in it,
    whichever tensor they are in.
    """

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array


class Drafter(Protocol):
    """The three methods of a drafter: an nnx.Module, made by cls(config, numerics, source).

    Its memory is a pytree of its own, `Cache.drafter`. Axis 1 of every leaf is the streams (axis 0
    stages or layers, say): a mesh cuts it there. What is remembered of a position is addressed by
    that position, as in the rest of the cache (cache.py), so that nothing has to be undone where
    drafts are rejected.

    Nothing that a drafter says changes the output, only how fast it comes.
    """

    @staticmethod
    def new_cache(config: ModelConfig, batch: int, max_seq_len: int, rows: int, dtype) -> Any:
        """The memory of `batch` streams of at most `max_seq_len` tokens before their first token,
        in the compute dtype. rows: the most rows that one `prime` is given.
        """
        ...

    def prime(
        self, main: MainModel, cache: Any, tokens: jax.Array, hidden: jax.Array, rows: Rows
    ) -> Any:
        """The memory with the rows that the main model has just computed: the cache in, the cache
        out, written in place where the caller donates it.

        tokens [B, T], hidden [B, T, N*D] (the captured hidden) and `rows`: positions [B, T], and a
        mask [B, T] of the rows that count. Writes what belongs to these positions and nothing else;
        rows that the mask leaves out write nothing. The rows may never be committed: then the same
        positions come again, with other tokens.
        """
        ...

    def draft(
        self,
        main: MainModel,
        cache: Any,
        position: jax.Array,
        token: jax.Array,
        hidden: jax.Array | None = None,
        choose: Choose = most_likely,
    ) -> Draft:
        """K = dspark_block_size proposals for what follows `token` [B], the anchor, which stands at
        `position` [B] and is not computed yet. The cache stays as it is.

        The rows up to the seed, at position - 1, have been given to `prime`; what the cache holds
        of later positions was never committed and must not be looked at. hidden [B, N*D]: a
        captured hidden to draft from in place of the seed's, for this draft only. choose: how the
        main model will choose; a draft that is chosen likewise is right most often.
        """
        ...
