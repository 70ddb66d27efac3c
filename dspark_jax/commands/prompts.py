"""`dspark generate --prompts FILE`: many prompts, each with settings of its own where it has some,
and their results as JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence

from dspark_jax.commands import asking, prompts_file, report, results_file
from dspark_jax.commands.output import progress_bar, status
from dspark_jax.commands.prompts_file import Line, at_line
from dspark_jax.errors import ConfigError, DsparkError, NumericsError, PromptError

HELP = (
    "The file of --prompts has one prompt a line, or JSON lines. It is read as JSON lines if its "
    "name ends in .jsonl, or if its first character that is not blank is { and its name does not "
    'end in .txt. Such a line is an object with "prompt", text or a list of token ids. In that '
    f"line {', '.join(prompts_file.SETTINGS[:-1])} and {prompts_file.SETTINGS[-1]} count instead "
    'of the options of the command, and "id", whatever it is, is repeated in the result. Blank '
    "lines are refused, but at the end. A result is an object a line: line (its number, from 1), "
    "id, text, tokens, finish_reason, stop_reason, error where there was one, logprobs and "
    "prompt_logprobs where asked for, stats (times in seconds), and key and model, which --resume "
    "compares. Results come in the order of the prompts, each as soon as it and all before it are "
    "finished; after Ctrl-C (status 130) all that are finished are written. A line is sampled "
    "with noise of its own by its number or, with a seed of its own, with the noise that it has "
    "alone, whichever results are there already. Numbers that are not finite end their line with "
    'finish_reason "error" and the command with status 1; the other lines go on.'
)


def run(args: argparse.Namespace, prints: bool) -> int:
    """Returns the exit status. prints: whether this process writes the results."""
    _check_what_is_written(args)
    with status("loading ...", shown=prints):
        gate = asking.asked_gate(args)
        asking.check_options(args, gate)
    lines, asked = prompts_file.read(args.prompts), asking.asked_options(args, gate)
    keys = {line.number: _checked(args, asked, line) for line in lines}
    kept = results_file.read(args.output, keys) if args.resume else {}
    left = [line for line in lines if line.number not in kept]
    batch = None
    if left:
        with status("loading ...", shown=prints):
            model = asking.load(args)
            made_by = _made_by(model)
            results_file.require_same_model(args.output, kept, made_by)
        run = _asked_run(model, args, asked, left, len(lines))
        batch = _Batch(run, left, {n: {"key": key, "model": made_by} for n, key in keys.items()})
        with status("compiling (first time only) ...", shown=prints):
            run.compile()
    with _output(args, kept, prints) as write:
        results = results_file.InOrder(range(results_file.leading(kept) + 1, len(lines) + 1), write)
        for number, one in kept.items():
            results.add(number, one.text)
        if batch is not None:
            with _bar(args, len(left), prints) as advance:
                batch.complete(results, advance)
        results.end()
    return _ended(args, batch, len(kept), gate.enabled, prints)


def _check_what_is_written(args: argparse.Namespace) -> None:
    """Refuses what belongs to a single prompt, and a file that cannot take the results."""
    if args.record is not None:
        raise ConfigError("--record keeps the rounds of a single prompt; leave --prompts out")
    if args.output is None:
        if args.resume:
            raise ConfigError("--resume goes with --output, the file whose results are kept")
        return
    asking.check_file("--output", args.output)
    if args.prompts != prompts_file.STANDARD_INPUT:
        results_file.require_other_file(args.output, args.prompts)
    if not args.resume:
        results_file.require_empty(args.output)


def _checked(args: argparse.Namespace, asked: dict, line: Line) -> str:
    """The key of a line: what its result is computed for, beside the model. Raises what can be
    refused of it without a model, naming file and line.
    """
    try:
        return _key(args, asked, line)
    except DsparkError as error:
        raise at_line(_where(args, line), error) from None


def _where(args: argparse.Namespace, line: Line) -> str:
    return f"{prompts_file.shown_name(args.prompts)}, line {line.number}"


def _key(args: argparse.Namespace, asked: dict, line: Line) -> str:
    from dspark_jax.decode import options

    checked = options.check(options.Options(**(asked | line.settings)), count=1)
    columns = {name: values[0] for name, values in checked.columns.items()}
    _check_room(args, line, columns["max_new_tokens"])
    if isinstance(line.prompt, str):
        instead = 'give token ids in JSON lines, {"prompt": [5, 6, 7]}'
        asking.require_tokenizer(args.checkpoint, "the prompt is text", instead)
    if columns["stop"]:
        asking.require_tokenizer(args.checkpoint, "stop is text", "use stop_token_ids")
    stops = columns.pop("stop_token_ids")
    what = {
        "prompt": line.prompt,
        "about": line.about,
        "columns": columns,
        "noise": _noise(line),
        "stop_token_ids": args.stop if stops is None else sorted(stops),
        "forbid": args.forbid if "forbidden_tokens" not in line.settings else None,
        "logprobs": checked.logprobs,
        "prompt_logprobs": checked.prompt_logprobs,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _check_room(args: argparse.Namespace, line: Line, new: int) -> None:
    """Without a model nobody knows how many tokens a text is; it is one at least."""
    from dspark_jax.decode.options import counted

    least = 1 if isinstance(line.prompt, str) else len(line.prompt)
    if least + new > args.max_seq_len:
        raise PromptError(
            f"a prompt of at least {counted(least, 'token')} and max_new_tokens "
            f"{new} together exceed --max-seq-len {args.max_seq_len}; ask for fewer tokens or for "
            "a larger --max-seq-len"
        )


def _noise(line: Line) -> int:
    """Prompt.index: what tells the noise of lines with one seed apart."""
    return 0 if "seed" in line.settings else line.number - 1


def _made_by(model) -> str:
    """What results depend on beside what was asked."""
    from dspark_jax.decode.identity import identity

    return f"{zlib.crc32(json.dumps(identity(model)).encode()):08x}"


def _asked_run(model, args: argparse.Namespace, asked: dict, left: list[Line], of: int):
    """The Run of the lines that are left, of so many. The number of streams is that of all, since
    on accelerators it chooses kernels.
    """
    from dspark_jax.decode import options
    from dspark_jax.decode.request import make_request
    from dspark_jax.decode.run import Run
    from dspark_jax.runtime.sharding import DATA

    asked = asked | asking.asked_tokens(model, args)
    common = make_request(model, [0], **(asked | {"max_new_tokens": 1}))
    request = dataclasses.replace(
        common,
        prompts=tuple(_prompts(model, args, asked, left)),
        streams=options.slots(asked["streams"], of, model.mesh.shape[DATA]),
    )
    return Run(model, request, with_text=True)


def _prompts(model, args: argparse.Namespace, asked: dict, left: list[Line]) -> Iterator:
    """The Prompt of each line."""
    from dspark_jax.decode.request import make_request

    notes = []
    for line in left:
        where = _where(args, line)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                request = make_request(model, line.prompt, **(asked | line.settings))
            except DsparkError as error:
                raise at_line(where, error) from None
        notes += [f"{where}: {str(note.message).removeprefix('prompt 0 ')}" for note in caught]
        yield dataclasses.replace(request.prompts[0], index=_noise(line))
    if notes:
        more = f" (and {len(notes) - 1} more of this kind)" if len(notes) > 1 else ""
        warnings.warn(notes[0] + more, stacklevel=2)


class _Batch:
    """A run of lines, told as they end.

    error: what ended it, or a NumericsError that ended some of the lines. told: how many ended.
    """

    def __init__(self, run, lines: Sequence[Line], computed_for: dict[int, dict]):
        """computed_for: number of a line -> {key, model}."""
        self.run, self._lines, self._computed_for = run, lines, computed_for
        self.error: DsparkError | None = None
        self.told: set[int] = set()

    def complete(self, results: results_file.InOrder, advance: Callable[[], None]) -> None:
        """Runs it; Ctrl-C ends it. What has ended is in `results`."""

        def tell(number: int) -> None:
            if number not in self.told:
                self.told.add(number)
                result = json.dumps(self._result(number), allow_nan=False)
                results.add(self._lines[number].number, result)
                advance()

        def each(emission) -> None:
            for number in self.failures:
                tell(number)
            if emission.last:
                tell(emission.prompt)

        try:
            self.run.complete(each)
        except DsparkError as error:
            self.error = error
        for number in self.failures:
            tell(number)

    @property
    def failures(self) -> dict[int, str]:
        """Number in the run -> what was not finite."""
        return self.run.engine.failures

    def _result(self, number: int) -> dict:
        from dspark_jax.decode.stats import collect

        run, line, prompt = self.run, self._lines[number], self.run.prompts[number]
        # What the line is comes first: a torn line is known by it.
        result = {"line": line.number, **line.about}
        result["text"] = None if run.model.tokenizer is None else "".join(prompt.pieces)
        result["tokens"] = prompt.tokens
        failed = number in self.failures
        result["finish_reason"] = "error" if failed else prompt.finish_reason
        result["stop_reason"] = prompt.stop_reason
        if failed:
            result["error"] = self._failure(number)
        if run.request.logprobs is not None:
            result["logprobs"] = report.logprobs(prompt.logprobs)
        if run.request.prompt_logprobs:
            told = run.engine.prompt_logprobs.get(number, [])
            result["prompt_logprobs"] = report.logprobs(told)
        block = run.model.config.dspark_block_size
        result["stats"] = collect([prompt], block, 0.0, prompt.seconds)["per_prompt"][0]
        return result | self._computed_for[line.number]

    def _failure(self, number: int) -> str:
        return self.failures[number].removeprefix(f"prompt {number}: ")

    def numerics_error(self, name: str) -> NumericsError:
        """Of all lines whose numbers were not finite; name: of their file."""
        first, *others = sorted(self.failures)
        more = ", ".join(str(self._lines[number].number) for number in others)
        also = f" (so ended lines {more} too)" if more else ""
        return NumericsError(
            f"{name}, line {self._lines[first].number}: {self._failure(first)}{also}"
        )


@contextlib.contextmanager
def _output(args: argparse.Namespace, kept: dict, prints: bool) -> Iterator[Callable[[str], None]]:
    """write(text) of a line, to where the results go."""
    if not prints:
        yield lambda text: None
    elif args.output is None:
        stdout = sys.stdout  # where a bar is shown, rich puts something else in its place
        yield lambda text: print(text, file=stdout, flush=True)
    else:
        with results_file.opened(args.output, kept) as write:
            yield write


def _bar(args: argparse.Namespace, total: int, prints: bool):
    """The bar of a terminal, unless the results go there."""
    if not prints or (args.output is None and sys.stdout.isatty()):
        return contextlib.nullcontext(lambda: None)
    return progress_bar("prompts", total)


def _ended(
    args: argparse.Namespace, batch: _Batch | None, kept: int, gated: bool, prints: bool
) -> int:
    """Says what it came to; returns the exit status. Raises what ended it."""
    if batch is None:
        if prints:
            print(f"all {kept} results were there already", file=sys.stderr)
        return 0
    if prints:
        print("\n".join(_summary(args, batch, kept, gated)), file=sys.stderr)
    if isinstance(batch.error, NumericsError):
        raise batch.numerics_error(prompts_file.shown_name(args.prompts))
    if batch.error is not None:
        raise batch.error
    return 130 if batch.run.interrupted else 0


def _summary(args: argparse.Namespace, batch: _Batch, kept: int, gated: bool) -> list[str]:
    from dspark_jax.decode.options import counted

    stats, prompts = batch.run.output().stats, len(batch.run.prompts)
    busy = stats["busy_share"]
    how = f"{args.mode}, {stats['streams']} at a time" + (
        "" if busy is None else f", places busy {100 * busy:.0f}%"
    )
    which = counted(prompts, "prompt")
    if kept:
        which = f"{prompts} of {prompts + kept} prompts ({kept} were there already)"
    lines = [f"{which}: {report.speed(stats, how)}"]
    if len(batch.told) < prompts:
        again = "; --resume goes on" if args.output else ""
        lines.append(f"interrupted: {len(batch.told)} of {prompts} finished{again}")
    return lines + report.rounds(stats, gated)
