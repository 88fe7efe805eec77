"""CRF++ templates: syntax, boundary strings, and the errors of those who mistype them."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structgp.data.sources.columns import read_columns
from structgp.data.sources.templates import Template, TemplateLine
from structgp.errors import InputError

ROWS = [("the", "DT"), ("black", "JJ"), ("cat", "NN")]


def error_of(text: str) -> str:
    with pytest.raises(InputError) as caught:
        Template.parse(text, "t")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_parse() -> None:
    text = "# Unigram\nU00:%x[-1,0]\n\n \t\nU01:%x[0,0]/%x[+1,1]\n# Bigram\nB\n"
    template = Template.parse(text)
    assert template.name == "template"
    assert template.text == text
    assert template.has_bigram
    first, second = template.unigrams
    assert first == TemplateLine("U00:%x[-1,0]", 2, "U00:", "%s", first.macros)
    assert second == TemplateLine("U01:%x[0,0]/%x[+1,1]", 5, "U01:", "%s/%s", second.macros)
    assert [(m.row, m.column) for m in first.macros + second.macros] == [(-1, 0), (0, 0), (1, 1)]
    assert Template.parse(template.text) == template
    assert pickle.loads(pickle.dumps(template)) == template
    assert copy.deepcopy(template) == template


def test_windows_line_ends_mark_and_no_final_newline() -> None:
    template = Template.parse("\ufeff# x\r\nU00:%x[0,0]\r\n\r\nU01:%x[0,1]\r\nB\r")
    assert [(u.source, u.line) for u in template.unigrams] == [("U00:%x[0,0]", 2), ("U01:%x[0,1]", 4)]
    assert template.has_bigram
    assert Template.parse("\ufeffU00:%x[0,0]").unigrams[0].source == "U00:%x[0,0]"


def test_only_newline_ends_a_line() -> None:
    (line,) = Template.parse("U00:%x[0,0]\u2028\x85\x0c%x[1,0]\n").unigrams
    assert line.pattern == "%s\u2028\x85\x0c%s"


@pytest.mark.parametrize(
    ("text", "expected"), [("", False), ("B\n", True), ("B00\n", True), ("B00:x\r\n", True)]
)
def test_bigram_lines(text: str, expected: bool) -> None:
    assert Template.parse(text + "U:%x[0,0]").has_bigram is expected
    assert len(Template.parse(text + "U:%x[0,0]").unigrams) == 1


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_bytes(b"\xef\xbb\xbfU00:%x[0,0]\r\nB")
    template = Template.read(path)
    assert (template.name, template.text) == (str(path), "U00:%x[0,0]\nB\n")
    assert Template.parse(template.text, str(path)) == template
    path.write_bytes("U00:日%x[0,0]\n".encode("euc-jp"))
    assert Template.read(str(path), encoding="euc-jp").expand([("x",)]) == [("日x",)]
    with pytest.raises(InputError) as caught:
        Template.read(path)
    assert (
        str(caught.value)
        == (
            f"{path}:1: not utf-8 text (invalid continuation byte); "
            "state the file's encoding with --encoding"
        )
        or caught.value.place == f"{path}:1"
    )
    with pytest.raises(InputError) as caught:
        Template.read(tmp_path / "missing")
    assert str(caught.value) == (
        f"{tmp_path / 'missing'}: cannot be read (No such file or directory); check the path"
    )
    path.write_bytes(b"U00:%x[0,0]\nX\n")
    with pytest.raises(InputError) as caught:
        Template.read(path)
    assert caught.value.place == f"{path}:2"


# Errors


@pytest.mark.parametrize(
    "macro",
    [
        "%x[0]",
        "%x[a,0]",
        "%x[0,a]",
        "%x [0,1]",
        "%x[0, 1]",
        "%x[ 0,1]",
        "%y[0,0]",
        "%X[0,0]",
        "%x[0,-1]",
        "%x[0,+1]",
        "%x[--1,0]",
        "%x[,0]",
        "%x[0,]",
        "%x[]",
        "%x[0,0,0]",
        "%x[1.5,0]",
        "%x[٣,0]",
        "%x[0,1234567890]",
    ],
)
@pytest.mark.parametrize("letter", "UB")
def test_malformed_macros(macro: str, letter: str) -> None:
    expected = (
        f"t:3: {macro!r} is not a macro; write %x[row,column] without spaces, "
        "the row such as -1, 0 or 1, the column 0 or more"
    )
    assert error_of(f"U:%x[0,0]\n\n{letter}00:{macro}\n") == expected
    assert error_of(f"U:%x[0,0]\n\n{letter}00:%x[0,0]/{macro}/%x[1,0]\n") == expected


@pytest.mark.parametrize(
    ("line", "quoted"), [("U:%x[0", "%x[0"), ("U:100%", "%"), ("U:%%x[0,0]", "%"), ("U%x", "%x")]
)
def test_a_stray_percent(line: str, quoted: str) -> None:
    assert error_of(line).startswith(f"t:1: {quoted!r} is not a macro; ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [("B%x[0,0]", "black"), ("B00:%x[-1,0]", "the"), ("B:a/%x[0,1]/%x[1,0]", "a/JJ/cat")],
)
@pytest.mark.parametrize("plain", ["", "B\n", "B99:constant\n"])
def test_bigrams_with_macros(line: str, expected: str, plain: str) -> None:
    template = Template.parse(f"U:%x[0,0]\n{line}\n{plain}U:%x[0,1]\n")
    assert template.has_bigram is bool(plain)
    assert [bigram.source for bigram in template.bigrams] == [line]
    assert template.transition_columns == ("2",)
    assert template.expand(ROWS)[1] == ("black", "JJ", expected)
    assert template.expand(ROWS, transitions=False)[1] == ("black", "JJ")
    assert template.crfsuite_attributes(ROWS)[1] == ["U:black", "U:JJ"]
    with pytest.raises(InputError) as caught:
        Template.parse(f"U:%x[0,0]\n{line}", "t").check_columns(0, "f")
    assert caught.value.place == "t:1"
    with pytest.raises(InputError) as caught:
        Template.parse("U:%x[0,0]\nB:%x[0,3]", "t").check_columns(3, "f")
    assert caught.value.place == "t:2"


def test_bigrams_at_the_start_of_a_sequence() -> None:
    """A transition into the first token does not exist, and its feature is made like the others."""
    template = Template.parse("U:%x[0,0]\nB:%x[-1,0]/%x[0,0]\n")
    assert [token[-1] for token in template.expand(ROWS)] == ["_B-1/the", "the/black", "black/cat"]


@pytest.mark.parametrize("line", ["X00:%x[0,0]", " U00:%x[0,0]", "u00:%x[0,0]", "%x[0,0]", "b"])
def test_other_first_letters(line: str) -> None:
    assert error_of(f"# c\nU:%x[0,0]\n{line}\n") == (
        f"t:3: the line starts with {line[0]!r}; "
        "start it with U (a feature), B (transitions) or # (a comment)"
    )


@pytest.mark.parametrize("text", ["", "\n", "# U00:%x[0,0]\n", "B\n"])
def test_no_unigram(text: str) -> None:
    assert error_of(text) == "t: no U line; add at least one, such as U00:%x[0,0]"


def test_check_columns() -> None:
    template = Template.parse("#\nU00:%x[0,0]\nU01:%x[0,1]/%x[-1,2]\n", "t")
    template.check_columns(3, "train.data")
    expected = {
        2: "t:3: %x[-1,2] names column 2, but columns 0 to 1 exist in train.data",
        1: "t:3: %x[0,1] names column 1, but only column 0 exists in train.data",
        0: "t:2: %x[0,0] names column 0, but no columns exist in train.data",
    }
    for n_columns, message in expected.items():
        with pytest.raises(InputError) as caught:
            template.check_columns(n_columns, "train.data")
        assert str(caught.value) == (
            f"{message} (the label is not one of them); correct the column or add it to the data"
        )


def test_expand_checks_columns() -> None:
    template = Template.parse("U00:%x[5,1]\n", "t")
    for rows in ([("a", "b"), ("a",)], [()]):
        with pytest.raises(InputError) as caught:
            template.expand(rows)
        assert caught.value.place == "t:1"
        assert "in the rows given" in caught.value.problem


# Expansion


def test_expand() -> None:
    template = Template.parse("U00:%x[-1,0]\nU05:%x[-1,0]/%x[0,0]\nU10:%x[0,1]\nB\n")
    assert template.expand(ROWS) == [
        ("_B-1", "_B-1/the", "DT"),
        ("the", "the/black", "JJ"),
        ("black", "black/cat", "NN"),
    ]
    assert template.expand([]) == []


def test_boundaries() -> None:
    template = Template.parse("U:%x[-6,0]\nU:%x[-2,0]\nU:%x[+2,0]\nU:%x[6,0]\n")
    assert template.expand(ROWS) == [
        ("_B-6", "_B-2", "cat", "_B+4"),
        ("_B-5", "_B-1", "_B+1", "_B+5"),
        ("_B-4", "the", "_B+2", "_B+6"),
    ]
    assert template.expand(ROWS[:1]) == [("_B-6", "_B-2", "_B+2", "_B+6")]


def test_literal_text() -> None:
    text = "U00:w=%x[0,0]|p=%x[0,1]!\nU1:{}%x[0,0]\\1\nU2:bias\nU3\nU4:\n"
    assert Template.parse(text).expand([("100%s", "{0}")]) == [
        ("w=100%s|p={0}!", "{}100%s\\1", "bias", "", "")
    ]


def test_prefixes() -> None:
    """With no colon in front of the first macro, what stands before that macro is the prefix."""
    lines = Template.parse("U%x[0,0]\nU%x[0,0]:%x[0,1]\nU07x%x[0,0]\nU9\nU1:a:%x[0,0]").unigrams
    assert [(line.prefix, line.pattern) for line in lines] == [
        ("U", "%s"),
        ("U", "%s:%s"),
        ("U07x", "%s"),
        ("U9", ""),
        ("U1:", "a:%s"),
    ]


def test_crfsuite_attributes() -> None:
    text = "U00:%x[0,0]\nU00:%x[1,0]\nU:%x[0,0]/%x[0,1]\nU%x[0,0]\nU9\nU8:bias\nB\n"
    assert Template.parse(text).crfsuite_attributes(ROWS[:2]) == [
        ["U00:the", "U00:black", "U:the/DT", "Uthe", "U9", "U8:bias"],
        ["U00:black", "U00:_B+1", "U:black/JJ", "Ublack", "U9", "U8:bias"],
    ]


def literally(pieces: Sequence[str | tuple[int, int]], rows: Sequence[Sequence[str]], t: int) -> str:
    """CRF++'s rule, one token and one macro at a time."""
    out = ""
    for piece in pieces:
        if isinstance(piece, str):
            out += piece
        elif t + piece[0] < 0:
            out += f"_B-{-(t + piece[0])}"
        elif t + piece[0] >= len(rows):
            out += f"_B+{t + piece[0] - len(rows) + 1}"
        else:
            out += rows[t + piece[0]][piece[1]]
    return out


literals = st.text(max_size=3).filter(lambda text: not set(text) & set("%\n\r"))
pieces = st.lists(st.one_of(literals, st.tuples(st.integers(-7, 7), st.integers(0, 1))))
cells = st.text(min_size=1, max_size=3)


@given(lines=st.lists(pieces, min_size=1, max_size=4), rows=st.lists(st.tuples(cells, cells), max_size=5))
def test_against_the_rule_written_out(
    lines: list[list[str | tuple[int, int]]], rows: list[tuple[str, str]]
) -> None:
    sources = [
        f"U{i}:" + "".join(p if isinstance(p, str) else f"%x[{p[0]},{p[1]}]" for p in line)
        for i, line in enumerate(lines)
    ]
    template = Template.parse("\n".join(sources))
    expected = [tuple(literally(line, rows, t) for line in lines) for t in range(len(rows))]
    assert template.expand(rows) == expected
    assert template.crfsuite_attributes(rows) == [
        [f"U{i}:{value}" for i, value in enumerate(values)] for values in expected
    ]


def test_two_hundred_thousand_tokens_take_seconds() -> None:
    text = "".join(f"U{i}:%x[{i % 5 - 2},0]/%x[{i % 3},1]\n" for i in range(20))
    template = Template.parse(text)
    rows = [(f"w{t % 1000}", f"p{t % 40}") for t in range(25)]
    start = time.perf_counter()
    for _ in range(800):  # a tenth of the 200,000
        template.expand(rows)
    assert time.perf_counter() - start < 3


# Real files


DATA = os.environ.get("STRUCTGP_DATA", "")
needs_data = pytest.mark.skipif(
    not os.path.isdir(DATA), reason="STRUCTGP_DATA does not name the folder of the paper's data"
)


@needs_data
@pytest.mark.parametrize(
    ("template_name", "data_name", "encoding", "n_lines"),
    [
        ("columns/basenp.template", "columns/basenp.data", "utf-8", 20),
        ("columns/chunking.template", "columns/chunking.data", "utf-8", 19),
        ("columns/japanesene.template", "columns/japanesene.data", "utf-8", 32),
        ("columns/segmentation.template", "columns/segmentation.data", "utf-8", 10),
        ("crfpp/JapaneseNE/template", "crfpp/JapaneseNE/train.data", "euc-jp", 32),
        ("crfpp/JapaneseNE/template", "crfpp/JapaneseNE/test.data", "euc-jp", 32),
        ("crfpp/basenp/template", "crfpp/basenp/train.data", "utf-8", 20),
        ("crfpp/basenp/template", "crfpp/basenp/test.data", "utf-8", 20),
        ("crfpp/chunking/template", "crfpp/chunking/train.data", "utf-8", 19),
        ("crfpp/chunking/template", "crfpp/chunking/test.data", "utf-8", 19),
        ("crfpp/seg/template", "crfpp/seg/train.data", "utf-8", 10),
        ("crfpp/seg/template", "crfpp/seg/test.data", "utf-8", 10),
    ],
)
def test_real_templates(template_name: str, data_name: str, encoding: str, n_lines: int) -> None:
    template = Template.read(os.path.join(DATA, template_name))
    file = read_columns(os.path.join(DATA, data_name), encoding=encoding)
    template.check_columns(file.n_columns - 1, data_name)
    assert len(template.unigrams) == n_lines
    assert template.has_bigram
    features, labels = file.split_labels()
    for rows, tags in zip(features, labels, strict=True):
        expanded = template.expand(rows)
        assert len(expanded) == len(tags)
        assert {len(values) for values in expanded} == {n_lines}
        # U00 is %x[-2,0] and U02 is %x[0,0] in all of them.
        assert [values[2] for values in expanded] == [row[0] for row in rows]
        assert [values[0] for values in expanded][:3] == ["_B-2", "_B-1", rows[0][0]][: len(rows)]
