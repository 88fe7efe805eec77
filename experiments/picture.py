"""The picture in the README: how sure the demo's model is of each token of a line it has never seen.

python -m experiments.picture [-o docs/_static/line.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from structgp import StructuredGPClassifier
from structgp.data import corpora
from structgp.report.markup import Markup, join, tag

LINE = "1 (14-ounce) can sweetened condensed milk, chilled if you like"
COLOURS = {
    "QTY": "#0b6e99",
    "UNIT": "#15803d",
    "NAME": "#c2410c",
    "PREP": "#7c3aed",
    "COMMENT": "#a16207",
    "O": "#9ca3af",
}
STEP, HEIGHT, TOP = 74, 120, 34


def picture(seed: int = 0) -> Markup:
    """One column per token: a bar for each label, as high as its probability."""
    corpus = corpora.recipes()
    expand = corpus.template.expand
    tagger = StructuredGPClassifier(features="columns", random_state=seed)
    tagger.fit([expand(rows) for rows in corpus.X_train], corpus.y_train)
    tokens = corpora.tokenize(LINE)
    marginals = tagger.predict_marginals_single(expand(corpora.columns(tokens)))
    parts = []
    for t, (token, p) in enumerate(zip(tokens, marginals, strict=True)):
        kinds: dict[str, float] = {}
        for label, value in p.items():
            kind = label.split("-")[-1]
            kinds[kind] = kinds.get(kind, 0.0) + value
        parts.append(_column(t, token, kinds))
    parts.append(_legend(len(tokens)))
    width, height = STEP * len(tokens) + 20, TOP + HEIGHT + 60
    style = tag("style", Markup("text { font: 13px sans-serif; fill: #333 } .small { font-size: 11px }"))
    ground = tag("rect", width=width, height=height, fill="white")
    return tag(
        "svg", style, ground, *parts, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}"
    )


def _column(t: int, token: str, kinds: dict[str, float]) -> Markup:
    x, y, found = 10 + STEP * t, float(TOP + HEIGHT), []
    for kind in sorted(kinds, key=kinds.__getitem__, reverse=True):
        size = kinds[kind] * HEIGHT
        y -= size
        bar = {"x": x + 6, "y": f"{y:.1f}", "width": STEP - 12, "height": f"{size:.1f}"}
        found.append(tag("rect", fill=COLOURS.get(kind, "#6b7280"), **bar))
        if size > 16:
            middle = {"x": x + STEP / 2, "y": f"{y + size / 2 + 4:.1f}", "text-anchor": "middle"}
            found.append(
                tag(
                    "text",
                    f"{kinds[kind]:.2f}",
                    fill="white",
                    style="fill: white",
                    class_="small",
                    **middle,
                )
            )
    below = {"x": x + STEP / 2, "y": TOP + HEIGHT + 20, "text-anchor": "middle"}
    return join([*found, tag("text", token, **below)])


def _legend(n: int) -> Markup:
    found = []
    for k, (kind, colour) in enumerate(COLOURS.items()):
        x, y = 16 + 96 * k, TOP + HEIGHT + 38
        found.append(tag("rect", x=x, y=y, width=12, height=12, fill=colour))
        found.append(tag("text", kind, x=x + 18, y=y + 11, class_="small"))
    title = tag("text", "Probability of each label, averaged over the posterior", x=16, y=20)
    return join([title, *found])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.picture", description=__doc__)
    parser.add_argument("-o", "--output", default="docs/_static/line.svg")
    Path(parser.parse_args().output).write_text(str(picture()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
