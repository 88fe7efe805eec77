"""Chooses which structure answers questions once a likelihood has been fitted, and how."""

from __future__ import annotations

from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.errors import InputError
from structgp.plan.choices import ASKED, Choice, shown
from structgp.plan.options import Options
from structgp.structures import (
    MOST_VALUES,
    ByValues,
    Chain,
    Custom,
    Declared,
    Differences,
    Piecewise,
    Segments,
    Structure,
    answers_of,
)


def predictor_of(options: Options, structure: Structure) -> Structure | None:
    """The structure that answers; None for the chain. A likelihood without marginals answers by its
    values; piecewise training is a stand-in for the chain, which answers for it."""
    custom = options.structure if isinstance(options.structure, Custom) else None
    asked: str | Structure = "auto" if custom is None else custom.predict_with
    if not isinstance(asked, Structure):
        if asked == "chain" or isinstance(structure, Piecewise):
            return None
        asked = structure
    if isinstance(asked, Piecewise):
        problem = f"{type(asked).__name__} offers no marginals"
        raise InputError("predict_with", problem, "use 'chain', or a structure that does")
    if type(asked) is Chain:
        return None
    found = answers_of(asked)
    if options.constraints not in (None, "auto"):
        remedy = "use structure=Custom(..., predict_with='chain')"
        raise InputError("constraints", f"{shown(found)} does not know them", remedy)
    return found


def answers_by(
    structure: Structure, predictor: Structure | None, examples: Examples | ShardedExamples
) -> Choice[str] | None:
    """How a likelihood of the user's own answers, for the plan; None for declared structures."""
    inner = structure.inner if isinstance(structure, Differences) else structure
    if predictor is None:
        declared = type(inner) in (Chain, Piecewise, Declared, Segments)
        return None if declared else Choice("chain", ASKED)
    if not isinstance(predictor, ByValues):
        return Choice(shown(predictor), "it offers marginals")
    length, V = examples.typical_length, examples.n_labels
    if V**length <= MOST_VALUES:
        reason = f"a sequence has about {V ** round(length):,} labellings for {predictor.name} to value; "
        reason += f"those with more than {MOST_VALUES:,} are sampled"
        return Choice("enumeration", reason)
    reason = f"a sequence has about {V}^{length:.0f} labellings, of which {predictor.name} values "
    reason += f"about {MOST_VALUES:,} at most; monte_carlo_error(X) tells the error"
    return Choice("importance sampling", reason)
