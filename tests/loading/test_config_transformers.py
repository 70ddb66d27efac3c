"""A config.json that Hugging Face transformers 5 saved means what the official one does."""

import pytest

from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.errors import ConfigError

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def saved() -> dict:
    """What transformers 5.24 makes of V4-Flash-0731's config.json, by `save_pretrained`."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_rates": {CSA: 4, HCA: 128},
        "compress_rope_theta": 160000.0,
        "dspark_block_size": 5,
        "dspark_markov_rank": 256,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [40, 41, 42],
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "initializer_range": 0.02,
        "layer_types": ["sliding_attention"] * 2 + [CSA, HCA] * 20 + [CSA],
        "max_position_embeddings": 1048576,
        "mlp_bias": False,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 2048,
        "n_mtp_layers": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 43,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.125,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "compress": {
                "attention_factor": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "original_max_position_embeddings": 65536,
                "partial_rotary_factor": 0.125,
                "rope_theta": 160000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "main": {"partial_rotary_factor": 0.125, "rope_theta": 1e4, "rope_type": "default"},
        },
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "transformers_version": "5.24.0",
        "use_cache": True,
        "vocab_size": 129280,
    }


def test_it_is_the_official_config():
    assert ModelConfig.from_dict(saved()) == v4_flash_0731()


@pytest.mark.parametrize("name", ["qk_rope_head_dim", "rope_theta", "compress_rope_theta"])
def test_what_is_said_twice_may_be_said_once(name):
    values = saved()
    del values[name]
    assert ModelConfig.from_dict(values) == v4_flash_0731()


def test_the_weights_may_have_been_held_in_another_dtype():
    for dtype in ("float32", "float16"):
        assert ModelConfig.from_dict(saved() | {"dtype": dtype}) == v4_flash_0731()


def test_only_the_place_of_expert_dtype_differs():
    """Of the official keys, transformers 5 moves this one even where it keeps all others."""
    values = v4_flash_0731().to_dict()
    values["quantization_config"] = values["quantization_config"] | {
        "expert_dtype": values.pop("expert_dtype")
    }
    assert ModelConfig.from_dict(values) == v4_flash_0731()


WRONG = {
    "another attention": ({"layer_types": ["full"] * 43}, "layer_types holds 'full'"),
    "a layer too few": ({"layer_types": [CSA] * 42}, "layer_types has 42 entries for 43 layers"),
    "hash layers last": (
        {"mlp_layer_types": ["moe"] * 40 + ["hash_moe"] * 3},
        "mlp_layer_types is not a row of 'hash_moe' followed by 'moe'",
    ),
    "two thetas": ({"rope_theta": 5e5}, "rope_theta is 500000.0, but .* say 10000.0"),
    "a bias": ({"mlp_bias": True}, "mlp_bias is true"),
    "rope not nested": ({"rope_parameters": {"rope_type": "yarn"}}, "main is missing"),
    "half a channel": ({"partial_rotary_factor": 0.126}, "rotates 64.512 channels"),
    "not a list": ({"layer_types": None}, "NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_means_something_else_is_one_sentence_that_names_its_origin(case):
    change, message = WRONG[case]
    pattern = f"dir/config.json: .* saved by Hugging Face transformers 5.24.0 .*{message}.*publish"
    with pytest.raises(ConfigError, match=pattern) as error:
        ModelConfig.from_dict(saved() | change, "dir/config.json")
    assert "\n" not in str(error.value)


def test_the_number_of_draft_stages_must_be_known():
    values = saved()
    del values["n_mtp_layers"]
    with pytest.raises(ConfigError, match="does not say how many draft stages there are"):
        ModelConfig.from_dict(values)
