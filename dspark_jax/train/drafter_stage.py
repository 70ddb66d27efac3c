"""Training of a drafter on a frozen main model, as that one runs: stored weights, quantised
activations.

The drafter sees the main model's captured hidden states along text that the main model wrote; at
anchors drawn from each sequence it proposes a block, the Markov head given the text's own tokens
(teacher forcing). drafter_loss.py compares with the main model's distribution.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model import whole_sequence
from dspark_jax.model.dspark_drafter import DSparkDrafter
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import RandomSource, Source
from dspark_jax.train import drafter_loss, optimiser, weights
from dspark_jax.train.drafter_text import Sequences
from dspark_jax.train.loop import Task


def build(
    config: ModelConfig, source: Source, dtype: str = "float32"
) -> tuple[weights.Parts, nnx.GraphDef, dict]:
    """-> the drafter of `source` taken apart, its twin's structure (quantised activations), and the
    official prefixes by path. dtype: what it computes in; its values are float32.
    """
    named = weights.PrefixSource(source)
    drafter = DSparkDrafter(config, Numerics(dtype, activation_quant=False), named)
    twin = DSparkDrafter(config, Numerics(dtype, activation_quant=True), RandomSource(0))
    graph = nnx.split(twin, nnx.Param, ...)[0]
    return weights.take_apart(drafter), graph, named.prefixes(drafter)


def draw_anchors(
    starts: np.ndarray, ends: np.ndarray, block: int, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Anchors of each sequence: one from each of `count` equal parts of what the main model wrote,
    where a whole block follows.

    starts, ends [B]: the first token that it wrote, and the length of the sequence.
    -> positions [B, count] int32, and their share [B, count] float32: equal over all that count
    (mean 1 / count over the batch), 0 for a sequence that is too short.
    """
    room = ends - block - starts  # anchors that there are: a block reaches anchor + block
    parts = (np.arange(count) + rng.random((len(starts), count))) / count
    places = np.maximum(starts[:, None] + (parts * room[:, None]).astype(np.int64), 1)
    valid = np.broadcast_to(room[:, None] > 0, places.shape)
    share = valid / max(1, valid.sum()) * len(starts)
    return np.where(valid, places, 1).astype(np.int32), share.astype(np.float32)


def batch_of(
    sequences: Sequences, step: int, rows: int, anchors: int, block: int, seed: int
) -> dict[str, np.ndarray]:
    """The batch of a step, a pure function of it: the sequences come in another order each time
    round.
    """
    numbers = np.arange(step * rows, (step + 1) * rows)
    orders = {
        turn: np.random.default_rng([seed, 1, turn]).permutation(len(sequences.tokens))
        for turn in set(numbers // len(sequences.tokens))
    }
    chosen = [orders[n // len(sequences.tokens)][n % len(sequences.tokens)] for n in numbers]
    rng = np.random.default_rng([seed, 2, step])
    places, share = draw_anchors(
        sequences.starts[chosen], sequences.ends[chosen], block, anchors, rng
    )
    return {
        "tokens": sequences.tokens[chosen],
        "greedy": sequences.greedy[chosen].astype(np.float32),
        "anchors": places,
        "share": share,
    }


def task(
    config: ModelConfig,
    parts: weights.Parts,
    twin: nnx.GraphDef,
    main: MainModel,
    sequences: Sequences,
    *,
    steps: int,
    rows: int,
    anchors: int,
    rates: tuple[float, float],
    quantise_from: int,
    seed: int = 0,
    loss_weights: drafter_loss.Weights = drafter_loss.Weights(),
) -> Task:
    """rates: peak learning rates of Muon and of Adam. rows: sequences a step. anchors: drafts that
    start in each. quantise_from: the step from which on the drafter's weights and activations are
    quantised as they are stored and run.
    """
    graph, state = nnx.split(main)
    block, dtype = config.dspark_block_size, main.numerics.dtype

    def loss(params, frozen, batch, quantised):
        main, tokens, places = nnx.merge(graph, frozen), batch["tokens"], batch["anchors"]
        logits, hidden, _ = whole_sequence.forward(main, tokens)
        logits, hidden = jax.lax.stop_gradient((logits, hidden))
        params = {k: v.astype(parts.declared[k].array_dtype(dtype)) for k, v in params.items()}
        drafter = parts.module(params, twin if quantised else None)
        drafts, confidence = whole_sequence.draft_forward(drafter, main, hidden, tokens, places)
        rows, along = jnp.arange(len(tokens))[:, None, None], places[..., None] + jnp.arange(block)
        return drafter_loss.loss(
            loss_weights,
            drafts,
            confidence,
            logits[rows, along],
            tokens[rows, along + 1],
            batch["share"],
            batch["greedy"],
        )

    def batch(step):
        return batch_of(sequences, step, rows, anchors, block, seed)

    decay, warmup = max(1, steps // 3), max(1, min(40, steps // 10))
    schedules = [optimiser.schedule(rate, steps, warmup, decay) for rate in rates]
    return Task(
        "drafter",
        loss,
        batch,
        without_router_bias(optimiser.make(parts.tensors, *schedules)),
        parts.storages,
        steps,
        quantise_from,
        frozen=state,
    )


def without_router_bias(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Router biases stay as they are: no gradient reaches them, and weight decay must not."""

    def biases(params):
        return {name: name.endswith("ffn.bias") for name in params}

    return optax.chain(inner, optax.masked(optax.set_to_zero(), biases))
