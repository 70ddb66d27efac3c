"""Several processes, each with devices of its own, that run one model together.

Every process makes the same calls in the same order; each holds the parts of its own devices, and what comes back is the same in
all of them.
"""
from __future__ import annotations

import contextlib
import os
import sys
from typing import Iterator, NoReturn

import jax

from dspark_jax.errors import ConfigError, DsparkError

# Seconds. A process that ended, or cannot be reached, for so long ends the others: without it they would wait for it for ever.
HEARTBEAT_TIMEOUT = 30
START_TIMEOUT = 300
SHUTDOWN_TIMEOUT = 15

_LOST = ("gloo", "nccl", "connection", "coordination", "unavailable", "socket", "heartbeat")


def initialize(coordinator: str | None = None, process_id: int | None = None, num_processes: int | None = None) -> None:
    """Joins the processes; comes before anything that uses a device. Afterwards `make_mesh` sees the devices of all of them.

    Args:
      coordinator: "host:port" of process 0. process_id: 0 to num_processes - 1. num_processes: how many there are.
      All three None: what the cluster says (Cloud TPU, Slurm, Open MPI, Kubernetes).

    Raises:
      ConfigError: arguments that do not fit together, or none where no cluster is found.
      DsparkError: the processes did not find each other within five minutes.
    """
    check_arguments(coordinator, process_id, num_processes)
    with contextlib.suppress(AttributeError):  # releases in which gloo is the only choice have no such option
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=START_TIMEOUT,
                                   heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT)
    except ValueError as error:
        raise ConfigError(f"no cluster that names its processes was found ({error}); give coordinator, process id and number of "
                          "processes") from error
    except RuntimeError as error:
        raise DsparkError(f"process {process_id} could not join the {num_processes} processes at {coordinator}: "
                          f"{error}") from error


def check_arguments(coordinator, process_id, num_processes) -> None:
    given = [value is not None for value in (coordinator, process_id, num_processes)]
    if not any(given):
        return
    if not all(given):
        raise ConfigError("several processes: coordinator, process id and number of processes go together; give all three, or "
                          "none of them on a cluster that knows them")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator: {coordinator!r} is not HOST:PORT of process 0")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ConfigError(f"process id {process_id} of {num_processes} processes: it must lie between 0 and "
                          f"{num_processes - 1}")


def speaks() -> bool:
    """Whether this process is the one that prints results: process 0."""
    return jax.process_index() == 0


def keep_stdout() -> None:
    """Gives standard output to Python alone: gloo prints its connections there, amid the text. They go to standard error."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


def leave(status: int) -> NoReturn:
    """Ends this process without the usual farewell, which waits for processes that may be gone and ends in a stack trace."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def losses_explained() -> Iterator[None]:
    """A runtime error that says, in whatever words of its transport, that another process is gone becomes a DsparkError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not any(word in str(error).lower() for word in _LOST):
            raise
        raise DsparkError(f"process {jax.process_index()} lost another one of the {jax.process_count()} processes of this run: "
                          "it ended or cannot be reached. See what that process said last, and start all of them again. "
                          f"({error})") from error
