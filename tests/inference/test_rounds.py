"""Minibatches of several processes: who visits what, the same sums in all, and going on with more or fewer.

Processes are threads here, which start at once; ``test_distributed`` has real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.generate import generate
from hypothesis import given
from hypothesis import strategies as st

import structgp.inference.rounds as rounds
import structgp.plan.run
from structgp import InputError, StructuredGPClassifier
from structgp.data import shards
from structgp.data.shards import Shards
from structgp.inference import Minibatch, StepInfo
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.rounds import Round

EXACT = Minibatch(batch_tokens=30, n_draws=32, steps=6, learning_rounds=1, tolerance=0.05)

CLOSE = 0.04 * 40
"""Nats: the fit stops where a pass changes .05 per sequence. Data that count twice, or not at all, change
tens of nats."""


@dataclass(frozen=True)
class Threads(Processes):
    """Processes that are threads of this one. told : what each of them has put on the table."""

    barrier: Any = None
    told: Any = None

    def add_up(self, tensor: torch.Tensor) -> None:
        self.told[self.rank] = tensor.clone()
        self.wait()
        tensor.copy_(torch.stack(self.told).sum(0))
        self.wait()

    def sum(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        found = [t.clone() for t in tensors]
        for t in found:
            self.add_up(t)
        return found

    def wait(self) -> None:
        self.barrier.wait(timeout=60)


def in_threads(size: int, work: Callable[[Processes], Any]) -> list[Any]:
    barrier, told = threading.Barrier(size), [None] * size

    def one(rank: int) -> Any:
        try:
            return work(Threads(rank, size, barrier, told))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [f.exception() for f in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [f.result() for f in futures]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    data = generate(40, n_labels=3, mean_length=5, n_templates=2, n_values=8, strength=2.0, seed=2)
    pairs = list(zip(data.X, data.y, strict=True))
    return shards.write(pairs, tmp_path_factory.mktemp("corpus") / "shards", shard_tokens=70)


def fit(kept: Shards, together: Processes = ALONE, **given: Any) -> StructuredGPClassifier:
    return StructuredGPClassifier(n_draws=4, inference=EXACT).fit(kept, together=together, **given)


@pytest.fixture(scope="module")
def alone(kept: Shards) -> StructuredGPClassifier:
    return fit(kept)


@given(st.integers(1, 300), st.integers(1, 5), st.integers(0, 9))
def test_every_batch_is_visited_once_in_a_pass_by_the_process_that_owns_it(n, size, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    visited: list[list[int]] = [[] for _ in range(size)]
    left, generator, count = list(order), torch.Generator().manual_seed(seed), 0
    while left:
        one = Round.next(left, n, 2, generator, Processes(0, size))
        assert one.seeds.shape == (len(one.batches), 2)
        dealt = [one.own(rank) for rank in range(size)]
        assert [seeds for own in dealt for _, seeds in own] == one.seeds.tolist()
        for rank, own in enumerate(dealt):
            visited[rank] += [i for i, _ in own]
        left = [i for i in left if i not in set(one.batches)]
        count += 1
    for rank in range(size):
        own = list(Processes(rank, size).range(n))
        assert sorted(visited[rank]) == own
        assert visited[rank] == [i for i in reversed(order) if i in own], "in the order that was drawn"
    assert sum(map(len, visited)) == n
    assert max(map(len, visited)) - min(map(len, visited)) <= 1
    if size > 1:
        assert count >= min(rounds.ROUNDS_A_PASS // 2, max(map(len, visited)))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_hold_one_posterior_and_come_to_the_bound_of_one(size, kept, alone):
    found = in_threads(size, lambda together: fit(kept, together))
    first = found[0].model_.posterior.state_dict()
    for other in found[1:]:
        for name, value in other.model_.posterior.state_dict().items():
            assert torch.equal(value, first[name]), name
        assert other.training_log_["steps"] == found[0].training_log_["steps"]
    log, before = found[0].training_log_, alone.training_log_
    assert log["stopped"] == "converged"
    assert log["elbo"] == pytest.approx(before["elbo"], abs=CLOSE)
    assert log["fresh_elbo"] == pytest.approx(before["fresh_elbo"], abs=CLOSE)
    assert len(list(kept.folder.glob(".sites*"))) == 0


class CutOffError(Exception):
    """Instead of a kill."""


@pytest.mark.parametrize(("size", "then"), [(2, 3), (2, 1), (1, 2), (3, 3)])
def test_another_number_of_processes_goes_on(size, then, kept, alone, tmp_path, monkeypatch):
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", lambda *a: Checkpoint(*a, seconds=0.0))
    path, n = tmp_path / "checkpoint", len(shards.ShardBatches(kept, 30))
    last = -(-n // size) + 2  # in the second pass

    def cut_off(info: StepInfo) -> None:
        if info.iteration == last:
            raise CutOffError

    with pytest.raises(CutOffError):
        in_threads(size, lambda together: fit(kept, together, checkpoint=path, callback=cut_off))
    seen: list[int] = []
    given = {"checkpoint": path, "callback": lambda info: seen.append(info.iteration)}
    again = in_threads(then, lambda together: fit(kept, together, **given))[0].training_log_
    assert min(seen) == last
    assert again["elbo"] == pytest.approx(alone.training_log_["elbo"], abs=CLOSE)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_several_that_has_lost_a_file_of_sites(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", lambda *a: Checkpoint(*a, seconds=0.0))
    path = tmp_path / "checkpoint"

    def cut_off(info: StepInfo) -> None:
        if info.iteration == 4:
            raise CutOffError

    with pytest.raises(CutOffError):
        in_threads(2, lambda together: fit(kept, together, checkpoint=path, callback=cut_off))
    (Path(f"{path}.sites") / "1.sites").unlink()
    with pytest.raises(InputError, match="sites of the fit are missing in it; remove the checkpoint"):
        in_threads(2, lambda together: fit(kept, together, checkpoint=path))


@pytest.mark.parametrize("size", [1, 2])
def test_data_in_memory_can_be_visited_by_several_too(size, kept, alone, tmp_path, monkeypatch):
    """And they go on from what one process has begun, whose sites were in memory."""
    monkeypatch.setattr(structgp.plan.run, "Checkpoint", lambda *a: Checkpoint(*a, seconds=0.0))
    data = generate(40, n_labels=3, mean_length=5, n_templates=2, n_values=8, strength=2.0, seed=2)

    def work(together: Processes, **given: Any) -> Any:
        model, given = StructuredGPClassifier(n_draws=4, inference=EXACT), {"together": together, **given}
        return model.fit(data.X, data.y, checkpoint=tmp_path / "checkpoint", **given)

    def cut_off(info: StepInfo) -> None:
        if info.iteration == 3:
            raise CutOffError

    with pytest.raises(CutOffError):
        in_threads(size, lambda together: work(together, callback=cut_off))
    one, other = in_threads(2, work)
    assert one.training_log_["steps"][3].iteration == 3
    assert torch.equal(one.model_.posterior.node.m, other.model_.posterior.node.m)
    assert one.training_log_["elbo"] == pytest.approx(alone.training_log_["elbo"], abs=CLOSE)
    assert list(tmp_path.iterdir()) == []
