"""Every fault that a checkpoint can have is one clear error, before anything is allocated."""

import json
import struct

import numpy as np
import pytest

from dspark_jax.checkpoints import formats
from dspark_jax.checkpoints.official import INDEX, SINGLE, OfficialCheckpoint
from dspark_jax.checkpoints.tensor_spec import TensorSpec
from dspark_jax.checkpoints.writer import write_official
from dspark_jax.errors import CheckpointError

from helpers.official_files import (
    GOLDENS,
    SMALL,
    SPECS,
    edit_header,
    poison,
    values_for,
    write_small,
)

# Faults of files


def fault(directory):
    with pytest.raises(CheckpointError) as error:
        OfficialCheckpoint.open(directory)
    return str(error.value)


def test_no_checkpoint(tmp_path):
    assert "no such checkpoint directory" in fault(tmp_path / "absent")
    assert f"neither {SINGLE} nor {INDEX}" in fault(tmp_path)
    write_small(tmp_path, max_shard_bytes=1)
    (tmp_path / SINGLE).write_bytes(b"")
    assert "has both" in fault(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_truncated_file(tmp_path, keep):
    raw = (write_small(tmp_path) / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(raw[:keep])
    assert "truncated" in fault(tmp_path) and SINGLE in fault(tmp_path)


def test_bytes_after_the_end(tmp_path):
    with open(write_small(tmp_path) / SINGLE, "ab") as file:
        file.write(b"x")
    assert "its header describes only" in fault(tmp_path)


def test_damaged_headers(tmp_path):
    path = write_small(tmp_path) / SINGLE
    good = path.read_bytes()

    def broken(change):
        path.write_bytes(good)
        edit_header(path, change)
        return fault(tmp_path)

    assert "the header is not JSON" in broken(lambda header: "{")
    assert "base: in the header twice" in broken(
        lambda header: json.dumps(header)[:-1] + ', "base": {}}'
    )
    assert "base: header entry" in broken(lambda header: header["base"].update(dtype="F99"))
    assert "base: F32 [4] does not fit" in broken(lambda header: header["base"].update(shape=[4]))
    assert "the header is damaged" in broken(lambda header: header.pop("base") and None)
    path.write_bytes(struct.pack("<Q", 1 << 40) + good)
    assert "truncated" in fault(tmp_path)


def test_all_faults_of_shards_in_one_error(tmp_path):
    write_small(tmp_path, max_shard_bytes=1)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    edit_header(
        shards[2],
        lambda header: {name.replace("e.", "other."): entry for name, entry in header.items()},
    )
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(shards[3].read_bytes())
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["extra"] = shards[4].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    message = fault(tmp_path)
    for line in (
        f"{shards[0].name}: missing",
        f"{shards[1].name}: the file has",
        f"other.weight: in {shards[2].name}, but the index",
        f"e.scale: the index says {shards[2].name}",
        "model-00009-of-00009.safetensors: the index does not name",
        f"extra: the index says {shards[4].name}",
    ):
        assert line in message, line


def test_a_key_in_two_shards(tmp_path):
    write_small(tmp_path, max_shard_bytes=1)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[4].write_bytes(shards[0].read_bytes())
    assert f"embed.weight: in {shards[0].name} and again in {shards[4].name}" in fault(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "m", "a": "n"}}',
    ],
)
def test_indexes_that_are_none(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    assert f"{INDEX}: not understood" in fault(tmp_path)


# Faults of tensors


def checked(directory, specs):
    with OfficialCheckpoint.open(directory) as checkpoint, pytest.raises(CheckpointError) as error:
        checkpoint.check(specs)
    return str(error.value)


def test_missing_unexpected_misshapen_and_mistyped_in_one_error(tmp_path):
    write_small(tmp_path)
    specs = [
        TensorSpec("embed.weight", (6, 11), "bf16"),
        TensorSpec("layers.0.w", (200, 300), "fp4"),
        TensorSpec("e", (7, 96), "fp4"),
        TensorSpec("base", (3,), "bf16"),
        TensorSpec("norm.weight", (3,), "bf16"),
        TensorSpec("e", (7, 96), "fp4"),
    ]
    message = checked(tmp_path, specs)
    for line in (
        "missing: norm.weight",
        "unexpected: ids",
        "wrong: embed.weight: has shape [6, 10], expected [6, 11]",
        "wrong: layers.0.w.weight: is F8_E4M3, expected I8 or U8",
        "wrong: layers.0.w.weight: has shape [200, 300], expected [200, 150]",
        "wrong: layers.0.w.scale: has shape [2, 3], expected [200, 9]",
        "wrong: base: is F32, expected BF16",
        "claimed twice: e.weight",
    ):
        assert line in message, line


@pytest.mark.parametrize(
    "drop", ["mtp.1.attn.wkv.scale", "layers.3.ffn.experts.5.w2.weight", "norm.weight"]
)
def test_a_dropped_tensor_is_named(tmp_path, drop):
    names = OfficialCheckpoint.open(GOLDENS).names()
    renamed = tmp_path / SINGLE
    renamed.write_bytes((GOLDENS / SINGLE).read_bytes())
    edit_header(
        renamed,
        lambda header: {name if name != drop else "stray": entry for name, entry in header.items()},
    )
    message = checked(tmp_path, SPECS)
    assert (
        f"missing: {drop}" in message
        and "unexpected: stray" in message
        and "2 problems" in message
        and len(names) == 827
    )


@pytest.mark.parametrize(
    "dtype, sound", [("U8", True), ("F8_E8M0", True), ("F8_E4M3", False), ("I8", False)]
)
def test_scale_dtypes(tmp_path, dtype, sound):
    write_small(tmp_path)
    edit_header(tmp_path / SINGLE, lambda header: header["e.scale"].update(dtype=dtype))
    if sound:
        with OfficialCheckpoint.open(tmp_path) as checkpoint:
            checkpoint.check(SMALL)
            wanted = formats.dequantise_fp4(*formats.quantise_fp4(values_for(SMALL[2])))
            assert np.array_equal(checkpoint.read(SMALL[2]), wanted)
    else:  # an e8m0 scale read as e4m3 would be silently wrong
        assert f"wrong: e.scale: is {dtype}, expected F8_E8M0 or U8" in checked(tmp_path, SMALL)


def test_fp4_codes_as_unsigned_bytes(tmp_path):
    write_small(tmp_path)
    with OfficialCheckpoint.open(tmp_path) as checkpoint:
        signed = checkpoint.read_codes(SMALL[2])
    edit_header(tmp_path / SINGLE, lambda header: header["e.weight"].update(dtype="U8"))
    with OfficialCheckpoint.open(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read_codes(SMALL[2]), signed)


def test_nan_scale_is_refused_by_name(tmp_path):
    write_small(tmp_path)
    poison(tmp_path, "e.scale", (4, 1), 255)
    with OfficialCheckpoint.open(tmp_path) as checkpoint:
        for read in (checkpoint.read, checkpoint.read_scales):
            with pytest.raises(CheckpointError, match=r"e.scale\[4, 1\] is e8m0 byte 255, NaN"):
                read(SMALL[2])


def test_integers_outside_their_range(tmp_path):
    for bad in (8, -1, 2**40):
        write_official(tmp_path, {}, [(SMALL[3], np.full((5, 2), bad))])
        with OfficialCheckpoint.open(tmp_path) as checkpoint:
            with pytest.raises(CheckpointError, match=f"ids holds {bad}, outside 0..7"):
                checkpoint.read(SMALL[3])


def test_a_serial_mtp_checkpoint_is_named_as_such(tmp_path):
    kinds = {
        ".main_proj.": ".e_proj.",
        ".main_norm.": ".enorm.",
        ".markov_head.markov_w1.": ".hnorm.",
    }
    path = tmp_path / SINGLE
    path.write_bytes((GOLDENS / SINGLE).read_bytes())

    def rename(header):
        out = {}
        for name, entry in header.items():
            for old, new in kinds.items():
                name = name.replace(old, new)
            out[name.replace(".confidence_head.", ".h_proj.")] = entry
        return out

    edit_header(path, rename)
    message = checked(tmp_path, SPECS)
    assert r"serial multi-token-prediction (MTP) head (mtp.0.e_proj, mtp.0.enorm" in message
    assert "needs a DSpark checkpoint" in message and "\n" not in message


def test_other_names(tmp_path):
    write_small(tmp_path, [TensorSpec("model.layers.0.norm.weight", (3,), "bf16")])
    assert "named as by Hugging Face transformers" in checked(tmp_path, SPECS)
    write_small(tmp_path)
    assert "holds no draft module" in checked(tmp_path, SPECS)
