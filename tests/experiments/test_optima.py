"""The table of optima, and what the page says of a preset by it, from rows that are made up."""

from __future__ import annotations

from experiments.page import best_of_its_bound, verdict

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
    best = best_of_its_bound(rows(), "chunking", "gp-var-p")
    assert best == "the optimum of its bound is at 12.00, with variance 10 9.00"
    assert verdict("gp-var-p", 3.0, [{"hit_limit": False, "minutes": None}], best).endswith(best)
    for task, method in (("chunking", "gp-var-s"), ("basenp", "gp-var-p"), ("chunking", "crf")):
        assert best_of_its_bound(rows(), task, method) == ""


def test_variance_1_alone() -> None:
    best = best_of_its_bound(rows()[:2], "chunking", "gp-var-p")
    assert best == "the optimum of its bound is at 12.00"
