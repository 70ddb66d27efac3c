"""Conversion by several processes: each reads its part, all must see the same files, and one that
dies is named.
"""

import json

import jax
import pytest

from dspark_jax.checkpoints import convert as conversion
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.orbax_io import MANIFEST, UNITS
from dspark_jax.errors import CheckpointError

from helpers import convert_parts as parts
from helpers.processes import free_port


@pytest.mark.heavy
def test_two_processes_read_halves_and_write_the_same(source, held, tmp_path):
    first, second = (
        parts.result(running)["experts"] for running in two_processes(source, tmp_path / "new")
    )
    stored = sum(
        len(data)
        for name, (_, _, data) in held.items()
        if ".experts." in name and name.endswith(".packed")
    )
    assert first == second == stored // 2
    assert parts.contents(tmp_path / "new") == held
    conversion.verify(tmp_path / "new")


def two_processes(source, target, dies="", mesh=""):
    port = free_port()
    return [
        parts.start(2, "process", source, target, port, index, dies, mesh) for index in range(2)
    ]


@pytest.mark.heavy
def test_parts_that_several_devices_hold_are_counted_once(source, held, tmp_path):
    """Bits and checksums are the same whatever the mesh: in one process of 4 devices, and in two
    that each hold everything.
    """
    parts.result(parts.start(4, "replicated", source, tmp_path))
    for running in two_processes(source, tmp_path / "two", mesh="2x2"):
        parts.result(running)
    units = [
        json.loads((tmp_path / name / MANIFEST).read_text())["units"]
        for name in ("1x4", "2x2", "4x1", "two")
    ]
    assert all(described == units[0] for described in units)
    for name in ("1x4", "2x2", "4x1", "two"):
        assert parts.contents(tmp_path / name) == held
        conversion.verify(tmp_path / name)


@pytest.mark.heavy
def test_one_of_two_processes_dies_and_one_process_goes_on(source, held, tmp_path):
    """Process 0, which the other one needs most, in its fourth unit: three are done."""
    dies, stays = two_processes(source, tmp_path / "new", dies="0:4")
    dies.communicate(timeout=300)
    _, said = stays.communicate(timeout=60)
    assert (dies.returncode, stays.returncode) == (-9, 1)
    assert (
        "dspark convert: process 1 lost another one of the 2 processes" in said
        and "Traceback" not in said
    )
    assert len(list((tmp_path / "new" / UNITS).glob("*.done"))) == 3
    seen = []
    parts.convert(source, tmp_path / "new", progress=lambda *done: seen.append(done))
    assert seen[0][0] > 0 and parts.contents(tmp_path / "new") == held


@pytest.mark.parametrize(
    "fault, message",
    [
        ("source", "process 0 finds another checkpoint here than process 0"),
        ("target", "process 0 does not see here what process 0 wrote"),
    ],
)
def test_processes_must_see_the_same_files(source, tmp_path, monkeypatch, fault, message):
    """What process 0 broadcasts, or its file, is not what is seen here."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        conversion.multihost_utils,
        "broadcast_one_to_all",
        lambda digest: digest + (fault == "source"),
    )
    (tmp_path / "there").write_text("")
    with OfficialCheckpoint.open(source) as checkpoint:
        seen, found = tmp_path / "there", conversion.fingerprint(checkpoint)
        if fault == "target":
            conversion._require_shared(seen, checkpoint, found)
            seen = tmp_path / "elsewhere"
        with pytest.raises(CheckpointError, match=message):
            conversion._require_shared(seen, checkpoint, found)


def test_processes_look_for_what_process_0_wrote(source, converted, tmp_path, monkeypatch):
    """When there is nothing to do, and when a conversion begins."""
    seen = []
    monkeypatch.setattr(
        conversion, "_require_shared", lambda path, *_: seen.append((path.name, path.exists()))
    )
    parts.convert(source, converted)
    parts.stop_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, tmp_path / "new")
    assert seen == [(MANIFEST, True), (conversion.STATE, True)]
