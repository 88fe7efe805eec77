// What is on the screen: the sequence with its labels, and the card of the token under the cursor.

const by = (id) => document.getElementById(id);
const state = { shown: null, labels: [], first: [], cursor: 0, anchor: 0, waiting: false, sent: null };

const reasonsFor = {
  chosen: "Chosen: the model would learn much from it.",
  random: "Drawn at random.",
  audit: "Audit: drawn at random to measure the model. Its suggestion is hidden, so that it does not sway you.",
  search: "Looked up.",
  review: "Under review.",
};

function selection() {
  return [Math.min(state.anchor, state.cursor), Math.max(state.anchor, state.cursor) + 1];
}

function show(next) {
  state.shown = next;
  state.waiting = false;
  state.sent = null;
  by("reasons").replaceChildren();
  const none = next.sequence === null;
  for (const id of ["accept", "skip", "reset", "why", "shorter", "longer"]) by(id).disabled = none;
  by("legend").hidden = !next.suggestion;
  by("tokens").dataset.sequence = none ? "none" : next.sequence;
  if (none) {
    state.labels = state.first = [];
    by("at").textContent = "All done";
    by("stream").textContent = "";
    by("tokens").replaceChildren(element("p", { class: "done" }, "Every sequence of the pool is labelled."));
    by("card-title").textContent = "";
    by("alternatives").replaceChildren();
    by("types").replaceChildren();
    say("Every sequence is labelled.");
    return;
  }
  const usual = next.suggestion ? next.suggestion.labels : next.words.map(() => (asSpans ? "O" : null));
  state.first = next.labels || usual;
  const draft = kept();
  state.labels = draft || state.first.slice();
  state.cursor = state.anchor = next.token ?? firstDoubt();
  by("at").textContent = `Sequence ${next.sequence + 1}`;
  const before = next.labels ? ` Labelled by ${next.annotator || "you"}.` : "";
  by("stream").textContent = `${reasonsFor[next.stream] || ""}${before} ${next.place}`;
  drawTypes();
  draw();
  say(`Sequence ${next.sequence + 1}: ${next.words.join(" ")}. ${describeSpans()}`);
}

// The token that the model is least sure of comes first.
function firstDoubt() {
  const told = state.shown.suggestion;
  if (!told) return 0;
  const total = told.uncertainty.map((u) => u[0]);
  return total.indexOf(Math.max(...total));
}

function describeSpans() {
  if (!asSpans) return "";
  const found = spansOf(state.labels).map((s) => {
    return `${s.type}: ${state.shown.words.slice(s.start, s.stop).join(" ")}`;
  });
  return found.length ? found.join("; ") : "No spans.";
}

function draftKey() {
  return `draft ${state.shown.sequence} ${name()}`;
}

function keep() {
  sessionStorage.setItem(draftKey(), JSON.stringify([state.first, state.labels]));
}

// What was changed before the page was reloaded, if it began from the same labels.
function kept() {
  const [first, labels] = JSON.parse(sessionStorage.getItem(draftKey()) || "[[], []]");
  return labels.length === state.shown.words.length && equal(first, state.first) ? labels : null;
}

function draw() {
  const { words, suggestion } = state.shown;
  const [start, stop] = selection();
  const spans = spansOf(state.labels);
  const most = suggestion ? Math.log(Math.max(2, suggestion.alternatives[0] ? suggestion.alternatives[0].length : 2)) : 1;
  const nodes = words.map((word, t) => {
    const label = state.labels[t];
    const span = spans.find((s) => s.start <= t && t < s.stop);
    const begins = span && span.start === t;
    const u = suggestion ? Math.min(1, suggestion.uncertainty[t][0] / most) : 0;
    const classes = ["token"];
    if (span) classes.push("in");
    if (span && t + 1 < span.stop) classes.push("more");
    if (label === null) classes.push("unknown");
    if (label !== state.first[t] && (begins || !span)) classes.push("changed");
    if (state.shown.doubts && state.shown.doubts.includes(t)) classes.push("doubted");
    const told = label === null ? "unknown" : span ? span.type : "outside";
    const [, p] = (suggestion && suggestion.alternatives[t].find(([other]) => other === label)) || [label, 0];
    const sure = suggestion && label !== null ? `, ${percent(p)} by the model` : "";
    const part = span && span.stop - span.start > 1 ? ` ${t - span.start + 1} of ${span.stop - span.start}` : "";
    const style = `--u:${u.toFixed(3)};` + (span ? `--type:${colour(span.type)}` : "");
    const kind = begins ? span.type : label === null ? "?" : null;
    return element(
      "span",
      {
        class: classes.join(" "), id: `token-${t}`, role: "option", style, "data-token": t,
        "aria-selected": t >= start && t < stop ? "true" : "false", "aria-label": `${word}: ${told}${part}${sure}`,
      },
      element("span", { class: "word" }, element("bdi", {}, word)),
      element("span", { class: "kind", "aria-hidden": "true" }, kind || ""),
    );
  });
  by("tokens").replaceChildren(...nodes);
  const fromRight = fromTheRight(words);
  by("tokens").dir = fromRight ? "rtl" : "ltr";
  by("longer").lastChild.textContent = `Shift ${fromRight ? "←" : "→"}`;
  by("shorter").lastChild.textContent = `Shift ${fromRight ? "→" : "←"}`;
  by("tokens").setAttribute("aria-activedescendant", `token-${state.cursor}`);
  drawCard();
}

// Whether a text is written from right to left: its first letter says so.
function fromTheRight(words) {
  const [letter] = words.join(" ").match(/\p{L}/u) || [""];
  return /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(letter);
}

function drawTypes() {
  const button = (text, key, type, tint) => element(
    "button",
    { type: "button", style: `--type:${tint}`, "aria-keyshortcuts": key, onclick: () => give(type) },
    ...(type !== null && type !== "O" ? [element("span", { class: "dot", "aria-hidden": "true" })] : []),
    text,
    ...(key ? [element("kbd", {}, key)] : []),
  );
  const made = types.map((type) => button(type, keyOf.get(type) || "", type, colour(type)));
  if (asSpans) made.push(button("Outside", "0", "O", "var(--soft)"));
  made.push(button("Don't know", "?", null, "var(--soft)"));
  by("types").replaceChildren(...made);
}

// [{start, stop, type, p}] that the model thinks possible at the selection, most probable first.
function alternatives() {
  const told = state.shown.suggestion;
  if (!told) return [];
  const [start, stop] = selection();
  if (!asSpans) {
    return told.alternatives[state.cursor].map(([type, p]) => ({ start, stop, type, p }));
  }
  const found = told.spans
    .filter(([a, b]) => (stop - start > 1 ? a === start && b === stop : a <= start && start < b))
    .map(([a, b, type, p]) => ({ start: a, stop: b, type, p }));
  const outside = told.alternatives[start].find(([label]) => label === "O");
  if (outside && stop - start === 1) found.push({ start, stop, type: "O", p: outside[1] });
  return found.sort((a, b) => b.p - a.p).slice(0, 9);
}

function holds({ start, stop, type }) {
  if (!asSpans) return state.labels[start] === type;
  if (type === "O") return state.labels[start] === "O";
  return spansOf(state.labels).some((s) => s.start === start && s.stop === stop && s.type === type);
}

function drawCard() {
  const [start, stop] = selection();
  const words = state.shown.words;
  by("card-title").textContent = `“${words.slice(start, stop).join(" ")}”`;
  const found = alternatives();
  const items = found.map((one, k) => element(
    "li",
    holds(one) ? { class: "now" } : {},
    element(
      "button",
      { type: "button", "aria-keyshortcuts": k + 1, onclick: () => take(one), style: `--type:${colour(one.type)}` },
      element("kbd", {}, String(k + 1)),
      element("span", { class: "words" }, element("b", {}, one.type === "O" && asSpans ? "outside" : one.type), one.type === "O" && asSpans ? "" : ` ${words.slice(one.start, one.stop).join(" ")}`),
      element("span", { class: "bar", "aria-hidden": "true" }, element("i", { style: `width:${(100 * one.p).toFixed(1)}%` })),
      element("span", { class: "p" }, percent(one.p)),
    ),
  ));
  if (!items.length) {
    const none = state.shown.suggestion ? "The model sees nothing here that is worth naming."
      : state.shown.stream === "audit" ? "Hidden in audits." : "No suggestions yet: the model comes after the first labels.";
    items.push(element("li", { class: "note" }, none));
  }
  by("alternatives").replaceChildren(...items);
  by("why").disabled = !state.shown.suggestion;
}

function say(text) {
  by("said").textContent = text;
}

function trouble(text) {
  by("trouble").hidden = !text;
  by("trouble").textContent = text || "";
}
