"""Several processes: two of them with two CPU devices each do what one with four does, and one that
is left alone says so.
"""

import json
import time

import pytest

import dspark_jax as dspark
from dspark_jax.runtime import processes

from helpers.processes import command, finish, free_port, start


@pytest.mark.heavy
def test_two_processes_and_the_death_of_one():
    """test_sharding.py compares one process of four devices with the same golden tokens."""
    coordinator = f"127.0.0.1:{free_port()}"
    stays, dies = (start("mesh_parts.py", 2, "process", coordinator, i, 1) for i in (0, 1))
    try:
        said, complaints = dies.communicate(timeout=900)
        died = time.monotonic()
        assert dies.returncode == 9 and "the golden tokens" in said, (said + complaints)[-4000:]
        said, _ = stays.communicate(timeout=60)
    finally:
        stays.kill()
        dies.kill()
    assert stays.returncode == 1 and time.monotonic() - died < 60
    assert "the golden tokens" in said
    assert (
        "process 0 lost another one of the 2 processes of this run: it ended or cannot be reached"
        in said
    )


@pytest.mark.parametrize(
    "dies, stays", [(0, 1), pytest.param(1, 0, marks=pytest.mark.heavy)]
)  # half a minute of waiting
def test_the_end_of_a_process_is_said_by_the_other(dies, stays):
    """Also of the one that coordinates, for which jax's runtime aborts the others; and at any
    moment, here while nothing is computed.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    running = {
        i: start("mesh_parts.py", 1, "member", coordinator, i, "dies" if i == dies else "stays")
        for i in (dies, stays)
    }
    running[dies].communicate(timeout=120)
    died = time.monotonic()
    _, said = running[stays].communicate(timeout=60)
    assert (
        running[dies].returncode == -9
        and running[stays].returncode != 0
        and time.monotonic() - died < 60
    )
    assert said.splitlines()[-1].startswith(
        f"process {stays} of 2 was ended before it could finish: it was killed, or another process"
    )


def test_processes_that_differ_are_refused():
    """By name, in both, before either computes; what ends well says nothing."""
    coordinator = f"127.0.0.1:{free_port()}"
    running = [start("mesh_parts.py", 1, "member", coordinator, i, "differs") for i in (0, 1)]
    for i, process in enumerate(running):
        said, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
        assert said.splitlines()[-1] == (  # gloo prints too
            "the 2 processes of this run must all make the same calls, but they differ in: mode, "
            "seed. "
            f"Here: mode {('block', 'plain')[i]}; seed {i}"
        )
        assert "was ended" not in complaints


@pytest.mark.heavy
def test_the_command_in_two_processes():
    """On 2x2 `dspark generate` prints what one device gives, once."""
    arguments = (
        "generate",
        "north east south west",
        "--max-new-tokens",
        24,
        "--max-seq-len",
        128,
        "--json",
    )
    together = ("--mesh", "2x2", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2)
    first, second = (command(2, *arguments, *together, "--process-id", i) for i in (0, 1))
    said, silent = json.loads(finish(first)), finish(second)
    out = dspark.generate(dspark.load(max_seq_len=128), arguments[1], max_new_tokens=24)
    assert (said["tokens"], said["text"]) == (out.tokens[0], out.texts[0]) and silent == ""
    assert (
        [record["accepted"] for record in said["rounds"]]
        == [record.accepted for record in out.rounds[0]]
        != []
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("localhost:1234", None, None), "go together"),
        ((None, 0, 2), "go together"),
        (("localhost", 0, 2), "HOST:PORT"),
        ((":1234", 0, 2), "HOST:PORT"),
        (("localhost:x", 0, 2), "HOST:PORT"),
        (("localhost:1234", 2, 2), "between 0 and 1"),
        (("localhost:1234", -1, 2), "between 0 and 1"),
        (("localhost:1234", 0, 0), "of 0 processes"),
    ],
)
def test_arguments_are_refused(arguments, message):
    with pytest.raises(dspark.ConfigError, match=message):
        processes.initialize(*arguments)


def test_other_errors_are_left_alone():
    with pytest.raises(ZeroDivisionError), processes.losses_explained():
        raise ZeroDivisionError
