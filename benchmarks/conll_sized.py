"""Training on a corpus of the size of CoNLL-2000, against CRFsuite's L-BFGS in the same run.

    python -m benchmarks.conll_sized [--sentences 9000] [--tests 2000] [--c2 1.0] [--form dicts]
                                     [--device cuda]

The text is generated: a chain of 22 chunk labels, each with its own part-of-speech tags, each of these with
its own words, Zipf-like; some tokens have a wrong tag. Features are those of the usual chunking template,
19 lines over words and tags. CRFsuite trains with its defaults (only features that occur have weights) and
one regulariser; choosing it by cross-validation would multiply the time. Both get the same features: lists
of the templates' values ('columns'), dicts of them, or a scipy-sparse matrix for each sentence; CRFsuite
gets lists of strings, its fastest input. On a GPU, a small fit runs first, which is not timed: the first
fit in a process loads CUDA and compiles kernels.

Appends a row to benchmarks/results/conll_sized.jsonl: wall-clock and CPU seconds of both, their ratios,
test NLL and error, and the peak memory of our fit in MiB, including data and libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pycrfsuite
import scipy.sparse
import torch

from structgp import StructuredGPClassifier, metrics
from structgp.data.sources.templates import Template

RESULTS = Path(__file__).parent / "results"
N_LABELS, N_TAGS, N_WORDS = 22, 45, 20_000
MEAN_LENGTH = 23.5
WRONG_TAGS = 0.03
TEMPLATE = "\n".join(
    [f"U0{i}:%x[{i - 2},0]" for i in range(5)]
    + ["U05:%x[-1,0]/%x[0,0]", "U06:%x[0,0]/%x[1,0]"]
    + [f"U1{i}:%x[{i - 2},1]" for i in range(5)]
    + [f"U1{i + 5}:%x[{i - 2},1]/%x[{i - 1},1]" for i in range(4)]
    + [f"U2{i}:%x[{i - 2},1]/%x[{i - 1},1]/%x[{i},1]" for i in range(3)]
    + ["B"]
)


def corpus(n: int, seed: int) -> tuple[list[list[tuple[str, str]]], list[list[str]]]:
    """n sentences of (word, tag), and their labels."""
    rng = np.random.default_rng(0)  # for the language, which is always the same
    follows = rng.dirichlet(np.full(N_LABELS, 0.15), N_LABELS)
    tags = rng.dirichlet(np.full(N_TAGS, 0.08), N_LABELS)
    zipf = 1 / (5.0 + np.arange(N_WORDS))
    own = rng.integers(0, N_TAGS, N_WORDS)  # the tag of each word
    words = [np.flatnonzero(own == k) for k in range(N_TAGS)]
    chances = [zipf[w] / zipf[w].sum() for w in words]
    rng = np.random.default_rng([seed, 1])  # for the sentences
    X, y = [], []
    for length in 1 + rng.poisson(MEAN_LENGTH - 1, n):
        label, sentence, labels = int(rng.integers(N_LABELS)), [], []
        for _ in range(length):
            label = int(rng.choice(N_LABELS, p=follows[label]))
            tag = int(rng.choice(N_TAGS, p=tags[label]))
            word = int(rng.choice(words[tag], p=chances[tag]))
            told = tag if rng.random() > WRONG_TAGS else int(rng.integers(N_TAGS))
            sentence.append((f"w{word}", f"T{told}"))
            labels.append(f"L{label}")
        X.append(sentence)
        y.append(labels)
    return X, y


def inputs(form: str, sentences: list[list[tuple[str, str]]]) -> list[Any]:
    """The sentences in the form for structgp. A matrix has a column for every feature of any sentence."""
    template = Template.parse(TEMPLATE)
    if form == "columns":
        return [template.expand(x) for x in sentences]
    if form == "dicts":
        return [
            [{f"U{k:02}": value for k, value in enumerate(token)} for token in template.expand(x)]
            for x in sentences
        ]
    named = [template.crfsuite_attributes(x) for x in sentences]
    names = dict.fromkeys(name for x in named for token in x for name in token)
    place = {name: k for k, name in enumerate(names)}
    found = []
    for x in named:
        columns = [place[name] for token in x for name in token]
        bounds = np.cumsum([0, *map(len, x)])
        entries = np.ones(len(columns)), columns, bounds
        found.append(scipy.sparse.csr_array(entries, shape=(len(x), len(place))))
    return found


class Clock:
    """Wall-clock and CPU seconds since it was created."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        seconds, cpu = self.began
        found = {"seconds": time.perf_counter() - seconds, "cpu_seconds": time.process_time() - cpu}
        return {name: round(value, 2) for name, value in found.items()}


def crfsuite(
    X: list[list[list[str]]], y: list[list[str]], X_test: list[list[list[str]]], c2: float
) -> tuple[dict[str, float], list[list[dict[str, float]]]]:
    """Trains CRFsuite; returns the seconds of training, and the marginals of the test sentences."""
    trainer = pycrfsuite.Trainer(algorithm="lbfgs", verbose=False)
    trainer.set_params({"c1": 0.0, "c2": c2})
    clock = Clock()
    for x, labels in zip(X, y, strict=True):
        trainer.append(x, labels)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "crf")
        trainer.train(path)
        seconds = clock.read()
        tagger = pycrfsuite.Tagger()
        tagger.open(path)
    marginals = []
    for x in X_test:
        tagger.set(x)
        marginals.append([{k: tagger.marginal(k, t) for k in tagger.labels()} for t in range(len(x))])
    return seconds, marginals


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=9000)
    parser.add_argument("--tests", type=int, default=2000)
    parser.add_argument("--c2", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", default="columns", choices=["columns", "dicts", "sparse"])
    parser.add_argument("--only", choices=["ours", "crfsuite"])
    parser.add_argument("--device", default="cpu", help="of our fit")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    template = Template.parse(TEMPLATE)
    X, y = corpus(options.sentences, 1)
    X_test, y_test = corpus(options.tests, 2)
    tokens = sum(map(len, X))
    row: dict[str, Any] = {"sentences": len(X), "tokens": tokens, "threads": options.threads}
    row |= {"form": options.form, "device": options.device}
    if options.only != "crfsuite":
        given = inputs(options.form, X + X_test)
        features = "columns" if options.form == "columns" else "auto"
        if options.device != "cpu":
            StructuredGPClassifier(features=features, device=options.device).fit(given[:2500], y[:2500])
        clock = Clock()
        model = StructuredGPClassifier(features=features, device=options.device).fit(given[: len(X)], y)
        row["ours"] = clock.read() | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
        log = model.training_log_
        row["ours"] |= {k: log[k] for k in ("optimizer", "stopped", "n_inducing", "evaluations")}
        row["ours"] |= {"steps": len(log["steps"])}
        row["ours"] |= _scores(y_test, model.predict_marginals(given[len(X) :]))
        print(row["ours"], flush=True)
    if options.only != "ours":
        named, named_test = ([template.crfsuite_attributes(x) for x in part] for part in (X, X_test))
        seconds, marginals = crfsuite(named, y, named_test, options.c2)
        row["crfsuite"] = seconds | {"c2": options.c2} | _scores(y_test, marginals)
        print(row["crfsuite"], flush=True)
    if options.only is None:
        row["ratio"] = row["ours"]["seconds"] / row["crfsuite"]["seconds"]
        row["cpu_ratio"] = row["ours"]["cpu_seconds"] / row["crfsuite"]["cpu_seconds"]
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / "conll_sized.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        ratios = f"{row['ratio']:.2f} of CRFsuite's time, {row['cpu_ratio']:.2f} of its CPU time"
        print(f"{tokens} tokens: ours takes {ratios}")
    return row


def _scores(y: list[list[str]], marginals: list[list[dict[str, float]]]) -> dict[str, float]:
    best = [[max(p, key=p.__getitem__) for p in x] for x in marginals]
    return {
        "nll": round(metrics.token_nll(y, marginals), 4),
        "error": round(100 * metrics.token_error(y, best), 3),
    }


if __name__ == "__main__":
    main()
