"""Weights, warm starts, learning in parts, checkpoints, early stopping.

python examples/going_on.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes
from structgp.inference import StepInfo

# %%
corpus = recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train[:36]]
y = corpus.y_train[:36]
X_test = [corpus.template.expand(rows) for rows in corpus.X_test[:30]]
y_test = corpus.y_test[:30]

# %% [markdown]
# `sample_weight` says how often a sequence counts in training: 0 leaves it out. `class_weight`
# changes what is predicted, after the fit: as if a label were so many times as frequent.


# %%
def weights() -> dict[str, float]:
    half = [1.0] * 12 + [0.0] * 12
    weighed = StructuredGPClassifier().fit(X[:24], y[:24], sample_weight=half)
    alone = StructuredGPClassifier().fit(X[:12], y[:12])

    def comments(tagger: StructuredGPClassifier) -> int:
        return sum(label == "B-COMMENT" for labels in tagger.predict(X_test) for label in labels)

    before = comments(alone)
    after = comments(alone.set_params(class_weight={"B-COMMENT": 20.0}))
    print(f"comments found: {before}, and {after} when they count twenty times")
    bounds = weighed.training_log_["elbo"], alone.training_log_["elbo"]
    return {"comments": before, "comments, weight 20": after, "bounds apart": bounds[0] - bounds[1]}


# %% [markdown]
# `warm_start`: posterior and kernel go on from where they were. How often the data count stays as it was
# chosen, so that nothing is cross-validated again.


# %%
def warm_start() -> dict[str, float]:
    cold = StructuredGPClassifier().fit(X[:20], y[:20])
    warm = StructuredGPClassifier(warm_start=True).fit(X[:15], y[:15])
    found = {"weight before": data_weight(warm)}
    warm.fit(X[:20], y[:20])
    for name, tagger in (("cold", cold), ("warm", warm)):
        nll, weight = tagger.evaluate(X_test, y_test).token_nll or 0.0, data_weight(tagger)
        found |= {f"NLL, {name}": nll, f"weight, {name}": weight}
        print(f"{name}: NLL per token {nll:.3f}, every sequence counts {weight:g} times")
    return found


def data_weight(tagger: StructuredGPClassifier) -> float:
    return float(tagger.training_log_["plan"]["data_weight"]["value"])


# %% [markdown]
# `partial_fit`: each part is passed once; the tagger remembers those before.


# %%
def in_parts() -> dict[str, float]:
    tagger, errors = StructuredGPClassifier(), []
    for start in range(0, 36, 12):
        tagger.partial_fit(X[start : start + 12], y[start : start + 12])
        errors.append(1 - tagger.score(X_test, y_test))
    print("token error after each of three parts:", *[f"{100 * e:.1f} %" for e in errors])
    return {"error, one part": errors[0], "error, three parts": errors[-1]}


# %% [markdown]
# A checkpoint: a run that is killed goes on where it was, to the same end.


# %%
def checkpoint() -> dict[str, float]:
    def killed(info: StepInfo) -> None:
        if info.iteration == 2:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fit.checkpoint"
        try:
            StructuredGPClassifier().fit(X[:15], y[:15], checkpoint=file, callback=killed)
        except KeyboardInterrupt:
            print("killed at step 3; the state is there:", file.exists())
        again = StructuredGPClassifier().fit(X[:15], y[:15], checkpoint=file)
        left = file.exists()
    straight = StructuredGPClassifier().fit(X[:15], y[:15])
    apart = abs(again.training_log_["elbo"] - straight.training_log_["elbo"])
    print(f"bound {again.training_log_['elbo']:.3f}, without the break", end=" ")
    print(f"{straight.training_log_['elbo']:.3f}; the state is there still: {left}")
    return {"apart after a break": apart, "file left": left}


# %% [markdown]
# Early stopping: by the likelihood of lines that the fit does not see.


# %%
def early_stopping() -> dict[str, float]:
    tagger = StructuredGPClassifier()
    tagger.fit(X[:15], y[:15], X_dev=X[15:30], y_dev=y[15:30], early_stopping=True)
    log = tagger.training_log_
    print(f"{log['stopped']} after {len(log['steps'])} steps, dev NLL {log['dev']['token_nll']:.3f}")
    return {"dev NLL": log["dev"]["token_nll"]}


# %%
def main() -> dict[str, float]:
    """Prints, and returns the figures."""
    return weights() | warm_start() | in_parts() | checkpoint() | early_stopping()


# %%
if __name__ == "__main__":
    main()
