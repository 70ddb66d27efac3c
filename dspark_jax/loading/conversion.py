"""An official checkpoint to the sharded Orbax layout of checkpoints/orbax_io.py, which any mesh can
load.
"""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from dspark_jax.checkpoints import convert
from dspark_jax.checkpoints.official import OfficialCheckpoint
from dspark_jax.checkpoints.units import UNIT_BYTES
from dspark_jax.config import ModelConfig
from dspark_jax.loading.load import expected_tensors, read_tokenizer, record_leaves
from dspark_jax.loading.sources import read_official
from dspark_jax.loading.stated_sizes import check_sizes
from dspark_jax.runtime.processes import losses_explained
from dspark_jax.runtime.sharding import RULES, check_mesh, check_processes, single_device


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    mesh: Mesh | None = None,
    progress: convert.Progress | None = None,
    unit_bytes: int = UNIT_BYTES,
) -> None:
    """Converts the official checkpoint at `source` to the directory `target`, or resumes a
    conversion that was stopped.

    mesh: the devices whose processes share the work, each reading and writing what its devices
      hold; any mesh can load the result. None: this process's first device. Several processes
      (`processes.initialize`) all call this, with all devices.
    progress: called with (bytes done, bytes in all).
    unit_bytes: about how much is in memory at a time; fixed when a conversion begins.
    Raises CheckpointError and ConfigError as `load` does, before anything is written where that is
      possible; DsparkError if another process is lost. What is done by then stays done.
    """
    with losses_explained(), OfficialCheckpoint.open(source) as checkpoint:
        config = ModelConfig.from_dict(checkpoint.config_dict)
        mesh = single_device() if mesh is None else mesh
        check_mesh(mesh, config)
        check_processes(mesh)
        check_sizes(checkpoint, config)
        checkpoint.check(list(expected_tensors(config).values()))
        read_tokenizer(checkpoint.path, config)
        recorder = record_leaves(config)

        def read(leaf, bounds, out):
            read_official(checkpoint, out, *recorder.declared[leaf.name], bounds)

        convert.convert(
            checkpoint, target, recorder.leaves.values(), read, mesh, RULES, progress, unit_bytes
        )
