"""What a model needs on a mesh, from its config alone: bytes per device, what fits, and how fast
bandwidth would let it be.

Sizes are exact sums over the parameter declarations and the cache's shapes; activations and speed
are estimates, by the formulas below. `dspark plan --compile` puts the compiler's own analysis
beside them.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dspark_jax.config import ModelConfig
from dspark_jax.errors import ConfigError
from dspark_jax.model.cache import entry_block
from dspark_jax.model.dspark import DSpark, default_prefill_chunk, most_rows, new_cache
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import MAX_POSITIONS
from dspark_jax.model.parameters import ShapeSource
from dspark_jax.model.segments import layer_kinds
from dspark_jax.runtime.sharding import DATA, MODEL, RULES, check_divides, check_streams


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for. name: for people. memory: bytes a device. bandwidth: bytes per second a
    device, None: unknown.
    """

    name: str
    devices: int
    memory: float
    bandwidth: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes are per device.

    parameters: by part (experts, dense, embedding and head, draft). cache_per_stream, activations,
      total. fits: total <= memory.
    longest_context: tokens, with `streams` streams. most_streams: at `context` tokens. speed:
      estimates, None without a bandwidth.
    """

    target: Target
    mesh: tuple[int, int]
    context: int
    streams: int
    parameters: dict[str, int]
    cache_per_stream: int
    activations: int
    total: int
    fits: bool
    longest_context: int
    most_streams: int
    speed: dict | None

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _part(declared, prefix: str) -> str:
    if prefix.startswith("mtp."):
        return "draft"
    if declared.expert:
        return "experts"
    return "embedding and head" if declared.tensor in ("embed.weight", "head.weight") else "dense"


def parameter_bytes(config: ModelConfig, mesh: tuple[int, int], dtype="bfloat16") -> dict[str, int]:
    """Bytes per device by part; experts packed FP4, the rest in the compute dtype. The drafter's
    copy of a cut head is a draft part.
    """
    source, sizes = ShapeSource(dtype, packed_experts=True), {DATA: mesh[0], MODEL: mesh[1]}
    DSpark(config, Numerics(dtype), source)
    parts = {"experts": 0, "dense": 0, "embedding and head": 0, "draft": 0}
    for declared, prefixes in source.asked:
        count = math.prod(declared.array_shape(len(prefixes)))
        shards = math.prod(sizes[RULES[axis]] for axis in declared.axes if axis)
        nbytes = count * declared.array_dtype(dtype).itemsize
        parts[_part(declared, prefixes[0])] += nbytes // shards
    if mesh[1] > 1:
        parts["draft"] += config.vocab_size * config.hidden_size * jnp.dtype(dtype).itemsize
    return parts


def cache_bytes(config: ModelConfig, context: int, dtype="bfloat16") -> int:
    """Bytes of one stream's cache, which a device of its part of the data axis holds whole."""
    rows = most_rows(config)
    shapes = jax.eval_shape(lambda: new_cache(config, 1, context, rows, jnp.dtype(dtype)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def activation_bytes(config: ModelConfig, mesh: tuple[int, int], streams: int) -> int:
    """Estimate of the most memory that a prefill chunk or a round needs beside parameters and
    cache.

    Rows of a round: streams per device x (K + 1); of a prefill, of one stream: the chunk. For each
    row of either: the residual streams, one block of gathered entries, the attention scores
    and queries of the device's heads. For each row of a round: the logits of the main model and of
    the drafter, and a masked copy of both, float32.
    """
    rows = _local(streams, mesh) * (config.dspark_block_size + 1)
    chunk = default_prefill_chunk(config)
    heads = config.num_attention_heads // mesh[1]
    block = entry_block(config)

    def layer(rows):
        streams = 4 * config.hc_mult * config.hidden_size * 4
        keys = block * config.head_dim * 2
        scores = heads * (config.sliding_window + chunk + block) * 4 * 2
        queries = 3 * heads * config.head_dim * 4
        return rows * (streams + keys + scores + queries)

    logits = 4 * config.vocab_size * 4
    return max(
        layer(rows) + rows * logits,
        layer(chunk) + logits,
    )


def _local(streams: int, mesh: tuple[int, int]) -> int:
    """Streams of one device; a single stream is computed by every row of the mesh."""
    return -(-streams // mesh[0])


def _caches(streams: int, mesh: tuple[int, int]) -> int:
    """Caches of one stream that a device holds: beside several, the one that prompts are prefilled
    in (decode/engine.py).
    """
    local = _local(streams, mesh)
    return local + (local > 1)


def check(
    config: ModelConfig,
    target: Target,
    mesh: tuple[int, int],
    context: int,
    streams: int,
    accepted: float,
) -> None:
    """Raises ConfigError for a target, a mesh on it or numbers that cannot be planned, saying
    why.
    """
    _check_target(target)
    _check_mesh(config, target, mesh)
    if not 1 <= context <= MAX_POSITIONS:
        raise ConfigError(f"context {context} is not between 1 and {MAX_POSITIONS} tokens")
    if streams < 1:
        raise ConfigError(f"streams {streams}: at least 1 is needed")
    check_streams(streams, mesh[0], f"mesh {mesh[0]}x{mesh[1]}")
    if not 0 <= accepted <= config.dspark_block_size:
        raise ConfigError(
            f"accepted {accepted:g}: drafts accepted per round must lie between 0 and "
            f"{config.dspark_block_size}, the draft block"
        )


def _check_target(target: Target) -> None:
    if target.devices < 1:
        raise ConfigError(f"{target.name}: at least 1 device is needed")
    if not 0 < target.memory < math.inf:
        raise ConfigError(
            f"{target.name}: the memory of a device must be more than 0 bytes and finite, got "
            f"{target.memory:g}"
        )
    if target.bandwidth is not None and not 0 < target.bandwidth < math.inf:
        raise ConfigError(
            f"{target.name}: the bandwidth of a device must be more than 0 and finite, got "
            f"{target.bandwidth:g}"
        )


def _check_mesh(config: ModelConfig, target: Target, mesh: tuple[int, int]) -> None:
    """The mesh must be all of the target's devices, and the model must divide over it."""
    devices, count = target.devices, math.prod(mesh)
    if count != devices:
        raise ConfigError(
            f"mesh {mesh[0]}x{mesh[1]} is of {count} device{'s' * (count != 1)}, not of {devices} "
            f"({target.name}); its sizes must multiply to {devices}, such as 1x{devices}"
        )
    check_divides(config, mesh[1], f"mesh {mesh[0]}x{mesh[1]}")


def make_plan(
    config: ModelConfig,
    target: Target,
    mesh: tuple[int, int],
    context: int,
    streams: int,
    accepted: float,
) -> Plan:
    """accepted: drafts accepted per round, assumed for the speculative estimate."""
    check(config, target, mesh, context, streams, accepted)
    parameters = parameter_bytes(config, mesh)
    activations = activation_bytes(config, mesh, streams)
    per_stream = cache_bytes(config, context)
    total = sum(parameters.values()) + activations + _caches(streams, mesh) * per_stream

    def fits(context, streams):
        held = sum(parameters.values()) + activation_bytes(config, mesh, streams)
        return held + _caches(streams, mesh) * cache_bytes(config, context) <= target.memory

    longest = _largest(lambda n: fits(n * 1024, streams), MAX_POSITIONS // 1024) * 1024
    bound = int(target.memory // per_stream)  # of the caches alone
    most = _largest(lambda n: fits(context, n * mesh[0]), bound) * mesh[0]
    speed = None
    if target.bandwidth is not None:
        speed = estimate_speed(config, target, mesh, context, streams, accepted)
    return Plan(
        target,
        mesh,
        context,
        streams,
        parameters,
        per_stream,
        activations,
        total,
        total <= target.memory,
        longest,
        most,
        speed,
    )


def _largest(holds, most: int) -> int:
    """The largest n in 0..most for which holds(n), given that it holds up to some n and not beyond
    it.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def distinct_experts(config: ModelConfig, rows: int) -> float:
    """Expected number of distinct experts that `rows` rows choose, if they choose evenly and
    independently.
    """
    e, a = config.n_routed_experts, config.num_experts_per_tok
    return e * (1 - (1 - a / e) ** rows)


def estimate_speed(
    config: ModelConfig,
    target: Target,
    mesh: tuple[int, int],
    context: int,
    streams: int,
    accepted: float,
) -> dict:
    """Tokens per second of one stream if a step took exactly the time to read what it needs from
    memory once:

        plain       = bandwidth / (dense + head + distinct experts of B rows + caches)
        speculative = (accepted + 1) * bandwidth / (the same for B*(K+1) rows + draft stages + head
        copy + distinct experts of B*K rows)

    An upper bound: it leaves out communication, arithmetic and launch overhead.
    """
    parameters = parameter_bytes(config, mesh)
    local, block = _local(streams, mesh), config.dspark_block_size
    main_experts = config.num_hidden_layers * config.n_routed_experts
    per_expert = parameters["experts"] * mesh[1] / main_experts
    head = parameters["embedding and head"] // 2

    def experts(rows, layers):
        return layers * distinct_experts(config, rows) * per_expert / mesh[1]

    shared = parameters["dense"] + head + local * _cache_read(config, context)
    plain = shared + experts(local, config.num_hidden_layers)
    draft_experts = config.n_draft_stages * config.n_routed_experts * per_expert / mesh[1]
    draft = parameters["draft"] - draft_experts + experts(local * block, config.n_draft_stages)
    verify = shared + experts(local * (block + 1), config.num_hidden_layers)
    return {
        "bytes_per_plain_step": int(plain),
        "bytes_per_round": int(draft + verify),
        "assumed_accepted_per_round": accepted,
        "plain_tokens_per_second_per_stream": target.bandwidth / plain,
        "speculative_tokens_per_second_per_stream": (accepted + 1)
        * target.bandwidth
        / (draft + verify),
    }


def _cache_read(config: ModelConfig, context: int) -> int:
    """Bytes of one stream's cache that a step reads: windows, all plain entries, all indexer keys
    and the entries they choose.
    """
    total = 0
    for kind in layer_kinds(config):
        read = config.sliding_window * config.head_dim
        entries = context // kind.ratio if kind.ratio else 0
        if kind.overlapped:
            read += entries * config.index_head_dim
            entries = min(config.index_topk, entries)
        read += entries * config.head_dim
        total += 2 * read
    return total
