"""Compressor (spec section 6): every R tokens become one key/value entry, pooled by a softmax over
tokens per channel.

Ratio 4 overlaps: an entry pools the tokens of its own window and of the one before. Inputs and
pooling are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.layers.norm import RMSNorm
from dspark_jax.model.layers.numerics import Numerics, dot
from dspark_jax.model.layers.rope import rotate, rotation
from dspark_jax.model.segments import LayerKind


class Compressor(nnx.Module):
    """Tensors `{prefix}.wkv.weight`, `.wgate.weight` [O*width, D] bf16, `.ape` [R, O*width] f32,
    `.norm.weight` [width] bf16.

    O is 2 for the overlapped ratio 4 and 1 otherwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        numerics: Numerics,
        prefix: str,
        width: int,
        kind: LayerKind,
        make,
    ):
        self.config, self.width, self.ratio = config, width, kind.ratio
        self.halves = 2 if kind.overlapped else 1
        size = self.halves * width
        self.wkv = make(f"{prefix}.wkv.weight", (size, config.hidden_size), "bf16", product=True)
        self.wgate = make(
            f"{prefix}.wgate.weight", (size, config.hidden_size), "bf16", product=True
        )
        self.ape = make(f"{prefix}.ape", (self.ratio, size), "f32", init="zeros")
        self.norm = RMSNorm(f"{prefix}.norm", width, config.rms_norm_eps, numerics.dtype, make)

    @property
    def members(self) -> int:
        """How many tokens an entry pools."""
        return self.halves * self.ratio

    def project(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [B, T, D], positions [B, T] -> [B, T, 2 (value, gate score), O*width] float32."""
        gate = dot(x, self.wgate) + self.ape[...][positions % self.ratio]
        return jnp.stack([dot(x, self.wkv), gate], axis=2)

    def pool(self, inputs: jax.Array, first: jax.Array) -> jax.Array:
        """inputs [B, E, members, 2, O*width] of E entries in token order, first [B, E] entry ids ->
        rotated entries [B, E, width].

        What comes before token 0 takes no part: the older half of entry 0 is masked, whatever it
        holds.
        """
        value, gate = inputs[..., 0, :], inputs[..., 1, :]
        if self.halves == 2:
            value, gate = self._own_half(value), self._own_half(gate)
            absent = (first == 0)[..., None] & (jnp.arange(self.members) < self.ratio)
            gate = jnp.where(absent[..., None], -jnp.inf, gate)
        pooled = jnp.sum(jax.nn.softmax(gate, axis=2) * value, axis=2)
        return rotate(self.norm(pooled), rotation(self.config, True, first * self.ratio))

    def _own_half(self, x: jax.Array) -> jax.Array:
        """The tokens of the window before take part with their first half of channels, the entry's
        own tokens with the second.
        """
        return jnp.concatenate(
            [x[:, :, : self.ratio, : self.width], x[:, :, self.ratio :, self.width :]], axis=2
        )
