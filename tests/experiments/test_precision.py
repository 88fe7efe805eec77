"""Bounds of CPU and device side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments import precision


def test_a_row_has_bounds_of_both_and_fails_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    data = precision.dense_sequences(6, n_labels=3, width=4)
    row = precision.compare(data, "rbf", 2.0, 20.0, 20, "cpu")
    assert row["apart"] == 0.0  # the same fit twice
    assert not row["fails"]
    assert len(row["fits"]) == precision.RESTARTS

    def fitted(*given: Any) -> dict[str, Any]:
        return {"bound": -1.0 - 0.2 * given[-1], "stopped": "converged"}

    monkeypatch.setattr(precision, "fitted", fitted)
    row = precision.compare(data, "rbf", 2.0, 20.0, 20, "cpu")
    assert row["below"] == pytest.approx(0.4)
    assert row["fails"]


def test_kernels_have_the_amplitude_asked_for() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    for name in ("rbf", "matern"):
        values = precision.kernel_of(name, 2.0, 9.0).double()(x).to_dense()
        assert values.diagonal().tolist() == pytest.approx([9.0] * 4)
    linear = precision.kernel_of("linear", 2.0, 9.0).double()(x).to_dense()
    torch.testing.assert_close(linear, 9 / 4 * x @ x.T)
    total = precision.kernel_of("sum", 2.0, 9.0).double()(x).to_dense()
    parts = [precision.kernel_of(n, 2.0, 3.0).double()(x).to_dense() for n in precision.KERNELS[:3]]
    torch.testing.assert_close(total, sum(parts))
