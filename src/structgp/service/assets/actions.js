// What the annotator does: keys, mouse, and what is sent to the service.

const query = new URLSearchParams(location.search);
const token = query.get("token");

function name() {
  return by("annotator").value.trim() || given.annotator;
}

async function ask(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The service does not answer. What was saved is safe. Start it again and open the address that it prints; if that is this one, press Enter.");
  }
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// One thing at a time; what fails is said, and can be tried again.
async function attempt(action) {
  if (state.waiting) return;
  state.waiting = true;
  try {
    await action();
    trouble("");
  } catch (error) {
    trouble(error.message);
  } finally {
    state.waiting = false;
  }
}

const fresh = () => crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random()}`;

function next() {
  return attempt(async () => show(await ask(`next?annotator=${encodeURIComponent(name())}`)));
}

function accept(labels = state.labels) {
  if (!state.shown || state.shown.sequence === null) return undefined;
  const open = labels.filter((label) => label === null).length;
  if (!asSpans && open && !state.shown.confirmed && labels === state.labels && !state.shown.suggestion) {
    state.shown.confirmed = true;
    return say2(`${open} tokens have no label. Enter again leaves them unknown.`);
  }
  return attempt(async () => {
    const { sequence, stream } = state.shown;
    // The same request again, after an answer that never came, changes nothing; other labels are another one.
    if (!state.sent || !equal(state.sent.labels, labels)) state.sent = { request: fresh(), labels: labels.slice() };
    const body = { request: state.sent.request, annotator: name(), sequence, labels, stream };
    const answer = await ask("labels", body);
    sessionStorage.removeItem(draftKey());
    show(answer.next);
    status();
    if (stream === "review" && by("doubts-box").open) await doubts();
  });
}

function say2(text) {
  trouble(text);
  say(text);
}

// The undo that has not been answered yet: asking again must not take back one more.
let undoing = null;

function undo() {
  return attempt(async () => {
    const again = undoing !== null;
    undoing = undoing || fresh();
    const { next: found } = await ask("undo", { request: undoing, annotator: name() });
    undoing = null;
    if (!found && again) return show(await ask(`next?annotator=${encodeURIComponent(name())}`));
    if (!found) throw new Error("Nothing to undo.");
    show(found.undone > 1 ? await ask(`next?annotator=${encodeURIComponent(name())}`) : found);
    say(found.undone > 1 ? `Took back ${found.undone} sequences.` : `Took back the labels of sequence ${found.sequence + 1}.`);
    return status();
  });
}

function skip() {
  accept(state.labels.map(() => null));
}

function acceptBulk(least) {
  return attempt(async () => {
    const answer = await ask("bulk", { request: fresh(), annotator: name(), least });
    show(answer.next);
    by("bulk").replaceChildren(element("p", {}, `Accepted ${answer.events.length} sequences. Undo takes them back together.`));
    status();
  });
}

function openSequence(sequence, stream, extra) {
  return attempt(async () => {
    const found = await ask(`sequence?sequence=${sequence}&stream=${stream}`);
    show({ ...found, ...extra });
    by("tokens").focus();
  });
}

function change(labels) {
  if (state.waiting) return; // what is being saved does not change any more
  state.labels = labels;
  keep();
  draw();
}

function give(type) {
  if (!state.labels.length) return;
  const [start, stop] = selection();
  change(withSpan(state.labels, start, stop, type));
  const words = state.shown.words.slice(start, stop).join(" ");
  say(`${words}: ${type === null ? "unknown" : type === "O" ? "outside" : type}`);
}

function take(one) {
  change(withSpan(state.labels, one.start, one.stop, one.type));
  say(`${state.shown.words.slice(one.start, one.stop).join(" ")}: ${one.type === "O" ? "outside" : one.type}`);
}

function move(step, extend) {
  if (!state.labels.length) return;
  const last = state.labels.length - 1;
  state.cursor = Math.max(0, Math.min(last, step === "first" ? 0 : step === "last" ? last : state.cursor + step));
  if (!extend) state.anchor = state.cursor;
  by("reasons").replaceChildren();
  draw();
  by(`token-${state.cursor}`).scrollIntoView({ block: "nearest" });
}

function startOver() {
  state.cursor = state.anchor;
  change(state.first.slice());
  say("As it was.");
}

const moves = { ArrowLeft: -1, ArrowRight: 1, Home: "first", End: "last" };

// An arrow goes where it points.
function moveBy(key, extend) {
  const step = moves[key];
  move(typeof step === "number" && by("tokens").dir === "rtl" ? -step : step, extend);
}

function onKey(event) {
  const at = event.target;
  if (at.matches("input, textarea, select")) {
    if (event.key === "Escape") by("tokens").focus();
    return;
  }
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
    event.preventDefault();
    undo();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // A button or a summary that has the focus keeps its own keys.
  if (at.matches("button, summary, a") && (event.key === "Enter" || event.key === " ")) return;
  const action = actionOf(event);
  if (!action || state.waiting) return;
  event.preventDefault();
  action();
}

function actionOf(event) {
  const { key } = event;
  if (key === "Enter") return event.shiftKey ? skip : () => accept();
  if (key in moves) return () => moveBy(key, event.shiftKey);
  if (key === "?") return () => give(null);
  if (key === "0" || key === "Delete" || key === "Backspace") return asSpans ? () => give("O") : () => give(null);
  if (key >= "1" && key <= "9") {
    const one = alternatives()[Number(key) - 1];
    return one && (() => take(one));
  }
  if (key === "Escape") return startOver;
  if (key === ".") return () => why().catch((error) => trouble(error.message));
  if (key === "/") return () => { by("search-box").open = true; by("search").focus(); };
  const type = types.find((t) => keyOf.get(t) === key.toLowerCase());
  return type && (() => give(type));
}

let dragging = false;
by("tokens").addEventListener("pointerdown", (event) => {
  const at = event.target.closest(".token");
  if (!at) return;
  const t = Number(at.dataset.token);
  dragging = event.pointerType === "mouse";
  state.cursor = t;
  if (!event.shiftKey) state.anchor = t;
  by("reasons").replaceChildren();
  draw();
});
by("tokens").addEventListener("pointerover", (event) => {
  const at = dragging && event.target.closest(".token");
  if (!at || Number(at.dataset.token) === state.cursor) return;
  state.cursor = Number(at.dataset.token);
  draw();
});
document.addEventListener("pointerup", () => { dragging = false; });
document.addEventListener("keydown", onKey);

const clicks = {
  accept: () => accept(), undo, skip, reset: startOver, look: () => attempt(bulk),
  shorter: () => move(-1, true), longer: () => move(1, true), why: () => why().catch((error) => trouble(error.message)),
};
for (const [id, action] of Object.entries(clicks)) {
  by(id).addEventListener("click", () => { action(); if (id !== "look") by("tokens").focus({ preventScroll: true }); });
}
by("search-form").addEventListener("submit", (event) => { event.preventDefault(); attempt(search); });
by("doubts-box").addEventListener("toggle", () => by("doubts-box").open && attempt(doubts));
by("annotator").addEventListener("change", () => { localStorage.setItem("annotator", name()); next(); });

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(chosen) {
  const now = chosen || (dark.matches ? "dark" : "light");
  if (chosen) document.documentElement.dataset.theme = chosen;
  by("theme").textContent = now === "dark" ? "Light" : "Dark";
  by("theme").onclick = () => { const other = now === "dark" ? "light" : "dark"; localStorage.setItem("theme", other); theme(other); };
}
dark.addEventListener("change", () => theme(localStorage.getItem("theme")));

let asking = false;
async function status() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    drawStatus(await ask("status"));
  } catch {
    // The next one will tell: a label that could not be saved says so itself.
  } finally {
    asking = false;
  }
}

theme(localStorage.getItem("theme"));
by("annotator").value = query.get("annotator") || localStorage.getItem("annotator") || given.annotator;
by("tokens").focus();
next();
status();
setInterval(status, 2000);
