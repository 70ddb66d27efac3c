"""Which token a row of logits becomes, and what else a row says: by how much it won, and whether it
is sound.

Three functions that know nothing of each other, each over logits [..., V] of any leading shape.
Every mode and the prefill choose by `choose`, so that another rule is another `choose`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def choose(logits: jax.Array) -> jax.Array:
    """logits [..., V] -> the token, int32 [...]: the best id, the lowest among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def margin(logits: jax.Array) -> jax.Array:
    """logits [..., V] -> top1 - top2, float32 [...]; 0 where two ids are equally good."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    others = jnp.where(jnp.arange(logits.shape[-1]) == best[..., None], -jnp.inf, logits)
    return jnp.max(logits, axis=-1) - jnp.max(others, axis=-1)


def finite(logits: jax.Array) -> jax.Array:
    """logits [..., V] -> whether the best is a finite number, bool [...].

    A NaN anywhere makes the best NaN, so that none slips through as the index of a token.
    """
    return jnp.isfinite(jnp.max(logits, axis=-1))
