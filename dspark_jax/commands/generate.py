"""`dspark generate`: streams the continuation of a prompt to standard output, and says on standard
error what it took.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path

from dspark_jax.commands.arguments import require_room
from dspark_jax.commands.output import print_json, status
from dspark_jax.commands.together import add_options, command_mesh, run_command, several_asked_for
from dspark_jax.decode.modes import MODES
from dspark_jax.errors import ConfigError, DsparkError, PromptError


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description=(
            "Continues a prompt with the embedded checkpoint or one of yours. Text streams to "
            "standard output, a summary follows on standard error. All modes give the same "
            "tokens."
        ),
    )
    add = parser.add_argument
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
    add(
        "--checkpoint",
        metavar="DIR",
        help="checkpoint directory in the official layout (default: the embedded tiny one)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to emit (default %(default)s)",
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
        "--stop",
        action="append",
        metavar="TOKEN",
        help="token that ends the output, as an id or as the token's text; may be given "
        "several times (default: the config's eos_token_id)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="how much chance there is in the choice of tokens; 0: none (default %(default)s)",
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
        "--seed",
        type=int,
        default=0,
        help="of sampling; without effect at temperature 0 (default %(default)s)",
    )
    add(
        "--mesh",
        metavar="DATAxMODEL",
        help="devices to cut the model over, such as 1x4 (default: one device; with several "
        "processes 1xALL)",
    )
    add_options(parser)
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
    add(
        "--record",
        metavar="FILE",
        help="write the rounds for `dspark replay`; needs the gate off and a speculative mode",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object at the end instead of streaming text",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if args.record is not None and several_asked_for(args):
        raise ConfigError("--record measures what one process costs; leave --coordinator out")
    return run_command(args, _run)


def _run(args: argparse.Namespace, prints: bool) -> int:
    with status("loading ...", shown=prints):
        gate = asked_gate(args)
        _check_options(args, gate)
    prompt = _prompt(args)
    _check_prompt(args, prompt)
    with status("loading ...", shown=prints):
        import dspark_jax as dspark
        from dspark_jax.commands import costs

        model = dspark.load(
            args.checkpoint,
            command_mesh(args.mesh),
            max_seq_len=args.max_seq_len,
            dtype=args.dtype,
            activation_quant=not args.no_activation_quant,
        )
    run = _asked_run(model, prompt, args, gate)
    if args.record is not None:
        costs.check_room(model)
    with status("compiling (first time only) ...", shown=prints):
        run.compile()
    _complete(run, show=prints and not args.json)
    if prints:
        result = _result(run)
        if args.json:
            print_json(result)
        else:
            print("\n" + summary(result, gate.enabled), file=sys.stderr)
    if args.record is not None:
        with status("measuring what a draft, a verify and a plain step cost ..."):
            _record(run, args.record)
    return 130 if run.interrupted else 0


def _asked_run(model, prompt: str | list[int], args: argparse.Namespace, gate):
    """The Run that the arguments ask for. Its emissions come round by round, with their text."""
    from dspark_jax.decode.request import make_request
    from dspark_jax.decode.run import Run

    stop_ids = _stop_ids(model, args.stop)
    request = make_request(model, prompt, stop_token_ids=stop_ids, **_asked(args, gate))
    return Run(model, request, by_round=True, with_text=True)


def _asked(args: argparse.Namespace, gate) -> dict:
    """The options that need no model to be understood."""
    return {
        "max_new_tokens": args.max_new_tokens,
        "mode": args.mode,
        "gate": gate,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
    }


def _complete(run, show: bool) -> None:
    """Runs it, showing the text, or the ids where there is no tokenizer, as it comes."""

    def each(emission) -> None:
        ids = " ".join(map(str, emission.tokens)) + " "
        print(ids if emission.text is None else emission.text, end="", flush=True)

    try:
        run.complete(each if show else None)
    except DsparkError:
        if show and run.prompts[0].tokens:
            print(flush=True)  # the error begins a line of its own
        raise


def _result(run) -> dict:
    """What --json prints."""
    output = run.output()
    return {
        "mode": run.request.mode,
        "text": output.texts and output.texts[0],
        "tokens": output.tokens[0],
        "finish_reason": output.finish_reasons[0],
        "rounds": [dataclasses.asdict(record) for record in output.rounds[0]],
        "stats": output.stats,
    }


def asked_gate(args: argparse.Namespace):
    """The GateConfig of the environment, switched on by --gate."""
    from dspark_jax.decode.gate_config import GateConfig

    gate = GateConfig.from_env()
    return dataclasses.replace(gate, enabled=True) if args.gate else gate


def _check_options(args: argparse.Namespace, gate) -> None:
    """Refuses before a model is loaded, or a prompt read, what can be refused without them."""
    from dspark_jax.decode.request import check_options, check_text

    check_options(**_asked(args, gate))
    require_room(args)
    for stop in args.stop or []:
        check_text(stop, f"--stop {stop!r}")
        if re.fullmatch("-[0-9]+", stop):
            raise PromptError(f"--stop {stop}: token ids are 0 or more")
    if args.record is not None:
        _check_recording(args, gate)


def _check_prompt(args: argparse.Namespace, prompt: str | list[int]) -> None:
    """Likewise; without a model nobody knows how many tokens a text is."""
    from dspark_jax.decode.request import check_text

    if isinstance(prompt, list):
        require_room(args, len(prompt))
        return
    check_text(prompt, "prompt 0")
    _require_tokenizer(args.checkpoint)


def _require_tokenizer(checkpoint: str | None) -> None:
    """Of a directory that has a config.json; of another one `load` says what is missing."""
    if checkpoint is None or not (Path(checkpoint) / "config.json").exists():
        return
    if not (Path(checkpoint) / "tokenizer.json").exists():
        raise PromptError(
            f"the prompt is text, but {checkpoint} has no tokenizer.json; give token ids with "
            "--prompt-ids"
        )


def _check_recording(args: argparse.Namespace, gate) -> None:
    """Refuses before the run what would lose its recording after it."""
    if gate.enabled or args.mode == "plain":
        raise ConfigError(
            "--record needs a speculative mode with the gate off, so that every round verifies "
            "the whole block"
        )
    from dspark_jax.runtime import files

    path = files.real_path(args.record)
    if not path.parent.is_dir():
        raise ConfigError(f"--record {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise ConfigError(f"--record {path}: this is a directory; name a file in it")
    try:
        files.check_writable(path)
    except OSError as error:
        raise ConfigError(f"--record {path}: cannot be written ({error.strerror})") from None
    if args.max_new_tokens == 1:
        raise ConfigError(
            "--record with --max-new-tokens 1: the first token comes from the prompt alone, so "
            "there is no round to record; ask for more tokens"
        )


def summary(result: dict, gated: bool) -> str:
    """A few lines: tokens, rounds, accepted per round, tokens per second; with a gate, its
    counters.
    """
    stats = result["stats"]
    speed = stats["tokens_per_second"] or 0.0  # None where it ended before any time had passed
    lines = [
        f"{stats['tokens']} tokens in {stats['seconds']:.2f} s, {speed:.1f} tok/s "
        f"({result['mode']}, ended by {result['finish_reason']}; compilation "
        f"{stats['compile_seconds']:.1f} s not counted)"
    ]
    if stats["rounds"]:
        rate = (
            "none verified"
            if stats["accept_rate"] is None
            else f"{100 * stats['accept_rate']:.0f}% of those verified"
        )
        lines.append(
            f"{stats['rounds']} rounds, {stats['accepted'] / stats['rounds']:.2f} drafts "
            f"accepted per round ({rate})"
        )
    if stats["gate"] and gated:
        gate = stats["gate"]
        lines.append(
            f"gate: {gate['truncated']} rounds truncated, {gate['skipped']} skipped "
            f"({gate['margin_skipped']} by margin)"
        )
    return "\n".join(lines)


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt_ids is not None:
        return _parsed_ids(args.prompt_ids)
    if args.prompt not in (None, "-"):
        return args.prompt
    if sys.stdin is None or (args.prompt is None and sys.stdin.isatty()):
        raise PromptError("no prompt: give it as an argument or on standard input")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not valid {error.encoding}: {error.reason} at byte {error.start}; "
            "give text in UTF-8"
        ) from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _parsed_ids(text: str) -> list[int]:
    """ "5 6 7" or "5, 6, 7" -> [5, 6, 7]."""
    words = [word for word in re.split(r"\s*,\s*|\s+", text.strip()) if text.strip()]
    if not words:
        raise PromptError("--prompt-ids: the prompt is empty: at least one token is needed")
    for at, word in enumerate(words):
        if not re.fullmatch("[0-9]{1,18}", word):
            raise PromptError(f"--prompt-ids: {word!r} at index {at} is not a token id")
    return [int(word) for word in words]


def _stop_ids(model, stops: list[str] | None) -> list[int] | None:
    return None if stops is None else [_stop_id(model, stop) for stop in stops]


def _stop_id(model, stop: str) -> int:
    """A token by its id, by its spelling in the vocabulary, or by its text, which a vocabulary may
    spell otherwise (a blank or a line break in one of bytes).
    """
    if re.fullmatch("-?[0-9]{1,18}", stop):
        return int(stop)
    token = model.tokenizer.token_to_id(stop) if model.tokenizer else None
    if token is not None:
        return token
    ids = model.tokenizer.encode(stop, add_special_tokens=False).ids if model.tokenizer else []
    if len(ids) != 1:
        raise PromptError(
            f"--stop {stop!r}: neither a token id nor a single token of this checkpoint's tokenizer"
        )
    return ids[0]


def _record(run, path: str) -> None:
    """Writes the rounds, with what they cost as measured now."""
    from dspark_jax.commands import costs
    from dspark_jax.decode.replay import RoundsRecorder

    recorder = RoundsRecorder(
        run.model.config.dspark_block_size,
        "dspark generate",
        "times are medians measured after the run",
    )
    measured = costs.measure(run.model, list(run.request.prompts[0].ids))
    recorder.add("prompt", run.prompts[0].records, **measured)
    recorder.write(path)
