"""`dspark generate`: streams the continuation of a prompt to standard output, and says on standard
error what it took. With --prompts, of many prompts: commands/prompts.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys

from dspark_jax.commands import asking, prompts, report
from dspark_jax.commands.arguments import require_room
from dspark_jax.commands.asking import asked_gate, asked_options, asked_tokens
from dspark_jax.commands.output import print_json, status
from dspark_jax.commands.together import run_command, several_asked_for
from dspark_jax.errors import ConfigError, DsparkError, PromptError


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt, or many",
        description=(
            "Continues a prompt with the embedded checkpoint or one of yours. Text streams to "
            "standard output, a summary follows on standard error. All modes give the same "
            "tokens."
        ),
    )
    asking.add_what_is_read(parser)
    asking.add_choice_of_tokens(parser)
    asking.add_how_it_runs(parser)
    asking.add_what_is_written(parser)
    asking.add_many_prompts(parser, prompts.HELP)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if args.prompts is not None:
        return run_command(args, prompts.run)
    _check_what_is_written(args)
    return run_command(args, _run)


def _run(args: argparse.Namespace, prints: bool) -> int:
    with status("loading ...", shown=prints):
        gate = asked_gate(args)
        _check_options(args, gate)
    prompt = _prompt(args)
    _check_prompt(args, prompt)
    with status("loading ...", shown=prints):
        from dspark_jax.commands import costs

        model = asking.load(args)
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

    request = make_request(model, prompt, **asked_options(args, gate), **asked_tokens(model, args))
    return Run(model, request, by_round=True, with_text=True)


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
    result = {
        "mode": run.request.mode,
        "text": output.texts and output.texts[0],
        "tokens": output.tokens[0],
        "finish_reason": output.finish_reasons[0],
        "stop_reason": output.stop_reasons[0],
        "rounds": [dataclasses.asdict(record) for record in output.rounds[0]],
        "stats": output.stats,
    }
    if output.logprobs is not None:
        result["logprobs"] = report.logprobs(output.logprobs[0])
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = report.logprobs(output.prompt_logprobs[0])
    return result


def _check_what_is_written(args: argparse.Namespace) -> None:
    """Refuses what belongs to another kind of output."""
    if args.record is not None and several_asked_for(args):
        raise ConfigError("--record measures what one process costs; leave --coordinator out")
    if args.output is not None:
        raise ConfigError(
            "--output takes the results of --prompts; a single one goes to standard output"
        )
    if args.resume:
        raise ConfigError("--resume goes with --prompts and --output")
    for flag, asked in (
        ("--logprobs", args.logprobs is not None),
        ("--prompt-logprobs", args.prompt_logprobs),
    ):
        if asked and not args.json:
            raise ConfigError(
                f"{flag}: numbers have no place in text; ask for --json, or give --prompts"
            )


def _check_options(args: argparse.Namespace, gate) -> None:
    """Refuses before a model is loaded, or a prompt read, what can be refused without them."""
    asking.check_options(args, gate)
    require_room(args)
    if args.record is not None:
        _check_recording(args, gate)


def _check_prompt(args: argparse.Namespace, prompt: str | list[int]) -> None:
    """Likewise; without a model nobody knows how many tokens a text is."""
    from dspark_jax.decode.request import check_text

    if isinstance(prompt, list):
        require_room(args, len(prompt))
        return
    check_text(prompt, "prompt 0")
    asking.require_tokenizer(
        args.checkpoint, "the prompt is text", "give token ids with --prompt-ids"
    )


def _check_recording(args: argparse.Namespace, gate) -> None:
    """Refuses before the run what would lose its recording after it."""
    if gate.enabled or args.mode == "plain":
        raise ConfigError(
            "--record needs a speculative mode with the gate off, so that every round verifies "
            "the whole block"
        )
    asking.check_file("--record", args.record)
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
    how = f"{result['mode']}, ended by {result['finish_reason']}"
    return "\n".join([report.speed(stats, how), *report.rounds(stats, gated)])


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.prompt_ids is not None:
        return _parsed_ids(args.prompt_ids)
    if args.prompt not in (None, "-"):
        return args.prompt
    if sys.stdin is None or (args.prompt is None and sys.stdin.isatty()):
        raise PromptError("no prompt: give it as an argument or on standard input")
    text = asking.standard_input()
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


def _record(run, path: str) -> None:
    """Writes the rounds, with what they cost as measured now."""
    from dspark_jax.commands import costs
    from dspark_jax.decode.replay import RoundsRecorder
    from dspark_jax.decode.slots import scale_of

    recorder = RoundsRecorder(
        run.model.config.dspark_block_size,
        "dspark generate",
        "times are medians measured after the run",
        scale_of(run.model, run.request.gate, run.request.prompts[0]),
    )
    measured = costs.measure(run.model, list(run.request.prompts[0].ids))
    recorder.add("prompt", run.prompts[0].records, **measured)
    recorder.write(path)
