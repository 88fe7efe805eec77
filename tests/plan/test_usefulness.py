"""What is said of a fit that is of no use costs next to nothing."""

from __future__ import annotations

from typing import Any

import pytest

from structgp import Prior, StructuredGPClassifier
from structgp.gp.block import Block
from structgp.plan import usefulness


@pytest.mark.parametrize("lengths", [[400], [80, 80, 80]])
def test_few_tokens_are_looked_at(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a sequence is: their covariance is joint."""
    asked: list[int] = []
    whole = Block.scores_at

    def counted(self: Any, rows: Any) -> Any:
        asked.append(len(rows))
        return whole(self, rows)

    monkeypatch.setattr(Block, "scores_at", counted)
    X = [[{"word": "ab"[t % 2]} for t in range(n)] for n in lengths]
    y = [["AB"[t % 2] for t in range(n)] for n in lengths]
    StructuredGPClassifier(prior=Prior(data_weight=1.0)).fit(X, y)
    assert asked == [usefulness.SOME]
