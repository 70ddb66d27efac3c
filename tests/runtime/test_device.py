"""A platform that is not there is one error that says what to do."""

import os
import subprocess
import sys

from dspark_jax.loading.load import embedded_checkpoint


def without_a_device(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_command_says_so_in_one_line():
    done = without_a_device("-m", "dspark_jax", "generate", "a")
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("dspark generate: jax has no device of the platform asked for ")
    assert "JAX_PLATFORMS: cuda" in line and line.endswith("or set JAX_PLATFORMS=cpu")
    assert "Traceback" not in done.stderr


def test_load_and_make_mesh_raise_a_config_error():
    program = """
import dspark_jax
for call in (dspark_jax.load, dspark_jax.make_mesh):
    try:
        call()
    except dspark_jax.ConfigError as error:
        print(error)
"""
    done = without_a_device("-c", program)
    assert done.stdout.count("jax has no device of the platform asked for") == 2, done.stderr


def test_headers_are_read_all_the_same():
    done = without_a_device("-m", "dspark_jax", "inspect", str(embedded_checkpoint()))
    assert done.returncode == 0 and "739 tensors" in done.stdout
