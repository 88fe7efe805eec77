"""Expected scores and conformal sets over random splits: what the experiments make of what models say."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.splits import SIZES, split_of

from experiments import conformal, expected_scores


def test_splits_are_random_and_repeatable() -> None:
    first, again, other = (split_of("titles", None, number, 30) for number in (0, 0, 1))
    assert first == again
    assert first != other
    assert (len(first.X), len(first.y_test)) == (SIZES["titles"], 30)


def answered(n: int) -> conformal.Answered:
    """Three labels per token, of which each is true with its probability."""
    rng = np.random.default_rng(0)
    p = [rng.dirichlet(np.full(3, 0.5), size=rng.integers(1, 9)) for _ in range(n)]
    y = [[str(rng.choice(3, p=at)) for at in tokens] for tokens in p]
    return conformal.from_marginals([[dict(zip("012", at, strict=True)) for at in t] for t in p], y, "012")


def test_repeated_calibrations_hold_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformal, "REPEATS", 20)
    found = answered(500)
    lengths = np.array([len(s) for s in found.scores])
    at = conformal.repeated(found, lengths, (2, 4, 6), 0.9)
    assert at is not None
    assert at["promised"] == 0.9
    for name in ("held", "short", "long"):
        assert 0.88 < at[name] < 0.94
    assert 1 < at["size"] < 3
    low = conformal.repeated(found, lengths, (2, 4, 6), 0.4)
    assert low is not None
    assert low["promised"] == pytest.approx(
        low["held"], abs=0.02
    )  # one label holds more than was asked for
    assert low["size"] == 1
    assert conformal.repeated(found, lengths, (2, 4, 6), 0.999) is None
    row = {"task": "titles", "method": "ours", "rows": [{"kind": "tokens", "coverage": 0.9, "figures": at}]}
    assert f"| tokens | 0.9 | titles | 0.900 | {at['held']:.3f}" in conformal.table([row], ["titles"])


def test_the_table_of_expected_scores_counts_what_was_held() -> None:
    def row(split: int, held: bool) -> dict:
        at = {"true": 0.1, "mean": 0.2, "low": 0.15 - 0.1 * held, "high": 0.3, "held": held}
        return {"task": "titles", "split": split, "error": at, "f1": at | {"held": True}}

    rows = [row(0, True), row(1, False), row(2, True)]
    assert "| titles | 3 | 2 | 3 | 20.0 / 10.0 | 20.0 / 10.0 |" in expected_scores.table(rows, ["titles"])
    assert "missed" in expected_scores.tell(rows[1])
    assert "missed" not in expected_scores.tell(rows[0])
