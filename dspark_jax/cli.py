"""The command line: `dspark generate | bench | inspect | convert | plan | replay`. Exit status 0; 2 for wrong use; 1 for failure; 130 after Ctrl-C."""
from __future__ import annotations

import argparse
import os
import sys
import warnings

from dspark_jax.errors import ConfigError, DsparkError, PromptError


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit status. `argv`: the arguments, None for the process's own."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except DsparkError as error:
        print(f"dspark {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, PromptError)) else 1
    except BrokenPipeError:  # the reader of the output went away; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def entry() -> int:
    """The command's own process: what its programs need is set before jax uses a device, and warnings are one line."""
    warnings.formatwarning = lambda message, *_: f"dspark: {message}\n"
    from dspark_jax.platform import require_equal_bits
    require_equal_bits()
    return main()


def _parser() -> argparse.ArgumentParser:
    from dspark_jax import bench, convert_command, generate_command, inspect, plan_command, replay
    parser = argparse.ArgumentParser(
        prog="dspark", description="DeepSeek-V4-Flash with DSpark speculative decoding in JAX: faster, and the same tokens as without.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate_command, bench, inspect, convert_command, plan_command, replay):
        module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(entry())
