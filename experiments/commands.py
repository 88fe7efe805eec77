"""The options of all commands that make tables, and their loop over open cells."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

import structgp
from experiments import cells
from experiments.cells import Row, Store, say
from experiments.data import RESULTS
from structgp import InputError


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCell = TypeVar("AnyCell", bound=Named)


def parser_of(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with --data, --quick, --jobs and --results."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--quick", action="store_true", help="a smaller answer, in minutes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", default=str(RESULTS), help="folder to keep cells in")
    return parser


def add_folds(parser: argparse.ArgumentParser, tasks: Sequence[str]) -> None:
    """Adds --task and --fold."""
    parser.add_argument("--task", nargs="+", choices=tasks, default=list(tasks))
    parser.add_argument("--fold", nargs="+", type=int, choices=range(5), help="default: all")


def is_done(row: Row | None, minutes: float, device: str = "cpu") -> bool:
    """False if a cell has no row, or if its fit was cut short by a time limit of less than ``minutes`` on
    the same device: on another device, a minute is worth more or less. Rows without 'minutes' had no such
    limit."""
    if row is None:
        return False
    cut_short = row["hit_limit"] and row["minutes"] is not None and row["minutes"] < minutes
    return not cut_short or row.get("device", "cpu") != device


def finish(
    work: Callable[[AnyCell], Row],
    open_cells: Sequence[AnyCell],
    store: Store,
    n_jobs: int,
    tell: Callable[[Row], str],
) -> int:
    """Does the cells and keeps their rows, with a line of progress for each; returns how many failed."""
    if n_jobs < 1:
        raise InputError("--jobs", f"{n_jobs} processes do nothing", "give 1 or more")
    _check_writable(store.path.parent)
    n, failed = len(open_cells), 0
    say([f"{n} cells to do, {len(store.rows())} in {store.path.name}, {n_jobs} processes"])
    for number, (cell, row) in enumerate(cells.run_all(work, open_cells, n_jobs), 1):
        if isinstance(row, Exception):
            failed += 1
            say([f"[{number}/{n}] {cell.name}: failed: {type(row).__name__}: {row}"])
        else:
            store.add(row)
            say([f"[{number}/{n}] {cell.name}: {tell(row)}"])
    return failed


def _check_writable(folder: Path) -> None:
    """Raises InputError if the folder cannot be written to, before hours are spent on the results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        words = f"{folder}: {error.strerror or error}"
        raise InputError("--results", words, "name a folder that can be written to") from error


def tell_error(row: Row) -> str:
    """A line of progress such as '4.43 %, 12 s (limit)'."""
    limit = " (limit)" if row["hit_limit"] else ""
    return f"{row['error']:.2f} %, {row['seconds']:.0f} s{limit}"


def publish(path: Path, text: str, figures: dict[str, str]) -> None:
    """Prints the tables, writes them beside the cells at ``path``, and each figure there as NAME.svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    for name, svg in figures.items():
        (path.parent / f"{name}.svg").write_text(svg, encoding="utf-8")
    print(text, end="")


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on. 'source' is a digest of structgp's files, which
    distinguishes states of one version."""
    digest = hashlib.sha256()
    for file in sorted(Path(structgp.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    found = {
        "structgp": structgp.__version__,
        "source": digest.hexdigest()[:8],
        "python": platform.python_version(),
    }
    for name in ("torch", "gpytorch", "numpy", "scipy", "python-crfsuite"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
