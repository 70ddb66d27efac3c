"""`dspark inspect`: counts from headers, by part and precision."""

import argparse
import json
import math
import shutil

import pytest

from dspark_jax.checkpoints.official import SINGLE
from dspark_jax.commands import inspect_checkpoint as inspect_command
from dspark_jax.config import ModelConfig, v4_flash_0731
from dspark_jax.errors import CheckpointError
from dspark_jax.loading import parts
from dspark_jax.loading.summary import inspect_checkpoint
from dspark_jax.runtime import backend

from helpers import official_table
from helpers.official_files import (
    CONFIG,
    GOLDENS,
    SPECS,
    edit_header,
    hollow_checkpoint,
    write_small,
)


def command(*arguments):
    parser = argparse.ArgumentParser()
    inspect_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *map(str, arguments)])
    return args.run(args)


def test_counts_of_the_golden_checkpoint():
    summary = inspect_checkpoint(GOLDENS)
    assert summary.parameters == sum(math.prod(spec.shape) for spec in SPECS)
    raw = (GOLDENS / "model.safetensors").read_bytes()
    assert summary.bytes == len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert (
        summary.kind == "dspark"
        and summary.problem is None
        and summary.config == CONFIG
        and summary.tensors == 827
    )
    found = {(part.module, part.part, part.precision): part for part in summary.parts}
    experts = found[
        "main", "routed experts", "fp4"
    ]  # 7 layers of 8 experts with 3 matrices of 128 x 128
    assert (
        experts.parameters == 7 * 8 * 3 * 128 * 128
        and experts.bytes == experts.parameters * (16 + 1) // 32
    )
    assert found["drafter", "Markov head", "bf16"].parameters == 2 * 256 * 32
    assert found["main", "gate", "i64"].parameters == 3 * 256 * 2
    assert not any(part.part == parts.OTHER for part in summary.parts)


def test_every_storage_is_its_precision():
    parts = inspect_checkpoint(GOLDENS).by_precision()
    for storage in ("bf16", "f32", "i64", "fp8", "fp4"):
        assert parts[storage]["parameters"] == sum(
            math.prod(spec.shape) for spec in SPECS if spec.storage == storage
        )


def test_full_size_headers_only(tmp_path):
    hollow_checkpoint(tmp_path, v4_flash_0731(), 46)
    summary = inspect_checkpoint(tmp_path)
    assert summary.files == 46 and summary.tensors == 72317 and summary.config == v4_flash_0731()
    assert summary.parameters == sum(
        math.prod(spec.shape) for spec in official_table.expected(v4_flash_0731())
    )
    assert 284e9 < sum(part.parameters for part in summary.parts if part.module == "main") < 286e9


def test_nothing_is_compiled(monkeypatch):
    """How rows are summed on this machine is found out by compiled programs, and does not matter
    here.
    """
    monkeypatch.setattr(backend, "rows_agree", lambda: pytest.fail("the probes were run"))
    assert inspect_checkpoint(GOLDENS).problem is None


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_what_cannot_be_loaded_is_named(tmp_path, fault):
    """Status 1, as the help says: missing and misshapen tensors are seen in the headers."""
    name = "layers.0.ffn.gate.weight"
    for file in ("config.json", SINGLE):
        shutil.copy(GOLDENS / file, tmp_path)

    def change(header):
        entry = header.pop(name)
        header[name if fault == "wrong" else "layers.0.ffn.gat.weight"] = entry | {
            "shape": entry["shape"][::-1]
        }

    edit_header(tmp_path / SINGLE, change)
    summary = inspect_checkpoint(tmp_path)
    assert f"{fault}: {name}" in summary.problem and summary.config == CONFIG
    assert command(tmp_path) == 1


def test_json_and_table(capsys):
    assert command(GOLDENS, "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert (
        out["parameters"] == sum(part["parameters"] for part in out["parts"])
        and out["bytes"] > 5_000_000
    )
    assert ModelConfig.from_dict(out["config"]) == CONFIG
    assert command(GOLDENS) == 0
    text = capsys.readouterr().out
    assert "routed experts" in text and "6,230,862 parameters" in text and "3 draft stages" in text


def test_what_cannot_be_loaded_is_said(tmp_path, capsys):
    write_small(tmp_path)
    assert command(tmp_path) == 1
    assert "cannot be loaded: the tensors show no DSpark draft module" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    assert command(tmp_path, "--json") == 1
    out = json.loads(capsys.readouterr().out)
    assert (
        out["config"] is None
        and "serial multi-token-prediction" in out["problem"]
        and out["tensors"] == 7
    )
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        command(tmp_path / "absent")
