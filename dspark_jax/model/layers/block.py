"""One layer: hyper-connections around attention, then around the mixture of experts (spec section
4).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.attention import Attention
from dspark_jax.model.layers.compressor import Compressor
from dspark_jax.model.layers.hyper_connection import HyperConnection, Streams
from dspark_jax.model.layers.indexer import Indexer
from dspark_jax.model.layers.moe import MoE
from dspark_jax.model.layers.norm import RMSNorm
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.segments import LayerKind


class Block(nnx.Module):
    """A layer of the main model, or a stage of the drafter. Its parameters carry a leading layer
    axis until scanned.
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, kind: LayerKind, make):
        self.kind = kind
        self.hc_attn = HyperConnection(config, "attn", numerics.dtype, make)
        self.attn_norm = RMSNorm(
            "attn_norm", config.hidden_size, config.rms_norm_eps, numerics.dtype, make
        )
        self.attn = Attention(config, numerics, make)
        compressed, indexed = kind.ratio > 0, kind.overlapped
        self.compressor = (
            Compressor(config, numerics, "attn.compressor", config.head_dim, kind, make)
            if compressed
            else None
        )
        self.indexer = Indexer(config, numerics, kind, make) if indexed else None
        self.hc_ffn = HyperConnection(config, "ffn", numerics.dtype, make)
        self.ffn_norm = RMSNorm(
            "ffn_norm", config.hidden_size, config.rms_norm_eps, numerics.dtype, make
        )
        self.ffn = MoE(config, numerics, kind.hashed, make)

    def __call__(
        self,
        streams: Streams,
        attend: Callable,
        ids: jax.Array,
        mask: jax.Array,
        regime: str,
        layer=None,
    ):
        """streams M x [B, T, D]; attend(x [B, T, D]) -> (y [B, T, D], what it leaves); ids, mask
        [B, T].

        Returns the streams, what `attend` left, and the routing (see MoE). layer: index into
          experts that kept their layer axis.
        """
        x, weights = self.hc_attn.collapse(streams)
        y, left = attend(self.attn_norm(x))
        streams = self.hc_attn.expand(streams, y, weights)
        x, weights = self.hc_ffn.collapse(streams)
        y, routing = self.ffn(self.ffn_norm(x), ids, mask, regime, layer)
        return self.hc_ffn.expand(streams, y, weights), left, routing
