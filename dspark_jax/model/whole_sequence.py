"""Whole sequences at once, without a cache: the differentiable path of training, over the same
modules.

It shares every parameter, projection and the running softmax with decoding (cached.py,
dspark_drafter.py); only where the keys come from differs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.model.dspark_drafter import DSparkDrafter
from dspark_jax.model.layers.attention import Running, absorb, finish, start
from dspark_jax.model.layers.compressor import Compressor
from dspark_jax.model.layers.rope import rotation
from dspark_jax.model.main import MainModel, capture, flatten_taps
from dspark_jax.model.segments import scan_layers, segments


class LayerAux(NamedTuple):
    """What training wants to know of the layers of one unit member, with a leading axis over
    repeats.

    chosen: [n, B, S, A] experts. weights: [n, B, S, A]. scores: [n, B, S, E].
    index_scores: [n, B, S, entries] of the indexer (-inf: not visible), or None; index_target: the
      same shape, how much attention all heads together paid to each entry (sums to at most 1; no
      gradient), or None.
    """

    chosen: jax.Array
    weights: jax.Array
    scores: jax.Array
    index_scores: jax.Array | None
    index_target: jax.Array | None


def forward(main: MainModel, tokens: jax.Array):
    """tokens [B, S] -> logits [B, S, V] float32, captured hidden [B, S, N*D], and a LayerAux for
    each unit member of each segment.
    """
    y, hidden, aux = trunk(main, tokens)
    return main.logits(y), hidden, aux


def trunk(main: MainModel, tokens: jax.Array):
    """Like `forward`, but returns the collapsed output [B, S, D] in front of the head."""
    config = main.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    turns = [rotation(config, compressed, positions) for compressed in (False, True)]
    streams, mask, auxiliary = main.streams(tokens), jnp.ones(tokens.shape, bool), []
    taps = jnp.zeros((config.n_hidden_taps, *streams[0].shape), streams[0].dtype)
    for plan, blocks in zip(segments(config), main.segments):

        def body(blocks, index, carry, plan=plan):
            (streams, taps), outs = carry, []
            for member, block in enumerate(blocks):

                def attend(x, block=block):
                    return _attend(block, config, x, positions, turns[block.kind.ratio > 0])

                streams, index_aux, routing = block(streams, attend, tokens, mask, "prefill")
                taps = capture(config, taps, plan, member, index, streams)
                outs.append(LayerAux(*routing, *index_aux))
            return (streams, taps), outs

        (streams, taps), outs = scan_layers(blocks, (streams, taps), body, whole_experts=False)
        auxiliary.append(outs)
    return main.collapse(streams), flatten_taps(taps), auxiliary


def _attend(block, config, x, positions, turn):
    attn, ratio = block.attn, block.kind.ratio
    low, q = attn.queries(x, turn)
    running = _absorb_window(start(attn.sink[...], q), q, attn.keys(x, turn), config.sliding_window)
    aux = (None, None)
    count = x.shape[1] // ratio if ratio else 0
    if count:
        entries = attn.quantise_key(_entries(block.compressor, x, positions, count))
        visible = jnp.arange(count) < ((positions + 1) // ratio)[..., None]
        if block.indexer is not None:
            visible, scores = _indexed(
                block.indexer, config, x, low, turn, positions, count, visible
            )
            aux = scores, _attention_paid(running, q, entries, visible)
        running = absorb(running, q, entries, visible)
    return attn.output(finish(running, attn.numerics.dtype), turn), aux


def _absorb_window(running: Running, q, keys, window: int) -> Running:
    """Every row sees the `window` keys up to its own: blocks of `window` rows meet the keys of
    their own block and of the one before.
    """
    batch, rows = q.shape[:2]
    blocks = -(-rows // window)
    pad = blocks * window - rows

    def fold(a):
        a = jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(batch * blocks, window, *a.shape[2:])

    def unfold(a):
        return a.reshape(batch, blocks * window, *a.shape[2:])[:, :rows]

    keys = fold(keys).reshape(batch, blocks, window, -1)
    before = jnp.pad(keys, [(0, 0), (1, 0), (0, 0), (0, 0)])[:, :-1]
    band = jnp.concatenate([before, keys], axis=2).reshape(batch * blocks, 2 * window, -1)
    row, key = np.arange(window)[:, None] + window, np.arange(2 * window)
    visible = np.broadcast_to(
        (key <= row) & (key > row - window), (batch, blocks, window, 2 * window)
    ).copy()
    visible[:, 0, :, :window] = False
    visible = visible.reshape(batch * blocks, window, 2 * window)
    return jax.tree.map(unfold, absorb(jax.tree.map(fold, running), fold(q), band, visible))


def _entries(compressor: Compressor, x, positions, count: int) -> jax.Array:
    """All complete entries of the sequences: [B, count, width]."""
    ratio = compressor.ratio
    inputs = compressor.project(x, positions)[:, : count * ratio]
    windows = inputs.reshape(inputs.shape[0], count, ratio, *inputs.shape[2:])
    if compressor.halves == 2:
        before = jnp.pad(windows, [(0, 0), (1, 0)] + [(0, 0)] * 3)[:, :-1]
        windows = jnp.concatenate([before, windows], axis=2)
    return compressor.pool(windows, jnp.broadcast_to(jnp.arange(count), (x.shape[0], count)))


def _indexed(indexer, config, x, low, turn, positions, count: int, visible):
    """Narrows `visible` to the indexer's choice, and returns its scores. Its inputs get no
    gradient: it is trained by its own loss.
    """
    x, low = jax.lax.stop_gradient(x), jax.lax.stop_gradient(low)
    keys = indexer.quantise(_entries(indexer.compressor, x, positions, count))
    scores = jnp.where(
        visible, indexer.scores(indexer.queries(low, turn), indexer.head_weights(x), keys), -jnp.inf
    )
    if config.index_topk < count:
        chosen = jax.lax.top_k(scores, config.index_topk)[1]
        picked = jnp.put_along_axis(
            jnp.zeros(scores.shape, bool), chosen, True, axis=-1, inplace=False
        )
        visible = visible & picked
    return visible, scores


def _attention_paid(running, q, entries, visible) -> jax.Array:
    """[B, S, entries]: softmax weights of the entries, averaged over heads; window and sink take
    their share of the total.
    """
    q, entries = jax.lax.stop_gradient(q), jax.lax.stop_gradient(entries)
    running = jax.lax.stop_gradient(running)
    scores = jnp.einsum("bthc,bsc->bths", q, entries).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    highest = jnp.maximum(running.highest, scores.max(axis=-1))
    paid = jnp.exp(scores - highest[..., None])
    total = running.total * jnp.exp(running.highest - highest) + paid.sum(axis=-1)
    return jnp.mean(paid / total[..., None], axis=2)


def draft_forward(
    drafter: DSparkDrafter,
    main: MainModel,
    hidden: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
):
    """Teacher-forced drafts at many anchors of each sequence.

    hidden [B, S, N*D] as captured by `forward`; tokens [B, S]; anchors [B, Q] positions (1 <=
    anchor, anchor + K < S + 1).
    Returns logits [B, Q, K, V] (row i predicts the token at anchor + 1 + i; predecessors from
      `tokens`), confidence [B, Q, K].
    """
    config = drafter.config
    window, block_size = config.sliding_window, config.dspark_block_size
    batch, queries = anchors.shape
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    keys = drafter.stage_keys(hidden, rotation(config, False, positions))
    # Each anchor becomes a stream of its own whose ring holds exactly the window up to the seed;
    # out-of-range slots are masked.
    back = anchors[..., None] - window + jnp.arange(window)
    rows = jnp.arange(batch)[:, None, None]
    rings = keys[:, rows, jnp.maximum(back, 0)].reshape(keys.shape[0], batch * queries, window, -1)
    # A ring of `window` slots holds position p in slot p % window.
    place = (jnp.arange(window) - anchors.reshape(-1)[:, None]) % window
    rings = jnp.take_along_axis(rings, place[None, :, :, None], axis=2)
    anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1)
    y, _ = drafter.run_stages(main, rings, anchors.reshape(-1), anchor_tokens, "prefill")
    previous = jnp.take_along_axis(
        tokens[:, None], anchors[..., None] + jnp.arange(block_size), axis=2, mode="clip"
    )
    previous = previous.reshape(batch * queries, block_size)
    logits = drafter.base_logits(main, y) + jax.vmap(drafter.markov_bias, 1, 1)(previous)
    confidence = drafter.confidences(y, previous)
    return (
        logits.reshape(batch, queries, block_size, -1),
        confidence.reshape(batch, queries, block_size),
    )
