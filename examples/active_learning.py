"""A learning curve: lines chosen by what they tell, against lines at random.

    python examples/active_learning.py [--quick] [--seeds N]

`python -m experiments.active` does the same with more care, on the paper's tasks too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from structgp import StructuredGPClassifier, select
from structgp.data.corpora import recipes

FIRST, STEP = 10, 10

# %%
corpus = recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train]
y = corpus.y_train
X_test = [corpus.template.expand(rows) for rows in corpus.X_test]

# %% [markdown]
# A run starts from ten lines at random. Then again and again: fit, let the strategy choose ten of
# the lines that are left, have them labelled. The test lines are chosen at random, always the same.


# %%
def curve(strategy: str, last: int, seed: int, n_pool: int, n_test: int) -> list[float]:
    """Token error after FIRST, FIRST + STEP, ... last lines; then what the lines that were chosen had to
    tell, in nats per line, before they were labelled."""
    chosen = np.random.default_rng(seed).permutation(n_pool)[:FIRST].tolist()
    errors, told = [], []
    while True:
        tagger = StructuredGPClassifier().fit([X[i] for i in chosen], [y[i] for i in chosen])
        errors.append(1 - tagger.score(X_test[:n_test], corpus.y_test[:n_test]))
        if len(chosen) >= last:
            return [*errors, float(np.mean(told))]
        left = [i for i in range(n_pool) if i not in set(chosen)]
        picked = select(tagger, [X[i] for i in left], STEP, strategy, random_state=seed)
        told += [
            float(part.sum()) for part in tagger.predict_uncertainty([X[left[i]] for i in picked]).model
        ]
        chosen += [left[i] for i in picked]


# %% [markdown]
# A bar is a twentieth of the tokens wrong.


# %%
def main(words: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Prints the curves, and returns them."""
    parser = argparse.ArgumentParser(description="A learning curve of active learning.")
    parser.add_argument("--quick", action="store_true", help="a small pool, up to twenty lines")
    parser.add_argument("--seeds", type=int, default=2, help="runs to average over")
    options = parser.parse_args(words)
    sizes = (20, 60, 40) if options.quick else (80, len(X), len(X_test))
    last, n_pool, n_test = sizes
    found = {}
    for strategy in ("random", "batch"):
        runs = [curve(strategy, last, seed, n_pool, n_test) for seed in range(options.seeds)]
        found[strategy] = np.mean(runs, 0).tolist()
    told = {strategy: errors.pop() for strategy, errors in found.items()}
    print("lines" + "".join(f"  {strategy:<26}" for strategy in found))
    for k, errors in enumerate(zip(*found.values(), strict=True)):
        bars = "".join(f"  {100 * e:5.1f} % {'#' * round(20 * e):<18}" for e in errors)
        print(f"{FIRST + k * STEP:>5}{bars}")
    print("a line had to tell" + "".join(f", {s}: {nats:.1f} nats" for s, nats in told.items()))
    return found | {f"told, {strategy}": [nats] for strategy, nats in told.items()}


# %%
if __name__ == "__main__":
    main()
