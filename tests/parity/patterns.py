"""The tiny models of the comparison: one official config dict each, with the prompt lengths at
which something changes.

Hugging Face allows ratios 0, 4 and one other in a model. Lengths are chosen around the window,
around every ratio and, for the indexer, beyond the point where it has to leave entries out.
"""

from dataclasses import dataclass, field

_BASE = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 1024,
    "expert_dtype": "fp4",
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 255,
    "dspark_markov_rank": 32,
}


@dataclass(frozen=True)
class Pattern:
    """`ratios` of the main layers, `hash_layers` of them routed by token id, changed config `keys`,
    and where to look.

    `lengths`: prompts given in one prefill. `decode`: (prompt length, decoded tokens) pairs.
    """

    ratios: tuple
    hash_layers: int
    lengths: tuple
    decode: tuple
    keys: dict = field(default_factory=dict)

    @property
    def config(self):
        """The official config.json as a dict: one draft stage, tapping the first and the last
        layer.
        """
        layers = len(self.ratios)
        return (
            _BASE
            | {
                "num_hidden_layers": layers,
                "num_hash_layers": self.hash_layers,
                "n_mtp_layers": 1,
                "compress_ratios": [*self.ratios, 0],
                "dspark_target_layer_ids": sorted({0, layers - 1}),
            }
            | self.keys
        )

    @property
    def longest(self):
        """Tokens of the longest sequence in the comparison."""
        return max(*self.lengths, *(prompt + steps for prompt, steps in self.decode))


PATTERNS = {
    "golden": Pattern(
        (0, 0, 4, 8, 4, 8, 4), 3, (1, 3, 4, 5, 8, 15, 16, 17, 41, 67), ((1, 20), (13, 50))
    ),
    "window": Pattern((0, 0, 0), 0, (1, 2, 15, 16, 17, 33, 50), ((1, 8), (14, 20))),
    "overlapped": Pattern(
        (4, 4, 4), 1, (1, 3, 4, 7, 8, 16, 17, 33, 70), ((2, 40), (31, 20)), {"index_topk": 3}
    ),
    "plain first": Pattern((8, 4, 0, 8), 4, (1, 7, 8, 9, 16, 40, 49), ((6, 36), (16, 9))),
    "real ratios": Pattern(
        (0, 0, 4, 128, 4),
        2,
        (1, 127, 128, 129, 300),
        ((120, 16), (250, 12)),
        {"sliding_window": 32},
    ),
    "other shapes": Pattern(
        (4, 16, 4, 0),
        1,
        (1, 5, 15, 16, 17, 64, 65),
        ((10, 30), (64, 5)),
        {
            "vocab_size": 101,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "head_dim": 48,
            "qk_rope_head_dim": 24,
            "q_lora_rank": 160,
            "o_groups": 2,
            "o_lora_rank": 80,
            "sliding_window": 5,
            "index_n_heads": 10,
            "index_head_dim": 64,
            "index_topk": 4,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 0.7,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "hc_eps": 1e-4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500,
            "dspark_noise_token_id": 100,
            "dspark_markov_rank": 16,
            "dspark_block_size": 3,
        },
    ),
}
