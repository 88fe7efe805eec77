"""The page in a real browser: the keyboard alone, reloads, two annotators, bulk, and how it looks."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from benchmarks.label_browser import CONTROL, SHIFT, LabelPage

from structgp.service.store import Store
from structgp.service.tag_set import TagSet

KEYS = {"QTY": "q", "UNIT": "u", "NAME": "n", "PREP": "p", "COMMENT": "c", "O": "0"}
# What a screen reader calls everything that can be used.
NAMES = """
[...document.querySelectorAll('button, input, summary, [role=option], [role=listbox], [role=group]')]
  .filter((e) => e.offsetParent)
  .map((e) => e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length))
"""
PLACES = [(width, dark) for width in (1280, 400) for dark in (False, True)]


def in_file(path: Path) -> dict[tuple[int, str], list[str | None]]:
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT sequence, annotator, labels FROM labels").fetchall()
    db.close()
    return {(s, who): json.loads(labels) for s, who, labels in rows}


@pytest.fixture
def window(chromium):
    """``window()`` opens a browser of its own."""
    opened = []

    def make():
        opened.append(LabelPage(chromium, 300.0))
        opened[-1].window(1280)
        return opened[-1]

    yield make
    for page in opened:
        page.close()


def kinds_of(labels: list[str]) -> list[str]:
    return ["outside" if label == "O" else label[2:] for label in labels]


def test_twenty_lines_with_the_keyboard_alone(labelling, window, truth, tmp_path):
    """Two annotators in two browsers; undo, don't-know and a reload in the middle; at the end the file
    holds exactly what was acknowledged."""
    service, expected = labelling(), {}
    ann, bo = window(), window()
    ann.visit(service.url + "&annotator=ann")
    bo.visit(service.url + "&annotator=bo")
    assert ann.sequence != bo.sequence
    for k in range(20):
        page, who = (bo, "bo") if k % 4 == 3 else (ann, "ann")
        i = int(page.sequence)
        labels = list(truth[i])
        page.label(labels, KEYS)
        if k == 5:  # not O, but unknown; then a reload before it is saved
            page.press("Home")
            page.press("?")
            labels[0] = None
            labels[1:2] = ["B" + y[1:] if y[0] == "I" else y for y in labels[1:2]]
            page.reload()
        told = page.kinds()
        assert [t.split()[0] for t in told] == [
            "unknown" if y is None else kind
            for y, kind in zip(labels, kinds_of(map(str, labels)), strict=True)
        ]
        page.accept()
        expected[i, who] = labels
        if k == 10:  # taken back and given again, with another label
            page.accept("z", CONTROL)
            assert int(page.sequence) == i
            assert in_file(tmp_path / "labels.db") == {k: v for k, v in expected.items() if k != (i, who)}
            page.press("Home")
            page.press("0")
            page.accept()
            labels[0] = "O"
            labels[1:2] = ["B" + y[1:] if y[0] == "I" else y for y in labels[1:2]]
    assert in_file(tmp_path / "labels.db") == expected
    assert len(expected) == 20
    assert ann.errors == bo.errors == []
    assert all(url.startswith(("http://127.0.0.1", "data:")) for url in ann.requests)


LOSE = """
(() => {
  const own = window.fetch;
  window.fetch = async (...given) => { window.fetch = own; await own(...given); throw new Error('lost'); };
})()
"""
"""The next request reaches the service, and its answer never comes."""


@pytest.mark.slow
def test_an_answer_that_never_comes_loses_nothing(labelling, window, truth, tmp_path):
    """Labels that were changed since are saved, and an undo that is asked for again takes back no more."""
    service, page = labelling(), window()
    page.visit(service.url + "&annotator=ann")
    i = int(page.sequence)
    page.label(truth[i], KEYS)
    page.evaluate(LOSE)
    page.press("Enter")
    page.until("!document.getElementById('trouble').hidden")
    assert int(page.sequence) == i
    page.press("Home")
    page.press("?")
    page.accept()
    changed = [None, *("B" + y[1:] if t == 0 and y[0] == "I" else y for t, y in enumerate(truth[i][1:]))]
    assert in_file(tmp_path / "labels.db") == {(i, "ann"): changed}
    other = int(page.sequence)
    page.accept()
    page.evaluate(LOSE)
    page.press("z", CONTROL)
    page.until("!document.getElementById('trouble').hidden")
    page.accept("z", CONTROL)
    assert int(page.sequence) == other
    assert list(in_file(tmp_path / "labels.db")) == [(i, "ann")]
    assert page.errors == []


@pytest.fixture(scope="module")
def with_model(service, files, tagger, pool, tmp_path_factory):
    """A service whose model is there from the start, and its database."""
    db = tmp_path_factory.mktemp("page") / "labels.db"
    store = Store(str(db))
    words = [(pool.place(i), s.words) for i, s in enumerate(pool.sequences)]
    store.open_pool(pool.digest, TagSet(tuple(KEYS)[:5], True), words)
    scores = tagger.expected_scores(pool.features()).as_dict()
    for n in (10, 20, 30, 40, 50):
        error = {k: v * (20 / n) ** 0.3 for k, v in scores["error"].items()}
        store.add_fit(n, {"error": error, "f1": scores["f1"]})
    store.close()
    tagger.save(db.with_suffix(".sgp"), {})
    options = ["--template", str(files / "template"), "--db", str(db), "--no-browser"]
    started = service("label", str(files / "pool.conll"), *options)
    yield started, db
    started.end()


@pytest.fixture(scope="module")
def page(chromium, with_model):
    opened = LabelPage(chromium, 300.0)
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), PLACES)
def test_the_page_fits_and_is_readable(with_model, page, width, dark):
    page.window(width, dark=dark)
    page.visit(with_model[0].url + "&annotator=ann")
    page.until("document.querySelector('#tiles dd')")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    scroll, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert scroll <= inner == width
    names = page.evaluate(NAMES)
    assert len(names) > 20
    assert all(names), "everything that can be used has a name"
    assert page.errors == []


@pytest.mark.slow
def test_suggestions_alternatives_and_reasons(with_model, page, tagger, pool):
    page.window(1280)
    page.visit(with_model[0].url + "&annotator=ann")
    while page.evaluate("document.getElementById('stream').textContent.startsWith('Audit')"):
        page.accept()
    i = int(page.sequence)
    suggested = tagger.predict([pool.sequences[i].tokens])[0]
    assert [k.split()[0] for k in page.kinds()] == kinds_of(suggested)
    shown = page.evaluate("[...document.querySelectorAll('#alternatives .p')].map((p) => p.textContent)")
    assert len(shown) >= 2
    second = page.evaluate("document.querySelectorAll('#alternatives .words')[1].textContent")
    page.press("2")
    taken = page.evaluate("document.querySelector('#alternatives li.now .words').textContent")
    assert taken == second
    page.press("Escape")
    assert [k.split()[0] for k in page.kinds()] == kinds_of(suggested)
    page.press(".")
    page.until("document.querySelectorAll('#reasons tr').length > 4")
    assert "rather than" in page.evaluate("document.getElementById('reasons').textContent")
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    for character in pool.sequences[5].words[0]:
        page.press(character)
    page.press("Enter")
    page.until("document.querySelectorAll('#search-found button').length > 0")
    page.press("Tab")
    page.press("Tab")
    page.press("Enter")
    page.until("document.getElementById('stream').textContent.startsWith('Looked up')")
    assert page.evaluate("document.activeElement.id") == "tokens"
    assert page.errors == []


@pytest.mark.slow
def test_bulk_accept_and_its_undo(with_model, page):
    db = with_model[1]
    before = in_file(db)
    page.visit(with_model[0].url + "&annotator=ann")
    page.evaluate("document.getElementById('bulk-box').open = true")
    page.evaluate("document.getElementById('least').value = '0.6'; document.getElementById('look').click()")
    page.until("document.getElementById('bulk').textContent.includes('unlabelled')")
    told = page.evaluate("document.getElementById('bulk').textContent")
    assert "No audit has measured this yet" in told
    page.evaluate(
        "document.getElementById('least').value = '0.05'; document.getElementById('look').click()"
    )
    page.until("document.getElementById('bulk-accept')")
    n = int(page.evaluate("document.getElementById('bulk-accept').textContent.split(' ')[1]"))
    page.evaluate("document.getElementById('bulk-accept').click()")
    page.until("document.getElementById('bulk').textContent.startsWith('Accepted')")
    assert len(in_file(db)) == len(before) + n > len(before)
    page.evaluate("document.getElementById('tokens').focus()")
    page.press("z", CONTROL)
    page.until("document.getElementById('said').textContent.startsWith('Took back')")
    assert in_file(db) == before


@pytest.mark.slow
def test_spans_by_mouse(with_model, page):
    page.visit(with_model[0].url)
    while len(page.words()) < 3:
        page.accept()
    boxes = page.evaluate(
        "[...document.querySelectorAll('.token')].map((t) => { const b = t.getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 3]; })"
    )
    held = {"button": "left", "buttons": 1, "clickCount": 1}
    for kind, at in (("mousePressed", 0), ("mouseMoved", 1), ("mouseReleased", 1)):
        x, y = boxes[at]
        page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)
    page.press("c")
    assert page.kinds()[:2] == ["COMMENT 1 of 2", "COMMENT 2 of 2"]


# The ratio of brightness between letters and what is behind them (WCAG 2), for every text that is seen.
CONTRASTS = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below, a) => below.map((v, i) => a * top[i] + (1 - a) * v);
  const behind = (e) => {
    if (!e) return rgba(getComputedStyle(document.body).backgroundColor).slice(0, 3);
    const own = rgba(getComputedStyle(e).backgroundColor);
    return over(own, behind(e.parentElement), own[3]);
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => c.map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = (e) => e.checkVisibility() && !e.closest('.unseen, .skip, :disabled, script, style');
  return [...document.body.querySelectorAll('*')]
    .filter((e) => seen(e) && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((e) => {
      const ground = behind(e), style = getComputedStyle(e);
      const ink = over(rgba(e.closest('svg') ? style.fill : style.color), ground, Number(style.opacity));
      const [a, b] = [light(ink), light(ground)];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.trim().slice(0, 40)];
    })
    .filter(([ratio]) => ratio < 4.5);
})()
"""
# What has the focus, and whether one can see that.
FOCUS = """
(() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const name = at.getAttribute('aria-label') || (at.labels && at.labels[0] || at).textContent.trim();
  return [at.id || at.tagName, name, style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2];
})()
"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read(with_model, page, dark):
    page.window(1280, dark=dark)
    page.visit(with_model[0].url + "&annotator=ann")
    page.until("document.querySelector('#tiles dd') && document.querySelector('#alternatives .p')")
    page.press(".")
    page.until("document.querySelectorAll('#reasons tr').length > 4")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.evaluate("document.getElementById('trouble').hidden = false")
    page.evaluate("document.getElementById('trouble').textContent = 'The service does not answer.'")
    assert page.evaluate(CONTRASTS) == []


@pytest.mark.slow
def test_tab_reaches_everything_and_shows_where_it_is(with_model, page):
    page.window(1280)
    page.visit(with_model[0].url + "&annotator=ann")
    page.until("document.querySelector('#tiles dd')")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    usable = page.evaluate(
        "[...document.querySelectorAll('button:not(:disabled), input, summary, #tokens')]"
        ".filter((e) => e.checkVisibility()).length"
    )
    page.evaluate("document.querySelector('.skip').focus()")
    found = []
    for _ in range(usable):
        page.press("Tab")
        found.append(page.evaluate(FOCUS))
    assert len({(place, name) for place, name, _ in found}) == usable
    assert all(name for _, name, _ in found)
    assert [name for _, name, is_seen in found if not is_seen] == []


@pytest.mark.slow
def test_bulk_accept_with_the_keyboard_alone(with_model, page):
    before = in_file(with_model[1])
    page.visit(with_model[0].url + "&annotator=ann")
    page.evaluate("document.querySelector('#doubts-box summary').focus()")
    page.press("Tab")
    page.press("Enter")
    assert page.evaluate("document.getElementById('bulk-box').open")
    page.press("Tab")
    page.evaluate("document.activeElement.select()")
    for character in "0.05":
        page.press(character)
    page.press("Tab")
    page.press("Enter")
    page.until("document.getElementById('bulk-accept')")
    while page.evaluate("document.activeElement.id") != "bulk-accept":
        page.press("Tab")
    page.press("Enter")
    page.until("document.getElementById('bulk').textContent.startsWith('Accepted')")
    assert len(in_file(with_model[1])) > len(before)
    page.press("z", CONTROL)
    page.until("document.getElementById('said').textContent.startsWith('Took back')")
    assert in_file(with_model[1]) == before


@pytest.mark.slow
def test_text_from_right_to_left(service, window, tmp_path):
    """It begins at the right, arrows go where they point, and spans are those of the text."""
    (tmp_path / "pool.txt").write_text("שלום 5 ירושלים היפה .\n", encoding="utf-8")
    started = service("label", str(tmp_path / "pool.txt"), "--types", "PLACE", "--no-browser")
    page = window()
    page.visit(started.url + "&annotator=ann")
    lefts = page.evaluate(
        "[...document.querySelectorAll('.token')].map((t) => t.getBoundingClientRect().x)"
    )
    assert lefts == sorted(lefts, reverse=True)
    page.press("Home")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.press("ArrowLeft", SHIFT)
    page.press("p")
    page.press("ArrowRight")
    page.press("?")
    page.accept()
    expected = ["O", "O", None, "I-PLACE", "O"]  # what is unknown may be where it begins
    assert in_file(tmp_path / "pool.txt.labels.db") == {(0, "ann"): expected}
    assert page.errors == []
    started.end()
