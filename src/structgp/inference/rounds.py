"""Rounds of visits: what several processes visit between two exchanges, and how their changes are added up.

All processes hold the same sums of sites. In a round each of them visits some batches of its own and sees
at once what its own visits change, but not what the others' visits change. Then the changes are added up,
and all processes hold the same sums again, to the last bit. A site belongs to its batch and not to a
process, so no data are counted twice, and where a fit settles does not depend on who visits what.

Letters: n batches, P processes; M weights and R functions of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.inference.batch_sites import SitesOnDisk
from structgp.inference.distributed import Processes

ROUNDS_A_PASS = 16
"""Least number of rounds per pass, where there are enough batches. With more rounds, what a visit knows of
the others' batches is less out of date, but more sums of 2 M R numbers are sent. Not chosen on data."""

MOST_VISITS = 32
"""Largest number of visits of a process in one round: checkpoints are written between rounds."""


@dataclass(frozen=True)
class Round:
    """One round. visits : for each process, the batches that it visits in this round. seeds : (all visits,
    blocks), those of their draws; the visits of the first process come first."""

    visits: list[list[int]]
    seeds: Tensor

    @staticmethod
    def next(
        order: Sequence[int], n: int, n_blocks: int, generator: torch.Generator, together: Processes
    ) -> Round:
        """The next round. order : the batches, out of n, still to come in this pass; the round takes them
        from its end. The same in all processes."""
        if together.size == 1:
            visits = [[order[-1]]]
        else:
            most = min(MOST_VISITS, -(-n // (ROUNDS_A_PASS * together.size)))
            visits = []
            for rank in range(together.size):
                own = together.range(n, rank)
                visits.append([i for i in order if i in own][::-1][:most])
        shape = sum(map(len, visits)), n_blocks
        return Round(visits, torch.randint(2**31, shape, generator=generator))

    @property
    def batches(self) -> list[int]:
        """The batches that all processes visit."""
        return [i for own in self.visits for i in own]

    def own(self, rank: int) -> list[tuple[int, list[int]]]:
        """The batches of one process, with the seeds of each."""
        before = sum(map(len, self.visits[:rank]))
        seeds = self.seeds[before : before + len(self.visits[rank])].tolist()
        return list(zip(self.visits[rank], seeds, strict=True))


class Agreement:
    """Keeps the sums of sites from the start of a round, so that the changes of all processes can be told
    and added up. Memory: a copy of the sums. sums : (M, R) tensors, precision and linear of each block."""

    def __init__(self, sums: Sequence[Tensor], together: Processes) -> None:
        self.sums, self.together = list(sums), together
        self.before = [x.clone() for x in self.sums]

    def reach(self, round_: Round, values: Tensor, evaluations: int, sites: object) -> int:
        """Adds up what the processes have changed, in place: the sums, the values (n,) of the batches
        visited, and where sites on disk are. Returns the number of evaluations of all processes. Cost O(n +
        M R) of traffic."""
        for now, before in zip(self.sums, self.before, strict=True):
            now.sub_(before)
            self.together.add_up(now)
            now.add_(before)
        batches, own = round_.batches, round_.visits[self.together.rank]
        told = values.new_zeros(len(values) + 1)
        told[own], told[-1] = values[own], float(evaluations)
        self.together.add_up(told)
        values[batches] = told[batches]
        if isinstance(sites, SitesOnDisk):
            rows = torch.zeros_like(sites.table)
            rows[own] = sites.table[own]
            self.together.add_up(rows)
            sites.table[batches] = rows[batches]
        return int(told[-1])
