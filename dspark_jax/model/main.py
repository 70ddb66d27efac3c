"""The main model (spec section 9): embedding, segments of scanned layers, head; and the rows a
drafter taps.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config import ModelConfig
from dspark_jax.model.cache import Cache
from dspark_jax.model.layers.block import Block
from dspark_jax.model.layers.cached import Rows, attend_cached, new_rows
from dspark_jax.model.layers.hyper_connection import Collapse
from dspark_jax.model.layers.norm import RMSNorm
from dspark_jax.model.layers.numerics import Numerics, dot
from dspark_jax.model.parameters import ColumnsFirst, Maker, Source
from dspark_jax.model.segments import SegmentPlan, scan_layers, segments
from dspark_jax.runtime.sharding import (
    gather_over_model,
    model_index,
    model_shards,
    replicate,
    sum_over_model,
)


class MainModel(nnx.Module):
    """DeepSeek-V4. Tensors `embed.weight`, `layers.*`, `hc_head_*`, `norm.weight` and
    `head.weight`.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, source: Source):
        self.config, self.numerics = config, numerics
        make = Maker(source, ("",), stacked=False)
        table = (config.vocab_size, config.hidden_size)
        self.embed = make("embed.weight", table, "bf16", ("vocab", None), init="embedding")
        self.segments = nnx.List(
            [_segment(config, numerics, source, plan) for plan in segments(config)]
        )
        self.collapse = Collapse(config, numerics.dtype, make)
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, numerics.dtype, make)
        self.head = make("head.weight", table, "bf16", ("vocab", None), product=True)
        # Where the head is cut, every device has the whole of it once more for the drafter, whose
        # inner loop must not communicate.
        self.whole_head = _whole(self.head, numerics.mesh) if numerics.cut else None

    def streams(self, ids: jax.Array):
        """ids [B, T] -> the M equal residual streams they start as."""
        return (self._embedding(ids),) * self.config.hc_mult

    def _embedding(self, ids: jax.Array) -> jax.Array:
        table = self.embed[...]
        if model_shards() == 1:
            return table[ids]
        own = ids - table.shape[0] * model_index()
        held = (own >= 0) & (own < table.shape[0])
        return sum_over_model(jnp.where(held[..., None], table[jnp.where(held, own, 0)], 0))

    def logits(self, y: jax.Array) -> jax.Array:
        """Collapsed output y [B, T, D] -> [B, T, V] float32, with the whole vocabulary on every
        device.
        """
        return gather_over_model(at_least_two_rows(lambda rows: dot(self.norm(rows), self.head), y))

    def draft_head(self) -> nnx.Variable:
        """The head [V, D] as the drafter uses it, whole on every device."""
        return self.head if self.whole_head is None else self.whole_head

    def extend(self, cache: Cache, tokens: jax.Array, valid: jax.Array, regime: str):
        """Computes tokens [B, T] at the cache's position, of which the first valid [B] count; see
        `dspark_jax.extend`.

        Returns the collapsed output y [B, T, D], the captured hidden [B, T, N*D], the written cache
          (position unmoved), the rows.
        """
        rows = new_rows(self.config, cache.position, tokens.shape[1], valid)
        streams = self.streams(tokens)
        taps = jnp.zeros((self.config.n_hidden_taps, *streams[0].shape), streams[0].dtype)
        layers = []
        for plan, blocks, caches in zip(segments(self.config), self.segments, cache.layers):
            (streams, taps, caches) = self._run(
                plan, blocks, (streams, taps, caches), rows, tokens, regime
            )
            layers.append(caches)
        return self.collapse(streams), flatten_taps(taps), cache.replace(layers=tuple(layers)), rows

    def _run(self, plan: SegmentPlan, blocks, carry, rows: Rows, tokens, regime: str):
        def body(blocks, index, carry):
            streams, taps, caches = carry
            for member, block in enumerate(blocks):

                def attend(x, block=block, cache=caches[member]):
                    return attend_cached(block, self.config, x, rows, cache, index)

                streams, written, _ = block(streams, attend, tokens, rows.mask, regime, layer=index)
                caches = (*caches[:member], written, *caches[member + 1 :])
                taps = capture(self.config, taps, plan, member, index, streams)
            return (streams, taps, caches), None

        return scan_layers(blocks, carry, body, whole_experts=True)[0]


def _segment(
    config: ModelConfig, numerics: Numerics, source: Source, plan: SegmentPlan
) -> nnx.List:
    def member(i, kind):
        prefixes = tuple(f"layers.{layer}." for layer in plan.layer_ids(i))
        return Block(config, numerics, kind, Maker(source, prefixes))

    return nnx.List([member(i, kind) for i, kind in enumerate(plan.unit)])


def _whole(head: nnx.Param, mesh: Mesh) -> nnx.Param:
    declared = dataclasses.replace(head.get_metadata("declared"), axes=(None, None))
    held = head.columns if isinstance(head, ColumnsFirst) else head.get_value()
    return type(head)(replicate(mesh, held), declared=declared)


def capture(
    config: ModelConfig, taps: jax.Array, plan: SegmentPlan, member: int, index, streams
) -> jax.Array:
    """Stores the mean of the streams in taps [N, B, T, D] where the drafter taps this layer's
    output (spec section 9).
    """
    targets = config.dspark_target_layer_ids
    places = np.array(
        [targets.index(i) if i in targets else len(targets) for i in plan.layer_ids(member)]
    )
    if (places == len(targets)).all():
        return taps
    mean = sum(s.astype(jnp.float32) for s in streams) / len(streams)
    return taps.at[jnp.asarray(places)[index]].set(mean.astype(taps.dtype), mode="drop")


def flatten_taps(taps: jax.Array) -> jax.Array:
    """[N, B, T, D] -> [B, T, N*D], tapped layers in the order of `dspark_target_layer_ids`."""
    return jnp.moveaxis(taps, 0, 2).reshape(*taps.shape[1:3], -1)


def at_least_two_rows(function, x: jax.Array) -> jax.Array:
    """function(x) for x [..., T, K]; a single row is passed twice, because a CPU multiplies one row
    in another order than several.
    """
    if np.prod(x.shape[:-1]) > 1:
        return function(x)
    return function(jnp.concatenate([x, x], axis=-2))[..., :1, :]
