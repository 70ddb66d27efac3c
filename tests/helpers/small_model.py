"""A checkpoint of one layer and one draft stage: its programs compile in half the time of the
golden model's.

For tests of what surrounds a model, the command line and the measured costs. What a model computes
is tested on the golden one.
"""

import dataclasses
from pathlib import Path

from dspark_jax.checkpoints.synthetic import write_synthetic
from dspark_jax.config import ModelConfig

from helpers import official_table
from helpers.support import GOLDENS

# Vocabulary, draft block, window and stop token are the golden model's.
PROMPT = "Ab \u00e9"  # of its tokenizer of single bytes
CONFIG = dataclasses.replace(
    ModelConfig.from_file(GOLDENS),
    num_hidden_layers=1,
    num_hash_layers=0,
    compress_ratios=(0, 0),
    dspark_target_layer_ids=(0,),
    hidden_size=64,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    n_routed_experts=4,
    moe_intermediate_size=32,
    hc_mult=2,
)


def write_small_checkpoint(directory: Path, tokenizer=None) -> None:
    """Random weights whose greedy text varies, and whose drafter is right now and then."""
    specs = official_table.expected(CONFIG)
    write_synthetic(
        directory, CONFIG.to_dict(), specs, seed=3, max_shard_bytes=None, tokenizer=tokenizer
    )
