"""Work that is shared out: compiled loops keep their threads while torch has one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from structgp import threads
from structgp.threads import one_torch_thread, share, share_matrices


def parts(units: int = 6) -> list[tuple[int, int]]:
    return share(lambda first, last: (first, last), units, 10 * threads.WORTH_A_THREAD)


def test_torch_has_one_thread_and_compiled_work_as_many_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    has = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: has[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: has.__setitem__(0, n))
    assert len(parts()) == 3
    with one_torch_thread():
        assert has == [1]
        assert parts() == [(0, 2), (2, 4), (4, 6)]
        with one_torch_thread():
            assert len(parts()) == 3
        assert len(parts()) == 3
    assert has == [3]


def test_the_threads_come_back_after_an_error() -> None:
    before = torch.get_num_threads()

    def fails() -> Any:
        with one_torch_thread():
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert torch.get_num_threads() == before
    assert len(share(lambda *ends: ends, 1, 0)) == 1


def test_matrices_are_shared_out_with_one_torch_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    has, seen = [2], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: has[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: has.__setitem__(0, n))

    def work(first: int, last: int) -> None:
        seen.append((first, last, has[0]))

    for units, cost in ((5, 10), (5, 0), (1, 10)):
        share_matrices(work, units, cost * threads.WORTH_A_THREAD, torch.device("cpu"))
    share_matrices(work, 5, 10 * threads.WORTH_A_THREAD, torch.device("meta"))
    # Too little work, fewer matrices than threads, and other devices are left to torch itself.
    assert sorted(seen[:2]) == [(0, 2, 1), (2, 5, 1)]
    assert seen[2:] == [(0, 5, 2), (0, 1, 2), (0, 5, 2)]
    assert has == [2]


@pytest.mark.parametrize("wanted", [True, False])
def test_threads_record_gradients_only_where_their_caller_does(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    cost, cpu = 2 * threads.WORTH_A_THREAD, torch.device("cpu")
    with torch.set_grad_enabled(wanted):
        assert share_matrices(lambda *ends: torch.is_grad_enabled(), 2, cost, cpu) == [wanted, wanted]


def test_a_thread_that_begins_within_anothers_block_leaves_the_number_of_before() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def look() -> None:
        with one_torch_thread():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        with one_torch_thread(), ThreadPoolExecutor(1) as pool:
            pool.submit(look).result()
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(torch.get_num_threads).result())
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 2, 2]


def test_a_child_that_was_forked_within_a_block_keeps_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_torch_thread():
            threads._in_child()  # what the fork calls there
            with one_torch_thread():
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
