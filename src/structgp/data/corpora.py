"""The embedded corpus of recipe ingredients, to learn and to try things on."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from structgp.data.sources.columns import read_columns
from structgp.data.sources.templates import Template

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Recipes:
    """The embedded corpus: ``X[i][t]`` is token t's raw columns without its label ``y[i][t]``.

    ``template.expand(X[i])`` gives the features of sequence i."""

    template: Template
    X_train: list[Rows]
    y_train: list[list[str]]
    X_test: list[Rows]
    y_test: list[list[str]]


def recipes() -> Recipes:
    """The embedded corpus."""
    folder = resources.files("structgp.data") / "recipes"

    def columns(name: str) -> tuple[list[Rows], list[list[str]]]:
        with resources.as_file(folder / name) as path:
            return read_columns(path, encoding="utf-8", name=f"recipes/{name}").split_labels()

    X_train, y_train = columns("train.conll")
    X_test, y_test = columns("test.conll")
    text = (folder / "template").read_text(encoding="utf-8")
    template = Template.parse(text, "recipes/template")
    return Recipes(template, X_train, y_train, X_test, y_test)
