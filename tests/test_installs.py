"""Both kinds of install hold all there is, and work where the working directory has files of the
names `checkpoints` and `pallas_kernels`: Python looks there first.

An install is what pip makes of the wheel that the build backend gives: unpacked into a folder,
whose .pth files are followed. It is built from a copy, as building leaves files in the sources.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {  # in the repository -> in an install
    "dspark_jax": "dspark_jax",
    "checkpoints": "dspark_jax/checkpoints",
    "pallas_kernels": "dspark_jax/pallas_kernels",
}
TINY = {"config.json", "model.safetensors", "tokenizer.json", "README.md"}

BUILD = """
import sys
from setuptools import build_meta
path = sys.argv[1]  # which setuptools changes
for kind in ("wheel", "editable"):
    getattr(build_meta, f"build_{kind}")(f"{path}/{kind}")
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, path)
    return path


@pytest.fixture(scope="module")
def installed(sources, tmp_path_factory):
    """By kind, "wheel" or "editable": the folder of that install."""
    path = tmp_path_factory.mktemp("installs")
    for kind in ("wheel", "editable"):
        (path / kind).mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, path], cwd=sources, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("wheel", "editable"):
        (wheel,) = (path / kind).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(path / kind)
        wheel.unlink()
    return {kind: path / kind for kind in ("wheel", "editable")}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_plain_install_holds_every_file(sources, installed):
    expected = set()
    for name, inside in FOLDERS.items():
        held = {file for file in files(sources / name) if file.endswith(".py")}
        assert len(held) > 5
        expected |= {f"{inside}/{file}" for file in held}
    expected |= {f"dspark_jax/checkpoints/tiny/{file}" for file in TINY}
    assert {file for file in files(installed["wheel"]) if ".dist-info/" not in file} == expected


def test_an_editable_install_copies_nothing(installed):
    assert not [file for file in files(installed["editable"]) if file.startswith("dspark_jax/")]


WAYS = ("file", "folder", "package")
USE = """
import importlib, json, os, site, sys
where, packages, *directories = sys.argv[1:]
site.addsitedir(where)
sys.path += packages.split(os.pathsep)
for directory in directories:
    os.chdir(directory)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dspark_jax"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    import dspark_jax
    from dspark_jax import pallas_kernels
    from dspark_jax.checkpoints import official
    from dspark_jax.loading.load import embedded_checkpoint
    assert sys.path[0] == "" and callable(dspark_jax.load)
    with official.OfficialCheckpoint.open(embedded_checkpoint()) as checkpoint:
        tensors = len(list(checkpoint.names()))
    files = dspark_jax.__file__, official.__file__, pallas_kernels.__file__
    print(json.dumps([*files, str(embedded_checkpoint()), tensors]))
"""


def colliding(directory: Path, way: str) -> Path:
    """A working directory with things of a user's own, which must not be imported."""
    directory.mkdir()
    for name in ("checkpoints", "pallas_kernels"):
        if way == "file":
            (directory / f"{name}.py").write_text("raise ImportError('of the user')")
        else:
            (directory / name).mkdir()
            (directory / name / "official.py").write_text("raise ImportError('of the user')")
        if way == "package":
            (directory / name / "__init__.py").write_text("raise ImportError('of the user')")
    return directory


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_files_of_the_working_directory_do_not_take_our_names(sources, installed, tmp_path, kind):
    """Without the .pth files of this environment (-S), where an editable install may be."""
    directories = [colliding(tmp_path / way, way) for way in WAYS]
    packages = os.pathsep.join(p for p in sys.path if Path(p).name.endswith("-packages"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", USE, installed[kind], packages, *directories],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(WAYS) and all(one == said[0] for one in said)
    *paths, tensors = said[0]
    home = {name: sources / name for name in FOLDERS}
    if kind == "wheel":
        home = {name: installed["wheel"] / inside for name, inside in FOLDERS.items()}
    assert list(map(Path, paths)) == [
        home["dspark_jax"] / "__init__.py",
        home["checkpoints"] / "official.py",
        home["pallas_kernels"] / "__init__.py",
        home["checkpoints"] / "tiny",
    ]
    assert tensors > 100
