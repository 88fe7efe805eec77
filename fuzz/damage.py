"""Damage to files: to arbitrary bytes, to JSON values, and to the tensors and the JSON of a container."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

from fuzz.container import Container, Tensor

NUMBERS: list[Any] = [0, -1, 1, 2, 3, 7, 500, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, -(10**9), 0.5]
NUMBERS += [1e308, -1e308, 1e-308, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "x", "auto", "node", "full", "../..", "/dev/zero", "a" * 5000, "\u0000", "\ud800", "<script>"]
DEEP = "nested deeply"
"""Placeholder for deeply nested brackets, which Python's JSON writer would refuse to write."""

OTHERS: list[Any] = [None, True, False, [], {}, [None], [[]], {"option": "Spec"}, {"list": []}, [0] * 50]


def bytes_of(content: bytes, rng: random.Random) -> bytes:
    """The content with one change to its bytes: flipped, cut, inserted, overwritten or repeated."""
    found, at = bytearray(content), rng.randrange(max(1, len(content)))
    way = rng.randrange(6)
    if way == 0 and found:
        found[at] ^= 1 << rng.randrange(8)
    elif way == 1:
        del found[at:]
    elif way == 2:
        del found[at : at + rng.randint(1, 64)]
    elif way == 3:
        found[at:at] = rng.randbytes(rng.randint(1, 64))
    elif way == 4:
        found[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, struct.pack("<q", 10**9)])
    else:
        found += found[: at + 1]
    return bytes(found)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value; for a long list, only of the first and the last few."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in sorted({*range(len(value))[:3], *range(len(value))[-2:]}):
            found += places(value[i], (*path, i))
    return found


def json_value(tree: Any, rng: random.Random) -> str:
    """Makes one change inside a JSON value, in place. Returns what was done."""
    path = rng.choice(places(tree))
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    key, way = path[-1], rng.randrange(8)
    before = owner[key]
    if way == 0:
        del owner[key]
        return f"removed {path}"
    if way == 1 and isinstance(before, list) and before:
        owner[key] = before + before if rng.random() < 0.5 else before[:-1]
        return f"length of {path}"
    if way == 2 and isinstance(owner, dict):
        owner[rng.choice(TEXTS)] = owner.pop(key)
        return f"renamed {path}"
    if way == 3:
        owner[key] = DEEP
        return f"nested {path}"
    if way <= 5 and isinstance(before, int | float) and not isinstance(before, bool):
        owner[key] = rng.choice(NUMBERS)
    else:
        owner[key] = copy.deepcopy(rng.choice(rng.choice([NUMBERS, TEXTS, OTHERS])))
    return f"{path} = {str(owner[key])[:40]!r}"


def tensor(found: Container, rng: random.Random) -> str:
    """Makes one change to a tensor, in place: to its values, shape, type or name, or removes it. Returns
    what was done."""
    name = rng.choice(list(found.tensors))
    one, way = found.tensors[name], rng.randrange(8)
    width = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2}.get(one.dtype, 1)
    if way <= 2 and len(one.data) >= width and one.dtype in ("F64", "F32"):
        code = "<d" if one.dtype == "F64" else "<f"
        value = rng.choice([float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 3e38, -3e38, -1e4, 1e4])
        data = bytearray(one.data)
        for _ in range(rng.choice([1, 1, len(data) // width])):
            at = width * rng.randrange(len(data) // width)
            data[at : at + width] = struct.pack(code, value)
        one.data = bytes(data)
        return f"{name} has {value}"
    if way == 3:
        del found.tensors[name]
        return f"without {name}"
    if way == 4:
        found.tensors[rng.choice(["node.x", "x", name + "x", "node"])] = found.tensors.pop(name)
        return f"another name for {name}"
    if way == 5:
        one.dtype = rng.choice(["F32", "F64", "I64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "BOOL"])
        size = {"F32": 4, "F64": 8, "I64": 8, "F16": 2, "BF16": 2}.get(one.dtype, 1)
        one.shape = [len(one.data) // size]
        one.data = one.data[: one.shape[0] * size]
        return f"{name} as {one.dtype}"
    if way == 6:
        n = len(one.data) // width
        one.shape = rng.choice([[n], [1] * 500 + [n], [n, 1], [1, n], [1] * 30 + [n], [0, 10**12, n]])
        one.data = b"" if 0 in one.shape else one.data
        return f"{name} of shape {str(one.shape)[:40]}"
    extra = rng.choice([1, 10, 1000])
    one.shape, one.data = [len(one.data) // width + extra], one.data + bytes(width * extra)
    return f"{name} grown by {extra}"


def container(content: bytes, key: str, signed: bool, rng: random.Random) -> tuple[bytes, str]:
    """A model file or checkpoint with one to three changes, and what was done. key : key of the JSON in its
    metadata. signed : whether the digest is made to match, as an attacker would do."""
    found, done = Container.read(content), []
    tree = json.loads(found.metadata[key])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.7 and tree:
            done.append(json_value(tree, rng))
        elif found.tensors:
            done.append(tensor(found, rng))
    brackets = 100_000
    text = json.dumps(tree).replace(f'"{DEEP}"', "[" * brackets + "]" * brackets)
    found.metadata[key] = text
    if signed:
        found.sign(key)
    return found.write(), "; ".join(done)


def grow(found: Container, name: str, shape: list[int]) -> None:
    """Adds a tensor of zeros."""
    size = 8
    for n in shape:
        size *= n
    found.tensors[name] = Tensor("F64", shape, bytes(size))
