"""What `print(model)` shows: config, mesh, storage, parameters and bytes by part."""

from __future__ import annotations

import math
from collections import Counter

import jax
from flax import nnx

from dspark_jax.loading.parts import ORDER, part_of, size


def describe(model) -> str:
    """A loaded `Model` in some twenty lines."""
    c, limits, shape = model.config, model.limits, dict(model.mesh.shape)
    kind = model.mesh.devices.flat[0].device_kind
    counts = Counter(c.compress_ratios[: c.num_hidden_layers])
    ratios = ", ".join(f"{count} of ratio {ratio}" for ratio, count in sorted(counts.items()))
    quantised = "simulated" if model.numerics.activation_quant else "off"
    lines = [
        f"dspark Model: {c.num_hidden_layers} layers of width {c.hidden_size}, "
        f"{c.n_routed_experts} experts, vocabulary {c.vocab_size:,}",
        f"  layers          {ratios}; {c.num_hash_layers} hash-routed",
        f"  drafter         {c.n_draft_stages} stages, block {c.dspark_block_size}, on layers "
        f"{', '.join(map(str, c.dspark_target_layer_ids))}",
        f"  mesh            {shape['data']}x{shape['model']} (data x model) of {kind}",
        f"  computes in     {model.numerics.dtype}, activation quantisation {quantised}",
        f"  experts held    {model.expert_storage}",
        f"  tokens          up to {limits.max_seq_len} a stream, prefill chunk "
        f"{limits.prefill_chunk}",
        f"  tokenizer       {'none' if model.tokenizer is None else 'yes'}",
    ]
    return "\n".join(lines + _table(parts(model)))


def parts(model) -> dict[tuple[str, str], tuple[int, int]]:
    """(module, part) -> parameters, and bytes on all devices together; of a whole head that the
    drafter has beside a cut one, the bytes only.
    """
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for name, module in (("main", model.module.main), ("drafter", model.module.drafter)):
        leaves = jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable in leaves:
            declared = variable.get_metadata("declared")
            array = variable.get_raw_value()
            layers = array.shape[0] if declared.stacked else 1
            copy = declared.tensor == "head.weight" and not any(declared.axes)
            numbers = layers * math.prod(declared.shape)
            numbers = 0 if copy or declared.part == "scale" else numbers
            held = sum(shard.data.nbytes for shard in array.addressable_shards)
            key = name, part_of(declared.tensor)
            before = counted.get(key, (0, 0))
            counted[key] = before[0] + numbers, before[1] + held
    return dict(sorted(counted.items(), key=lambda item: (item[0][0] != "main", _place(item))))


def _place(item) -> int:
    return ORDER.index(item[0][1])


def _table(counted: dict[tuple[str, str], tuple[int, int]]) -> list[str]:
    total = tuple(map(sum, zip(*counted.values(), strict=True)))
    rows = [(module, part, *numbers) for (module, part), numbers in counted.items()]
    head = f"  {'module':9}{'part':19}{'parameters':>18}{'held':>11}"
    body = [f"  {m:9}{part:19}{n:18,}{size(held):>11}" for m, part, n, held in rows]
    return [head, *body, f"  {'all':28}{total[0]:18,}{size(total[1]):>11}"]
