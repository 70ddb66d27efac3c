"""The DSpark drafter (spec section 11): three stages, a Markov head and a confidence head on top of
the main model's hidden states.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx, struct

from dspark_jax.config import ModelConfig
from dspark_jax.model.cache import in_window, write
from dspark_jax.model.drafter import Choose, Draft, most_likely
from dspark_jax.model.layers.attention import absorb, finish, start
from dspark_jax.model.layers.block import Block
from dspark_jax.model.layers.cached import Rows
from dspark_jax.model.layers.hyper_connection import Collapse
from dspark_jax.model.layers.norm import RMSNorm
from dspark_jax.model.layers.numerics import Numerics, dot
from dspark_jax.model.layers.rope import rotation
from dspark_jax.model.main import MainModel, at_least_two_rows
from dspark_jax.model.parameters import Maker, Source
from dspark_jax.model.segments import LayerKind, scan_layers


@struct.dataclass
class DraftCache:
    """What the drafter remembers of B streams.

    rings: [Z, B, W + rows, C] compute dtype; each stage's keys of the main model's captured hidden,
      slot = position % (W + rows).
    """

    rings: jax.Array


class DSparkDrafter(nnx.Module):
    """DSpark's `Drafter`. Tensors `mtp.*`. It uses the main model's embedding and head."""

    def __init__(self, config: ModelConfig, numerics: Numerics, source: Source):
        self.config, self.numerics = config, numerics
        d, v, last = config.hidden_size, config.vocab_size, config.n_draft_stages - 1
        stages = Maker(source, tuple(f"mtp.{s}." for s in range(config.n_draft_stages)))
        first = Maker(source, ("mtp.0.",), stacked=False)
        final = Maker(source, (f"mtp.{last}.",), stacked=False)
        self.stages = nnx.List([Block(config, numerics, LayerKind(ratio=0, hashed=False), stages)])
        self.main_proj = first("main_proj", (d, config.n_hidden_taps * d), "fp8", product=True)
        self.main_norm = RMSNorm("main_norm", d, config.rms_norm_eps, numerics.dtype, first)
        self.collapse = Collapse(config, numerics.dtype, final)
        self.norm = RMSNorm("norm", d, config.rms_norm_eps, numerics.dtype, final)
        rank = config.dspark_markov_rank
        self.markov_w1 = final("markov_head.markov_w1.weight", (v, rank), "bf16", init="embedding")
        self.markov_w2 = final("markov_head.markov_w2.weight", (v, rank), "bf16", product=True)
        self.confidence = final("confidence_head.proj.weight", (1, d + rank), "bf16")

    def main_x(self, hidden: jax.Array) -> jax.Array:
        """Captured hidden [B, T, N*D] -> what the stages' keys are made of, [B, T, D]."""
        return self.main_norm(self.numerics.linear(hidden, self.main_proj))

    def stage_keys(self, hidden: jax.Array, turn) -> jax.Array:
        """hidden [B, T, N*D] and its rotation -> [Z, B, T, C], the keys of every stage."""
        x = self.main_x(hidden)
        return scan_layers(
            self.stages,
            None,
            lambda blocks, i, carry: (carry, blocks[0].attn.keys(x, turn)),
            whole_experts=True,
        )[1]

    @staticmethod
    def new_cache(
        config: ModelConfig, batch: int, max_seq_len: int, rows: int, dtype
    ) -> DraftCache:
        slots = config.sliding_window + rows
        return DraftCache(jnp.zeros((config.n_draft_stages, batch, slots, config.head_dim), dtype))

    def prime(
        self, main: MainModel, cache: DraftCache, tokens: jax.Array, hidden: jax.Array, rows: Rows
    ) -> DraftCache:
        """Writes the stage rings; the keys come from `hidden` alone."""
        rings, slots = cache.rings, rows.positions % cache.rings.shape[2]
        # Stage by stage: for all at once a TPU would first copy the rings to another layout.
        for stage, keys in enumerate(self.stage_keys(hidden, rows.plain)):
            rings = write(rings, stage, slots, rows.mask, keys)
        return cache.replace(rings=rings)

    def draft(
        self,
        main: MainModel,
        cache: DraftCache,
        position: jax.Array,
        token: jax.Array,
        hidden: jax.Array | None = None,
        choose: Choose = most_likely,
    ) -> Draft:
        """`hidden` replaces the seed's key in the rings."""
        rings = cache.rings
        if hidden is not None:
            rings = self._replace_seed(rings, position - 1, hidden)
        y = self.run_stages(main, rings, position, token)[0]
        return self.decode(main, y, token, position, choose)

    def _replace_seed(self, rings: jax.Array, seed: jax.Array, hidden: jax.Array) -> jax.Array:
        """A copy of the rings with the keys of `hidden` [B, N*D] at position `seed` [B]."""
        turn = rotation(self.config, False, seed[:, None])
        # Two rows, as in every other call: a CPU multiplies a single row in another order.
        keys = self.stage_keys(jnp.stack([hidden, hidden], axis=1), turn)[:, :, 0]
        streams, slots = jnp.arange(seed.shape[0]), seed % rings.shape[2]
        return rings.at[:, streams, slots].set(keys.astype(rings.dtype))

    def run_stages(
        self,
        main: MainModel,
        rings: jax.Array,
        position: jax.Array,
        token: jax.Array,
        regime: str = "decode",
    ):
        """rings [Z, B, ring, C], position and token [B] -> collapsed y [B, K, D], and of every
        stage (streams, chosen experts).

        Every row sees the window up to the seed, at position - 1, and the whole block, which is
        never written to the rings.
        """
        block_size = self.config.dspark_block_size
        noise = jnp.full(
            (*token.shape, block_size - 1), self.config.dspark_noise_token_id, token.dtype
        )
        ids = jnp.concatenate([token[:, None], noise], axis=1)
        turn = rotation(self.config, False, position[:, None] + jnp.arange(block_size))
        visible = in_window(position - 1, rings.shape[2], self.config.sliding_window)
        visible = jnp.broadcast_to(visible[:, None], (*ids.shape, rings.shape[2]))

        def body(blocks, index, streams):
            def attend(x):
                return self._attend(blocks[0].attn, x, turn, rings[index], visible)

            streams, _, routing = blocks[0](
                streams, attend, ids, jnp.ones(ids.shape, bool), regime, layer=index
            )
            return streams, (streams, routing[0])

        streams, stages = scan_layers(self.stages, main.streams(ids), body, whole_experts=True)
        return self.collapse(streams), stages

    def _attend(self, attn, x, turn, ring, visible):
        _, q = attn.queries(x, turn)
        running = absorb(start(attn.sink[...], q), q, ring, visible)
        block = attn.keys(x, turn)
        running = absorb(running, q, block, jnp.ones((*x.shape[:2], x.shape[1]), bool))
        return attn.output(finish(running, self.numerics.dtype), turn), None

    def base_logits(self, main: MainModel, y: jax.Array) -> jax.Array:
        """y [B, K, D] -> [B, K, V] float32, before the Markov term."""
        return dot(self.norm(y), main.draft_head())

    def decode(
        self,
        main: MainModel,
        y: jax.Array,
        token: jax.Array,
        position: jax.Array,
        choose: Choose = most_likely,
    ) -> Draft:
        """The Markov head from left to right: each position adds what its predecessor's token says,
        then chooses. y [B, K, D]; the anchor `token` [B] stands at `position` [B].
        """

        def step(previous, row):
            base, offset = row
            logits = base + self.markov_bias(previous)
            best = choose(logits, position + offset).astype(token.dtype)
            return best, (best, logits, previous, jnp.isfinite(jnp.max(logits, axis=-1)))

        base = jnp.moveaxis(self.base_logits(main, y), 1, 0)
        offsets = 1 + jnp.arange(base.shape[0], dtype=position.dtype)
        tokens, logits, previous, finite = jax.tree.map(
            lambda a: jnp.moveaxis(a, 0, 1), jax.lax.scan(step, token, (base, offsets))[1]
        )
        return Draft(tokens, logits, jnp.where(finite, self.confidences(y, previous), jnp.nan))

    def markov_bias(self, previous: jax.Array) -> jax.Array:
        """previous [B] token ids -> [B, V] float32."""
        return at_least_two_rows(lambda x: dot(x, self.markov_w2), self.markov_w1[...][previous])

    def confidences(self, y: jax.Array, previous: jax.Array) -> jax.Array:
        """y [B, K, D] before the norm, previous [B, K] token ids -> [B, K] float32, raw (no
        sigmoid).
        """
        features = jnp.concatenate(
            [y, self.markov_w1[...][previous].astype(y.dtype)], axis=-1
        ).astype(jnp.float32)
        return jnp.sum(features * self.confidence[...][0].astype(jnp.float32), axis=-1)
