"""What is wrong with standard output or standard error is one line or nothing, not a traceback."""

import os
import subprocess
import sys

import pytest

import dspark_jax
from dspark_jax.loading.load import embedded_checkpoint

GUARDED = "from dspark_jax.commands.output import guard_streams; guard_streams(); "


def shell(line: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PY": sys.executable, **variables}
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, env=environment, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)
def test_what_the_encoding_lacks_is_replaced(variables):
    variables = {"PYTHONCOERCECLOCALE": "0", **variables}
    done = shell(f"$PY -c '{GUARDED}print(\"na\\u00efve \\U0001f642\")'", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("na") and done.stdout.endswith("\n")


def test_a_full_device_is_one_line():
    done = shell(f"$PY -m dspark_jax inspect {embedded_checkpoint()} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "dspark inspect: standard output: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("asked", ["--help", "--version", "generate --help"])
def test_help_on_a_full_device_is_one_line(asked, unbuffered):
    done = shell(f"$PY -m dspark_jax {asked} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "dspark: standard output: No space left on device\n"


@pytest.mark.parametrize("asked", ["nosuch", "replay /nosuch", "inspect ''"])
def test_an_error_that_cannot_be_said_keeps_its_status(asked):
    done = shell(f"$PY -m dspark_jax {asked} 2>/dev/full")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_device_for_errors_loses_only_what_was_meant_for_it():
    line = 'import sys; print("err", file=sys.stderr); print("out"); print("err", file=sys.stderr)'
    done = shell(f"$PY -c '{GUARDED}{line}' 2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "out\n")


def test_what_standard_error_is_otherwise_it_still_is():
    line = (
        'import sys; print("na\u00efve", file=sys.stderr); '
        "print(sys.stderr.isatty(), sys.stderr.fileno(), sys.stderr.encoding)"
    )
    done = shell(f"$PY -c '{GUARDED}{line}'", PYTHONIOENCODING="utf-8")
    assert (done.stdout, done.stderr) == ("False 2 utf-8\n", "na\u00efve\n")


def test_a_working_directory_that_is_gone(tmp_path):
    line = f"cd {tmp_path}; mkdir x; cd x; rmdir ../x; "
    converted = shell(line + f"$PY -m dspark_jax convert {embedded_checkpoint()} out")
    assert converted.returncode == 1
    assert converted.stderr.startswith("dspark convert: out: cannot be written (")
    assert converted.stderr.count("\n") == 1
    recorded = shell(line + "$PY -m dspark_jax generate hi --record x.json")
    assert recorded.returncode == 1
    assert recorded.stderr == "dspark generate: the working directory: No such file or directory\n"
    assert shell(line + f"$PY -m dspark_jax inspect {embedded_checkpoint()}").returncode == 0


def test_a_closed_standard_error_loses_only_what_was_meant_for_it():
    line = 'import sys; print("out"); print("err", file=sys.stderr); print(open(0).fileno())'
    done = shell(f"$PY -c '{GUARDED}{line}' 2>&- </dev/null")
    assert (done.returncode, done.stdout) == (0, "out\n0\n")


def test_all_streams_closed():
    done = shell(
        f"$PY -c '{GUARDED}import os; print(1); os._exit(open(os.devnull).fileno())' <&- >&- 2>&-"
    )
    assert done.returncode == 3  # the three numbers are taken


def test_a_reader_that_goes_away_is_no_traceback():
    done = shell(f"$PY -m dspark_jax inspect {embedded_checkpoint()} | true")
    assert done.stderr == ""


def test_version():
    done = shell("$PY -m dspark_jax --version")
    assert done.stdout == f"dspark-jax {dspark_jax.__version__}\n"
