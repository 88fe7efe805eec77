"""Mutated input files of every format. An independent reader must read the same from them; otherwise they
must be refused in one line."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structgp
from fuzz import damage, documents
from fuzz.readers import ORACLES
from structgp.cli.structure_files import read_json
from structgp.data import sources
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import check_labels
from structgp.data.rules import declared_rules
from structgp.data.sources import Template, WordVectors
from structgp.structures import spec_from_words

SEEDS: dict[str, list[bytes]] = {
    "columns": [
        b"two CD QTY\neggs NNS NAME\n\nfigs NNS NAME\n",
        "größe\tX\tA\r\n\u3000 Y B\r\n\r\n語 Z A".encode(),
        b"\xef\xbb\xbfa b\n c  d \n \t\ne f",
    ],
    "crfsuite": [
        b"QTY\tw=two\tn:2\nNAME\tw=eggs\tlen\\:gth:4\n\nNAME\tw=figs\n",
        b"a\tb:1.5\tb:2\tc\\\\d\n",
    ],
    "jsonl": [
        b'{"tokens": [{"w": "two", "n": 1.5}, {"w": "eggs"}], "labels": ["Q", "N"], "id": 3}\n'
        b'{"tokens": [{"w": "figs"}], "labels": ["N"]}\n',
        b'{"tokens": [["a", "b"], ["c", "d"]], "labels": ["x", null]}',
    ],
    "template": [b"# t\nU00:%x[-1,0]\nU01:%x[0,0]/%x[0,0]\nB\nB01:%x[0,0]\n", b"U:%x[0,0]\n"],
    "wapiti": [b'u:%x[0,0]\n*:%t[-1,0,"^\\u.*a?$"] # c\nb:%M[@1,0,"a*b?"]\n', b'U1:%m[0,0,"\\d*"]\nB\n'],
    "vectors": [b"2 3\neggs 0.1 -0.2 0.3\nmilk 0 .5 -.1\n", b"a 1 2\nb 3e2 4\n"],
    "structure": [b'{"chain": {"order": 2}, "same": {"key": "w"}}', b'{"tree": {}}', b'{"grid": {}}'],
    "rules": [
        b'{"scheme": "BIO", "forbidden": {"next": [["O", "B-X"], [null, "O"]]}}',
        b'{"allowed": {"next": [["O", "B-X"], ["B-X", "I-X"], ["O", "O"]]}}',
    ],
} | {name: documents.seeds(name) for name in documents.NAMES}
"""Correct files, by format."""

BITS = [
    b"\0",
    b"\r",
    b"\n\n",
    b"\t",
    b" ",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xe2\x80\xa8",
    b"%x[",
    b'"',
    b"\\",
    b":",
    b"#",
]
BITS += [
    b"1e999",
    b"nan",
    b"-1",
    b"10" * 200,
    b"x" * 5000,
    b"[" * 2000,
    b"%x[0,99999999]",
    b"%x[-999999999,0]",
    b"@",
]


def mutated(format: str, rng: random.Random) -> bytes:
    """A file with one to four changes."""
    content = rng.choice(SEEDS[format])
    for _ in range(rng.choice([1, 1, 2, 4])):
        way, at = rng.randrange(5), rng.randrange(len(content) + 1)
        if way == 0:
            content = damage.bytes_of(content, rng)
        elif way == 1 and format in documents.NAMES:
            content = documents.structured(content, format, rng)
        elif way <= 2:
            content = content[:at] + rng.choice(BITS) + content[at:]
        elif way == 3 and format != "spacy":
            lines = content.split(b"\n")
            rng.shuffle(lines)
            content = b"\n".join(lines)
        elif format in documents.NAMES:
            content = documents.structured(content, format, rng)
        elif format in ("jsonl", "structure", "rules"):
            content = _json_changed(content, rng)
    return content


def _json_changed(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    try:
        tree = {"line": json.loads(lines[0])}
        damage.json_value(tree, rng)
        lines[0] = json.dumps(tree.get("line")).encode("utf-8", errors="surrogatepass")
    except (ValueError, RecursionError, TypeError):
        pass
    return b"\n".join(lines)


def _read(format: str, path: Path) -> list[list[tuple[Any, Any]]]:
    """What structgp reads from a file of training data."""
    if format == "columns":
        rows = [s.rows for s in sources.read_columns(path).sequences]
        return [[(tuple(row[:-1]), row[-1]) for row in sequence] for sequence in rows]
    reader = sources.learn(path, format=format)
    data = reader.read(path)
    check_labels(data.X, data.y)
    FeatureEncoder().fit(data.X).transform(data.X)
    return [list(zip(x, y, strict=True)) for x, y in zip(data.X, data.y, strict=True)]


def _use(format: str, path: Path) -> None:
    """Reads a file that is not training data, and uses it a little."""
    if format in ("template", "wapiti"):
        template = Template.read(path, dialect="wapiti" if format == "wapiti" else "crf++")
        template.check_columns(1, "rows")
        template.expand([("two",), ("eggs",)])
    elif format == "vectors":
        vectors = WordVectors(path)
        assert all(math.isfinite(v) for word in ("eggs", "a", "?") for v in vectors[word])
    elif format == "rules":
        declared_rules(read_json(str(path)), ["B-X", "I-X", "O"])
    else:
        spec_from_words(read_json(str(path)))


def answers(path: str, format: str) -> str:
    """'answered', or 'refused' with the error message; raises on anything else, including misreadings."""
    content = Path(path).read_bytes()
    try:
        if format in documents.NAMES:
            return documents.answers(path, format)
        if format not in ORACLES:
            _use(format, Path(path))
            return "answered"
        found = _read(format, Path(path))
    except structgp.StructgpError as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            raise RuntimeError("an error of several lines, or a long one") from error
        return f"refused: {error}"
    oracle: Callable[[bytes], Any] = ORACLES[format]
    if _plain(found) != _plain(oracle(content)):
        raise AssertionError(f"read {str(_plain(found))[:300]}, not {str(_plain(oracle(content)))[:300]}")
    return "answered"


def _plain(value: Any) -> Any:
    """The value as plain JSON, with arrays and tuples as lists."""
    return json.loads(json.dumps(value, default=lambda v: v.tolist()))
