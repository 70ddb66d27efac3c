"""Training of the drafter on the frozen main model, as it ships: quantised weights, quantised
activations.

The target of a draft is what the main model would say (its argmax), not the text. At a random
anchor the drafts are compared with the main model's choices along the text; a draft counts only
while the text agrees with the main model, because after the first disagreement the main model
would have gone another way.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model import whole_sequence
from dspark_jax.model.dspark_drafter import DSparkDrafter
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import RandomSource
from dspark_jax.train import data, optimiser, weights
from dspark_jax.train.loop import Task
from dspark_jax.train.main_stage import KINDS

DECAY = 0.9  # weight of a draft position relative to the one before it
CONFIDENCE_WEIGHT = 0.1


def build(config: ModelConfig, seed: int) -> tuple[weights.Parts, nnx.GraphDef, dict]:
    """-> the float drafter taken apart, its twin's structure (quantised activations), and the
    official prefixes by path.
    """
    source = weights.PrefixSource(RandomSource(seed + 1))
    drafter = DSparkDrafter(config, Numerics("float32", activation_quant=False), source)
    twin = nnx.split(
        DSparkDrafter(config, Numerics("float32", activation_quant=True), RandomSource(seed)),
        nnx.Param,
        ...,
    )[0]
    return weights.take_apart(drafter), twin, source.prefixes(drafter)


def targets(main: MainModel, tokens: jax.Array, anchors: jax.Array, block: int):
    """tokens [B, S], anchors [B, Q] -> hidden [B, S, N*D], the main model's choices [B, Q, K], and
    which of them count [B, Q, K].

    Choice i follows position anchor + i; it counts while the text has followed the choices before
    it.
    """
    logits, hidden, _ = whole_sequence.forward(main, tokens)
    choices = jnp.argmax(logits, axis=-1)
    places = anchors[..., None] + jnp.arange(block)
    chosen = jnp.take_along_axis(choices[:, None], places, axis=2)
    text = jnp.take_along_axis(
        tokens[:, None], jnp.minimum(places + 1, tokens.shape[1] - 1), axis=2
    )
    followed = jnp.cumprod((chosen == text)[..., :-1], axis=-1)
    counts = jnp.concatenate([jnp.ones_like(followed[..., :1]), followed], axis=-1)
    return jax.lax.stop_gradient((hidden, chosen, counts.astype(jnp.float32)))


def losses(logits: jax.Array, confidence: jax.Array, chosen: jax.Array, counts: jax.Array):
    """[B, Q, K, V], [B, Q, K] each -> cross-entropy, confidence loss, drafts accepted [B, Q] (of
    those that count).
    """
    nats = (
        jax.nn.logsumexp(logits, axis=-1)
        - jnp.take_along_axis(logits, chosen[..., None], axis=-1)[..., 0]
    )
    weight = counts * DECAY ** jnp.arange(chosen.shape[-1])
    matched = (jnp.argmax(logits, axis=-1) == chosen).astype(jnp.float32)
    run = jnp.cumprod(matched * counts, axis=-1)
    # Confidence is asked for only where every draft before was accepted: what the gate observes.
    observed = counts * jnp.concatenate([jnp.ones_like(run[..., :1]), run[..., :-1]], axis=-1)
    surprise = jax.nn.softplus(confidence) - matched * confidence
    return (
        (nats * weight).sum() / weight.sum(),
        (surprise * observed).sum() / observed.sum(),
        run.sum(-1),
    )


def task(
    config: ModelConfig,
    parts: weights.Parts,
    twin: nnx.GraphDef,
    main: MainModel,
    corpus: data.Corpus,
    steps: int,
    rows: int,
    length: int,
    rates: tuple[float, float],
    anchors: int = 48,
) -> Task:
    """main: the trained model, weights as stored, activations quantised. anchors: drafts per
    window.
    """
    main_graph, main_state = nnx.split(main)
    block = config.dspark_block_size

    def loss(params, frozen, batch, quantised):
        main = nnx.merge(main_graph, frozen)
        hidden, chosen, counts = targets(main, batch["tokens"], batch["anchors"], block)
        drafter = parts.module(params, twin if quantised else None)
        logits, confidence = whole_sequence.draft_forward(
            drafter, main, hidden, batch["tokens"], batch["anchors"]
        )
        entropy, surprise, accepted = losses(logits, confidence, chosen, counts)
        kinds = jax.nn.one_hot(batch["kinds"], len(KINDS))
        measures = {
            "tokens_loss": entropy,
            "confidence": surprise,
            "accepted": accepted.sum(1) @ kinds,
            "proposed": counts.sum((1, 2)) @ kinds,
        }
        return entropy + CONFIDENCE_WEIGHT * surprise, measures

    def batch(step):
        unseen = 10_000_000 + step  # the main model was not trained on the text of this step
        tokens, kinds = corpus.batch(unseen, rows, length - 1, late=True)
        rng = np.random.default_rng([corpus.seed, step, 1])
        width = (length - block - 1) // anchors
        places = 1 + np.arange(anchors) * width + rng.integers(0, width, (rows, anchors))
        return {"tokens": tokens, "kinds": kinds, "anchors": places.astype(np.int32)}

    decay, warmup = max(1, steps // 3), max(1, min(40, steps // 10))
    schedules = [optimiser.schedule(rate, steps, warmup, decay) for rate in rates]
    return Task(
        "drafter",
        loss,
        batch,
        optimiser.make(parts.tensors, *schedules),
        parts.storages,
        steps,
        steps - max(1, steps // 5),
        frozen=main_state,
    )


def acceptance(measures: dict, kinds: tuple[str, ...]) -> float:
    """Accepted share of the drafts that count, of the given kinds; nan when none occurred."""
    index = [KINDS.index(k) for k in kinds]
    proposed = measures["proposed"][index].sum()
    return float(measures["accepted"][index].sum() / proposed) if proposed else float("nan")
