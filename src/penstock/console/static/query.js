// Runs queries: one at a time, its rows as they come, in lines of JSON. Leaving the page cancels it.
const SHOWN_MAX = 1000;
const DRAWN_MAX = 60;
const PAST_MAX = 20;
const KEPT = "penstock-queries";
const SVG = "http://www.w3.org/2000/svg";
const NUMBERS = /^(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*)$/;

const form = document.querySelector("[data-query]");
const text = form.elements.sql;
const find = (name) => document.querySelector(`[data-${name}]`);
const outcome = find("outcome"), told = find("told"), place = find("place");
const result = find("result"), charting = find("charting");
let running = null;
let shown = { columns: [], rows: [] };

function say(sentence, isBad = false) {
  outcome.hidden = false;
  outcome.classList.toggle("bad", isBad);
  told.textContent = sentence;
}

// The line of the text that has this place, with a mark below it. Places count characters, and texts here
// pairs of some of them.
function mark(characters) {
  const sql = text.value;
  const position = [...sql].slice(0, characters).join("").length;
  const start = sql.lastIndexOf("\n", position - 1) + 1;
  const end = sql.indexOf("\n", position);
  const line = sql.slice(start, end < 0 ? sql.length : end).replaceAll("\t", " ");
  const before = `line ${sql.slice(0, position).split("\n").length}: `;
  const column = [...sql.slice(start, position)].length;
  place.textContent = `${before}${line}\n${" ".repeat(before.length + column)}^`;
  place.hidden = false;
  text.classList.add("misread");
  text.setAttribute("aria-invalid", "true");
  text.focus();
  text.setSelectionRange(position, position);
}

function unmark() {
  place.hidden = true;
  text.classList.remove("misread");
  text.removeAttribute("aria-invalid");
}

function cell(value, isNumber) {
  const made = document.createElement("td");
  if (isNumber) made.className = "number";
  if (value === null) { made.className = "null"; made.textContent = "null"; }
  else made.textContent = typeof value === "object" ? JSON.stringify(value) : String(value);
  return made;
}

function showColumns(columns) {
  shown = { columns, rows: [] };
  const row = document.createElement("tr");
  for (const [name, kind] of columns) {
    const head = document.createElement("th");
    head.textContent = name;
    head.title = kind;
    if (NUMBERS.test(kind)) head.className = "number";
    row.append(head);
  }
  result.querySelector("thead").replaceChildren(row);
  result.querySelector("tbody").replaceChildren();
  result.hidden = false;
}

function showRows(rows) {
  const made = document.createDocumentFragment();
  for (const each of rows) {
    const row = document.createElement("tr");
    each.forEach((value, place) => row.append(cell(value, NUMBERS.test(shown.columns[place][1]))));
    made.append(row);
  }
  shown.rows.push(...rows);
  result.querySelector("tbody").append(made);
}

function ask(more) {
  return fetch("/query/run", {
    method: "POST",
    headers: { "content-type": "application/json", "x-form-token": document.body.dataset.formToken },
    body: JSON.stringify({ sql: text.value, at: form.elements.at.value.trim() || null, ...more }),
    signal: running.signal,
  });
}

async function refused(answer) {
  const problem = await answer.json().catch(() => ({ title: "The dispatcher gave no answer." }));
  say(`${problem.title} ${problem.detail ?? ""}`.trim(), true);
  if (typeof problem.position === "number") mark(problem.position);
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const whole = (held + value).split("\n");
    held = whole.pop();
    yield whole.map((each) => JSON.parse(each));
  }
}

async function show(answer, isPlan) {
  let end = null;
  for await (const some of lines(answer.body)) {
    const rows = [];
    for (const said of some) {
      if (Array.isArray(said)) rows.push(said);
      else if (said.columns && !isPlan) showColumns(said.columns);
      else if (said.end) end = said.end;
    }
    if (isPlan && rows.length) { place.textContent = rows[0][0]; place.hidden = false; }
    else if (rows.length) showRows(rows);
  }
  if (end === null) { say("The result broke off. The query log says why.", true); return; }
  const cut = end.is_cut ? `; these are the first ${SHOWN_MAX}, download has all` : "";
  say(isPlan ? "How it would be run:" : `${end.rows.toLocaleString("en")} rows in ${end.seconds} s${cut}.`);
  if (!isPlan) { remember(text.value); chart(); }
}

async function run(work) {
  if (running || !text.value.trim()) return;
  running = new AbortController();
  unmark();
  say("Running…");
  find("cancel").disabled = false;
  find("run").disabled = true;
  try {
    await work();
  } catch (error) {
    const isCancelled = error.name === "AbortError";
    say(isCancelled ? "Cancelled." : "The result broke off. The query log says why.", !isCancelled);
  } finally {
    running = null;
    find("cancel").disabled = true;
    find("run").disabled = false;
  }
}

function query(isPlan) {
  return run(async () => {
    result.hidden = charting.hidden = true;
    const answer = await ask({ rows: SHOWN_MAX, explain: isPlan });
    if (answer.ok) await show(answer, isPlan);
    else await refused(answer);
  });
}

function download() {
  return run(async () => {
    const format = form.elements.format.value;
    const answer = await ask({ format });
    if (!answer.ok) { await refused(answer); return; }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = `query.${format}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    say(`Downloaded as query.${format}.`);
  });
}

function drawn(name, given, words = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  if (words) made.textContent = words;
  return made;
}

function options(select, columns) {
  const before = select.value;
  select.replaceChildren(...columns.map(([name, place]) => new Option(name, place)));
  if (columns.some(([, place]) => String(place) === before)) select.value = before;
}

function chart() {
  const named = shown.columns.map(([name], place) => [name, place]);
  const numbers = named.filter(([, place]) => NUMBERS.test(shown.columns[place][1]));
  charting.hidden = !numbers.length || shown.rows.length < 2 || named.length < 2;
  if (charting.hidden) return;
  options(find("x"), named);
  options(find("y"), numbers);
  if (find("y").value === find("x").value && numbers.length > 1) find("y").value = numbers[1][1];
  draw();
}

function draw() {
  const x = Number(find("x").value), y = Number(find("y").value);
  const rows = shown.rows.slice(0, SHOWN_MAX).filter((row) => row[y] !== null && Number.isFinite(Number(row[y])));
  const [width, height, left, bottom] = [720, 240, 60, 24];
  const values = rows.map((row) => Number(row[y]));
  const low = Math.min(0, ...values), high = Math.max(0, ...values);
  const scale = (value) => (height - bottom) - ((value - low) / (high - low || 1)) * (height - bottom - 12);
  const step = (width - left) / Math.max(1, rows.length);
  const names = [shown.columns[x][0], shown.columns[y][0]];
  const label = `${names[1]} along ${names[0]}: ${rows.length} values from ${Math.min(...values)} to ${Math.max(...values)}`;
  const made = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of new Set([low, 0, high])) {
    made.append(drawn("line", { class: "axis", x1: left, x2: width, y1: scale(value), y2: scale(value) }));
    made.append(drawn("text", { x: left - 6, y: scale(value) + 4, "text-anchor": "end" }, value.toLocaleString("en", { maximumFractionDigits: 2 })));
  }
  if (rows.length <= DRAWN_MAX) {
    rows.forEach((row, place) => {
      const at = scale(values[place]), zero = scale(0);
      const bar = drawn("rect", { class: "bar", x: left + place * step + step * 0.1, width: step * 0.8, y: Math.min(at, zero), height: Math.max(1, Math.abs(zero - at)) });
      bar.append(drawn("title", {}, `${row[x]}: ${row[y]}`));
      made.append(bar);
    });
  } else {
    const points = values.map((value, place) => `${left + (place + 0.5) * step},${scale(value)}`).join(" ");
    made.append(drawn("polyline", { class: "line", points }));
  }
  const ends = rows.length ? [[left, "start", rows[0][x]], [width, "end", rows.at(-1)[x]]] : [];
  for (const [at, anchor, value] of ends) made.append(drawn("text", { x: at, y: height - 6, "text-anchor": anchor }, String(value).slice(0, 24)));
  find("chart").replaceChildren(made);
}

function past() {
  try { return JSON.parse(localStorage.getItem(KEPT)) ?? []; } catch { return []; }
}

function remember(sql) {
  const kept = [sql, ...past().filter((each) => each !== sql)].slice(0, PAST_MAX);
  try { localStorage.setItem(KEPT, JSON.stringify(kept)); } catch { /* It is full, or forbidden. */ }
  list();
}

function list() {
  const kept = past();
  find("past").hidden = !kept.length;
  find("past").querySelector("ol").replaceChildren(...kept.map((sql) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.className = "plain mono";
    button.textContent = sql.length > 160 ? `${sql.slice(0, 160)}…` : sql;
    button.addEventListener("click", () => { text.value = sql; text.focus(); });
    item.append(button);
    return item;
  }));
}

function insert(name) {
  const quoted = /^[a-z_][a-z0-9_]*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`;
  text.setRangeText(quoted, text.selectionStart, text.selectionEnd, "end");
  text.focus();
}

form.addEventListener("submit", (event) => { event.preventDefault(); query(false); });
find("cancel").addEventListener("click", () => running?.abort());
find("explain").addEventListener("click", () => query(true));
find("download").addEventListener("click", download);
text.addEventListener("input", unmark);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); query(false); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
for (const name of ["x", "y"]) find(name).addEventListener("change", draw);
for (const each of document.querySelectorAll("[data-insert]")) {
  each.addEventListener("click", (event) => { event.preventDefault(); insert(each.dataset.insert); });
}
list();
