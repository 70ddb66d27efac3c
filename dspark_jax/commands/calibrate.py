"""`dspark calibrate`: makes probabilities of the drafter's scores, by rounds of held-out text, and
stores how beside the checkpoint (decode/calibrate.py).
"""

from __future__ import annotations

import argparse

from dspark_jax.commands import calibration_prompts
from dspark_jax.commands.arguments import require_positive
from dspark_jax.commands.output import print_json, progress_bar, status
from dspark_jax.errors import ConfigError

FEW_ROUNDS = 1000  # to be fitted; with fewer a temperature may come out anywhere


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the drafter's confidence to what is accepted, for the gate",
        description=(
            "Runs held-out prompts in block mode, greedy and at temperature 1, with all drafts "
            "verified, and fits for each a temperature and an offset per draft position, so that "
            "scores mean what they say. Half of the prompts are for fitting, half for judging. "
            "The result is stored as calibration.json beside the checkpoint, where load and the "
            "gate find it. No token depends on it."
        ),
    )
    add = parser.add_argument
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="held-out text in UTF-8, a document each; with .jsonl a document a line, "
        '{"text": "..."} or {"prompt": [token ids]}',
    )
    add("--checkpoint", metavar="DIR", help="checkpoint directory (default: the embedded tiny one)")
    add("--out", metavar="FILE", help="write there (default: calibration.json in the checkpoint)")
    _add_sizes(add)
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the sampled rounds, 0 to 2**32 - 1 (default %(default)s)",
    )
    add(
        "--streams",
        type=int,
        metavar="N",
        help="prompts that run at a time on each row of the mesh's data axis (default: at most 8)",
    )
    add("--mesh", metavar="DATAxMODEL", help="devices to cut the model over (default: one device)")
    add(
        "--figure",
        metavar="FILE",
        help="draw what was predicted against what was observed, as .png, .svg or .pdf (needs the "
        "extra `figures`)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser


def _add_sizes(add) -> None:
    add(
        "--prompts",
        type=int,
        default=256,
        metavar="N",
        help="prompts, spread evenly over the text (default %(default)s, or as many as there are)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=64,
        metavar="N",
        help="longest prompt, in tokens (default %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to emit per prompt (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    _check_sizes(args)
    with status("loading ..."):
        from dspark_jax.commands import calibration_figure
        from dspark_jax.decode import documents

        if args.figure is not None:
            calibration_figure.check(args.figure)
        texts = [text for file in documents.read(args.data, ids=True) for text in file.documents]
        path = _where(args)
        model = _load(args)
    gap = args.max_new_tokens
    prompts = calibration_prompts.cut(model, texts, args.prompts, args.prompt_tokens, gap)
    judged = _judged(model, prompts, args)
    _store(path, model, judged)
    if args.figure is not None:
        calibration_figure.draw(args.figure, judged)
    result = {"file": str(path), "prompts": len(prompts), "documents": len(texts)} | judged
    if args.json:
        print_json(result)
    else:
        print(render(result))
    return 0


def _check_sizes(args: argparse.Namespace) -> None:
    for flag in ("--prompts", "--prompt-tokens", "--max-new-tokens"):
        require_positive(flag, getattr(args, flag[2:].replace("-", "_")))
    if args.prompts < 2:
        raise ConfigError("--prompts: 1 is too few; half are for fitting and half for judging")
    if args.max_new_tokens < 2:
        raise ConfigError(
            "--max-new-tokens: 1 makes no round: the first token comes from the prompt alone"
        )


def _where(args: argparse.Namespace):
    """The file to write. Raises ConfigError where that cannot be done, before anything is run."""
    from dspark_jax.checkpoints.paths import checkpoint_directory
    from dspark_jax.commands.asking import check_file
    from dspark_jax.loading.calibration import FILE
    from dspark_jax.loading.load import embedded_checkpoint
    from dspark_jax.runtime import files

    if args.out is not None:
        check_file("--out", args.out)
        return files.real_path(args.out)
    given = args.checkpoint
    directory = embedded_checkpoint() if given is None else checkpoint_directory(given)
    try:
        files.check_writable(directory / FILE)
    except OSError as error:
        raise ConfigError(
            f"{directory / FILE} cannot be written ({error.strerror}); name another file with "
            "--out, and give it to dspark.load(..., calibration=FILE)"
        ) from None
    return directory / FILE


def _load(args: argparse.Namespace):
    """With room for the whole block of the last round. What an earlier run stored is not needed."""
    import dspark_jax as dspark
    from dspark_jax.commands.together import command_mesh
    from dspark_jax.decode.request import check_options

    check_options(max_new_tokens=args.max_new_tokens, seed=args.seed, streams=args.streams)
    longest = args.prompt_tokens + args.max_new_tokens
    return dspark.load(
        args.checkpoint,
        command_mesh(args.mesh),
        max_seq_len=-(-(longest + 1) // 64) * 64 + 64,
        calibration=False,
    )


def _judged(model, prompts: list, args: argparse.Namespace) -> dict:
    """ "greedy" and "sampled", each what decode/calibrate.py found."""
    from dspark_jax.decode.calibrate import KINDS, collect, judge

    judged = {}
    for kind, temperature in KINDS.items():
        with progress_bar(f"{kind} rounds, prompts", len(prompts)) as advance:
            rounds = collect(
                model,
                prompts,
                args.max_new_tokens,
                temperature,
                args.seed,
                args.streams,
                advance,
            )
        with status(f"fitting {kind} rounds ..."):
            judged[kind] = {"temperature": temperature} | judge(rounds)
    return judged


def _store(path, model, judged: dict) -> None:
    from dspark_jax.loading import calibration

    kept = ("temperature", "temperatures", "offsets", "prompts", "rounds", "ece_raw", "ece")
    fitted = {kind: {name: found[name] for name in kept} for kind, found in judged.items()}
    try:
        calibration.write(path, model.module, model.config.dspark_block_size, fitted)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None


def render(result: dict) -> str:
    """The result as text for a terminal."""
    from dspark_jax.decode.calibrate import KINDS

    lines = [
        f"{result['prompts']} prompts of {result['documents']} documents, every other one held "
        "out; error (ECE) of the chance that the first k drafts are all accepted, on those held "
        "out:"
    ]
    for kind in KINDS:
        lines += ["", *_of_kind(kind, result[kind])]
    return "\n".join([*lines, "", f"written to {result['file']}"])


def _of_kind(kind: str, found: dict) -> list[str]:
    def percent(error: dict) -> str:
        positions = " ".join(f"{100 * e:5.2f}" for e in error["by_position"])
        return f"{100 * error['all']:6.2f}%   by position {positions}"

    rounds = found["rounds"]
    title = f"{kind}, temperature {found['temperature']:g}"
    lines = [
        f"{title}: {rounds['fit']} rounds to fit, {rounds['held_out']} held out",
        f"  raw scores          {percent(found['ece_raw'])}",
        f"  temperatures alone  {percent(found['ece_temperature_alone'])}",
        f"  scaled              {percent(found['ece'])}",
        "  temperatures  " + " ".join(f"{t:6.3f}" for t in found["temperatures"]),
        "  offsets       " + " ".join(f"{o:6.3f}" for o in found["offsets"]),
    ]
    if found["ece"]["all"] > found["ece_raw"]["all"]:
        lines.append("  note: this is worse than raw scores; give more prompts")
    elif found["rounds"]["fit"] < FEW_ROUNDS:
        lines.append(
            f"  note: {found['rounds']['fit']} rounds to fit are few, {FEW_ROUNDS:,} give numbers "
            "that stay; give more prompts"
        )
    return lines + _reliability(found)


def _reliability(found: dict) -> list[str]:
    from dspark_jax.decode.gate import BUCKET_EDGES

    bounds = ["-inf", *(f"{edge:g}" for edge in BUCKET_EDGES), "inf"]
    lines = [
        f"  {'bucket, logits':14}   {'first k drafts: predicted, observed, count':42}   "
        "each draft, given those before it"
    ]
    both = zip(*(found["reliability"][name] for name in ("products", "drafts")))
    for low, high, pair in zip(bounds, bounds[1:], both):
        cells = "   ".join(f"{_bucket(row):42}" for row in pair)
        lines.append(f"  [{low:>4}, {high:>4})   {cells}".rstrip())
    rising = {True: "rises with the bucket", False: "does not rise with every bucket"}
    lines.append(
        f"  what is observed {rising[found['monotone']['products']]} (first k drafts), "
        f"{rising[found['monotone']['drafts']]} (each draft)"
    )
    return lines


def _bucket(row: dict) -> str:
    if not row["count"]:
        return f"{'-':>10}{'-':>10}{0:10}"
    return f"{row['predicted']:10.3f}{row['observed']:10.3f}{row['count']:10}"
