"""Column files: what is read, what is refused and where, and that writing then reading is nothing.

Messages are compared whole: place, problem and remedy are the interface of an error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structgp.data.sources import lines
from structgp.data.sources.columns import (
    ColumnFile,
    ColumnSequence,
    format_sequence,
    iter_columns,
    read_columns,
    write_columns,
)
from structgp.errors import InputError

ENCODINGS = [
    "utf-8",
    "utf-8-sig",
    "utf-16",
    "utf-16-le",
    "utf-32",
    "euc-jp",
    "shift_jis",
    "iso-2022-jp",
    "gb18030",
    "latin-1",
    "cp037",
]


def rows_of(data: bytes, **options: Any) -> list[tuple[tuple[str, ...], ...]]:
    return [sequence.rows for sequence in iter_columns(io.BytesIO(data), **options)]


def error_of(data: bytes, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_columns(io.BytesIO(data), name="f", **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Reading


def test_spaces_tabs_blank_lines_and_line_numbers() -> None:
    data = b"\n \t\nHe PRP \t B\n  reckons\tVBZ\tI  \n\n\t\n\nYes UH O"
    assert list(iter_columns(io.BytesIO(data))) == [
        ColumnSequence((("He", "PRP", "B"), ("reckons", "VBZ", "I")), line=3),
        ColumnSequence((("Yes", "UH", "O"),), line=8),
    ]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n\n\n", "\n \n\t"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_ends_of_lines_and_of_the_file(end: str, newline: str) -> None:
    data = ("a b\nc d\n\ne f" + end).replace("\n", newline).encode()
    assert rows_of(data) == [(("a", "b"), ("c", "d")), (("e", "f"),)]


@pytest.mark.parametrize(
    "mark", ["\u3000", "\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c", "\x1d", "\x1e", "\xa0", "\u2003"]
)
def test_other_white_space_is_text(mark: str) -> None:
    data = f"{mark} x\na{mark}b y\n\n{mark} z\n"
    expected = [((mark, "x"), (f"a{mark}b", "y")), ((mark, "z"),)]
    assert rows_of(data.encode()) == expected
    assert [s.rows for s in iter_columns(io.StringIO(data))] == expected
    assert [s.line for s in iter_columns(io.BytesIO(data.encode()))] == [1, 4]


def test_a_carriage_return_within_a_line_is_text() -> None:
    assert rows_of(b"a\rb c\r\n") == [(("a\rb", "c"),)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_byte_order_mark_is_skipped_once(encoding: str) -> None:
    data = "\ufeffa b\n\ufeffc d\n".encode(encoding)
    if encoding in ("utf-8-sig", "utf-16"):  # these have put in one of their own
        data = "a b\n\ufeffc d\n".encode(encoding)
    assert rows_of(data, encoding=encoding) == [(("a", "b"), ("\ufeffc", "d"))]
    assert [s.rows for s in iter_columns(["\ufeffa b"])] == [(("a", "b"),)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_newline_bytes_within_characters_do_not_split(encoding: str) -> None:
    # U+0A0A, U+0A20 and U+0D0A have the bytes of newline, space and carriage return in them.
    text = "\u0a0a\u0d0a \u0a20\u2009\nx y\n"
    assert rows_of(text.encode(encoding), encoding=encoding) == [
        (("\u0a0a\u0d0a", "\u0a20\u2009"), ("x", "y"))
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_characters_cut_by_blocks(encoding: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    japanese = encoding not in ("latin-1", "cp037")
    text = "日本 名詞\r\n\u3000 記号\r\n\r\nab カ\r\n" if japanese else "é ü\r\nß \xa0\r\n\r\na b\r\n"
    monkeypatch.setattr(lines, "_CHUNK", chunk)
    expected = [s.rows for s in iter_columns(text.split("\n"))]
    assert len(expected) == 2
    assert rows_of(text.encode(encoding), encoding=encoding) == expected


def test_kinds_of_source(tmp_path: Path) -> None:
    path = tmp_path / "train.data"
    path.write_bytes(b"a b\n\nc d\n")
    expected = [ColumnSequence((("a", "b"),), 1), ColumnSequence((("c", "d"),), 3)]
    assert list(iter_columns(path)) == expected
    assert list(iter_columns(str(path))) == expected
    assert list(iter_columns(["a b", "", "c d"])) == expected
    assert list(iter_columns(iter(["a b\r\n", "\r\n", "c d\r\n"]))) == expected
    assert list(iter_columns(["a b\n\n", "c d"])) == [expected[0], expected[1]]
    with open(path, "rb") as binary, open(path, encoding="utf-8") as text:
        assert read_columns(binary) == ColumnFile(str(path), expected)
        assert read_columns(text) == ColumnFile(str(path), expected)
    with open(path, "rb", buffering=0) as raw:
        assert list(iter_columns(raw)) == expected
    assert read_columns(path) == ColumnFile(str(path), expected)
    assert read_columns(path, name="x").name == "x"
    assert read_columns(io.BytesIO(b"a")).name == "<stream>"
    assert read_columns(io.StringIO("a")).name == "<stream>"
    assert read_columns(["a"]).name == "<lines>"


def test_standard_input_is_named() -> None:
    stdin: Any = sys.__stdin__
    assert lines.name_of(stdin.buffer) == "<stdin>"


# Streaming


def test_lines_are_read_only_as_far_as_needed() -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "" if taken % 3 == 0 else f"w{taken} x"

    sequences = iter_columns(endless())
    assert next(sequences) == ColumnSequence((("w1", "x"), ("w2", "x")), 1)
    assert taken == 3
    assert next(sequences).line == 4
    assert taken == 6


def test_a_pipe_yields_a_sequence_before_the_next_is_written() -> None:
    reading, writing = os.pipe()
    got: list[ColumnSequence] = []
    arrived = threading.Event()

    def read() -> None:
        with open(reading, "rb") as stream:
            for sequence in iter_columns(stream):
                got.append(sequence)
                arrived.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(writing, "wb", buffering=0) as stream:
        stream.write(b"a b\n\n")
        assert arrived.wait(timeout=10), "waited for a full block"
        assert got == [ColumnSequence((("a", "b"),), 1)]
        stream.write(b"c d")
    reader.join(timeout=10)
    assert [s.line for s in got] == [1, 3]


def test_memory_is_that_of_one_sequence() -> None:
    class Long(io.RawIOBase):
        left = 400

        def read(self, size: int = -1) -> bytes:
            if size == 0 or self.left == 0:
                return b""
            self.left -= 1
            return b"token tag label\n" * 500 + b"\n"

    stream: Any = Long()
    tracemalloc.start()
    try:
        assert sum(len(sequence.rows) for sequence in iter_columns(stream)) == 400 * 500
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000, "the whole is 3 MB of text, 40 MB of rows"


# Reading what cannot be read


def test_row_with_too_few_or_too_many_columns() -> None:
    assert error_of(b"a b c d\n\na b c\n") == (
        "f:3: 3 columns where line 1 has 4; add the missing column or remove the line"
    )
    assert error_of(b"\n\na b c d\na\n") == (
        "f:4: 1 column where line 3 has 4; add the missing columns or remove the line"
    )
    assert error_of(b"a b\r\na b c\r\n") == (
        "f:2: 3 columns where line 1 has 2; remove the extra column or the line"
    )
    assert error_of(b"a\na b c\n") == (
        "f:2: 3 columns where line 1 has 1; remove the extra columns or the line"
    )


def test_sequences_before_the_fault_are_handed_over() -> None:
    for data in (b"a b\n\nc d\ne\n", b"a b\n\nc d\n\xff\n"):
        sequences = iter_columns(io.BytesIO(data), name="f")
        assert next(sequences).rows == (("a", "b"),)
        with pytest.raises(InputError) as caught:
            next(sequences)
        assert caught.value.place == "f:4"


def test_the_first_fault_is_the_one_named() -> None:
    assert error_of(b"a b\nc\n\xff x\n").startswith("f:2: 1 column where line 1 has 2;")


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 16])
@pytest.mark.parametrize(
    ("encoding", "good", "bad", "reason"),
    [
        ("utf-8", "日 x\n", b"\xff", "invalid start byte"),
        ("utf-8", "日 x\n", b"a\xe6\x97 x", "invalid continuation byte"),
        ("utf-8", "日 x\n", b"\xe6\x97", "unexpected end of data"),
        ("euc-jp", "日 x\n", b"\xa4\n", "illegal multibyte sequence"),
        ("euc-jp", "日 x\n", b"\xa4", "incomplete multibyte sequence"),
        ("shift_jis", "日 x\n", b"\x81\n", "illegal multibyte sequence"),
        ("iso-2022-jp", "日 x\n", b"\x1b$B\xff\n", "illegal multibyte sequence"),
        ("utf-16-le", "日 x\n", b"\x00\xdca\x00", "illegal encoding"),
        ("utf-16-le", "日 x\n", b"a", "truncated data"),
        ("ascii", "a x\n", b"\x80", "ordinal not in range(128)"),
    ],
)
def test_bytes_not_in_the_encoding(
    encoding: str, good: str, bad: bytes, reason: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_CHUNK", chunk)
    text = error_of((good * 40).encode(encoding) + bad, encoding=encoding)
    assert text == (f"f:41: not {encoding} text ({reason}); state the file's encoding with encoding=")


def test_the_fault_is_placed_within_a_block() -> None:
    good = "日 x\n".encode()
    assert error_of(good * 500 + b"\xff x\n" + good * 500).startswith("f:501: not utf-8 text")
    assert error_of("日本 x\n".encode("euc-jp")).startswith("f:1: not utf-8 text")
    assert error_of("a b\n\u3000 x\n".encode("euc-jp")).startswith("f:2: not utf-8 text")


def test_utf_16_without_a_mark() -> None:
    assert error_of("a b\n".encode("utf-16-le"), encoding="utf-16").startswith("f:1: not utf-16")


@pytest.mark.parametrize("encoding", ["nonsense", "hex", "a\0b", "undefined"])
def test_unknown_encoding(encoding: str, tmp_path: Path) -> None:
    expected = (
        f"unknown encoding {encoding!r}; "
        "name one that Python knows, such as utf-8, euc-jp or latin-1, with encoding="
    )
    path = tmp_path / "a"
    path.write_bytes(b"a b\n")
    assert error_of(b"a b\n", encoding=encoding) == f"f: {expected}"
    with pytest.raises(InputError) as caught:
        read_columns(path, encoding=encoding)
    assert str(caught.value) == f"{path}: {expected}"
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("c", "d")]], encoding=encoding)
    assert str(caught.value) == f"{path}: {expected}"
    assert path.read_bytes() == b"a b\n"
    assert os.listdir(tmp_path) == ["a"]


def test_text_stream_that_cannot_decode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"a b\n\xff\n")
    with open(path, encoding="utf-8") as text, pytest.raises(InputError) as caught:
        read_columns(text)
    assert str(caught.value) == (
        f"{path}: not utf-8 text (invalid start byte); state the file's encoding with encoding="
    )


def test_lines_that_are_not_text() -> None:
    with pytest.raises(InputError) as caught:
        read_columns(["a b\n\n", b"a b"])  # type: ignore[list-item]
    assert str(caught.value) == (
        "<lines>:3: a line of type bytes where str is needed; "
        "decode the lines, or pass the binary stream itself"
    )


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "file").write_bytes(b"a b\n")
    expected = {
        missing: "(No such file or directory); check the path",
        tmp_path: "(Is a directory); name a file in it",
        tmp_path / "file" / "x": "(Not a directory); check the path",
    }
    for path, text in expected.items():
        with pytest.raises(InputError) as caught:
            read_columns(path)
        assert str(caught.value) == f"{path}: cannot be read {text}"

    def denied(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(InputError) as caught:
        read_columns("secret")
    monkeypatch.undo()
    assert str(caught.value) == ("secret: cannot be read (Permission denied); ask for the right to read it")


def test_streams_that_break() -> None:
    class Broken(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    def broken_lines() -> Iterator[str]:
        yield "a b"
        raise OSError(errno.EIO, "Input/output error")

    for source in (Broken(), broken_lines()):
        with pytest.raises(InputError) as caught:
            read_columns(source, name="f")
        assert str(caught.value) == ("f: cannot be read (Input/output error); check the file and the disk")


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n \t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_no_rows(data: bytes) -> None:
    assert list(iter_columns(io.BytesIO(data))) == []
    assert error_of(data) == ("f: no tokens; give one token per line and a blank line between sequences")


# Labels


def test_split_labels() -> None:
    file = read_columns(["He PRP B", "is VBZ O", "", "Yes UH O"])
    assert file.n_columns == 3
    assert file.split_labels() == ([[("He", "PRP"), ("is", "VBZ")], [("Yes", "UH")]], [["B", "O"], ["O"]])


def test_split_labels_needs_two_columns() -> None:
    file = read_columns(["", "a", "b"], name="f")
    assert file.n_columns == 1
    with pytest.raises(InputError) as caught:
        file.split_labels()
    assert str(caught.value) == (
        "f:2: 1 column where a feature and a label are needed; add the label as the last column"
    )


def test_a_file_made_by_hand_may_be_empty() -> None:
    assert ColumnFile("f", []).n_columns == 0
    assert ColumnFile("f", []).split_labels() == ([], [])


# Writing


def test_format_and_file(tmp_path: Path) -> None:
    assert format_sequence([("a", "b"), ["c", "d"]]) == "a\tb\nc\td\n"
    assert format_sequence([]) == ""
    path = tmp_path / "out"
    write_columns(path, ([("a", "b")], iter([["c", "d"], ["e", "f"]])))
    assert path.read_bytes() == b"a\tb\n\nc\td\ne\tf\n\n"
    write_columns(path, [])
    assert path.read_bytes() == b""


SPACE = "use another character such as _ instead"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", "")], "row 1: cell 2 is empty; put a placeholder such as _ there"),
        ([("a", "b c")], f"row 1: cell 2 ('b c') contains a space, tab or line end; {SPACE}"),
        ([("a", "b"), ("\t", "b")], f"row 2: cell 1 ('\\t') contains a space, tab or line end; {SPACE}"),
        ([("a", "b\n")], f"row 1: cell 2 ('b\\n') contains a space, tab or line end; {SPACE}"),
        ([("a", "b\r")], f"row 1: cell 2 ('b\\r') contains a space, tab or line end; {SPACE}"),
        (
            [("a", "b"), ("a",)],
            "row 2: 1 column where the first row has 2; add the missing column or remove the line",
        ),
        (
            [("a", "b", "c")],
            "row 1: 3 columns where the first row has 2; remove the extra column or the line",
        ),
        ([()], "row 1: no cells; leave the row out"),
        ([("a", "\ud800")], "row 1: cell '\\ud800' cannot be written in utf-8; replace it or use utf-8"),
    ],
)
def test_cells_that_would_not_read_back(tmp_path: Path, rows: list[tuple[str, ...]], message: str) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("x", "y")], rows])
    assert str(caught.value) == f"{path}: sequence 2, {message}"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_sequence_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("a",)], []])
    assert str(caught.value) == f"{path}: sequence 2: no rows; leave the sequence out"
    assert os.listdir(tmp_path) == []


def test_text_the_encoding_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for cell, encoding in [("日", "latin-1"), ("\xa5", "shift_jis"), ("\U0001f600", "euc-jp")]:
        with pytest.raises(InputError) as caught:
            write_columns(path, [[("a", "b"), ("a", cell)]], encoding=encoding)
        assert str(caught.value) == (
            f"{path}: sequence 1, row 2: cell {cell!r} cannot be written in {encoding}; "
            "replace it or use utf-8"
        )
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("\x1b0", "\u3000")]], encoding="iso-2022-jp")
    assert str(caught.value) == (
        f"{path}: sequence 1: text cannot be written in iso-2022-jp; replace it or use utf-8"
    )
    assert os.listdir(tmp_path) == []


def test_a_byte_order_mark_first_of_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("\ufeffa", "b")]])
    assert str(caught.value) == (
        f"{path}: sequence 1, row 1: "
        "a byte-order mark in front of the first cell would not read back; remove it"
    )
    first, second = (("a", "\ufeff"), ("\ufeff", "b")), (("\ufeff", "b"),)
    write_columns(path, [first, second])
    assert [s.rows for s in read_columns(path).sequences] == [first, second]


def test_sequences_that_fail_midway_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def sequences() -> Iterator[list[tuple[str, ...]]]:
        for _ in range(10_000):  # more than any buffer holds
            yield [("token", "label")]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_columns(path, sequences())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_and_an_unwritable_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(InputError) as caught:
        write_columns(path / "x", [[("a",)]])
    assert str(caught.value) == (
        f"{path / 'x'}: cannot be written (Not a directory); name a file in an existing folder"
    )

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError) as caught:
        write_columns(path, [[("a",)]])
    assert str(caught.value) == (
        f"{path}: cannot be written (No space left on device); free some space or choose another disk"
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


# Round trips


def holds(cell: str, encoding: str) -> bool:
    try:
        return cell.encode(encoding).decode(encoding) == cell
    except UnicodeError:
        return False


@st.composite
def files(draw: st.DrawFn, encoding: str) -> list[tuple[tuple[str, ...], ...]]:
    special = st.sampled_from(["\u3000", "\u2028", "\x85", "\x0c", "\u0a0a", "日本", "ｶ", "#", "\xa0"])
    cell = st.one_of(st.text(min_size=1, max_size=4), special).filter(
        # The escape character is refused by encodings that switch by escapes.
        lambda text: not set(text) & set(" \t\n\r\x1b") and holds(text, encoding)
    )
    row = st.tuples(*[cell] * draw(st.integers(1, 3)))
    sequence = st.lists(row, min_size=1, max_size=3).map(tuple)
    return draw(
        st.lists(sequence, min_size=1, max_size=3).filter(
            lambda found: not found[0][0][0].startswith("\ufeff")
        )
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_write_then_read_gives_it_back(encoding: str, data: st.DataObject) -> None:
    sequences = data.draw(files(encoding))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "out")
        write_columns(path, sequences, encoding=encoding)
        file = read_columns(path, encoding=encoding)
        assert [sequence.rows for sequence in file.sequences] == sequences
        write_columns(path, file.sequences, encoding=encoding)
        assert read_columns(path, encoding=encoding) == file
        assert os.listdir(folder) == ["out"]


# Real files


DATA = os.environ.get("STRUCTGP_DATA", "")
needs_data = pytest.mark.skipif(
    not os.path.isdir(DATA), reason="STRUCTGP_DATA does not name the folder of the paper's data"
)


@needs_data
@pytest.mark.parametrize(
    ("name", "encoding", "n_sequences", "n_rows", "n_columns"),
    [
        ("columns/basenp.data", "utf-8", 823, 19172, 3),
        ("columns/chunking.data", "utf-8", 823, 19172, 3),
        ("columns/japanesene.data", "utf-8", 500, 12678, 4),
        ("columns/segmentation.data", "utf-8", 36, 1623, 3),
        ("crfpp/JapaneseNE/train.data", "euc-jp", 216, 4772, 4),
        ("crfpp/JapaneseNE/test.data", "euc-jp", 500, 12678, 4),
        ("crfpp/basenp/train.data", "utf-8", 77, 1896, 3),
        ("crfpp/basenp/test.data", "utf-8", 823, 19172, 3),
        ("crfpp/chunking/train.data", "utf-8", 77, 1896, 3),
        ("crfpp/chunking/test.data", "utf-8", 823, 19172, 3),
        ("crfpp/seg/train.data", "utf-8", 36, 965, 3),
        ("crfpp/seg/test.data", "utf-8", 19, 981, 3),
    ],
)
def test_real_files(
    name: str, encoding: str, n_sequences: int, n_rows: int, n_columns: int, tmp_path: Path
) -> None:
    file = read_columns(os.path.join(DATA, name), encoding=encoding)
    assert len(file.sequences) == n_sequences
    assert sum(len(sequence.rows) for sequence in file.sequences) == n_rows
    assert file.n_columns == n_columns
    out = tmp_path / "out"
    write_columns(out, file.sequences, encoding=encoding)
    again = read_columns(out, encoding=encoding)
    assert [s.rows for s in again.sequences] == [s.rows for s in file.sequences]


@needs_data
def test_japanese_data_in_the_wrong_encoding() -> None:
    with pytest.raises(InputError) as caught:
        read_columns(os.path.join(DATA, "crfpp/JapaneseNE/train.data"))
    assert caught.value.place.endswith("train.data:1")
    assert caught.value.remedy == "state the file's encoding with encoding="
