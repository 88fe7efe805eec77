"""Default features of words compared with hand-written templates, by cross-validation in training halves.

    python -m experiments.default_features --data DIR [--task TASK ...] [--set NAME ...]

DIR has the folder ``columns``. A task's training half is the first half of its sequences (for the embedded
corpus, its training file); each of its ``FOLDS`` folds is tested in turn, after training on at most
``MOST`` sequences. Test halves are never read. 'template' is the task's own template, which also reads
parts of speech if the file has them; 'template, words' is that template without the lines that read more
than the word; 'default' is ``token_features``; 'with pairs' adds pairs of neighbouring words and shapes to
it, and 'without ...' leaves some of its keys out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from structgp import Prior, StructuredGPClassifier
from structgp.data import corpora, sources
from structgp.data.documents import token_features

TASKS = ("recipes", "basenp", "chunking", "japanesene", "segmentation")
FOLDS, MOST = 3, 150
WITHOUT = {
    "word": ("word",),
    "prefixes": ("prefix1", "prefix2", "prefix3"),
    "suffixes": ("suffix1", "suffix2", "suffix3", "suffix-1", "suffix+1"),
    "suffixes of neighbours": ("suffix-1", "suffix+1"),
    "second neighbours": ("lower-2", "lower+2"),
    "shapes": ("shape", "shape-1", "shape+1"),
}
Rows = list[tuple[str, ...]]


def training_half(task: str, data: Path) -> tuple[sources.Template, list[Rows], list[list[str]]]:
    """The task's template, and the columns and labels of its training half."""
    if task == "recipes":
        corpus = corpora.recipes()
        return corpus.template, corpus.X_train, corpus.y_train
    file = sources.read_columns(data / "columns" / f"{task}.data")
    template = sources.Template.read(data / "columns" / f"{task}.template")
    rows, labels = file.split_labels()
    half = len(rows) // 2
    return template, rows[:half], labels[:half]


def of_words(template: sources.Template, task: str) -> sources.Template:
    """The template's lines that read only the word; all lines for the embedded corpus, whose columns derive
    from the word."""
    if task == "recipes":
        return template
    kept = [line for line in template.text.splitlines() if line.startswith("B") or ",0]" in line]
    return sources.Template.parse(
        "\n".join(line for line in kept if ",1]" not in line and ",2]" not in line)
    )


def feature_sets(template: sources.Template, task: str) -> dict[str, Callable[[Rows], list[Any]]]:
    """Maps the name of each set to a function that makes features from the columns of a sequence."""

    def less(rows: Rows, keys: Sequence[str]) -> list[Any]:
        tokens = token_features([row[0] for row in rows])
        return [{k: v for k, v in token.items() if k not in keys} for token in tokens]

    words = of_words(template, task)
    found: dict[str, Callable[[Rows], list[Any]]] = {
        "template": template.expand,
        "template, words": words.expand,
    }
    found["default"] = lambda rows: less(rows, ())
    found["with pairs"] = lambda rows: _with_pairs(less(rows, ()))
    for name, keys in WITHOUT.items():
        found[f"without {name}"] = lambda rows, keys=keys: less(rows, keys)
    return found


def _with_pairs(tokens: list[Any]) -> list[Any]:
    """Adds pairs of each word, and of each shape, with its neighbours."""
    for token in tokens:
        for key in ("lower", "shape"):
            token[f"{key}-1,0"] = f"{token[f'{key}-1']} {token[key]}"
            token[f"{key}0,+1"] = f"{token[key]} {token[f'{key}+1']}"
    return tokens


def cross_validate(
    features: Callable[[Rows], list[Any]], rows: list[Rows], y: list[list[str]]
) -> list[float]:
    """Token error, span F1 and token NLL, averaged over folds."""
    X = [features(sequence) for sequence in rows]
    sums = [0.0] * 3
    for fold in range(FOLDS):
        train = [i for i in range(len(X)) if i % FOLDS != fold][:MOST]
        test = [i for i in range(len(X)) if i % FOLDS == fold]
        style = "columns" if isinstance(X[0][0], tuple) else "auto"
        model = StructuredGPClassifier(features=style, prior=Prior(data_weight=1.0))
        model.fit([X[i] for i in train], [y[i] for i in train])
        report = model.evaluate([X[i] for i in test], [y[i] for i in test])
        scores = report.token_error, report.span_f1, report.token_nll or float("nan")
        sums = [s + v / FOLDS for s, v in zip(sums, scores, strict=True)]
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--task", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--set", nargs="+", default=None)
    given = parser.parse_args()
    print(f"{'task':<14}{'features':<32}{'token error':>12}{'span F1':>10}{'token NLL':>11}", flush=True)
    for task in given.task:
        template, rows, y = training_half(task, given.data)
        for name, features in feature_sets(template, task).items():
            if given.set is None or name in given.set:
                error, f1, nll = cross_validate(features, rows, y)
                print(f"{task:<14}{name:<32}{error:>12.2%}{f1:>10.2%}{nll:>11.4f}", flush=True)


if __name__ == "__main__":
    main()
