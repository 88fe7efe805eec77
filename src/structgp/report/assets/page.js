"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const list = byId("sequences"), card = byId("card"), more = byId("more");
  const AT_ONCE = 40;

  // Text goes in as text: nothing from the data is ever read as HTML.
  function element(name, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const number = (value, digits) => value
    .toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits })
    .replace("-", "\u2212");
  const plural = (n, noun) => number(n, 0) + " " + noun + (n === 1 ? "" : "s");

  const sequences = data.sequences.map(
    ([line, surprise, words, predicted, errors, uncertainties, alternatives], index) => {
      const truth = new Map();
      for (let i = 0; i < errors.length; i += 2) truth.set(errors[i], errors[i + 1]);
      const sums = uncertainties.map((values) => values.reduce((a, b) => a + b, 0) / 1000);
      return { index, line, surprise, words, predicted, truth, uncertainties, sums, alternatives };
    });

  // -- order, filter -----------------------------------------------------------------------------

  const ORDERS = [
    ["uncertainty", "most uncertain first", (s) => -s.sums[shade]],
    ["file", "as in the file", () => 0],
  ];
  if (data.labelled) {
    // A label that training never saw is the greatest surprise there is.
    ORDERS.unshift(["surprise", "most surprising first", (s) => -(s.surprise ?? Infinity)]);
  }
  const MEANING = data.labelled
    ? "Surprise: \u2212log p of its true labels; uncertainty: the sum of its tokens'; both in nats."
    : "Uncertainty: the sum of its tokens', in nats.";
  let shade = 0, shown = [], rendered = 0;

  function labelsOf(sequence) {
    return [...sequence.predicted, ...sequence.truth.values()].map((i) => data.labels[i]);
  }
  function matches(sequence, wanted) {
    if (!wanted) return true;
    sequence.haystack ??=
      (sequence.words.join(" ") + "\n" + labelsOf(sequence).join("\n")).toLowerCase();
    return sequence.haystack.includes(wanted);
  }
  function refresh() {
    const wanted = byId("filter").value.trim().toLowerCase();
    const key = ORDERS.find(([name]) => name === byId("order").value)[2];
    const errorsOnly = byId("errors").checked;
    shown = sequences
      .filter((s) => (!errorsOnly || s.truth.size) && matches(s, wanted))
      .map((s) => [key(s), s])
      .sort(([a, s], [b, t]) => (a === b ? s.index - t.index : a - b))
      .map(([, s]) => s);
    byId("shown").textContent = shown.length
      ? `${number(shown.length, 0)} of ${plural(sequences.length, "sequence")}. ` + MEANING
      : "No sequence like that.";
    hide();
    list.replaceChildren();
    rendered = 0;
    extend();
  }
  const watch = new IntersectionObserver(
    (entries) => entries.some((entry) => entry.isIntersecting) && extend(),
    { rootMargin: "1500px" });
  function extend() {
    const some = document.createDocumentFragment();
    for (const sequence of shown.slice(rendered, rendered + AT_ONCE)) some.append(draw(sequence));
    rendered = Math.min(shown.length, rendered + AT_ONCE);
    list.append(some);
    // Looked at afresh: it may be in view still, which an observer does not report by itself.
    watch.unobserve(more);
    if (rendered < shown.length) watch.observe(more);
  }

  // -- drawing -----------------------------------------------------------------------------------

  function draw(sequence) {
    const item = element("li"), tokens = element("div", "tokens");
    const facts = [`line ${number(sequence.line, 0)}`];
    if (data.labelled) {
      facts.push(sequence.truth.size ? plural(sequence.truth.size, "error") : "no error");
      facts.push(sequence.surprise === null
        ? "a label that training never saw" : `surprise ${number(sequence.surprise, 1)}`);
    }
    facts.push(`${data.uncertainties[shade].title} ${number(sequence.sums[shade], 1)}`);
    item.append(element("p", "about", facts.join(" \u00b7 ")), tokens);
    sequence.words.forEach((word, t) => tokens.append(drawToken(sequence, word, t)));
    item.sequence = sequence;
    return item;
  }
  function drawToken(sequence, word, t) {
    const token = element("button", "token");
    token.type = "button";
    // One stop of the Tab key per sequence; arrow keys walk along it.
    token.tabIndex = t ? -1 : 0;
    const text = element("span", "word", word);
    text.dir = "auto";
    text.style.setProperty("--shade", strength(sequence, t) + "%");
    const label = data.labels[sequence.predicted[t]];
    token.append(text, element("span", "label", label));
    if (sequence.truth.has(t)) {
      token.classList.add("wrong");
      token.append(element("span", "unseen", "is wrong, true label"));
      token.append(element("span", "true", data.labels[sequence.truth.get(t)]));
    }
    return token;
  }
  function strength(sequence, t) {
    const share = sequence.uncertainties[shade][t] / 1000 / data.uncertainties[shade].full;
    return Math.round(100 * Math.min(1, share));
  }

  // -- the card of a token -----------------------------------------------------------------------

  let open = null;
  function show(token) {
    if (!token || token === open) return;
    hide();
    open = token;
    const sequence = token.closest("li").sequence;
    fill(sequence, [...token.parentNode.children].indexOf(token));
    card.hidden = false;
    token.setAttribute("aria-describedby", "card");
    const at = token.getBoundingClientRect(), size = card.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(at.left, width - size.width - 8));
    const below = at.bottom + 6 + size.height < innerHeight || at.top < size.height + 6;
    card.style.left = left + scrollX + "px";
    card.style.top = (below ? at.bottom + 6 : at.top - size.height - 6) + scrollY + "px";
  }
  function hide() {
    open?.removeAttribute("aria-describedby");
    open = null;
    card.hidden = true;
  }
  function fill(sequence, t) {
    const title = element("p", "word", sequence.words[t]);
    title.dir = "auto";
    const table = element("table"), named = sequence.alternatives[t];
    let rest = 1000;
    for (let i = 0; i < named.length; i += 2) {
      rest -= named[i + 1];
      const marks = [];
      if (named[i] === sequence.predicted[t]) marks.push("predicted");
      if (named[i] === (sequence.truth.get(t) ?? (data.labelled ? sequence.predicted[t] : -1))) {
        marks.push("true");
      }
      table.append(row(data.labels[named[i]], named[i + 1], marks.join(", ")));
    }
    if (rest >= 5) table.append(row("all others", rest, ""));
    const parts = data.uncertainties.map(
      (kind, k) => `${kind.title} ${number(sequence.uncertainties[k][t] / 1000, 2)}`);
    card.replaceChildren(title, table, element("p", "note", parts.join(", ") + " nats"));
  }
  function row(label, thousandths, mark) {
    const line = element("tr"), gauge = element("td"), bar = element("span", "gauge");
    bar.style.width = Math.max(1, thousandths / 10) + "%";
    gauge.append(bar);
    const share = thousandths < 1 ? "< 0.001" : number(thousandths / 1000, 3);
    line.append(element("th", "", label), gauge, element("td", "number", share),
      element("td", "mark", mark));
    return line;
  }

  // -- hands -------------------------------------------------------------------------------------

  const tokenOf = (event) => event.target.closest?.(".token");
  list.addEventListener("pointerover", (e) => e.pointerType === "mouse" && show(tokenOf(e)));
  list.addEventListener("pointerout", (e) => {
    if (e.pointerType === "mouse" && tokenOf(e) === open && open !== document.activeElement) hide();
  });
  list.addEventListener("focusin", (e) => show(tokenOf(e)));
  list.addEventListener("focusout", hide);
  // A tap gives a button no focus on every telephone.
  document.addEventListener("click", (e) => (tokenOf(e) ? show(tokenOf(e)) : hide()));
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape") hide();
    const token = list.contains(document.activeElement) && tokenOf({ target: document.activeElement });
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[e.key];
    if (!token || !step) return;
    e.preventDefault();
    const next = token[step];
    if (!next) return;
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // -- controls ----------------------------------------------------------------------------------

  function fillSelect(id, options) {
    for (const [value, title] of options) byId(id).append(new Option(title, value));
  }
  function showScale() {
    const kind = data.uncertainties[shade];
    byId("scale-text").textContent =
      `${kind.title} of 0 to ${number(kind.full, 1)} nats: ${kind.meaning}`;
  }
  fillSelect("order", ORDERS);
  fillSelect("shade", data.uncertainties.map((kind, k) => [k, kind.title]));
  byId("shade").parentNode.hidden = data.uncertainties.length < 2;
  byId("errors").parentNode.hidden = byId("error-key").hidden = !data.labelled;
  document.querySelector(".controls").hidden = document.querySelector(".legend").hidden = false;
  document.querySelector(".controls").addEventListener("submit", (e) => e.preventDefault());
  byId("order").addEventListener("change", refresh);
  byId("errors").addEventListener("change", refresh);
  byId("shade").addEventListener("change", () => {
    shade = Number(byId("shade").value);
    showScale();
    refresh();
  });
  let waiting;
  byId("filter").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 120);
  });

  const root = document.documentElement, theme = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);

  nameTheme();
  showScale();
  refresh();
})();
