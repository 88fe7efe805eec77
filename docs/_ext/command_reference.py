"""The reference of the command line, written from the commands themselves when the site is built."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import click

from structgp.cli import main

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PLACE = "<!-- commands -->"


def plain(text: str) -> str:
    """Text in which Markdown finds nothing to format."""
    return re.sub(r"([\\`*_{}\[\]<>$|#^])", r"\\\1", " ".join(text.split()))


def of_command(command: click.Command) -> str:
    """One section: how the command is called, what it does, and its options."""
    with click.Context(command, info_name=f"structgp {command.name}") as context:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        options = [p.get_help_record(context) for p in command.params if isinstance(p, click.Option)]
    parts = [f"## {command.name}", f"```text\n{usage}\n```"]
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(f"    {command.help or ''}")):
        as_is = paragraph.lstrip().startswith("\b")
        lines = "\n".join(line.strip() for line in paragraph.splitlines() if line.strip(" \b"))
        parts.append(f"```sh\n{lines}\n```" if as_is else plain(paragraph))
    parts += [f"`{names}`\n: {plain(text)}" for names, text in filter(None, options)]
    return "\n\n".join(parts)


def reference() -> str:
    with click.Context(main) as context:
        commands = [main.get_command(context, name) for name in main.list_commands(context)]
    return "\n\n".join(of_command(command) for command in commands if command is not None)


def fill(_: Sphinx, __: str, source: list[str]) -> None:
    source[0] = source[0].replace(PLACE, reference()) if PLACE in source[0] else source[0]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("env-get-outdated", lambda *_: ["commands"])  # the commands may have changed, not the page
    return {"parallel_read_safe": True, "parallel_write_safe": True}
