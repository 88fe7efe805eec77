"""The labelling loop: decides which sequence comes next, saves labels, and starts fits.

All methods may be called from any thread, and none waits for a fit."""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError, StructgpError
from structgp.service import figures
from structgp.service.answering import Answerer
from structgp.service.background import Background
from structgp.service.label_pool import Pool
from structgp.service.store import Event, Store
from structgp.service.suggestions import Suggestions
from structgp.service.tag_set import Labels, TagSet

ENOUGH = 10
"""Number of labelled sequences before the first fit; until then, the next one is drawn at random."""
AUDIT = 0.1
"""Share of sequences that are audits: once there is a model, they are drawn at random and shown without its
suggestions, since they measure how good the model is, and suggestions influence people."""
REFIT_AFTER = 0.02
"""New labelled sequences before the next fit, as a share of all labelled sequences (at least one)."""
LEASE = 900.0
"""Seconds for which a sequence is reserved for the annotator to whom it was shown."""
FOUND = 50
"""Largest number of sequences that a search lists."""


@dataclass(frozen=True)
class Lease:
    """A sequence on an annotator's screen. told : the model's answer, whether shown or not. before : after
    an undo, what the model had answered before it saw the labels that were taken back."""

    annotator: str
    stream: str
    time: float
    told: dict[str, Any] | None
    before: dict[str, Any] | None = None

    @property
    def note(self) -> dict[str, Any] | None:
        """The part of the model's answer that is kept in an event."""
        if self.before is not None or self.told is None:
            return self.before
        return {key: self.told[key] for key in ("model", "labels", "probability")}


def load_tagger(path: str) -> Any:
    """The model in a file. The import takes seconds, so it happens only when it is needed."""
    from structgp.api.estimator import load

    return load(path)


class Session:
    """The labelling loop over one pool. A model of an earlier run may answer from the start."""

    def __init__(
        self,
        pool: Pool,
        store: Store,
        tags: TagSet,
        answerer: Answerer,
        background: Background,
        seed: int = 0,
    ) -> None:
        self.pool, self.store, self.tags = pool, store, tags
        self.answerer, self.background, self._seed = answerer, background, seed
        self._lock = threading.RLock()
        self._leases: dict[int, Lease] = {}
        self.suggestions = Suggestions(pool, answerer)
        self._order = random.Random(seed).sample(range(len(pool)), len(pool))
        self._chosen: list[int] = []
        self._fitted_version, self._fitted_n = -1, 0
        # The expected scores of the last fit of an earlier run.
        self._fit: dict[str, Any] = (store.fits() or [{}])[-1] if answerer.tagger is not None else {}
        self._doubted: list[dict[str, Any]] = []
        self._swept: dict[int, tuple[list[str], float]] = {}
        self._sweep: dict[str, Any] | None = None
        self._wants_sweep = False
        self.error: str | None = None
        "What went wrong in the background; None again after the next successful fit."
        background.listener = self.hear
        self._is_warm = False
        self.refit_if_due()

    # -- what comes next -----------------------------------------------------------------------

    def next(self, annotator: str) -> dict[str, Any]:
        """The sequence to label now: the same one until it is labelled; {'sequence': None} if none is
        left."""
        with self._lock:
            self._warm_up()
            mine = [i for i, held in self._leases.items() if held.annotator == annotator]
            for i in mine:
                if not self.store.is_labelled(i):
                    return self.shown(i, self._leases[i].stream, self._leases[i].told)
                del self._leases[i]
            chosen, stream = self._choose(annotator)
            if chosen is None:
                return {"sequence": None}
            i = chosen
            told = self.suggestions.of(i)
            self._leases[i] = Lease(annotator, stream, time.monotonic(), told)
            self._prepare()
            return self.shown(i, stream, told)

    def _warm_up(self) -> None:
        """Prepares both processes for the first fit while the first sequences are labelled."""
        if not self._is_warm:
            self._is_warm = True
            self.background.start({"do": "warm"})
            threading.Thread(
                target=importlib.import_module, args=("structgp.api.explain",), daemon=True
            ).start()

    def _choose(self, annotator: str) -> tuple[int | None, str]:
        draw = random.Random(f"{self._seed} {annotator} {self.store.last}").random()
        if self.answerer.tagger is None:
            return self._at_random(), "random"
        if draw < AUDIT:
            return self._at_random(), "audit"
        while self._chosen:
            i = self._chosen[0]
            if self._is_free(i):
                return i, "chosen"
            self._chosen.pop(0)
        return self._at_random(), "random"

    def _at_random(self) -> int | None:
        # Labelled sequences remain so, except after an undo, which brings them back to the screen.
        while self._order and self.store.is_labelled(self._order[-1]):
            self._order.pop()
        for i in reversed(self._order):
            if self._is_free(i):
                return i
        return next((i for i in range(len(self.pool)) if self._is_free(i)), None)

    def _is_free(self, i: int) -> bool:
        held = self._leases.get(i)
        return not self.store.is_labelled(i) and (held is None or time.monotonic() - held.time > LEASE)

    def _prepare(self) -> None:
        """Asks in advance about the sequences that are likely to come next."""
        self.suggestions.ask_ahead(i for i in [*self._chosen[:3], *self._order[-2:]] if self._is_free(i))

    def shown(self, i: int, stream: str, told: dict[str, Any] | None) -> dict[str, Any]:
        """A sequence as the page shows it."""
        current = self.store.current(i)
        return {
            "sequence": i,
            "place": self.pool.place(i),
            "words": self.pool.sequences[i].words,
            "stream": stream,
            "labels": None if current is None else current.labels,
            "annotator": None if current is None else current.annotator,
            "suggestion": None if stream == "audit" else told,
        }

    def opened(self, i: int, stream: str) -> dict[str, Any]:
        """A sequence that an annotator looked up, as the page shows it."""
        self._check_sequence(i)
        with self._lock:
            return self.shown(i, stream, self.suggestions.of(i))

    def _check_sequence(self, i: Any) -> None:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(self.pool):
            raise InputError("sequence", f"no sequence {i!r}", f"use 0 to {len(self.pool) - 1}")

    # -- what is saved -------------------------------------------------------------------------

    def accept(self, request: str, annotator: str, sequence: Any, labels: Any, stream: str) -> list[Event]:
        """Saves labels; they are on disk when it returns."""
        self._check_sequence(sequence)
        labels = self.tags.checked(labels, len(self.pool.sequences[sequence].words))
        with self._lock:
            held = self._leases.get(sequence)
            if held is None or held.annotator != annotator:
                # Looked up, or shown before a restart: keep the model's answer from before it sees the
                # label.
                told = None if self.store.is_labelled(sequence) else self.suggestions.of(sequence)
                held = Lease(annotator, stream, time.monotonic(), told)
            stream, note = held.stream, held.note
            suggested = {} if note is None else {sequence: note}
            events = self.store.label(request, annotator, stream, {sequence: labels}, suggested)
            self._leases.pop(sequence, None)
            self._doubted = [d for d in self._doubted if d["sequence"] != sequence]
        self.refit_if_due()
        return events

    def undo(self, request: str, annotator: str) -> dict[str, Any] | None:
        """Takes back the annotator's last labels, and returns the sequence to show again with these labels;
        None if there is nothing to take back."""
        with self._lock:
            undone = self.store.undo(request, annotator)
            if not undone.events:
                return None
            last = undone.events[-1]
            ahead = set(self._order)
            self._order[:0] = [e.sequence for e in undone.events if e.sequence not in ahead]
            found = self.shown(last.sequence, last.stream, self.suggestions.of(last.sequence))
            for i in [i for i, held in self._leases.items() if held.annotator == annotator]:
                del self._leases[i]
            if len(undone.events) == 1:
                told = self.suggestions.of(last.sequence)
                held = Lease(annotator, last.stream, time.monotonic(), told, last.suggested)
                self._leases[last.sequence] = held
        self.refit_if_due()
        return found | {"labels": last.labels, "undone": len(undone.events)}

    # -- in bulk -------------------------------------------------------------------------------

    def bulk(self, least: float) -> dict[str, Any]:
        """What would be accepted if the probability of the whole labelling has to be at least ``least``.
        The model has to label the pool first, which starts with the first call; 'progress' says how far it
        is."""
        if isinstance(least, bool) or not isinstance(least, int | float) or not 0 < least <= 1:
            raise InputError("least", f"must be above 0 and at most 1, got {least!r}", "use 0.95")
        with self._lock:
            if self.answerer.tagger is None:
                return {"ready": False, "progress": None, "model": None}
            sweep = self._sweep
            if sweep is None or (sweep["model"] != self.answerer.number and sweep["done"] >= sweep["of"]):
                self._wants_sweep = True
                self._work_on()
            sure = self._sure(least)
            found = {
                "ready": self._sweep is not None and self._sweep["done"] >= self._sweep["of"],
                "progress": self._sweep,
                "sequences": len(sure),
                "expected": sum(p for _, p in sure.values()) / len(sure) if sure else None,
                "examples": [
                    {"sequence": i, "words": self.pool.sequences[i].words, "labels": y, "probability": p}
                    for i, (y, p) in sorted(sure.items(), key=lambda item: item[1][1])[:5]
                ],
            }
        return found | {"precision": figures.measured_precision(self._audits(), least)}

    def _work_on(self) -> None:
        """Gives the background process its next task: a sweep that somebody is waiting for, else a fit."""
        with self._lock:
            if not self._wants_sweep:
                self.refit_if_due()
                return
            rest = [i for i in range(len(self.pool)) if not self.store.is_labelled(i)]
            if self.background.start({"do": "sweep", "unlabelled": rest}):
                self._swept, self._sweep = {}, {"model": self.answerer.number, "done": 0, "of": len(rest)}
                self._wants_sweep = False

    def _sure(self, least: float) -> dict[int, tuple[list[str], float]]:
        return {i: at for i, at in self._swept.items() if at[1] >= least and self._is_free(i)}

    def accept_bulk(self, request: str, annotator: str, least: float) -> list[Event]:
        """Saves the model's labels of all unlabelled sequences where they have at least this
        probability."""
        with self._lock:
            if not self.bulk(least)["ready"]:
                raise InputError("least", "the model is still reading the pool", "ask /bulk until 'ready'")
            sure = self._sure(least)
            model = self._sweep["model"] if self._sweep else None
            notes = {i: {"model": model, "labels": y, "probability": p} for i, (y, p) in sure.items()}
            labels: dict[int, Labels] = {i: list(y) for i, (y, _) in sure.items()}
            events = self.store.label(request, annotator, "bulk", labels, notes) if labels else []
        self.refit_if_due()
        return events

    # -- fits ----------------------------------------------------------------------------------

    def refit_if_due(self) -> None:
        """Starts a fit if there are new labels and none is under way."""
        with self._lock:
            new = self.store.version != self._fitted_version
            if not new or self.background.busy is not None:
                return  # checked again when the task under way is done
            labels = self.training_labels()
            grown = abs(len(labels) - self._fitted_n) >= max(1.0, REFIT_AFTER * len(labels))
            kinds = {label for given in labels.values() for label in given} - {None}
            if len(labels) < ENOUGH or len(kinds) < 2 or not (grown or not self._fitted_n):
                return
            rest = [i for i in range(len(self.pool)) if not self.store.is_labelled(i)]
            task = {"do": "fit", "labels": labels, "unlabelled": rest, "seed": self._seed}
            if self.background.start(task):
                self._fitted_version, self._fitted_n = self.store.version, len(labels)

    def training_labels(self) -> dict[int, list[str | None]]:
        """The latest labels of each sequence, without sequences that have no known label. Labels accepted
        in bulk are left out: they are the model's own, and it would learn nothing from them."""
        found = self.store.labelled().items()
        return {
            i: e.labels for i, e in found if e.stream != "bulk" and any(y is not None for y in e.labels)
        }

    def hear(self, name: str, value: Any) -> None:
        """Handles a result of the background process; called in the thread that listens to it."""
        if name == "model":
            self._take_model(value)
        elif name == "chosen":
            with self._lock:
                self._chosen = value
                self._prepare()
        elif name == "expected":
            with self._lock:
                self._fit |= value
                self.store.add_fit(self._fit["sequences"], self._fit)
        elif name == "doubted":
            with self._lock:
                reviewed = {i for i, e in self.store.labelled().items() if e.stream == "review"}
                self._doubted = [d for d in value if d["sequence"] not in reviewed]
        elif name == "swept":
            with self._lock:
                self._swept |= value["found"]
                if self._sweep is not None:
                    self._sweep |= {"done": value["done"], "of": value["of"]}
        elif name == "error":
            self.error = value
        elif name == "done":
            self._work_on()

    def _take_model(self, value: dict[str, Any]) -> None:
        try:
            tagger = load_tagger(value["path"])
        except (StructgpError, OSError) as error:
            self.error = str(error)
            return
        number = (self.answerer.number or 0) + 1
        self.answerer.replace(tagger, number, [self.pool.sequences[0].tokens])
        with self._lock:
            # Until the new figures arrive, those of the last fit remain.
            self._fit = self._fit | {"model": number, **value}
            self._fit.pop("path")
            self.error = None

    # -- what the panel shows ------------------------------------------------------------------

    def _audits(self) -> Sequence[figures.Audit]:
        return figures.audits(self.store.standing())

    def disagreements(self) -> list[dict[str, Any]]:
        """Tokens whose label the model contradicts, the most improbable label first."""
        with self._lock:
            return [d | {"words": self.pool.sequences[d["sequence"]].words} for d in self._doubted]

    def search(self, text: str) -> list[dict[str, Any]]:
        return [
            {"sequence": i, "words": self.pool.sequences[i].words, "labelled": self.store.is_labelled(i)}
            for i in self.pool.search(text, FOUND)
        ]

    def status(self) -> dict[str, Any]:
        """The progress of the labelling, and how good the model is."""
        events = self.store.standing()
        labelled, fits = self.store.labelled(), self.store.fits()
        own: dict[str, int] = {}
        for e in events:
            own[e.annotator] = own.get(e.annotator, 0) + 1
        rest = len(self.pool) - len(labelled)
        length = sum(len(s.words) for s in self.pool.sequences) / max(1, len(self.pool))
        streams = [e.stream for e in labelled.values()]
        return {
            "pool": {"name": self.pool.name, "sequences": len(self.pool), "labelled": len(labelled)},
            "tags": self.tags.to_json() | {"tags": list(self.tags.tags)},
            "annotators": own,
            "streams": {name: streams.count(name) for name in sorted(set(streams))},
            "model": self._fit or None,
            "busy": self.background.busy,
            "error": self.error,
            "enough": ENOUGH,
            "audit": figures.audited_error(self._audits()),
            "curve": [
                {"sequences": f["sequences"], "error": f.get("error"), "f1": f.get("f1")} for f in fits
            ],
            "outlook": figures.outlook(fits, rest, length),
            "disagreements": len(self._doubted),
            "agreement": figures.agreement(events),
            "suggestions": figures.unchanged(events),
        }
