"""Time to encode a token against the number of features that the encoder knows, by form of the input.

dicts    20 keys with a string each             columns  20 strings, position j is template j
bags     20 strings, a set of attributes        sparse   scipy's matrices with 20 entries per row
bare     the strings of 'columns' looked up in Python dicts, and nothing else, for comparison
dense    rows of numbers, which have no vocabulary: by their width, in time per number

The same text is encoded however many features are known, so any growth is work on features that the text
does not contain. ``spread`` is a text whose values are drawn uniformly from all known ones: its time also
depends on memory access, since the values that it looks up no longer fit into a cache. Figures are CPU
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.clock import take_turns
from benchmarks.record import Options, Row, log_plot, table
from structgp.data.encode import FeatureEncoder

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK = (100, 1_000)
WIDTHS = (10, 100, 1_000)
QUICK_WIDTHS = (10, 100)
ACTIVE = 20
"""Number of features of a token."""
LENGTH = 25
"""Number of tokens in a sequence."""
FORMS = ("dicts", "columns", "bags", "sparse", "bare")


def run(options: Options) -> Iterator[Row]:
    n, rounds = (4, 2) if options.quick else (400, 15)
    sizes, widths = (QUICK, QUICK_WIDTHS) if options.quick else (SIZES, WIDTHS)
    for form in FORMS:
        text = "columns" if form in ("bags", "bare") else form
        encoders = {size: _encoder(form, known(text, size)) for size in sizes}
        for what in ("same", "spread"):
            if what == "same" and form != "sparse":  # sparse matrices must be as wide as in training
                texts = dict.fromkeys(sizes, drawn(text, sizes[0], n, among=sizes[0]))
            else:
                among = {size: size if what == "spread" else sizes[0] for size in sizes}
                texts = {size: drawn(text, size, n, among[size]) for size in sizes}
            calls = {str(size): lambda e=encoders[size], X=texts[size]: e(X) for size in sizes}
            times = take_turns(calls, rounds=rounds)
            for size in sizes:
                seconds = times[str(size)].cpu_seconds / (n * LENGTH)
                over = times[str(size)].cpu_over(times[str(sizes[0])])
                yield {"form": form, "text": what, "size": size, "seconds": seconds, "over_smallest": over}
    for width in widths:
        X = [np.random.default_rng(0).normal(size=(LENGTH, width)) for _ in range(n)]
        encoder = FeatureEncoder().fit(X[:1])
        call = {"dense": lambda e=encoder, X=X: e.transform(X)}
        seconds = take_turns(call, rounds=rounds)["dense"].cpu_seconds / (n * LENGTH)
        yield {"form": "dense", "text": "same", "size": width, "seconds": seconds, "over_smallest": None}


def _encoder(form: str, X: list[Any]) -> Callable[[list[Any]], Any]:
    """The function that is timed, an encoder that knows the features of X."""
    if form != "bare":
        features = {"columns": "columns", "bags": "bag"}.get(form, "auto")
        return FeatureEncoder(features=features).fit(X).transform
    places: list[dict[str, int]] = [{} for _ in range(ACTIVE)]
    for x in X:
        for token in x:
            for place, value in zip(places, token, strict=True):
                place.setdefault(value, len(place))
    return lambda text: [[[p[v] for p, v in zip(places, token, strict=True)] for token in x] for x in text]


def known(form: str, size: int) -> list[Any]:
    """Sequences with ``size`` different features in all: token i has value i everywhere."""
    values = np.tile(np.arange(size // ACTIVE)[:, None], ACTIVE)
    return [_sequence(form, values[i : i + LENGTH], size) for i in range(0, len(values), LENGTH)]


def drawn(form: str, size: int, n: int, among: int) -> list[Any]:
    """n sequences with values drawn from the first ``among`` of ``size`` features."""
    values = np.random.default_rng(1).integers(among // ACTIVE, size=(n, LENGTH, ACTIVE))
    return [_sequence(form, each, size) for each in values]


def _sequence(form: str, values: np.ndarray, size: int) -> Any:
    """One sequence in this form. values : (T, ACTIVE), the value of each template, below size // ACTIVE."""
    if form == "dicts":
        return [{f"key{p}": f"{p}={v}" for p, v in enumerate(row)} for row in values.tolist()]
    if form == "columns":
        return [[f"{p}={v}" for p, v in enumerate(row)] for row in values.tolist()]
    columns = values + np.arange(ACTIVE) * (size // ACTIVE)
    rows = np.repeat(np.arange(len(values)), ACTIVE)
    ones = np.ones(columns.size)
    return scipy.sparse.csr_array((ones, (rows, columns.ravel())), shape=(len(values), size))


def tables(rows: list[Row]) -> str:
    """Tables of microseconds per token, with a column for each number of known features; dense rows by
    width."""
    sizes = sorted({row["size"] for row in rows if row["form"] != "dense"})
    lines = []
    for form in FORMS:
        for what in ("same", "spread"):
            own = {row["size"]: row for row in rows if (row["form"], row["text"]) == (form, what)}
            times = [1e6 * own[size]["seconds"] for size in sizes]
            lines.append([form, what, *times, own[sizes[-1]]["over_smallest"]])
    text = table(["", "text", *(f"{size:,}, µs" for size in sizes), "last / first"], lines)
    dense = [row for row in rows if row["form"] == "dense"]
    lines = [[row["size"], 1e6 * row["seconds"], 1e9 * row["seconds"] / row["size"]] for row in dense]
    return text + "\n" + table(["dense, numbers per token", "µs per token", "ns per number"], lines)


def plots(rows: list[Row]) -> dict[str, str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["text"] == "same" and row["form"] != "dense":
            lines.setdefault(row["form"], []).append((row["size"], row["seconds"]))
    return {"encoding": log_plot(lines, "known features", "seconds", "Encoding a token")}
