"""Training of the main model: next-token cross-entropy, a penalty on phrases that come round again
in prose, the indexer's own loss, and router balance without a loss.

While top-k covers every compressed entry the indexer gets no gradient from the output, so it learns
to predict how much attention each entry is paid: cross-entropy to the attention mass over entries,
with its inputs detached.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model import whole_sequence
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.main import MainModel
from dspark_jax.model.parameters import RandomSource
from dspark_jax.model.segments import segments
from dspark_jax.train import data, optimiser, weights
from dspark_jax.train.loop import Task

KINDS = tuple(data.MIXTURE)
# Unlikelihood training (Welleck et al. 2020, section 5), but only of what the text contradicts:
# after three tokens that stood in the window before, those that followed then and do not now.
REPEATED, REPEAT_WEIGHT = 3, 0.5
BALANCE_RATE = 0.004  # in the unit of router scores, a step; falls to 0 with the learning rate


class BalancedTables:
    """Random values, but hash tables that give every expert an equal share of the text. frequencies
    [V] of the ids.
    """

    packed_experts = columns_first = False

    def __init__(self, seed: int, frequencies: np.ndarray):
        self._random, self._rng = RandomSource(seed), np.random.default_rng(seed)
        self._frequencies = frequencies

    def __call__(self, declared, prefixes):
        experts = declared.hashed_experts
        if experts is None:
            return self._random(declared, prefixes)
        tables = [
            balanced_table(self._frequencies, experts, declared.shape[-1], self._rng)
            for _ in prefixes
        ]
        return jnp.asarray(np.stack(tables), jnp.int32)


def balanced_table(
    frequencies: np.ndarray, experts: int, active: int, rng: np.random.Generator
) -> np.ndarray:
    """-> int [V, active]: `active` distinct experts a token id, the frequent ids spread so that the
    experts' loads agree.
    """
    load, table = np.zeros(experts), np.zeros((len(frequencies), active), int)
    for token in np.argsort(-frequencies - 1e-12 * rng.random(len(frequencies))):
        chosen = np.lexsort((rng.random(experts), load))[:active]
        load[chosen] += frequencies[token] + 1e-9
        table[token] = rng.permutation(chosen)
    return table


def build(
    config: ModelConfig, seed: int, frequencies: np.ndarray
) -> tuple[weights.Parts, nnx.GraphDef, dict]:
    """-> the float model taken apart, its twin's structure (quantised activations), and the
    official prefixes by path.
    """
    source = weights.PrefixSource(BalancedTables(seed, frequencies))
    model = MainModel(config, Numerics("float32", activation_quant=False), source)
    twin = nnx.split(
        MainModel(config, Numerics("float32", activation_quant=True), RandomSource(seed)),
        nnx.Param,
        ...,
    )[0]
    return weights.take_apart(model), twin, source.prefixes(model)


def token_losses(model: MainModel, tokens: jax.Array):
    """tokens [B, S + 1] -> nats [B, S] of each next token, log-probabilities [B, S, V], and the
    layers' LayerAux.
    """
    y, _, aux = whole_sequence.trunk(model, tokens[:, :-1])
    logprobs = jax.nn.log_softmax(model.logits(y))
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0], logprobs, aux


def repeat_penalty(logprobs: jax.Array, tokens: jax.Array) -> jax.Array:
    """logprobs [B, S, V] of the tokens after tokens [B, S + 1][:, :-1] -> [B]: the mean over
    positions of -log(1 - p), summed over the places where the last REPEATED tokens stood before,
    p of the token that followed there, if another one follows now.
    """
    now, following = tokens[:, :-1], tokens[:, 1:]
    size = now.shape[1]
    same = now[:, :, None] == now[:, None, :]
    stood = functools.reduce(
        jnp.logical_and,
        [jnp.pad(same, [(0, 0), (n, 0), (n, 0)])[:, :size, :size] for n in range(REPEATED)],
    )
    wrong = stood & jnp.tri(size, k=-1, dtype=bool) & (following[:, :, None] != following[:, None])
    places = jnp.broadcast_to(following[:, None], stood.shape)
    p = jnp.exp(jnp.take_along_axis(logprobs, places, axis=-1))
    cost = -jnp.log1p(-jnp.minimum(p, 0.999))
    return jnp.sum(jnp.where(wrong, cost, 0.0), axis=(1, 2)) / size


def _index_loss(layer: whole_sequence.LayerAux) -> jax.Array:
    """Mean cross-entropy, nats a row, of the indexer's softmax to the attention over compressed
    entries; summed over layers.
    """
    if layer.index_scores is None:
        return jnp.zeros(())
    target = layer.index_target / (layer.index_target.sum(-1, keepdims=True) + 1e-9)
    scores = jnp.where(layer.index_scores == -jnp.inf, -1e30, layer.index_scores)
    return -jnp.sum(target * jax.nn.log_softmax(scores, axis=-1)) / np.prod(target.shape[1:3])


def _load(config: ModelConfig, aux) -> dict[str, jax.Array]:
    """Pairs that each expert got, [n, E], by the path of the router bias of score-routed layers."""
    out = {}
    for s, (plan, members) in enumerate(zip(segments(config), aux, strict=True)):
        for m, layer in enumerate(members):
            if not plan.unit[m].hashed:
                counts = jax.nn.one_hot(layer.chosen, config.n_routed_experts).sum(axis=(1, 2, 3))
                out[f"segments.{s}.{m}.ffn.bias"] = counts
    return out


def task(
    config: ModelConfig,
    parts: weights.Parts,
    twin: nnx.GraphDef,
    corpus: data.Corpus,
    steps: int,
    rows: int,
    length: int,
    rates: tuple[float, float],
    late_from: int,
) -> Task:
    """rates: peak learning rates of Muon and of Adam. late_from: the step from which on the late
    mixture of text is read.

    The last fifth of the steps runs through the checkpoint's storage.
    """
    token_bytes = jnp.asarray(corpus.token_bytes)
    decay, warmup = max(1, steps // 4), max(1, min(60, steps // 10))

    def loss(params, frozen, batch, quantised):
        del frozen
        model = parts.module(params, twin if quantised else None)
        nats, logprobs, aux = token_losses(model, batch["tokens"])
        index = sum(_index_loss(layer) for members in aux for layer in members)
        prose = batch["kinds"] == KINDS.index("prose")
        repeats = jnp.mean(prose * repeat_penalty(logprobs, batch["tokens"]))
        kinds = jax.nn.one_hot(batch["kinds"], len(KINDS))
        measures = {
            "nats": nats.sum(1) @ kinds,
            "bytes": token_bytes[batch["tokens"][:, 1:]].sum(1) @ kinds,
            "index": index,
            "repeats": repeats,
            "tokens_loss": nats.mean(),
            "load": _load(config, aux),
        }
        return nats.mean() + REPEAT_WEIGHT * repeats + index, measures

    def batch(step):
        tokens, kinds = corpus.batch(step, rows, length, late=step >= late_from)
        return {"tokens": tokens, "kinds": kinds}

    def after(params, measures, step):
        rate = BALANCE_RATE * jnp.minimum(1.0, (steps - step) / decay)
        return params | {
            path: optimiser.balanced(params[path], load, rate)
            for path, load in measures["load"].items()
        }

    schedules = [optimiser.schedule(rate, steps, warmup, decay) for rate in rates]
    return Task(
        "main",
        loss,
        batch,
        optimiser.make(parts.tensors, *schedules),
        parts.storages,
        steps,
        steps - max(1, steps // 5),
        after,
    )


def bits_per_byte(measures: dict, kinds: tuple[str, ...]) -> float:
    """Of the given kinds, from measures of one step or a sum of them; nan when none occurred."""
    index = [KINDS.index(k) for k in kinds]
    size = measures["bytes"][index].sum()
    return float(measures["nats"][index].sum() / np.log(2) / size) if size else float("nan")


def held_out(
    model: MainModel, corpus: data.Corpus, rows: int = 12, length: int = 256
) -> dict[str, float]:
    """Bits per byte of held-out text, by reported kind."""
    run = nnx.jit(lambda model, tokens: token_losses(model, tokens)[0])
    measures = {"nats": np.zeros(len(KINDS)), "bytes": np.zeros(len(KINDS))}
    for i, kind in enumerate(KINDS):
        tokens = corpus.held_out_windows(kind, rows, length)
        measures["nats"][i] = float(run(model, tokens).sum())
        measures["bytes"][i] = corpus.token_bytes[tokens[:, 1:]].sum()
    return {name: bits_per_byte(measures, kinds) for name, kinds in data.REPORTED.items()}
