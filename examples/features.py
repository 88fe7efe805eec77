"""Features of all kinds: vectors and numbers beside templates, CRFsuite's files, Wapiti's patterns.

python examples/features.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from structgp import StructuredGPClassifier
from structgp.data import sources
from structgp.data.corpora import recipes

FOODS = ["flour", "sugar", "butter", "eggs", "milk", "cream", "rice", "salt", "honey", "yeast"]
UNITS = ["cups", "grams", "tins", "spoons", "jars", "sticks", "cloves", "dashes", "drops", "bags"]

# %% [markdown]
# Word vectors, in a file as word2vec writes them. Foods lie in one place and units in another. Half
# of the words are in the training lines; the others come in the test lines for the first time, and
# only their vectors tell what they are.


# %%
def write_vectors(path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{word} " + " ".join(f"{v:.3f}" for v in centre + 0.3 * rng.standard_normal(3))
        for words, centre in ((FOODS, np.eye(3)[0]), (UNITS, np.eye(3)[1]))
        for word in words
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lines(foods: list[str], units: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """'flour 2 cups' and '2 cups flour', so that places alone do not tell."""
    words, labels = [], []
    for k, (food, unit) in enumerate(zip(foods, units, strict=True)):
        number = str(k + 1)
        words.append([food, number, unit] if k % 2 else [number, unit, food])
        labels.append(["FOOD", "QTY", "UNIT"] if k % 2 else ["QTY", "UNIT", "FOOD"])
        words.append([unit, "of", food] if k % 2 else [food, "in", unit])
        labels.append(["UNIT", "O", "FOOD"] if k % 2 else ["FOOD", "O", "UNIT"])
    return words, labels


# %%
def vectors() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.txt"
        write_vectors(path)
        known = sources.WordVectors(path)

        def token(word: str, dense: bool) -> dict[str, Any]:
            # A number beside the vector: how long the word is.
            features: dict[str, Any] = {"word": word}
            return features | ({"vector": known[word], "length": len(word)} if dense else {})

        words, labels = lines(FOODS[:5], UNITS[:5])
        new_words, new_labels = lines(FOODS[5:], UNITS[5:])
        found = {}
        for name, dense in (("words alone", False), ("with vectors", True)):
            X = [[token(word, dense) for word in line] for line in words]
            X_new = [[token(word, dense) for word in line] for line in new_words]
            tagger = StructuredGPClassifier().fit(X, labels)
            found[name] = 1 - tagger.score(X_new, new_labels)
            print(f"new words, {name:<14} error {100 * found[name]:5.1f} %")
    return found


# %% [markdown]
# CRFsuite's own files: a label and attributes on each line. They need no template.


# %%
def crfsuite_file() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.crfsuite"
        text = "QTY\tw=two\tdigits:0\nNAME\tw=eggs\n\nQTY\tw=3\tdigits:1\nNAME\tw=figs\n\n"
        path.write_text(text, encoding="utf-8")
        file = sources.AttributeReader().read(path)
        tagger = StructuredGPClassifier().fit(file.X, file.y)
    print("from a CRFsuite file:", tagger.predict(file.X))
    return {"right of the CRFsuite file": tagger.score(file.X, file.y)}


# %% [markdown]
# Wapiti's patterns, on the columns of the embedded corpus: tests and parts of cells.


# %%
def wapiti_patterns() -> dict[str, float]:
    patterns = r"""
u:word=%X[0,0]
u:before=%X[-1,0]
u:after=%X[1,0]
u:number=%t[0,0,"^\d"]
u:ends=%m[0,1,"..$"]
b
"""
    template = sources.Template.parse(patterns, "patterns", dialect="wapiti")
    corpus = recipes()
    X = [template.expand(rows) for rows in corpus.X_train[:30]]
    X_test = [template.expand(rows) for rows in corpus.X_test[:40]]
    tagger = StructuredGPClassifier().fit(X, corpus.y_train[:30])
    error = 1 - tagger.score(X_test, corpus.y_test[:40])
    print("Wapiti's patterns of the first token:", X[0][0])
    print(f"token error after 30 lines {100 * error:.1f} %")
    return {"Wapiti": error}


# %%
def main() -> dict[str, float]:
    """Prints, and returns the figures."""
    return vectors() | crfsuite_file() | wapiti_patterns()


# %%
if __name__ == "__main__":
    main()
