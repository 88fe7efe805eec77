"""Tokens tagged per second: the default model against CRFsuite's tagger, on the embedded corpus.

``mean`` plugs the posterior mean in, one pass of the chain, which is what the CRF does; ``draws`` averages
over 128 draws. CRFsuite gives labels and marginals in two passes each; both are asked for here.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.clock import take_turns
from benchmarks.record import Options, Row, log_plot, table
from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes
from structgp.evaluation.crf import LinearCRF

QUICK_LINES = 40


def run(options: Options) -> Iterator[Row]:
    corpus = recipes()
    X, y = [corpus.template.expand(x) for x in corpus.X_train], corpus.y_train
    lines = [corpus.template.expand(x) for x in corpus.X_test]
    if options.quick:
        X, y, lines = X[:QUICK_LINES], y[:QUICK_LINES], lines[:QUICK_LINES]
    models = {
        "structgp, draws": StructuredGPClassifier().fit(X, y),
        "structgp, mean": StructuredGPClassifier(n_draws=0).fit(X, y),
        "crf": LinearCRF(1.0).fit(X, y),
    }
    for copies in (1,) if options.quick else (1, 8):
        new = lines * copies
        tokens = sum(map(len, new))
        for what in ("predict", "predict_marginals"):
            calls = {
                name: lambda model=model, new=new, what=what: getattr(model, what)(new)
                for name, model in models.items()
            }
            times = take_turns(calls, rounds=2 if options.quick else 5)
            for name, time in times.items():
                yield {
                    "what": what,
                    "tokens": tokens,
                    "model": name,
                    "seconds": time.seconds,
                    "tokens_a_second": tokens / time.seconds,
                    "over_crf": time.over(times["crf"]),
                }


def tables(rows: list[Row]) -> str:
    names = ("what", "tokens", "model", "tokens_a_second", "over_crf")
    header = ["", "tokens", "", "tokens per second", "time / crf's"]
    return table(header, [[row[name] for name in names] for row in rows])


def plots(rows: list[Row]) -> dict[str, str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["what"] == "predict_marginals":
            lines.setdefault(row["model"], []).append((row["tokens"], row["seconds"]))
    return {"predict": log_plot(lines, "tokens", "seconds", "Marginals of new lines")}
