"""Formulae as MathML, made when the site is built: browsers draw it themselves, without a script."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(node: nodes.Element, as_block: bool) -> str:
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("%s in %r", error, node.astext(), location=node)
        return node.astext()


def inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def display(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math-block">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
