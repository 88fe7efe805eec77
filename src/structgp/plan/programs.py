"""Tells before the fit how labellings of a declared structure will be summed over: by which program, why,
and at what cost."""

from __future__ import annotations

import torch

from structgp.answers.ask import Asked, Model, Question
from structgp.data.batch import by_length, pad
from structgp.data.examples import Examples
from structgp.errors import InputError
from structgp.plan.choices import ASKED, Choice
from structgp.plan.options import Options
from structgp.structures import Spec
from structgp.structures.graph.elimination import entries_of
from structgp.structures.graph.program_choice import budgets

BRACKETED = 20
"""Number of examples for which log Z is bracketed: a second or two."""

TOLD = {
    "exact": "elimination",
    "reweighted": "tree-reweighted bound of log Z",
    "loopy": "loopy belief propagation, which is no bound",
    "gibbs": "the bound for the fit, Gibbs sampling for answers",
}


def graph_of(options: Options) -> Spec | None:
    """The spec of a structure that is not a chain, None for others."""
    structure = options.structure
    return structure if isinstance(structure, Spec) and not structure.is_chain else None


def refuse_graph(options: Options, place: str) -> None:
    """InputError where a structure beyond the chain is used with something that knows sequences alone."""
    spec = graph_of(options)
    if spec is not None:
        raise InputError(
            place, f"knows chains, and the structure is {spec}", "use fit, with X and y in memory"
        )


def program_of(spec: Spec, examples: Examples) -> Choice[str]:
    """The program for these examples, in words."""
    if spec.has_segments:
        return Choice("exact, by segments", "a recursion over labels and ages of segments")
    if spec.program in ("reweighted", "loopy", "gibbs"):
        return Choice(TOLD[spec.program], ASKED)
    entries, most = _entries(examples, spec)
    wide = int((entries > most).sum())
    size = f"{_largest(entries):,} table entries per example at most"
    if spec.program == "exact":
        return Choice(TOLD["exact"], f"asked for; {size}")
    if not wide:
        return Choice(TOLD["exact"], size)
    least = int(most[entries > most].min())
    reason = f"{wide} of {len(entries)} examples are over their budget of {least:,} table entries or more"
    if wide == len(entries):
        return Choice(TOLD["reweighted"], reason)
    return Choice(f"{TOLD['exact']}, or {TOLD['reweighted']}", reason)


def bracket_of(model: Model, examples: Examples) -> dict[str, float] | None:
    """Lower and upper bounds of log Z at the posterior mean, averaged over some training examples, where
    the tree-reweighted bound stands in for log Z. None where log Z is exact, or no bounds are known."""
    spec = model.spec
    if spec.is_chain or spec.has_segments or spec.program in ("exact", "loopy", "gibbs"):
        return None
    there = [i for i, rows in enumerate(examples.rows) if len(rows)]
    some = there[:: max(1, len(there) // BRACKETED)][:BRACKETED]
    part = examples.part(some)
    asked, low, high = Asked(model, Question(0), part.rows, part.links), 0.0, 0.0
    for _, at in asked.potentials():
        below, above = at.ask("bracket")
        low, high = low + float(below.sum()), high + float(above.sum())
    if high - low <= 1e-6 * (1 + abs(high)):
        return None
    return {"low": low / len(some), "high": high / len(some), "n_examples": len(some)}


def _largest(entries: torch.Tensor) -> int:
    finite = entries[entries.isfinite()]
    return int(finite.max()) if len(finite) else 0


def _entries(examples: Examples, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """For each example that has nodes, (N,) the number of table entries, infinite where it is far beyond
    the budget, and (N,) the budget."""
    found, allowed = [], []
    for index in by_length([len(rows) for rows in examples.rows], 4_000):
        batch = pad(examples.rows, None, examples.encoder.pad_row, index, None, examples.n_layers)
        layout = examples.as_graphs(batch).layout
        budget = budgets(layout, spec.most_entries).double()
        limit = float(budget.max()) if spec.program == "auto" else torch.inf
        found.append(entries_of(layout, examples.n_labels, limit).double())
        allowed.append(budget)
    return (torch.cat(found), torch.cat(allowed)) if found else (torch.zeros(0), torch.zeros(0))
