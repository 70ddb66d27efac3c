"""Ctrl-C in the first moments of the command, while jax is imported, and in its last ones."""

import signal
import subprocess
import sys
import time

import pytest

from dspark_jax.commands import early_interrupt

PROGRAM = """
from dspark_jax.commands import early_interrupt
early_interrupt.begin()
print("begun", flush=True)
import jax, flax
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 0.4])
def test_one_line_and_status_130_while_native_modules_are_imported(seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + "import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (130, "dspark: interrupted\n")


@pytest.fixture
def as_usual():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_between_them_it_raises_as_usual(as_usual):
    early_interrupt.begin()
    assert signal.getsignal(signal.SIGINT) is early_interrupt.leave
    early_interrupt.ready()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    early_interrupt.over()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_ignored_signal_stays_ignored(as_usual):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    early_interrupt.begin()
    early_interrupt.ready()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
