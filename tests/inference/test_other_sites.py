"""What other batches say of a batch's weights: compiled loops as torch operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from structgp.inference import other_sites
from structgp.inference.batch_sites import Site
from structgp.inference.other_sites import CompiledOthers, Others


def case(seed, M=5000, F=2500, R=3, wide=1.0):
    """Sums (M, R) of which a site (F, R) is a part, and a new one, with precisions below 0 among them."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    index = torch.randperm(M, generator=random)[:F].sort().values
    site = Site(
        (wide * normal(F, R)).square().float(), normal(F, R).float(), torch.ones(R), torch.zeros(1, R)
    )
    sums = (wide * normal(M, R)).square(), normal(M, R)  # without the site, some are below 0
    prior_sd = (wide * normal(M))[index].exp()
    return sums, index, prior_sd, site, (normal(F, R) + 1).float(), normal(F, R).float()


@pytest.mark.parametrize("wide", [1.0, 8.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_loops_do_what_torch_does(wide, threads, monkeypatch):
    monkeypatch.setattr("structgp.threads.WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sums, index, prior_sd, site, precision, say = case(0, wide=wide)
    copies = tuple(x.clone() for x in sums)
    theirs, mine = Others(copies, index, prior_sd, site), CompiledOthers(sums, index, prior_sd, site)
    wanted, found = theirs.begin(site, None), mine.begin(site)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
    linear = torch.addcmul(wanted.mean, say, wanted.variance).mul_(precision.clamp(min=0)).add_(say)
    new = Site(precision.clamp(min=0), linear, site.scale, site.dual)
    after = mine.end(precision, say, found.variance, found.mean)
    assert after == pytest.approx(theirs.end(new, None), rel=2e-5)
    torch.testing.assert_close(precision, new.precision, rtol=0, atol=0)
    torch.testing.assert_close(say, linear, rtol=2e-5, atol=1e-5)
    for a, b in zip(sums, copies, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-5)


def test_threads_change_nothing(monkeypatch):
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("structgp.threads.WORTH_A_THREAD", 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        sums, index, prior_sd, site, precision, say = case(1)
        others = CompiledOthers(sums, index, prior_sd, site)
        begun = others.begin(site)
        found.append((begun.divergence, others.end(precision, say, begun.variance, begun.mean), say, *sums))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2:], found[1][2:], strict=True))


def test_where_it_is_used(monkeypatch):
    *_, site, _, _ = case(2)
    monkeypatch.setattr(other_sites, "WORTH_COMPILING", site.linear.numel())
    assert CompiledOthers.suits(site)
    assert not CompiledOthers.suits(Site(site.precision, site.linear.double(), site.scale, site.dual))
    monkeypatch.setattr(other_sites, "WORTH_COMPILING", site.linear.numel() + 1)
    assert not CompiledOthers.suits(site)
