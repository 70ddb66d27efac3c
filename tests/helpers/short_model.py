"""The golden model without its first three layers: programs of half the length, which compile in
half the time.

What is left has both kinds of compressed layers, the indexer, and a segment of two layers that is
scanned twice; what is missing are layers with a window alone and routing by token id. The weights
and the drafter are the golden ones, but for attention's output: in twice as many groups, each of
half as many channels. Sums of these are short enough for a one-token decode to carry two rows,
where the golden model's carries the six of a verify block: more that could differ.

Tests of state, of rounds and of generate run on it in `make test`, on the golden model in
`make heavy`.
"""

import dataclasses

import dspark_jax as dspark
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.config import ModelConfig
from dspark_jax.loading.load import DSpark
from dspark_jax.loading.sources import OfficialSource
from dspark_jax.model.dspark import make_limits
from dspark_jax.model.layers.numerics import Numerics

from helpers.support import GOLDENS, MAX_SEQ_LEN

GOLDEN = ModelConfig.from_file(GOLDENS)
LEFT_OUT = 3
CONFIG = dataclasses.replace(
    GOLDEN,
    num_hidden_layers=GOLDEN.num_hidden_layers - LEFT_OUT,
    num_hash_layers=0,
    compress_ratios=GOLDEN.compress_ratios[LEFT_OUT:],
    dspark_target_layer_ids=tuple(i - LEFT_OUT for i in GOLDEN.dspark_target_layer_ids),
    o_groups=2 * GOLDEN.o_groups,
    o_lora_rank=GOLDEN.o_lora_rank // 2,
)


class _LaterLayers(OfficialSource):
    def fill(self, out, declared, prefix, bounds):
        part, _, number = prefix.removesuffix(".").partition(".")
        if part == "layers":
            prefix = f"layers.{int(number) + LEFT_OUT}."
        if declared.tensor == "attn.wo_a":  # the first half of the golden columns
            rows, columns = declared.shape
            declared = dataclasses.replace(declared, shape=(rows, 2 * columns))
        super().fill(out, declared, prefix, bounds)


def short_model(activation_quant: bool) -> dspark.Model:
    numerics = Numerics("float32", activation_quant)
    with OfficialCheckpoint.open(GOLDENS) as checkpoint:
        source = _LaterLayers(checkpoint, numerics, packed_experts=False)
        module = DSpark(CONFIG, numerics, source)
    limits = make_limits(CONFIG, MAX_SEQ_LEN)
    assert limits.decode_rows == 2
    return dspark.Model(CONFIG, None, module, limits, numerics, "dequantised")
