"""Sites on disk are those in memory, and go back to where a checkpoint knew them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from structgp.errors import InputError
from structgp.inference.batch_sites import Site, SitesOnDisk

FUNCTIONS = [2, 9]
"""Functions of a block of weights, and of a table."""


def site(seed: int, F: int = 4, R: int = 2, size: float = 1.0) -> Site:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return Site(size * draw(F, R) ** 2, size * draw(F, R), draw(R) ** 2, draw(F + 1, R))


def sites_of(seed: int, F: int = 4, size: float = 1.0) -> list[Site]:
    """Of both blocks of one batch; only the first may need double precision."""
    return [site(seed, F, size=size).rounded(), site(seed + 50, 1, FUNCTIONS[1]).rounded()]


def assert_equal(some: list[Site] | None, others: list[Site] | None) -> None:
    assert some is not None
    assert others is not None
    for one, other in zip(some, others, strict=True):
        for field in dataclasses.fields(Site):
            a, b = getattr(one, field.name), getattr(other, field.name)
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name


def test_what_is_put_in_comes_out(tmp_path: Path) -> None:
    disk, memory = SitesOnDisk.new(tmp_path / "s", 3, FUNCTIONS), {}
    assert disk[1] is None
    for i, size in ((1, 1.0), (0, 1e60), (1, 2.0)):
        disk[i] = memory[i] = sites_of(i, F=4 + i, size=size)
        assert_equal(disk[i], memory[i])
    assert_equal(disk[0], memory[0])
    assert disk[2] is None


def test_numbers_that_single_precision_holds_are_held_in_it() -> None:
    assert site(0).rounded().precision.dtype == torch.float32
    assert site(0, size=1e60).rounded().precision.dtype == torch.float64
    kept = site(0).rounded().at(site(0).scale)
    torch.testing.assert_close(kept.linear, site(0).linear, rtol=1e-7, atol=0)


def test_functions_that_grow_take_their_sites_along() -> None:
    one = site(0)
    grown = one.at(4 * one.scale)
    torch.testing.assert_close(grown.precision, 4 * one.precision)
    torch.testing.assert_close(grown.linear, 2 * one.linear)
    torch.testing.assert_close(grown.dual, 2 * one.dual)


def test_files_of_passes_that_are_over_go_when_nothing_asks_for_them(tmp_path: Path) -> None:
    sites = SitesOnDisk.new(tmp_path / "s", 2, FUNCTIONS)

    def files() -> list[str]:
        return sorted(p.name for p in (tmp_path / "s").iterdir())

    sites[0] = sites[1] = sites_of(0)
    sites.next_pass()
    sites[0] = sites_of(1)
    sites.release()
    assert files() == ["0.sites", "1.sites"], "one site is in the old file still"
    sites[1] = sites_of(2)
    assert files() == ["0.sites", "1.sites"], "a checkpoint may know it"
    sites.release()
    assert files() == ["1.sites"]
    assert_equal(sites[0], sites_of(1))


def test_a_run_that_goes_on_cuts_what_its_checkpoint_does_not_know(tmp_path: Path) -> None:
    sites = SitesOnDisk.new(tmp_path / "s", 2, FUNCTIONS)
    sites[0] = sites_of(0)
    known = {f.name: getattr(sites, f.name) for f in dataclasses.fields(SitesOnDisk) if f.init} | {
        "table": sites.table.clone()
    }
    sites[0], sites[1] = sites_of(1), sites_of(2)
    sites.next_pass()
    sites[0] = sites_of(3)
    again = SitesOnDisk(**known)
    again.go_on()
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["0.sites"]
    assert_equal(again[0], sites_of(0))
    assert again[1] is None
    again[1] = sites_of(4)
    assert_equal(again[1], sites_of(4))
    (tmp_path / "s" / "0.sites").unlink()
    with pytest.raises(InputError, match="sites of the fit are missing in it; remove the checkp"):
        SitesOnDisk(**known).go_on()


def test_damage_is_told(tmp_path: Path) -> None:
    sites = SitesOnDisk.new(tmp_path / "s", 1, FUNCTIONS)
    sites[0] = sites_of(0)
    path = tmp_path / "s" / "0.sites"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"0\.sites: altered since it was written; fit anew"):
        sites[0]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot hold the sites .* choose a disk with room"):
        SitesOnDisk.new(tmp_path / "none" / "s", 1, FUNCTIONS)
