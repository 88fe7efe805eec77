"""Parts of speech and chunks from words alone: both at once in two layers, or one after the other.

    python -m experiments.two_layers --data DIR [--fold K ...] [--method NAME ...] [--within]

The data are the paper's five folds of the chunking columns, without the second column (parts of speech) as
a feature. 'words' finds chunks from the words alone; 'cascade' finds parts of speech first and gives them
to the chunker as features, in training as predicted by models that have not seen the sentence; 'layers' is
one model of both labels. Figures are those of chunks. With --within, test data are left out: each third of
the training sentences of a fold is predicted from the other two. Rows go to results/two_layers.jsonl.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from experiments.data import keep, run_command
from experiments.suites import columns_suite
from structgp import StructuredGPClassifier, chain, layers, metrics

N_PARTS = 5
"""Number of folds of the training sentences for the cascade: the parts of speech of each are predicted by a
model of the others."""

_EDGE = "-"

Tokens = list[dict[str, str]]
Labels = list[list[str]]


def shape(word: str) -> str:
    """The word with each run of letters or digits replaced by its kind: 'U.S.' is 'X.X.', '1,500' is
    '0,0'."""
    for pattern, mark in ((r"[A-Z]+", "X"), (r"[a-z]+", "x"), (r"\d+", "0")):
        word = re.sub(pattern, mark, word)
    return word


def features(words: Sequence[str]) -> Tokens:
    """The features of the words of a sentence, for all methods."""
    lower = [_EDGE, _EDGE, *(w.lower() for w in words), _EDGE, _EDGE]
    shapes = [_EDGE, *map(shape, words), _EDGE]
    found = []
    for t, word in enumerate(words):
        token = {f"word{d:+d}": lower[t + 2 + d] for d in (-2, -1, 1, 2)}
        token |= {f"end{d:+d}": lower[t + 2 + d][-2:] for d in (-1, 1)}
        token |= {f"shape{d:+d}": shapes[t + 1 + d] for d in (-1, 1)}
        token |= {f"end {n}": word.lower()[-n:] for n in (1, 2, 3)}
        token |= {"word": word.lower(), "shape": shape(word), "begin": word.lower()[:2]}
        found.append(token)
    return found


def with_tags(X: Sequence[Tokens], tags: Sequence[Sequence[str]]) -> list[Tokens]:
    """Adds features with the parts of speech around each token, singly and in pairs."""
    found = []
    for x, row in zip(X, tags, strict=True):
        padded = [_EDGE, _EDGE, *row, _EDGE, _EDGE]
        sentence = []
        for t, token in enumerate(x):
            near = {f"tag{d:+d}": padded[t + 2 + d] for d in range(-2, 3)}
            pairs = {f"tags{d:+d}": f"{padded[t + 2 + d]} {padded[t + 3 + d]}" for d in (-1, 0)}
            sentence.append(token | near | pairs)
        found.append(sentence)
    return found


def chunker() -> StructuredGPClassifier:
    return StructuredGPClassifier(decode="accuracy")


class Words:
    """Chunks from words alone."""

    def fit(self, X: list[Tokens], tags: Labels, y: Labels) -> Words:
        self.model = chunker().fit(X, y)
        return self

    def marginals(self, X: list[Tokens]) -> Any:
        return self.model.predict_marginals(X)


def tagged_without(X: list[Tokens], tags: Labels, part: Sequence[int]) -> Labels:
    """Parts of speech of the sentences ``part``, predicted by a model that has not seen them."""
    rest = [i for i in range(len(X)) if i not in set(part)]
    tagger = chunker().fit([X[i] for i in rest], [tags[i] for i in rest])
    return [list(row) for row in tagger.predict([X[i] for i in part])]


class Cascade:
    """Parts of speech first, then chunks with these as features. Taggers are fitted in parallel."""

    def fit(self, X: list[Tokens], tags: Labels, y: Labels) -> Cascade:
        order = np.random.default_rng(0).permutation(len(X))
        parts = [part.tolist() for part in np.array_split(order, min(N_PARTS, len(X)))]
        jobs = [delayed(tagged_without)(X, tags, part) for part in parts]
        guessed: list[Any] = [None] * len(X)
        with Parallel(n_jobs=-1) as parallel:
            for part, rows in zip(parts, parallel(jobs), strict=True):
                for i, row in zip(part, rows, strict=True):
                    guessed[i] = row
        self.tagger = chunker().fit(X, tags)
        self.model = chunker().fit(with_tags(X, guessed), y)
        return self

    def marginals(self, X: list[Tokens]) -> Any:
        return self.model.predict_marginals(with_tags(X, self.tagger.predict(X)))


class Layers:
    """Both labels in one model."""

    def __init__(self, program: str = "auto", ties: Sequence[int] = (0,)) -> None:
        self.spec = layers(pos=chain(), chunk=chain(), ties=ties).using(program)

    def fit(self, X: list[Tokens], tags: Labels, y: Labels) -> Layers:
        both: Any = [{"pos": a, "chunk": b} for a, b in zip(tags, y, strict=True)]
        self.model = StructuredGPClassifier(structure=self.spec, decode="accuracy").fit(X, both)
        return self

    def marginals(self, X: list[Tokens]) -> Any:
        found: Any = self.model.predict_marginals(X)
        return [each["chunk"] for each in found]


METHODS: dict[str, Callable[[], Any]] = {
    "words": Words,
    "cascade": Cascade,
    "layers": Layers,
    "layers by the bound": lambda: Layers("reweighted"),
    "layers with more ties": lambda: Layers(ties=(0, 1)),
}


def load(data: str | None) -> tuple[list[Tokens], Labels, Labels, Any]:
    """Features, parts of speech and chunks of all sentences, and the folds."""
    suite = columns_suite("chunking", data)
    X = [features([row[0] for row in rows]) for rows in suite.X]
    return X, [[row[1] for row in rows] for rows in suite.X], suite.y, suite.folds


def thirds(train: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """For each third of the sentences, drawn at random: the other two, and this one."""
    parts = np.array_split(np.random.default_rng(0).permutation(train), 3)
    return [(np.setdiff1d(train, part).tolist(), sorted(part.tolist())) for part in parts]


def run(
    method: Any, X: list[Tokens], tags: Labels, y: Labels, train: Sequence[int], test: Sequence[int]
) -> dict[str, float]:
    """Chunk error in percent, token NLL and times of one fold."""
    began, cpu = time.perf_counter(), time.process_time()
    method.fit(*([items[i] for i in train] for items in (X, tags, y)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    marginals, truth = method.marginals([X[i] for i in test]), [y[i] for i in test]
    best = [[max(p, key=p.__getitem__) for p in tokens] for tokens in marginals]
    error, nll = 100 * metrics.token_error(truth, best), metrics.token_nll(truth, marginals)
    return {"error": error, "nll": nll, "seconds": seconds, "cpu_seconds": cpu}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.two_layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["words", "cascade", "layers"])
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), default=range(5))
    parser.add_argument("--within", action="store_true", help="predict thirds of the training sentences")
    options = parser.parse_args(words)
    X, tags, y, folds = load(options.data)
    print(f"{'method':<26}{'error %':>10}{'NLL':>10}{'fit s':>10}{'CPU s':>10}")
    for name in options.method:
        rows = []
        for k in options.fold:
            for n, parts in enumerate(thirds(folds[k][0]) if options.within else [folds[k]]):
                about = {"method": name, "fold": k} | ({"third": n} if options.within else {})
                rows.append(about | run(METHODS[name](), X, tags, y, *parts))
                keep("two_layers", rows[-1])
                _tell(f"{name} {k}", rows[-1:])
        _tell(name, rows)


def _tell(name: str, rows: list[dict[str, Any]]) -> None:
    error, nll, seconds, cpu = (
        np.mean([r[k] for r in rows]) for k in ("error", "nll", "seconds", "cpu_seconds")
    )
    print(f"{name:<26}{error:>10.2f}{nll:>10.4f}{seconds:>10.0f}{cpu:>10.0f}", flush=True)


if __name__ == "__main__":
    run_command(main)
