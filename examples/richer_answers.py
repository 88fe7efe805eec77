"""More than one label a token: n best labellings, pairs, draws, spans in three senses.

python examples/richer_answers.py
"""

from __future__ import annotations

from structgp import StructuredGPClassifier
from structgp.data import corpora
from structgp.evaluation.metrics import chunks

LINE = "2 heaped tablespoons brown sugar, plus extra"

# %%
corpus = corpora.recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train[:60]]
X_test = [corpus.template.expand(rows) for rows in corpus.X_test[:30]]
y_test = corpus.y_test[:30]
tokens = corpora.tokenize(LINE)
x = corpus.template.expand(corpora.columns(tokens))

# %% [markdown]
# The n best whole labellings, with their probabilities. How often is the right one the first, and
# how often among ten?


# %%
def n_best(tagger: StructuredGPClassifier) -> dict[str, float]:
    print("best labellings of:", " ".join(tokens))
    for labels, probability in tagger.predict_n_best([x], 3)[0]:
        print(f"  {probability:.3f}  {' '.join(labels)}")
    ranks = [
        next((k for k, found in enumerate(best) if found.labels == truth), None)
        for best, truth in zip(tagger.predict_n_best(X_test, 10), y_test, strict=True)
    ]
    return {
        "right at once": sum(rank == 0 for rank in ranks),
        "right among ten": sum(rank is not None for rank in ranks),
        "lines": len(ranks),
    }


# %% [markdown]
# Spans, with exactly these bounds and this label. They may overlap: they are alternatives.


# %%
def spans(tagger: StructuredGPClassifier) -> None:
    print("spans of probability .15 or more")
    for start, stop, label, probability in tagger.predict_spans([x], threshold=0.15)[0]:
        print(f"  {probability:.2f}  {label:<8} {' '.join(tokens[start:stop])}")


# %% [markdown]
# One span in three senses, and the same by counting in labellings that are drawn from the
# posterior: two ways to one number, up to Monte Carlo error.


# %%
def three_senses(tagger: StructuredGPClassifier) -> dict[str, float]:
    start, stop = 3, 5  # brown sugar
    exact = tagger.span_probability(x, start, stop, "NAME")
    bounds = tagger.span_probability(x, start, stop, sense="bounds")
    covers = tagger.span_probability(x, start, stop, sense="covers")
    drawn = tagger.sample_labellings([x], 2000)[0]
    counted = sum((start, stop, "NAME") in chunks(labels) for labels in drawn) / len(drawn)
    print(f"'{' '.join(tokens[start:stop])}' is a NAME {exact:.3f}, some span {bounds:.3f},", end=" ")
    print(f"in one span {covers:.3f}; a NAME in {counted:.3f} of 2000 labellings drawn")
    return {"exact": exact, "bounds": bounds, "covers": covers, "counted": counted}


# %% [markdown]
# Pairs of neighbours, which marginals of single tokens do not tell.


# %%
def pairs(tagger: StructuredGPClassifier) -> None:
    (table,) = tagger.predict_transition_marginals([x])
    names = list(tagger.classes_)
    print("the most probable labels of each two neighbours")
    for t, p in enumerate(table):
        i, j = divmod(int(p.argmax()), len(names))
        print(f"  {p[i, j]:.2f}  {tokens[t]} {tokens[t + 1]}: {names[i]} {names[j]}")


# %%
def main() -> dict[str, float]:
    """Prints, and returns the figures."""
    tagger = StructuredGPClassifier().fit(X, corpus.y_train[:60])
    found = n_best(tagger)
    spans(tagger)
    found |= three_senses(tagger)
    pairs(tagger)
    print(f"the right labelling of {found['lines']} lines comes first {found['right at once']}", end="")
    print(f" times, and is among the ten best {found['right among ten']} times")
    return found


# %%
if __name__ == "__main__":
    main()
