"""What a terminal shows while a command works, and how Ctrl-C ends it. Loads no model."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import dspark_jax as dspark
from dspark_jax.commands import bench, output
from dspark_jax.commands.inspect_checkpoint import print_summary
from dspark_jax.commands.main import main
from dspark_jax.config import v4_flash_0731
from dspark_jax.loading.summary import Origin, Part, Summary
from dspark_jax.planning import compile as planning


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def attach(monkeypatch):
    """attach() -> standard error, from now on a terminal of 100 columns."""

    def attached():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return attached


def screen(written: str) -> str:
    """What is left on a terminal after this was written to it."""
    lines, row, column, i = [""], 0, 0, 0
    while i < len(written):
        if written[i] == "\x1b":
            end = next(k for k in range(i + 2, len(written)) if written[k].isalpha())
            code, number = written[end], written[i + 2 : end]
            if code == "A":
                row -= int(number or 1)
            elif code == "K":
                assert number == "2"
                lines[row] = ""
            else:
                assert code in "mhl", written[i : end + 1]
            i = end
        elif written[i] == "\r":
            column = 0
        elif written[i] == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            line = lines[row].ljust(column)
            lines[row], column = line[:column] + written[i] + line[column + 1 :], column + 1
        i += 1
    return "\n".join(lines).strip()


def test_the_screen_of_these_tests():
    assert screen("ab\r\x1b[2Kc\n\x1b[1mde\x1b[0m\n\x1b[1A\x1b[2K") == "c"


def test_a_status_shows_on_a_terminal_and_leaves_nothing(attach):
    terminal = attach()
    with output.status("reading m[red]x :smile: ..."):
        time.sleep(0.2)
    assert "reading m[red]x :smile: ..." in terminal.getvalue()
    assert screen(terminal.getvalue()) == ""
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_a_bar_shows_on_a_terminal_and_leaves_nothing(attach):
    terminal = attach()
    with output.progress_bar("runs", 3) as advance:
        advance()
        advance()
    assert "runs" in terminal.getvalue() and "2/3" in terminal.getvalue()
    assert screen(terminal.getvalue()) == ""


def test_a_terminal_that_takes_nothing_back_is_told_once(attach, monkeypatch):
    terminal = attach()
    monkeypatch.setenv("TERM", "dumb")
    with output.status("compiling [x] ..."):
        pass
    with output.progress_bar("runs", 3) as advance:
        for _ in range(3):
            advance()
    assert terminal.getvalue() == "compiling [x] ...\nruns ...\n"


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}])
def test_nothing_of_it_where_there_is_no_terminal(monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with output.status("loading ..."), output.progress_bar("runs", 3) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


def test_one_of_several_processes_shows_it(attach):
    terminal = attach()
    with output.status("loading ...", shown=False):
        pass
    assert terminal.getvalue() == ""


def test_bench_says_that_it_loads_and_how_far_it_is(attach, monkeypatch, capsys):
    terminal = attach()

    def measure(model, length, repeats, gate, advance):
        for _ in range(4 * repeats * 4):
            advance()
        return {}

    monkeypatch.setattr(dspark, "load", lambda *_, **__: time.sleep(0.2))
    monkeypatch.setattr(bench, "measure", measure)
    assert main(["bench", "--repeats", "2", "--json"]) == 0
    assert "loading ..." in terminal.getvalue() and "32/32" in terminal.getvalue()
    assert screen(terminal.getvalue()) == "" and capsys.readouterr().out == "{}\n"


def test_generate_says_that_it_loads_and_compiles(attach, monkeypatch):
    terminal = attach()

    class Run:
        interrupted = False

        def __init__(self, *_):
            pass

        def compile(self):
            time.sleep(0.2)
            raise dspark.DsparkError(f"shown: {'compiling (first time' in terminal.getvalue()}")

    def asked_run(*_):
        assert "loading ..." in terminal.getvalue() and screen(terminal.getvalue()) == ""
        return Run()

    monkeypatch.setattr(dspark, "load", lambda *_, **__: None)
    monkeypatch.setattr("dspark_jax.commands.generate._asked_run", asked_run)
    assert main(["generate", "hi"]) == 1
    assert screen(terminal.getvalue()) == "dspark generate: shown: True"


def test_plan_says_what_it_compiles(attach, monkeypatch, capsys):
    terminal = attach()
    compiled = []

    def compile_programs(*what, only):
        compiled.append(only)
        return {name: {"seconds": 1.0} for name in only}

    monkeypatch.setattr(planning, "compile_programs", compile_programs)
    assert main(["plan", "--compile", "--json"]) == 0
    assert compiled == [(name,) for name in planning.PROGRAMS]
    assert list(json.loads(capsys.readouterr().out)["programs"]) == list(planning.PROGRAMS)
    for name in planning.PROGRAMS:
        assert f"of 3: {name} ..." in terminal.getvalue()
    assert screen(terminal.getvalue()) == ""


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", [["generate", "hi"], ["bench"]], ids=lambda c: c[0])
def test_ctrl_c_while_loading_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(dspark, "load", interrupted)
    assert main(command) == 130
    assert capsys.readouterr() == ("", f"dspark {command[0]}: interrupted\n")


def test_ctrl_c_within_a_status_or_a_bar_is_one_line(attach, monkeypatch, capsys):
    terminal = attach()
    monkeypatch.setattr(planning, "compile_programs", interrupted)
    assert main(["plan", "--compile"]) == 130
    monkeypatch.setattr(dspark, "load", lambda *_, **__: None)
    monkeypatch.setattr(bench, "measure", interrupted)
    assert main(["bench"]) == 130
    assert screen(terminal.getvalue()) == "dspark plan: interrupted\ndspark bench: interrupted"
    assert capsys.readouterr().out == ""


LOADS_FOR_LONG = """
import sys, time
import dspark_jax
from dspark_jax.commands.main import entry

def load(*_, **__):
    print("loading", flush=True)
    for _ in range(600):  # a signal that comes just before a sleep begins does not end it
        time.sleep(0.1)

dspark_jax.load = load
sys.exit(entry())
"""


def test_a_real_ctrl_c_is_one_line():
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_LONG, "generate", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"dspark generate: interrupted\n")


MARKUP = "m[red]x[/]y[/z] :smile:"


def test_brackets_in_paths_and_files_are_no_markup(capsys):
    part = Part("main", MARKUP, MARKUP, 1, 1)
    origin = Origin(MARKUP, 1, 1, 1)
    for config, where in ((v4_flash_0731(), origin), (None, None)):
        print_summary(Summary(MARKUP, MARKUP, 1, 1, (part,), config, MARKUP, where, None))
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.startswith(f"{MARKUP}: {MARKUP}, 1 tensors")
        assert shown.count(MARKUP) == 6 + (where is not None), shown
        assert ("converted from " + MARKUP in shown) == (where is not None)
        assert f"cannot be loaded: {MARKUP}" in shown


def test_json_is_one_line(capsys, tmp_path):
    for command in (["plan", "--json"], ["inspect", "--json", str(tiny())]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and json.loads(out)


def tiny():
    from dspark_jax.loading.load import embedded_checkpoint

    return embedded_checkpoint()
