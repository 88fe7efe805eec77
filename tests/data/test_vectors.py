"""Word vectors and numbers in text files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgp.data.sources.columns import ColumnSequence
from structgp.data.sources.number_text import parse_number
from structgp.data.sources.vectors import Coverage, NumericColumns, WordVectors, read_numbers
from structgp.errors import InputError

PLAIN = "eggs 0.1 -0.2\nmilk 3e-1 4 \n"


def error_of(path: Path, word: str = "?") -> str:
    def use() -> None:
        WordVectors(path)[word]

    with pytest.raises(InputError) as caught:
        use()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vectors"


# -- vectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [PLAIN, "2 2\n" + PLAIN, "\ufeff" + PLAIN, PLAIN.replace("\n", "\r\n"), PLAIN.replace(" ", "\t"),
     "\n" + PLAIN + "\n\n", PLAIN + "eggs 7 7\n", PLAIN + ". . . 7 7\n", PLAIN.rstrip()],
)  # fmt: skip
def test_every_way_to_write_them(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
    vectors = WordVectors(path)
    assert (vectors.dimension, len(vectors)) == (2, 2)
    assert vectors.digest == hashlib.sha256(text.encode()).hexdigest()
    for _ in range(2):
        assert vectors["eggs"].tolist() == [0.1, -0.2]
        assert vectors["milk"].tolist() == [0.3, 4]
        assert vectors["figs"].tolist() == [0, 0]
    assert "eggs" in vectors
    assert "figs" not in vectors
    with pytest.raises(ValueError, match="read-only"):
        vectors["eggs"][0] = 1


def test_words_in_lower_case(path: Path) -> None:
    path.write_text("eggs 1\nEggs 2\nMilk 3\nstra\u00dfe 4\n", encoding="utf-8")
    vectors = WordVectors(path)
    found = {"eggs": 1, "Eggs": 2, "EGGS": 1, "Milk": 3, "milk": 0, "MILK": 0, "Stra\u00dfe": 4}
    assert {word: float(vectors[word][0]) for word in found} == found
    assert [word for word in found if word not in vectors] == ["milk", "MILK"]
    covered = vectors.coverage([*found, "EGGS", "none"])
    assert covered == Coverage(as_written=3, lower_case=3, missing=3)
    assert str(covered) == "66.7% of 9 tokens have a vector (3 as written, 3 in lower case), 3 get zeros"
    assert covered == vectors.coverage(list(found)) + vectors.coverage(["EGGS", "none"])
    strict = WordVectors(path, lower_case=False)
    assert strict["EGGS"].tolist() == [0]
    assert strict.coverage(found) == Coverage(3, 0, 4)


def test_numbers_for_words(path: Path) -> None:
    path.write_text("3 4 5\n5 6 7\n")
    assert WordVectors(path)["3"].tolist() == [4, 5]
    path.write_text("5 1\n3 4\n")
    assert len(WordVectors(path)) == 1
    assert WordVectors(path)["3"].tolist() == [4]


def test_encodings(path: Path) -> None:
    path.write_bytes("東京 1\ncafé 2\n".encode())
    assert WordVectors(path)["東京"].tolist() == [1]
    assert "caf\udcc3" not in WordVectors(path)
    path.write_bytes("東京 1\n".encode("euc-jp"))
    assert WordVectors(path, encoding="euc-jp")["東京"].tolist() == [1]
    assert "東京" not in WordVectors(path)
    path.write_bytes("a\u3000b 1\n".encode())
    assert WordVectors(path)["a\u3000b"].tolist() == [1]
    with pytest.raises(InputError) as caught:
        WordVectors(path, encoding="utf-16")
    assert str(caught.value).endswith("convert the file to utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": no vectors; "),
        ("2 3\n", ": no vectors; "),
        ("a 1 2\n\nb 1\n", ":3: 1 numbers after the word, expected 2; correct the line"),
        ("a 1 2\nb 1 2 3\n", ":2: 3 numbers after the word, expected 2; "),
        ("1 3\na 1 2\n", ":2: 2 numbers after the word, expected 3; "),
        ("a\n", ":1: 0 numbers after the word, expected some; "),
        ("1 0\na\n", ":2: 0 numbers after the word, expected some; "),
    ],
)
def test_lines_that_are_no_vectors(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    assert error_of(path).startswith(f"{path}{message}")


@pytest.mark.parametrize("bad", ["x", "nan", "inf", "1_0", "é"])
def test_a_number_that_is_none(path: Path, bad: str) -> None:
    path.write_bytes(f"a 1 2\nb 1 {bad}\n".encode())
    assert WordVectors(path)["a"].tolist() == [1, 2]
    assert error_of(path, "b").startswith(f"{path}:2: number 2 is ")


def test_files_that_cannot_be_read(path: Path) -> None:
    assert error_of(path) == f"{path}: cannot be read (No such file or directory); check the path"
    path.write_text(PLAIN)
    vectors = WordVectors(path)
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        vectors["eggs"]


# -- numbers ---------------------------------------------------------------------------------------


def test_numbers_of_a_sequence() -> None:
    rows = [("a", "1", "2.5"), ("b", "-3", "1e2")]
    assert read_numbers(rows, [2, 1], "f", 7).tolist() == [[2.5, 1], [100, -3]]
    assert read_numbers(rows, [], "f", 7).shape == (2, 0)
    with pytest.raises(InputError) as caught:
        read_numbers([("1", "2"), ("3", "x")], [0, 1], "f", 7)
    assert str(caught.value) == "f:8: column 1 is 'x'; give a finite number such as 2 or -0.5"


def test_one_number() -> None:
    assert parse_number("-0.5", "f", "it") == -0.5
    with pytest.raises(InputError, match=r"^f: it is '-1e101', too large; rescale the feature$"):
        parse_number("-1e101", "f", "it")
    for bad in ("", "1,5", "nan", "-inf", "1_000", "0x1"):
        with pytest.raises(InputError):
            parse_number(bad, "f", "it")


def learned(columns: list[int], rows: list[tuple[str, ...]]) -> NumericColumns:
    """From these rows, in sequences of one and of the rest."""
    parts = [part for part in (rows[:1], rows[1:]) if part]
    sequences = [ColumnSequence(tuple(part), 1) for part in parts]
    return NumericColumns.learn(columns, sequences, "f")


@given(st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 2), min_size=1, max_size=6))
def test_columns_on_one_scale(numbers: list[tuple[float, float]]) -> None:
    values = np.array(numbers)
    rows = [(repr(b), repr(a)) for a, b in numbers]
    columns = learned([1, 0, 1], rows)
    scaled = columns.features(rows, "f", 1)
    for d in range(2):
        # Two numbers that agree but for rounding have no spread to speak of.
        if np.ptp(values[:, d]) > 1e-6 * (1 + np.abs(values[:, d]).max()):
            assert scaled[:, d].mean() == pytest.approx(0, abs=1e-6)
            assert scaled[:, d].std() == pytest.approx(1, abs=1e-6)
    state = json.loads(json.dumps(columns.to_json()))
    assert NumericColumns.from_json(state) == columns


def test_differences_too_small_to_square() -> None:
    rows = [("0",), ("1e-300",)]
    assert np.isfinite(learned([0], rows).features(rows, "f", 1)).all()


def test_a_column_that_is_always_the_same() -> None:
    columns = learned([0], [("0.1",)] * 7)
    assert columns.sd == (1.0,)
    scaled = columns.features([("0.1",), ("2.1",)], "f", 1)
    assert scaled == pytest.approx(np.array([[0], [2]]))
