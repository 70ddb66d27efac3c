"""A product for decoding on a CPU, whose rows do not depend on how many there are."""

import functools

import jax
import jax.numpy as jnp

# XLA's CPU backend cuts longer sums by the numbers of rows and of cores. No sum of up to 64 terms
# has been seen cut.
LONGEST_SUM = 64


def precision(x: jax.Array):
    """The precision of a product: float32 operands are multiplied as float32 on every backend,
    bfloat16 ones need no setting.
    """
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def dot_columns(x: jax.Array, weight: jax.Array, longest: int | None = LONGEST_SUM) -> jax.Array:
    """x [..., K] times weight [K, N], held columns first, -> [..., N] float32.

    Sums of more than `longest` terms are cut into parts of `longest` and a rest, always at the same
    places; None: they are left whole.
    """
    terms = x.shape[-1]
    if longest is None or terms <= longest:
        return _product(x, weight)
    whole = terms // longest * longest
    parts = jnp.einsum(
        "...pk,pkn->p...n",
        x[..., :whole].reshape(*x.shape[:-1], -1, longest),
        weight[:whole].reshape(-1, longest, weight.shape[1]),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    )
    total = functools.reduce(jnp.add, parts)
    return total if whole == terms else total + _product(x[..., whole:], weight[whole:])


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    )
