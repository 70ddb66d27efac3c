"""The tensors of a checkpoint, written down from spec section 2 alone: the independent table that
the tests compare with.
"""

from dspark_jax.checkpoints.tensor_spec import TensorSpec


def expected(c) -> list[TensorSpec]:
    """Every tensor of a checkpoint with config `c` (a ModelConfig)."""
    v, d, width = c.vocab_size, c.hidden_size, c.hc_mult * c.hidden_size
    out = [
        ("embed.weight", (v, d), "bf16"),
        ("head.weight", (v, d), "bf16"),
        ("norm.weight", (d,), "bf16"),
    ]
    out += head_connections("", c.hc_mult, width)
    for i in range(c.num_hidden_layers):
        out += block(f"layers.{i}.", c, c.compress_ratios[i], hashed=i < c.num_hash_layers)
    last = len(c.compress_ratios) - c.num_hidden_layers - 1
    for s in range(last + 1):
        out += block(f"mtp.{s}.", c, 0, hashed=False)
    out += [
        ("mtp.0.main_proj", (d, len(c.dspark_target_layer_ids) * d), "fp8"),
        ("mtp.0.main_norm.weight", (d,), "bf16"),
        (f"mtp.{last}.norm.weight", (d,), "bf16"),
        (f"mtp.{last}.markov_head.markov_w1.weight", (v, c.dspark_markov_rank), "bf16"),
        (f"mtp.{last}.markov_head.markov_w2.weight", (v, c.dspark_markov_rank), "bf16"),
        (f"mtp.{last}.confidence_head.proj.weight", (1, d + c.dspark_markov_rank), "bf16"),
    ]
    out += head_connections(f"mtp.{last}.", c.hc_mult, width)
    return [TensorSpec(*entry) for entry in out]


def head_connections(prefix, copies, width):
    return [
        (prefix + "hc_head_fn", (copies, width), "f32"),
        (prefix + "hc_head_base", (copies,), "f32"),
        (prefix + "hc_head_scale", (1,), "f32"),
    ]


def block(p, c, ratio, hashed):
    d, f, mix = c.hidden_size, c.moe_intermediate_size, (2 + c.hc_mult) * c.hc_mult
    out = [(p + "attn_norm.weight", (d,), "bf16"), (p + "ffn_norm.weight", (d,), "bf16")]
    for part in ("attn", "ffn"):
        out += [
            (f"{p}hc_{part}_fn", (mix, c.hc_mult * d), "f32"),
            (f"{p}hc_{part}_base", (mix,), "f32"),
            (f"{p}hc_{part}_scale", (3,), "f32"),
        ]
    out += attention(p + "attn.", c, ratio)
    out += [(p + "ffn.gate.weight", (c.n_routed_experts, d), "bf16")]
    out += (
        [(p + "ffn.gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), "i64")]
        if hashed
        else [(p + "ffn.gate.bias", (c.n_routed_experts,), "f32")]
    )
    for expert, storage in [
        *((f"experts.{e}", "fp4") for e in range(c.n_routed_experts)),
        ("shared_experts", "fp8"),
    ]:
        out += [
            (f"{p}ffn.{expert}.w1", (f, d), storage),
            (f"{p}ffn.{expert}.w3", (f, d), storage),
            (f"{p}ffn.{expert}.w2", (d, f), storage),
        ]
    return out


def attention(p, c, ratio):
    d, q, heads = c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.head_dim
    out = [
        (p + "attn_sink", (c.num_attention_heads,), "f32"),
        (p + "wq_a", (q, d), "fp8"),
        (p + "wq_b", (heads, q), "fp8"),
        (p + "wkv", (c.head_dim, d), "fp8"),
        (p + "q_norm.weight", (q,), "bf16"),
        (p + "kv_norm.weight", (c.head_dim,), "bf16"),
        (p + "wo_a", (c.o_groups * c.o_lora_rank, heads // c.o_groups), "fp8"),
        (p + "wo_b", (d, c.o_groups * c.o_lora_rank), "fp8"),
    ]
    if ratio:
        out += compressor(p + "compressor.", d, c.head_dim, ratio)
    if ratio == 4:
        out += [
            (p + "indexer.wq_b", (c.index_n_heads * c.index_head_dim, q), "fp8"),
            (p + "indexer.weights_proj.weight", (c.index_n_heads, d), "bf16"),
        ]
        out += compressor(p + "indexer.compressor.", d, c.index_head_dim, ratio)
    return out


def compressor(p, d, width, ratio):
    wide = width * (2 if ratio == 4 else 1)
    return [
        (p + "wkv.weight", (wide, d), "bf16"),
        (p + "wgate.weight", (wide, d), "bf16"),
        (p + "ape", (ratio, wide), "f32"),
        (p + "norm.weight", (width,), "bf16"),
    ]
