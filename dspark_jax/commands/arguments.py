"""What all commands understand of their arguments: which flag was meant, and numbers."""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys

from dspark_jax.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Names the flag that was meant where an unknown one stands.

    It looks before anything is parsed: what follows an unknown flag would be taken for the prompt
    or a path, and the error would be about that.
    """

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, which calls this for the arguments of a command too. What a command
        does not take is its own error, with its usage, and not that of the whole program.
        """
        if args is not None:
            self._refuse_unknown_flags(args)
        known, spare = super().parse_known_args(args, namespace)
        if spare and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(spare)}{_quoting(known, spare)}")
        return known, spare

    def _print_message(self, message, file=None):
        """As argparse does, but that a failure to write is not kept quiet."""
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str):
        """Ends the process with status 2, the usage and the message."""
        if "prompt: not allowed with argument --prompt-ids" in message:
            message += '; ids are one argument, such as "5 6 7" or 5,6,7'
        super().error(message)

    def _refuse_unknown_flags(self, args: list[str]) -> None:
        own = itertools.takewhile(lambda argument: argument != "--", args)
        if self._subparsers is not None:  # what follows the command is the command's
            own = itertools.takewhile(lambda argument: argument.startswith("-"), own)
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        names = [
            argument.partition("=")[0]
            for argument in own
            if argument.startswith("--") and " " not in argument
        ]
        unknown = [name for name in names if not any(flag.startswith(name) for flag in known)]
        if unknown:
            near = [difflib.get_close_matches(name, known, n=1) for name in unknown]
            meant = ", ".join(dict.fromkeys(itertools.chain(*near)))
            hint = f"; did you mean {meant}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _quoting(known: argparse.Namespace, spare: list[str]) -> str:
    """What to do where words were taken for arguments."""
    if not isinstance(getattr(known, "prompt", None), str) or any(w[:1] == "-" for w in spare):
        return ""
    return f'; a prompt of several words must be quoted: "{" ".join([known.prompt, *spare])}"'


def require_positive(flag: str, number: int) -> None:
    """Raises ConfigError, naming the flag."""
    if number < 1:
        raise ConfigError(f"{flag}: {number} is not a positive integer")


def require_room(args: argparse.Namespace, prompt_tokens: int = 1) -> None:
    """Raises ConfigError where --max-new-tokens and at least so many tokens of prompt are more than
    --max-seq-len.
    """
    require_positive("--max-new-tokens", args.max_new_tokens)
    require_positive("--max-seq-len", args.max_seq_len)
    if prompt_tokens + args.max_new_tokens > args.max_seq_len:
        raise ConfigError(
            f"a prompt of at least {prompt_tokens} token{'s' if prompt_tokens > 1 else ''} and "
            f"--max-new-tokens {args.max_new_tokens} together exceed --max-seq-len "
            f"{args.max_seq_len}; ask for fewer tokens or for a larger --max-seq-len"
        )
