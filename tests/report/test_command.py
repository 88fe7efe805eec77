"""``structgp report`` on files."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from structgp.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def refused(*arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"structgp: error: \S.*: .+; .+", line)
    return line


def test_one_page_and_the_same_again(folder, tmp_path):
    page = tmp_path / "report.html"
    result = run(folder / "model", folder / "test.conll", "-o", page)
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote {page}\n"
    first = page.read_bytes()
    assert first.startswith(b"<!DOCTYPE html>")
    assert b"12 sequences" in first
    assert str(folder).encode() not in first
    assert run(folder / "model", folder / "test.conll", "-o", page).exit_code == 0
    assert page.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_file_without_labels(folder, tmp_path, parse):
    page = tmp_path / "report.html"
    assert run(folder / "model", folder / "bare.conll", "-o", page).exit_code == 0
    assert "this file has none" in parse(page.read_text()).text["confidence"]


def test_another_encoding(folder, tmp_path):
    page, data = tmp_path / "report.html", tmp_path / "data"
    data.write_bytes("crème crème x ème out B-NAME\n\n".encode("latin-1"))
    assert run(folder / "model", data, "-o", page, "--encoding", "latin-1").exit_code == 0
    assert "crème" in page.read_text(encoding="utf-8")
    assert "not utf-8 text" in refused(folder / "model", data, "-o", page)
    assert "unknown encoding" in refused(folder / "model", data, "-o", page, "--encoding", "x")


def test_half_a_character_does_not_stop_the_page(folder, tmp_path):
    page, data = tmp_path / "report.html", tmp_path / "data"
    data.write_bytes(b"+2D0- a x a out O\n\n")
    assert run(folder / "model", data, "-o", page, "--encoding", "utf-7").exit_code == 0
    assert page.read_text(encoding="utf-8")


@pytest.mark.parametrize("what", ["model", "data", "columns", "folder"])
def test_what_cannot_be_used_is_said_in_one_line(folder, tmp_path, what):
    model, data, page = folder / "model", folder / "test.conll", tmp_path / "report.html"
    page.write_text("old")
    if what == "model":
        assert str(data) in refused(data, data, "-o", page)
    elif what == "data":
        assert "no such file" in refused(model, folder / "none", "-o", page).lower()
    elif what == "columns":
        narrow = tmp_path / "narrow"
        narrow.write_text("a b O\n\n")
        assert "3 columns, but the model was trained on 5" in refused(model, narrow, "-o", page)
    else:
        missing = tmp_path / "no" / "report.html"
        assert "create its folder" in refused(model, data, "-o", missing)
    assert page.read_text() == "old"
