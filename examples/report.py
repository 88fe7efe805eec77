"""What a model makes of some text, on one page: figures, curves, confusions, and the text shaded by
uncertainty.

    python examples/report.py [-o report.html]

`structgp report MODEL DATA -o PAGE` does the same for files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from structgp import StructuredGPClassifier
from structgp.data.corpora import recipes
from structgp.report import Findings, Text, examine, render

# %%
corpus = recipes()
X = [corpus.template.expand(rows) for rows in corpus.X_train[:60]]
X_test = [corpus.template.expand(rows) for rows in corpus.X_test[:30]]

# %% [markdown]
# A text is what the reader knows: words, where each sequence begins, labels if there are any. The
# names of templates are those that the page shows in the place of their numbers.


# %%
def look() -> Findings:
    tagger = StructuredGPClassifier().fit(X, corpus.y_train[:60])
    words = [[row[0] for row in rows] for rows in corpus.X_test[:30]]
    begins, line = [], 1
    for sequence in words:
        begins.append(line)
        line += len(sequence) + 1
    text = Text("recipes/test.conll", words, begins, corpus.y_test[:30])
    names = {str(i): unigram.source for i, unigram in enumerate(corpus.template.unigrams)}
    return examine(tagger, X_test, text, model_name="recipes", templates=names)


# %%
def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Writes the page, and returns what it says."""
    parser = argparse.ArgumentParser(description="A report on the embedded corpus.")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    options = parser.parse_args(words)
    findings = look()
    page = render(findings)
    options.output.write_text(page, encoding="utf-8")
    assert findings.truth is not None
    scores = findings.truth.scores
    (true, predicted), count = max(
        ((labels, n) for labels, n in findings.truth.confusion.items() if labels[0] != labels[1]),
        key=lambda item: item[1],
    )
    print(f"{options.output}: {len(page) // 1000} kB, one file, no network")
    print(f"token error {100 * scores.token_error:.1f} %, span F1 {100 * scores.span_f1:.1f} %")
    print(f"most often confused: {true} taken for {predicted}, {count} times")
    return {"error": scores.token_error, "confused": count, "bytes": len(page)}


# %%
if __name__ == "__main__":
    main()
