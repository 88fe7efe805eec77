from __future__ import annotations

import re

import pytest
from experiments.cells import Store
from experiments.data import RESULTS
from experiments.page import DOCS, KEYS, MISSING, cut_short, render, verdict
from experiments.structure_pictures import pictures
from tests.experiments import test_table1

from experiments import page, table1
from structgp import InputError


def test_the_page_is_what_the_cells_give():
    for name, text in render(RESULTS).items():
        there = (DOCS / name).read_text(encoding="utf-8")
        assert there == text, f"{name}: run python -m experiments page"
    drawn = {f"figures/{file.name}" for file in (DOCS / "figures").glob("*.svg")}
    drawn -= {f"figures/structure-{name}.svg" for name in pictures()}
    assert drawn == set(render(RESULTS)) - {"results.md"}


def test_without_cells_everything_is_missing(tmp_path):
    (text,) = render(tmp_path).values()
    assert text.count(MISSING) == 7 * 4 + 5  # lines of two tables
    assert "![" not in text


def test_order_of_rows_does_not_matter(tmp_path):
    for name in KEYS:
        file = RESULTS / f"{name}.jsonl"
        if file.exists():
            lines = file.read_text().splitlines()
            (tmp_path / file.name).write_text("\n".join(reversed(lines)) + "\n")
    assert render(tmp_path) == render(RESULTS)


def test_a_new_cell_is_in_the_page_and_old_figures_go(tmp_path, capsys):
    store = Store(tmp_path / "table1.jsonl", table1.KEY)
    extra = {"seed": 0, "versions": {"structgp": "9.9"}, "details": {}}
    for k in range(5):
        cut = {"minutes": 3.0, "hit_limit": True}
        store.add(test_table1.row("gp-var-s", "basenp", k, 6.0 + k / 10, **cut) | extra)
    (tmp_path / "figures").mkdir()
    for name in ("profile-old", "other"):
        (tmp_path / "figures" / f"{name}.svg").write_text("")
    assert page.main(["--results", str(tmp_path), "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    (line,) = re.findall(r"^\| gp-var-s \| 5\.27 .*$", text, re.MULTILINE)
    assert line == "| gp-var-s | 5.27 (0.24) | 6.20 (0.16)* | +3.9 | 0.200 | 0.010 | 3 |"
    assert "\n- gp-var-s: higher than published: the paper's kernel" in text
    assert "unit variance; cut short at 3 minutes." in text
    assert "| structgp | 9.9 |" in text
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    assert drawn == {"table1.svg", "other.svg"}  # what is not its own stays


def test_a_folder_without_cells_is_no_reason_to_write_a_page(tmp_path):
    with pytest.raises(InputError, match="--results"):
        page.main(["--results", str(tmp_path / "mistyped"), "--docs", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"hit_limit": False, "minutes": 3.0}], ""),
        ([{"hit_limit": True, "minutes": None}], "cut short at its number of passes"),
        (
            [{"hit_limit": True, "minutes": m, "device": "cuda"} for m in (5.0, 3.0)],
            "cut short at 3 to 5 minutes of a GPU",
        ),
        (
            [
                {"hit_limit": True, "minutes": None, "details": {"rhat": 4.0, "rhat_likelihood": r}}
                for r in (1.1, 1.3)
            ],
            "cut short: R-hat of the likelihood up to 1.30",
        ),
    ],
)
def test_what_cut_a_fit_short(rows, words):
    assert cut_short(rows) == words


@pytest.mark.parametrize(
    ("difference", "minutes", "words"),
    [
        (0.9, None, "within a deviation of the published figure"),
        (-0.9, 12.0, "within a deviation of the published figure, though cut short at 12 minutes"),
        (-1.1, None, "lower than published: the paper tunes"),
        (1.1, None, "higher than published: the paper tunes"),
    ],
)
def test_words(difference, minutes, words):
    rows = [{"hit_limit": minutes is not None, "minutes": minutes}]
    assert verdict("crf", difference, rows).startswith(words)
