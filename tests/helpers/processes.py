"""Processes that tests start, each with CPU devices of its own: `python SCRIPT DEVICES WHAT
ARGUMENTS...`.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


def start(script: str, devices: int, what: str, *arguments) -> subprocess.Popen:
    """`what` of the script beside this file, which calls `main`."""
    return _python(str(HERE / script), str(devices), what, *map(str, arguments))


def command(devices: int, *arguments) -> subprocess.Popen:
    """`dspark ARGUMENTS...`"""
    return _python(
        "-m",
        "dspark_jax.commands.main",
        *map(str, arguments),
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES=str(devices),
    )


def _python(*arguments: str, **variables: str) -> subprocess.Popen:
    environment = os.environ | variables
    environment["XLA_FLAGS"] = " ".join(
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag
    )
    environment["PYTHONPATH"] = str(HERE.parent)
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def finish(running: subprocess.Popen, status: int = 0, seconds: float = 600) -> str:
    """Waits for it, and returns what it printed on standard output."""
    out, err = running.communicate(timeout=seconds)
    assert running.returncode == status, (out + err)[-6000:]
    return out


def main(**checks: Callable) -> None:
    """In the process: runs the check that the command line names, on as many CPU devices as it
    says.
    """
    devices, what, *arguments = sys.argv[1:]
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", int(devices))
    checks[what](*arguments)
