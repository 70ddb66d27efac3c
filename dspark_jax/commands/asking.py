"""What `dspark generate` may be asked for: its options, and what is refused of them before a model
is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys

from dspark_jax.commands.arguments import require_positive
from dspark_jax.commands.together import add_options, command_mesh
from dspark_jax.decode.modes import MODES
from dspark_jax.errors import ConfigError, PromptError


def add_what_is_read(parser: argparse.ArgumentParser) -> None:
    """The prompt, in one of its forms."""
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "prompt",
        nargs="?",
        help="the text to continue; with - or without it, standard input is read, but for the line "
        "break at its end",
    )
    given.add_argument(
        "--prompt-ids",
        metavar="IDS",
        help='the prompt as token ids, such as "5 6 7" or 5,6,7, instead of text',
    )
    given.add_argument(
        "--prompts",
        metavar="FILE",
        help="many prompts, one a line (-: from standard input), and their results as JSON lines; "
        "see `many prompts` below",
    )


def add_choice_of_tokens(parser: argparse.ArgumentParser) -> None:
    """Which tokens come out, and where they end."""
    add = parser.add_argument_group("which tokens").add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to emit (default %(default)s)",
    )
    add(
        "--stop",
        action="append",
        metavar="TOKEN",
        help="token that ends the output, as an id or as the token's text; may be given "
        "several times (default: the config's eos_token_id)",
    )
    add(
        "--stop-text",
        action="append",
        metavar="TEXT",
        help="text that ends the output, which does not show it; taken as it is, without escapes; "
        "may be given several times (default: none)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="how much chance there is in the choice of tokens; 0: none (default %(default)s)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens; 0: from all (default %(default)s)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the fewest likeliest tokens whose probabilities reach P (default "
        "%(default)s: all)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from the tokens at least P times as likely as the likeliest (default "
        "%(default)s: all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of sampling, 0 to 2**32 - 1; without effect at temperature 0 (default %(default)s)",
    )
    add(
        "--logit-bias",
        action="append",
        metavar="ID=VALUE",
        help="added to the logit of this token id before anything is chosen, such as 17=-2.5; may "
        "be given several times",
    )
    add(
        "--forbid",
        action="append",
        metavar="TOKEN",
        help="token that is never chosen, as an id or as the token's text; may be given several "
        "times",
    )


def add_how_it_runs(parser: argparse.ArgumentParser) -> None:
    """What it runs on, and how; of no influence on the tokens, but for the precision."""
    group = parser.add_argument_group("how it runs")
    add = group.add_argument
    add(
        "--checkpoint",
        metavar="DIR",
        help="checkpoint directory in the official layout (default: the embedded tiny one)",
    )
    add(
        "--max-seq-len",
        type=int,
        default=4096,
        metavar="N",
        help="most tokens of prompt and output together (default %(default)s)",
    )
    add(
        "--mode",
        choices=MODES,
        default="block",
        help="how drafts are verified (default %(default)s)",
    )
    add(
        "--gate",
        action="store_true",
        help=(
            "choose the draft length adaptively, as DEEPSEEK_DSPARK_GATE=1 asks for too; numbers "
            "from the DEEPSEEK_DSPARK_GATE_* variables"
        ),
    )
    add(
        "--calibration",
        metavar="FILE",
        help="what `dspark calibrate --out FILE` wrote, for the gate (default: calibration.json in "
        "the checkpoint, if there is one)",
    )
    add(
        "--streams",
        type=int,
        metavar="N",
        help="prompts that run at a time on each row of the mesh's data axis, rounded up to a "
        "power of two (default: as many as there are, at most 8)",
    )
    add(
        "--mesh",
        metavar="DATAxMODEL",
        help="devices to cut the model over, such as 1x4 (default: one device; with several "
        "processes 1xALL)",
    )
    add_options(group)
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="compute dtype (default: float32 on CPU, bfloat16 elsewhere)",
    )
    add(
        "--no-activation-quant",
        action="store_true",
        help="do not simulate the activation quantisation the model was trained with",
    )


def add_what_is_written(parser: argparse.ArgumentParser) -> None:
    """Results, where they go, and what else is in them."""
    add = parser.add_argument_group("what is written").add_argument
    add(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead of streaming text",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json or --prompts: natural logarithms of the probability of every token and "
        "of the N most likely ones at its place (0: of the token alone; default: none)",
    )
    add(
        "--prompt-logprobs",
        action="store_true",
        help="likewise of the prompt's tokens, with as many of the most likely ones",
    )
    add(
        "--record",
        metavar="FILE",
        help="write the rounds for `dspark replay`; needs the gate off and a speculative mode",
    )


def add_many_prompts(parser: argparse.ArgumentParser, text: str) -> None:
    """What goes with --prompts, under a text that says what its file is."""
    add = parser.add_argument_group("many prompts", text).add_argument
    add(
        "--output",
        metavar="FILE",
        help="write the results there (default: standard output)",
    )
    add(
        "--resume",
        action="store_true",
        help="with --output: keep the results that are there and compute what is missing",
    )


def asked_gate(args: argparse.Namespace):
    """The GateConfig of the environment, switched on by --gate."""
    from dspark_jax.decode.gate_config import GateConfig

    gate = GateConfig.from_env()
    return dataclasses.replace(gate, enabled=True) if args.gate else gate


def asked_options(args: argparse.Namespace, gate) -> dict:
    """The options of a request that need no model to be understood."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "mode": args.mode,
        "gate": gate,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "stop": args.stop_text,
        "logit_bias": _logit_bias(args.logit_bias),
        "streams": args.streams,
        "logprobs": args.logprobs,
        "prompt_logprobs": args.prompt_logprobs,
    }


def asked_tokens(model, args: argparse.Namespace) -> dict:
    """The options that name tokens, which only a model understands."""
    return {
        "stop_token_ids": _token_ids(model, "--stop", args.stop),
        "forbidden_tokens": _token_ids(model, "--forbid", args.forbid),
    }


def check_options(args: argparse.Namespace, gate) -> None:
    """Refuses before a model is loaded, or a prompt read, what can be refused without them."""
    from dspark_jax.decode import request

    request.check_options(**asked_options(args, gate))
    require_positive("--max-seq-len", args.max_seq_len)
    for flag, tokens in (("--stop", args.stop), ("--forbid", args.forbid)):
        for token in tokens or []:
            if not token:
                raise PromptError(f"{flag} '': this is empty; give a token's id or its text")
            request.check_text(token, f"{flag} {token!r}")
            if re.fullmatch("-[0-9]+", token):
                raise PromptError(f"{flag} {token}: token ids are 0 or more")
    if args.stop_text:
        require_tokenizer(args.checkpoint, "--stop-text is text", "use --stop with token ids")


def require_tokenizer(checkpoint: str | None, what: str, instead: str) -> None:
    """Of a directory that has a config.json; of another one `load` says what is missing. what:
    needs a tokenizer. instead: what to do without.
    """
    from dspark_jax.checkpoints.paths import expanded

    if checkpoint is None or not os.path.exists(expanded(checkpoint) / "config.json"):
        return
    if not os.path.lexists(expanded(checkpoint) / "tokenizer.json"):
        raise PromptError(f"{what}, but {checkpoint} has no tokenizer.json; {instead}")


def check_file(flag: str, name: str) -> None:
    """Raises ConfigError where nothing could be written."""
    from dspark_jax.runtime import files

    path = files.real_path(name)
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a directory; name a file in it")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def standard_input() -> str:
    """All of it. Raises PromptError where it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not valid {error.encoding}: {error.reason} at byte {error.start}; "
            "give text in UTF-8"
        ) from None


def load(args: argparse.Namespace):
    """The Model that the options name."""
    import dspark_jax as dspark

    return dspark.load(
        args.checkpoint,
        command_mesh(args.mesh),
        max_seq_len=args.max_seq_len,
        dtype=args.dtype,
        activation_quant=not args.no_activation_quant,
        calibration=args.calibration,
    )


def _logit_bias(given: list[str] | None) -> dict[int, float] | None:
    """["17=-2.5", "4=1"] -> {17: -2.5, 4: 1.0}; what the numbers may be is checked elsewhere."""
    if given is None:
        return None
    bias: dict[int, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = None
        if number is None or not re.fullmatch("[0-9]{1,18}", name):
            raise ConfigError(
                f"--logit-bias {text!r}: expected a token id and what is added to its logit, such "
                "as 17=-2.5"
            )
        if int(name) in bias:
            raise ConfigError(f"--logit-bias {text}: token {name} was given one before")
        bias[int(name)] = number
    return bias


def _token_ids(model, flag: str, tokens: list[str] | None) -> list[int] | None:
    return None if tokens is None else [_token_id(model, flag, token) for token in tokens]


def _token_id(model, flag: str, text: str) -> int:
    """A token by its id, by its spelling in the vocabulary, or by its text, which a vocabulary may
    spell otherwise (a blank or a line break in one of bytes).
    """
    if re.fullmatch("-?[0-9]{1,18}", text):
        return int(text)
    token = model.tokenizer.token_to_id(text) if model.tokenizer else None
    if token is not None:
        return token
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids if model.tokenizer else []
    if len(ids) != 1:
        raise PromptError(
            f"{flag} {text!r}: neither a token id nor a single token of this checkpoint's tokenizer"
        )
    return ids[0]
