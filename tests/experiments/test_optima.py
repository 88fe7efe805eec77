"""The table of optima, and what the page says of a preset by it, from rows that are made up."""

from __future__ import annotations

from experiments.page import beside_the_optimum, verdict

from experiments import optimum


def rows() -> list[dict[str, object]]:
    """Of gp-var-p on chunking: 12 % at variance 1, 9 % at 10."""
    return [
        {"likelihood": "piecewise", "variance": v, "task": "chunking", "fold": k}
        | {"error": error + k, "nll": 0.3, "hit_limit": v > 1}
        for v, error in ((1.0, 11.5), (10.0, 8.5))
        for k in range(2)
    ]


def test_table() -> None:
    text = optimum.markdown(rows())
    line = "| chunking | piecewise | 12.00 (0.300) [2] | not run yet | 9.00 (0.300)* [2] |"
    assert line in text
    assert "gp-var-p 9.58 |" in text


def test_what_is_said_of_a_preset() -> None:
    cut_short = [{"hit_limit": True, "minutes": 3.0}]
    best = beside_the_optimum(rows(), "chunking", "gp-var-p", 14.0)
    assert best == (
        "short of the optimum of its bound at variance 1, 12.00 (at variance 10 9.00)",
        False,
    )
    words = verdict("gp-var-p", 3.0, cut_short, *best)
    assert words.startswith("higher than published: cut short at 3 minutes; ")
    assert words.endswith(best[0])
    best = beside_the_optimum(rows(), "chunking", "gp-var-p", 11.9)
    assert best[1]
    words = verdict("gp-var-p", 3.0, cut_short, *best)
    assert words.startswith(
        "higher than published: at the optimum of its bound at variance 1, 12.00 (at"
    )
    assert "cut short" not in words


def test_without_an_optimum_nothing_is_said() -> None:
    for task, method in (("chunking", "gp-var-s"), ("basenp", "gp-var-p"), ("chunking", "crf")):
        assert beside_the_optimum(rows(), task, method, 12.0) == ("", False)


def test_variance_1_alone() -> None:
    (words, _) = beside_the_optimum(rows()[:2], "chunking", "gp-var-p", 14.0)
    assert words == "short of the optimum of its bound at variance 1, 12.00"
