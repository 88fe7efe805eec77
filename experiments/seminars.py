"""Seminar announcements: CRFsuite, the chain, and the chain with links between names.

    python -m experiments.seminars --data DIR [--fold K ...] [--method NAME ...] [--within] [--seed N]

DIR/structures/seminars.col has one token on each line (token, line number, label), and a blank line between
documents. There are five folds by document; all methods see the same features of tokens. ``--within``
splits the training documents of each fold once more, and scores on the held-out part: all choices are made
there. Figures are F1 of spans that are right in all respects, by field, over all folds together, and F1 of
tokens. 'missed' counts tokens of a field that are missed, per fold; 'reachable' counts those whose word is
found in the same field elsewhere in the document, which is all that links between equal words could
correct. 'ceiling' is F1 of spans if all of these were corrected. Rows go to results/seminars.jsonl.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.data import keep, run_command
from experiments.suites import data_folder
from structgp import Graph, Spec, StructuredGPClassifier, chain, edges, metrics
from structgp.data.sources.columns import read_columns
from structgp.evaluation.crf import LinearCRF

FIELDS = ("speaker", "location", "stime", "etime")
N_FOLDS, SEED = 5, 0
WINDOW, NEAR = 4, 2
"""Features of a token include the words up to WINDOW places from it, and the shapes of those up to NEAR
places from it."""

FEW = 3
"""Largest number of training documents, possibly with its own among them, in which a rare word occurs."""

CAPITALISED, NAMED = ("Xx", "XxXx"), ("Xx", "XxXx", "XX")
"""Shapes of words in names, and of words that are linked, which may repeat a name in capitals."""

MOST_MENTIONS = 5
"""Largest number of mentions of a name whose mentions are linked. In the TRAINING documents of fold 0,
names with more mentions are mostly those of people in long stories, such as 'Professor Brett'; the weak
evidence at each mention would add up to a speaker."""

MOST_NAMES = 12
"""Largest number of names, from the beginning of a document, that are linked with the announced name: the
cost of sums over labellings grows with their number."""

AMONG = ("the only name", "two names", "three names", "more names")
"""Kinds of links between different names, by the number of names in the document. Four documents in five
have a speaker, so that a name with weak evidence is often the speaker if there are few others. An only name
is linked with the first token, which is never a speaker, so that its table is a score of being the only
name. In three-fold cross-validation within the TRAINING documents of fold 0, F1 of speakers was 72.2
without links, 74.1 with one table for all numbers of names, 74.7 with a table each for two, three and more,
and 75.6 with one for the only name too."""

ELSEWHERE, OTHERS_ELSEWHERE = 0, 2
"""Largest number of other training documents in which a linked word occurs: for links between mentions of a
name, and for links between different names. Of the links between mentions in the TRAINING documents of fold
0 that touch a speaker, a fifth lead to a token that is no speaker if the word occurs in no other document,
and two fifths if it occurs in one or two others."""

ANNOUNCES, POSTED = ("who", "speaker"), "postedby"
"""First words of lines that name the speaker, and of lines that name the sender of the announcement. In the
TRAINING documents of fold 0, none of the 42 links between mentions that would touch the latter joins two
mentions of a speaker."""

C2_GRID = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Regularisers of CRFsuite, from which two-fold cross-validation within the training documents chooses.
Seven of them with five folds would take half an hour."""

_SHAPES = (
    ("Xx", r"[A-Z][a-z]+"),
    ("X", r"[A-Z]"),
    ("XX", r"[A-Z]{2,}"),
    ("XxXx", r"[A-Z]+[a-z]+[A-Z]+[a-z]*"),
    ("x", r"[a-z]+"),
    ("0:00", r"\d{1,2}:\d\d"),
    ("0", r"\d"),
    ("00", r"\d\d"),
    ("000", r"\d{3,}"),
    ("a0", r"[A-Za-z0-9]+"),
)
_EDGE = "-"  # stands for tokens beyond the ends of a document


def shape(word: str) -> str:
    """The kind of a word; punctuation stands for itself."""
    return next((name for name, pattern in _SHAPES if re.fullmatch(pattern, word)), word[:1])


def features(words: Sequence[str], lines: Sequence[str]) -> list[dict[str, str]]:
    """The features of the tokens of one document, for all methods: the word, its prefix, suffix and shape,
    the words and shapes around it, and its position in its line."""
    T, lower, shapes = len(words), [w.lower() for w in words], [shape(w) for w in words]
    first: list[int] = []  # first token of the line that each token is in
    for t in range(T):
        first.append(first[-1] if t and lines[t] == lines[t - 1] else t)
    openings = sorted(set(first))
    number = {t: n for n, t in enumerate(openings)}

    def at(values: Sequence[str], t: int) -> str:
        return values[t] if 0 <= t < T else _EDGE

    found = []
    for t in range(T):
        n = number[first[t]]
        end = openings[n + 1] if n + 1 < len(openings) else T
        token = {f"word{d:+d}": at(lower, t + d) for d in range(-WINDOW, WINDOW + 1) if d}
        token |= {f"shape{d:+d}": at(shapes, t + d) for d in range(-NEAR, NEAR + 1) if d}
        token |= {
            "word": words[t],
            "lower": lower[t],
            "shape": shapes[t],
            "prefix": lower[t][:3],
            "suffix": lower[t][-3:],
            "shapes before": f"{at(shapes, t - 1)} {shapes[t]}",
            "shapes after": f"{shapes[t]} {at(shapes, t + 1)}",
            "words before": f"{at(lower, t - 2)} {at(lower, t - 1)}",
            "words after": f"{at(lower, t + 1)} {at(lower, t + 2)}",
            "opening": lower[first[t]],
            "opening before": at(lower, openings[n - 1]) if n else _EDGE,
            "place": str(min(t - first[t], 3)),
            "place from end": str(min(end - 1 - t, 3)),
            "length of line": str(min(end - first[t], 8)),
            "line": str(min(n, 8)),
        }
        found.append(token)
    return found


def rare(X: Sequence[Sequence[dict[str, str]]]) -> Callable[[str], bool]:
    """A function that tells whether a word is in at most ``FEW`` of these documents."""
    count = Counter(word for x in X for word in {token["word"] for token in x})
    return lambda word: count[word] <= FEW


def ends_a_name(token: dict[str, str]) -> bool:
    """True if no capitalised word follows on the same line."""
    return token["shape+1"] not in CAPITALISED or token["place from end"] == "0"


def marked(X: Sequence[Sequence[dict[str, str]]], is_rare: Callable[[str], bool]) -> list[Any]:
    """The documents with an additional feature, 'kind': the shape of rare words that are not followed by a
    capitalised word on their line, and '' for others."""

    def kind(token: dict[str, str]) -> str:
        return token["shape"] if ends_a_name(token) and is_rare(token["word"]) else ""

    return [[token | {"kind": kind(token)} for token in x] for x in X]


def in_name(token: dict[str, str]) -> bool:
    """True if a capitalised word, an initial or a full stop precedes the token on its line."""
    return token["place"] != "0" and token["shape-1"] in (*NAMED, "X", ".")


@dataclass(frozen=True)
class Links:
    """Links between names, which are identified by their last words. count : number of training documents
    in which a word occurs, in lower case."""

    count: Counter[str]

    @staticmethod
    def of(X: Sequence[Sequence[dict[str, str]]]) -> Links:
        """Counts the words of training documents."""
        return Links(Counter(word for x in X for word in {token["lower"] for token in x}))

    def names(self, x: Sequence[dict[str, str]], most: int, own: int) -> set[str]:
        """Words that end a name somewhere in the document, and occur in at most ``most`` other training
        documents. own : 1 if the document itself is a training document, else 0."""
        found = {t["lower"] for t in x if t["shape"] in CAPITALISED and ends_a_name(t)}
        return {word for word in found if self.count[word] - own <= most}

    def mentions(self, x: Sequence[dict[str, str]], own: int = 0) -> list[tuple[int, int]]:
        """Pairs of successive mentions of a name, in capitals or not, whatever follows them."""
        names = self.names(x, ELSEWHERE, own)
        places: dict[str, list[int]] = {}
        for n, token in enumerate(x):
            if token["lower"] in names and token["shape"] in NAMED and token["opening"] != POSTED:
                places.setdefault(token["lower"], []).append(n)
        linked = (found for found in places.values() if len(found) <= MOST_MENTIONS)
        return sorted(pair for found in linked for pair in pairwise(found))

    def others(self, x: Sequence[dict[str, str]], own: int = 0) -> dict[str, list[tuple[int, int]]]:
        """Links between different names, by their kind in ``AMONG``: from the first announced name, or else
        from the first name of all, to the first mention of each other name. Only mentions that are
        ``in_name`` count."""
        names, places = self.names(x, OTHERS_ELSEWHERE, own), {}
        for n, token in enumerate(x):
            is_last = token["shape"] in CAPITALISED and ends_a_name(token)
            if is_last and in_name(token) and token["lower"] in names:
                places.setdefault(token["lower"], []).append(n)
        found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in AMONG}
        firsts = [mentions[0] for mentions in places.values()]
        announced = [n for mentions in places.values() for n in mentions if x[n]["opening"] in ANNOUNCES]
        if firsts:
            hub = (announced or firsts)[0]
            rest = [n for n in firsts[:MOST_NAMES] if x[n]["lower"] != x[hub]["lower"]] or [0]
            kind = AMONG[min(len(firsts), len(AMONG)) - 1]
            found[kind] = sorted((min(hub, n), max(hub, n)) for n in rest)
        return found

    def graph(self, x: Sequence[dict[str, str]], own: int = 0) -> Graph:
        """The document with all links."""
        return Graph(x, edges={"mentions": self.mentions(x, own)} | self.others(x, own))


def load(data: str | None) -> tuple[list[list[dict[str, str]]], list[list[str]]]:
    """The features and the labels of the tokens of all documents."""
    file = data_folder(data) / "structures" / "seminars.col"
    rows, y = read_columns(file, encoding="utf-8", name=str(file)).split_labels()
    return [features([r[0] for r in doc], [r[1] for r in doc]) for doc in rows], y


def folds(n: int, seed: int = SEED) -> list[tuple[np.ndarray, np.ndarray]]:
    """(training documents, test documents) of each fold."""
    parts = np.array_split(np.random.default_rng(seed).permutation(n), N_FOLDS)
    return [(np.concatenate(parts[:k] + parts[k + 1 :]), parts[k]) for k in range(N_FOLDS)]


def within(train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits the training documents once more, into training and held-out documents."""
    return train[len(train) // 5 :], train[: len(train) // 5]


def linked() -> Spec:
    """The chain with links between mentions of a name, and between different names."""
    spec = chain() + edges("mentions", symmetric=True)
    for kind in AMONG:
        spec += edges(kind, symmetric=kind != "the only name")
    return spec


METHODS: dict[str, Callable[[], Any]] = {
    "CRFsuite": lambda: LinearCRF(C2_GRID, n_folds=2),
    "chain": StructuredGPClassifier,
    "skip-chain": lambda: StructuredGPClassifier(structure=linked()),
}


def compare(method: Any, X: list[Any], y: list[list[str]], train: Any, test: Any) -> dict[str, Any]:
    """Right, guessed and true spans of every field, token NLL and times, for one fold."""
    began, cpu = time.perf_counter(), time.process_time()
    X_train, X_test = [X[i] for i in train], [X[i] for i in test]
    is_rare, links = rare(X_train), Links.of(X_train)

    def seen(X: list[Any], own: int = 0) -> list[Any]:
        found = marked(X, is_rare)
        is_linked = getattr(method, "structure", None) == linked()
        return [links.graph(x, own) for x in found] if is_linked else found

    method.fit(seen(X_train, own=1), [y[i] for i in train])
    fit, fit_cpu = time.perf_counter() - began, time.process_time() - cpu
    X_test, y_test, began = seen(X_test), [y[i] for i in test], time.perf_counter()
    guessed = method.predict(X_test)
    answer = time.perf_counter() - began
    words = [[token["lower"] for token in x] for x in (X[i] for i in test)]
    numbers, mended = missed(words, y_test, guessed)
    return {
        "counts": counts(y_test, guessed),
        "tokens": token_counts(y_test, guessed),
        "missed": numbers,
        "ceiling": counts(y_test, mended),
        "nll": metrics.token_nll(y_test, method.predict_marginals(X_test)),
        "seconds": fit,
        "cpu_seconds": fit_cpu,
        "answer_seconds": answer,
    }


def counts(y: Sequence[Sequence[str]], guessed: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """{field: [right, guessed, true spans]}."""
    found = {name: [0, 0, 0] for name in FIELDS}
    for truth, labels in zip(y, guessed, strict=True):
        spans = [set(metrics.chunks(each)) for each in (labels, truth)]
        for n, some in enumerate((spans[0] & spans[1], *spans)):
            for _, _, kind in some:
                found[kind][n] += 1
    return found


def fields(labels: Sequence[str]) -> list[str]:
    """The field of each token, '' outside all fields."""
    return [label.partition("-")[2] for label in labels]


def token_counts(y: Sequence[Sequence[str]], guessed: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """{field: [right, guessed, true tokens]}."""
    found = {name: [0, 0, 0] for name in FIELDS}
    for truth, labels in zip(y, guessed, strict=True):
        for true, guess in zip(fields(truth), fields(labels), strict=True):
            for n, name in enumerate((true if true == guess else "", guess, true)):
                if name:
                    found[name][n] += 1
    return found


def missed(
    words: Sequence[Sequence[str]], y: Sequence[Sequence[str]], guessed: Sequence[Sequence[str]]
) -> tuple[dict[str, list[int]], list[list[str]]]:
    """{field: [number of missed tokens, number of those whose word is found in the field elsewhere in the
    document]}; and the labels with the latter corrected."""
    found, mended = {name: [0, 0] for name in FIELDS}, []
    for x, truth, labels in zip(words, y, guessed, strict=True):
        rows = list(zip(x, fields(truth), fields(labels), strict=True))
        right = {(word, true) for word, true, guess in rows if true == guess}
        mended.append(list(labels))
        for t, (word, true, guess) in enumerate(rows):
            if true and guess != true:
                found[true][0] += 1
                if (word, true) in right:
                    found[true][1] += 1
                    mended[-1][t] = truth[t]
    return found, mended


def f1(found: Sequence[dict[str, list[int]]]) -> dict[str, float]:
    """F1 in percent of every field and of all spans, over several folds together."""
    total = {name: np.sum([each[name] for each in found], axis=0) for name in FIELDS}
    total["overall"] = np.sum(list(total.values()), axis=0)
    return {name: 200 * float(r) / max(1, int(g + t)) for name, (r, g, t) in total.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.seminars",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder with structures/seminars.col (default: STRUCTGP_DATA)")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(N_FOLDS), default=range(N_FOLDS))
    parser.add_argument("--within", action="store_true", help="on a part of the training documents")
    parser.add_argument("--seed", type=int, default=SEED, help="of the division into folds")
    options = parser.parse_args(words)
    X, y = load(options.data)
    print(f"{'method':<12}" + "".join(f"{name:>10}" for name in (*FIELDS, "overall", "NLL", "fit s")))
    for name in options.method:
        rows = []
        for k in options.fold:
            train, test = folds(len(X), options.seed)[k]
            parts = within(train) if options.within else (train, test)
            row = {"method": name, "fold": k, "within": options.within, "seed": options.seed}
            rows.append(row | compare(METHODS[name](), X, y, *parts))
            keep("seminars", rows[-1])
            _tell(f"{name} {k}", rows[-1:])
        _tell(name, rows)


def _tell(name: str, rows: list[dict[str, Any]]) -> None:
    nll, seconds = np.mean([row["nll"] for row in rows]), max(row["seconds"] for row in rows)
    lines = {name: "counts", "  tokens": "tokens", "  ceiling": "ceiling"}
    for title, kind in lines.items():
        scores = f1([row[kind] for row in rows])
        told = "".join(f"{scores[field]:>10.1f}" for field in (*FIELDS, "overall"))
        print(f"{title:<12}{told}" + (f"{nll:>10.4f}{seconds:>10.0f}" if title == name else ""))
    for n, title in enumerate(("  missed", "  reachable")):
        numbers = (np.mean([row["missed"][field][n] for row in rows]) for field in FIELDS)
        print(f"{title:<12}" + "".join(f"{number:>10.1f}" for number in numbers), flush=True)


if __name__ == "__main__":
    run_command(main)
