"""Ctrl-C in the first moments of the command, while Python and jax are imported."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dspark_jax.loading.load import embedded_checkpoint


@pytest.mark.parametrize("seconds", [0.4, 0.7, 1.0])
def test_one_line_and_status_130_whenever_it_comes(seconds):
    """In the first 0.2 s the signal may come before our first line is run; Python ends by itself
    then.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_jax", "inspect", str(embedded_checkpoint())],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    if process.returncode == 0:
        return  # it was done before the signal came
    assert process.returncode == 130
    assert err in ("dspark: interrupted\n", "dspark inspect: interrupted\n")
