"""Batches: every sequence once, nothing but padding beside it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from structgp.data.batch import by_length, pad
from structgp.data.encode import FeatureEncoder


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 100))
@example([], 5)
@example([0, 0], 5)
@example([7, 7, 7], 21)
def test_by_length(lengths: list[int], limit: int) -> None:
    batches = list(by_length(lengths, limit))
    seen = [i for batch in batches for i in batch]
    assert sorted(seen) == [i for i, n in enumerate(lengths) if n > 0]
    assert [lengths[i] for i in seen] == sorted(n for n in lengths if n)
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit
    for batch, following in pairwise(batches):
        # No batch ends before it has to.
        assert (len(batch) + 1) * lengths[following[0]] > limit


def test_pad_rows_labels_and_mask() -> None:
    rows = [np.arange(6.0).reshape(3, 2), np.full((1, 2), 7.0), np.full((2, 2), 9.0)]
    labels = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    batch = pad(rows, labels, np.full(2, -5.0), [2, 0])
    assert len(batch) == 2
    assert batch.x.tolist() == [[[9, 9], [9, 9], [-5, -5]], [[0, 1], [2, 3], [4, 5]]]
    assert batch.y.tolist() == [[5, 6, 0], [1, 2, 3]]
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.index.tolist() == [2, 0]
    assert (batch.x.dtype, batch.y.dtype) == (torch.float64, torch.int64)
    assert (batch.mask.dtype, batch.index.dtype) == (torch.bool, torch.int64)


def test_pad_without_labels() -> None:
    batch = pad([np.ones((2, 1)), np.ones((1, 1))], None, np.zeros(1), [0, 1])
    assert batch.y.tolist() == [[-1, -1], [-1, 0]]
    assert batch.mask.tolist() == [[True, True], [True, False]]


def test_pad_widens_narrow_rows_with_unused_pairs() -> None:
    X = [[{"w": "a", "p": 1}, {"w": "b"}], [{"w": "a", "p": 1, "q": 2, "r": 3}], [{"w": "b", "q": 4}]]
    encoder = FeatureEncoder().fit(X)
    rows = encoder.transform(X)
    assert [r.shape for r in rows] == [(2, 3), (1, 7), (1, 3)]
    batch = pad(rows, None, encoder.pad_row, [0, 1, 2])
    nothing = [-1, -1, 0, -1, 0, -1, 0]
    assert batch.x.tolist() == [
        [[0, 0, 1, -1, 0, -1, 0], [1, -1, 0, -1, 0, -1, 0]],
        [[0, 0, 1, 1, 2, 2, 3], nothing],
        [[1, 1, 4, -1, 0, -1, 0], nothing],
    ]


def test_an_empty_sequence_beside_others() -> None:
    X = [[], [{"w": "a", "n": 2.0}]]
    encoder = FeatureEncoder().fit(X)
    batch = pad(encoder.transform(X), None, encoder.pad_row, [0, 1])
    assert batch.x.tolist() == [[[-1, -1, 0]], [[0, 0, 2]]]
    assert batch.mask.tolist() == [[False], [True]]


def test_batches_leave_the_rows_alone() -> None:
    rows = [np.ones((2, 1)), np.ones((1, 1))]
    batch = pad(rows, None, np.zeros(1), [0, 1])
    batch.x.zero_()
    assert all((r == 1).all() for r in rows)
