"""The official layout in and out: values against the golden vectors, slices, writing."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.official import SINGLE, OfficialCheckpoint
from dspark_jax.checkpoints.safetensors_file import SafetensorsFile
from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.checkpoints.writer import write_official
from dspark_jax.config import ModelConfig, tiny, v4_flash_0731
from dspark_jax.errors import CheckpointError
from dspark_jax.loading.load import expected_tensors

from helpers import official_table
from helpers.official_files import CONFIG, GOLDENS, SMALL, SPECS, poison, values_for, write_small


def vector(name):
    """One tensor of the primitives file as NumPy, 8-bit floats as bytes."""
    file = SafetensorsFile(GOLDENS / "primitives.safetensors")
    entry = file.entries[name]
    rows = entry.shape[0]
    raw = file.read(name, slice(0, rows), slice(0, entry.nbytes // rows))
    dtype = {"F32": np.float32, "I32": np.int32, "I64": np.int64}.get(entry.dtype, np.uint8)
    return raw.view(dtype).reshape(entry.shape)


# Number formats


def test_e8m0_values():
    assert np.array_equal(formats.E8M0[vector("e8m0.byte")], vector("e8m0.value"))
    assert (
        formats.E8M0[0] == 2.0**-127
        and formats.E8M0[254] == 2.0**127
        and np.isnan(formats.E8M0[255])
    )


def test_e2m1_low_nibble_first():
    ones = np.full((1, 1), 127, np.uint8)
    packed = np.full((1, 16), 0x21, np.uint8)
    assert formats.dequantise_fp4(packed, ones)[0, :2].tolist() == [0.5, 1.0]
    every = vector("e2m1.packed").reshape(16, 16)
    values = formats.dequantise_fp4(every, np.full((16, 1), 127, np.uint8)).reshape(256, 2)
    assert values.tobytes() == vector("e2m1.unpacked_values").tobytes()  # bits: -0 too


def test_e2m1_rounding():
    source = vector("e2m1.round_in").reshape(-1, 32).copy()
    packed, scale = formats.quantise_fp4(np.where(np.abs(source) > 6, 0, source))
    kept = np.abs(source).max(axis=1) <= 6
    values = formats.dequantise_fp4(packed, scale)
    exact = kept & (scale[:, 0] == 127)
    assert exact.any()
    assert np.array_equal(values[exact], vector("e2m1.round_out").reshape(-1, 32)[exact])


def test_fp4_weight():
    packed, scale = vector("fp4_weight.packed"), vector("fp4_weight.scale")
    assert np.array_equal(formats.dequantise_fp4(packed, scale), vector("fp4_weight.dequant"))


def test_fp8_weight_with_partial_blocks():
    codes, scale = vector("fp8_weight.q"), vector("fp8_weight.scale")
    wanted = vector("fp8_weight.dequant")  # [160, 192]: the edge blocks are partial
    assert np.array_equal(formats.dequantise_fp8(codes, scale), wanted)
    part = formats.dequantise_fp8(codes[100:140, 120:190], scale, 100, 120)
    assert np.array_equal(part, wanted[100:140, 120:190])


def test_subnormal_scale_is_exact():
    codes = np.arange(256, dtype=np.uint8)[None]
    codes = codes[:, (codes[0] & 0x7F) != 0x7F]
    product = formats.dequantise_fp8(codes, np.zeros((1, 2), np.uint8)).astype(np.float64)
    assert np.array_equal(product, formats.E4M3[codes].astype(np.float64) * 2.0**-127)
    packed = np.full((1, 16), 0x21, np.uint8)
    assert formats.dequantise_fp4(packed, np.zeros((1, 1), np.uint8))[0, 1] == np.float32(2.0**-127)


@pytest.mark.parametrize("shape", [(128, 128), (130, 260), (1, 3)])
def test_fp8_quantisation(shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    values *= np.exp2(np.random.default_rng(2).integers(-20, 20, (shape[0], 1))).astype(np.float32)
    codes, scale = formats.quantise_fp8(values)
    back = formats.dequantise_fp8(codes, scale)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = values[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            amax = np.abs(block).max()
            step = formats.E8M0[scale[i, j]]
            assert amax <= 448 * step and step / 2 < amax / 448 * (
                1 + 1e-6
            )  # the smallest power of two that fits
            wanted = (block / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * step
            assert np.array_equal(back[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128], wanted)
    assert np.array_equal(formats.dequantise_fp8(*formats.quantise_fp8(back)), back)


def test_fp4_quantisation():
    values = np.random.default_rng(1).standard_normal((9, 128)).astype(np.float32)
    values[3] = 0
    packed, scale = formats.quantise_fp4(values)
    back = formats.dequantise_fp4(packed, scale)
    steps = np.repeat(formats.E8M0[scale], 32, axis=1)
    grid = np.abs(np.abs(values / steps)[..., None] - formats.E2M1[:8]).min(axis=-1)
    assert np.array_equal(
        np.abs(values / steps - back / steps), grid
    )  # always the nearest magnitude
    assert not back[3].any()
    assert np.array_equal(formats.dequantise_fp4(*formats.quantise_fp4(back)), back)


# The golden checkpoint and slices


def test_every_golden_tensor_is_claimed_once():
    with OfficialCheckpoint.open(GOLDENS) as checkpoint:
        checkpoint.check(SPECS)
        assert checkpoint.kind == "dspark"
        assert sorted(name for spec in SPECS for name in spec.stored()) == checkpoint.names()
        assert ModelConfig.from_dict(checkpoint.config_dict) == CONFIG


def test_the_model_declares_exactly_the_table():
    for config in (CONFIG, tiny()):
        declared = {
            (spec.name, tuple(spec.shape), spec.storage)
            for spec in expected_tensors(config).values()
        }
        assert declared == {
            (spec.name, spec.shape, spec.storage) for spec in official_table.expected(config)
        }


def test_the_table_gives_the_stage_sizes_of_the_real_checkpoint():
    names = [name for spec in official_table.expected(v4_flash_0731()) for name in spec.stored()]
    assert [sum(name.startswith(f"mtp.{s}.") for name in names) for s in range(3)] == [
        1568,
        1565,
        1572,
    ]


@pytest.mark.parametrize(
    "name, rows, cols",
    [
        ("embed.weight", slice(3, 9), None),
        ("embed.weight", slice(3, 9), slice(5, 77)),
        ("layers.0.attn.wq_b", slice(100, 300), None),
        ("layers.0.attn.wo_a", slice(1, 127), slice(127, 130)),
        ("layers.0.attn.wo_a", None, slice(128, 192)),
        ("layers.2.ffn.experts.3.w1", slice(7, 8), slice(33, 90)),
        ("layers.0.ffn.gate.tid2eid", slice(250, 256), None),
        ("layers.0.hc_attn_base", slice(4, 8), None),
        ("layers.0.attn.wkv", slice(5, 5), None),
    ],
)
def test_a_slice_equals_the_slice_of_the_whole(name, rows, cols):
    spec = next(spec for spec in SPECS if spec.name == name)
    with OfficialCheckpoint.open(GOLDENS) as checkpoint:
        part, whole = checkpoint.read(spec, rows, cols), checkpoint.read(spec)
    whole = whole[rows or slice(None)] if cols is None else whole[rows or slice(None), cols]
    assert (
        part.dtype == whole.dtype
        and part.shape == whole.shape
        and part.tobytes() == whole.tobytes()
    )


def test_packed_rows():
    spec = next(spec for spec in SPECS if spec.name == "layers.2.ffn.experts.3.w2")
    with OfficialCheckpoint.open(GOLDENS) as checkpoint:
        codes, scales = checkpoint.read_codes(spec), checkpoint.read_scales(spec)
        assert (
            codes.dtype == scales.dtype == np.uint8
            and codes.shape == (128, 64)
            and scales.shape == (128, 4)
        )
        assert np.array_equal(formats.dequantise_fp4(codes, scales), checkpoint.read(spec))
        assert np.array_equal(checkpoint.read_codes(spec, slice(5, 9)), codes[5:9])
        assert np.array_equal(checkpoint.read_scales(spec, slice(5, 9)), scales[5:9])
        for read in (checkpoint.read_codes, checkpoint.read_scales):
            with pytest.raises(ValueError, match="only fp4 is packed"):
                read(SPECS[0])


def test_a_slice_touches_only_its_bytes(tmp_path):
    """A file of 64 GiB, empty but for its header: reading a few rows of it costs a few rows."""
    rows, width = 1 << 25, 1024
    header = json.dumps(
        {
            "big.weight": {
                "dtype": "BF16",
                "shape": [rows, width],
                "data_offsets": [0, rows * width * 2],
            }
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / SINGLE
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * width * 2)
        file.seek(8 + len(header) + (rows - 2) * width * 2)
        file.write(np.arange(width, dtype=np.float32).astype(ml_dtypes.bfloat16).tobytes())
    with OfficialCheckpoint.open(tmp_path) as checkpoint:
        values = checkpoint.read(
            TensorSpec("big.weight", (rows, width), "bf16"), slice(rows - 3, rows - 1)
        )
    assert values.shape == (2, width) and not values[0].any()
    assert np.array_equal(values[1], np.arange(width, dtype=np.float32).astype(ml_dtypes.bfloat16))


def test_faults_outside_a_slice_do_not_matter(tmp_path):
    write_small(tmp_path)
    poison(tmp_path, "layers.0.w.scale", (0, 2), 255)
    with OfficialCheckpoint.open(tmp_path) as checkpoint:
        assert np.isfinite(checkpoint.read(SMALL[1], slice(128, 200))).all()
        assert np.isfinite(checkpoint.read(SMALL[1], slice(0, 128), slice(0, 256))).all()
        with pytest.raises(
            CheckpointError, match=r"layers.0.w.scale\[0, 2\] is e8m0 byte 255, NaN"
        ):
            checkpoint.read(SMALL[1], slice(0, 1), slice(256, 257))


@pytest.mark.parametrize("part", [slice(-1, 3), slice(0, 7), slice(4, 2), slice(0, 4, 2)])
def test_impossible_slices(tmp_path, part):
    with (
        OfficialCheckpoint.open(write_small(tmp_path)) as checkpoint,
        pytest.raises(ValueError, match="embed.weight: slice"),
    ):
        checkpoint.read(SMALL[0], part)


# Writing


@pytest.mark.parametrize("shard", [None, 60_200, 1])
def test_write_and_read_back(tmp_path, shard):
    tokenizer = tmp_path / "given.json"
    tokenizer.write_text('{"model": {}}')
    seen = []
    write_small(
        tmp_path / "out",
        max_shard_bytes=shard,
        tokenizer=tokenizer,
        progress=lambda *bytes: seen.append(bytes),
    )
    with OfficialCheckpoint.open(tmp_path / "out") as checkpoint:
        checkpoint.check(SMALL)
        assert len(checkpoint.files) == {None: 1, 60_200: 2, 1: 5}[shard]
        for spec in SMALL:
            wanted, got = values_for(spec), checkpoint.read(spec)
            if spec.storage == "fp8":
                wanted = formats.dequantise_fp8(*formats.quantise_fp8(wanted))
            elif spec.storage == "fp4":
                wanted = formats.dequantise_fp4(*formats.quantise_fp4(wanted))
            assert np.array_equal(got, wanted.astype(got.dtype)), spec.name
        assert (
            checkpoint.entry("ids").start % 8 == 0
        )  # other readers need elements at multiples of their size
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    assert seen[-1][0] == seen[-1][1] and len(seen) == len(SMALL)
    assert not list((tmp_path / "out").glob(".*"))


def test_the_golden_checkpoint_survives_a_copy_byte_for_byte(tmp_path):
    with OfficialCheckpoint.open(GOLDENS) as checkpoint:

        def stored(spec):
            if spec.storage == "fp4":
                return checkpoint.read_codes(spec), checkpoint.read_scales(spec)
            return checkpoint.read(spec)

        write_official(
            tmp_path,
            checkpoint.config_dict,
            [(spec, lambda spec=spec: stored(spec)) for spec in SPECS],
            1_000_000,
        )
        with OfficialCheckpoint.open(tmp_path) as copy:
            copy.check(SPECS)
            assert len(copy.files) > 3 and copy.config_dict == checkpoint.config_dict
            assert all(
                copy.read(spec).tobytes() == checkpoint.read(spec).tobytes() for spec in SPECS
            )


def test_blocks_of_rows_are_written_as_the_whole(tmp_path):
    spec = SMALL[1]
    values = values_for(spec)
    write_official(tmp_path / "a", {}, [(spec, values)])
    write_official(tmp_path / "b", {}, [(spec, lambda: iter([values[:128], values[128:]]))])
    assert (tmp_path / "a" / SINGLE).read_bytes() == (tmp_path / "b" / SINGLE).read_bytes()
    with pytest.raises(ValueError, match="inside a 128-row quantisation block"):
        write_official(tmp_path / "c", {}, [(spec, lambda: iter([values[:100], values[100:]]))])
    with pytest.raises(ValueError, match="128 rows given"):
        write_official(tmp_path / "c", {}, [(spec, lambda: iter([values[:128]]))])
    assert not list((tmp_path / "c").iterdir())


def test_a_failed_write_changes_nothing(tmp_path):
    before = {path.name: path.read_bytes() for path in write_small(tmp_path).iterdir()}

    def full():
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device.*unchanged"):
        write_official(tmp_path, {}, [(SMALL[0], values_for(SMALL[0])), (SMALL[4], full)], 10)
    with pytest.raises(CheckpointError, match="base: holds NaN or infinity"):
        write_official(tmp_path, {}, [(SMALL[4], np.array([0, np.nan, 1], np.float32))])
    with pytest.raises(CheckpointError, match="base: given twice"):
        write_official(tmp_path, {}, [(SMALL[4], values_for(SMALL[4]))] * 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shards_replace_a_single_file_and_back(tmp_path):
    write_small(tmp_path, max_shard_bytes=1)
    write_small(tmp_path, max_shard_bytes=60_200)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    write_small(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", SINGLE]


def test_a_target_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_small(tmp_path / "file" / "below")


@pytest.mark.parametrize("first", ["dspark_jax.checkpoints.official", "dspark_jax"])
def test_either_package_may_be_imported_first(first):
    subprocess.run(
        [sys.executable, "-c", f"import {first}"], check=True, cwd=Path(__file__).parent.parent
    )
