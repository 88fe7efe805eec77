"""Generated product titles, with features as in tutorials on sklearn-crfsuite: strings, flags, a bias.

A title consists of a brand, a model number, the product, its colour, size and material, most of which may
be absent or in another order, and of words that belong to none of these. Labels are BIO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BRANDS = [
    "Acme",
    "Nordica",
    "Velox",
    "Kestrel",
    "Tamura",
    "Orbis",
    "Lumen",
    "Hartwell",
    "Zephyr",
    "Pinnacle",
    "Brava",
    "North Peak",
    "Red Fern",
]
PRODUCTS = [
    "kettle",
    "toaster",
    "headphones",
    "backpack",
    "desk lamp",
    "office chair",
    "water bottle",
    "rain jacket",
    "running shoes",
    "phone case",
    "coffee grinder",
    "power bank",
    "yoga mat",
    "wall clock",
]
COLOURS = ["black", "white", "navy", "red", "olive", "silver", "teal", "rose gold"]
MATERIALS = ["cotton", "steel", "leather", "bamboo", "nylon", "merino wool"]
UNITS = ["cm", "ml", "l", "kg", "W"]
OTHERS = ["with", "for", "and", "the", "new", "-", "(", ")", "&", "in", "free", "delivery", "sale"]
LETTERS = "ABCDEFGHKLMNPRSTXZ"

Title = list[tuple[str, str]]


def product_titles(n: int, seed: int) -> tuple[list[list[dict[str, Any]]], list[list[str]]]:
    """Features and labels of n titles."""
    rng = np.random.default_rng(seed)
    titles = [_title(rng) for _ in range(n)]
    words = [[word for word, _ in title] for title in titles]
    X = [[token_features(of, t) for t in range(len(of))] for of in words]
    return X, [[label for _, label in title] for title in titles]


def token_features(words: Sequence[str], t: int) -> dict[str, Any]:
    """Features of token t and its neighbours."""
    found: dict[str, Any] = {"bias": 1.0, "word[-3:]": words[t][-3:], "word[-2:]": words[t][-2:]}
    for shift, name in ((0, ""), (-1, "-1:"), (1, "+1:")):
        if 0 <= t + shift < len(words):
            word = words[t + shift]
            found |= {
                f"{name}word.lower()": word.lower(),
                f"{name}word.istitle()": word.istitle(),
                f"{name}word.isupper()": word.isupper(),
                f"{name}word.isdigit()": word.isdigit(),
            }
        else:
            found["BOS" if shift < 0 else "EOS"] = True
    return found


def _title(rng: np.random.Generator) -> Title:
    brand, product = str(rng.choice(BRANDS)), str(rng.choice(PRODUCTS))
    product = product.title() if rng.random() < 0.3 else product
    brand = brand.upper() if rng.random() < 0.15 else brand
    parts = [
        ("COLOUR", str(rng.choice(COLOURS))),
        ("SIZE", _size(rng)),
        ("MATERIAL", str(rng.choice(MATERIALS))),
    ]
    there = [part for part, chance in zip(parts, (0.6, 0.5, 0.4), strict=True) if rng.random() < chance]
    there = [there[i] for i in rng.permutation(len(there))]
    n_before = int(rng.integers(len(there) + 1)) if rng.random() < 0.4 else 0
    found = _others(rng, 0.15, 2)
    if rng.random() < 0.85:
        found += _span("BRAND", brand)
    if rng.random() < 0.4:
        found += _span("MODEL", _model(rng))
    for kind, text in there[:n_before]:
        found += _span(kind, text) + _others(rng, 0.05, 1)
    found += _span("PRODUCT", product)
    for kind, text in there[n_before:]:
        if rng.random() < 0.3:
            found.append((str(rng.choice([",", "-", "in", "("])), "O"))
        found += _span(kind, text)
    return found + _others(rng, 0.3, 4)


def _span(kind: str, text: str) -> Title:
    return [(word, f"{'I' if i else 'B'}-{kind}") for i, word in enumerate(text.split())]


def _others(rng: np.random.Generator, chance: float, most: int) -> Title:
    return [(str(rng.choice(OTHERS)), "O") for _ in range(most) if rng.random() < chance]


def _model(rng: np.random.Generator) -> str:
    letters = "".join(rng.choice(list(LETTERS), size=rng.integers(1, 4)))
    code = f"{letters}{'-' if rng.random() < 0.3 else ''}{rng.integers(10, 9999)}"
    return code if rng.random() < 0.8 else code.lower()


def _size(rng: np.random.Generator) -> str:
    whole = rng.random() < 0.8
    number = str(rng.integers(1, 500)) if whole else f"{rng.integers(1, 20)}.{rng.integers(1, 10)}"
    unit, form = str(rng.choice(UNITS)), rng.random()
    if form < 0.4:
        return number + unit
    return f"{number} x {rng.integers(1, 300)} {unit}" if form < 0.58 else f"{number} {unit}"
