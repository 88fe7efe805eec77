"""The n best labellings against all of them, sorted."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.structures import Chain, Rules, keep_known

generated = settings(max_examples=40, deadline=None, derandomize=True)


def potentials(
    seed: int, S: int, lengths: list[int], V: int, size: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """f, g and mask, with nan at padding."""
    rng = np.random.default_rng(seed)
    T = max(1, *lengths)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    f = torch.tensor(size * rng.normal(size=(S, len(lengths), T, V)))
    return (
        f.masked_fill(~mask[..., None], torch.nan),
        torch.tensor(size * rng.normal(size=(S, V, V))),
        mask,
    )


def random_rules(seed: int, V: int, bans: float) -> Rules:
    rng = np.random.default_rng(seed + 1)
    return Rules(*(torch.tensor(rng.random(shape) >= bans) for shape in ((V, V), V, V)))


@generated
@given(
    st.integers(0, 2**16),
    st.lists(st.integers(0, 4), min_size=2, max_size=3),
    st.integers(1, 3),
    st.integers(1, 100),
    st.sampled_from([0.0, 0.2, 0.5]),
    st.sampled_from([1.0, 200.0]),
    st.booleans(),
)
def test_the_best_of_all_labellings(
    oracles: ModuleType,
    seed: int,
    lengths: list[int],
    V: int,
    n: int,
    bans: float,
    size: float,
    known: bool,
) -> None:
    f, g, mask = potentials(seed, 2, lengths, V, size)
    rules = random_rules(seed, V, bans)
    y = torch.full(mask.shape, -1)
    if known:
        y[:, 0] = 0
    labels, values = Chain(rules).n_best(keep_known(f, y, mask), g, mask, n)
    T = f.shape[2]
    assert labels.shape == (2, len(lengths), n, T)
    assert labels.dtype == torch.int64
    assert values.shape == (2, len(lengths), n)
    for s in range(2):
        for b, length in enumerate(lengths):
            table = oracles.chain_table(f[s, b, :length].numpy(), g[s].numpy())
            keep = np.array(
                [
                    oracles.obeys(z, rules.follows, rules.starts, rules.ends)
                    and oracles.agrees(z, y[b, :length].tolist())
                    for z in table.labels
                ]
            )
            table = oracles.among(table, keep)
            there = int(min(n, keep.sum()))
            found = labels[s, b, :there].numpy()
            assert (values[s, b, there:] == -torch.inf).all()
            assert not found[:, length:].any()
            assert len({tuple(z) for z in found}) == there
            if not there:
                continue
            log_prob = np.sort((table.score - table.log_z)[keep])[::-1][:there].astype(float)
            np.testing.assert_allclose(values[s, b, :there], log_prob, rtol=1e-10, atol=1e-8)
            # Each has the probability that is told of it.
            index = (found[:, :length] * V ** np.arange(length)[::-1]).sum(-1)
            own = (table.score - table.log_z)[index].astype(float)
            np.testing.assert_allclose(values[s, b, :there], own, rtol=1e-10, atol=1e-8)
            if there == keep.sum():
                assert float(values[s, b].exp().sum()) == pytest.approx(1, abs=1e-8)


def test_the_best_is_viterbi() -> None:
    f, g, mask = potentials(0, 3, [6, 1, 4], 4)
    labels, values = Chain().n_best(f, g, mask, 5)
    assert torch.equal(labels[:, :, 0], Chain().decode(f, g, mask))
    assert (values[..., :-1] >= values[..., 1:]).all()


def test_ties_are_told_apart() -> None:
    """All 2^3 labellings are alike."""
    f, g, mask = potentials(0, 1, [3], 2, size=0.0)
    labels, values = Chain().n_best(f, g, mask, 8)
    assert len(torch.unique(labels[0, 0], dim=0)) == 8
    torch.testing.assert_close(values.exp(), torch.full_like(values, 1 / 8))


def test_a_sequence_of_nothing_has_one_labelling() -> None:
    f, g, mask = potentials(0, 1, [2, 0], 3)
    labels, values = Chain().n_best(f, g, mask, 3)
    assert values[0, 1].tolist() == [0, -torch.inf, -torch.inf]
    assert not labels[0, 1, 0].any()


def test_more_than_can_be() -> None:
    f, g, mask = potentials(1, 1, [1], 2)
    values = Chain().n_best(f, g, mask, 5)[1][0, 0]
    torch.testing.assert_close(values[:2].exp().sum(), torch.ones((), dtype=f.dtype))
    assert (values[2:] == -torch.inf).all()
