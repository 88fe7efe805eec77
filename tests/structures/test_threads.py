"""Compiled work keeps its threads while torch has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from structgp.structures import threads
from structgp.structures.threads import one_torch_thread, share


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
