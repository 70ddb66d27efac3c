"""One declaration per parameter: it gives the shape, the dtype, the logical axes, the initial value
and the checkpoint tensors.

A module's constructor calls `make(tensor, shape, storage, axes)` for each of its parameters. What
that returns is decided by the `Source` that `make` draws from: random values, values of an official
checkpoint, or shapes only. So the loader, the sharding, the initialiser and the exporter cannot
disagree about a parameter.

Equal layers are stacked: a parameter of n layers is one array [n, *shape], and its declaration
describes one layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoints.tensor_spec import TensorSpec, hyper_connection_base

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What one parameter of one layer is.

    tensor: official tensor name without the layer's prefix ("attn.wq_a"); for routed experts a
      pattern with `{e}`, several joined by "|" when they lie one after another along the rows
      ("ffn.experts.{e}.w1|ffn.experts.{e}.w3").
    shape: logical shape of one layer's array, of a routed expert parameter with the expert axis
      first.
    storage: how the official checkpoint stores it: "bf16", "f32", "i64", "fp8" or "fp4".
    axes: one logical axis name (or None) for each dimension of `shape`; sharding.py maps them to
      mesh axes.
    init: "normal" (variance 1/fan-in), "ones", "zeros", "embedding" (unit variance), "hc_base", or
      "hash" followed by the number of experts; for random models.
    part: "value", or for packed FP4 experts "packed" (two e2m1 codes a byte) and "scale" (e8m0, one
      per 32 along K).
    stacked: the array has a leading axis over the layers of its group.
    columns_first: the array of a weight [N, K] is held as [K, N]: a CPU multiplies a few rows with
      it up to twenty times faster. What `parameter[...]` reads and sets is [N, K] all the same
      (ColumnsFirst); `nnx.split` gives arrays as they are held.
    """

    tensor: str
    shape: tuple[int, ...]
    storage: str
    axes: tuple[str | None, ...]
    init: str = "normal"
    part: str = "value"
    stacked: bool = True
    columns_first: bool = False

    @property
    def expert(self) -> bool:
        return "{e}" in self.tensor

    @property
    def hashed_experts(self) -> int | None:
        """Of a hash table: how many experts its ids choose from."""
        return int(self.init.removeprefix("hash")) if self.init.startswith("hash") else None

    def pieces(self, prefix: str) -> Iterator[tuple[TensorSpec, tuple]]:
        """The official tensors of one layer, each with the place it takes in the layer's array
        (logical coordinates).
        """
        if not self.expert:
            yield (
                TensorSpec(prefix + self.tensor, self.shape, self.storage, self.hashed_experts),
                (),
            )
            return
        patterns = self.tensor.split("|")
        rows = self.shape[1] // len(patterns)
        for e in range(self.shape[0]):
            for i, pattern in enumerate(patterns):
                spec = TensorSpec(prefix + pattern.format(e=e), (rows, self.shape[2]), self.storage)
                yield spec, (e, slice(i * rows, (i + 1) * rows))

    def array_shape(self, layers: int) -> tuple[int, ...]:
        """Shape of the array that is held: packed bytes and scales are narrower than the logical
        values.
        """
        divisor = {"value": 1, "packed": 2, "scale": 32}[self.part]
        shape = self.held((*self.shape[:-1], self.shape[-1] // divisor))
        return (layers, *shape) if self.stacked else shape

    def held(self, sizes: tuple) -> tuple:
        """What belongs to the axes of `shape` (sizes, bounds, names), in the order in which the
        array holds the axes; its own inverse.
        """
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.columns_first else tuple(sizes)

    def array_dtype(self, compute) -> np.dtype:
        if self.part != "value":
            return jnp.dtype(jnp.uint8)
        if self.storage == "i64":
            return jnp.dtype(jnp.int32)
        keep_float32 = self.storage == "f32" or len(self.shape) == 1
        return jnp.dtype(jnp.float32 if keep_float32 else compute)


class Constant(nnx.Variable):
    """A parameter that gradients do not reach: hash tables and packed bytes."""


class ColumnsFirst(nnx.Param):
    """A weight [..., N, K] whose array is [..., K, N]. It reads and is set as [..., N, K], by
    `[...]` only.
    """

    def get_value(self, **options):
        value = super().get_value(**options)
        if isinstance(value, (jax.Array, np.ndarray)):
            return jnp.swapaxes(value, -1, -2)
        shape = getattr(value, "shape", ())  # what flax shows in place of the array
        if dataclasses.is_dataclass(value) and len(shape) > 1:
            return dataclasses.replace(value, shape=(*shape[:-2], shape[-1], shape[-2]))
        return value

    def set_value(self, value, **options):
        super().set_value(jnp.swapaxes(value, -1, -2), **options)

    @property
    def columns(self) -> Array:
        """The array [..., K, N]. Turned back: in a compiled program nothing is left of that."""
        return jnp.swapaxes(self[...], -1, -2)


class Source(Protocol):
    """Where parameter values come from."""

    packed_experts: bool
    columns_first: bool  # hold the weights of products so, see Declaration

    def __call__(
        self, declaration: Declaration, prefixes: tuple[str, ...]
    ) -> Array | jax.ShapeDtypeStruct: ...


class Maker:
    """Makes the parameters of one group of layers.

    source: where values come from.
    prefixes: the official name prefix of each layer of the group, "layers.3." say; ("",) with
      stacked=False for the parts that exist once.
    """

    def __init__(self, source: Source, prefixes: tuple[str, ...], stacked: bool = True):
        self.source, self.prefixes, self.stacked = source, prefixes, stacked

    def __call__(
        self,
        tensor: str,
        shape: tuple[int, ...],
        storage: str,
        axes=None,
        init: str = "normal",
        part: str = "value",
        product: bool = False,
    ):
        """product: the parameter is a weight of `numerics.dot`."""
        axes = tuple(axes) if axes is not None else (None,) * len(shape)
        declared = Declaration(
            tensor,
            tuple(shape),
            storage,
            axes,
            init,
            part,
            self.stacked,
            product and self.source.columns_first,
        )
        value = self.source(declared, self.prefixes)
        kind = Constant if part != "value" or storage == "i64" else nnx.Param
        return (ColumnsFirst if declared.columns_first else kind)(value, declared=declared)

    @property
    def packed_experts(self) -> bool:
        return self.source.packed_experts


class ShapeSource:
    """Shapes and dtypes only, cut by sharding(declaration) if given.

    asked: every parameter that was asked for, its declaration and the prefixes of its layers.
    """

    columns_first = False

    def __init__(
        self, dtype=jnp.float32, packed_experts: bool = False, sharding: Callable | None = None
    ):
        self.dtype, self.packed_experts, self._sharding = dtype, packed_experts, sharding
        self.asked: list[tuple[Declaration, tuple[str, ...]]] = []

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Name -> every official tensor of these parameters."""
        pieces = (d.pieces(prefix) for d, prefixes in self.asked for prefix in prefixes)
        return {spec.name: spec for of_layer in pieces for spec, _ in of_layer}

    def __call__(self, declared, prefixes):
        self.asked.append((declared, prefixes))
        sharding = self._sharding(declared) if self._sharding else None
        return jax.ShapeDtypeStruct(
            declared.array_shape(len(prefixes)), declared.array_dtype(self.dtype), sharding=sharding
        )


class RandomSource:
    """Random values that keep activations near unit scale, for training from scratch and for
    tests.
    """

    packed_experts = columns_first = False

    def __init__(self, seed: int, dtype=jnp.float32):
        self._rng, self.dtype = np.random.default_rng(seed), dtype

    def __call__(self, declared, prefixes):
        shape = declared.array_shape(len(prefixes))
        return jnp.asarray(self._value(declared, shape), declared.array_dtype(self.dtype))

    def _value(self, declared, shape):
        if declared.hashed_experts:
            # Every token gets distinct experts, every expert about the same number of tokens.
            start = self._rng.integers(0, declared.hashed_experts, shape[:-1])[..., None]
            return (start + np.arange(shape[-1])) % declared.hashed_experts
        if declared.init in ("ones", "zeros"):
            return np.full(shape, float(declared.init == "ones"))
        if declared.init == "hc_base":
            return np.broadcast_to(hyper_connection_base(shape[-1]), shape)
        scale = 1.0 if declared.init == "embedding" else 1.0 / math.sqrt(declared.shape[-1])
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
