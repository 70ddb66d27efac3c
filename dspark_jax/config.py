"""ModelConfig: the numbers of one checkpoint, read from the official `config.json` and refused when
they do not fit together.

Two key families name the same values: the Hugging Face `config.json` (`hidden_size`,
`num_hidden_layers`, ...) and the config of the reference inference code (`dim`, `n_layers`, ...).
Attributes carry the Hugging Face names. A key or a value that this library does not understand is
an error, never a guess: one ConfigError lists every problem, by key, with what is allowed.
"""

import dataclasses
import types
from pathlib import Path
from typing import Any

from dspark_jax import config_transformers
from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.config_checks import FLOATS, TUPLES, RopeScaling, is_int, is_number, problems
from dspark_jax.config_keys import (
    ALLOWED,
    QUANTIZATION,
    canonical,
    refusal,
    refuse_other_kinds,
    refused_values,
    unknown_keys,
)
from dspark_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One model and its drafter. Hashable; the checks of `problems` hold for every instance
    (ConfigError otherwise).
    """

    vocab_size: int  # V
    hidden_size: int  # D
    num_hidden_layers: int  # main layers, without the draft stages
    num_attention_heads: int  # H
    head_dim: int  # C, nope + rope channels
    qk_rope_head_dim: int  # the last channels of a head, rotated
    q_lora_rank: int
    o_groups: int  # heads per output group: H / o_groups
    o_lora_rank: int
    sliding_window: int  # W, in tokens
    index_n_heads: int
    index_head_dim: int  # a power of two (Hadamard transform)
    index_topk: int  # compressed entries that a ratio-4 layer attends to
    num_hash_layers: int  # the first layers, routed by token id
    n_routed_experts: int  # E
    num_experts_per_tok: int  # A
    moe_intermediate_size: int  # F, also of the shared expert
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int  # M, residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float  # layers of ratio 0 and draft stages
    compress_rope_theta: float  # layers with a ratio
    rope_scaling: RopeScaling
    compress_ratios: tuple[int, ...]  # one a main layer, then one (0) a draft stage
    dspark_block_size: int  # K, drafts a round
    dspark_markov_rank: int
    dspark_noise_token_id: int  # fills the draft block after the anchor
    dspark_target_layer_ids: tuple[int, ...]  # main layers whose output the drafter sees, ascending
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()  # stop tokens; empty where the file names none
    max_position_embeddings: int = (
        1048576  # tokens the model was made for; nothing is refused beyond it
    )

    def __post_init__(self) -> None:
        _raise_if(problems(self), "the model config")

    @property
    def n_draft_stages(self) -> int:
        """Draft stages: the entries of compress_ratios after the main layers."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def n_hidden_taps(self) -> int:
        """N: main layers whose output is captured for the drafter."""
        return len(self.dspark_target_layer_ids)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "the model config") -> "ModelConfig":
        """Reads either key family. Raises one ConfigError that lists every problem; `source` names
        the origin in it.
        """
        if not isinstance(values, dict):
            raise ConfigError(
                f"{source}: expected an object of keys and values, got {type(values).__name__}"
            )
        if config_transformers.is_transformers(values):
            values = config_transformers.official_keys(values, source)
        values, found = canonical(values)
        refuse_other_kinds(values, source)
        found += refused_values(values)
        found += unknown_keys(values, FIELDS)
        missing = [f"{name}: missing" for name in REQUIRED if name not in values]
        _raise_if(found + missing if missing else [], source)
        fields, unconverted = _convert({name: values[name] for name in FIELDS if name in values})
        found += unconverted or problems(types.SimpleNamespace(**{**DEFAULTS, **fields}))
        _raise_if(found, source)
        config = cls(**fields)
        stages = values.get("n_mtp_layers", config.n_draft_stages)
        if stages != config.n_draft_stages:
            _raise_if(
                [
                    f"n_mtp_layers = {stages!r}: compress_ratios has {config.n_draft_stages} "
                    f"entries after the {config.num_hidden_layers} main layers, one for each draft "
                    "stage; the two must agree"
                ],
                source,
            )
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads `path`, a config.json or a directory that holds one."""
        return cls.from_dict(read_json(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """The config in Hugging Face keys plus n_mtp_layers: what `from_dict` reads back to an
        equal config.
        """
        values = dataclasses.asdict(self)
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
        values["rope_scaling"]["type"] = "yarn"
        if len(self.eos_token_id) == 1:
            values["eos_token_id"] = self.eos_token_id[0]
        fixed = {
            name: ALLOWED[name][0]
            for name in (
                "model_type",
                "hidden_act",
                "scoring_func",
                "expert_dtype",
                "num_key_value_heads",
                "n_shared_experts",
                "topk_method",
                "norm_topk_prob",
                "attention_bias",
                "tie_word_embeddings",
            )
        }
        quantization = {name: allowed[0] for name, allowed in QUANTIZATION.items()}
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            **fixed,
            **values,
            "n_mtp_layers": self.n_draft_stages,
            "torch_dtype": "bfloat16",
            "quantization_config": quantization,
        }


FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
REQUIRED = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING
)
DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name not in REQUIRED
}


def v4_flash_0731() -> ModelConfig:
    """DeepSeek-V4-Flash of 0731 with its three DSpark stages, 284 billion parameters."""
    return ModelConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        num_hash_layers=3,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(16.0, 65536, 32.0, 1.0),
        compress_ratios=(0, 0) + (4, 128) * 20 + (4,) + (0, 0, 0),
        dspark_block_size=5,
        dspark_markov_rank=256,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(40, 41, 42),
        bos_token_id=0,
        eos_token_id=(1,),
    )


def tiny() -> ModelConfig:
    """The checkpoint that this project trains and ships; every size that shards divides by 4."""
    return dataclasses.replace(
        v4_flash_0731(),
        vocab_size=1024,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=96,
        qk_rope_head_dim=32,
        q_lora_rank=128,
        o_groups=4,
        o_lora_rank=32,
        sliding_window=64,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=64,
        num_hash_layers=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        rope_scaling=RopeScaling(4.0, 1024, 32.0, 1.0),
        compress_ratios=(0, 0, 4, 32, 4, 32) + (0, 0, 0),
        dspark_markov_rank=64,
        dspark_noise_token_id=1,
        dspark_target_layer_ids=(3, 4, 5),
        bos_token_id=None,
        eos_token_id=(0,),
        max_position_embeddings=4096,
    )


PRESETS = {"v4-flash": v4_flash_0731, "tiny": tiny}
"""The models that a command knows by name."""


def _convert(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """JSON values to field types, and what is wrong with rope_scaling; other values of a wrong type
    are left to `problems`.
    """
    out = dict(values)
    for name in TUPLES:
        if isinstance(out.get(name), list):
            out[name] = tuple(out[name])
    if "eos_token_id" in out and not isinstance(out["eos_token_id"], tuple):
        out["eos_token_id"] = () if out["eos_token_id"] is None else (out["eos_token_id"],)
    out.update(
        {name: float(out[name]) for name in FLOATS if is_int(out[name]) and is_number(out[name])}
    )
    rope = out["rope_scaling"]
    found = _rope_scaling_problems(rope)
    if not found:
        out["rope_scaling"] = RopeScaling(
            float(rope["factor"]),
            rope["original_max_position_embeddings"],
            float(rope["beta_fast"]),
            float(rope["beta_slow"]),
        )
    return out, found


def _rope_scaling_problems(values: Any) -> list[str]:
    names = tuple(field.name for field in dataclasses.fields(RopeScaling))
    if not isinstance(values, dict):
        return [f"rope_scaling = {values!r}: expected an object with {', '.join(names)}"]
    found = [f"rope_scaling.{name}: missing" for name in names if name not in values]
    for name, value in values.items():
        if name in ("type", "rope_type"):
            found += [] if value == "yarn" else [refusal(f"rope_scaling.{name}", value, ("yarn",))]
        elif name not in names:
            found.append(refusal(f"rope_scaling.{name}", value, ()))
        elif not is_number(value):
            found.append(
                f"rope_scaling.{name} = {value!r}: expected a number that a float can hold"
            )
    return found


def _raise_if(found: list[str], source: str) -> None:
    if found:
        many = f"{len(found)} problems" if len(found) > 1 else "1 problem"
        raise ConfigError("\n  ".join([f"{source}: {many}"] + found))
