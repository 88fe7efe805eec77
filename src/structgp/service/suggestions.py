"""The model's answers about sequences of a pool, kept for as long as the model is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from structgp.service.answering import Answerer
from structgp.service.label_pool import Pool

KEPT_ANSWERS = 2000


class Suggestions:
    """Answers as the page shows them, asked for in advance if possible."""

    def __init__(self, pool: Pool, answerer: Answerer) -> None:
        self.pool, self.answerer = pool, answerer
        self._answers: dict[tuple[int | None, int], dict[str, Any]] = {}

    def of(self, i: int) -> dict[str, Any] | None:
        """The answer about a sequence; None without a model. Waits if it was not asked for in advance."""
        if self.answerer.tagger is None:
            return None
        found = self._answers.get((self.answerer.number, i))
        if found is None:
            (found,) = self.answerer.ask([self.pool.sequences[i].tokens], "page").result()
            self._keep(i, found)
        return found

    def ask_ahead(self, sequences: Iterable[int]) -> None:
        """Asks for the answers about these sequences in advance. Returns at once."""
        missing = [i for i in sequences if (self.answerer.number, i) not in self._answers]
        if self.answerer.tagger is None or not missing:
            return

        def keep(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                for i, found in zip(missing, future.result(), strict=True):
                    self._keep(i, found)

        self.answerer.ask([self.pool.sequences[i].tokens for i in missing], "page").add_done_callback(keep)

    def _keep(self, i: int, found: dict[str, Any]) -> None:
        if len(self._answers) >= KEPT_ANSWERS:
            self._answers = {}
        self._answers[found["model"], i] = found
