"""Structures: templates as plain data, the programs that sum over labellings, and opaque likelihoods
p(y | f, g), of which the engine sees only the values."""

from structgp.structures.base import Curvature, Structure, refuse
from structgp.structures.choose import Custom, answers_of, as_structure, structure_for
from structgp.structures.composite import PARTS
from structgp.structures.declare import edges, grid, layers, same, segments, tree
from structgp.structures.declared import Declared
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.masks import Rules, keep_known
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.opaque.by_values import ByValues
from structgp.structures.opaque.differences import Differences
from structgp.structures.opaque.importance import MOST_VALUES
from structgp.structures.program import Layout, Program, compile
from structgp.structures.pseudo_likelihood import Piecewise
from structgp.structures.segments.segments import Segments
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.spec import Spec, Template, chain, piecewise
from structgp.structures.words import spec_from_words

__all__ = [
    "MOST_VALUES",
    "PARTS",
    "BlackBox",
    "ByValues",
    "Chain",
    "Curvature",
    "Custom",
    "Declared",
    "Differences",
    "Layout",
    "Piecewise",
    "Program",
    "Rules",
    "Segments",
    "SpanScheme",
    "Spec",
    "Structure",
    "Template",
    "answers_of",
    "as_structure",
    "chain",
    "compile",
    "edges",
    "grid",
    "keep_known",
    "layers",
    "piecewise",
    "refuse",
    "same",
    "segments",
    "spec_from_words",
    "structure_for",
    "tree",
]
