"""Mutated files of annotation tools. An independent reader must read the same from them; and documents must
be the same after writing and reading, in their own format and in every other."""

from __future__ import annotations

import json
import random
import tempfile
import unicodedata
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import srsly

from fuzz import damage
from structgp import InputError
from structgp.data import formats
from structgp.data.documents import Document

PARTS = b"\x1e"
"""Separator between the text and the annotations of brat's two files, which are mutated as one."""


@cache
def _docbin() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.spacy"
        some = [Document.from_text("Ann Lee left Rome.", [(0, 7, "PER"), (13, 17, "LOC")], id="a")]
        formats.write([*some, Document.from_text("not  labelled")], path, "spacy")
        return path.read_bytes()


SEEDS: dict[str, list[bytes]] = {
    "conll": [b"Ann NNP B-PER\nleft VBD O\n\nRome NNP ?\n", "größe X\r\n語 A\r\n".encode(), b"a\nb\n\nc\n"],
    "conllu": [
        b"# sent_id = s1\n# text = don't\n1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_\n"
        b"1\tdo\tdo\tAUX\tVB\t_\t0\troot\t_\tSpaceAfter=No\n2\tn't\tnot\tPART\tRB\tPolarity=Neg\t1\tadvmod\t_\t_\n"
        b"2.1\tx\t_\t_\t_\t_\t_\t_\t_\t_\n\n1\tRome\t_\t_\t_\t_\t_\t_\t_\tSpacesAfter=\\s\\n\n",
        b"1\ta\t_\tX\t_\t_\t_\t_\t_\tSpacesBefore=\\s|SpacesAfter=\\t\n2\tb\t_\tY\t_\t_\t_\t_\t_\t_\n",
    ],
    "prodigy": [
        b'{"text": "Ann left", "tokens": [{"text": "Ann", "start": 0, "end": 3}, {"start": 4, "end": 8}],'
        b' "spans": [{"start": 0, "end": 3, "label": "PER"}], "answer": "accept", "id": "x"}\n'
        b'{"text": "Ro", "spans": [{"start": 0, "end": 2, "label": "L", "probability": 0.5}], "score": 1}\n'
        b'{"text": "no", "answer": "ignore", "meta": {"n": [1]}}\n',
        b'{"text": "a b", "spans": [], "unlabelled": [[2, 3]]}\n{"text": "c"}',
    ],
    "doccano": [
        b'{"id": 3, "text": "Ann left Rome", "label": [[0, 3, "PER"], [9, 13, "LOC"]]}\n'
        b'{"text": "x", "entities": [{"start_offset": 0, "end_offset": 1, "label": "L"}]}\n{"text": "y"}\n',
        b'{"text": "a b", "tokens": [[0, 3]], "labels": [[0, 3, "L"]], "probabilities": [0.5], "score": 1}',
    ],
    "label-studio": [
        b'[{"id": 1, "data": {"text": "Ann left"}, "annotations": [{"was_cancelled": true, "result": []},\n'
        b' {"ground_truth": true, "result": [{"from_name": "l", "to_name": "t", "type": "labels", "value":'
        b' {"start": 0, "end": 3, "text": "Ann", "labels": ["PER"]}}, {"type": "choices"}]}]},\n'
        b' {"data": {"body": "Rome"}, "predictions": [{"model_version": "structgp", "score": 0.5, "result":'
        b' [{"type": "labels", "score": 0.4, "value": {"start": 0, "end": 4, "labels": ["LOC"]}}]}]}]',
        b'{"data": {"text": "a b"}, "meta": {"tokens": [[0, 1], [2, 3]], "unlabelled": [[0, 1]]},'
        b' "annotations": [{"result": [{"type": "hypertextlabels", "value": {"start": "/p", "end": "/p",'
        b' "globalOffsets": {"start": 2, "end": 3}, "hypertextlabels": ["L"]}}]}]}\n{"data": {"text": ""}}',
    ],
    "brat": [
        b"Ann left\nRome." + PARTS + b"T1\tPER 0 3\tAnn\nR1\tIn Arg1:T1 Arg2:T2\nT2\tLOC 9 13\tRome\n",
        "größe 語".encode() + PARTS + b"T1\tX 0 5\t\n#1\tAnnotatorNotes T1\tprobability 0.5\n",
        b"a\r\nb" + PARTS + b"T1\tX 0 1;3 4\ta b\n",
    ],
    "text": [b"Ann left Rome.\n\nTwo eggs\r\n", "größe 語 \u2028 x".encode()],
}
JSON = ("prodigy", "doccano", "label-studio")
BITS = [
    b'"probability": "x", ',
    b'"start": -1, ',
    b'"score": 1e999, ',
    b"1" * 5000,
    b"\\ud800",
    b'"tokens": [], ',
]
BITS += [
    "\u0663".encode(),
    b"T9\tX 0 1\t\n",
    b"#1\tAnnotatorNotes T1\tprobability x\n",
    b"|SpacesAfter=\\",
    b"-1",
]


NAMES = (*SEEDS, "spacy")


def seeds(format: str) -> list[bytes]:
    return [_docbin()] if format == "spacy" else SEEDS[format]


def structured(content: bytes, format: str, rng: random.Random) -> bytes:
    """The content with a change to a value, in JSON or in the packed message of a DocBin; in other formats,
    a piece of text is inserted."""
    if format == "spacy":
        return _docbin_changed(content, rng)
    if format not in JSON:
        return content[: (at := rng.randrange(len(content) + 1))] + rng.choice(BITS) + content[at:]
    lines = [content] if content.startswith(b"[") else content.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        tree = {"line": json.loads(lines[at])}
        for _ in range(rng.choice([1, 1, 3])):
            damage.json_value(tree, rng)
        lines[at] = json.dumps(tree.get("line")).encode()
    except (ValueError, RecursionError, TypeError, IndexError):
        pass
    return b"\n".join(lines)


def _docbin_changed(content: bytes, rng: random.Random) -> bytes:
    try:
        message = srsly.msgpack_loads(zlib.decompress(content))
        key = rng.choice(list(message))
        if isinstance(message[key], bytes):
            message[key] = damage.bytes_of(message[key], rng)
        else:
            damage.json_value(message, rng)
        return zlib.compress(srsly.msgpack_dumps(message))
    except Exception:  # after earlier changes, it is no longer a DocBin
        return content


def _read(format: str, path: Path) -> list[Document]:
    if format != "brat":
        return list(formats.read(path, format))
    text, mark, annotations = path.read_bytes().partition(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.txt").write_bytes(text)
        if mark:
            (Path(folder) / "a.ann").write_bytes(annotations)
        return list(formats.read(folder, "brat"))


def answers(path: str, format: str) -> str:
    """'answered' if the file is read and written correctly; raises on anything else."""
    found = _read(format, Path(path))
    oracle = ORACLES.get(format)
    if oracle is not None:
        expected = oracle(Path(path).read_bytes())
        if len(found) != len(expected) or not all(map(_alike, found, expected)):
            raise AssertionError(f"read {str(found)[:300]}, not {str(expected)[:300]}")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # documents without tokens are left out
        for n, target in enumerate(formats.FORMATS):
            _check_written(found, target, Path(folder) / str(n))
    return "answered"


def _alike(document: Document, expected: tuple[str, Any]) -> bool:
    """True if the document is as expected. expected : the text with its spans, or the words with their
    labels."""
    what, labels = expected
    if isinstance(what, list):
        return list(document.words) == what and _plain_labels(document) == (labels or [None] * len(what))
    spans = document.spans if document.prediction is None else document.prediction.spans
    known = document.labels is not None or document.prediction is not None
    if labels is NotImplemented:
        return document.text == what
    return (
        document.text == what and known == (labels is not None) and _same_spans(what, spans, labels or [])
    )


def _plain_labels(document: Document) -> list[Any]:
    return [None] * len(document.tokens) if document.labels is None else list(document.labels)


def _same_spans(text: str, found: Any, expected: list[Any]) -> bool:
    """True if the spans are the same except for white space and invisible characters at the ends."""

    def empty(part: str) -> bool:
        return all(c.isspace() or unicodedata.category(c)[0] == "C" for c in part)

    pairs = list(zip(sorted(found), sorted(expected), strict=False))
    return len(found) == len(expected) and all(
        a.label == c and s <= a.start and a.stop <= e and empty(text[s : a.start] + text[a.stop : e])
        for a, (s, e, c) in pairs
    )


def _check_written(documents: list[Document], target: str, path: Path) -> None:
    """Checks that everything a format can hold is the same after writing and reading, unless writing is
    refused."""
    try:
        formats.write(documents, path, target)
    except InputError:
        return
    if target == "brat":  # brat has no tokens
        texts = sorted(file.read_bytes().decode() for file in path.glob("*.txt"))
        if texts != sorted(d.text for d in documents):
            raise AssertionError(f"to brat: {texts}"[:300])
        return
    again = list(formats.read(path, target)) if documents else []
    if target in ("conll", "conllu"):
        kept = [d for d in documents if d.tokens]
        before, after = ([(d.words, _shown(d)) for d in some] for some in (kept, again))
    elif target == "text":
        before, after = [d.text for d in documents if d.text.strip()], [d.text for d in again]
    else:
        before, after = ([(d.text, _spans(d)) for d in some] for some in (documents, again))
    if before != after:
        raise AssertionError(f"to {target}: {str(before)[:300]} became {str(after)[:300]}")


def _shown(document: Document) -> list[Any]:
    if document.prediction is not None:
        return list(document.prediction.labels)
    return _plain_labels(document)


def _spans(document: Document) -> list[Any]:
    spans = document.spans if document.prediction is None else document.prediction.spans
    return [tuple(span[:3]) for span in spans]


# -- independent readers -----------------------------------------------------------------------


def _lines(content: bytes) -> list[str]:
    lines = content.decode().removeprefix("\ufeff").split("\n")
    return [line[:-1] if line.endswith("\r") else line for line in lines]


def _blocks(content: bytes) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in _lines(content):
        if line.strip(" \t"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [block for block in found if block]


def _conll(content: bytes) -> list[Any]:
    found = []
    for block in _blocks(content):
        rows = [[cell for cell in line.replace("\t", " ").split(" ") if cell] for line in block]
        labels = [None if r[-1] == "?" else r[-1] for r in rows] if len(rows[0]) > 1 else None
        found.append(([r[0] for r in rows], labels))
    return found


def _conllu(content: bytes) -> list[Any]:
    found = []
    for block in _blocks(content):
        rows = [line.split("\t") for line in block if not line.startswith("#")]
        rows = [r for r in rows if "-" not in r[0] and "." not in r[0]]
        found.append(([r[1] for r in rows], [None if r[3] == "_" else r[3] for r in rows]))
    return found


def _text(content: bytes) -> list[Any]:
    return [(line, None) for line in _lines(content) if line.strip()]


def _prodigy(content: bytes) -> list[Any]:
    found = []
    for line in filter(str.strip, _lines(content)):
        given = json.loads(line)
        labelled = given.get("answer") == "accept" or (given.get("answer") is None and "spans" in given)
        spans = [(s["start"], s["end"], s["label"]) for s in given.get("spans") or []]
        found.append((given["text"], _without(spans, given) if labelled else None))
    return found


def _without(spans: list[Any], given: dict[str, Any]) -> list[Any] | None:
    """The spans; NotImplemented if there are ``unlabelled`` parts, for which this reader cannot tell
    them."""
    return spans if not given.get("unlabelled") else NotImplemented


def _doccano(content: bytes) -> list[Any]:
    found = []
    for line in filter(str.strip, _lines(content)):
        given = json.loads(line)
        spans = next((given[k] for k in ("label", "labels", "entities") if given.get(k) is not None), None)
        if spans is not None:
            keys = ("start_offset", "end_offset", "label")
            spans = [tuple(s[k] for k in keys) if isinstance(s, dict) else tuple(s) for s in spans]
            spans = _without(spans, given)
        found.append((given["text"], spans))
    return found


def _brat(content: bytes) -> list[Any]:
    text, mark, annotations = content.partition(PARTS)
    spans = {}
    for line in _lines(annotations):
        if line.startswith("T"):
            key, middle = line.split("\t")[:2]
            label, first, last = middle.split(" ")[0], middle.split(" ")[1], middle.split(" ")[-1]
            spans[key] = (int(first), int(last), label)
    return [(text.decode(), list(spans.values()) if mark else None)]


ORACLES: dict[str, Callable[[bytes], list[Any]]] = {
    "conll": _conll,
    "conllu": _conllu,
    "text": _text,
    "prodigy": _prodigy,
    "doccano": _doccano,
    "brat": _brat,
}
