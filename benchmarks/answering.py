"""Tokens that a chunker answers per second, in bulk and sentence by sentence, beside CRFsuite in the same
run.

    python -m benchmarks.answering [--sentences 150] [--tests 300] [--forms dicts sparse]

The corpus is that of ``conll_sized``. Both get the same features: dicts, one key per template; or rows of a
scipy-sparse matrix, which CRFsuite cannot read, so it gets lists of the names of their columns, its fastest
input. The time includes converting the input, and building the lists and dicts that are returned. CRFsuite
trains with one regulariser and stops after 30 steps: its speed does not depend on the weights. Ratios are
of CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pycrfsuite
import scipy.sparse
import torch

from benchmarks.clock import Times, take_turns
from benchmarks.conll_sized import TEMPLATE, corpus
from benchmarks.record import Options, Row, keep, log_plot, table
from structgp import StructuredGPClassifier, metrics
from structgp.data.sources.templates import Template

SENTENCES, TESTS, QUICK = 150, 300, (20, 30)
FORMS = ("dicts", "sparse")
CRF_STEPS = 30


class CRFTagger:
    """CRFsuite through python-crfsuite, with the two methods that are compared."""

    def __init__(self, X: list[Any], y: list[list[str]]) -> None:
        trainer = pycrfsuite.Trainer("lbfgs", verbose=False)
        trainer.set_params({"c1": 0.0, "c2": 1.0, "max_iterations": CRF_STEPS})
        for x, labels in zip(X, y, strict=True):
            trainer.append(x, labels)
        with tempfile.TemporaryDirectory() as folder:
            trainer.train(str(Path(folder) / "crf"))
            self.model = (Path(folder) / "crf").read_bytes()
        self.tagger = pycrfsuite.Tagger()
        self.tagger.open_inmemory(self.model)

    def predict(self, X: list[Any]) -> list[list[str]]:
        return [self.tagger.tag(x) for x in X]

    def predict_marginals(self, X: list[Any]) -> list[list[dict[str, float]]]:
        found, labels = [], self.tagger.labels()
        for x in X:
            self.tagger.set(x)
            found.append([{k: self.tagger.marginal(k, t) for k in labels} for t in range(len(x))])
        return found


def inputs(form: str, sentences: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The sentences in the form for structgp, and in that for CRFsuite."""
    template = Template.parse(TEMPLATE)
    if form == "dicts":
        found = [
            [{f"U{k:02}": value for k, value in enumerate(token)} for token in template.expand(x)]
            for x in sentences
        ]
        return found, found
    named = [template.crfsuite_attributes(x) for x in sentences]
    place: dict[str, int] = {}
    for x in named:
        for token in x:
            for name in token:
                place.setdefault(name, len(place))
    return [matrix(x, place) for x in named], named


def matrix(x: Sequence[Sequence[str]], place: dict[str, int]) -> scipy.sparse.csr_array:
    columns = [place[name] for token in x for name in token]
    bounds = np.cumsum([0, *map(len, x)])
    return scipy.sparse.csr_array((np.ones(len(columns)), columns, bounds), shape=(len(x), len(place)))


def compare(form: str, n: int, n_tests: int, rounds: int) -> Iterator[Row]:
    """Yields a row for labels and a row for probabilities, in bulk and one sentence at a time."""
    X, y = corpus(n, 1)
    X_test, y_test = corpus(n_tests, 2)
    ours, theirs = inputs(form, X + X_test)
    model, crf = StructuredGPClassifier().fit(ours[:n], y), CRFTagger(theirs[:n], y)
    by_draws = StructuredGPClassifier(n_draws=128)
    by_draws.__dict__ |= {k: v for k, v in vars(model).items() if k.endswith("_")}
    ours, theirs, tokens = ours[n:], theirs[n:], sum(map(len, X_test))
    losses = {
        name: metrics.token_nll(y_test, made.predict_marginals(given))
        for name, made, given in (("auto", model, ours), ("draws", by_draws, ours), ("crf", crf, theirs))
    }
    common = {"form": form, "sentences": n, "tokens": tokens}
    common |= {f"nll_{name}": loss for name, loss in losses.items()}
    for what in ("predict", "predict_marginals"):
        calls = {
            "structgp": lambda what=what: getattr(model, what)(ours),
            "crf": lambda what=what: getattr(crf, what)(theirs),
            "128 draws": lambda what=what: getattr(by_draws, what)(ours[: n_tests // 10]),
            "one": lambda what=what: [getattr(model, what)([x]) for x in ours[:100]],
        }
        yield common | {"what": what} | _figures(take_turns(calls, rounds=rounds), tokens, X_test)


def _figures(times: dict[str, Times], tokens: int, tests: Sequence[Any]) -> Row:
    few = sum(map(len, tests[: len(tests) // 10]))
    return {
        "tokens_a_second": tokens / times["structgp"].cpu_seconds,
        "crf_tokens_a_second": tokens / times["crf"].cpu_seconds,
        "of_crf": 1 / times["structgp"].cpu_over(times["crf"]),
        "draws_tokens_a_second": few / times["128 draws"].cpu_seconds,
        "one_ms": 1000 * times["one"].cpu_seconds / min(100, len(tests)),
    }


def run(options: Options) -> Iterator[Row]:
    n, n_tests = QUICK if options.quick else (SENTENCES, TESTS)
    for form in FORMS:
        yield from compare(form, n, n_tests, rounds=2 if options.quick else 7)


def tables(rows: list[Row]) -> str:
    names = ("form", "sentences", "what", "tokens_a_second", "crf_tokens_a_second", "of_crf")
    names += ("draws_tokens_a_second", "one_ms", "nll_auto", "nll_draws", "nll_crf")
    header = ["", "trained on", "", "tokens/s", "CRFsuite's", "ratio", "128 draws'", "one sentence, ms"]
    header += ["NLL", "128 draws'", "CRFsuite's"]
    return table(header, [[row[name] for name in names] for row in rows])


def plots(rows: list[Row]) -> dict[str, str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name in ("tokens_a_second", "crf_tokens_a_second"):
            who = "CRFsuite" if name.startswith("crf") else "structgp"
            lines.setdefault(f"{who}, {row['what']}", []).append((row["sentences"], row[name]))
    return {"answering": log_plot(lines, "training sentences", "tokens per second", "Answers")}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--tests", type=int, default=TESTS)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    rows = []
    for form in given.forms:
        for row in compare(form, given.sentences, given.tests, rounds=7):
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    keep("answering", rows, Options(threads=given.threads))
    print(tables(rows))


if __name__ == "__main__":
    main()
