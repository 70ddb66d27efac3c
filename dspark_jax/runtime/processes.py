"""Several processes, each with devices of its own, that run one model together.

Every process makes the same calls in the same order; each holds the parts of its own devices, and
what comes back is the same in all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np

from dspark_jax.errors import ConfigError, DsparkError

# Seconds. When a process has been gone or out of reach for so long, the others are ended, which
# would wait for it for ever.
HEARTBEAT_TIMEOUT = 30
START_TIMEOUT = 300
SHUTDOWN_TIMEOUT = 15

_LOST = ("gloo", "nccl", "connection", "coordination", "unavailable", "socket", "heartbeat")


def initialize(
    coordinator: str | None = None, process_id: int | None = None, num_processes: int | None = None
) -> None:
    """Joins the processes; comes before anything that uses a device. Afterwards `make_mesh` sees
    the devices of all of them.

    Args:
      coordinator: "host:port" of process 0.
      process_id: 0 to num_processes - 1.
      num_processes: how many there are. All three None: what the cluster says (Cloud TPU, Slurm,
        Open MPI, Kubernetes).

    Raises:
      ConfigError: arguments that do not fit together, or none where no cluster is found.
      DsparkError: the processes did not find each other within five minutes.
    """
    check_arguments(coordinator, process_id, num_processes)
    who = "this process" if process_id is None else f"process {process_id} of {num_processes}"
    # Registered before jax's own exit handler, which therefore runs first and may crash.
    atexit.register(_LastWords(who).finished)
    # Releases in which gloo is the only choice have no such option.
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=START_TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except ValueError as error:
        raise ConfigError(
            f"no cluster that names its processes was found ({error}); give coordinator, process "
            "id and number of processes"
        ) from error
    except RuntimeError as error:
        raise DsparkError(
            f"process {process_id} could not join the {num_processes} processes at {coordinator}: "
            f"{error}"
        ) from error


class _LastWords:
    """A small process of its own that reports when this one was ended before it could do so itself.

    When the coordinating process dies, or one never comes, jax's runtime aborts the others from
    within, with a stack trace and without an exception.
    """

    _PROGRAM = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"
    current: _LastWords | None = None

    def __init__(self, who: str):
        text = (
            f"{who} was ended before it could finish: it was killed, or another process of this "
            "run ended, cannot be reached or never came. See what that process said last, and "
            "start all of them again."
        )
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._PROGRAM, text],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        _LastWords.current = self

    def finished(self) -> None:
        """This process ends by itself, so there is nothing to report. May be called again."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(b"finished")
            self.process.stdin.close()


def check_arguments(coordinator, process_id, num_processes) -> None:
    given = [value is not None for value in (coordinator, process_id, num_processes)]
    if not any(given):
        return
    if not all(given):
        raise ConfigError(
            "several processes: coordinator, process id and number of processes go together; "
            "give all three, or none of them on a cluster that knows them"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator: {coordinator!r} is not HOST:PORT of process 0")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process id {process_id} of {num_processes} processes: it must lie between 0 and "
            f"{num_processes - 1}"
        )


def require_same(**values: object) -> None:
    """Raises ConfigError in all processes where these values, compared by their text, are not the
    same in each of them.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.array([zlib.crc32(repr(value).encode()) >> 1 for value in values.values()], np.int32)
    with losses_explained():
        same = (multihost_utils.process_allgather(mine) == mine).all(axis=0)
    different = [name for name, agrees in zip(values, same) if not agrees]
    if different:
        raise ConfigError(
            f"the {jax.process_count()} processes of this run must all make the same calls, but "
            f"they differ in: {', '.join(different)}. Here: "
            + "; ".join(f"{name} {str(values[name])[:200]}" for name in different)
        )


def keep_stdout() -> None:
    """Keeps standard output for Python alone: what gloo prints there about its connections goes to
    standard error.
    """
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


def leave(status: int) -> NoReturn:
    """Ends this process without the usual exit handlers, which wait for processes that may be gone
    and end in a stack trace.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _LastWords.current:
        _LastWords.current.finished()
    os._exit(status)


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """A runtime error that says, in the words of whatever transport, that another process is gone
    becomes a DsparkError.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not any(word in str(error).lower() for word in _LOST):
            raise
        raise DsparkError(
            f"process {jax.process_index()} lost another one of the {jax.process_count()} "
            "processes of this run: it ended or cannot be reached. See what that process said "
            f"last, and start all of them again. ({error})"
        ) from error
