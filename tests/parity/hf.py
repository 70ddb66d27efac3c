"""The other side of the comparison: a tiny random `DeepseekV4ForCausalLM` in float32, and a random
draft module beside it.

`random_checkpoint(config, seed)` gives a Hugging Face model and the same weights as official
tensors: every weight is snapped to what the official storage holds before either side sees it, so
both compute with identical values. Hugging Face has no DSpark draft module, so the `mtp.*` tensors
only make the checkpoint complete.
"""

from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from .convert import from_official, to_official
from .storage import snap

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}
_UNKNOWN_TO_HF = (
    "compress_ratios",
    "quantization_config",
    "expert_dtype",
    "torch_dtype",
    "transformers_version",
    "n_mtp_layers",
    "topk_method",
    "architectures",
    "model_type",
)


def hf_config(config):
    """The Hugging Face config of an official config dict. Hugging Face knows ratios 0, 4 and one
    other for the whole model.
    """
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    other = {ratio for ratio in ratios if ratio not in _KINDS} or {128}
    if len(other) > 1:
        raise ValueError(
            f"Hugging Face allows one ratio besides 0 and 4 in a model, got {sorted(other)}"
        )
    # A copy: Hugging Face adds keys to the nested dicts it is given.
    rest = {
        key: deepcopy(value)
        for key, value in config.items()
        if key not in _UNKNOWN_TO_HF and not key.startswith("dspark_")
    }
    result = DeepseekV4Config(
        **rest,
        layer_types=[_KINDS.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        compress_rates={
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": other.pop(),
        },
    )
    assert result.qk_rope_head_dim == config["qk_rope_head_dim"]
    return result


def build(config, tensors):
    """A float32 Hugging Face model of an official config dict, holding the official `tensors`
    {table name: array}.
    """
    model = _empty(config)
    load(model, from_official(tensors))
    return model


def _empty(config):
    model = DeepseekV4ForCausalLM._from_config(
        hf_config(config), attn_implementation="eager", dtype=torch.float32
    )
    model.set_experts_implementation("eager")
    return model.float().eval()


def load(model, state):
    """Loads {Hugging Face name: numpy array}; every parameter and buffer must be there, and nothing
    else.
    """
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=True)


def random_checkpoint(config, seed):
    """(Hugging Face model, {official table name: (storage, array)}), the draft module's tensors
    included in the latter.
    """
    rng = np.random.default_rng(seed)
    model = _empty(config)
    shapes = to_official({name: value.numpy() for name, value in model.state_dict().items()})
    shapes = {
        name: (storage, value.shape) for name, (storage, value) in shapes.items()
    } | draft_tensors(config)
    tensors = {
        name: (storage, snap(_random(name, shape, config, rng), storage))
        for name, (storage, shape) in shapes.items()
    }
    load(model, from_official({name: value for name, (_, value) in tensors.items()}))
    return model, tensors


def _random(name, shape, config, rng):
    """A value of ordinary size for one tensor: no parameter at its neutral value, every matrix
    keeping its input's scale.
    """
    normal = rng.standard_normal(shape).astype(np.float32)
    leaf = name.split(".")[-1] if not name.endswith(".weight") else name.split(".")[-2]
    if leaf == "tid2eid":
        return np.stack(
            [rng.permutation(config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
        )
    if leaf.endswith("norm"):
        return 1 + 0.2 * normal
    if leaf.endswith("_scale"):
        return 0.7 + 0.2 * normal
    if leaf == "bias":
        return 0.2 * normal
    if leaf.endswith("_base") or leaf in ("attn_sink", "ape", "embed"):
        return 0.7 * normal
    return normal / np.sqrt(shape[-1])


def draft_tensors(config):
    """{table name: (storage, shape)} of the draft module (spec section 2): plain-window,
    score-routed stages.
    """
    stages = len(config["compress_ratios"]) - config["num_hidden_layers"]
    wide, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"] * config["head_dim"],
        config["q_lora_rank"],
    )
    streams, inner, vocabulary = (
        config["hc_mult"],
        config["moe_intermediate_size"],
        config["vocab_size"],
    )
    groups, low, mixes = (
        config["o_groups"],
        config["o_groups"] * config["o_lora_rank"],
        (2 + streams) * streams,
    )
    markov, taps = config["dspark_markov_rank"], len(config["dspark_target_layer_ids"])
    block = {
        "attn_norm.weight": ("bf16", (wide,)),
        "ffn_norm.weight": ("bf16", (wide,)),
        **{f"hc_{part}_fn": ("f32", (mixes, streams * wide)) for part in ("attn", "ffn")},
        **{f"hc_{part}_base": ("f32", (mixes,)) for part in ("attn", "ffn")},
        **{f"hc_{part}_scale": ("f32", (3,)) for part in ("attn", "ffn")},
        "attn.attn_sink": ("f32", (config["num_attention_heads"],)),
        "attn.wq_a": ("fp8", (rank, wide)),
        "attn.q_norm.weight": ("bf16", (rank,)),
        "attn.wq_b": ("fp8", (heads, rank)),
        "attn.wkv": ("fp8", (config["head_dim"], wide)),
        "attn.kv_norm.weight": ("bf16", (config["head_dim"],)),
        "attn.wo_a": ("fp8", (low, heads // groups)),
        "attn.wo_b": ("fp8", (wide, low)),
        "ffn.gate.weight": ("bf16", (config["n_routed_experts"], wide)),
        "ffn.gate.bias": ("f32", (config["n_routed_experts"],)),
        **_expert("ffn.shared_experts", "fp8", inner, wide),
    }
    for expert in range(config["n_routed_experts"]):
        block |= _expert(f"ffn.experts.{expert}", "fp4", inner, wide)
    last = {
        "norm.weight": ("bf16", (wide,)),
        "hc_head_fn": ("f32", (streams, streams * wide)),
        "hc_head_base": ("f32", (streams,)),
        "hc_head_scale": ("f32", (1,)),
        "markov_head.markov_w1.weight": ("bf16", (vocabulary, markov)),
        "markov_head.markov_w2.weight": ("bf16", (vocabulary, markov)),
        "confidence_head.proj.weight": ("bf16", (1, wide + markov)),
    }
    result = {
        f"mtp.{stage}.{name}": entry for stage in range(stages) for name, entry in block.items()
    }
    result |= {
        "mtp.0.main_proj": ("fp8", (wide, taps * wide)),
        "mtp.0.main_norm.weight": ("bf16", (wide,)),
    }
    return result | {f"mtp.{stages - 1}.{name}": entry for name, entry in last.items()}


def _expert(name, storage, inner, wide):
    shapes = {"w1": (inner, wide), "w3": (inner, wide), "w2": (wide, inner)}
    return {f"{name}.{part}": (storage, shape) for part, shape in shapes.items()}


@torch.no_grad()
def full_forward(model, ids):
    """Logits [S, V] of one uncached forward over the list `ids`."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@torch.no_grad()
def cached_forward(model, prompt, rest):
    """Logits [len(prompt) + len(rest), V]: the prompt in one call, then the ids of `rest` one at a
    time through the cache.
    """
    cache = DynamicCache(config=model.config)
    calls = [prompt] + [[token] for token in rest]
    return np.concatenate(
        [model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0].numpy() for ids in calls]
    )


def block_outputs(model, ids, layers):
    """Outputs of the named blocks, {layer: [S, M, D]}, of one uncached forward."""
    outputs, hooks = {}, []
    for layer in layers:

        def keep(module, args, output, layer=layer):
            outputs[layer] = output[0].numpy()

        hooks.append(model.model.layers[layer].register_forward_hook(keep))
    full_forward(model, ids)
    for hook in hooks:
        hook.remove()
    return outputs


@torch.no_grad()
def disturbed(model, ids):
    """Yields (tensor name, logits [S, V]) for every tensor changed alone: its rows moved by one, a
    single row negated.
    """
    for name, value in model.state_dict().items():
        kept = value.clone()
        value.copy_(kept.roll(1, 0) if len(kept) > 1 else -kept)
        logits = full_forward(model, ids)
        value.copy_(kept)
        yield name, logits


@contextmanager
def swapped_experts(model, layer, first, second):
    """Exchanges all weights of two routed experts of one layer for the duration of a `with`."""
    experts = model.model.layers[layer].mlp.experts
    order = list(range(experts.num_experts))
    order[first], order[second] = order[second], order[first]
    kept = [
        (weight, weight.detach().clone()) for weight in (experts.gate_up_proj, experts.down_proj)
    ]
    with torch.no_grad():
        for weight, value in kept:
            weight.copy_(value[order])
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in kept:
                weight.copy_(value)


def closest_choice(model, ids):
    """The smallest margin by which a router or an indexer preferred its last choice to the next,
    over all positions.
    """
    gaps = [np.inf]

    def router(module, args, output):
        ranked = (
            (module.score_fn(output[0]) + module.e_score_correction_bias)
            .sort(-1, descending=True)
            .values
        )
        gaps.append((ranked[:, module.top_k - 1] - ranked[:, module.top_k]).min().item())

    def scorer(module, args, output):
        keep = model.config.index_topk
        for position, scores in enumerate(output[0]):
            ranked = scores[: (position + 1) // 4].sort(descending=True).values
            if len(ranked) > keep:
                gaps.append((ranked[keep - 1] - ranked[keep]).item())

    hooks = []
    for layer in model.model.layers:
        if not layer.mlp.is_hash:
            hooks.append(layer.mlp.gate.register_forward_hook(router))
        if hasattr(layer.self_attn.compressor, "indexer"):
            hooks.append(layer.self_attn.compressor.indexer.scorer.register_forward_hook(scorer))
    full_forward(model, ids)
    for hook in hooks:
        hook.remove()
    return min(gaps)
