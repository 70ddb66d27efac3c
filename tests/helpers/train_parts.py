"""A model of two layers, small enough to be trained in tests."""

import dataclasses

from dspark_jax.config import tiny

VOCAB = 64
CONFIG = dataclasses.replace(
    tiny(),
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=24,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=2,
    num_hash_layers=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    hc_mult=2,
    hc_sinkhorn_iters=2,
    compress_ratios=(0, 4, 0),
    dspark_block_size=3,
    dspark_markov_rank=8,
    dspark_noise_token_id=1,
    dspark_target_layer_ids=(0, 1),
    eos_token_id=(0,),
)
