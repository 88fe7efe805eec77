"""The labelling page in a headless Chromium: opened by its address, and operated with keys."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.browser import Browser

CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Backspace": 8}
CODES |= {"End": 35, "Home": 36}
SHIFT, CONTROL = 8, 2
# Measures the time from the pressed key to the first frame with another sequence.
WATCH = """
(() => {
  const at = document.getElementById('tokens'), was = at.dataset.sequence;
  const press = () => { window.pressed = performance.now(); };
  document.addEventListener('keydown', press, {capture: true, once: true});
  window.shownAfter = new Promise((shown) => {
    const changed = new MutationObserver(() => {
      if (at.dataset.sequence === was) return;
      changed.disconnect();
      requestAnimationFrame(() => shown(performance.now() - window.pressed));
    });
    changed.observe(at, {attributes: true});
  });
})()
"""


class LabelPage(Browser):
    """One annotator's window."""

    def visit(self, url: str) -> None:
        self._events.clear()
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self._until("Page.loadEventFired")
        self.until("document.getElementById('tokens').dataset.sequence !== undefined")

    def reload(self) -> None:
        self._events.clear()
        self.call("Page.reload")
        self._until("Page.loadEventFired")
        self.until("document.getElementById('tokens').dataset.sequence !== undefined")

    def until(self, condition: str, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            if self.evaluate(f"Boolean({condition})"):
                return
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a key as a person would; characters come with their text."""
        given: dict[str, Any] = {"key": key, "modifiers": modifiers}
        given["windowsVirtualKeyCode"] = CODES.get(key) or (ord(key.upper()) if key.isalnum() else 0)
        silent = (key in CODES and key != "Enter") or modifiers == CONTROL
        text = {} if silent else {"text": "\r" if key == "Enter" else key}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    @property
    def sequence(self) -> str:
        return str(self.evaluate("document.getElementById('tokens').dataset.sequence"))

    def words(self) -> list[str]:
        return self.evaluate(
            "[...document.querySelectorAll('.token')].map((t) => t.firstChild.textContent)"
        )

    def kinds(self) -> list[str]:
        """What a screen reader says about each token: its type, 'outside' or 'unknown'."""
        names = self.evaluate(
            "[...document.querySelectorAll('.token')].map((t) => t.getAttribute('aria-label').slice("
            "t.firstChild.textContent.length + 2))"
        )
        return [name.split(",")[0] for name in names]

    def accept(self, key: str = "Enter", modifiers: int = 0) -> float:
        """Presses a key that goes on to another sequence; returns the milliseconds until that is drawn."""
        self.evaluate(WATCH)
        self.press(key, modifiers)
        return float(self.evaluate("window.shownAfter"))

    def label(self, labels: list[str], keys: dict[str, str]) -> None:
        """Gives these BIO labels with the keyboard only, one span after the other."""
        self.press("Home")
        at = 0
        for start, stop, kind in spans(labels):
            for _ in range(start - at):
                self.press("ArrowRight")
            for _ in range(stop - start - 1):
                self.press("ArrowRight", SHIFT)
            self.press(keys[kind])
            at = stop - 1


def spans(labels: list[str]) -> list[tuple[int, int, str]]:
    """The spans of BIO labels, with runs of tokens outside them as spans of type 'O'."""
    found: list[list[Any]] = []
    for t, label in enumerate(labels):
        kind = label if label == "O" else label[2:]
        if found and (label.startswith("I-") or (label == "O" and found[-1][2] == "O")):
            found[-1][1] = t + 1
        else:
            found.append([t, t + 1, kind])
    return [(start, stop, kind) for start, stop, kind in found]
