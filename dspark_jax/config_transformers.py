"""A config.json as Hugging Face transformers 5 saves it, in the official keys.

transformers reads the official file, renames some of its keys and drops others, so that what it
saves means the same in other words:

    layer_types, compress_rates   compress_ratios, without the draft stages' zeros
    mlp_layer_types               num_hash_layers
    partial_rotary_factor         qk_rope_head_dim / head_dim
    rope_parameters               rope_theta, compress_rope_theta, rope_scaling
    quantization_config           holds expert_dtype as well
    dtype                         torch_dtype
"""

from typing import Any

from dspark_jax.errors import ConfigError

MARKS = ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates")
LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
# Keys that only transformers writes and that have no effect on inference.
NO_EFFECT = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def is_transformers(values: dict[str, Any]) -> bool:
    quantization = values.get("quantization_config")
    moved = isinstance(quantization, dict) and "expert_dtype" in quantization
    return moved or any(name in values for name in MARKS)


def official_keys(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The same in official keys. Raises ConfigError, in one sentence, for what is not the same."""
    try:
        return _official(dict(values))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        version = values.get("transformers_version", "5")
        raise ConfigError(
            f"{source}: this config.json was saved by Hugging Face transformers {version} and "
            f"cannot be brought back to the official form ({_reason(error)}); use the config.json "
            "that the checkpoint was published with"
        ) from error


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _official(values: dict[str, Any]) -> dict[str, Any]:
    for name in NO_EFFECT:
        values.pop(name, None)
    if values.pop("mlp_bias", False):
        raise ValueError("mlp_bias is true")
    values.pop("dtype", None)  # what the weights were last held in; the files say what they are
    _move_expert_dtype(values)
    if "layer_types" in values:
        _agree(values, "compress_ratios", _ratios(values), values["num_hidden_layers"])
    if "mlp_layer_types" in values:
        _agree(values, "num_hash_layers", _hash_layers(values.pop("mlp_layer_types")))
    if "partial_rotary_factor" in values:
        width = values.pop("partial_rotary_factor") * values["head_dim"]
        if width != int(width):
            raise ValueError(f"partial_rotary_factor rotates {width} channels of a head")
        _agree(values, "qk_rope_head_dim", int(width))
    if "rope_parameters" in values:
        for name, value in _rope(values.pop("rope_parameters")).items():
            _agree(values, name, value)
    return values


def _agree(values: dict[str, Any], name: str, value: Any, first: int | None = None) -> None:
    """Sets a key, or compares with what is there; of lists the first entries only."""
    there = values.setdefault(name, value)
    same = there[:first] == value[:first] if first else there == value
    if not same and not (isinstance(there, dict) and there.items() >= value.items()):
        raise ValueError(f"{name} is {there!r}, but the keys of transformers say {value!r}")


def _move_expert_dtype(values: dict[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if isinstance(quantization, dict) and "expert_dtype" in quantization:
        quantization = dict(quantization)
        _agree(values, "expert_dtype", quantization.pop("expert_dtype"))
        values["quantization_config"] = quantization


def _ratios(values: dict[str, Any]) -> list[int]:
    kinds = values.pop("layer_types")
    rates = {**LAYER_TYPES, **(values.pop("compress_rates", None) or {})}
    unknown = sorted({kind for kind in kinds if kind not in LAYER_TYPES})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(map(repr, unknown))}")
    if len(kinds) != values["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(kinds)} entries for {values['num_hidden_layers']} layers"
        )
    if "compress_ratios" in values:
        return [rates[kind] for kind in kinds]
    if "n_mtp_layers" not in values:
        raise ValueError("it does not say how many draft stages there are")
    return [rates[kind] for kind in kinds] + [0] * values["n_mtp_layers"]


def _hash_layers(kinds: list[str]) -> int:
    count = sum(kind == "hash_moe" for kind in kinds)
    if list(kinds) != ["hash_moe"] * count + ["moe"] * (len(kinds) - count):
        raise ValueError("mlp_layer_types is not a row of 'hash_moe' followed by 'moe'")
    return count


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    main, compress = parameters["main"], parameters["compress"]
    if main.get("rope_type", "default") != "default" or compress.get("rope_type") != "yarn":
        raise ValueError("rope_parameters are not 'default' for main and 'yarn' for compress")
    if compress.get("attention_factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters scale attention by {compress['attention_factor']}")
    return {
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_scaling": {name: compress[name] for name in YARN} | {"type": "yarn"},
    }
