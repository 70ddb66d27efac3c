"""Converts a large synthetic checkpoint with real expert sizes, measures memory and time, and kills
the conversion ten times.

    python benchmarks/convert.py DIRECTORY [--gb 4] [--kills 10] [--seed 0] [--keep]

DIRECTORY needs about 3.5 times these bytes. Everything runs on 4 virtual CPU devices as the mesh
1x4:
* conversion and `verify`, each in its own process: seconds, and resident memory beyond the process
  before it began;
* loading (experts packed): memory beyond what the mesh then holds;
* a conversion that is killed (SIGKILL) at random moments and started again until it is done: its
  arrays must be the same bytes.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

BOUND = 1.5e9  # bytes of resident memory beyond the mesh's arrays


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--gb",
        type=float,
        default=4.0,
        help="size of the official checkpoint, about, in 10^9 bytes (default 4)",
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints there")
    args = parser.parse_args()
    where = {name: str(args.directory / name) for name in ("official", "undisturbed", "killed")}
    try:
        generate(where["official"], args.gb)
        size = sum(path.stat().st_size for path in Path(where["official"]).iterdir())
        print(f"official checkpoint: {size / 1e9:.2f} GB", flush=True)
        ok = report("convert", run("convert", where["official"], where["undisturbed"]))
        ok &= report("verify", run("verify", where["undisturbed"]))
        ok &= report("load", run("load", where["undisturbed"]))
        kill_and_resume(where["official"], where["killed"], args.kills, random.Random(args.seed))
        ok &= report("verify what was killed", run("verify", where["killed"]))
        same = run("compare", where["undisturbed"], where["killed"])
        print(
            f"{same['arrays']} arrays, {same['bytes']:,} bytes: {same['different']} differ from "
            "the undisturbed conversion"
        )
        return 0 if ok and not same["different"] else 1
    finally:
        if not args.keep:
            for path in where.values():
                shutil.rmtree(path, ignore_errors=True)


def config(gb: float = 4.0):
    """V4-Flash in every size but vocabulary, layers (two, and one draft stage) and number of
    experts (80 for 4 GB).
    """
    from dspark_jax.config import v4_flash_0731

    # One expert of all three layers: 40 MB; the rest: 0.8 GB.
    experts = max(8, round((gb - 0.8) / 0.04 / 8) * 8)
    return dataclasses.replace(
        v4_flash_0731(),
        num_hidden_layers=2,
        num_hash_layers=0,
        compress_ratios=(4, 4, 0),
        vocab_size=16384,
        n_routed_experts=experts,
        dspark_target_layer_ids=(1,),
        dspark_noise_token_id=1,
    )


def generate(path: str, gb: float) -> None:
    from dspark_jax.checkpoints.synthetic import write_synthetic
    from dspark_jax.loading.load import expected_tensors

    write_synthetic(
        path,
        config(gb).to_dict(),
        expected_tensors(config(gb)).values(),
        max_shard_bytes=1_000_000_000,
    )


# What runs in processes of its own.


def child(what: str, *arguments: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.devices()
    import orbax.checkpoint  # noqa: F401  its import is not what is measured
    import tensorstore  # noqa: F401

    tasks = {"convert": convert, "verify": verify, "load": load, "compare": compare}
    print(json.dumps(tasks[what](*arguments)))


def convert(official: str, target: str) -> dict:
    from dspark_jax.loading.conversion import convert_checkpoint
    from dspark_jax.runtime.sharding import make_mesh

    with Curve() as curve:
        convert_checkpoint(
            official,
            target,
            make_mesh(1, 4),
            lambda *done: print(*done, file=sys.stderr, flush=True),
        )
    return curve.summary(0)


def verify(target: str) -> dict:
    from dspark_jax.checkpoints.convert import verify as check

    with Curve() as curve:
        check(target)
    return curve.summary(0)


def load(target: str) -> dict:
    import jax
    from flax import nnx

    from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint
    from dspark_jax.config import ModelConfig
    from dspark_jax.loading.load import DSpark
    from dspark_jax.loading.sources import ConvertedSource
    from dspark_jax.model.layers.numerics import Numerics
    from dspark_jax.runtime.sharding import make_mesh

    checkpoint = ConvertedCheckpoint.open(target)
    numerics = Numerics("bfloat16", True, make_mesh(1, 4))
    with Curve() as curve:
        module = DSpark(
            ModelConfig.from_dict(checkpoint.config_dict),
            numerics,
            ConvertedSource(checkpoint, numerics, True),
        )
        arrays = jax.block_until_ready(jax.tree.leaves(nnx.split(module)[1]))
    return curve.summary(
        sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    )


def compare(a: str, b: str) -> dict:
    import numpy as np

    from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint

    a, b = ConvertedCheckpoint.open(a), ConvertedCheckpoint.open(b)
    assert a.leaves() == b.leaves() and a.checksums == b.checksums
    different = 0
    for name, leaf in a.leaves().items():
        step = max(1, leaf.shape[0] // 8)
        for i in range(0, leaf.shape[0], step):
            bounds = ((i, min(i + step, leaf.shape[0])), *((0, size) for size in leaf.shape[1:]))
            different += not np.array_equal(
                a.read(name, bounds).view(np.uint8), b.read(name, bounds).view(np.uint8)
            )
    return {
        "arrays": len(a.leaves()),
        "bytes": sum(leaf.nbytes for leaf in a.leaves().values()),
        "different": different,
    }


class Curve:
    """Resident memory of this process ten times a second, and its peak as the system counted it,
    beyond the beginning.
    """

    def __enter__(self) -> "Curve":
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
        self.before, self.began = memory("VmRSS"), time.monotonic()
        self.points, self.stop = [], threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.1):
            self.points.append(memory("VmRSS") - self.before)

    def __exit__(self, *_) -> None:
        self.seconds, self.peak = time.monotonic() - self.began, memory("VmHWM") - self.before
        self.stop.set()
        self.thread.join()

    def summary(self, held: int) -> dict:
        """held: bytes of arrays that are meant to stay. curve: 20 numbers, the peaks of equal
        times, MB.
        """
        size = max(1, -(-len(self.points) // 20))
        curve = [
            round(max(self.points[i : i + size]) / 1e6) for i in range(0, len(self.points), size)
        ]
        return {"seconds": self.seconds, "peak": self.peak, "held": held, "curve": curve}


def memory(what: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[what].split()[0]) * 1024


# What starts them.


def start(*arguments: str, **options) -> subprocess.Popen:
    root = str(Path(__file__).resolve().parents[1])
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *arguments],
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        **options,
    )


def run(*arguments: str) -> dict:
    process = start(*arguments, stderr=subprocess.DEVNULL if arguments[0] == "convert" else None)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit status {process.returncode}")
    return json.loads(out.splitlines()[-1])


def report(what: str, measured: dict) -> bool:
    beyond = measured["peak"] - measured["held"]
    held = f", of which the mesh holds {measured['held'] / 1e9:.2f} GB" if measured["held"] else ""
    print(
        f"{what}: {measured['seconds']:.1f} s, peak {measured['peak'] / 1e9:.2f} GB{held}; "
        f"beyond: {beyond / 1e9:.2f} GB ({'within' if beyond <= BOUND else 'ABOVE'} "
        f"{BOUND / 1e9} GB)\n  over time, MB: {measured['curve']}",
        flush=True,
    )
    return beyond <= BOUND


def kill_and_resume(official: str, target: str, kills: int, rng: random.Random) -> None:
    """Kills the conversion after a random number of bytes and a random time more, then lets it
    finish.
    """
    done, total = 0, None
    for i in range(kills + 1):
        process = start("convert", official, target, stderr=subprocess.PIPE)
        aim = None
        for line in process.stderr:
            words = line.split()
            if len(words) != 2 or not all(word.isdecimal() for word in words):
                continue
            done, total = map(int, words)
            aim = (
                done + rng.uniform(0, 2) * (total - done) / (kills + 2 - i) if aim is None else aim
            )
            if i < kills and done >= aim:
                time.sleep(rng.uniform(0, 0.5))
                process.send_signal(signal.SIGKILL)
                break
        process.communicate()
        killed = process.returncode == -signal.SIGKILL
        print(
            f"  {'killed' if killed else 'finished'} at {done / 1e9:.2f} of {total / 1e9:.2f} GB",
            flush=True,
        )
        if process.returncode and not killed:
            raise SystemExit("the conversion failed")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        sys.exit(main())
