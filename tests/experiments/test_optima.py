"""The table of optima, and what the page says of a preset by it, from rows that are made up."""

from __future__ import annotations

from experiments.page import beside_the_optimum

from experiments import optimum


def rows() -> list[dict[str, object]]:
    """Of gp-var-p on chunking: 12 % at variance 1, 9 % at 10."""
    return [
        {"likelihood": "piecewise", "variance": v, "task": "chunking", "fold": k}
        | {"error": error + k, "nll": 0.3, "bound": -1000.0 * v, "hit_limit": v > 1}
        for v, error in ((1.0, 11.5), (10.0, 8.5))
        for k in range(2)
    ]


def test_table() -> None:
    text = optimum.markdown(rows())
    line = "| chunking | piecewise | 12.00 (0.300) [2] | not run yet | 9.00 (0.300)* [2] |"
    assert line in text
    assert "gp-var-p 9.58 |" in text


def preset(fold: int, bound: float) -> dict[str, object]:
    return {"fold": fold, "details": {"fresh_elbo": bound}}


def test_what_is_said_of_a_preset() -> None:
    """50 training sequences; bounds 100 and 200 nats short of -1000, on the folds that both have."""
    here = [preset(0, -1100.0), preset(1, -1200.0), preset(4, -5000.0)]
    words = beside_the_optimum(rows(), "chunking", "gp-var-p", here)
    assert words == (
        "bound 3.0 nats per sequence below the optimum at variance 1, where the error is 12.00"
    )
    words = beside_the_optimum(rows(), "chunking", "gp-var-p", [preset(0, -950.0)])
    assert words.startswith("bound 1.0 nats per sequence above the optimum")


def test_without_an_optimum_nothing_is_said() -> None:
    here = [preset(0, -1100.0)]
    for task, method in (("chunking", "gp-var-s"), ("basenp", "gp-var-p"), ("chunking", "crf")):
        assert beside_the_optimum(rows(), task, method, here) == ""
