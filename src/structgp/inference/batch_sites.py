"""The Gaussian factor (site) of each minibatch, kept in memory, or in files where there are too many.

A batch has one site per block: a precision and a linear term for each weight that occurs in the batch.
These numbers are rounded to single precision where that can hold them, and the posterior is computed from
the rounded numbers, so that nothing drifts.

On disk, the sites of one pass are appended to one file, and each of several processes has a file of its
own. A checkpoint records how long the files were. A run that continues from it cuts its file to that
length, or begins new files where there are or were several processes. So nothing that a checkpoint refers
to is ever overwritten, and whatever a killed run wrote after its last checkpoint is ignored."""

from __future__ import annotations

import os
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.inference.distributed import ALONE, Processes

LARGEST_SINGLE = 1e37


@dataclass(frozen=True)
class Site:
    """What one batch says about one block. precision, linear : (F, R), for the F weights that occur in it.
    scale : (R,) by how much the functions' variances had grown when the site was made. dual : (N, R), for
    each of the N rows of the batch, the slope of its likelihood; the next visit starts there."""

    precision: Tensor
    linear: Tensor
    scale: Tensor
    dual: Tensor

    @staticmethod
    def empty(n_weights: int, n_rows: int, scale: Tensor, kind: torch.dtype = torch.float64) -> Site:
        weights, dual = (scale.new_zeros((n, len(scale)), dtype=kind) for n in (n_weights, n_rows))
        return Site(weights, weights, scale, dual)

    def to(self, device: torch.device) -> Site:
        return Site(*(x.to(device) for x in vars(self).values()))

    def rounded(self) -> Site:
        """The site as it is stored: in single precision, if that can hold its numbers."""
        if self.precision.dtype == torch.float32:
            return self
        fits = all(bool((x.abs() < LARGEST_SINGLE).all()) for x in (self.precision, self.linear))
        kind = torch.float32 if fits else torch.float64
        return Site(self.precision.to(kind), self.linear.to(kind), self.scale, self.dual.to(kind))

    def at(self, scale: Tensor, kind: torch.dtype = torch.float64) -> Site:
        """The same site with numbers of type ``kind``, for functions whose variances have grown to
        ``scale``."""
        precision, linear, dual = (x.to(kind) for x in (self.precision, self.linear, self.dual))
        if not torch.equal(scale, self.scale):
            grown = (scale / self.scale).to(kind)
            precision, linear, dual = precision * grown, linear * grown.sqrt(), dual * grown.sqrt()
        return Site(precision, linear, scale, dual)


@dataclass
class SitesOnDisk:
    """The sites of each batch, one per block, in files; None before the first visit. n_functions : R of
    each block. table : (n, 3 + 3 per block), for each batch, the number of the file that holds its sites
    (-1 before the first visit), the offset in bytes, a checksum, and for each block the number of weights
    F, the number of rows N and the bytes per number. current : number of the first file of this pass;
    process k of ``size`` appends to file ``current`` + k. length : number of bytes in this process's
    file."""

    folder: str
    n_functions: list[int]
    table: Tensor
    current: int = 0
    length: int = 0
    size: int = 1
    rank: int = field(default=0, init=False)
    _oldest: int = field(default=0, init=False)

    @staticmethod
    def new(
        folder: str | os.PathLike[str], n: int, n_functions: list[int], together: Processes = ALONE
    ) -> SitesOnDisk:
        """No sites yet, in a folder that is created; sites that another run has left there are removed."""
        path = Path(folder).absolute()
        try:
            path.mkdir(exist_ok=True)
            if together.is_first:
                for old in path.glob("*.sites"):
                    old.unlink()
            together.wait()
            (path / f"{together.rank}.sites").touch()
        except OSError as error:
            raise _cannot(str(folder), error) from error
        table = torch.full((n, 3 + 3 * len(n_functions)), -1, dtype=torch.int64)
        found = SitesOnDisk(str(path), n_functions, table, size=together.size)
        found.rank = together.rank
        return found

    @staticmethod
    def of(
        sites: list[list[Site] | None],
        folder: str | os.PathLike[str],
        n_functions: list[int],
        together: Processes,
    ) -> SitesOnDisk:
        """Moves sites from memory to disk. All processes have all of them; each writes those of its own
        batches."""
        found, own = SitesOnDisk.new(folder, len(sites), n_functions, together), together.range(len(sites))
        for i in own:
            kept = sites[i]
            if kept is not None:
                found[i] = kept
        table = torch.zeros_like(found.table)
        table[own.start : own.stop] = found.table[own.start : own.stop]
        together.add_up(table)
        found.table = table
        return found

    def go_on(self, together: Processes = ALONE) -> None:
        """Continues in place after a checkpoint has been read: files are cut to the length that it records,
        and files that a killed run began later are removed. Several processes begin new files, and so does
        one process that continues a fit of several."""
        first, last = self.current, self.current + self.size - 1
        path, folder = self._file(first), Path(self.folder)
        used = {int(number) for number in self.table[:, 0].unique() if number >= 0}
        missing = [number for number in used if not self._file(number).exists()]
        alone = self.size == together.size == 1
        if missing or (alone and (not path.exists() or path.stat().st_size < self.length)):
            raise InputError(self.folder, "sites of the fit are missing in it", "remove the checkpoint")
        together.wait()  # until all have looked
        if together.is_first:
            if alone:
                os.truncate(path, self.length)
            for other in folder.glob("*.sites"):
                if int(other.stem) > last:
                    other.unlink()
        together.wait()
        if not alone:
            self.current, self.size, self.rank, self.length = last + 1, together.size, together.rank, 0
            self._own.touch()
        self._oldest = min((int(p.stem) for p in folder.glob("*.sites")), default=0)

    @property
    def _own(self) -> Path:
        """The file to which this process appends."""
        return self._file(self.current + self.rank)

    def _file(self, number: int) -> Path:
        return Path(self.folder) / f"{number}.sites"

    def __getitem__(self, i: int) -> list[Site] | None:
        number, offset, checksum, *sizes = self.table[i].tolist()
        if number < 0:
            return None
        shapes = [(*sizes[3 * k : 3 * k + 3], R) for k, R in enumerate(self.n_functions)]
        size = sum(((2 * F + N) * width + 8) * R for F, N, width, R in shapes)
        path = self._file(number)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise _cannot(str(path), error) from error
        if len(content) != size or zlib.crc32(content) != checksum:
            raise InputError(str(path), "altered since it was written", "fit anew")
        found, start = [], 0
        for F, N, width, R in shapes:
            middle = start + (2 * F + N) * R * width
            tall = torch.from_numpy(np.frombuffer(content[start:middle], dtype=f"f{width}").copy())
            precision, linear, dual = tall.view(-1, R).split([F, F, N])
            start = middle + 8 * R
            scale = torch.from_numpy(np.frombuffer(content[middle:start], dtype="f8").copy())
            found.append(Site(precision, linear, scale, dual))
        return found

    def __setitem__(self, i: int, sites: list[Site]) -> None:
        parts = [part for s in sites for part in (s.precision, s.linear, s.dual, s.scale)]
        content = b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)
        path = self._own
        try:
            with open(path, "r+b") as file:
                file.seek(self.length)
                file.write(content)
        except OSError as error:
            raise _cannot(str(path), error) from error
        sizes = [(len(s.precision), len(s.dual), s.precision.element_size()) for s in sites]
        row = [
            self.current + self.rank,
            self.length,
            zlib.crc32(content),
            *(n for some in sizes for n in some),
        ]
        self.table[i] = torch.tensor(row)
        self.length += len(content)

    def next_pass(self) -> None:
        """Begins the file of a new pass."""
        self.current, self.length = self.current + self.size, 0
        self._own.touch()

    def release(self) -> None:
        """Removes the files before the oldest one that holds a current site: nothing will read them any
        more."""
        used = min(int(self.table[:, 0].min()), self.current)
        if used < 0:
            return
        for number in range(self._oldest, used):
            self._file(number).unlink(missing_ok=True)
        self._oldest = max(self._oldest, used)


def remove_sites(folder: str | os.PathLike[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _cannot(place: str, error: OSError) -> InputError:
    problem = f"cannot hold the sites of the fit ({error.strerror or error})"
    return InputError(place, problem, "choose a disk with room for them")
