"""Pools in their formats, and what comes out of them."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from structgp.cli import main
from structgp.data import formats
from structgp.errors import InputError
from structgp.service.label_pool import read_pool
from structgp.service.store import Store

TEXT = "Ann Lee left Rome.\n\nBo stayed \N{GRINNING FACE}\n"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "letters.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "letters.txt"


def label(path, *options):
    return CliRunner().invoke(main, ["label", str(path), *options])


def given(path, labels):
    """A database of this pool with these labels, as the service would have left it."""
    found = label(path, "--types", "PER,LOC", "--export", "-")
    assert "no labels in it" in found.output
    store = Store(f"{path}.labels.db")
    store.label("r", "ann", "random", labels)
    store.close()


def test_lines_of_text_and_their_export(text, tmp_path):
    pool = read_pool([str(text)])
    assert [s.words for s in pool.sequences] == [
        ["Ann", "Lee", "left", "Rome", "."],
        ["Bo", "stayed", "\N{GRINNING FACE}"],
    ]
    assert pool.place(1) == f"{text}:3"
    assert pool.given() == {}
    assert pool.search("LEE  left", 5) == [0]
    given(text, {0: ["B-PER", "I-PER", "O", "B-LOC", None]})
    for to in ("prodigy", "doccano", "label-studio", "conll", "conllu"):
        out = tmp_path / f"out.{to}"
        told = label(text, "--export", str(out), "--to", to)
        assert told.exit_code == 0, told.output
        (document,) = formats.read(out, to)
        if to not in ("conllu",):
            assert [(document.text[s.start : s.stop], s.label) for s in document.spans] == [
                ("Ann Lee", "PER"),
                ("Rome", "LOC"),
            ]
    assert "1 of 2 sequences are labelled" in told.output


def test_labelled_columns_come_in_and_go_out(files, corpus, tmp_path):
    rows = [
        [(*row, "?" if t == 0 else y) for t, (row, y) in enumerate(zip(x, labels, strict=True))]
        for x, labels in zip(corpus.X_test[:3], corpus.y_test[:3], strict=True)
    ]
    from structgp.data.sources import read_columns, write_columns

    write_columns(tmp_path / "in.conll", rows)
    options = ["--template", str(files / "template"), "--labelled", "--export", str(tmp_path / "out.conll")]
    assert label(tmp_path / "in.conll", *options).exit_code == 0
    again = read_columns(tmp_path / "out.conll")
    assert [list(s.rows) for s in again.sequences] == rows
    pool = read_pool([str(tmp_path / "in.conll")], template=str(files / "template"), labelled=True)
    assert pool.given()[0] == [None, *corpus.y_test[0][1:]]
    assert pool.tag_set().spans


def test_json_lines(tmp_path):
    path = tmp_path / "pool.json"
    path.write_text('{"tokens": [{"word": "two"}], "labels": ["QTY"]}\n{"tokens": [{"word": "eggs"}]}\n')
    pool = read_pool([str(path)], format="jsonl")
    assert pool.given() == {0: ["QTY"]}
    assert list(pool.exported([(1, [None])])) == ['{"tokens": [{"word": "eggs"}], "labels": [null]}\n']


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "no labels in it, and none are named"),
        (["--types", "A B"], "white space"),
        (["--types", "A,A"], "'A' twice"),
        (["--types", "A,O"], "outside all spans"),
        (["--tags", "A"], "two labels"),
        (["--types", "A", "--tags", "A,B"], "--tags: cannot be combined"),
        (["--types", "A", "--labelled"], "is for columns"),
        (["--types", "A", "--format", "columns"], "columns need a template"),
        (["--types", "A", "--token", "x", "--no-token"], "--no-token: cannot be combined"),
        (["--types", "A", "--to", "conll"], "--to: is for --export"),
    ],
)
def test_mistakes_are_told_in_one_line(text, options, problem):
    found = label(text, *options)
    assert found.exit_code == 2
    assert problem in found.output
    assert found.output.count("\n") == 1
    assert [file.name for file in text.parent.iterdir()] == [text.name]


def test_a_name_that_tells_no_format(tmp_path):
    (tmp_path / "pool").write_text("two eggs\n")
    with pytest.raises(InputError, match="does not tell the format"):
        read_pool([str(tmp_path / "pool")])
