"""Damaged conversions: `load`, `convert --verify` and a repeated `convert` each say what is wrong,
and advise what works.
"""

import json
import shutil

import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints import convert as conversion
from dspark_jax.checkpoints.orbax_io import MANIFEST, UNITS
from dspark_jax.errors import CheckpointError
from dspark_jax.loading.summary import inspect_checkpoint

from helpers import convert_parts as parts

AGAIN = "remove the directory and convert the official checkpoint again"


@pytest.fixture
def ours(converted, tmp_path):
    return parts.copied(converted, tmp_path)


def edit(target, change, **entries):
    manifest = json.loads((target / MANIFEST).read_text()) | entries
    change(manifest["units"])
    (target / MANIFEST).write_text(json.dumps(manifest))


def lose_data(target):
    parts.largest_file(target / UNITS / "layers.2-000").unlink()


def lose_unit(target):
    shutil.rmtree(target / UNITS / "layers.1-000")


def lose_metadata(target):
    (target / UNITS / "layers.1-000" / "_METADATA").unlink()


def swap(target):
    a, b = target / UNITS / "layers.1-001", target / UNITS / "layers.3-001"
    a.rename(target / "a")
    b.rename(a)
    (target / "a").rename(b)


def change_config(target):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def lose(name):
    return lambda target: (target / name).unlink()


# --verify.


@pytest.mark.parametrize(
    "damage, message",
    [
        (parts.flip, "does not hold what was written"),
        (lose_data, "cannot be read"),
        (swap, "cannot be read|does not hold"),
        (lose_unit, f"{AGAIN}.*\n  units/layers.1-000: missing"),
        (lose_metadata, "units/layers.1-000: _METADATA is missing"),
        (change_config, "config.json: is not what was converted"),
        (lose("config.json"), "config.json: cannot be read"),
        (
            lose("tokenizer.json"),
            "copy the files of the official checkpoint here.*\n  tokenizer.json: cannot be read",
        ),
    ],
)
def test_verify_finds_damage(ours, damage, message):
    assert conversion.verify(ours) > 12_000_000
    damage(ours)
    with pytest.raises(CheckpointError, match=message):
        conversion.verify(ours)


def test_verify_names_all_that_is_wrong(ours):
    for damage in (parts.flip, lose_data, lose_metadata, change_config):
        damage(ours)
    with pytest.raises(CheckpointError, match="(?s)4 problems.*_METADATA.*config.json"):
        conversion.verify(ours)


def test_a_conversion_of_an_older_version_has_no_checksum_of_its_tokenizer(ours):
    manifest = json.loads((ours / MANIFEST).read_text())
    del manifest["texts"]
    (ours / MANIFEST).write_text(json.dumps(manifest))
    lose("tokenizer.json")(ours)
    conversion.verify(ours)
    change_config(ours)
    with pytest.raises(CheckpointError, match="config.json: is not what was converted"):
        conversion.verify(ours)


def test_verify_says_what_is_no_conversion(source, tmp_path):
    (tmp_path / "file").write_text("")
    for path, message in (
        (source, "an official checkpoint, not a converted one; `dspark convert`"),
        (tmp_path, "not a converted"),
        (tmp_path / "nothing", "no such checkpoint directory"),
        (tmp_path / "file", "a file, where a checkpoint directory is expected"),
    ):
        with pytest.raises(CheckpointError, match=message):
            conversion.verify(path)


# load.


def lose_piece(units):
    """A later part of experts that several units hold."""
    piece = next(unit for unit in units if unit["pieces"][0]["start"] > 0)["pieces"].pop(0)
    assert piece["name"].startswith("layers.0.ffn.experts")


def repeat_piece(units):
    """The first part of such experts in place of the second."""
    second = next(unit for unit in units if unit["pieces"][0]["start"] > 0)["pieces"][0]
    second["start"], second["stop"] = 0, second["stop"] - second["start"]


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda target: shutil.rmtree(target / UNITS / "layers.2-001"),
            "units/layers.2-001: missing",
        ),
        (lambda target: shutil.rmtree(target / UNITS), f"{AGAIN}.*\n  units/model-000: missing"),
        (lambda target: (target / MANIFEST).write_text("{"), "not understood"),
        (lambda target: edit(target, lambda units: None, format=9), f"format 9.*{AGAIN}"),
        (lambda target: edit(target, lambda units: None, source=[]), "not understood"),
        (
            lambda target: edit(
                target, lambda units: units[3]["pieces"][0].update(dtype="float17")
            ),
            "not understood",
        ),
        (lose(MANIFEST), "has lost its manifest.json"),
        (lambda target: edit(target, lambda units: units.pop(3)), "missing: layers"),
        (lambda target: edit(target, lose_piece), "incomplete: layers.0.ffn.experts"),
        (lambda target: edit(target, repeat_piece), "incomplete: layers.0.ffn.experts"),
        (
            lambda target: edit(
                target,
                lambda units: units[3]["pieces"].append(units[3]["pieces"][0] | {"name": "x"}),
            ),
            "unexpected",
        ),
        (
            lambda target: edit(
                target, lambda units: units[3]["pieces"][0].update(dtype="float16")
            ),
            "expected",
        ),
        (lose("config.json"), "config.json"),
    ],
)
def test_load_refuses_damage(ours, damage, message):
    damage(ours)
    with pytest.raises(CheckpointError, match=message):
        dspark.load(ours)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:1000])


def exchange_dtypes(target):
    """Of a unit's first array: other numbers than the manifest says."""
    path = next((target / UNITS).glob("layers.1-004"))
    shutil.rmtree(path)
    shutil.copytree(target / UNITS / "layers.1-000", path)


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda target: cut_short(parts.largest_file(target / UNITS / "layers.1-000")),
            r"units/layers.1-000: layers\.1\.\S+ cannot",
        ),
        (lose_data, r"units/layers.2-000: layers\.2\.\S+ cannot be read"),
        (exchange_dtypes, r"units/layers.1-004: layers\.1\.\S+ cannot be read"),
    ],
)
def test_data_that_cannot_be_read_is_named(ours, damage, message):
    damage(ours)
    with pytest.raises(CheckpointError, match=message) as caught:
        dspark.load(ours)
    assert AGAIN in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"(?s){AGAIN}.*cannot be read in units"):
        conversion.verify(ours)


# convert, once more.


@pytest.mark.parametrize(
    "damage, message",
    [
        (lose_unit, f"{AGAIN}.*\n  units/layers.1-000: missing"),
        (lose_metadata, f"{AGAIN}.*\n  units/layers.1-000: _METADATA is missing"),
        (lambda target: edit(target, lambda units: units.pop(3)), f"{AGAIN}.*\n  missing: layers"),
        (
            change_config,
            "copy the files of the official checkpoint here.*\n  config.json: is not what was "
            "converted",
        ),
        (lambda target: edit(target, lambda units: None, units=7), f"not understood.*{AGAIN}"),
        *[
            (
                lambda target, text=text: (target / MANIFEST).write_text(text),
                f"manifest.json: not understood.*{AGAIN}",
            )
            for text in ("", "[]", '{"format": 1, "uni')
        ],
        (
            lambda target: (target / MANIFEST).write_bytes(b"\xff\xfe"),
            f"manifest.json: not understood.*{AGAIN}",
        ),
    ],
)
def test_what_is_damaged_is_not_called_finished(source, ours, damage, message):
    damage(ours)
    with pytest.raises(CheckpointError, match=message):
        parts.convert(source, ours)


def test_what_is_advised_works(source, ours):
    lose_unit(ours)
    shutil.rmtree(ours)
    parts.convert(source, ours)
    conversion.verify(ours)


def test_texts_copied_again_make_it_whole(source, ours):
    change_config(ours)
    lose("tokenizer.json")(ours)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, ours)
    conversion.verify(ours)
    parts.convert(source, ours)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1, "uni'])
def test_a_damaged_record_of_what_is_converted(source, tmp_path, monkeypatch, text):
    parts.stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, tmp_path / "new")
    (tmp_path / "new" / conversion.STATE).write_text(text)
    with pytest.raises(CheckpointError, match=f"conversion.json: not understood.*{AGAIN}"):
        parts.convert(source, tmp_path / "new")


def test_a_unit_without_orbax_metadata_is_done_again(source, held, tmp_path, monkeypatch):
    parts.stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        parts.convert(source, tmp_path / "new")
    monkeypatch.undo()
    next((tmp_path / "new" / UNITS).glob("*/manifest.ocdbt")).unlink()
    parts.convert(source, tmp_path / "new")
    assert parts.contents(tmp_path / "new") == held


def test_all_say_the_same_of_a_lost_manifest(source, ours):
    lose(MANIFEST)(ours)
    said = set()
    for use in (
        inspect_checkpoint,
        dspark.load,
        conversion.verify,
        lambda path: parts.convert(source, path),
    ):
        with pytest.raises(CheckpointError, match=f"has lost its manifest.json.*{AGAIN}") as caught:
            use(ours)
        said.add(str(caught.value))
    assert len(said) == 1
