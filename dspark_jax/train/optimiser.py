"""Muon for the matrices inside the layers, Adam for everything else; warm-up, constant rate, linear
decay, all by step.

Muon orthogonalises each matrix of a stack by itself: parameters are [layers, (experts,) N, K], and
the gate and up halves of an expert's w13 are two matrices.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from optax import contrib

MUON_TENSORS = (
    "attn.w",
    "attn.compressor.w",
    "attn.indexer.wq_b",
    "attn.indexer.compressor.w",
    "ffn.experts",
    "ffn.shared_experts",
    "main_proj",
)


def is_matrix(tensor: str) -> bool:
    """Whether the parameter of this official tensor name (without its layer's prefix) is trained by
    Muon.
    """
    return tensor.startswith(MUON_TENSORS)


def schedule(peak: float, steps: int, warmup: int, decay: int) -> optax.Schedule:
    """0 to `peak` in `warmup` steps, `peak`, then to 2 % of it in the last `decay` steps of
    `steps`.
    """
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.02 * peak, decay),
        ],
        [warmup, steps - decay],
    )


def _as_matrices(tensors: Mapping[str, str]) -> tuple[Callable, Callable]:
    """(split, join) of a parameter dictionary: [.., 2F, D] of a joined w1|w3 as [.., 2, F, D] and
    back.
    """

    def halves(w):
        return w.reshape(*w.shape[:-2], 2, w.shape[-2] // 2, w.shape[-1])

    def split(tree):
        return {k: halves(w) if "|" in tensors[k] else w for k, w in tree.items()}

    def join(tree):
        return {
            k: w.reshape(*w.shape[:-3], -1, w.shape[-1]) if "|" in tensors[k] else w
            for k, w in tree.items()
        }

    return split, join


def make(
    tensors: Mapping[str, str],
    muon_rate: optax.Schedule,
    adam_rate: optax.Schedule,
    clip: float = 1.0,
) -> optax.GradientTransformation:
    """The optimiser of a parameter dictionary. tensors: parameter name -> official tensor name
    without its layer's prefix.
    """
    split, join = _as_matrices(tensors)
    matrix = contrib.MuonDimensionNumbers(-1, -2)
    inner = contrib.muon(
        muon_rate,
        consistent_rms=0.2,
        adam_learning_rate=adam_rate,
        adam_b2=0.98,
        weight_decay=0.02,
        muon_weight_dimension_numbers=lambda params: {
            k: matrix if is_matrix(tensors[k]) else None for k in params
        },
    )
    inner = optax.chain(optax.clip_by_global_norm(clip), inner)

    def init(params):
        return inner.init(split(params))

    def update(gradients, state, params):
        updates, state = inner.update(split(gradients), state, split(params))
        return join(updates), state

    return optax.GradientTransformation(init, update)


def balanced(bias: jax.Array, load: jax.Array, rate: jax.Array) -> jax.Array:
    """Router bias one step nearer to equal load. bias, load [..., E]: how many tokens chose each
    expert.
    """
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
