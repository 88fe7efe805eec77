"""How labellings of a declared structure will be summed over, told before the fit: which program, why, and
at what cost."""

from __future__ import annotations

import torch

from structgp.data.batch import by_length, pad
from structgp.data.examples import Examples
from structgp.plan.choices import ASKED, Choice
from structgp.structures import Spec
from structgp.structures.graph.choose import budgets
from structgp.structures.graph.elimination import entries_of

TOLD = {
    "exact": "elimination",
    "reweighted": "tree-reweighted bound of log Z",
    "loopy": "loopy belief propagation, which is no bound",
    "gibbs": "the bound for the fit, Gibbs sampling for answers",
}


def program_of(spec: Spec, examples: Examples) -> Choice[str]:
    """The program for these examples, in words."""
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


def _largest(entries: torch.Tensor) -> int:
    finite = entries[entries.isfinite()]
    return int(finite.max()) if len(finite) else 0


def _entries(examples: Examples, spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) twice, of each example that has nodes: table entries, infinite where they are far beyond the
    budget, and the budget."""
    found, allowed = [], []
    for index in by_length([len(rows) for rows in examples.rows], 4_000):
        batch = pad(examples.rows, None, examples.encoder.pad_row, index, None, examples.n_layers)
        layout = examples.as_graphs(batch).layout
        budget = budgets(layout, spec.most_entries).double()
        limit = float(budget.max()) if spec.program == "auto" else torch.inf
        found.append(entries_of(layout, examples.n_labels, limit).double())
        allowed.append(budget)
    return (torch.cat(found), torch.cat(allowed)) if found else (torch.zeros(0), torch.zeros(0))
