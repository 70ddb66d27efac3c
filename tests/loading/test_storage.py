"""How experts are held: by the memory there is, said in advance by `inspect`; and packed ones give
the same bits.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import dspark_jax as dspark
from dspark_jax.commands.inspect_checkpoint import print_summary
from dspark_jax.loading import expert_storage, host_memory
from dspark_jax.loading import summary as summaries
from dspark_jax.loading.conversion import convert_checkpoint
from dspark_jax.loading.load import choose_expert_storage
from dspark_jax.loading.summary import inspect_checkpoint
from dspark_jax.model.layers.numerics import Numerics
from dspark_jax.runtime import sharding
from dspark_jax.runtime.backend import compiling_for

from helpers.official_files import CONFIG, GOLDENS, poison
from helpers.support import golden_model

# Bytes. The golden model needs 16 MB packed and 32 MB dequantised where streams are of 128 tokens,
# 32 MB and 49 MB where they may have 4096, as by default.
LITTLE = 20 << 20
LITTLE_BY_DEFAULT = 48 << 20
MIB = 1 << 20


# What is available


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory.available_memory(root)


MEMINFO = {
    "proc/meminfo": "MemTotal:       9000 kB\nMemFree:        100 kB\nMemAvailable:   5000 kB\n"
}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 5000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n"}, 5000 * 1024),
        # version 2: the tightest of all groups around the process; file pages that may be dropped
        # count as free
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1000000\n",
                "sys/fs/cgroup/a/memory.current": "300000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 1000\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "200000\n",
            },
            701000,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000\n",
                "sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
        ),
        # version 1: no limit is a huge one; in a container the path is the host's
        (
            {
                "proc/self/cgroup": "9:cpu:/x\n4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "7\n",
            },
            5000 * 1024,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 9\ntotal_inactive_file 20\n",
            },
            3000020,
        ),
    ],
)
def test_what_linux_says(tmp_path, files, expected):
    assert machine(tmp_path, {**MEMINFO, **files}) == expected


def test_elsewhere_it_is_half_of_the_physical_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert host_memory.available_memory(tmp_path) == 2048000
    monkeypatch.delattr(os, "sysconf")
    assert host_memory.available_memory(tmp_path) == host_memory.UNKNOWN


def test_of_this_machine():
    assert 0 < host_memory.available_memory() < 1 << 50


# What is chosen


@pytest.fixture
def available(monkeypatch):
    """Sets the memory that is said to be available."""
    monkeypatch.delenv(expert_storage.VARIABLE, raising=False)
    return lambda size: monkeypatch.setattr(host_memory, "available_memory", lambda: size)


def chosen(dtype="float32"):
    return choose_expert_storage(CONFIG, Numerics(dtype))


def test_dequantised_where_it_fits(available):
    available(1 << 40)
    needed = chosen().dequantised_bytes
    least = next(
        size
        for size in range(int(needed / expert_storage.SHARE), 2 * needed)
        if expert_storage.SHARE * size >= needed
    )
    available(least)
    assert chosen().kind == "dequantised" and chosen().limit_bytes == needed
    available(least - 2)
    assert chosen().kind == "packed" and "would not fit" in chosen().why


def test_the_variable_decides(available, monkeypatch):
    available(0)
    monkeypatch.setenv(expert_storage.VARIABLE, "dequantised")
    assert chosen().kind == "dequantised"
    available(1 << 40)
    monkeypatch.setenv(expert_storage.VARIABLE, "packed")
    assert chosen().kind == "packed" and expert_storage.VARIABLE in chosen().why
    monkeypatch.setenv(expert_storage.VARIABLE, "float")
    with pytest.raises(
        dspark.ConfigError, match="DSPARK_EXPERT_STORAGE: 'float'; use 'dequantised' or 'packed'"
    ):
        chosen()


def test_accelerators_unpack_in_their_kernels(available):
    available(1 << 40)
    for platform in ("tpu", "gpu"):
        with compiling_for(platform):
            assert chosen("bfloat16").kind == "packed" and platform in chosen("bfloat16").why


def test_processes_of_a_machine_add_up():
    assert expert_storage.fits(
        [(1, 40 * MIB, 100 * MIB), (1, 40 * MIB, 101 * MIB), (2, 80 * MIB, 100 * MIB)]
    )
    assert not expert_storage.fits(
        [(1, 40 * MIB, 101 * MIB), (1, 41 * MIB, 100 * MIB), (2, 8 * MIB, 100 * MIB)]
    )
    assert not expert_storage.fits([(1, 8 * MIB, 100 * MIB), (2, 81 * MIB, 100 * MIB)])


TWO_PROCESSES = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from dspark_jax.loading import expert_storage
from dspark_jax.runtime import processes, sharding
coordinator, rank = sys.argv[1], int(sys.argv[2])
processes.initialize(coordinator, rank, 2)
mesh, needed, available = sharding.make_mesh(2, 2), (100 << 20) + rank, (200 + rank) << 20
print("said", *expert_storage.memory_of_processes(mesh, needed, available))
"""


def test_processes_tell_each_other():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, coordinator, str(rank)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    machine = expert_storage.memory_of_processes(sharding.single_device(), 1, 1)[0][0]
    for text in said:
        assert f"said ({machine}, 100, 200) ({machine}, 101, 201)" in text, text[-4000:]


# What is loaded


def arrays(model):
    return jax.tree.leaves(nnx.split(model.module)[1])


@pytest.fixture(scope="module")
def packed():
    """The golden model, loaded where there is little memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(expert_storage.VARIABLE, raising=False)
        patch.setattr(host_memory, "available_memory", lambda: LITTLE)
        return golden_model(activation_quant=True)


def test_the_sizes_are_those_of_the_arrays(golden_reference, packed):
    limits = packed.limits
    said = choose_expert_storage(CONFIG, packed.numerics, limits.max_seq_len, limits.rows)
    cache = 9 * sum(leaf.nbytes for leaf in jax.tree.leaves(dspark.new_cache(packed)))
    for model, needed in ((golden_reference, said.dequantised_bytes), (packed, said.packed_bytes)):
        sizes = [array.nbytes for array in arrays(model)]
        assert needed == sum(sizes) + max(sizes) + cache
    assert said.packed_bytes < expert_storage.SHARE * LITTLE < said.dequantised_bytes


def test_the_model_says_how_its_experts_are_held(golden_reference, packed):
    assert packed.expert_storage == "packed" and golden_reference.expert_storage == "dequantised"
    assert sum(array.dtype == np.uint8 for array in arrays(packed)) > 0
    assert not any(array.dtype == np.uint8 for array in arrays(golden_reference))


@pytest.mark.heavy
def test_packed_experts_give_the_same_bits(golden_reference, packed):
    """These experts are narrow. Wider ones agree to float32 rounding
    (tests/kernels/test_matrix.py).
    """
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, CONFIG.vocab_size, 37)]
    for ours, theirs in zip(
        dspark.prefill(packed, prompt)[:2], dspark.prefill(golden_reference, prompt)[:2]
    ):
        assert np.array_equal(ours, theirs)
    expected = dspark.generate(golden_reference, prompt, max_new_tokens=24, stop_token_ids=[])
    out = dspark.generate(packed, prompt, max_new_tokens=24, stop_token_ids=[])
    assert out.tokens == expected.tokens
    assert list(map(dataclasses.asdict, out.rounds[0])) == list(
        map(dataclasses.asdict, expected.rounds[0])
    )


def test_a_converted_checkpoint_is_held_the_same_way(tmp_path, packed, available):
    convert_checkpoint(GOLDENS, tmp_path / "converted")
    available(LITTLE)
    model = dspark.load(
        tmp_path / "converted", max_seq_len=packed.limits.max_seq_len, dtype="float32"
    )
    assert model.expert_storage == "packed" and len(arrays(model)) == len(arrays(packed))
    assert all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(arrays(model), arrays(packed))
    )


# What is said


def test_inspect_says_it(available, capsys):
    available(LITTLE_BY_DEFAULT)
    summary = inspect_checkpoint(GOLDENS)
    assert summary.expert_storage == chosen() and summary.expert_storage.kind == "packed"
    assert json.loads(json.dumps(summary.to_dict()))["expert_storage"] == {
        "kind": "packed",
        "why": chosen().why,
        "dequantised_bytes": chosen().dequantised_bytes,
        "packed_bytes": chosen().packed_bytes,
        "available_bytes": LITTLE_BY_DEFAULT,
        "limit_bytes": int(expert_storage.SHARE * LITTLE_BY_DEFAULT),
    }
    print_summary(summary)
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "load would hold the routed experts packed on this machine: dequantised, the model would "
        "not fit in memory" in text
    )
    assert (
        "48.5 MB dequantised, 32.3 MB packed; 50.3 MB are available, of which 40.3 MB may be used"
        in text
    )
    available(1 << 40)
    print_summary(inspect_checkpoint(GOLDENS))
    assert "experts dequantised on this machine" in " ".join(capsys.readouterr().out.split())


def test_inspect_says_nothing_without_a_device(monkeypatch, capsys):
    def busy():
        raise dspark.ConfigError("jax has no device")

    monkeypatch.setattr(summaries, "require_device", busy)
    summary = inspect_checkpoint(GOLDENS)
    assert summary.expert_storage is None and summary.to_dict()["expert_storage"] is None
    print_summary(summary)
    assert "on this machine" not in capsys.readouterr().out


# Scales that a kernel cannot compute with


@pytest.mark.parametrize("platform, byte, power", [("gpu", 161, 34), ("tpu", 254, 127)])
def test_scales_beyond_a_kernel_are_refused_by_name(tmp_path, platform, byte, power):
    shutil.copytree(GOLDENS, tmp_path, dirs_exist_ok=True)
    poison(tmp_path, "layers.3.ffn.experts.5.w3.scale", (7, 2), byte)
    message = (
        rf"layers\.3\.ffn\.experts\.5\.w3\.scale\[7, 2\] is e8m0 byte {byte}, 2\^{power}; the "
        rf"kernel for {platform} takes"
    )
    with compiling_for(platform), pytest.raises(dspark.CheckpointError, match=message):
        dspark.load(tmp_path)
    poison(tmp_path, "layers.3.ffn.experts.5.w3.scale", (7, 2), byte - 1)
    with compiling_for(platform):
        assert dspark.load(tmp_path).expert_storage == "packed"
