"""The parts of a conversion alone: checksums that add up, units that cover every leaf once, one
read a part of an array.
"""

import itertools
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.checkpoints.checksum import checksum, total
from dspark_jax.checkpoints.placing import first_owners, place
from dspark_jax.checkpoints.units import Leaf, plan_units

RNG = np.random.default_rng(5)


def random_array(shape, dtype):
    return RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((5, 4, 24), np.uint8),
        ((7, 33), ml_dtypes.bfloat16),
        ((3, 10), np.float32),
        ((11,), np.float32),
        ((3,), ml_dtypes.bfloat16),
        ((2, 3, 5), np.uint8),
    ],
)
def test_checksums_of_slices_add_up(shape, dtype):
    values = random_array(shape, dtype)
    whole = checksum(values, shape, (0,) * len(shape))
    for cuts in itertools.product(
        *[(1, 2, size) for size in shape]
    ):  # in steps of 1, 2 and the whole axis
        parts = []
        for origin in itertools.product(*[range(0, size, step) for size, step in zip(shape, cuts)]):
            cut = tuple(slice(o, o + step) for o, step in zip(origin, cuts))
            parts.append(checksum(values[cut], shape, origin))
        assert total(parts) == whole, cuts


def test_every_changed_byte_and_exchanged_rows_are_seen():
    values = random_array((6, 40), np.uint8)
    whole = checksum(values, values.shape, (0, 0))
    for i, j, bit in itertools.product(range(6), range(40), (0, 3, 7)):
        changed = values.copy()
        changed[i, j] ^= 1 << bit
        assert checksum(changed, values.shape, (0, 0)) != whole
    for i, j in itertools.combinations(range(6), 2):
        order = np.arange(6)
        order[[i, j]] = j, i
        assert checksum(values[order], values.shape, (0, 0)) != whole
    for i, j in itertools.combinations(range(5), 2):
        words = values.view("<u8").copy()
        words[:, [i, j]] = words[:, [j, i]]
        assert checksum(words.view(np.uint8), values.shape, (0, 0)) != whole


def test_units_hold_every_element_once():
    leaves = [
        Leaf("a.small", "a.", (3,), "float32", (None,)),
        Leaf("a.large", "a.", (8, 100, 64), "uint8", ("experts", None, None)),
        Leaf("a.next", "a.", (3, 5), "bfloat16", (None, None)),
        Leaf("head", "", (512, 60), "bfloat16", ("vocab", None)),
        Leaf("a.cut", "a.", (4096, 8), "float32", ("vocab", "heads")),
        Leaf("b.row", "b.", (1, 9000), "uint8", (None, None)),
    ]
    units = plan_units(leaves, unit_bytes=5000)
    assert len({unit.name for unit in units}) == len(units)
    count = {leaf.name: np.zeros(leaf.shape, np.uint8) for leaf in leaves}
    for unit in units:
        assert len({piece.leaf.group for piece in unit.pieces}) == 1
        assert len({piece.leaf.name for piece in unit.pieces}) == len(unit.pieces)
        assert unit.nbytes == sum(
            math.prod(p.shape) * np.dtype(p.leaf.dtype).itemsize for p in unit.pieces
        )
        for piece in unit.pieces:
            count[piece.leaf.name][tuple(slice(*b) for b in piece.bounds)] += 1
            if piece.shape != piece.leaf.shape:
                assert piece.leaf.axes[piece.axis] is None, "an axis that a mesh cuts"
        # 8 experts x 64 columns of one byte: the smallest range of `a.large` is 512 bytes. `a.cut`
        # has no axis to split.
        assert unit.nbytes <= 5000 or [p.leaf.name for p in unit.pieces] == ["a.cut"]
    assert all((c == 1).all() for c in count.values())
    assert (
        plan_units(leaves, 1 << 30)[0].pieces[0].shape == (3,)
        and len(plan_units(leaves, 1 << 30)) == 3
    )


def test_a_part_is_read_once_whatever_the_devices():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    where, seen, values = (
        NamedSharding(mesh, PartitionSpec("model")),
        [],
        RNG.standard_normal((4, 6)).astype(np.float32),
    )

    def read(bounds):
        seen.append(bounds)
        return values[tuple(slice(*b) for b in bounds)]

    assert np.array_equal(place((4, 6), where, read), values)
    assert seen == [((0, 4), (0, 6))] and first_owners((4, 6), where) == set(seen)
