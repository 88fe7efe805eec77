// Labels of tokens as spans, and changes of them. Labels are a list with one string per token, null for
// "don't know".

const given = JSON.parse(document.getElementById("given").textContent);
const { types, spans: asSpans } = given.tags;

function typeOf(label) {
  return label === null || !asSpans || label === "O" ? label : label.slice(2);
}

// [{start, stop, type}], stop being one past the last token; tokens outside and unknown ones are in none.
function spansOf(labels) {
  const found = [];
  labels.forEach((label, t) => {
    if (label === null || (asSpans && label === "O")) return;
    const last = found[found.length - 1];
    const goesOn = asSpans && label[0] === "I" && last && last.stop === t && last.type === typeOf(label);
    if (goesOn) last.stop = t + 1;
    else found.push({ start: t, stop: t + 1, type: typeOf(label) });
  });
  return found;
}

// The labels with the tokens from start to before stop as one span, outside ("O"), or unknown (null). A new
// span takes the place of those that it overlaps; outside and unknown only cut them.
function withSpan(labels, start, stop, type) {
  const next = labels.slice();
  if (asSpans && type !== null && type !== "O") {
    for (const span of spansOf(labels)) {
      if (span.start < stop && span.stop > start) next.fill("O", span.start, span.stop);
    }
  }
  for (let t = start; t < stop; t++) {
    next[t] = type === null || type === "O" || !asSpans ? type : (t === start ? "B-" : "I-") + type;
  }
  // The rest of a span that was cut begins anew.
  if (asSpans && type !== null && stop < next.length && next[stop] !== null && next[stop][0] === "I") {
    next[stop] = "B" + next[stop].slice(1);
  }
  return next;
}

function equal(a, b) {
  return a.length === b.length && a.every((label, t) => label === b[t]);
}

// A letter for each type: its first one that is free.
const keyOf = new Map();
for (const type of types) {
  const letters = [...type.toLowerCase(), ..."abcdefghijklmnopqrstuvwxyz"];
  const free = letters.find((c) => c >= "a" && c <= "z" && ![...keyOf.values()].includes(c));
  if (free) keyOf.set(type, free);
}

const hues = [212, 145, 28, 280, 345, 180, 55, 250, 95, 320];

function colour(type) {
  const n = types.indexOf(type);
  if (n < 0) return "var(--soft)";
  const hue = hues[n % hues.length];
  return `light-dark(hsl(${hue} 65% 30%), hsl(${hue} 60% 70%))`;
}

function percent(p, digits = 0) {
  if (p > 0 && p < 0.001) return "< 0.1 %";
  if (p < 1 && p > 0.999 && digits === 0) return "> 99.9 %";
  const shown = p < 0.1 || p > 0.99 ? Math.max(digits, 1) : digits;
  return (100 * p).toFixed(shown) + " %";
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
