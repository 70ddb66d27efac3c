"""`python -m dspark_jax.train STAGE`: trains the embedded checkpoint from text to official files.

    data     fetches and generates the text, trains the tokenizer     -> --cache
    main     trains the main model                                    -> --run/main.safetensors
    drafter  trains the draft module on the frozen main model         -> --run/drafter.safetensors
    export   writes the official layout and a README with figures     -> --out
    all      the four, one after the other

Every stage resumes where it stopped and then gives the same numbers.
"""

import argparse
import os
import sys
from pathlib import Path

# Large buffers come and go with every step: without these settings of glibc's malloc a third of the
# time goes into page faults.
MALLOC = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_TOP_PAD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
STAGES = ("data", "main", "drafter", "export", "all")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dspark_jax.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("stage", choices=STAGES)
    p.add_argument(
        "--cache",
        type=Path,
        default=Path("runs/text"),
        help="folder for text and tokens (default: %(default)s)",
    )
    p.add_argument(
        "--run",
        type=Path,
        default=Path("runs/tiny"),
        help="folder for states and logs (default: %(default)s)",
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("runs/checkpoint"),
        help="folder for the checkpoint (default: %(default)s)",
    )
    p.add_argument(
        "--config",
        type=Path,
        default=Path(__file__).parents[2] / "checkpoints" / "tiny" / "config.json",
        help="model config in the official layout (default: the embedded checkpoint's)",
    )
    p.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the text, the initial values and the order (default: %(default)s)",
    )
    p.add_argument(
        "--steps", type=int, default=4000, help="steps of the main model (default: %(default)s)"
    )
    p.add_argument(
        "--drafter-steps",
        type=int,
        default=1500,
        help="steps of the drafter (default: %(default)s)",
    )
    p.add_argument("--rows", type=int, default=8, help="windows a step (default: %(default)s)")
    p.add_argument("--length", type=int, default=256, help="tokens a window (default: %(default)s)")
    p.add_argument(
        "--muon-rate",
        type=float,
        default=1e-2,
        help="peak learning rate of matrices (default: %(default)s)",
    )
    p.add_argument(
        "--adam-rate",
        type=float,
        default=3e-3,
        help="peak learning rate of everything else (default: %(default)s)",
    )
    p.add_argument(
        "--devices",
        type=int,
        default=os.cpu_count(),
        help="data-parallel CPU devices; must divide --rows (default: all cores)",
    )
    p.add_argument(
        "--init",
        type=Path,
        help="stage main or drafter: a saved state whose parameters to start from, with "
        "a new schedule and, for main, the late mixture of text throughout",
    )
    p.add_argument(
        "--save-every",
        type=float,
        default=120.0,
        help="seconds between saved states (default: %(default)s)",
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.devices < 1 or options.rows % options.devices:
        parser().error(f"--devices {options.devices} must divide --rows {options.rows}")
    if options.init and options.stage not in ("main", "drafter"):
        parser().error("--init goes with the stages main and drafter only")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={options.devices}"
    )
    from dspark_jax.train import stages
    from dspark_jax.train.fetch_text import SourceError

    try:
        for name in STAGES[:-1] if options.stage == "all" else (options.stage,):
            getattr(stages, name)(options)
    except KeyboardInterrupt:
        print(
            f"stopped; the state is in {options.run}, the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    except (SourceError, FileNotFoundError, FloatingPointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.platform == "linux" and any(os.environ.get(name) is None for name in MALLOC):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "dspark_jax.train", *sys.argv[1:]],
            {**MALLOC, **os.environ},
        )
    sys.exit(main())
