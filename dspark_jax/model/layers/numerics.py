"""Precision and devices of a model, and the products everything is built from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.model.parameters import ColumnsFirst
from dspark_jax.pallas_kernels import products
from dspark_jax.pallas_kernels.activation import act_quant, act_quant_of_part
from dspark_jax.pallas_kernels.products import precision
from dspark_jax.runtime import sharding
from dspark_jax.runtime.backend import longest_sum


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How and where a model computes.

    dtype: compute dtype name, "float32" or "bfloat16". activation_quant: simulate the official
      FP8/FP4 activation quantisation.
    requested_mesh: the mesh the arrays are cut over (sharding.py); None: this process's first
      device.
    """

    dtype: str = "float32"
    activation_quant: bool = True
    requested_mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh:
        return self.requested_mesh or sharding.single_device()

    @property
    def cut(self) -> bool:
        """Whether arrays are cut over several devices. Asks for no device: shapes need none."""
        return self.requested_mesh is not None and self.mesh.shape[sharding.MODEL] > 1

    def quantise(self, x: jax.Array, block: int) -> jax.Array:
        return act_quant(x, block) if self.activation_quant else x

    def linear(self, x: jax.Array, weight: nnx.Variable) -> jax.Array:
        """A linear whose weight is stored FP8 (spec section 3, lin). x [..., K], weight [N, K] ->
        [..., N] in the compute dtype.
        """
        return dot(self.quantise(x, 128), weight).astype(self.dtype)

    def summed_linear(self, x: jax.Array, weight: nnx.Variable) -> jax.Array:
        """`linear` where the K channels of x [..., K] and weight [N, K] are cut over the model
        axis: the devices' products are summed.
        """
        if self.activation_quant:
            x = (
                act_quant_of_part(x, 128, sharding.MODEL)
                if sharding.model_shards() > 1
                else act_quant(x, 128)
            )
        return sharding.sum_over_model(dot(x, weight)).astype(self.dtype)


def dot(x: jax.Array, weight: nnx.Variable) -> jax.Array:
    """x [..., K] times the parameter weight [N, K] transposed -> [..., N] float32, accumulated in
    float32.

    A parameter that its source stored columns first, [K, N], is multiplied for decoding: where a
    backend would split a long sum by the number of rows, it is split here instead, always at the
    same places.
    """
    if isinstance(weight, ColumnsFirst):
        return dot_columns(x, weight.columns)
    return _dot(x, weight[...])


def dot_parts(parts: list[jax.Array], weight: nnx.Variable) -> jax.Array:
    """`dot` of the parts, concatenated along their last axis; for whole sequences the products are
    summed instead, which saves a copy.
    """
    if isinstance(weight, ColumnsFirst):
        return dot(jnp.concatenate(parts, axis=-1), weight)
    width = parts[0].shape[-1]
    return sum(_dot(part, weight[:, i * width : (i + 1) * width]) for i, part in enumerate(parts))


def dot_columns(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., K] times weight [K, N] -> [..., N] float32; a row's bits depend on that row only,
    also on a CPU.
    """
    return products.dot_columns(x, weight, longest_sum())


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision(x),
        preferred_element_type=jnp.float32,
    )
