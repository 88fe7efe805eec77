"""The files in a folder of shards, and how to tell that they are complete.

=====================  ==================================================================================
manifest.json          counts, labels, and the size and digest of every other file; it is written last, so
                       a folder without one is not complete
encoder.json           the vocabularies
counts-J.npy           how often each value of template J occurs
shard-NNNNN-*.npy      one part of the data, its sequences sorted by length: ``starts`` (n + 1, 2), where
                       the tokens and the sparse features of each start; ``numbers`` (n,), the place of
                       each in the data; ``labels``, one per token; ``values`` (tokens, P), ids of the
                       templates' values; ``sparse_counts``, one per token, ``sparse_ids`` and
                       ``sparse_values``
=====================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from structgp.data.atomic import atomic_write
from structgp.data.encode import FeatureEncoder
from structgp.data.sources.lines import cannot_read, digest_of_file
from structgp.errors import InputError

FORMAT = 2
MANIFEST = "manifest.json"
ENCODER = "encoder.json"


class Shards:
    """Encoded sequences on disk, for :meth:`structgp.StructuredGPClassifier.fit`.

    folder : where they are; about : the manifest; n_sequences, n_tokens : numbers of sequences that have
    tokens and labels, and of their tokens; classes : the labels; digest : SHA-256 of the manifest, which
    contains those of all files. Memory is that of the vocabularies, however many sequences there are."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about, self.digest = folder, about, str(about["digest"])
        self.n_sequences, self.n_tokens = int(about["n_sequences"]), int(about["n_tokens"])
        self.n_shards, self.classes = len(about["shards"]), list(about["classes"])
        self._checked: set[str] = set()

    @cached_property
    def encoder(self) -> FeatureEncoder:
        self.check(ENCODER)
        return FeatureEncoder.from_json(json.loads((self.folder / ENCODER).read_text("utf-8")))

    @property
    def value_counts(self) -> list[np.ndarray]:
        """How often each value of each template occurs."""
        return [self.array(f"counts-{j}") for j in range(len(self.encoder.templates))]

    def labels(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each sequence and its label indices, shard by shard."""
        for k in range(self.n_shards):
            starts, numbers = self.array(part(k, "starts")), self.array(part(k, "numbers"))
            labels = self.array(part(k, "labels"))
            for n, begin, end in zip(numbers, starts[:-1, 0], starts[1:, 0], strict=True):
                yield int(n), np.asarray(labels[begin:end], dtype=np.int64)

    def has(self, name: str) -> bool:
        return f"{name}.npy" in self.about["files"]

    def array(self, name: str) -> np.ndarray:
        """One of the arrays, memory-mapped, and checked against its digest the first time."""
        file = f"{name}.npy"
        self.check(file)
        try:
            found: np.ndarray = np.load(self.folder / file, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise cannot_read(str(self.folder / file), error) from error
        return found

    def check(self, file: str) -> None:
        """InputError if the file has changed since it was written."""
        if file in self._checked:
            return
        if digest_of_file(self.folder / file) != self.about["files"][file][1]:
            raise altered(self.folder / file)
        self._checked.add(file)


def read(folder: str | os.PathLike[str]) -> Shards:
    """The shards in a folder that ``write`` has filled.

    An InputError names the folder if it does not exist or is not complete, and a file if it has changed
    since it was written: sizes are checked here, contents when they are first read."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(str(folder), "no such folder", "check the path, or write the shards first")
    try:
        text = (path / MANIFEST).read_text("utf-8")
    except FileNotFoundError:
        problem = "no shards, or not all of them were written"
        raise InputError(str(folder), problem, "write them again") from None
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error})"
        raise InputError(str(path / MANIFEST), problem, "write the shards again") from None
    try:
        about = json.loads(text)
        digest, kind = about.pop("digest"), about["format"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise altered(path / MANIFEST) from None
    if kind != FORMAT:
        raise InputError(str(folder), "shards of another version", "write them again")
    if digest != digest_of(about):
        raise altered(path / MANIFEST)
    for file, (size, _) in about["files"].items():
        try:
            found = (path / file).stat().st_size
        except OSError as error:
            raise cannot_read(str(path / file), error) from error
        if found != size:
            raise altered(path / file)
    return Shards(path, about | {"digest": digest})


@dataclass
class Folder:
    """A folder that is being filled. files : size and digest of each file written so far."""

    path: Path
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    def save(self, name: str, array: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        self.put(f"{name}.npy", content.getvalue())

    def put(self, file: str, content: bytes) -> None:
        with atomic_write(self.path / file, "wb") as out:
            out.write(content)
        self.files[file] = len(content), hashlib.sha256(content).hexdigest()

    def finish(self, about: dict[str, Any]) -> None:
        """Write the manifest, which makes the folder complete."""
        about = json.loads(json.dumps({"format": FORMAT, **about, "files": self.files}))
        text = json.dumps(about | {"digest": digest_of(about)})
        with atomic_write(self.path / MANIFEST, "w") as out:
            out.write(text)


def part(shard: int, what: str) -> str:
    return f"shard-{shard:05d}-{what}"


def ours(path: Path) -> Sequence[Path]:
    """The files in a folder that belong to shards."""
    patterns = (MANIFEST, ENCODER, "counts-*.npy", "shard-*-*.npy")
    return [file for pattern in patterns for file in path.glob(pattern)]


def digest_of(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def altered(path: Path) -> InputError:
    return InputError(str(path), "changed since it was written", "write the shards again")
