"""A synthetic checkpoint for the conversion's tests, comparisons, and the processes that the tests
start (and kill).

python convert_parts.py DEVICES WHAT ARGUMENTS...
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from helpers import processes

UNIT_BYTES = 600_000  # experts of a layer (1.6 MB) are split, everything else is not


def start(devices: int, what: str, *arguments):
    return processes.start("convert_parts.py", devices, what, *arguments)


def result(running, status: int = 0) -> dict:
    """What the process printed last, as JSON."""
    out = processes.finish(running, status)
    return json.loads(out.splitlines()[-1]) if status == 0 else {}


def config():
    """Like the golden model, with sizes that 8 devices divide and experts that are most of it."""
    from helpers.official_files import CONFIG

    return dataclasses.replace(
        CONFIG,
        num_hidden_layers=4,
        num_hash_layers=1,
        compress_ratios=(0, 4, 8, 4, 0, 0),
        dspark_target_layer_ids=(2, 3),
        o_groups=8,
        n_routed_experts=32,
        moe_intermediate_size=256,
    )


def larger_config():
    """45 MB, most of it in one segment of four equal layers."""
    return dataclasses.replace(
        config(),
        num_hidden_layers=5,
        num_hash_layers=0,
        compress_ratios=(0, 4, 4, 4, 4, 0),
        dspark_target_layer_ids=(3, 4),
        n_routed_experts=128,
    )


def write_source(directory, model_config=None):
    """Shards of 1.3 MB (10 of them for `config`) and a tokenizer."""
    from tokenizers import Tokenizer, models

    from dspark_jax.checkpoints.synthetic import write_synthetic

    from helpers import official_table

    model_config = model_config or config()
    tokenizer = Tokenizer(
        models.WordLevel({f"word{i}": i for i in range(model_config.vocab_size)}, unk_token="word0")
    )
    write_synthetic(
        directory,
        model_config.to_dict(),
        official_table.expected(model_config),
        1,
        1_300_000,
        tokenizer,
    )
    return directory


def convert(source, target, **options) -> None:
    from dspark_jax.loading.conversion import convert_checkpoint

    convert_checkpoint(source, target, unit_bytes=UNIT_BYTES, **options)


def command(*arguments) -> int:
    """`dspark convert ARGUMENTS...`; errors are raised."""
    import argparse

    from dspark_jax.commands import convert as convert_command

    parser = argparse.ArgumentParser()
    convert_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["convert", *map(str, arguments)])
    return args.run(args)


def copied(directory, tmp_path, name="copy"):
    return shutil.copytree(directory, tmp_path / name)


def flip(target) -> None:
    """Changes one bit of the largest file of a conversion."""
    path = largest_file(target)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def largest_file(target):
    return max(target.rglob("d/*"), key=lambda path: path.stat().st_size)


def stop_after(monkeypatch, count) -> None:
    """Ctrl-C at the beginning of unit `count`."""
    from dspark_jax.checkpoints import convert as conversion

    write, calls = conversion.write_unit, iter(range(1000))

    def interrupted(*arguments):
        if next(calls) == count:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(conversion, "write_unit", interrupted)


def parameters(source, model_config, numerics, packed: bool) -> list:
    """All arrays of a model whose values come from `source`."""
    import jax
    from flax import nnx

    from dspark_jax.checkpoints.official import OfficialCheckpoint
    from dspark_jax.loading.load import DSpark
    from dspark_jax.loading.sources import ConvertedSource, OfficialSource

    kind = OfficialSource if isinstance(source, OfficialCheckpoint) else ConvertedSource
    return jax.tree.leaves(
        nnx.split(DSpark(model_config, numerics, kind(source, numerics, packed)))[1]
    )


def same(a, b) -> bool:
    """The same dtype, place and bits, shard by shard."""
    import numpy as np

    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.sharding == b.sharding
        and all(
            x.index == y.index and np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        )
    )


def contents(target) -> dict:
    """Every array of a converted checkpoint: (leaf) -> (dtype, shape, bytes)."""
    from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint

    checkpoint = ConvertedCheckpoint.open(target)
    arrays = {
        name: checkpoint.read(name, tuple((0, size) for size in leaf.shape))
        for name, leaf in checkpoint.leaves().items()
    }
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()
    }


def meshes(source, target) -> None:
    """Converts on 1x4 and loads on 1, 2, 4 and 8 devices; each array must be what the official
    checkpoint gives there.
    """
    from dspark_jax.checkpoints.official import OfficialCheckpoint
    from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint
    from dspark_jax.loading.conversion import convert_checkpoint
    from dspark_jax.model.layers.numerics import Numerics
    from dspark_jax.runtime.sharding import make_mesh

    convert_checkpoint(source, target, mesh=make_mesh(1, 4), unit_bytes=UNIT_BYTES)
    official, converted, wrong, count = (
        OfficialCheckpoint.open(source),
        ConvertedCheckpoint.open(target),
        [],
        0,
    )
    for data, model, dtype, packed in (
        (1, 1, "float32", False),
        (1, 2, "bfloat16", True),
        (2, 2, "float32", True),
        (1, 8, "bfloat16", True),
        (2, 4, "bfloat16", False),
    ):
        numerics = Numerics(dtype, True, make_mesh(data, model))
        pairs = zip(
            *(
                parameters(checkpoint, config(), numerics, packed)
                for checkpoint in (official, converted)
            ),
            strict=True,
        )
        outcome = [same(a, b) for a, b in pairs]
        count += len(outcome)
        wrong += [
            f"{data}x{model} {dtype} packed={packed}: array {i}"
            for i, ok in enumerate(outcome)
            if not ok
        ]
    print(json.dumps({"wrong": wrong, "count": count}))


def replicated(source, directory) -> None:
    """Converts on meshes of 4 devices that do not cut everything, or nothing."""
    from dspark_jax.runtime.sharding import make_mesh

    for data, model in ((1, 4), (2, 2), (4, 1)):
        convert(source, Path(directory) / f"{data}x{model}", mesh=make_mesh(data, model))
    print(json.dumps({}))


def die(source, target, moment: str, count: str) -> None:
    """Kills itself at the count-th time that the conversion comes to `moment`, a function of
    checkpoints.convert.
    """
    import signal
    import threading

    from dspark_jax.checkpoints import convert
    from dspark_jax.loading.conversion import convert_checkpoint

    function, calls = getattr(convert, moment), iter(range(1, 1000))

    def dying(*arguments, **options):
        if next(calls) == int(count):
            if moment != "write_unit":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=when_begun, args=(arguments[0],)).start()
        return function(*arguments, **options)

    def when_begun(path):
        """Kills as soon as the unit's unfinished directory is there."""
        while not any(path.parent.glob(f"{path.name}.*tmp*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(convert, moment, dying)
    convert_checkpoint(source, target, unit_bytes=UNIT_BYTES)


def memory(small, source, directory) -> None:
    """Peak resident memory of a conversion on 1x4 devices, and of loading the result beyond what is
    then held, in bytes.
    """
    from dspark_jax.checkpoints.orbax_io import ConvertedCheckpoint
    from dspark_jax.loading.conversion import convert_checkpoint
    from dspark_jax.model.layers.numerics import Numerics
    from dspark_jax.runtime.sharding import make_mesh

    mesh, directory = make_mesh(1, 4), Path(directory)
    numerics = Numerics("bfloat16", True, mesh)
    convert_checkpoint(
        small, directory / "warm", mesh=mesh, unit_bytes=UNIT_BYTES
    )  # what the first use of everything takes
    parameters(ConvertedCheckpoint.open(directory / "warm"), config(), numerics, True)
    before = peak(reset=True)
    convert_checkpoint(source, directory / "new", mesh=mesh, unit_bytes=UNIT_BYTES)
    converting = peak() - before
    before = peak(reset=True)
    held = parameters(ConvertedCheckpoint.open(directory / "new"), larger_config(), numerics, True)
    size = sum(shard.data.nbytes for array in held for shard in array.addressable_shards)
    print(
        json.dumps(
            {
                "converting": converting,
                "loading": peak() - before - size,
                "model": size,
                "largest": max(array.nbytes for array in held),
            }
        )
    )


def peak(reset: bool = False) -> int:
    """Largest resident memory of this process so far, bytes; `reset`: the present one, from which
    the next peak counts.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def process(source, target, port: str, index: str, dies: str = "", mesh: str = "") -> None:
    """`dspark convert` as one of two processes with 2 devices each; prints the bytes that it read
    of routed experts' codes.

    dies: "PROCESS:COUNT", which process kills itself at the beginning of which unit, counted from
      1. mesh: "": the command's own.
    """
    import functools
    import signal
    import sys

    from dspark_jax.checkpoints import convert
    from dspark_jax.checkpoints.safetensors_file import SafetensorsFile
    from dspark_jax.commands import main
    from dspark_jax.loading import conversion

    read, sizes = SafetensorsFile.read, []

    def counted(self, name, rows, columns):
        values = read(self, name, rows, columns)
        sizes.append(values.nbytes if ".experts." in name and name.endswith(".weight") else 0)
        return values

    write, units = convert.write_unit, iter(range(1, 1000))

    def dying(*arguments):
        if dies == f"{index}:{next(units)}":
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    SafetensorsFile.read, convert.write_unit = counted, dying
    conversion.convert_checkpoint = functools.partial(
        conversion.convert_checkpoint, unit_bytes=UNIT_BYTES
    )
    status = main.main(
        [
            "convert",
            source,
            target,
            "--coordinator",
            f"localhost:{port}",
            "--process-id",
            index,
            "--num-processes",
            "2",
            *(["--mesh", mesh] if mesh else []),
        ]
    )
    print(json.dumps({"experts": sum(sizes)}))
    sys.exit(status)


if __name__ == "__main__":
    processes.main(meshes=meshes, replicated=replicated, die=die, memory=memory, process=process)
