"""The keys of a config.json: two families of names, what is fixed by this library, what has no
effect, and what is not understood.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from dspark_jax.errors import ConfigError

# Reference inference key -> Hugging Face key.
ALIASES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_hash_layers": "num_hash_layers",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
}
# Reference inference keys that are entries of rope_scaling in the Hugging Face family.
ROPE_ALIASES = {
    "original_seq_len": "original_max_position_embeddings",
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
# The reference inference config leaves these to its code; a Hugging Face config always states them.
REFERENCE_DEFAULTS = {"rms_norm_eps": 1e-6, "hc_eps": 1e-6}
# Keys whose value is fixed by what this library implements.
ALLOWED = {
    "model_type": ("deepseek_v4",),
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "expert_dtype": ("fp4",),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "dtype": ("fp8", "bfloat16"),
    "scale_fmt": ("ue8m0",),
    "scale_dtype": ("fp8",),
}
QUANTIZATION = {
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "quant_method": ("fp8",),
    "scale_fmt": ("ue8m0",),
    "weight_block_size": ([128, 128],),
}
# Keys with no effect on inference, any value. num_nextn_predict_layers is 1 in the official file
# whatever the stage count.
NO_EFFECT = (
    "architectures",
    "transformers_version",
    "torch_dtype",
    "initializer_range",
    "use_cache",
    "attention_dropout",
    "num_nextn_predict_layers",
    "pad_token_id",
    "_name_or_path",
    "max_batch_size",
    "max_seq_len",
)
DSPARK_KEYS = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)


def canonical(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Renames reference inference keys to Hugging Face keys; returns the new dictionary and the
    contradictions found.
    """
    out, found = {}, []
    rope = {ROPE_ALIASES[name]: values[name] for name in ROPE_ALIASES if name in values}
    if any(name in values for name in ALIASES):
        out.update(REFERENCE_DEFAULTS)
    out.update(
        {
            name: value
            for name, value in values.items()
            if name not in ALIASES and name not in ROPE_ALIASES
        }
    )
    for name in ALIASES.keys() & values.keys():
        other = ALIASES[name]
        if other in values and values[other] != values[name]:
            found.append(
                f"{name} = {values[name]!r} contradicts {other} = {values[other]!r}; they name "
                "the same value"
            )
        out[other] = values[name]
    if rope and "rope_scaling" in values:
        found.append(
            "rope_scaling is given, and so is "
            f"{', '.join(n for n in ROPE_ALIASES if n in values)}; give one of the two"
        )
    elif rope:
        out["rope_scaling"] = rope
    return out, found


def refuse_other_kinds(values: dict[str, Any], source: str) -> None:
    """A config without any DSpark key is another kind of model: one error that says which, instead
    of a list of missing keys.
    """
    if any(name in values for name in DSPARK_KEYS):
        return
    serial = values.get("num_nextn_predict_layers") or values.get("n_mtp_layers") or 0
    kind = (
        f"a serial multi-token-prediction (MTP) model ({serial} MTP "
        f"layer{'s' if serial != 1 else ''}, no DSpark keys)"
        if serial
        else "a model without a draft module (no DSpark keys)"
    )
    raise ConfigError(
        f"{source}: this describes {kind}; this library needs a DSpark model such as "
        f"DeepSeek-V4-Flash of 0731, whose config has {', '.join(DSPARK_KEYS)}"
    )


def refused_values(values: dict[str, Any]) -> list[str]:
    """Keys with a fixed meaning that carry another one, in the config and in its
    quantization_config.
    """
    found = [
        refusal(name, values[name], allowed)
        for name, allowed in ALLOWED.items()
        if name in values and not _among(values[name], allowed)
    ]
    quantization = values.get("quantization_config")
    if quantization is None:
        return found
    if not isinstance(quantization, dict):
        return found + [
            f"quantization_config = {quantization!r}: expected an object with "
            f"{', '.join(QUANTIZATION)}"
        ]
    for name, value in quantization.items():
        if not _among(value, QUANTIZATION.get(name, ())):
            found.append(refusal(f"quantization_config.{name}", value, QUANTIZATION.get(name, ())))
    return found


def _among(value: Any, allowed: Iterable[Any]) -> bool:
    """Equality that keeps True and 1 apart."""
    return any(type(value) is type(choice) and value == choice for choice in allowed)


def refusal(name: str, value: Any, allowed: Iterable[Any]) -> str:
    choices = " or ".join(repr(choice) for choice in allowed)
    return (
        f"{name} = {value!r}: allowed is {choices}"
        if choices
        else f"{name} = {value!r}: this key is not understood"
    )


def unknown_keys(values: dict[str, Any], fields: Iterable[str]) -> list[str]:
    known = {*fields, *ALLOWED, *NO_EFFECT, "quantization_config", "n_mtp_layers"}
    found = []
    for name in values.keys() - known:
        near = difflib.get_close_matches(
            name, sorted(known | ALIASES.keys() | ROPE_ALIASES.keys()), n=1
        )
        found.append(
            f"{name} = {values[name]!r}: this key is not understood"
            + (f" (is it {near[0]}?)" if near else "")
        )
    return sorted(found)
