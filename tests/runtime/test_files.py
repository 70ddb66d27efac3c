"""Files are written whole, through links, and into what is not a regular file."""

import os
import threading

import pytest

from dspark_jax.runtime.files import check_writable, write_text


def test_a_new_file_and_one_that_is_there(tmp_path):
    for text in ("a\n", "b\u00e9\n"):
        write_text(tmp_path / "file", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("old")
    (tmp_path / "link").symlink_to("far/file")
    (tmp_path / "dangling").symlink_to("far/new")
    write_text(tmp_path / "link", "new")
    write_text(tmp_path / "dangling", "made")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "far" / "file").read_text() == "new"
    assert (tmp_path / "far" / "new").read_text() == "made"
    assert sorted(os.listdir(tmp_path / "far")) == ["file", "new"]


def test_devices_and_pipes_are_written_to(tmp_path):
    write_text("/dev/null", "gone")
    assert not os.path.isfile("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through")
    reader.join(10)
    assert read == ["through"] and (tmp_path / "pipe").is_fifo()


def test_a_pipe_that_only_the_kernel_finds_is_written_to():
    """As /dev/stdout is in `command | other`: the link points to pipe:[number]."""
    end, start = os.pipe()
    check_writable(f"/dev/fd/{start}")
    write_text(f"/dev/fd/{start}", "through")
    os.close(start)
    with open(end) as read:
        assert read.read() == "through"


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_whether_a_file_can_be_written_is_known_before(tmp_path):
    check_writable(tmp_path / "new")
    check_writable(tmp_path / ("n" * 250))  # the unfinished file has a short name
    check_writable("/dev/null")
    assert os.listdir(tmp_path) == []
    for path in ("/proc/new.json", tmp_path / "nothing" / "new"):
        for use in (check_writable, lambda path: write_text(path, "x")):
            with pytest.raises(OSError) as error:
                use(path)
            assert error.value.filename == str(path)


def test_a_home_is_found_and_an_unknown_one_is_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_text("~/file", "home")
    write_text("~nosuchuser", "here")
    assert sorted(os.listdir(tmp_path)) == ["file", "~nosuchuser"]
