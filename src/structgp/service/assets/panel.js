// The panel: how good the model is, and the lists of things to look at.

function interval(at) {
  return `${percent(at.low)} to ${percent(at.high)}`;
}

function tile(title, figure, note) {
  return [element("dt", {}, title), element("dd", { class: "figure" }, figure), element("dd", { class: "note" }, note)];
}

function drawStatus(status) {
  const { pool, model, audit, outlook, busy } = status;
  by("pool").textContent = `${pool.name}: ${pool.labelled} of ${pool.sequences} labelled`;
  const tiles = [];
  if (model && model.error) {
    tiles.push(tile("Expected error", percent(model.error.mean), interval(model.error)));
    if (asSpans) tiles.push(tile("Expected F1", percent(model.f1.mean), interval(model.f1)));
  }
  if (audit) {
    tiles.push(tile("Audited error", percent(audit.error), `${interval(audit)}, ${audit.sequences} audits`));
  }
  by("tiles").replaceChildren(...tiles.map((t) => element("div", {}, ...t)));
  drawCurve(status.curve.filter((f) => f.error), audit);
  const left = status.enough - pool.labelled;
  if (!model) {
    by("outlook").textContent = left > 0 ? `The model is fitted after ${left} more labelled ${left === 1 ? "sequence" : "sequences"}.` : "";
  } else if (outlook) {
    const gain = `${outlook.more} more labelled sequences should bring the error from ${percent(outlook.error)} to ${percent(outlook.after)}.`;
    const each = `Each of them takes away ${outlook.removed.toFixed(1)} errors in the rest of the pool.`;
    const verdict = outlook.pays ? each : `More labels hardly pay: ${each.toLowerCase()}`;
    by("outlook").textContent = `${gain} ${verdict}`;
  } else {
    by("outlook").textContent = "What more labels bring will be known after some more fits.";
  }
  const kept = status.suggestions;
  const asWere = kept.sequences ? ` ${kept.unchanged} of ${kept.sequences} suggestions were right as they were.` : "";
  const at = model ? `Fitted to ${model.sequences} sequences.${asWere}` : "";
  by("busy").textContent = status.error ? `The last fit failed: ${status.error}` : busy === "fit" ? `${at} Learning from new labels.` : at;
  by("doubts-count").textContent = status.disagreements ? `(${status.disagreements})` : "";
  const people = Object.entries(status.annotators).map(([who, n]) => element("li", {}, `${who}: ${n}`));
  for (const { annotators, tokens, same } of status.agreement) {
    people.push(element("li", {}, `${annotators.join(" and ")} agree on ${percent(same)} of ${tokens} tokens`));
  }
  by("people").replaceChildren(...people);
}

// Expected error against the number of labelled sequences, with its interval; the audited error as a line.
function drawCurve(points, audit) {
  by("curve-note").textContent = points.length < 2 ? "" : `Expected error and its interval${audit ? "; dashed: audited error" : ""}.`;
  if (points.length < 2) return by("curve").replaceChildren();
  const [width, height, left, bottom] = [340, 150, 38, 22];
  const xs = points.map((p) => p.sequences);
  const top = Math.max(...points.map((p) => p.error.high), audit ? audit.error : 0) * 1.05;
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  const x = (n) => left + ((width - left - 6) * (n - low)) / Math.max(1, high - low);
  const y = (e) => 6 + (height - bottom - 6) * (1 - e / top);
  const path = (f) => points.map((p) => `${x(p.sequences).toFixed(1)},${y(f(p)).toFixed(1)}`);
  const band = [...path((p) => p.error.high), ...path((p) => p.error.low).reverse()].join(" ");
  const lines = [0, top / 2, top].map((e) => `<line class="axis" x1="${left}" x2="${width}" y1="${y(e)}" y2="${y(e)}"/><text x="${left - 4}" y="${y(e) + 4}" text-anchor="end">${(100 * e).toFixed(0)} %</text>`);
  const audited = audit ? `<line class="audit" x1="${left}" x2="${width}" y1="${y(audit.error)}" y2="${y(audit.error)}" stroke-dasharray="5 4"/>` : "";
  const last = points[points.length - 1];
  const title = `Expected error by labelled sequences, from ${percent(points[0].error.mean)} at ${low} to ${percent(last.error.mean)} at ${high}`;
  by("curve").innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${title}">${lines.join("")}
    <polygon class="band" points="${band}"/><polyline class="mean" points="${path((p) => p.error.mean).join(" ")}"/>${audited}
    <circle class="dot" cx="${x(last.sequences)}" cy="${y(last.error.mean)}" r="3"/>
    <text x="${left}" y="${height - 4}">${low} labelled</text><text x="${width}" y="${height - 4}" text-anchor="end">${high}</text></svg>`;
}

function item(words, note, stream, sequence, extra = {}) {
  const text = words.join(" ");
  const open = () => openSequence(sequence, stream, extra);
  return element("li", {}, element("button", { type: "button", onclick: open }, text, element("span", { class: "state" }, ` ${note}`)));
}

async function search() {
  const text = by("search").value.trim();
  if (!text) return;
  const { found } = await ask(`search?text=${encodeURIComponent(text)}`);
  const items = found.map((f) => item(f.words, f.labelled ? "labelled" : "", "search", f.sequence));
  by("search-found").replaceChildren(...(items.length ? items : [element("li", { class: "note" }, "Nothing found.")]));
}

async function doubts() {
  const { found } = await ask("disagreements");
  const items = found.slice(0, 50).map((d) => item(
    d.words,
    `“${d.words[d.token]}”: ${d.given} given (${percent(d.p.given)}), ${d.model} by the model (${percent(d.p.model)})`,
    "review", d.sequence, { token: d.token, doubts: found.filter((o) => o.sequence === d.sequence).map((o) => o.token) },
  ));
  by("doubts").replaceChildren(...(items.length ? items : [element("li", { class: "note" }, "The model contradicts no label.")]));
}

async function bulk() {
  const least = Number(by("least").value);
  const found = await ask(`bulk?least=${least}`);
  if (found.model === null) return by("bulk").replaceChildren(element("p", {}, "There is no model yet."));
  if (!found.ready) {
    const { done, of } = found.progress || {};
    const text = of ? `The model is reading the pool: ${done} of ${of}.` : "The model is learning, and will then read the pool.";
    by("bulk").replaceChildren(element("p", {}, text));
    setTimeout(() => by("bulk-box").open && bulk(), 500);
    return undefined;
  }
  const { precision } = found;
  const measured = precision.sequences
    ? `In audits ${percent(precision.share)} of such sequences were right as a whole (${interval(precision)}, ${precision.sequences} audits).`
    : "No audit has measured this yet: label some more first.";
  const parts = [element("p", {}, `${found.sequences} unlabelled sequences. ${found.sequences ? `The model expects ${percent(found.expected)} of them to be right.` : ""}`), element("p", {}, measured)];
  if (found.sequences) {
    parts.push(element("p", { class: "note" }, "The least sure of them:"));
    parts.push(element("ul", { class: "found" }, ...found.examples.map((e) => item(e.words, percent(e.probability), "search", e.sequence))));
    parts.push(element("button", { type: "button", id: "bulk-accept", class: "main", onclick: () => acceptBulk(least) }, `Accept ${found.sequences}`));
  }
  return by("bulk").replaceChildren(...parts);
}

async function why() {
  if (!state.shown || !state.shown.suggestion) return;
  const at = state.cursor;
  const asked = element("p", {}, "Looking for reasons…");
  by("reasons").replaceChildren(asked);
  const label = state.labels[at] === null ? "" : `&label=${encodeURIComponent(state.labels[at])}`;
  const found = await ask(`why?sequence=${state.shown.sequence}&position=${at}${label}`);
  if (asked.parentNode !== by("reasons")) return; // another token is looked at by now
  const signed = (score) => (score < 0 ? "−" : "+") + Math.abs(score).toFixed(2);
  const row = (score, ...cells) => element("tr", {}, element("td", score < 0 ? { class: "against" } : {}, signed(score)), element("td", {}, ...cells));
  const rows = found.parts.map((p) => row(p.score, p.name));
  rows.push(element("tr", {}, element("th", { colspan: 2 }, "Its features")));
  rows.push(...found.features.map((f) => row(f.score, `${f.name} ${f.value}`)));
  const like = (w) => element("tr", {}, element("td", w.score < 0 ? { class: "against" } : {}, w.score < 0 ? "against" : "for"), element("td", {}, `${w.label}: `, w.words.slice(0, w.token).join(" "), " ", element("mark", {}, w.words[w.token]), " ", w.words.slice(w.token + 1).join(" ")));
  rows.push(element("tr", {}, element("th", { colspan: 2 }, "Like tokens that were labelled")));
  rows.push(...found.witnesses.map(like));
  by("reasons").replaceChildren(
    element("p", {}, `${found.label} rather than ${found.other}: ${percent(found.probability)}, log-odds ${signed(found.log_odds)}, made up of`),
    element("table", {}, ...rows),
  );
}
