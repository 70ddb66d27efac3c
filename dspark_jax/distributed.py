"""Several processes, each with devices of its own, that run one model together.

Every process makes the same calls in the same order; each holds the parts of its own devices, and what comes back is the same in
all of them.
"""
from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import subprocess
import sys
import zlib
from typing import Callable, Iterator, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.errors import ConfigError, DsparkError, PromptError
from dspark_jax.sharding import check_processes, make_mesh, parse_mesh

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
    who = "this process" if process_id is None else f"process {process_id} of {num_processes}"
    atexit.register(_LastWords(who).finished)  # before jax registers its own farewell, which then comes first and may end badly
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


class _LastWords:
    """Says, from a small process of its own, that this one was ended before it could say so itself.

    When the process that coordinates dies, or one never comes, jax's runtime aborts the others from within, with a stack trace and
    no exception.
    """

    _PROGRAM = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"
    current: "_LastWords | None" = None

    def __init__(self, who: str):
        text = (f"{who} was ended before it could finish: it was killed, or another process of this run ended, cannot be reached or "
                "never came. See what that process said last, and start all of them again.")
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", self._PROGRAM, text], stdin=subprocess.PIPE,
                                        stdout=subprocess.DEVNULL, start_new_session=True)
        _LastWords.current = self

    def finished(self) -> None:
        """This process ends by itself; nothing is to be said. May be called again."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(b"finished")
            self.process.stdin.close()


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a command that several processes can run together."""
    add = parser.add_argument
    add("--coordinator", metavar="HOST:PORT", help="run together with other processes, started alike: the address of process 0, "
        "or `auto` for what the cluster says; process 0 prints")
    add("--process-id", type=int, metavar="I", help="number of this process, from 0")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")


def wanted(args: argparse.Namespace) -> bool:
    """Whether the options of `add_options` ask for several processes."""
    return not args.coordinator is args.process_id is args.num_processes is None


def run_command(args: argparse.Namespace, work: Callable[[argparse.Namespace, bool], int]) -> int:
    """work(args, speaks) of one process or, where the options ask for several, after joining them. Returns the exit status.

    speaks: whether this process is the one that prints results, process 0.
    """
    if not wanted(args):
        return work(args, True)
    joining = None if args.coordinator == "auto" else args.coordinator, args.process_id, args.num_processes
    check_arguments(*joining)
    keep_stdout()
    initialize(*joining)
    try:
        return work(args, jax.process_index() == 0)
    except DsparkError as error:
        print(f"dspark {args.command}: {error}", file=sys.stderr)
        leave(2 if isinstance(error, (ConfigError, PromptError)) else 1)


def command_mesh(text: str | None) -> Mesh | None:
    """The mesh that a command's option names, such as "1x4". Without it: None, one device; with several processes 1xALL.

    Raises ConfigError for a mesh that cannot be, or in which a process has no device.
    """
    if text is None and jax.process_count() == 1:
        return None
    mesh = make_mesh(*((1, jax.device_count()) if text is None else parse_mesh(text)))
    check_processes(mesh)
    return mesh


def require_same(**values: object) -> None:
    """Raises ConfigError in all processes where these values, compared by their text, are not the same in each of them."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils
    mine = np.array([zlib.crc32(repr(value).encode()) >> 1 for value in values.values()], np.int32)
    with losses_explained():
        same = (multihost_utils.process_allgather(mine) == mine).all(axis=0)
    different = [name for name, agrees in zip(values, same) if not agrees]
    if different:
        raise ConfigError(f"the {jax.process_count()} processes of this run must all make the same calls, but they differ in: "
                          f"{', '.join(different)}. Here: " + "; ".join(f"{name} {str(values[name])[:200]}" for name in different))


def keep_stdout() -> None:
    """Gives standard output to Python alone: gloo prints its connections there, amid the text. They go to standard error."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


def leave(status: int) -> NoReturn:
    """Ends this process without the usual farewell, which waits for processes that may be gone and ends in a stack trace."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _LastWords.current:
        _LastWords.current.finished()
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
