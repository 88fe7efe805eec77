"""What is known of labels beforehand: rules, some labels of a new line, only some labels of an old one.

python examples/constraints_and_masks.py
"""

from __future__ import annotations

import random

from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes

Labels = list[list[str]]

# %% [markdown]
# Thirty labelled lines, and two hundred others to ask about. Labels are BIO: a span of NAME begins
# with B-NAME and goes on with I-NAME.

# %%
corpus = recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train[:30]]
y = corpus.y_train[:30]
X_test = [corpus.template.expand(rows) for rows in corpus.X_test]
y_test = corpus.y_test


def breaks(labellings: Labels) -> int:
    """How often an I- follows what it cannot go on from."""
    return sum(
        label.startswith("I-") and before[2:] != label[2:]
        for labels in labellings
        for before, label in zip(["O", *labels], labels, strict=False)
    )


# %% [markdown]
# Rules. Taken one by one, the most probable labels need not make a labelling that can be. Under
# constraints no answer breaks the rules, and no probability is spent on what does. By default the scheme
# that all training lines obey is adopted, here BIO.


# %%
def rules() -> tuple[StructuredGPClassifier, dict[str, float]]:
    free = StructuredGPClassifier(constraints=None, decode="accuracy").fit(X, y)
    bound = StructuredGPClassifier().fit(X, y)
    found = {
        "broken rules, free": breaks(free.predict(X_test[:60])),
        "broken rules, BIO": breaks(bound.predict(X_test[:60])),
    }
    return bound, found


# %% [markdown]
# Labels that are known. Somebody has labelled the first token of each line that the tagger got
# wrong; the others follow from it. Errors are counted on the tokens that were left to the tagger.


# %%
def known_labels(tagger: StructuredGPClassifier) -> dict[str, float]:
    alone = tagger.predict(X_test)
    known: list[list[str | None]] = []
    for labels, truth in zip(alone, y_test, strict=True):
        wrong = [a != b for a, b in zip(labels, truth, strict=True)]
        first = wrong.index(True) if any(wrong) else None
        known.append([label if t == first else None for t, label in enumerate(truth)])
    helped = tagger.predict(X_test, known=known)

    def error(labellings: Labels) -> float:
        wrong = [
            label != true
            for labels, truth, given in zip(labellings, y_test, known, strict=True)
            for label, true, k in zip(labels, truth, given, strict=True)
            if k is None
        ]
        return sum(wrong) / len(wrong)

    return {"error of the rest": error(alone), "error of the rest, one known": error(helped)}


# %% [markdown]
# Labels that are missing. Of the training labels three in ten are lost. They are summed over;
# leaving out every line that lacks one would leave hardly any.


# %%
def missing_labels() -> dict[str, float]:
    rng = random.Random(0)
    partly = [[None if rng.random() < 0.3 else label for label in labels] for labels in y]
    whole = [i for i, labels in enumerate(partly) if None not in labels]
    summed = StructuredGPClassifier().fit(X, partly)
    fewer = StructuredGPClassifier().fit([X[i] for i in whole], [y[i] for i in whole])
    return {
        "whole lines left": len(whole),
        "error, missing summed over": 1 - summed.score(X_test[:60], y_test[:60]),
        "error, whole lines alone": 1 - fewer.score(X_test[:60], y_test[:60]),
    }


# %%
def main() -> dict[str, float]:
    """Prints and returns what was found."""
    tagger, found = rules()
    found |= known_labels(tagger) | missing_labels()
    for name, value in found.items():
        print(f"{name:<32}{value:.3g}")
    return found


# %%
if __name__ == "__main__":
    main()
