"""Answers of one model to many concurrent requests: a worker thread takes all that are waiting as one
batch.

An answer does not depend on the other requests: every function gives the same answer whatever the batch."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from structgp.errors import InputError, StructgpError

if TYPE_CHECKING:
    from structgp.answers.ask import Asked

AT_ONCE = 4000
"""Largest number of tokens that are answered together; further requests wait for the next batch. The
potentials of a batch are kept while it is answered, some 150 MB for ten labels."""
LINGER, LONGEST = 0.5, 0.05
"""A batch waits for more requests to join: for this fraction of the time that the last batch took, and at
most this many seconds. Only requests that arrive right after a batch was answered wait."""
PAUSE = 0.004
"""Seconds without a new request after which a batch stops waiting: reading and writing a request takes a
few tenths of a millisecond."""
DETAILS = ("labels", "probabilities", "all", "page")
"""What an answer holds: 'labels', only the labels; 'probabilities', also the probability of the labelling
and of each label; 'all', in addition those of every label of each token; 'page', in addition to
'probabilities' the alternatives, uncertainty and spans that the page shows."""
LEAST_SPAN = 0.02
"""Spans with a lower probability than this are not listed."""
DIGITS = 6


@dataclass(frozen=True)
class _Waiting:
    """A waiting request. loop : the event loop of the future; None if any thread may settle the future."""

    X: Sequence[Any]
    detail: str
    future: Any
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def n_tokens(self) -> int:
        return sum(map(_n_tokens, self.X))


Settled: TypeAlias = tuple[_Waiting, "list[dict[str, Any]] | Exception"]


def _n_tokens(x: Any) -> int:
    return len(x) if isinstance(x, list) else 1


def _in_parts(X: Sequence[Any]) -> list[list[Any]]:
    """The examples in order, in parts of at most ``AT_ONCE`` tokens, or of one longer example."""
    parts: list[list[Any]] = [[]]
    n = 0
    for x in X:
        if parts[-1] and n + _n_tokens(x) > AT_ONCE:
            parts.append([])
            n = 0
        parts[-1].append(x)
        n += _n_tokens(x)
    return parts


class Answerer:
    """Answers requests with ``tagger``, a fitted classifier or None, until ``close``. number : number of
    the fit that the tagger comes from."""

    def __init__(self, tagger: Any = None, number: int | None = None) -> None:
        self.tagger, self.number = tagger, number
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closed = False
        self._expected, self._all_here = 0, threading.Event()
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def replace(self, tagger: Any, number: int | None = None, try_on: Sequence[Any] = ()) -> None:
        """Lets this model answer from now on. It first answers about the sequences ``try_on``, while the
        earlier model is still in use: the first answer makes the draws, which later answers reuse."""
        list(answers_of(tagger, try_on, "page"))
        self.tagger, self.number = tagger, number

    def ask(self, X: Sequence[Any], detail: str = "probabilities") -> Future[list[dict[str, Any]]]:
        """A future with one answer per sequence, or with the InputError that this X alone would raise."""
        future: Future[list[dict[str, Any]]] = Future()
        self._put(_Waiting(X, detail, future))
        return future

    async def answers(self, X: Sequence[Any], detail: str = "probabilities") -> list[dict[str, Any]]:
        """As ``ask``, for use in an event loop, which is woken once for all of its requests in a batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[dict[str, Any]]] = loop.create_future()
        self._put(_Waiting(X, detail, future, loop))
        return await future

    def _put(self, waiting: _Waiting) -> None:
        if self._closed:
            _settle([(waiting, StructgpError("the service is ending"))])
        else:
            self._queue.put(waiting)
            if self._queue.qsize() >= self._expected:
                self._all_here.set()

    def close(self) -> None:
        """Answers the waiting requests, and ends."""
        self._closed = True
        self._queue.put(None)
        self._all_here.set()
        self._thread.join()

    def _work(self) -> None:
        rest: _Waiting | None = None
        crowd, seconds, ended = 1, 0.0, 0.0
        while True:
            first = rest if rest is not None else self._queue.get()
            linger = min(LINGER * seconds, LONGEST)
            if rest is None and time.perf_counter() - ended < linger:
                self._gather(crowd - 1, linger)
            began = time.perf_counter()
            if first is None:
                return
            batch, n, rest, ending = [first], first.n_tokens, None, False
            with suppress(queue.Empty):
                while n < AT_ONCE:
                    more = self._queue.get_nowait()
                    if more is None:
                        ending = True
                        break
                    if more.detail != first.detail or n + more.n_tokens > AT_ONCE:
                        rest = more
                        break
                    batch.append(more)
                    n += more.n_tokens
            crowd = len(batch) + self._queue.qsize()
            _settle(self._answered(batch))
            ended = time.perf_counter()
            seconds = ended - began
            if ending:
                return

    def _gather(self, crowd: int, seconds: float) -> None:
        """Waits until ``crowd`` requests are waiting, or no more join, or ``seconds`` have passed. Clients
        that were just answered often ask again at once, and two half batches take longer than a whole
        one."""
        before, until, self._expected = -1, time.perf_counter() + seconds, crowd
        self._all_here.clear()
        while before < (here := self._queue.qsize()) < crowd and not self._closed:
            left = until - time.perf_counter()
            if left <= 0 or self._all_here.wait(min(PAUSE, left)):
                break
            before = here
        self._expected = 0

    def _answered(self, batch: list[_Waiting]) -> list[Settled]:
        """The result for each request of a batch: its answers, or the error of its own sequences."""
        tagger, number = self.tagger, self.number
        try:
            parts = _in_parts([x for w in batch for x in w.X])
            found = iter([a for some in parts for a in answers_of(tagger, some, batch[0].detail, number)])
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], _of_the_whole(tagger, batch[0].X, error))]
            # Only one of the requests may be at fault, so each is answered by itself.
            return [told for waiting in batch for told in self._answered([waiting])]
        return [(waiting, [next(found) for _ in waiting.X]) for waiting in batch]


def _of_the_whole(tagger: Any, X: Sequence[Any], error: Exception) -> Exception:
    """The error that the request as a whole raises, if it raises one: it counts the sequences correctly,
    while an error about a part counts from the start of that part."""
    try:
        tagger.ask(X)
    except Exception as whole:
        return whole
    return error


def _settle(found: Sequence[Settled]) -> None:
    """Delivers the results of a batch, from any thread. Requests cancelled in the meantime are skipped."""
    by_loop: dict[Any, list[Settled]] = {}
    for told in found:
        by_loop.setdefault(told[0].loop, []).append(told)
    for loop, some in by_loop.items():
        if loop is None:
            _tell([told for told in some if told[0].future.set_running_or_notify_cancel()])
        else:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_tell, some)


def _tell(found: Sequence[Settled]) -> None:
    for waiting, told in found:
        if waiting.future.done():
            continue
        if isinstance(told, Exception):
            waiting.future.set_exception(told)
        else:
            waiting.future.set_result(told)


def answers_of(
    tagger: Any, X: Sequence[Any], detail: str, number: int | None = None
) -> Iterator[dict[str, Any]]:
    """One dict per sequence. detail : see ``DETAILS``. number : the value under 'model'."""
    if detail not in DETAILS:
        raise InputError("detail", f"{detail!r} is not known", f"use one of {', '.join(DETAILS[:3])}")
    asked = tagger.ask(X).keeping()
    labels = tagger.labels_of(asked)
    if detail == "labels":
        yield from ({"labels": shown} for shown in asked.shaped(labels))
        return
    marginals, log_probs = tagger.marginals_of(asked), log_probs_of(asked, labels)
    shown, on_page = asked.shaped(labels), detail == "page"
    uncertainty: Sequence[Any] = asked.token_uncertainty() if on_page else [()] * len(X)
    spans = asked.spans(LEAST_SPAN) if on_page and asked.model.spec.form == "sequence" else [[]] * len(X)
    for n, at in enumerate(marginals):
        value = log_probs[n]
        found: dict[str, Any] = {
            "labels": shown[n],
            "probability": None if value is None else _rounded(math.exp(min(0.0, value))),
            "probabilities": [_rounded(p[y]) for p, y in zip(at, labels[n], strict=True)],
        }
        if detail == "all":
            found["marginals"] = [{name: _rounded(p) for name, p in token.items()} for token in at]
        if on_page:
            ranked = [sorted(token.items(), key=lambda item: -item[1]) for token in at]
            found["alternatives"] = [[[name, _rounded(p)] for name, p in token[:9]] for token in ranked]
            found["uncertainty"] = [[_rounded(u) for u in token] for token in uncertainty[n]]
            found["spans"] = [[start, stop, name, _rounded(p)] for start, stop, name, p in spans[n]]
            found["model"] = number
        yield found


def log_probs_of(asked: Asked, labels: Sequence[Sequence[str]]) -> list[float | None]:
    """``asked.log_probs`` of predicted labels; for a chain, computed from the potentials that are kept."""
    import torch  # already imported if there is a model

    from structgp.answers import labellings

    if asked.links is not None:
        return asked.log_probs(labels)
    found: list[float | None] = [0.0] * len(labels)
    encoded = asked.model.labels.transform(labels)
    for batch, at in asked.potentials():
        y = torch.zeros(at.mask.shape, dtype=torch.int64, device=at.mask.device)
        places = batch.index.tolist()
        for b, i in enumerate(places):
            y[b, at.mask[b]] = torch.from_numpy(encoded[i]).to(y.device)
        for i, value in zip(places, labellings.log_prob(at, y).tolist(), strict=True):
            found[i] = value
    return found


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)
