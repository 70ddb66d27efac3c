"""Hugging Face `DeepseekV4ForCausalLM` weights <-> the official checkpoint's tensor names.

`to_official` turns a state dict of the Hugging Face model into official tensors, `from_official` is
its inverse. Both go by one table, derived from the Hugging Face module tree and the specification's
table of tensors (section 2). No tensor is transposed or permuted; routed experts are stacked there
(`gate_up_proj [E, 2F, D]`, gate rows first) and separate here (`w1`, `w3`, `w2`).
"""

import re

import numpy as np

_TOP = [
    ("model.embed_tokens.weight", "embed.weight", "bf16"),
    ("lm_head.weight", "head.weight", "bf16"),
    ("model.norm.weight", "norm.weight", "bf16"),
    ("model.hc_head.hc_fn", "hc_head_fn", "f32"),
    ("model.hc_head.hc_base", "hc_head_base", "f32"),
    ("model.hc_head.hc_scale", "hc_head_scale", "f32"),
]
_LAYER = [
    ("input_layernorm.weight", "attn_norm.weight", "bf16"),
    ("post_attention_layernorm.weight", "ffn_norm.weight", "bf16"),
    ("attn_hc.fn", "hc_attn_fn", "f32"),
    ("attn_hc.base", "hc_attn_base", "f32"),
    ("attn_hc.scale", "hc_attn_scale", "f32"),
    ("ffn_hc.fn", "hc_ffn_fn", "f32"),
    ("ffn_hc.base", "hc_ffn_base", "f32"),
    ("ffn_hc.scale", "hc_ffn_scale", "f32"),
    ("self_attn.sinks", "attn.attn_sink", "f32"),
    ("self_attn.q_a_proj.weight", "attn.wq_a", "fp8"),
    ("self_attn.q_a_norm.weight", "attn.q_norm.weight", "bf16"),
    ("self_attn.q_b_proj.weight", "attn.wq_b", "fp8"),
    ("self_attn.kv_proj.weight", "attn.wkv", "fp8"),
    ("self_attn.kv_norm.weight", "attn.kv_norm.weight", "bf16"),
    ("self_attn.o_a_proj.weight", "attn.wo_a", "fp8"),
    ("self_attn.o_b_proj.weight", "attn.wo_b", "fp8"),
    ("self_attn.compressor.kv_proj.weight", "attn.compressor.wkv.weight", "bf16"),
    ("self_attn.compressor.gate_proj.weight", "attn.compressor.wgate.weight", "bf16"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape", "f32"),
    ("self_attn.compressor.kv_norm.weight", "attn.compressor.norm.weight", "bf16"),
    ("self_attn.compressor.indexer.q_b_proj.weight", "attn.indexer.wq_b", "fp8"),
    (
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "attn.indexer.weights_proj.weight",
        "bf16",
    ),
    ("self_attn.compressor.indexer.kv_proj.weight", "attn.indexer.compressor.wkv.weight", "bf16"),
    (
        "self_attn.compressor.indexer.gate_proj.weight",
        "attn.indexer.compressor.wgate.weight",
        "bf16",
    ),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape", "f32"),
    ("self_attn.compressor.indexer.kv_norm.weight", "attn.indexer.compressor.norm.weight", "bf16"),
    ("mlp.gate.weight", "ffn.gate.weight", "bf16"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias", "f32"),
    ("mlp.gate.tid2eid", "ffn.gate.tid2eid", "i64"),
    ("mlp.shared_experts.gate_proj.weight", "ffn.shared_experts.w1", "fp8"),
    ("mlp.shared_experts.up_proj.weight", "ffn.shared_experts.w3", "fp8"),
    ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2", "fp8"),
]
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_RENAME = {hf: (official, storage) for hf, official, storage in _TOP + _LAYER}
_BACK = {official: hf for hf, official, _ in _TOP + _LAYER}


def to_official(state):
    """{Hugging Face name: array} -> {official table name: (storage, array)}. A name outside the
    table is a KeyError.
    """
    result = {}
    for name, value in state.items():
        prefix, leaf = _split(name, r"model\.(layers\.\d+\.)(.+)")
        if leaf == _GATE_UP:
            for expert, weight in enumerate(value):
                width = weight.shape[0] // 2
                result[f"{prefix}ffn.experts.{expert}.w1"] = ("fp4", weight[:width])
                result[f"{prefix}ffn.experts.{expert}.w3"] = ("fp4", weight[width:])
        elif leaf == _DOWN:
            for expert, weight in enumerate(value):
                result[f"{prefix}ffn.experts.{expert}.w2"] = ("fp4", weight)
        else:
            official, storage = _RENAME[leaf]
            result[prefix + official] = (storage, value)
    return result


def from_official(tensors):
    """{official table name: array} -> {Hugging Face name: array}; the draft module (`mtp.*`) has
    none and is left out.
    """
    state, experts = {}, {}
    for name, value in tensors.items():
        if name.startswith("mtp."):
            continue
        prefix, leaf = _split(name, r"(layers\.\d+\.)(.+)")
        expert = re.fullmatch(r"ffn\.experts\.(\d+)\.(w[123])", leaf)
        if expert:
            experts.setdefault("model." + prefix, {})[int(expert[1]), expert[2]] = value
        else:
            state[("model." + prefix if prefix else "") + _BACK[leaf]] = value
    for prefix, parts in experts.items():
        count = len(parts) // 3
        state[prefix + _GATE_UP] = np.stack(
            [np.concatenate([parts[e, "w1"], parts[e, "w3"]]) for e in range(count)]
        )
        state[prefix + _DOWN] = np.stack([parts[e, "w2"] for e in range(count)])
    return state


def _split(name, pattern):
    match = re.fullmatch(pattern, name)
    return (match[1], match[2]) if match else ("", name)
