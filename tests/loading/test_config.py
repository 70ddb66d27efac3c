"""ModelConfig: both key families give one config, and what does not fit is refused by key."""

import dataclasses
import json
from pathlib import Path

import pytest

from dspark_jax.config import ModelConfig, tiny, v4_flash_0731
from dspark_jax.errors import ConfigError

GOLDENS = Path(__file__).parents[1] / "goldens"

# The inference config of V4-Flash-0731 in the keys of the reference code, which leaves norm_eps and
# hc_eps to its defaults.
REFERENCE = {
    "vocab_size": 129280,
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 43,
    "n_hash_layers": 3,
    "n_mtp_layers": 3,
    "n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "dtype": "fp8",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def golden() -> dict:
    return json.loads((GOLDENS / "config.json").read_text())


def test_official_file():
    config = ModelConfig.from_file(GOLDENS)
    assert config == ModelConfig.from_file(GOLDENS / "config.json")
    assert (config.hidden_size, config.n_draft_stages, config.n_hidden_taps) == (128, 3, 3)
    assert config.compress_ratios == (0, 0, 4, 8, 4, 8, 4) + (0, 0, 0)
    assert (config.num_hidden_layers, config.num_hash_layers) == (7, 3)
    assert config.rope_scaling.original_max_position_embeddings == 64 and config.eos_token_id == (
        1,
    )
    assert config.max_position_embeddings == 1024


def test_stage_count_comes_from_the_ratios_not_from_num_nextn_predict_layers():
    values = golden()
    assert values["num_nextn_predict_layers"] == 1
    del values["n_mtp_layers"]
    assert ModelConfig.from_dict(values).n_draft_stages == 3
    with pytest.raises(ConfigError, match="n_mtp_layers = 1: compress_ratios has 3 entries"):
        ModelConfig.from_dict({**values, "n_mtp_layers": 1})


def test_both_key_families_name_the_same_model():
    flash = v4_flash_0731()
    reference = ModelConfig.from_dict(REFERENCE)
    assert dataclasses.replace(reference, bos_token_id=0, eos_token_id=(1,)) == flash
    assert reference.eos_token_id == ()  # the reference config names none
    assert flash.n_draft_stages == 3 and len(flash.compress_ratios) == 46


@pytest.mark.parametrize("config", [v4_flash_0731(), tiny(), ModelConfig.from_file(GOLDENS)])
def test_round_trip_and_hash(config):
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(dataclasses.replace(config))


def test_the_tiny_preset_is_the_shipped_checkpoint():
    assert ModelConfig.from_file(GOLDENS.parent.parent / "checkpoints" / "tiny") == tiny()


def test_keys_without_effect_are_accepted():
    extra = {
        "architectures": ["Any"],
        "transformers_version": "5",
        "torch_dtype": "float16",
        "initializer_range": 1.0,
        "use_cache": False,
        "attention_dropout": 0.5,
    }
    assert ModelConfig.from_dict({**golden(), **extra}) == ModelConfig.from_dict(golden())


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("topk_method", "greedy", "topk_method = 'greedy': allowed is 'noaux_tc'"),
        ("norm_topk_prob", False, "norm_topk_prob = False: allowed is True"),
        ("norm_topk_prob", 1, "norm_topk_prob = 1: allowed is True"),
        ("attention_bias", True, "attention_bias = True: allowed is False"),
        ("tie_word_embeddings", True, "tie_word_embeddings = True: allowed is False"),
        ("scoring_func", "softmax", "scoring_func = 'softmax': allowed is 'sqrtsoftplus'"),
        ("expert_dtype", "fp8", "expert_dtype = 'fp8': allowed is 'fp4'"),
        ("hidden_act", "gelu", "hidden_act = 'gelu': allowed is 'silu'"),
        ("n_shared_experts", 2, "n_shared_experts = 2: allowed is 1"),
        ("num_key_value_heads", 8, "num_key_value_heads = 8: allowed is 1"),
        ("model_type", "deepseek_v3", "model_type = 'deepseek_v3': allowed is 'deepseek_v4'"),
        (
            "quantization_config",
            {"weight_block_size": [64, 64]},
            "quantization_config.weight_block_size .* allowed is .128, 128.",
        ),
        (
            "quantization_config",
            {"bits": 4},
            "quantization_config.bits = 4: this key is not understood",
        ),
        ("engram_layer_ids", [1], "engram_layer_ids = .1.: this key is not understood"),
        (
            "slidding_window",
            8,
            "slidding_window = 8: this key is not understood .is it sliding_window",
        ),
        ("window_size", 8, "window_size = 8 contradicts sliding_window = 16"),
        ("rope_factor", 8, "rope_scaling is given, and so is rope_factor"),
        ("rope_scaling", None, "rope_scaling = None: expected an object"),
        (
            "rope_scaling",
            {"type": "linear", "factor": 2},
            "rope_scaling.type = 'linear': allowed is 'yarn'",
        ),
        ("rope_scaling", {"factor": 2}, "rope_scaling.beta_fast: missing"),
        ("vocab_size", True, "vocab_size = True: expected an integer >= 1"),
        ("hidden_size", 128.0, "hidden_size = 128.0: expected an integer"),
        ("hidden_size", 100, "hidden_size = 100: must be a multiple of 32"),
        ("swiglu_limit", None, "swiglu_limit = None: expected a number"),
        ("rms_norm_eps", 0, "rms_norm_eps = 0.0: expected a number > 0"),
        pytest.param(
            "rope_theta",
            10**400,
            "rope_theta = 1000.*: expected a number > 0 that a float can hold",
            id="rope_theta-huge",
        ),
        (
            "rope_scaling",
            {
                "factor": 10**400,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "rope_scaling.factor = 1000.*: expected a number that a float can hold",
        ),
        (
            "rope_scaling",
            {
                "factor": 2,
                "original_max_position_embeddings": 10**400,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "rope_scaling.original_max_position_embeddings = 1000.*: expected a number",
        ),
        ("qk_rope_head_dim", 31, "qk_rope_head_dim = 31: must be even"),
        ("qk_rope_head_dim", 96, "qk_rope_head_dim = 96: must be even and less than head_dim = 96"),
        ("index_head_dim", 48, "index_head_dim = 48: must be a power of two"),
        ("index_head_dim", 16, "index_head_dim = 16: must be at least qk_rope_head_dim"),
        ("o_groups", 3, "o_groups = 3: must divide num_attention_heads = 8"),
        ("num_experts_per_tok", 9, "num_experts_per_tok = 9: more than n_routed_experts = 8"),
        ("num_hash_layers", 8, "num_hash_layers = 8: more than num_hidden_layers = 7"),
        ("compress_ratios", [0] * 7, "compress_ratios: 7 entries for num_hidden_layers = 7"),
        (
            "compress_ratios",
            [0, 0, 4, 8, 4, 8, -4, 0, 0, 0],
            r"compress_ratios\[6\] = -4: must be 0 or more",
        ),
        (
            "compress_ratios",
            [0, 0, 4, 8, 4, 8, 4, 0, 4, 0],
            r"compress_ratios\[8\] = 4: entries after the 7 main layers",
        ),
        ("dspark_target_layer_ids", [4, 5, 5], "dspark_target_layer_ids = .4, 5, 5.: duplicate"),
        (
            "dspark_target_layer_ids",
            [-1, 5, 6],
            "dspark_target_layer_ids = .-1, 5, 6.: a layer number is negative",
        ),
        (
            "dspark_target_layer_ids",
            [6, 5, 4],
            "dspark_target_layer_ids = .6, 5, 4.: must be in ascending order",
        ),
        (
            "dspark_target_layer_ids",
            [4, 5, 7],
            "dspark_target_layer_ids = .4, 5, 7.: the last main layer is 6",
        ),
        ("dspark_target_layer_ids", [], "dspark_target_layer_ids = ..: must name at least one"),
        (
            "dspark_noise_token_id",
            256,
            "dspark_noise_token_id = 256: outside the vocabulary 0..255",
        ),
        ("eos_token_id", [1, 256], "eos_token_id = 256: outside the vocabulary"),
        ("dspark_block_size", 0, "dspark_block_size = 0: expected an integer >= 1"),
    ],
)
def test_refused_by_key(key, value, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**golden(), key: value})


def test_replacing_a_value_is_checked_too():
    with pytest.raises(ConfigError, match="num_experts_per_tok = 99"):
        dataclasses.replace(tiny(), num_experts_per_tok=99)


def test_all_problems_in_one_error():
    values = {**golden(), "topk_method": "x", "foo": 1, "num_experts_per_tok": 9}
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(values)
    assert all(
        key in str(error.value)
        for key in ("3 problems", "topk_method", "foo", "num_experts_per_tok")
    )
    with pytest.raises(ConfigError, match="head_dim: missing"):
        ModelConfig.from_dict(
            {name: value for name, value in golden().items() if name != "head_dim"}
        )


def test_other_kinds_are_named():
    serial = {
        name: value for name, value in golden().items() if not name.startswith(("dspark", "n_mtp"))
    }
    with pytest.raises(
        ConfigError,
        match=r"serial multi-token-prediction \(MTP\) model \(1 MTP layer, no DSpark keys\)",
    ):
        ModelConfig.from_dict({**serial, "compress_ratios": serial["compress_ratios"][:8]})
    with pytest.raises(ConfigError, match="without a draft module"):
        ModelConfig.from_dict({**serial, "num_nextn_predict_layers": 0})


def test_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        ModelConfig.from_file(tmp_path)
    path.write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(ConfigError, match="key given twice: vocab_size"):
        ModelConfig.from_file(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="expected an object"):
        ModelConfig.from_file(tmp_path)
