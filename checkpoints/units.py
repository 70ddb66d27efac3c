"""What a converted checkpoint is made of: leaves (a parameter of one layer), pieces of them, and
units, each of which is one Orbax checkpoint. `orbax_io` says why.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from dspark_jax.checkpoints.placing import Bounds

UNIT_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of one layer. name: unique, "layers.3.attn.wq_a"; group: its layer; axes: the
    logical name of each, or None.
    """

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Piece:
    """The range start..stop of `leaf` along `axis`; a whole leaf is a range too."""

    leaf: Leaf
    axis: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def bounds(self) -> Bounds:
        """In coordinates of the leaf."""
        return tuple(
            (self.start, self.stop) if i == self.axis else (0, size)
            for i, size in enumerate(self.leaf.shape)
        )

    @property
    def origin(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.bounds)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.leaf.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one Orbax checkpoint holds: at most one piece of a leaf."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def plan_units(leaves: Iterable[Leaf], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Leaves in their order. A unit stays within a layer, and within `unit_bytes` unless a single
    index of a leaf is larger.
    """
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.group, []).append(leaf)
    units = []
    for group, members in groups.items():
        for i, pieces in enumerate(_filled(members, unit_bytes)):
            units.append(Unit(f"{group.rstrip('.') or 'model'}-{i:03d}", tuple(pieces)))
    return units


def _filled(leaves: list[Leaf], unit_bytes: int) -> Iterator[list[Piece]]:
    small, size = [], 0
    for leaf in leaves:
        pieces = _pieces(leaf, unit_bytes)
        if len(pieces) > 1:
            yield from ([piece] for piece in pieces)
            continue
        if small and size + leaf.nbytes > unit_bytes:
            yield small
            small, size = [], 0
        small.append(pieces[0])
        size += leaf.nbytes
    if small:
        yield small


def _pieces(leaf: Leaf, unit_bytes: int) -> list[Piece]:
    free = [i for i, axis in enumerate(leaf.axes) if axis is None]
    axis = max(free, key=lambda i: leaf.shape[i], default=0)
    # Indices along the axis that fit.
    most = max(1, unit_bytes * leaf.shape[axis] // max(1, leaf.nbytes))
    count = -(-leaf.shape[axis] // most) if free else 1
    edges = [leaf.shape[axis] * i // count for i in range(count + 1)]
    return [Piece(leaf, axis, start, stop) for start, stop in itertools.pairwise(edges)]


def describe(unit: Unit, checksums: dict[str, int]) -> dict[str, Any]:
    """The unit as JSON values, with the checksum of each piece; `understand` makes a Unit of it
    again.
    """
    return {
        "name": unit.name,
        "pieces": [
            {
                **dataclasses.asdict(piece.leaf),
                "axis": piece.axis,
                "start": piece.start,
                "stop": piece.stop,
                "checksum": f"{checksums[piece.leaf.name]:016x}",
            }
            for piece in unit.pieces
        ],
    }


def understand(described: dict[str, Any]) -> tuple[Unit, dict[str, int]]:
    """A described unit and its checksums by leaf. Raises KeyError, TypeError, ValueError or
    AttributeError for anything else.
    """
    pieces = []
    for entry in described["pieces"]:
        leaf = Leaf(
            entry["name"],
            entry["group"],
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(entry["axes"]),
        )
        pieces.append(Piece(leaf, entry["axis"], entry["start"], entry["stop"]))
        jnp.dtype(entry["dtype"])  # raises TypeError if it is not a dtype
    checksums = {entry["name"]: int(entry["checksum"], 16) for entry in described["pieces"]}
    return Unit(described["name"], tuple(pieces)), checksums
