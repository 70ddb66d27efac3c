"""Products whose bits do not depend on the number of rows, on machines with few cores and with
many; what a jax must be asked for.
"""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from dspark_jax.model.layers.numerics import dot
from dspark_jax.runtime import backend

from helpers.support import product_weight

ROWS = (2, 3, 6, 7, 8, 33, 128)
SHAPES = [(24, 512), (128, 128), (1024, 256), (4096, 128), (384, 200)]
# XLA makes as many threads for a product as this variable says there are cores.
CORES = "NPROC"


def row_counts_that_differ(shape, product) -> list[int]:
    """Of ROWS, those for which the first two rows of x times a weight of this shape are not what
    they are for two rows.
    """
    rng = np.random.default_rng(0)
    weight, x = (
        rng.standard_normal(size).astype(np.float32) for size in (shape, (max(ROWS), shape[1]))
    )
    run = backend.jit(
        lambda x, parameter=product_weight(weight, columns_first=True): product(x, parameter)
    )
    two = np.asarray(run(x[:2]))
    return [rows for rows in ROWS if not np.array_equal(np.asarray(run(x[:rows]))[:2], two)]


def plain(x, parameter):
    return jax.lax.dot_general(
        x, parameter[...], (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
    )


# Cores, and a shape whose sums, left whole, are cut by the number of rows: 256 terms with 4 or 16
# cores, 128 terms (96 are not) with 2.
UNSPLIT = {2: (4096, 128), 4: (1024, 256), 16: (1024, 256)}


@pytest.mark.parametrize("cores", [2, *(pytest.param(n, marks=pytest.mark.heavy) for n in (4, 16))])
def test_rows_do_not_depend_on_their_number(cores):
    program = (
        "import test_products as t; print([t.row_counts_that_differ(s, t.dot) for s in t.SHAPES]); "
        f"print(bool(t.row_counts_that_differ({UNSPLIT[cores]}, t.plain)))"
    )
    here = os.path.dirname(__file__)
    environment = {
        **os.environ,
        CORES: str(cores),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.path.dirname(here),  # where `helpers` lies
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ours, unsplit = done.stdout.splitlines()
    assert ours == str([[]] * len(SHAPES))
    assert unsplit == "True", (
        "an unsplit product does not depend on it either: this test tells nothing"
    )


@pytest.mark.parametrize("terms", [64, 96, 128, 200])
def test_splitting_keeps_the_sum(terms):
    rng = np.random.default_rng(0)
    weight, x = (
        rng.standard_normal((40, terms)).astype(np.float32),
        rng.standard_normal((3, 5, terms)).astype(np.float32),
    )
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    for columns_first in (False, True):
        assert np.abs(
            np.asarray(dot(x, product_weight(weight, columns_first))) - exact
        ).max() < 2e-6 * np.sqrt(terms)


@pytest.mark.parametrize(
    "version, before, after",
    [
        ((0, 10, 2), "", ""),
        ((0, 12, 0), "", "--xla_cpu_max_isa=AVX"),
        ((0, 13, 1), "--xla_dump_to=x", "--xla_dump_to=x --xla_cpu_max_isa=AVX"),
        ((0, 12, 0), "--xla_cpu_max_isa=AVX2", "--xla_cpu_max_isa=AVX2"),
    ],
)
def test_the_command_asks_for_equal_bits(monkeypatch, version, before, after):
    """Where jax would make multiply-adds for some numbers of rows only; what the user set is left
    alone.
    """
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setenv("XLA_FLAGS", before)
    backend.require_equal_bits()
    assert os.environ["XLA_FLAGS"] == after


def test_this_jax_passes_the_probes_and_one_that_does_not_is_warned_of(monkeypatch):
    assert backend.rows_agree()
    assert backend.decode_rows(5, 64) == 2
    monkeypatch.setattr(backend, "rows_agree", lambda: False)
    with pytest.warns(UserWarning, match="--xla_cpu_max_isa=AVX"):
        assert backend.decode_rows(5, 64) == 6
