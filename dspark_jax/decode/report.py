"""What a call of rounds says, as one array: to fetch many small ones takes longer than a step.

Everything is 32 bits wide or a truth value, so it goes as int32, a row a stream.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.state import RoundOutput, RoundState


def packed(outputs: RoundOutput, state: RoundState, count: jax.Array) -> jax.Array:
    """outputs [rounds, B, ...], state [B, ...] without a cache, and how many rounds were filled ->
    int32 [B, words].
    """
    leaves = [jnp.moveaxis(leaf, 1, 0) for leaf in jax.tree.leaves(outputs)]
    leaves += jax.tree.leaves(state)
    streams = state.done.shape[0]
    columns = [_as_int(leaf).reshape(streams, -1) for leaf in leaves]
    return jnp.concatenate([*columns, jnp.broadcast_to(count, (streams, 1))], axis=1)


def unpacked(
    report: np.ndarray, outputs: RoundOutput, state: RoundState
) -> tuple[RoundOutput, RoundState, int]:
    """What was packed, on the host. outputs, state: their shapes."""
    at = 0

    def taken(shape: tuple[int, ...], dtype) -> np.ndarray:
        nonlocal at
        words = int(np.prod(shape[1:], dtype=np.int64))
        part = np.ascontiguousarray(report[:, at : at + words])
        at += words
        part = part.astype(np.bool_) if dtype == np.bool_ else part.view(dtype)
        return part.reshape(shape)

    def of_rounds(leaf):
        rounds, streams, *rest = leaf.shape
        return np.moveaxis(taken((streams, rounds, *rest), leaf.dtype), 0, 1)

    outputs = jax.tree.map(of_rounds, outputs)
    state = jax.tree.map(lambda leaf: taken(leaf.shape, leaf.dtype), state)
    return outputs, state, int(report[:, at].max(initial=0))


def _as_int(leaf: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(leaf, jnp.int32)
