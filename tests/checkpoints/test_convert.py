"""Conversion of an official checkpoint to sharded Orbax: the same bits on every mesh, every fault
named, nothing half-written taken for whole.
"""

import fcntl
import gc
import json
import os
import re
import resource
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints import convert as conversion
from dspark_jax.checkpoints.official import INDEX, OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import MANIFEST, UNITS, ConvertedCheckpoint
from dspark_jax.checkpoints.safetensors_file import SafetensorsFile
from dspark_jax.commands import byte_progress, main
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.loading.conversion import convert_checkpoint

from helpers import convert_parts as parts
from helpers.official_files import edit_header

SHARD = "model-00004-of-00010.safetensors"


# What a conversion holds.


def test_dtypes_are_kept_and_experts_stay_packed(converted):
    config, leaves = parts.config(), ConvertedCheckpoint.open(converted).leaves()
    e, f, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    for name, shape, dtype in (
        ("ffn.experts.w1-ffn.experts.w3.packed", (e, 2 * f, d // 2), "uint8"),
        ("ffn.experts.w1-ffn.experts.w3.scale", (e, 2 * f, d // 32), "uint8"),
        ("ffn.experts.w2.packed", (e, d, f // 2), "uint8"),
        ("attn.wq_a", (config.q_lora_rank, d), "bfloat16"),
        ("attn_norm.weight", (d,), "float32"),
        ("attn.attn_sink", (config.num_attention_heads,), "float32"),
        ("ffn.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "int32"),
    ):
        leaf = leaves[f"layers.0.{name}"]
        assert (leaf.shape, leaf.dtype) == (shape, dtype)
    stored = sum(path.stat().st_size for path in converted.rglob("*") if path.is_file())
    assert (
        stored < 1.1 * sum(leaf.nbytes for leaf in leaves.values()) + 31 * 30_000
    )  # and Orbax's own files


def test_orbax_alone_restores_a_unit(converted, held):
    checkpoint = ConvertedCheckpoint.open(converted)
    name, unit = next(
        (name, unit)
        for name, unit in checkpoint.units.items()
        if "layers.1-" in name and len(unit.pieces) > 9
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            (converted / UNITS / name).absolute(),
            args=ocp.args.PyTreeRestore(
                restore_args={
                    piece.leaf.name: ocp.RestoreArgs(restore_type=np.ndarray)
                    for piece in unit.pieces
                }
            ),
        )
    assert set(restored) == {piece.leaf.name for piece in unit.pieces}
    for name, array in restored.items():
        assert (array.dtype.name, array.shape, np.asarray(array).tobytes()) == held[name]


@pytest.mark.heavy
def test_every_mesh_gives_the_bits_of_the_official_checkpoint(source, tmp_path):
    outcome = parts.result(parts.start(8, "meshes", source, tmp_path / "saved_on_4"))
    assert outcome["wrong"] == [] and outcome["count"] > 500


def test_loads_like_the_official_directory(source, converted):
    official, other = (dspark.load(path, max_seq_len=64) for path in (source, converted))
    assert (other.config, other.limits, other.numerics) == (
        official.config,
        official.limits,
        official.numerics,
    )
    assert other.tokenizer.to_str() == official.tokenizer.to_str()
    assert all(
        parts.same(a, b)
        for a, b in zip(
            *(jax.tree.leaves(model.split[1]) for model in (official, other)), strict=True
        )
    )


@pytest.mark.heavy
def test_memory_is_bounded(source, tmp_path):
    """Beyond what the mesh holds (nothing while converting), 1.5 times the largest tensor."""
    parts.write_source(tmp_path / "larger", parts.larger_config())
    used = parts.result(parts.start(4, "memory", source, tmp_path / "larger", tmp_path))
    assert used["model"] > 2 * used["largest"] > 30e6, "too small to show anything"
    assert max(used["converting"], used["loading"]) < 1.5 * used["largest"], used


# Killed, and gone on with.


@pytest.mark.parametrize(
    "moment, count",
    [
        ("write_unit", 2),
        pytest.param("sync_tree", 3, marks=pytest.mark.heavy),
        pytest.param("write_json", 2, marks=pytest.mark.heavy),
        ("_remove_traces", 1),
    ],
)
def test_a_killed_conversion_goes_on(source, held, tmp_path, moment, count):
    """In the middle of a unit, before its mark, before the first mark, and when the manifest is
    there but not yet its traces.
    """
    target = tmp_path / "new"
    parts.result(parts.start(1, "die", source, target, moment, count), status=-9)
    if moment == "_remove_traces":
        assert parts.contents(target) == held
    else:
        with pytest.raises(CheckpointError, match="unfinished conversion"):
            dspark.load(target)
    finished = {path.name: path.stat().st_mtime_ns for path in (target / UNITS).glob("*.done")}
    assert (
        len(finished)
        == {"write_unit": 1, "sync_tree": 2, "write_json": 0, "_remove_traces": 31}[moment]
    )
    seen = []
    parts.convert(source, target, progress=lambda *done: seen.append(done))
    assert parts.contents(target) == held
    assert conversion.verify(target) == seen[-1][0] == seen[-1][1]
    assert (seen[0][0] > 0) == bool(finished), "what was done is not done again"
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        MANIFEST,
        "tokenizer.json",
        UNITS,
    ]
    assert {path.name for path in (target / UNITS).iterdir()} == set(
        ConvertedCheckpoint.open(target).units
    )


@pytest.mark.heavy
def test_leftovers_and_damaged_marks_do_not_count(source, held, tmp_path, monkeypatch):
    target = tmp_path / "new"
    parts.stop_after(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, target)
    monkeypatch.undo()
    units, (first, second, third, *_) = target / UNITS, sorted((target / UNITS).glob("*.done"))
    (units / "layers.0-000.orbax-checkpoint-tmp").mkdir()
    (units / "stray").write_text("?")
    first.write_text(first.read_text()[:-20])
    shutil.rmtree(units / second.name.removesuffix(".done"))
    third.write_text(third.read_text().replace('"stop": ', '"stop": 1'))
    again, write = [], conversion.write_unit
    monkeypatch.setattr(
        conversion, "write_unit", lambda path, *rest: (again.append(path.name), write(path, *rest))
    )
    parts.convert(source, target)
    assert {path.name.removesuffix(".done") for path in (first, second, third)} < set(
        again
    ) and len(again) == 31 - 2
    assert parts.contents(target) == held
    assert {path.name for path in units.iterdir()} == set(ConvertedCheckpoint.open(target).units)


def test_only_the_same_source_is_gone_on_with(source, tmp_path, monkeypatch):
    ours, target = parts.copied(source, tmp_path, "ours"), tmp_path / "new"
    parts.stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(ours, target)
    monkeypatch.undo()
    os.utime(ours / SHARD, ns=(1, 1))
    with pytest.raises(CheckpointError, match="another source"):
        parts.convert(ours, target)
    with pytest.raises(CheckpointError, match="another unit_bytes"):
        convert_checkpoint(ours, target, unit_bytes=123_456)


def test_a_source_that_changes_meanwhile_is_refused(source, tmp_path):
    ours = parts.copied(source, tmp_path, "ours")
    with pytest.raises(CheckpointError, match="changed while it was converted"):
        parts.convert(ours, tmp_path / "new", progress=lambda *_: os.utime(ours / SHARD, ns=(1, 1)))
    assert not (tmp_path / "new" / MANIFEST).exists()


def test_done_twice_is_nothing_to_do(source, converted):
    before = {path: path.stat().st_mtime_ns for path in converted.rglob("*") if path != converted}
    parts.convert(source, converted)
    assert {
        path: path.stat().st_mtime_ns for path in converted.rglob("*") if path != converted
    } == before


def test_one_conversion_at_a_time(source, tmp_path):
    def again(*_):
        with pytest.raises(CheckpointError, match="another process is converting"):
            parts.convert(source, tmp_path / "new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, tmp_path / "new", progress=again)


def test_a_lock_whose_file_another_conversion_removes_excludes_nobody(
    source, tmp_path, monkeypatch
):
    """The other one ends between this one's opening the file and locking it; a third would find no
    lock.
    """
    lock, ended = fcntl.flock, iter([True])

    def late(*arguments):
        if next(ended, False):
            (tmp_path / "new" / conversion.LOCK).unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    test_one_conversion_at_a_time(source, tmp_path)


# Damaged sources: refused before the target is touched.


def truncate(directory):
    path = directory / SHARD
    path.write_bytes(path.read_bytes()[:-1000])


def duplicate(directory):
    other = SafetensorsFile(directory / "model-00001-of-00010.safetensors")
    name, size = next((name, entry.nbytes) for name, entry in other.entries.items())

    def rename(header):
        old = next(
            key
            for key, value in header.items()
            if value["data_offsets"][1] - value["data_offsets"][0] > 0
        )
        return {(name if key == old else key): value for key, value in header.items()}

    edit_header(directory / SHARD, rename)


def misdirect(directory):
    index = json.loads((directory / INDEX).read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard == SHARD)
    index["weight_map"][name] = "model-00001-of-00010.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def lose(directory):
    (directory / SHARD).unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (truncate, "truncated"),
        (duplicate, "and again in"),
        (misdirect, "does not hold it"),
        (lose, "missing; the index names it"),
    ],
)
def test_damaged_sources(source, tmp_path, damage, message):
    ours = parts.copied(source, tmp_path)
    damage(ours)
    with pytest.raises(CheckpointError, match=message):
        parts.convert(ours, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_that_cannot_be_read_is_refused_at_once(source, tmp_path):
    ours = parts.copied(source, tmp_path)
    (ours / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="not a readable tokenizer.json"):
        parts.convert(ours, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_numbers_that_bfloat16_cannot_hold_are_refused(source, tmp_path):
    ours = parts.copied(source, tmp_path)
    with OfficialCheckpoint.open(ours) as checkpoint:
        shard = next(
            shard
            for shard, file in checkpoint.files.items()
            if "layers.1.attn.wq_a.weight" in file.entries
        )
        start = checkpoint.entry("layers.1.attn.wq_a.weight").start
    with open(ours / shard, "r+b") as file:
        file.seek(start + 7)
        file.write(b"\x7f")  # NaN in e4m3
    with pytest.raises(CheckpointError, match="layers.1.attn.wq_a holds NaN"):
        parts.convert(ours, tmp_path / "new")


# Targets that cannot be written.


def test_a_disk_that_fills_up(source, held, tmp_path):
    """A limit on the size of files fails inside TensorStore as a full disk does, at the first unit
    of experts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"cannot be written \(.*File too large.*are free.*goes on where it stopped",
        ):
            parts.convert(source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < len(list((tmp_path / "new" / UNITS).glob("*.done"))) < 31
    parts.convert(source, tmp_path / "new")
    assert parts.contents(tmp_path / "new") == held


def test_too_little_room_is_said_at_once(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with pytest.raises(
        CheckpointError, match=r"[\d,]+ bytes are still to be written, 5,000,000 are free"
    ):
        parts.convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="still to be written"):
        parts.convert(source, tmp_path / "empty")
    assert not list((tmp_path / "empty").iterdir())
    monkeypatch.undo()
    parts.stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, tmp_path / "new")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with pytest.raises(CheckpointError, match="still to be written"):
        parts.convert(source, tmp_path / "new")
    assert len(list((tmp_path / "new" / UNITS).glob("*.done"))) == 1, (
        "what an earlier run did stays"
    )


def test_a_refused_target_stays_as_it_was(source, tmp_path, monkeypatch):
    stopped, foreign = tmp_path / "stopped", tmp_path / "foreign"
    parts.stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, stopped)
    foreign.mkdir()
    (foreign / "letter").write_text("")
    for target, message in (
        (source, "is neither empty nor a conversion"),
        (foreign, "is neither empty nor a conversion"),
        (stopped, "another unit_bytes"),
    ):
        before = sorted(target.rglob("*"))
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(source, target)
        assert sorted(target.rglob("*")) == before and not (target / conversion.LOCK).exists()


@pytest.mark.heavy
def test_killed_before_it_wrote_what_it_converts(source, held, tmp_path):
    for name in (conversion.LOCK, f".{conversion.STATE}.partial"):
        (tmp_path / name).write_text("")
    parts.convert(source, tmp_path)
    assert parts.contents(tmp_path) == held
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        MANIFEST,
        "tokenizer.json",
        UNITS,
    ]


def test_read_only_and_impossible_targets(source, converted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Not a directory"):
        parts.convert(source, tmp_path / "file/new")
    with pytest.raises(CheckpointError, match="is neither empty nor a conversion"):
        parts.convert(source, source)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(30, os.strerror(30))))
    with pytest.raises(CheckpointError, match=r"cannot be written \(.*Read-only file system"):
        parts.convert(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Command line.


def test_command(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(byte_progress, "LINE_SECONDS", 0.0)
    assert parts.command(source, tmp_path / "new") == 0
    lines = capsys.readouterr().err.splitlines()
    assert any("MB/s" in line and line.endswith("left") for line in lines)
    assert re.fullmatch(r"converted (\d+\.\d\d) of \1 MB", lines[-1])
    assert parts.command("--verify", tmp_path / "new", "--quiet") == 0
    captured = capsys.readouterr()
    assert "bytes as recorded" in captured.out and not captured.err
    parts.flip(tmp_path / "new")
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        parts.command("--verify", "--quiet", tmp_path / "new")
    for wrong in (
        [source],
        [source, tmp_path, tmp_path],
        ["--verify", source, tmp_path],
        [source, tmp_path, "--mesh", "1x64"],
        [source, tmp_path, "--process-id", 1],
        [source, tmp_path, "--coordinator", "here", "--process-id", 0, "--num-processes", 2],
        ["--verify", tmp_path, "--coordinator", "auto"],
    ):
        with pytest.raises(ConfigError):
            parts.command(*wrong)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verifying", [False, True])
def test_ctrl_c_within_a_callback_of_the_runtime_stops_after_the_unit(
    source, converted, tmp_path, monkeypatch, verifying
):
    """Python drops an exception that is raised within a callback of the garbage collector, such as
    XLA's.
    """

    def strike(*_):
        gc.callbacks.remove(strike)
        signal.raise_signal(signal.SIGINT)

    def struck(function, units=iter(range(1000))):
        def call(*arguments):
            if next(units) == 1:
                gc.callbacks.append(strike)
                gc.collect()
            return function(*arguments)

        return call

    before = signal.getsignal(signal.SIGINT)
    if verifying:
        read, verify = [], ConvertedCheckpoint.verify
        monkeypatch.setattr(
            ConvertedCheckpoint,
            "verify",
            struck(lambda *arguments: (read.append(0), verify(*arguments))[1]),
        )
        assert main.main(["convert", "--verify", str(converted)]) == 130
        assert len(read) == 2
    else:
        monkeypatch.setattr(conversion, "write_unit", struck(conversion.write_unit))
        assert main.main(["convert", str(source), str(tmp_path / "new")]) == 130
        assert len(list((tmp_path / "new" / UNITS).glob("*.done"))) == 2
        monkeypatch.undo()
        assert main.main(["convert", str(source), str(tmp_path / "new")]) == 0
    assert signal.getsignal(signal.SIGINT) is before
