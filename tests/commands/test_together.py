"""What commands ask for that several processes can run together; test_distributed.py runs them."""

import argparse

import jax
import pytest

import dspark_jax as dspark
from dspark_jax.commands import together


def asked(*arguments):
    parser = argparse.ArgumentParser()
    together.add_options(parser)
    return together.several_asked_for(parser.parse_args(arguments))


def test_any_option_asks_for_several_processes():
    assert not asked()
    for option in (["--coordinator", "auto"], ["--process-id", "0"], ["--num-processes", "1"]):
        assert asked(*option)


def test_one_process_does_all_the_work_and_prints():
    args = argparse.Namespace(coordinator=None, process_id=None, num_processes=None)
    assert together.run_command(args, lambda given, prints: (given is args, prints)) == (True, True)


def test_a_mesh_without_a_process_is_refused(monkeypatch):
    assert together.command_mesh(None) is None
    assert dict(together.command_mesh("1x1").shape) == {"data": 1, "model": 1}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for mesh in ("1x1", None):
        with pytest.raises(
            dspark.ConfigError,
            match="1x1 has no device of process 1; there are 1 devices in 2 processes",
        ):
            together.command_mesh(mesh)
