"""Compiled programs are kept between runs: where, when not, how much, and what damage does."""

import os
import shutil
import subprocess
import sys
import time
import warnings
import zlib

import jax
import pytest

from dspark_jax.runtime import compilation_cache as kept

SETTINGS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
LEAST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """jax as it is without any setting, and as it was afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.delenv(kept.VARIABLE, raising=False)
    monkeypatch.delenv(LEAST, raising=False)
    jax.config.update(SETTINGS[0], None)
    kept._prepared.cache_clear()
    yield
    kept._prepared.cache_clear()
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_the_variable_names_the_folder_and_empty_means_none(folder, monkeypatch):
    assert kept.enable() == folder / kept.machine() and (folder / kept.machine()).is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder / kept.machine())
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv(kept.VARIABLE, "")
    assert kept.enable() is None and jax.config.jax_compilation_cache_dir is None


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of this system")
def test_otherwise_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (None, "", "relative"):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if given is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert kept.default_root() == tmp_path / ".cache" / "dspark_jax" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kept.default_root() == tmp_path / "xdg" / "dspark_jax" / "compiled"


@pytest.mark.parametrize("own", ["elsewhere", ""])
def test_a_setting_of_jax_holds(folder, own):
    jax.config.update("jax_compilation_cache_dir", own)
    assert kept.enable(own_process=True) is None
    assert jax.config.jax_compilation_cache_dir == own and not folder.exists()


def test_nothing_where_jax_keeps_nothing(folder):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert kept.enable() is None and not folder.exists()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_small_programs_are_kept_only_in_a_process_of_our_own(folder, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    kept.enable()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    for environment, least in (("3", 1.0), (None, 0.0)):
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv(LEAST, environment) if environment else monkeypatch.delenv(LEAST)
        kept.enable(own_process=True)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == least


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(
        UserWarning, match="compiled programs are not kept.*" + kept.VARIABLE
    ) as seen:
        assert kept.enable() is None
    assert len(seen) == 1 and jax.config.jax_compilation_cache_dir is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.enable() is None


def test_a_full_disk_is_one_warning_and_nothing_is_begun_on_it(folder, monkeypatch):
    """jax would leave an empty file, and warn, for every program."""
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=kept.LEAST_FREE - 1))
    with pytest.warns(UserWarning, match="are not kept: .*31 MiB are free, 32 are needed") as seen:
        assert kept.enable() is None
    assert len(seen) == 1 and jax.config.jax_compilation_cache_dir is None
    kept._prepared.cache_clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=kept.LEAST_FREE))
    assert kept.enable() == folder / kept.machine()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be told apart")
def test_the_subfolder_tells_the_number_of_cores(monkeypatch):
    here = kept.machine()
    assert here == kept.machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(99)))
    assert kept.machine() != here


def entry(path, data, age):
    path.write_bytes(data)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_the_folder_is_bounded_and_the_longest_unused_go_first(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    old, used, new = (
        entry(tmp_path / place, bytes(100), age)
        for place, age in (("one/old-cache", 300), ("two/used-cache", 400), ("one/new-cache", 100))
    )
    os.utime(used, (time.time(), used.stat().st_mtime))
    kept.prune(tmp_path, 300)
    assert old.exists() and used.exists() and new.exists()
    kept.prune(tmp_path, 250)
    assert not old.exists() and used.exists() and new.exists()
    kept.prune(tmp_path, 0)
    assert not used.exists() and not new.exists()


def test_damaged_entries_go_and_others_stay(tmp_path):
    whole = zlib.compress(os.urandom(1000))
    turned = bytearray(whole)
    turned[500] ^= 1
    good = entry(tmp_path / "good-cache", whole, 60)
    bad = [
        entry(tmp_path / name, data, 60)
        for name, data in (
            ("half-cache", whole[:500]),
            ("empty-cache", b""),
            ("turned-cache", bytes(turned)),
        )
    ]
    other = entry(tmp_path / "notes", b"mine", 60)
    fresh = entry(tmp_path / "fresh-cache", whole[:500], 0)  # another process may be writing it
    kept.remove_damaged(tmp_path)
    assert good.exists() and other.exists() and fresh.exists() and not any(b.exists() for b in bad)
    entry(fresh, whole[:500], kept.SETTLED + 1)
    entry(tmp_path / kept._CHECKED, b"", 60)
    kept.remove_damaged(tmp_path)
    assert not fresh.exists() and good.exists()


# What the suite may run under.
JAX_OWN = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION_CACHE")

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
jnp.ones(3) + 1  # jax has compiled before
from dspark_jax.runtime import compilation_cache
compilation_cache.enable(own_process=True)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
print(np.asarray(jax.jit(lambda x: jnp.sin(x) @ x.T)(np.ones((4, 4), np.float32))).tobytes().hex(),
      sum(name.endswith("/cache_hits") for name in hits))
"""


def start(count=1):
    ours = {name: v for name, v in os.environ.items() if not name.startswith(JAX_OWN)}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=-1, stderr=-1, text=True, env=ours)
        for _ in range(count)
    ]
    done = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), done
    return [(*out.split(), err) for out, err in done]


def test_processes_share_programs_and_survive_damaged_ones(folder):
    """Three write at once, the next reads; a cut entry is warned of and computed anew."""
    expected = start(3)[0][0]
    value, hits, _ = start()[0]
    assert value == expected and int(hits) >= 1
    entries = list(folder.rglob("*-cache"))
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[:-20])
    value, hits, said = start()[0]
    assert value == expected and int(hits) == 0 and "Error reading" in said
    for path in entries:
        os.utime(path, (time.time() - 60,) * 2)
    for path in folder.rglob(kept._CHECKED):
        os.utime(path, (time.time() - 90,) * 2)
    value, hits, said = start()[0]
    assert value == expected and int(hits) == 0 and "Error" not in said
    assert int(start()[0][1]) >= 1
