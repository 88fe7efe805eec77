"""The commands label and serve."""

from __future__ import annotations

import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from structgp.data import formats
from structgp.data.formats.document_reader import DocumentReader
from structgp.errors import InputError
from structgp.service.label_pool import Pool, read_pool
from structgp.service.running import Place, check_installed, listen, run
from structgp.service.store import Store
from structgp.service.tag_set import TagSet

ANSWERED_AS = {"text": "prodigy"}
"""Maps a format that cannot hold labels to the format in which they are exported instead."""


def label(
    files: Sequence[str],
    db: str | None,
    model_path: str | None,
    types: str | None,
    tags: str | None,
    annotator: str | None,
    export: str | None,
    to: str | None,
    place: Place,
    browser: bool,
    seed: int,
    encoding: str,
    **given: Any,
) -> None:
    """The command label."""
    if export is None:
        check_installed()
    pool = read_pool(files, encoding=encoding, **given)
    db = db or f"{files[0]}.labels.db"
    model_path = model_path or f"{os.path.splitext(db)[0]}.sgp"
    if not os.path.exists(db):
        _tag_set(pool, None, types, tags)  # a mistake leaves no file behind
    store = Store(db)
    try:
        tag_set = store.open_pool(pool.digest, _tag_set(pool, store, types, tags), _words(pool))
        _keep_given(pool, store, tag_set)
        if export is not None:
            _export(pool, store, export, to, encoding)
            return
        _serve_page(pool, store, tag_set, model_path, annotator, place, browser, seed)
    finally:
        store.close()


def _words(pool: Pool) -> list[tuple[str, list[str]]]:
    return [(pool.place(i), s.words) for i, s in enumerate(pool.sequences)]


def _tag_set(pool: Pool, store: Store | None, types: str | None, tags: str | None) -> TagSet:
    """The labels that the options name, else those in the database, else those in the pool."""
    if types is not None and tags is not None:
        raise InputError("--tags", "cannot be combined with --types", "use one of them")
    named = types if types is not None else tags
    if named is not None:
        option = "--types" if types is not None else "--tags"
        return TagSet.of([n.strip() for n in named.split(",")], types is not None, option)
    known = None if store is None else store.about("tags")
    return pool.tag_set() if known is None else TagSet.from_json(known)


def _keep_given(pool: Pool, store: Store, tags: TagSet) -> None:
    """Saves the labels that the pool came with as events of an annotator called 'file'."""
    given = pool.given()
    for i, labels in given.items():
        tags.checked(labels, len(labels), pool.place(i))
    if given:
        store.label("file", "file", "file", given)


def _export(pool: Pool, store: Store, path: str, to: str | None, encoding: str) -> None:
    """Writes the latest labels of each sequence in the format ``to``, by default that of the pool."""
    from structgp.cli.shared import output_stream  # brings torch

    labelled = sorted((i, event.labels) for i, event in store.labelled().items())
    if not labelled:
        raise InputError(store.path, "no labels in it", "label something first")
    if to is None and isinstance(pool.reader, DocumentReader):
        to = ANSWERED_AS.get(pool.reader.documents, pool.reader.documents)
    if to is None:
        with output_stream(None if path == "-" else path, encoding) as out:
            out.writelines(pool.exported(labelled))
    else:
        formats.write(
            pool.documents(labelled), "/dev/stdout" if path == "-" else path, to, encoding=encoding
        )
    click.echo(f"{len(labelled)} of {len(pool)} sequences are labelled; wrote {path}", err=True)


def _serve_page(
    pool: Pool,
    store: Store,
    tags: TagSet,
    model_path: str,
    annotator: str | None,
    place: Place,
    browser: bool,
    seed: int,
) -> None:
    from structgp.service.answering import Answerer
    from structgp.service.background import Background
    from structgp.service.label_app import label_app
    from structgp.service.session import Session, load_tagger

    listening, n_fits = listen(place), len(store.fits())
    # Without this, nothing could be suggested until a model has been fitted again.
    earlier = load_tagger(model_path) if n_fits and Path(model_path).exists() else None
    answerer = Answerer(earlier, n_fits if earlier is not None else None)
    settings = {
        "parameters": {} if pool.reader.format == "jsonl" else {"features": "columns"},
        "keep": pool.reader.to_json(),
        "has_transitions": pool.reader.has_transitions,
    }
    background = Background(pool.features(), model_path, settings)
    session = Session(pool, store, tags, answerer, background, seed)
    try:
        app = label_app(session, annotator or _user())
        run(app, listening, place, lambda url: _say_ready(url, store, browser))
    finally:
        background.close()
        answerer.close()
    click.echo(f"{len(store.labelled())} of {len(pool)} sequences are labelled, in {store.path}", err=True)


def _say_ready(url: str, store: Store, browser: bool) -> None:
    click.echo(f"labels go to {store.path}; Ctrl-C ends", err=True)
    click.echo(url)
    if browser:
        webbrowser.open(url)


def _user() -> str:
    return os.environ.get("USER") or os.environ.get("USERNAME") or "me"


def serve(model_path: str, place: Place, vectors_path: str | None, device: str) -> None:
    """The command serve."""
    check_installed()
    listening = listen(place)
    from structgp.api.fitted import Fitted
    from structgp.cli.shared import load_with_reader
    from structgp.service.answering import Answerer
    from structgp.service.tag_requests import serve_app

    tagger, reader = load_with_reader(Fitted, model_path, vectors_path, device)
    answerer = Answerer()
    answerer.replace(tagger)
    about = {
        "model": Path(model_path).name,
        "labels": tagger.classes_.tolist(),
        "format": reader.format,
        "columns": getattr(reader, "n_columns", None),
    }
    try:
        run(serve_app(answerer, reader, about), listening, place, click.echo)
    finally:
        answerer.close()
