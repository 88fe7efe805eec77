"""Why this label: features, neighbours and training tokens that speak for it.

python examples/why_this_label.py
"""

from __future__ import annotations

from structgp import StructuredGPClassifier, describe, explain
from structgp.data import corpora
from structgp.data.word_parts import feature_name

# %%
corpus = corpora.recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train[:60]]
y = corpus.y_train[:60]
tokens = corpora.tokenize("3 ripe tomatoes, peeled")
x = corpus.template.expand(corpora.columns(tokens))
lines = {str(i): unigram.source for i, unigram in enumerate(corpus.template.unigrams)}

# %% [markdown]
# Under the posterior mean, the log-odds of two labels at a token are a sum: what its features say,
# what comes from the left, what comes from the right. What features say is again a sum, over
# features; or roughly, over training tokens.


# %%
def one_token(tagger: StructuredGPClassifier, t: int) -> dict[str, float]:
    why = explain(tagger, x, t, X_train=X, y_train=y, n=1000)
    print(f"{tokens[t]}: {why.label} rather than {why.other}, probability {why.probability:.2f}")
    print(f"  log-odds {why.log_odds:+.2f} = features {why.unary:+.2f}", end=" ")
    print(f"+ left {why.left:+.2f} + right {why.right:+.2f}")
    for name, value, score in why.features[:4]:
        print(f"  {score:+.2f}  {feature_name(name, lines)}  {value}")
    for witness in why.witnesses[:3]:
        assert witness.sequence is not None
        line = [row[0] for row in corpus.X_train[witness.sequence]]
        assert witness.token is not None
        line[witness.token] = f"[{line[witness.token]}]"
        print(f"  {witness.score:+.2f}  {witness.label} in: {' '.join(line)}")
    return {
        "log-odds": why.log_odds,
        "three parts": why.unary + why.left + why.right,
        "features": sum(part.score for part in why.features),
        "unary": why.unary,
        "witnesses": sum(witness.label == why.label for witness in why.witnesses[:3]),
    }


# %% [markdown]
# The model as a whole: what templates weigh, and what follows what. A score that the data hardly
# tells has a wide deviation.


# %%
def the_model(tagger: StructuredGPClassifier) -> dict[str, float]:
    summary = describe(tagger)
    weights = {k: v for k, v in summary.templates.items() if k.isdigit()}
    print("the templates that weigh most")
    for name in sorted(weights, key=weights.__getitem__)[:-4:-1]:
        print(f"  {weights[name]:.2f}  {corpus.template.unigrams[int(name)].source}")
    i, j = summary.classes.index("B-NAME"), summary.classes.index("I-NAME")
    there, back = summary.transitions[i, j], summary.transitions[j, i]
    print(f"I-NAME after B-NAME {there:+.1f} (sd {summary.transition_sds[i, j]:.1f})", end=", ")
    print(f"B-NAME after I-NAME {back:+.1f} (sd {summary.transition_sds[j, i]:.1f})")
    return {"goes on": there, "begins again": back}


# %%
def main() -> dict[str, float]:
    """Prints, and returns the figures."""
    tagger = StructuredGPClassifier().fit(X, y)
    return one_token(tagger, 2) | the_model(tagger)


# %%
if __name__ == "__main__":
    main()
