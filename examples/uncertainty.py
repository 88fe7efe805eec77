"""Where uncertainty comes from: the data, or the model.

python examples/uncertainty.py
"""

from __future__ import annotations

import numpy as np

from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes

# %%
corpus = recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train]
X_test = [corpus.template.expand(rows) for rows in corpus.X_test[:40]]
y_test = corpus.y_test[:40]

# %% [markdown]
# The entropy of a prediction is the data's part, which would remain if the functions were known,
# and the model's, which more labels would remove. So the model's part should fall from few lines
# to many.


# %%
def parts(n: int) -> tuple[StructuredGPClassifier, dict[str, float]]:
    """Mean uncertainty of a test token, in nats, after n lines."""
    tagger = StructuredGPClassifier().fit(X[:n], corpus.y_train[:n])
    found = tagger.predict_uncertainty(X_test)
    mean = {name: float(np.concatenate(getattr(found, name)).mean()) for name in ("total", "data", "model")}
    print(f"{n:>4} lines: {mean['total']:.2f} = {mean['data']:.2f} of the data", end=" ")
    print(f"+ {mean['model']:.2f} of the model")
    return tagger, {f"{name} after {n}": value for name, value in mean.items()}


# %% [markdown]
# Uncertainty should find errors. How many of all errors are among the tenth of the tokens that the
# model is least certain of?


# %%
def finds_errors(tagger: StructuredGPClassifier) -> dict[str, float]:
    total = np.concatenate(tagger.predict_uncertainty(X_test).total)
    predicted = np.concatenate(tagger.predict(X_test))
    wrong = predicted != np.concatenate(y_test)
    uncertain = np.argsort(-total)[: len(total) // 10]
    share = float(wrong[uncertain].sum() / wrong.sum())
    print(f"the most uncertain tenth of the tokens holds {share:.0%} of the errors")
    return {"share of errors": share}


# %% [markdown]
# Whole lines, and single spans, have an uncertainty too.


# %%
def lines_and_spans(tagger: StructuredGPClassifier) -> None:
    found = tagger.predict_uncertainty(X_test[:20], of="sequences")
    most = int(np.argmax(found.model))
    words = " ".join(row[0] for row in corpus.X_test[most])
    print(f"labels would tell most of: {words} ({found.model[most]:.1f} nats of the model)")
    span = tagger.predict_spans([X_test[most]])[0][0]
    about = tagger.span_uncertainty(X_test[most], span.start, span.stop, span.label)
    shown = " ".join(row[0] for row in corpus.X_test[most][span.start : span.stop])
    print(f"  '{shown}' is {span.label} with probability {span.probability:.2f},", end=" ")
    print(f"uncertainty {about.total:.2f} = {about.data:.2f} + {about.model:.2f}")


# %%
def main() -> dict[str, float]:
    """Prints, and returns the figures."""
    _, few = parts(15)
    tagger, many = parts(60)
    lines_and_spans(tagger)
    return few | many | finds_errors(tagger)


# %%
if __name__ == "__main__":
    main()
