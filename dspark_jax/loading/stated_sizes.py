"""A size in config.json that the tensors contradict is one error with its cause. Without it, every
tensor of the model would be listed as misshapen.
"""

from __future__ import annotations

from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.config import ModelConfig
from dspark_jax.errors import CheckpointError

# Config key -> (tensor, axis) pairs whose size it is. One tensor alone may be damaged; only where
# all of them agree on another size it is the config that is wrong.
WITNESSES = {
    "vocab_size": (("embed.weight", 0), ("head.weight", 0)),
    "hidden_size": (("embed.weight", 1), ("head.weight", 1), ("layers.0.attn_norm.weight", 0)),
    "q_lora_rank": (("layers.0.attn.q_norm.weight", 0), ("layers.0.attn.wq_a.weight", 0)),
    "head_dim": (("layers.0.attn.kv_norm.weight", 0), ("layers.0.attn.wkv.weight", 0)),
    "num_attention_heads": (("layers.0.attn.attn_sink", 0), ("mtp.0.attn.attn_sink", 0)),
    "n_routed_experts": (("layers.0.ffn.gate.weight", 0), ("mtp.0.ffn.gate.weight", 0)),
    "moe_intermediate_size": (
        ("layers.0.ffn.shared_experts.w1.weight", 0),
        ("layers.0.ffn.experts.0.w1.weight", 0),
    ),
}


def check_sizes(checkpoint: OfficialCheckpoint, config: ModelConfig) -> None:
    """Raises CheckpointError naming each size of the config that the tensors contradict."""
    names, wrong = set(checkpoint.names()), []
    for key, witnesses in WITNESSES.items():
        if not all(name in names for name, _ in witnesses):
            continue
        shapes = [checkpoint.entry(name).shape for name, _ in witnesses]
        sizes = {
            shape[axis] if axis < len(shape) else None
            for shape, (_, axis) in zip(shapes, witnesses, strict=True)
        }
        if len(sizes) == 1 and (size := sizes.pop()) not in (None, getattr(config, key)):
            tensor = f"{witnesses[0][0]} is {list(shapes[0])}"
            wrong.append(f"{key} is {getattr(config, key)}, the tensors say {size} ({tensor})")
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path}/config.json does not belong to these tensors: {'; '.join(wrong)}"
        )
