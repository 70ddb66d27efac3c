"""`dspark synthetic`: sizes before anything is written, whole checkpoints or none, refusals."""

import json

import jax
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints import synthetic as writing
from dspark_jax.checkpoints import writer
from dspark_jax.commands.main import main
from dspark_jax.config import v4_flash_0731
from dspark_jax.config_layers import with_layers

from helpers import official_table
from helpers.round_parts import byte_tokenizer
from helpers.small_model import CONFIG


@pytest.fixture
def small(tmp_path):
    """A directory with the config and the tokenizer of a small model, and nothing else."""
    directory = tmp_path / "small"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    (directory / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return directory


@pytest.fixture
def command(capsys):
    def run(*arguments):
        status = main(["synthetic", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_a_checkpoint_like_a_small_one_is_loaded(command, small, tmp_path):
    out = tmp_path / "out"
    status, said, errors = command(
        "--like", small, "--out", out, "--seed", "3", "--max-shard-gb", "0.0001"
    )
    assert status == 0 and said.startswith(f"{out}: written, ")
    assert errors.startswith(f"like {small}, 1 layers (1 of ratio 0; the first 0 hash-routed)")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2 and not list(out.glob(".*"))
    model = dspark.load(out, max_seq_len=64)
    assert model.config == CONFIG and model.tokenizer is not None
    other = tmp_path / "again"
    assert command("--like", small / "config.json", "--out", other, "--seed", "3")[0] == 0
    again = dspark.load(other, max_seq_len=64)
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *map(values, (model, again)))
    assert all(jax.tree.leaves(same))


def values(model):
    return jax.device_get(model.split[1])


def test_a_dry_run_of_the_real_one_says_what_it_would_be(command, tmp_path):
    """Shapes and bytes against the table of the specification; nothing is written."""
    status, said, _ = command("--like", "v4-flash", "--layers", "4", "--dry-run", "--json")
    result, specs = json.loads(said), official_table.expected(with_layers(v4_flash_0731(), 4))
    assert status == 0
    assert result["bytes"] == sum(map(writer.stored_bytes, specs)) == 27_301_884_304
    assert sum(row["bytes"] for row in result["tensors"]) == result["bytes"]
    assert sum(row["count"] for row in result["tensors"]) == len(specs)
    assert result["compress_ratios"] == [0, 4, 128, 4, 0, 0, 0] and result["num_hash_layers"] == 2
    rows = {(row["name"], tuple(row["shape"])): row for row in result["tensors"]}
    experts = rows["layers.*.ffn.experts.*.w1", (2048, 4096)]
    assert experts["count"] == 4 * 256 and experts["precision"] == "fp4"
    assert rows["mtp.*.main_proj", (4096, 3 * 4096)]["count"] == 1
    assert list(tmp_path.iterdir()) == []
    status, text, _ = command("--like", "v4-flash", "--layers", "4", "--dry-run")
    assert "27,301,884,304 bytes (27.3 GB)" in text and "2048 x 4096" in text


def test_too_small_a_disk_is_said_before_anything_is_written(command, small, tmp_path, monkeypatch):
    """Room for the tensors alone is not enough."""
    needed = sum(map(writer.stored_bytes, official_table.expected(CONFIG)))
    monkeypatch.setattr(writer, "free_bytes", lambda directory: needed)
    out = tmp_path / "out"
    status, _, said = command("--like", small, "--out", out)
    assert status == 1 and said.count("\n") == 1 and not out.exists()
    assert f"needs {needed:,} bytes, {needed:,} are free; ask for fewer --layers" in said


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_write_that_ends_early_leaves_nothing(command, small, tmp_path, monkeypatch, end):
    tensors, real = [], writing._values

    def values(spec, *rest):
        tensors.append(spec)
        if len(tensors) == 20:
            raise end
        return real(spec, *rest)

    monkeypatch.setattr(writing, "_values", values)
    out = tmp_path / "out"
    status, said, errors = command("--like", small, "--out", out, "--quiet")
    assert status == (130 if end is KeyboardInterrupt else 1) and said == ""
    assert len(tensors) == 20 and not out.exists()


def test_an_empty_directory_is_taken_and_stays_when_nothing_came_of_it(
    command, small, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(writing, "_values", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("--like", small, "--out", out)
    assert list(out.iterdir()) == []


REFUSED = {
    "nowhere": ([], "--out DIR is needed, or --dry-run"),
    "no layers": (["--layers", "0", "--dry-run"], "--layers: 0 is not a positive integer"),
    "many layers": (["--layers", "2", "--dry-run"], "layers: 2 is not between 1 and the 1 of"),
    "seed": (["--seed", "-1", "--dry-run"], "--seed: -1 is not an integer of 0 or more"),
    "shard": (["--max-shard-gb", "0", "--dry-run"], "--max-shard-gb: 0 is not above 0"),
    "endless shard": (["--max-shard-gb", "inf", "--dry-run"], "--max-shard-gb: inf is not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line(command, small, case):
    arguments, message = REFUSED[case]
    status, out, err = command("--like", small, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


def test_where_it_may_not_write(command, small, tmp_path):
    status, _, err = command("--like", small, "--out", small)
    assert status == 2 and "this directory is not empty; name a new one" in err
    status, _, err = command("--like", small, "--out", small / "config.json")
    assert status == 2 and "this is not a directory" in err


def test_an_unknown_model_is_named_with_those_that_are_known(command):
    status, _, err = command("--like", "v4", "--dry-run")
    assert status == 2
    assert "--like v4: neither v4-flash nor tiny, and no such file or directory" in err
