"""An array over many devices, made of parts that are read one at a time."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding

Bounds = tuple[tuple[int, int], ...]  # (start, stop) along each axis


def place(
    shape: tuple[int, ...], where: Sharding, read: Callable[[Bounds], np.ndarray]
) -> jax.Array:
    """The array of `shape` cut as `where` says. `read` is called once for each part that devices of
    this process hold.

    Devices that hold the same part come one after another, so that a single part is in host memory
    at a time.
    """
    places = sorted(
        (
            (bounds_of(index, shape), device.id, device)
            for device, index in where.addressable_devices_indices_map(shape).items()
        ),
        key=lambda place: place[:2],
    )
    parts, previous, values = [], None, None
    for bounds, _, device in places:
        if bounds != previous:
            values = None  # the last part goes before the next one comes
            previous, values = bounds, read(bounds)
        parts.append(jax.device_put(values, device))
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def first_owners(shape: tuple[int, ...], where: Sharding) -> set[Bounds]:
    """The parts that this process owns: every part has one owner among all processes."""
    owners = {}
    for device, index in sorted(
        where.devices_indices_map(shape).items(), key=lambda item: item[0].id
    ):
        owners.setdefault(bounds_of(index, shape), device.process_index)
    return {bounds for bounds, process in owners.items() if process == jax.process_index()}
