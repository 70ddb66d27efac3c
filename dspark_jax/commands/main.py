"""The command line: `dspark generate | bench | inspect | convert | plan | replay | calibrate |
synthetic | train`. Exit status 0; 2 for wrong use; 1 for failure; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import sys
import warnings
from collections.abc import Callable

from dspark_jax import __version__
from dspark_jax.commands import (
    bench,
    calibrate,
    convert,
    generate,
    inspect_checkpoint,
    plan,
    replay,
    synthetic,
    train,
)
from dspark_jax.commands.arguments import Parser
from dspark_jax.commands.early_interrupt import ready
from dspark_jax.commands.output import finish_output, give_up_output, guard_streams, status
from dspark_jax.errors import ConfigError, DsparkError, PromptError


def main(argv: list[str] | None = None, prepare: Callable[[], None] | None = None) -> int:
    """Runs one command and returns the exit status.

    argv: the arguments, None for the process's own. prepare: called when they are understood,
      before the command runs.
    """
    name = "dspark"
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = _parsed(argv)
        args.argv = argv
        name = f"dspark {args.command}"
        if prepare is not None:
            prepare()
        status = args.run(args)
        finish_output()
        return status
    except DsparkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PromptError)) else 1
    except BrokenPipeError:  # the reader of the output went away
        give_up_output()
        return 1
    except OSError as error:
        give_up_output()
        print(f"{name}: {_where(error)}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Raises SystemExit where argparse has said all there is to say, OSError where it could not."""
    try:
        return _parser().parse_args(argv)
    except SystemExit:
        finish_output()  # help may have been asked for
        raise


def _where(error: OSError) -> str:
    """What an error of the system is about. Those of the standard streams name no file, nor do
    those of a working directory that was removed meanwhile.
    """
    nameless = "the working directory" if error.errno == errno.ENOENT else "standard output"
    return error.filename or nameless


def entry() -> int:
    """The command's own process: what its programs need is set before jax uses a device, and
    warnings are one line.
    """
    guard_streams()
    warnings.formatwarning = lambda message, *_: f"dspark: {message}\n"
    return main(prepare=_own_process)


def _own_process() -> None:
    with status("starting ..."):  # jax is imported
        from dspark_jax.runtime import backend, compilation_cache

        backend.require_equal_bits()
        compilation_cache.enable(own_process=True)
    ready()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dspark",
        description=(
            "DeepSeek-V4-Flash with DSpark speculative decoding in JAX: faster, and the same "
            "tokens as without."
        ),
    )
    parser.add_argument("--version", action="version", version=f"dspark-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = (
        generate,
        bench,
        inspect_checkpoint,
        convert,
        plan,
        replay,
        calibrate,
        synthetic,
        train,
    )
    for module in modules:
        module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(entry())
