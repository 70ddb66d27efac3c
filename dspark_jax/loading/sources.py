"""Parameter values from files, of an official checkpoint or a converted one. Both give the same
bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import pallas_kernels
from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint
from dspark_jax.checkpoints.placing import Bounds, place
from dspark_jax.checkpoints.units import Leaf
from dspark_jax.errors import CheckpointError
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.parameters import Declaration, ShapeSource
from dspark_jax.runtime.backend import on_cpu, target
from dspark_jax.runtime.sharding import parameter_sharding

BLOCK_BYTES = 8 << 20  # of float32, read at a time


class StackedSource:
    """Stacks layers to arrays over the mesh. A process reads what its devices hold, and no more.

    Subclasses fill one layer: fill(out, declared, prefix, bounds) writes the slice `bounds` of the
    layer's array into `out`.
    """

    def __init__(self, numerics: Numerics, packed_experts: bool):
        self.numerics, self.packed_experts, self.columns_first = numerics, packed_experts, on_cpu()

    def __call__(self, declared: Declaration, prefixes: tuple[str, ...]) -> jax.Array:
        shape = declared.array_shape(len(prefixes))
        dtype = declared.array_dtype(self.numerics.dtype)

        def part(bounds: Bounds) -> np.ndarray:
            out = np.empty([stop - start for start, stop in bounds], dtype)
            for i, prefix in enumerate(prefixes):
                layer, cut = (out[i], bounds[1:]) if declared.stacked else (out, bounds)
                if declared.columns_first:
                    layer, cut = np.swapaxes(layer, -1, -2), declared.held(cut)
                self.fill(layer, declared, prefix, cut)
                if declared.part == "scale":
                    self._check_scales(layer, declared, prefix, cut)
            return out

        return place(shape, parameter_sharding(self.numerics.mesh, declared), part)

    def _check_scales(
        self, values: np.ndarray, declared: Declaration, prefix: str, bounds: Bounds
    ) -> None:
        """Refuses scales of packed experts that the platform's kernel cannot compute with."""
        largest = pallas_kernels.largest_scale(target())
        if values.max(initial=0) <= largest:
            return
        expert, row, column = (
            int(i) + start for i, (start, _) in zip(np.argwhere(values > largest)[0], bounds)
        )
        spec, at = next(
            piece
            for piece in declared.pieces(prefix)
            if piece[1][0] == expert and piece[1][1].start <= row < piece[1][1].stop
        )
        byte = int(values[tuple(np.argwhere(values > largest)[0])])
        raise CheckpointError(
            f"{self.checkpoint.path}: {spec.name}.scale[{row - at[1].start}, {column}] is e8m0 "
            f"byte {byte}, 2^{byte - 127}; the kernel for {target()} takes scales up to byte "
            f"{largest}. No trained model has such weights: the file is damaged, copy it again"
        )


class OfficialSource(StackedSource):
    """Values of an official checkpoint."""

    def __init__(self, checkpoint: OfficialCheckpoint, numerics: Numerics, packed_experts: bool):
        super().__init__(numerics, packed_experts)
        self.checkpoint = checkpoint

    def fill(self, out, declared, prefix, bounds):
        read_official(self.checkpoint, out, declared, prefix, bounds)


class ConvertedSource(StackedSource):
    """Values of a converted checkpoint."""

    def __init__(self, checkpoint: ConvertedCheckpoint, numerics: Numerics, packed_experts: bool):
        super().__init__(numerics, packed_experts)
        self.checkpoint = checkpoint

    def fill(self, out, declared, prefix, bounds):
        if declared.storage != "fp4" or declared.part != "value":
            out[...] = self.checkpoint.read(
                leaf_name(declared.tensor, declared.part, prefix), bounds
            )
            return
        (first, last), rows, (_, width) = bounds  # experts are cut along the first axis only
        parts = [
            (leaf_name(declared.tensor, part, prefix), width // divisor)
            for part, divisor in (("packed", 2), ("scale", formats.FP4_BLOCK))
        ]
        for e in range(first, last):
            codes, scales = (
                self.checkpoint.read(name, ((e, e + 1), rows, (0, columns)))
                for name, columns in parts
            )
            out[e - first] = formats.dequantise_fp4(codes[0], scales[0])


class LeafRecorder(ShapeSource):
    """Shapes, and what a conversion stores: every parameter of every layer, routed experts packed.

    leaves: by name. declared: the declaration of each, and the prefix of its layer.
    """

    def __init__(self):
        # bfloat16 holds bf16 and dequantised FP8 exactly.
        super().__init__(jnp.bfloat16, packed_experts=True)
        self.leaves: dict[str, Leaf] = {}
        self.declared: dict[str, tuple[Declaration, str]] = {}

    def __call__(self, declared: Declaration, prefixes: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        array = super().__call__(declared, prefixes)
        shape = array.shape[1:] if declared.stacked else array.shape
        for prefix in prefixes:
            name = leaf_name(declared.tensor, declared.part, prefix)
            self.leaves[name] = Leaf(name, prefix, shape, array.dtype.name, declared.axes)
            self.declared[name] = declared, prefix
        return array


def leaf_name(tensor: str, part: str, prefix: str) -> str:
    """ "layers.3.ffn.experts.w1-ffn.experts.w3.packed": what a converted checkpoint calls a
    parameter of one layer.
    """
    return (
        prefix
        + tensor.replace("{e}.", "").replace("|", "-")
        + ("" if part == "value" else f".{part}")
    )


def read_official(
    checkpoint: OfficialCheckpoint,
    out: np.ndarray,
    declared: Declaration,
    prefix: str,
    bounds: Bounds,
) -> None:
    """Fills `out` with the slice `bounds` of one layer's array. Raises CheckpointError for a value
    that its dtype cannot hold.
    """
    cut = [slice(*b) for b in bounds]
    for spec, at in declared.pieces(prefix):
        if not declared.expert:
            _read_dense(checkpoint, spec, out, cut)
        elif cut[0].start <= at[0] < cut[0].stop:
            start, stop = max(cut[1].start, at[1].start), min(cut[1].stop, at[1].stop)
            if start < stop:
                to = out[at[0] - cut[0].start, start - cut[1].start : stop - cut[1].start]
                _read_expert(
                    checkpoint,
                    spec,
                    to,
                    slice(start - at[1].start, stop - at[1].start),
                    declared.part,
                )


def _read_dense(checkpoint, spec, out: np.ndarray, cut: list[slice]) -> None:
    """Block of rows by block of rows, because dequantising takes several times the memory of its
    result.
    """
    if out.ndim != 2:
        out[...] = checkpoint.read(spec, *cut)
        return
    step = max(formats.FP8_BLOCK, BLOCK_BYTES // (4 * out.shape[1]))
    for i in range(0, out.shape[0], step):
        block = out[i : i + step]
        values = checkpoint.read(
            spec, slice(cut[0].start + i, cut[0].start + i + block.shape[0]), cut[1]
        )
        block[...] = values
        if (
            spec.storage == "fp8"
            and out.dtype != values.dtype
            and not np.array_equal(block, values)
        ):
            raise CheckpointError(
                f"{checkpoint.path}: {spec.name} holds NaN or values below the range of "
                f"{out.dtype.name}: the file is damaged, copy it again"
            )


def _read_expert(checkpoint, spec, out: np.ndarray, rows: slice, part: str) -> None:
    if part == "value":
        out[...] = checkpoint.read(spec, rows)
    elif part == "packed":
        out[...] = checkpoint.read_codes(spec, rows)
    else:
        out[...] = checkpoint.read_scales(spec, rows)
