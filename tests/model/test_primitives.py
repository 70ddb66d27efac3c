"""The building blocks of spec sections 3, 4, 5 and 8 against goldens/primitives.safetensors.
Discrete results: as bits.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import pallas_kernels
from dspark_jax.checkpoints import formats
from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.model.layers import hyper_connection, moe
from dspark_jax.model.layers.attention import Attention, absorb, finish, start
from dspark_jax.model.layers.hyper_connection import HyperConnection
from dspark_jax.model.layers.indexer import hadamard
from dspark_jax.model.layers.norm import RMSNorm
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.model.layers.rope import MAX_POSITIONS, inverse_frequencies, rotate, rotation
from dspark_jax.model.parameters import Maker, RandomSource
from dspark_jax.pallas_kernels import fp4
from dspark_jax.pallas_kernels.activation import (
    act_quant,
    fp4_act_quant,
    power_of_two_scale,
    round_to_e2m1,
)

from helpers.support import GOLDENS, max_error, product_weight, same_sets

CONFIG = ModelConfig.from_file(GOLDENS)


def same_bits(actual, expected):
    return np.array_equal(
        np.asarray(actual, np.float32).view(np.uint32),
        np.asarray(expected, np.float32).view(np.uint32),
    )


# Number formats


def test_e2m1_codes_unpack_low_nibble_first(primitives):
    values = fp4.decode_e2m1(fp4.unpack(jnp.asarray(primitives["e2m1.packed"])[:, None]))
    assert np.array_equal(values, primitives["e2m1.unpacked_values"])
    assert fp4.decode_e2m1(fp4.unpack(jnp.array([0x21], jnp.uint8))).tolist() == [0.5, 1.0]
    assert not np.array_equal(values[:, ::-1], primitives["e2m1.unpacked_values"])


def test_e2m1_rounds_ties_to_the_even_code(primitives):
    assert np.array_equal(round_to_e2m1(primitives["e2m1.round_in"]), primitives["e2m1.round_out"])
    assert round_to_e2m1(jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [
        0,
        1,
        1,
        2,
        2,
        4,
        4,
    ]
    codes = formats.E2M1[primitives["e2m1.round_code"]]
    assert np.array_equal(codes, primitives["e2m1.round_out"])


def test_e8m0_bytes(primitives):
    """The device's scales are products of two normal numbers, so that byte 0 (2^-127, a subnormal)
    survives a CPU that flushes subnormals.
    """
    bytes_, values = primitives["e8m0.byte"], primitives["e8m0.value"].astype(np.float64)
    assert np.array_equal(formats.E8M0[bytes_], values)
    factors = np.asarray(fp4.decode_e8m0(bytes_))
    assert np.array_equal(factors.astype(np.float64).prod(axis=0), values) and len(values) == 254
    assert factors.min() >= 2.0**-126 and np.isfinite(factors).all()


def test_e8m0_nan_is_refused():
    with pytest.raises(ValueError, match=r"w: e8m0 byte 255 \(NaN\) at \(1, 0\)"):
        fp4.check_scales(np.array([[1, 254], [255, 0]], np.uint8), "w")


def test_fp4_weight(primitives):
    packed, scale, expected = (
        primitives[f"fp4_weight.{name}"] for name in ("packed", "scale", "dequant")
    )
    assert np.array_equal(fp4.dequantise(packed, scale), expected)  # code 8 is +0 there
    assert same_bits(fp4.np_dequantise(packed, scale), expected)
    assert same_bits(formats.dequantise_fp4(packed, scale), expected)
    assert np.array_equal(fp4.dequantise(packed, scale, jnp.bfloat16).astype(jnp.float32), expected)


def test_fp8_weight(primitives):
    values = formats.dequantise_fp8(
        primitives["fp8_weight.q"].view(np.uint8), primitives["fp8_weight.scale"]
    )
    assert same_bits(values, primitives["fp8_weight.dequant"])


# Activation quantisation


@pytest.mark.parametrize("name, block", [("b128k256", 128), ("b128k64", 128), ("b64k192", 64)])
def test_act_quant(primitives, name, block):
    x, out = primitives[f"act_quant.{name}.in"], primitives[f"act_quant.{name}.out"]
    assert same_bits(act_quant(x, block), out)
    assert same_bits(jax.jit(lambda x: act_quant(x, block))(x), out)
    scales = 2.0 ** (primitives[f"act_quant.{name}.scale_byte"].astype(np.float64) - 127)
    scales = np.repeat(scales, block, axis=1)[:, : x.shape[1]]
    assert np.array_equal(primitives[f"act_quant.{name}.q"].astype(np.float64) * scales, out)


def test_act_quant_needs_its_own_block(primitives):
    assert not same_bits(
        act_quant(primitives["act_quant.b64k192.in"], 128), primitives["act_quant.b64k192.out"]
    )


def test_a_key_is_quantised_in_blocks_of_64_without_its_rotary_channels(primitives):
    """192 of the first kind: the golden models' 64 would look the same in blocks of 128."""
    x, out = primitives["act_quant.b64k192.in"], primitives["act_quant.b64k192.out"]
    rotary = np.random.default_rng(0).standard_normal((len(x), 32)).astype(np.float32)
    attention = types.SimpleNamespace(plain=192, numerics=Numerics("float32", True))
    key = Attention.quantise_key(attention, jnp.concatenate([x, rotary], axis=1))
    assert same_bits(key, np.concatenate([out, rotary], axis=1))


def test_act_quant_passes_gradients_through(primitives):
    gradient = jax.grad(lambda x: jnp.sum(act_quant(x, 64) ** 2))(
        primitives["act_quant.b64k192.in"]
    )
    assert np.array_equal(gradient, 2 * primitives["act_quant.b64k192.out"])


def test_scale_is_exact_at_powers_of_two():
    """amax / 448 a power of two: that power; the next float above: twice it."""
    exact = np.float32(448) * np.float32(2.0) ** np.arange(-10, 11, dtype=np.float32)
    scale = np.asarray(power_of_two_scale(jnp.asarray(exact), 448.0))
    reciprocal = exact * np.float32(1 / 448)
    assert np.array_equal(scale, 2.0 ** np.ceil(np.log2(reciprocal.astype(np.float64))))
    above = np.asarray(power_of_two_scale(jnp.asarray(exact * np.float32(1.0001)), 448.0))
    assert np.array_equal(above, 2.0 ** np.arange(-9, 12))


def test_fp4_act_quant(primitives):
    assert np.array_equal(
        fp4_act_quant(primitives["fp4_act_quant.in"]), primitives["fp4_act_quant.out"]
    )
    scales = np.repeat(
        2.0 ** (primitives["fp4_act_quant.scale_byte"].astype(np.float64) - 127), 32, axis=1
    )
    assert np.array_equal(
        formats.E2M1[primitives["fp4_act_quant.code"]] * scales, primitives["fp4_act_quant.out"]
    )


@pytest.mark.parametrize("width", [32, 64, 128])
def test_hadamard(primitives, width):
    x, out = primitives[f"hadamard{width}.in"], primitives[f"hadamard{width}.out"]
    assert max_error(hadamard(jnp.asarray(x)), out) < 2e-6
    assert max_error(hadamard(jnp.asarray(out)), x) < 2e-6  # it is its own inverse
    assert max_error(x, out) > 0.1


# Linears and experts


@pytest.mark.parametrize("columns_first", [False, True])
def test_fp8_linear(primitives, columns_first):
    weight = formats.dequantise_fp8(
        primitives["fp8_linear.weight"].view(np.uint8), primitives["fp8_linear.scale"]
    )
    weight = product_weight(weight, columns_first)
    x, y = primitives["fp8_linear.x"], primitives["fp8_linear.y"]
    tolerance = 1e-6 * np.abs(y).max()
    assert max_error(Numerics().linear(x, weight), y) < tolerance
    assert max_error(Numerics(activation_quant=False).linear(x, weight), y) > 100 * tolerance


def expert_arrays(primitives, packed: bool) -> pallas_kernels.Experts:
    part = lambda name, kind: primitives[f"fp4_expert.{name}.{kind}"]
    w13, s13 = (
        np.concatenate([part("w1", kind), part("w3", kind)])[None] for kind in ("weight", "scale")
    )
    w2, s2 = part("w2", "weight")[None], part("w2", "scale")[None]
    if packed:
        return pallas_kernels.Experts(w13, s13, w2, s2)
    w13, w2 = (formats.dequantise_fp4(w[0], s[0])[None] for w, s in ((w13, s13), (w2, s2)))
    return pallas_kernels.Experts(w13, None, w2, None)


@pytest.mark.parametrize(
    "packed, regime", [(True, "decode"), (False, "decode"), (False, "prefill")]
)
@pytest.mark.parametrize("mode", ["float", "reference"])
def test_fp4_expert(primitives, packed, regime, mode):
    x, expected = primitives["fp4_expert.x"], primitives[f"fp4_expert.y_{mode}"]
    weights, ids, mask = (
        primitives["fp4_expert.route_weight"][:, None],
        np.zeros((5, 1), np.int32),
        np.ones(5, bool),
    )
    moe = jax.jit(
        pallas_kernels.moe_fp4, static_argnames=("swiglu_limit", "activation_quant", "regime")
    )
    y = moe(
        x,
        ids,
        weights,
        mask,
        expert_arrays(primitives, packed),
        swiglu_limit=float(primitives["fp4_expert.swiglu_limit"][0]),
        activation_quant=mode == "reference",
        regime=regime,
    )
    other = primitives[f"fp4_expert.y_{'float' if mode == 'reference' else 'reference'}"]
    tolerance = 2e-6 * np.abs(expected).max()
    assert max_error(y, expected) < tolerance < max_error(y, other) / 100


def by_expert(weights, ids):
    """The weights [n, A] in the order of their experts' ids."""
    return np.take_along_axis(np.asarray(weights), np.argsort(ids, axis=-1), axis=-1)


def test_router(primitives):
    """One-hot rows read the golden logits out of the gate weight."""
    logits, rows = primitives["router.logits"], primitives["router.logits"].shape[0]
    config = dataclasses.replace(
        CONFIG, routed_scaling_factor=float(primitives["router.route_scale"][0])
    )
    layer = moe.MoE(
        config,
        Numerics(activation_quant=False),
        False,
        Maker(RandomSource(0), ("",), stacked=False),
    )
    gate = np.zeros((8, CONFIG.hidden_size), np.float32)
    gate[:, :rows] = logits.T
    layer.gate[...], layer.bias[...] = jnp.asarray(gate), jnp.asarray(primitives["router.bias"])
    chosen, weights, scores = layer.route(
        np.eye(rows, CONFIG.hidden_size, dtype=np.float32), np.zeros(rows, np.int32)
    )
    assert same_sets(chosen, primitives["router.idx"])
    assert (
        max_error(
            by_expert(weights, chosen),
            by_expert(primitives["router.weights"], primitives["router.idx"]),
        )
        < 1e-6
    )
    unbiased = jax.lax.top_k(scores, 2)[1]
    assert not same_sets(unbiased, primitives["router.idx"])  # the vectors need the bias


# Hyper-connections


def hyper_connection_with(primitives, case: str) -> tuple[HyperConnection, tuple]:
    """A HyperConnection and streams whose projections are the golden `mixes`: the rows are one-hot,
    with rms 1.
    """
    mixes, copies = primitives[f"sinkhorn.{case}.mixes"], 4
    config = types.SimpleNamespace(
        hc_mult=copies,
        hidden_size=16,
        hc_sinkhorn_iters=int(primitives[f"sinkhorn.{case}.iters"][0]),
        hc_eps=float(primitives[f"sinkhorn.{case}.eps"][0]),
        rms_norm_eps=0.0,
    )
    layer = HyperConnection(config, "attn", "float32", Maker(RandomSource(0), ("",), stacked=False))
    rows, width = mixes.shape[0], copies * config.hidden_size
    fn = np.zeros((mixes.shape[1], width), np.float32)
    fn[:, :rows] = mixes.T / np.sqrt(width)
    layer.fn[...] = jnp.asarray(fn)
    layer.base[...], layer.scale[...] = (
        jnp.asarray(primitives[f"sinkhorn.{case}.{name}"]) for name in ("base", "scale")
    )
    x = np.eye(rows, width, dtype=np.float32) * np.float32(np.sqrt(width))
    return layer, tuple(jnp.asarray(x.reshape(1, rows, copies, -1)[:, :, j]) for j in range(copies))


@pytest.mark.parametrize("case", ["it20", "it3"])
def test_sinkhorn(primitives, case):
    layer, streams = hyper_connection_with(primitives, case)
    pre, post, mix = jax.jit(layer.weights)(streams)
    assert max_error(pre[:, 0].T, primitives[f"sinkhorn.{case}.pre"]) < 2e-6
    assert max_error(post[:, 0].T, primitives[f"sinkhorn.{case}.post"]) < 2e-6
    comb = np.moveaxis(mix[:, :, 0], 2, 0)
    assert max_error(comb, primitives[f"sinkhorn.{case}.comb"]) < 2e-6
    assert max_error(np.swapaxes(comb, 1, 2), primitives[f"sinkhorn.{case}.comb"]) > 1e-2


def test_sinkhorn_counts_iterations(primitives):
    layer, streams = hyper_connection_with(primitives, "it3")
    layer.iterations = 4
    assert (
        max_error(
            np.moveaxis(jax.jit(layer.weights)(streams)[2][:, :, 0], 2, 0),
            primitives["sinkhorn.it3.comb"],
        )
        > 1e-5
    )


def test_sinkhorn_columns_sum_to_one():
    """The last operation normalises columns: the new streams are averages of the old ones."""
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 7)) * 3, jnp.float32)
    mix = jax.jit(hyper_connection.sinkhorn, static_argnums=(1, 2))(scores, 20, 1e-6)
    assert max_error(mix.sum(0), np.ones((4, 7))) < 1e-5


def test_hc_post(primitives):
    layer, _ = hyper_connection_with(primitives, "it20")
    residual, y = primitives["hc_post.residual"], primitives["hc_post.y"]
    streams = tuple(jnp.asarray(residual[None, :, j]) for j in range(4))
    post, mix = (
        primitives["sinkhorn.it20.post"].T[:, None],
        np.moveaxis(primitives["sinkhorn.it20.comb"], 0, 2)[:, :, None],
    )
    out = np.stack(layer.expand(streams, y[None], (post, mix)), axis=2)[0]
    assert max_error(out, primitives["hc_post.out"]) < 2e-6
    transposed = np.stack(layer.expand(streams, y[None], (post, np.swapaxes(mix, 0, 1))), axis=2)[0]
    assert max_error(transposed, primitives["hc_post.out"]) > 1e-2


# Attention


def test_sink_attention(primitives):
    """The sink enters the denominator only; a key that is not listed takes no part; the order of
    blocks does not matter.
    """
    q, keys, sink = (primitives[f"sink_attn.{name}"] for name in ("q", "kv", "sink"))
    index = primitives["sink_attn.idx"]
    visible = np.stack([np.isin(np.arange(keys.shape[0]), row[row >= 0]) for row in index])[None]
    keys = keys[None]

    @jax.jit
    def attend(sink, *blocks):
        """Blocks of keys, each with what is visible of it, one after another."""
        running = start(sink, q[None])
        for block, seen in blocks:
            running = absorb(running, q[None], block, seen)
        return finish(running, "float32")[0]

    halves = [(keys[:, part], visible[..., part]) for part in (slice(3, None), slice(0, 3))]
    for blocks in ([(keys, visible)], halves):
        assert max_error(attend(sink, *blocks), primitives["sink_attn.out"]) < 1e-6
    assert (
        max_error(attend(np.full_like(sink, -1e9), (keys, visible)), primitives["sink_attn.out"])
        > 1e-3
    )


# Rotary positions


tables = jax.jit(rotation, static_argnums=(0, 1))


@pytest.mark.parametrize(
    "name, config, compressed",
    [
        ("A_main", CONFIG, False),
        ("A_compress_yarn", CONFIG, True),
        ("real_main", v4_flash_0731(), False),
        ("real_compress_yarn", v4_flash_0731(), True),
    ],
)
def test_inverse_frequencies(primitives, name, config, compressed):
    expected = primitives[f"rope.inv_freq.{name}"].astype(np.float64)
    assert np.max(np.abs(inverse_frequencies(config, compressed) / expected - 1)) < 1e-6
    assert np.max(np.abs(inverse_frequencies(config, not compressed) / expected - 1)) > 0.1


def test_yarn_ramp_beyond_the_last_frequency():
    """The ramp may end anywhere up to index r - 1 = 63, though there are 32 frequencies: here it
    goes from 30 to 40.
    """
    config = v4_flash_0731()
    scaling = dataclasses.replace(config.rope_scaling, original_max_position_embeddings=2**24)
    config = dataclasses.replace(config, rope_scaling=scaling)
    plain = 160000.0 ** (-np.arange(32) / 32)
    share = np.where(np.arange(32) == 31, 0.1, 0.0)
    assert np.allclose(
        inverse_frequencies(config, True), plain * (1 - share) + plain / 16 * share, rtol=1e-12
    )


@pytest.mark.parametrize("name, compressed", [("plain_theta1e4", False), ("yarn_configA", True)])
def test_rope(primitives, name, compressed):
    turn = tuple(part[:, None] for part in tables(CONFIG, compressed, primitives["rope.pos"]))
    turned, back = (
        jax.jit(rotate, static_argnames="inverse")(primitives["rope.in"], turn, inverse=inverse)
        for inverse in (False, True)
    )
    assert max_error(turned, primitives[f"rope.{name}.fwd"]) < 1e-6
    assert max_error(back, primitives[f"rope.{name}.inv"]) < 1e-6
    assert max_error(turned, primitives[f"rope.{name}.inv"]) > 0.1


def positions_up_to_a_million() -> np.ndarray:
    edges = [
        0,
        1,
        255,
        256,
        257,
        1023,
        1024,
        1025,
        65535,
        65536,
        999_999,
        MAX_POSITIONS - 1024,
        MAX_POSITIONS - 1,
    ]
    return np.concatenate(
        [edges, np.random.default_rng(0).integers(0, MAX_POSITIONS, 2000)]
    ).astype(np.int32)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("config", [CONFIG, v4_flash_0731()], ids=["golden", "0731"])
def test_rope_to_a_million(config, compressed):
    """Against float64. A float32 product position * frequency is wrong by 1e-2 there, and bfloat16
    positions by everything.
    """
    positions = positions_up_to_a_million()
    frequencies = inverse_frequencies(config, compressed)
    exact = positions[:, None].astype(np.float64) * frequencies
    cos, sin = tables(config, compressed, positions)
    tolerance = 3e-7
    assert max_error(cos, np.cos(exact)) < tolerance and max_error(sin, np.sin(exact)) < tolerance
    product = (positions[:, None].astype(np.float32) * frequencies.astype(np.float32)).astype(
        np.float64
    )
    assert max_error(np.cos(product), np.cos(exact)) > 1000 * tolerance
    coarse = np.asarray(jnp.asarray(positions, jnp.bfloat16), np.float64)[:, None] * frequencies
    assert max_error(np.cos(coarse), np.cos(exact)) > 1


def test_rotation_of_each_layer_kind():
    """Window layers and draft stages: plain 10000. Compressed layers: 160000 with YaRN and no
    amplitude factor.
    """
    config = v4_flash_0731()
    plain, yarn = inverse_frequencies(config, False), inverse_frequencies(config, True)
    assert np.allclose(plain, 10000.0 ** (-np.arange(32) / 32), rtol=1e-12)
    assert yarn[0] == 1.0 and np.isclose(yarn[-1], 160000.0 ** (-31 / 32) / 16, rtol=1e-12)
    cos, sin = tables(config, True, positions_up_to_a_million())
    assert max_error(cos**2 + sin**2, np.ones(cos.shape)) < 1e-6


def test_norm_has_no_one_plus_weight():
    norm = RMSNorm("norm", 3, 1e-6, "float32", Maker(RandomSource(0), ("",), stacked=False))
    norm.weight[...] = jnp.array([0.5, -2.0, 0.0])
    x = np.array([[3.0, -4.0, 5.0]], np.float32)
    assert max_error(norm(x), np.array([0.5, -2.0, 0.0]) * x / np.sqrt(50 / 3 + 1e-6)) < 1e-6
