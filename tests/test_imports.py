"""Who may import whom: every import statement of the library, read from the text of its files.

    __main__ -> commands -> planning, train -> decode -> loading -> model -> runtime -> config
             -> checkpoints, pallas_kernels, _version

A folder imports itself and what stands to its right. errors.py, which hands on what
checkpoints/errors.py defines, is everybody's but for the last three, which import nothing of the
library but themselves. The model's code reads no files: of checkpoints it imports tensor_spec only.
Modules do not import each other in circles, not even inside functions.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PLACES = {  # the folder on the disk -> the package it is
    "dspark_jax": ("dspark_jax",),
    "checkpoints": ("dspark_jax", "checkpoints"),
    "pallas_kernels": ("dspark_jax", "pallas_kernels"),
}
STOREYS = (
    ("__main__",),
    ("commands",),
    ("planning", "train"),
    ("decode",),
    ("loading",),
    ("model",),
    ("runtime",),
    ("config",),
    ("checkpoints", "pallas_kernels", "_version"),
)
HEIGHT = {folder: len(STOREYS) - i for i, storey in enumerate(STOREYS) for folder in storey}
OF_CHECKPOINTS_FOR_MODEL = "dspark_jax.checkpoints.tensor_spec"


def library() -> dict[str, pathlib.Path]:
    """Module name -> its file."""
    found = {}
    for folder, package in PLACES.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = package + tuple(part for part in inside if part != "__init__")
            found[".".join(parts)] = path
    return found


def folder_of(module: str) -> str:
    """ "decode" for dspark_jax.decode.engine; the package's own modules by their name: "errors",
    and "config" for all of config*.py.
    """
    name = (module.split(".") + [""])[1]
    return "config" if name.startswith("config") else name


def imports(module: str, text: str, modules) -> list[tuple[int, str]]:
    """(line, imported module) of every import of the library in a file's text, wherever it stands.

    `from a.b import c` imports a.b.c where that is a module, else a.b.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: line {node.lineno}: a relative import"
            names = [
                whole if (whole := f"{node.module}.{alias.name}") in modules else node.module
                for alias in node.names
            ]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.split(".")[0] == "dspark_jax"]
    return found


def wrong_direction(importer: str, imported: str) -> bool:
    a, b = folder_of(importer), folder_of(imported)
    if a == b or importer == "dspark_jax":
        return False
    if a == "errors":
        return imported != "dspark_jax.checkpoints.errors"
    if b == "errors":
        return a in ("checkpoints", "pallas_kernels")
    if b == "":  # the public names, for what stands on top of the library
        return a not in ("commands", "planning", "train")
    if (a, b) == ("model", "checkpoints"):
        return imported != OF_CHECKPOINTS_FOR_MODEL
    return HEIGHT[a] <= HEIGHT[b]


def upward(files: dict[str, str]) -> list[str]:
    """files: module -> text. Every import in a wrong direction: file, line, and the two folders."""
    return [
        f"{module}, line {line}: {folder_of(module)} imports {name} of {folder_of(name)}"
        for module, text in files.items()
        for line, name in imports(module, text, files)
        if wrong_direction(module, name)
    ]


def circles(files: dict[str, str]) -> list[str]:
    """Each circle of modules, once: "a -> b -> a"."""
    graph = {
        module: sorted({name for _, name in imports(module, text, files)} & files.keys())
        for module, text in files.items()
    }
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for name in graph[module]:
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


@pytest.fixture(scope="module")
def files():
    return {module: path.read_text("utf-8") for module, path in library().items()}


def test_every_folder_has_its_storey(files):
    assert {folder_of(module) for module in files} == {*HEIGHT, "errors", ""}


def test_imports_go_down(files):
    assert upward(files) == []


def test_no_circles(files):
    assert circles(files) == []


@pytest.mark.parametrize(
    "module, text, expected",
    [
        (
            "dspark_jax.model.main",
            "import jax\n\ndef f():\n    from dspark_jax.loading import load\n",
            "line 4: model imports dspark_jax.loading.load of loading",
        ),
        (
            "dspark_jax.runtime.backend",
            "from dspark_jax.decode.engine import Engine\n",
            "line 1: runtime imports dspark_jax.decode.engine of decode",
        ),
        (
            "dspark_jax.train.loop",
            "import dspark_jax.planning.sizes\n",
            "line 1: train imports dspark_jax.planning.sizes of planning",
        ),
        (
            "dspark_jax.model.parameters",
            "from dspark_jax.checkpoints.official import OfficialCheckpoint\n",
            "line 1: model imports dspark_jax.checkpoints.official of checkpoints",
        ),
        (
            "dspark_jax.checkpoints.writer",
            "from dspark_jax import config\n",
            "line 1: checkpoints imports dspark_jax.config of config",
        ),
        (
            "dspark_jax.pallas_kernels.moe",
            "from dspark_jax.errors import DsparkError\n",
            "line 1: pallas_kernels imports dspark_jax.errors of errors",
        ),
    ],
)
def test_an_import_turned_round_is_named(files, module, text, expected):
    assert upward({**files, module: text}) == [f"{module}, {expected}"]


def test_a_circle_is_named(files):
    turned = "def f():\n    from dspark_jax.model.main import MainModel\n"
    found = circles({**files, "dspark_jax.model.segments": turned})
    assert any("dspark_jax.model.segments -> dspark_jax.model.main" in circle for circle in found)


def test_nothing_else_is_taken_for_the_library():
    assert not {"checkpoints", "pallas_kernels"} & sys.stdlib_module_names
    for module, path in library().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {name.split(".")[0] for name in names}
            assert not tops & {"checkpoints", "pallas_kernels", "tests", "helpers"}, module
