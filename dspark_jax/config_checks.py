"""What makes the numbers of a model config unusable. `config.py` asks; every line of an answer
begins with the key at fault.
"""

import dataclasses
import math
from typing import Any

INTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "num_hash_layers",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "max_position_embeddings",
)
FLOATS = (
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
)
TUPLES = ("compress_ratios", "dspark_target_layer_ids", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN of the compress table (spec section 3): applies at all positions of the layers with a
    ratio, to no others.
    """

    factor: float  # by how much the low frequencies are slowed
    original_max_position_embeddings: int  # the context length before YaRN, in tokens
    beta_fast: float  # rotations over that length above which a frequency keeps its speed
    beta_slow: float  # and below which it is slowed by the whole factor


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a float can hold it, which an integer may be too large for."""
    try:
        return (is_int(value) or isinstance(value, float)) and math.isfinite(value)
    except OverflowError:
        return False


def problems(config: Any) -> list[str]:
    """Everything about `config` (a ModelConfig, or any object with its attributes) that cannot be
    run; empty for a sound one.
    """
    found = _type_problems(config)
    return found or _size_problems(config) + _ratio_problems(config) + _rope_problems(
        config
    ) + _dspark_problems(config)


def _type_problems(config: Any) -> list[str]:
    found = []
    for name in INTS:
        least = 0 if name in ("num_hash_layers", "dspark_noise_token_id") else 1
        value = getattr(config, name)
        if not is_int(value) or value < least:
            found.append(f"{name} = {value!r}: expected an integer >= {least}")
    for name in FLOATS:
        value = getattr(config, name)
        if not is_number(value) or value <= 0:
            found.append(f"{name} = {value!r}: expected a number > 0 that a float can hold")
    for name in TUPLES:
        value = getattr(config, name)
        if not isinstance(value, tuple) or not all(is_int(entry) for entry in value):
            found.append(f"{name} = {value!r}: expected a list of integers")
    if config.bos_token_id is not None and not is_int(config.bos_token_id):
        found.append(f"bos_token_id = {config.bos_token_id!r}: expected an integer or null")
    if not isinstance(config.rope_scaling, RopeScaling):
        found.append(f"rope_scaling = {config.rope_scaling!r}: expected a RopeScaling")
    return found


def _size_problems(config: Any) -> list[str]:
    c, found = config, []
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim >= c.head_dim:
        found.append(
            f"qk_rope_head_dim = {c.qk_rope_head_dim}: must be even and less than head_dim = "
            f"{c.head_dim}"
        )
    if c.index_head_dim & (c.index_head_dim - 1):
        found.append(
            f"index_head_dim = {c.index_head_dim}: must be a power of two (the indexer applies a "
            "Hadamard transform)"
        )
    if c.index_head_dim < c.qk_rope_head_dim:
        found.append(
            f"index_head_dim = {c.index_head_dim}: must be at least qk_rope_head_dim = "
            f"{c.qk_rope_head_dim}"
        )
    if c.num_attention_heads % c.o_groups:
        found.append(
            f"o_groups = {c.o_groups}: must divide num_attention_heads = {c.num_attention_heads}"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        found.append(
            f"num_experts_per_tok = {c.num_experts_per_tok}: more than n_routed_experts = "
            f"{c.n_routed_experts}"
        )
    if c.num_hash_layers > c.num_hidden_layers:
        found.append(
            f"num_hash_layers = {c.num_hash_layers}: more than num_hidden_layers = "
            f"{c.num_hidden_layers}"
        )
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(c, name) % 32:
            found.append(
                f"{name} = {getattr(c, name)}: must be a multiple of 32 (FP4 experts have one "
                "scale for 32 values)"
            )
    for name, ids in (("bos_token_id", (c.bos_token_id,)), ("eos_token_id", c.eos_token_id)):
        found += [
            f"{name} = {i}: outside the vocabulary 0..{c.vocab_size - 1}"
            for i in ids
            if i is not None and not 0 <= i < c.vocab_size
        ]
    return found


def _ratio_problems(config: Any) -> list[str]:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    if len(ratios) <= layers:
        return [
            f"compress_ratios: {len(ratios)} entries for num_hidden_layers = {layers}; it needs "
            "one for each main layer and, after them, a 0 for each of one or more DSpark stages"
        ]
    found = [
        f"compress_ratios[{i}] = {ratio}: must be 0 or more"
        for i, ratio in enumerate(ratios)
        if ratio < 0
    ]
    found += [
        f"compress_ratios[{i}] = {ratio}: entries after the {layers} main layers belong to the "
        "DSpark stages and must be 0"
        for i, ratio in enumerate(ratios)
        if i >= layers and ratio > 0
    ]
    return found


def _rope_problems(config: Any) -> list[str]:
    rope, found = config.rope_scaling, []
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(config, name) <= 1:
            found.append(f"{name} = {getattr(config, name)}: must be greater than 1")
    if (
        not is_int(rope.original_max_position_embeddings)
        or rope.original_max_position_embeddings < 1
    ):
        found.append(
            "rope_scaling.original_max_position_embeddings = "
            f"{rope.original_max_position_embeddings!r}: expected an integer >= 1"
        )
    if rope.factor < 1:
        found.append(f"rope_scaling.factor = {rope.factor}: must be at least 1")
    if not 0 < rope.beta_slow <= rope.beta_fast:
        found.append(
            f"rope_scaling.beta_slow = {rope.beta_slow}: must be more than 0 and at most "
            f"beta_fast = {rope.beta_fast}"
        )
    return found


def _dspark_problems(config: Any) -> list[str]:
    ids, layers, found = config.dspark_target_layer_ids, config.num_hidden_layers, []
    name = f"dspark_target_layer_ids = {list(ids)}"
    if not ids:
        found.append(f"{name}: must name at least one main layer")
    if len(set(ids)) < len(ids):
        found.append(f"{name}: duplicate layers")
    elif list(ids) != sorted(ids):
        found.append(f"{name}: must be in ascending order")
    if any(i < 0 for i in ids):
        found.append(f"{name}: a layer number is negative")
    if any(i >= layers for i in ids):
        found.append(f"{name}: the last main layer is {layers - 1}")
    if config.dspark_noise_token_id >= config.vocab_size:
        found.append(
            f"dspark_noise_token_id = {config.dspark_noise_token_id}: outside the vocabulary "
            f"0..{config.vocab_size - 1}"
        )
    return found
