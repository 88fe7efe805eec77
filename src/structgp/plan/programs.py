"""How labellings of a declared structure will be summed over, told before the fit: which program, why, and
at what cost."""

from __future__ import annotations

import torch

from structgp.data.batch import by_length, pad
from structgp.data.examples import Examples
from structgp.plan.choices import ASKED, Choice
from structgp.structures import Spec
from structgp.structures.graph.choose import MOST_ENTRIES
from structgp.structures.graph.elimination import entries_of

TOLD = {
    "exact": "elimination",
    "reweighted": "tree-reweighted bound of log Z",
    "loopy": "loopy belief propagation, which is no bound",
    "gibbs": "the bound for the fit, Gibbs sampling for answers",
}


def program_of(spec: Spec, examples: Examples) -> Choice[str]:
    """The program for these examples, in words."""
    if spec.has_segments:
        return Choice("exact, by segments", "a recursion over labels and ages of segments")
    most = MOST_ENTRIES if spec.most_entries is None else spec.most_entries
    if spec.program in ("reweighted", "loopy", "gibbs"):
        return Choice(TOLD[spec.program], ASKED)
    entries = _entries(examples, most if spec.program == "auto" else torch.inf)
    wide = int((entries > most).sum())
    size = f"{_largest(entries):,} table entries per example at most"
    if spec.program == "exact":
        return Choice(TOLD["exact"], f"asked for; {size}")
    if not wide:
        return Choice(TOLD["exact"], size)
    reason = f"{wide} of {len(entries)} examples have more than {most:,} table entries"
    if wide == len(entries):
        return Choice(TOLD["reweighted"], reason)
    return Choice(f"{TOLD['exact']}, or {TOLD['reweighted']}", reason)


def _largest(entries: torch.Tensor) -> int:
    finite = entries[entries.isfinite()]
    return int(finite.max()) if len(finite) else 0


def _entries(examples: Examples, most: float) -> torch.Tensor:
    """(N,) table entries of each example that has nodes; infinite where there are more than ``most``."""
    found = []
    for index in by_length([len(rows) for rows in examples.rows], 4_000):
        batch = pad(examples.rows, None, examples.encoder.pad_row, index, None, examples.n_layers)
        found.append(entries_of(examples.as_graphs(batch).layout, examples.n_labels, most).double())
    return torch.cat(found) if found else torch.zeros(0)
