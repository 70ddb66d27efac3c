"""Equal layers are stacked and scanned, so that compile time does not grow with depth.

V4-Flash's 43 layers are three segments: 2 x [window, hash], 1 x [ratio 4, hash], 20 x [ratio 128,
ratio 4].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import ModelConfig

OVERLAPPED_RATIO = 4


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """ratio: 0 window only, 4 overlapped compressor with indexer, else plain compressor. hashed:
    routing by token id.
    """

    ratio: int
    hashed: bool

    @property
    def overlapped(self) -> bool:
        """Whether an entry pools the tokens of the window before its own too, and an indexer
        chooses among the entries.
        """
        return self.ratio == OVERLAPPED_RATIO


@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """`repeats` times the layers `unit`, the first of them layer `first`."""

    unit: tuple[LayerKind, ...]
    repeats: int
    first: int

    def layer_ids(self, member: int) -> tuple[int, ...]:
        """The layer numbers of one member of the unit."""
        return tuple(self.first + r * len(self.unit) + member for r in range(self.repeats))


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(config.compress_ratios[i], i < config.num_hash_layers)
        for i in range(config.num_hidden_layers)
    )


def segments(config: ModelConfig) -> tuple[SegmentPlan, ...]:
    """From the first layer on, always the repetition that saves the most layers."""
    kinds, plans, at = layer_kinds(config), [], 0
    while at < len(kinds):
        candidates = [(size, _repeats(kinds[at:], size)) for size in range(1, len(kinds) - at + 1)]
        size, repeats = max(candidates, key=lambda c: (c[0] * (c[1] - 1), -c[0]))
        plans.append(SegmentPlan(kinds[at : at + size], repeats, at))
        at += size * repeats
    return tuple(plans)


def _repeats(kinds, size: int) -> int:
    count = 1
    while kinds[count * size : (count + 1) * size] == kinds[:size]:
        count += 1
    return count


def scan_layers(blocks: nnx.List, carry, body: Callable, whole_experts: bool):
    """Runs body(blocks of one repeat, repeat index, carry) -> carry, out over all repeats; returns
    carry and the stacked outs.

    whole_experts: the routed experts are not sliced for each repeat (a copy of most of the model)
    but handed over with their layer axis, to be indexed by the repeat; training slices them, so
    that gradients are accumulated layer by layer.
    """
    split = nnx.PathContains("experts") if whole_experts else nnx.Nothing()
    graphdef, experts, state = nnx.split(blocks, split, ...)
    repeats = jax.tree.leaves(state)[0].shape[0]

    def step(carry, scanned):
        index, state = scanned
        return body(nnx.merge(graphdef, experts, state), index, carry)

    return jax.lax.scan(step, carry, (jnp.arange(repeats), state))
