"""Writes the map of modules in CONTRIBUTING.md: every module with the first sentence of its docstring.

python docs/_ext/module_map.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "structgp"
BEGIN, END = "<!-- map -->", "<!-- end of map -->"


def module_map() -> str:
    """A table per room, in the order of the rooms' table above it."""
    lines = []
    for room in sorted({p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py")}):
        for path in sorted((SOURCE / room).rglob("*.py")) if (SOURCE / room).is_dir() else [SOURCE / room]:
            if path.name != "__init__.py":
                text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
                first = " ".join(text.split("\n\n")[0].split())
                lines.append(f"| `{path.relative_to(SOURCE).as_posix()}` | {first} |")
    return "\n".join(["| module | idea |", "|---|---|", *lines])


def with_map(text: str) -> str:
    """CONTRIBUTING.md with the map as it should be."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{module_map()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page = ROOT / "CONTRIBUTING.md"
    page.write_text(with_map(page.read_text(encoding="utf-8")), encoding="utf-8")
