"""`dspark inspect` of what `dspark convert` wrote: counts from the manifest, and what it was made
from.
"""

import json
import shutil
from collections import Counter

import pytest

from dspark_jax.checkpoints.orbax_io import MANIFEST, UNITS, ConvertedCheckpoint
from dspark_jax.commands import main
from dspark_jax.errors import CheckpointError
from dspark_jax.loading.summary import inspect_checkpoint


def test_the_same_parameters_as_the_official_one_in_the_precisions_that_are_held(source, converted):
    official, summary = inspect_checkpoint(source), inspect_checkpoint(converted)
    assert (summary.config, summary.kind, summary.problem) == (official.config, "dspark", None)
    assert summary.expert_storage.packed_bytes == official.expert_storage.packed_bytes
    assert by_part(summary) == by_part(official)
    packed = [[part for part in s.parts if part.precision == "fp4"] for s in (official, summary)]
    assert packed[0] == packed[1] != []
    # Vectors are held in float32, also those that are stored in bfloat16.
    width = {"bf16": 2, "f32": 4, "i32": 4}
    assert set(summary.by_precision()) == {*width, "fp4"}
    assert all(
        part.bytes == part.parameters * width[part.precision]
        for part in summary.parts
        if part.precision != "fp4"
    )
    assert summary.bytes == sum(
        leaf.nbytes for leaf in ConvertedCheckpoint.open(converted).leaves().values()
    )


def by_part(summary) -> Counter:
    counts = Counter()
    for part in summary.parts:
        counts[part.module, part.part] += part.parameters
    return counts


def test_what_it_was_converted_from(source, converted, capsys):
    assert main.main(["inspect", str(converted), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    manifest = json.loads((converted / MANIFEST).read_text())
    files = list(source.glob("*.safetensors"))
    assert out["converted_from"] == {
        "path": str(source),
        "files": len(files),
        "bytes": sum(f.stat().st_size for f in files),
        "checksums": sum(len(unit["pieces"]) for unit in manifest["units"]),
    }
    assert (
        out["files"] == len(list((converted / UNITS).iterdir()))
        and out["tensors"] <= out["converted_from"]["checksums"]
    )
    assert main.main(["inspect", str(converted)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"{out['tensors']:,} tensors in {out['files']} units" in text
        and "converted from" in text
        and "checksums that" in text
    )
    assert inspect_checkpoint(source).origin is None


def test_a_conversion_of_an_older_version_does_not_say_from_where(converted, tmp_path, capsys):
    ours = shutil.copytree(converted, tmp_path / "ours")
    manifest = json.loads((ours / MANIFEST).read_text())
    del manifest["source_path"]
    (ours / MANIFEST).write_text(json.dumps(manifest))
    assert main.main(["inspect", str(ours)]) == 0
    assert "converted from an official checkpoint (10 files" in " ".join(
        capsys.readouterr().out.split()
    )


def test_no_array_is_read(converted, tmp_path):
    """Only the units' places are there."""
    ours = tmp_path / "ours"
    for name in ("config.json", MANIFEST):
        ours.mkdir(exist_ok=True)
        shutil.copy(converted / name, ours)
    for unit in (converted / UNITS).iterdir():
        (ours / UNITS / unit.name).mkdir(parents=True)
    here, there = inspect_checkpoint(ours), inspect_checkpoint(converted)
    assert (here.parts, here.origin, here.config, here.tensors) == (
        there.parts,
        there.origin,
        there.config,
        there.tensors,
    )


def test_what_cannot_be_loaded_is_said(converted, tmp_path, capsys):
    ours = tmp_path / "ours"
    shutil.copytree(converted, ours)
    manifest = json.loads((ours / MANIFEST).read_text())
    unit = next(
        unit for unit in manifest["units"] if ".experts." not in unit["pieces"][0]["name"]
    )  # experts lie in several units
    lost = unit["pieces"].pop(0)["name"]
    (ours / MANIFEST).write_text(json.dumps(manifest))
    assert main.main(["inspect", str(ours), "--json"]) == 1
    assert f"missing: {lost}" in json.loads(capsys.readouterr().out)["problem"]
    (ours / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="has lost its manifest.json"):
        inspect_checkpoint(ours)
