"""The page in a real browser: it fits, says nothing to the console, and answers mouse and keyboard."""

from __future__ import annotations

import dataclasses

import pytest

from structgp.report import render
from structgp.report.findings import TokenUncertainty

PLACES = [(width, dark) for width in (1280, 400) for dark in (False, True)]
SETTLE = "new Promise(done => setTimeout(done, 150))"
# Pairs of texts in one plot, and pieces of the headline, that lie over each other.
OVERLAPS = """
(() => {
  const found = [];
  for (const group of [...document.querySelectorAll('svg, .tiles, .facts, header, nav')]) {
    const parts = [...group.querySelectorAll('text, h1, h2, p, dt, dd, a, button')];
    const boxes = parts.map((part) => [part.textContent, part.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 3) found.push([a, b]);
    }));
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def page(findings, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(findings), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, page):
    browser.window(1280)
    browser.open(page)
    browser.evaluate("document.getElementById('text').scrollIntoView()")
    browser.evaluate(SETTLE)
    return browser


@pytest.mark.parametrize(("width", "dark"), PLACES)
@pytest.mark.parametrize("labelled", [True, False])
def test_the_page_fits(browser, findings, unlabelled, tmp_path, width, dark, labelled):
    path = tmp_path / "report.html"
    path.write_text(render(findings if labelled else unlabelled), encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    browser.window(width, dark=dark)
    browser.open(path)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    scroll, inner = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inner == width
    assert scroll <= inner
    assert browser.evaluate(OVERLAPS) == []
    shot = tmp_path / f"{width}-{'dark' if dark else 'light'}.png"
    browser.screenshot(shot)
    assert shot.stat().st_size > 20_000
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 200) == dark, colour
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()]


def test_two_thousand_sentences_load_in_three_seconds(browser, two_thousand, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(render(two_thousand), encoding="utf-8")
    browser.window(1280)
    assert browser.open(path) < 3
    assert browser.evaluate("document.querySelectorAll('.token').length") > 40
    assert "2,000 of 2,000" in browser.evaluate("document.getElementById('shown').textContent")
    # The rest comes as it is scrolled to.
    drawn = "document.querySelectorAll('#sequences li').length"
    before = browser.evaluate(drawn)
    browser.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    browser.evaluate(SETTLE)
    assert before < browser.evaluate(drawn)


def test_the_most_surprising_come_first(opened, findings):
    worst = max(range(40), key=lambda i: -findings.truth.log_probs[i])
    first = opened.evaluate("document.querySelector('#sequences .about').textContent")
    assert first.startswith(f"line {worst + 1} ")
    opened.evaluate(
        "(o => { o.value = 'file'; o.dispatchEvent(new Event('change')); })"
        "(document.getElementById('order'))"
    )
    first = opened.evaluate("document.querySelector('#sequences .about').textContent")
    assert first.startswith("line 1 ")


def test_filter_and_errors_only(opened, findings):
    wrong = [
        words
        for words, y, z in zip(findings.text.words, findings.predicted, findings.truth.labels, strict=True)
        if y != z
    ]
    opened.evaluate("document.getElementById('errors').click()")
    shown = "document.getElementById('shown').textContent"
    assert opened.evaluate(shown).startswith(f"{len(wrong)} of 40 sequences")
    word = wrong[0][-1]
    opened.evaluate(
        f"(f => {{ f.value = {word!r}; f.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('filter'))"
    )
    opened.evaluate(SETTLE)
    n = sum(word.lower() in " ".join(words).lower() for words in wrong)
    assert n <= int(opened.evaluate(shown).split()[0]) < len(wrong)
    assert opened.evaluate("document.querySelectorAll('.token.wrong .true').length") > 0


def test_alternatives_under_the_mouse_and_at_the_keys(opened):
    card = "document.getElementById('card')"
    assert opened.evaluate(f"{card}.hidden")
    opened.point_at("#sequences li:nth-child(2) .token:nth-child(2)")
    assert not opened.evaluate(f"{card}.hidden")
    text = opened.evaluate(f"{card}.textContent")
    assert "predicted" in text
    assert "nats" in text
    opened.point_at("h1, #text > h2")
    opened.evaluate("document.getElementById('errors').focus()")
    opened.key("Tab")
    focus = "document.activeElement.querySelector('.word')?.textContent"
    first = opened.evaluate(focus)
    assert opened.evaluate(f"{card}.querySelector('.word').textContent") == first
    assert opened.evaluate("document.activeElement.getAttribute('aria-describedby')") == "card"
    opened.key("ArrowRight")
    second = "document.querySelector('.token:nth-child(2) .word').textContent"
    assert opened.evaluate(focus) == opened.evaluate(second)
    assert not opened.evaluate(f"{card}.hidden")
    opened.key("Escape")
    assert opened.evaluate(f"{card}.hidden")


def test_the_theme_can_be_turned(opened):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(colour)
    opened.evaluate("document.getElementById('theme').click()")
    assert opened.evaluate(colour) != light
    assert opened.evaluate("document.getElementById('theme').textContent") == "Light"


def test_shading_turns_to_another_uncertainty(browser, findings, tmp_path):
    path = tmp_path / "report.html"
    flat = [0 * v for v in findings.uncertainties[0].values]
    other = TokenUncertainty("model", "uncertainty of the model", "a part", flat, 0.3)
    two = dataclasses.replace(findings, uncertainties=[findings.uncertainties[0], other])
    path.write_text(render(two), encoding="utf-8")
    browser.window(1280)
    browser.open(path)
    shade = "[...document.querySelectorAll('.token .word')].map(w => parseInt(w.style.cssText.slice(9)))"
    assert max(browser.evaluate(shade)) > 20
    browser.evaluate(
        "(o => { o.value = '1'; o.dispatchEvent(new Event('change')); })(document.getElementById('shade'))"
    )
    assert set(browser.evaluate(shade)) == {0}
    assert "uncertainty of the model" in browser.evaluate(
        "document.getElementById('scale-text').textContent"
    )


def test_a_nasty_token_stays_text(browser, findings, tmp_path):
    words = [["</script><b id=evil>" + 300 * "x", *w[1:]] for w in findings.text.words]
    text = dataclasses.replace(findings.text, words=words)
    path = tmp_path / "report.html"
    path.write_text(render(dataclasses.replace(findings, text=text)), encoding="utf-8")
    browser.errors.clear()
    browser.window(400)
    browser.open(path)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    assert browser.evaluate("document.getElementById('evil')") is None
    assert browser.evaluate("document.querySelector('.token .word').textContent").startswith("</s")
