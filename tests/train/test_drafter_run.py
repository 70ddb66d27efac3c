"""`dspark train drafter` from end to end, in processes of their own: killed and repeated, on one
device and on two.
"""

import json
import re
import time

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoints.official import OfficialCheckpoint

from helpers.processes import command, finish
from helpers.round_parts import byte_tokenizer
from helpers.small_model import write_small_checkpoint

pytestmark = pytest.mark.heavy
STEPS = 12


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(name, devices) -> the process, which writes to the folder of that name; and where."""
    folder = tmp_path_factory.mktemp("drafter")
    write_small_checkpoint(folder / "main", byte_tokenizer())
    text = "".join(f"line {n}: some text\n" for n in range(99))
    (folder / "text.txt").write_text(text)

    def start(name, devices=1):
        asked = {
            "--checkpoint": folder / "main",
            "--data": folder / "text.txt",
            "--out": folder / name,
            "--init": "none",
            "--steps": STEPS,
            "--sequences": 6,
            "--length": 24,
            "--prompt-tokens": 8,
            "--streams": 2,
            "--rows": 2,
            "--anchors": 4,
            "--quantise-from": 0.5,
            "--devices": devices,
            "--save-every": 1e-6,
        }
        options = [each for option in asked.items() for each in option]
        return command(devices, "train", "drafter", *options), folder

    return start


@pytest.fixture(scope="module")
def whole(train):
    """The folder that holds main/ and, uninterrupted, whole/."""
    process, folder = train("whole")
    finish(process)
    return folder


def weights(path) -> dict[str, bytes]:
    found = {}
    for file in OfficialCheckpoint.open(path).files.values():
        raw = file.path.read_bytes()
        found |= {name: raw[e.start : e.stop] for name, e in file.entries.items()}
    return found


def test_it_is_a_checkpoint_whose_main_model_kept_every_byte(whole):
    before, after = weights(whole / "main"), weights(whole / "whole")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(name.startswith("mtp.") for name in changed)
    for name in ("config.json", "tokenizer.json"):
        assert (whole / "whole" / name).read_bytes() == (whole / "main" / name).read_bytes()
    out = dspark.generate(dspark.load(whole / "whole", max_seq_len=32), "ab", max_new_tokens=8)
    assert len(out.tokens[0]) == 8


def test_its_readme_and_log_say_what_was_run(whole):
    readme = (whole / "whole" / "README.md").read_text()
    for said in (
        f"--steps {STEPS}",
        "`text.txt`",
        f"{STEPS} steps of 2 sequences with 4 drafts each",
        "from nothing",
        "6 sequences of at most 24 tokens",
    ):
        assert said in readme
    assert re.search(r"\| this one \|( \d+% \|){6} \d\.\d\d \|", readme)
    log = [json.loads(line) for line in (whole / "whole" / "drafter.jsonl").open()]
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    for line in log:
        assert len(line["accepted"]) == len(line["overlap"]) == len(line["bias"]) == 5


def test_killed_and_repeated_it_gives_the_same_bits(train, whole):
    process, folder = train("parts")
    log, began = folder / "parts-run" / "drafter.jsonl", time.monotonic()
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() - began < 500, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    seen = len(log.read_text().splitlines())
    assert seen < STEPS and not (folder / "parts").exists()
    finish(train("parts")[0])
    assert weights(folder / "parts") == weights(folder / "whole")
    steps = [json.loads(line)["step"] for line in (folder / "parts" / "drafter.jsonl").open()]
    assert steps == list(range(1, STEPS + 1))


def test_two_devices_share_a_step(train, whole):
    """The first loss is that of one device but for rounding; later ones drift apart."""
    process, folder = train("two", devices=2)
    finish(process)
    losses = [
        [json.loads(line)["loss"] for line in (folder / name / "drafter.jsonl").open()]
        for name in ("whole", "two")
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=2e-4)
    np.testing.assert_allclose(*losses, rtol=0.02)
