"""The loss of a drafter, and what is told of it while it is trained.

    loss = cross_entropy * CE(text) + distance * |q - p|_1 + confidence * BCE(c, 1 - TV)

q is the drafter's distribution, p the main model's (a constant), both at temperature 1; TV, the
total variation distance, is half of |q - p|_1, so that 1 - TV is the most that any rule of
acceptance reaches; c is the confidence. Draft k of a block, from 1, weighs exp(-(k - 1) / decay).
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of the three terms, and how fast those of later drafts fall. decay: in drafts; None: the
    block size.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float | None = None

    def of_positions(self, block: int) -> jax.Array:
        """-> [K]"""
        return jnp.exp(-jnp.arange(block) / (block if self.decay is None else self.decay))


def terms(logits: jax.Array, confidence: jax.Array, target: jax.Array, text: jax.Array):
    """Every draft by itself. logits, target [..., V], the drafter's and the main model's;
    confidence, text [...], raw and token ids.

    -> cross-entropy to the text (nats), |q - p|_1 (0 to 2), BCE of the confidence to 1 - TV (nats),
    each [...].
    """
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    p = jax.nn.softmax(jax.lax.stop_gradient(target).astype(jnp.float32), axis=-1)
    entropy = -jnp.take_along_axis(logs, text[..., None], axis=-1)[..., 0]
    distance = jnp.abs(jnp.exp(logs) - p).sum(axis=-1)
    agreed = jax.lax.stop_gradient(1 - distance / 2)
    surprise = jax.nn.softplus(confidence) - agreed * confidence
    return entropy, distance, surprise


def loss(
    weights: Weights,
    logits: jax.Array,
    confidence: jax.Array,
    target: jax.Array,
    text: jax.Array,
    share: jax.Array,
    greedy: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Of one device's part of a batch: the mean over the devices is that of the batch.

    logits, target [B, Q, K, V]; confidence, text [B, Q, K]. share [B, Q]: of each draft block; over
      the whole batch its mean is 1 / Q. greedy [B]: the text is the main model's most likely one.

    -> the loss, and measures to be averaged over devices and steps: its terms, and by position [K]
    "overlap" (1 - TV), "bias" (of the confidence against it) and, of greedy text only, "accepted"
    (this draft and all before it are what the main model says), with "greedy", the share of it.
    """
    entropy, distance, surprise = terms(logits, confidence, target, text)
    rows, block = share.shape[0], text.shape[-1]
    falling = weights.of_positions(block)
    each = share[..., None] * falling / falling.sum()

    def mean(values):
        return (values * each).sum() / rows

    def by_position(values, share=share):
        return jax.lax.stop_gradient((values * share[..., None]).sum((0, 1)) / rows)

    agreed = 1 - distance / 2
    run = jnp.cumprod((jnp.argmax(logits, axis=-1) == text).astype(jnp.float32), axis=-1)
    of_greedy = share * greedy[:, None]
    parts = {
        "cross_entropy": mean(entropy),
        "distance": mean(distance),
        "confidence": mean(surprise),
    }
    measures = parts | {
        "overlap": by_position(agreed),
        "bias": by_position(jax.nn.sigmoid(confidence) - agreed),
        "accepted": by_position(run, of_greedy),
        "greedy": of_greedy.sum() / rows,
    }
    total = sum(getattr(weights, name) * value for name, value in parts.items())
    return total, measures


def figures(measures: dict) -> dict:
    """What a reader wants of measures, averaged over steps: lists by position, 0 to 1, and tokens a
    round (accepted + 1, greedy).
    """
    greedy = float(measures["greedy"])
    accepted = [float(a) / greedy if greedy else float("nan") for a in measures["accepted"]]
    return {
        "accepted": accepted,
        "overlap": [float(a) for a in measures["overlap"]],
        "bias": [float(b) for b in measures["bias"]],
        "tokens_per_round": 1 + sum(accepted),
    }
