"""A file appears whole or not at all, and says in one line why it could not."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from structgp.data.atomic import atomic_write
from structgp.errors import InputError


def write(path: Path, data: bytes = b"new", then: BaseException | None = None) -> None:
    with atomic_write(path, "wb") as out:
        out.write(data)
        if then is not None:
            raise then


def test_bytes_and_text(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "a", "wb") as out:
        out.write(b"\x00\xff")
    with atomic_write(str(tmp_path / "b"), "w") as text:
        text.write("é\n")
    with atomic_write(tmp_path / "c", "w", encoding="euc-jp") as text:
        text.write("日\n")
    assert (tmp_path / "a").read_bytes() == b"\x00\xff"
    assert (tmp_path / "b").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "c").read_bytes() == "日\n".encode("euc-jp")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_nothing_is_at_the_path_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic_write(path, "wb") as out:
        out.write(b"half")
        out.flush()
        assert not path.exists()
        assert len(os.listdir(tmp_path)) == 1, "the temporary file is in the same folder"
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, InputError])
def test_failure_in_the_block_leaves_the_old_file(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    error = failure("x", "y", "z")
    with pytest.raises(failure) as caught:
        write(path, then=error)
    assert caught.value is error
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_failure_in_the_block_leaves_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        write(tmp_path / "a", then=RuntimeError())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(InputError) as caught:
        write(path)
    monkeypatch.undo()
    assert str(caught.value) == (
        f"{path}: cannot be written (No space left on device); free some space or choose another disk"
    )
    assert caught.value.place == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_full_disk_in_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(InputError) as caught, atomic_write(path, "wb"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.place == str(path)
    assert os.listdir(tmp_path) == []


def test_an_error_about_another_file_passes(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "a", "wb"):
        open(other)  # noqa: SIM115
    assert caught.value.filename == str(other)
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "folder"
    folder.mkdir()
    under_file = tmp_path / "file" / "a"
    no_folder = tmp_path / "missing" / "a"
    too_long = tmp_path / ("a" * 300)
    expected = {
        under_file: "(Not a directory); name a file in an existing folder",
        no_folder: "(No such file or directory); create its folder first",
        folder: "(Is a directory); name a file, not a folder",
        too_long: "(File name too long); choose a shorter name",
    }
    for path, text in expected.items():
        with pytest.raises(InputError) as caught:
            write(path)
        assert str(caught.value) == f"{path}: cannot be written {text}"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(folder) == []


def test_a_read_only_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    # The super-user may write anywhere, so the answer is given here.
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(InputError) as caught:
        write(path)
    assert str(caught.value) == (
        f"{path}: cannot be written (Permission denied); choose a place you may write to"
    )
    assert path.read_bytes() == b"old"


def test_permissions(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "a"
    plain.write_bytes(b"")
    write(path)
    assert path.stat().st_mode == plain.stat().st_mode, "as any new file, not private"
    path.chmod(0o640)
    write(path, b"newer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == b"newer"


def test_a_link_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "link", tmp_path / "real" / "a"
    link.symlink_to(real)
    write(link)
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert os.listdir(tmp_path / "real") == ["a"]


def test_a_pipe_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe)
    reader.join(timeout=10)
    assert got == [b"new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_unknown_text_encoding_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LookupError), atomic_write(tmp_path / "a", "w", encoding="nonsense"):
        pass
    assert os.listdir(tmp_path) == []


def test_other_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode 'a'"), atomic_write(tmp_path / "a", "a"):  # type: ignore[arg-type]
        pass
    assert os.listdir(tmp_path) == []
