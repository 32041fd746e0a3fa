"use strict";
// The run: tabs, the step, curves, the heat map, the table of the report. Text is only ever set as text.
/* exported say, positionOf, colorAt, normOf, chart */

/** @typedef {number | string | null} Value NaN and infinities are strings */
/** @typedef {{name: string, steps: number[], values: Value[]}} Line */
/** @typedef {{title: string, lines: Line[]}} Panel */
/** @typedef {{record: string, low: number, high: number, bounds: Record<string, number>, start: number, now: number}} Norms places of steps: of the first, and of the last finite one */
/** @typedef {{steps: number[], values: Record<string, Record<string, Value[]>>, first: number, rows: [string, string][]}} Records */
/** @typedef {{records: Records, panels: Panel[], norms: Norms | null, names: Record<number, string>}} RunData */

/** @template {HTMLElement} T @param {string} id @param {new () => T} kind @returns {T} */
function need(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no ${id}`);
  return found;
}
const NS = "http://www.w3.org/2000/svg";
/** @param {Element} parent @param {string} name @param {Record<string, string | number>} attributes @param {string | null} text @returns {Element} */
function make(parent, name, attributes = {}, text = null) {
  const isSvg = parent.namespaceURI === NS || name === "svg";
  const element = isSvg ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}
function say(/** @type {string} */ text) { need("status", HTMLSpanElement).textContent = text; }
/** @param {string} id @param {() => void} action */
function onClick(id, action) { document.getElementById(id)?.addEventListener("click", action); }
/** @param {string} name @returns {string} a color of the theme, light or dark */
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** @param {Value} value @returns {number} */
const number = (value) => (value === null ? NaN : Number(value));
/** @param {Value | undefined} value @returns {string} */
const figure = (value) => {
  if (value === null || value === undefined) return "-";
  if (typeof value === "string" || !Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e6 || (size > 0 && size < 1e-4) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
};

const run = /** @type {RunData} */ (JSON.parse(need("data", HTMLScriptElement).textContent || ""));
const STOPS = 9;

// ---- tabs
const tabs = [...document.querySelectorAll('[role="tab"]')].map((tab) => tab.id.slice(4));
function showTab(/** @type {string} */ name) {
  document.body.dataset.tab = name;
  for (const one of tabs) {
    need(one, HTMLElement).classList.toggle("gone", one !== name);
    const tab = need(`tab-${one}`, HTMLButtonElement);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
  }
  history.replaceState({ ...history.state, tab: name }, "");
  document.dispatchEvent(new CustomEvent("tab", { detail: name }));
}
for (const [at, name] of tabs.entries()) {
  onClick(`tab-${name}`, () => showTab(name));
  need(`tab-${name}`, HTMLButtonElement).addEventListener("keydown", ({ key }) => {
    if (key !== "ArrowLeft" && key !== "ArrowRight") return;
    const next = tabs[(at + (key === "ArrowLeft" ? tabs.length - 1 : 1)) % tabs.length];
    showTab(next);
    need(`tab-${next}`, HTMLButtonElement).focus();
  });
}

// ---- the step; null is all of them
const slider = need("step", HTMLInputElement);
const nameOf = (/** @type {number} */ step) => run.names[step] ?? `step ${step}`;
/** @returns {number | null} */
const stepNow = () => run.records.steps[Number(slider.value)] ?? null;
function setStep(/** @type {number} */ step) {
  const steps = run.records.steps;
  if (!steps.length) return;
  let at = 0;
  for (let n = 0; n < steps.length; n++) if (Math.abs(steps[n] - step) < Math.abs(steps[at] - step)) at = n;
  if (Number(slider.value) === at) return;
  slider.value = String(at);
  slider.dispatchEvent(new Event("input"));
}
slider.max = String(run.records.steps.length);
slider.value = String(run.records.first);
slider.addEventListener("input", () => {
  const step = stepNow();
  const shown = run.norms ? ` (norms: ${nameOf(run.records.steps[run.norms.now])})` : "";
  need("stepname", HTMLSpanElement).textContent = step === null ? `all steps${shown}` : nameOf(step);
  document.dispatchEvent(new CustomEvent("step"));
});
need("steps", HTMLLabelElement).classList.toggle("gone", !run.records.steps.length);

// ---- norms on one logarithmic axis
/** @param {string[]} sites @param {number} at @returns {number | null} the largest norm of the errors, else of the gradients */
function normOf(sites, at) {
  const norms = run.norms;
  if (!norms) return null;
  /** @type {number[]} */ const errors = [];
  /** @type {number[]} */ const gradients = [];
  for (const site of sites) {
    const value = run.records.values[site]?.[norms.record]?.[at];
    if (value === null || value === undefined) continue;
    (site.startsWith("gradient:") ? gradients : errors).push(Number.isFinite(number(value)) ? number(value) : Infinity);
  }
  const found = errors.length ? errors : gradients;
  return found.length ? Math.max(...found) : null;
}
/** @param {number} value @param {number} low @param {number} high @returns {number} from 0 to 1 */
function positionOf(value, low, high) {
  if (!(value > 0 && value < Infinity)) return value === 0 ? 0 : 1;
  return Math.min(Math.max(Math.log(value / low) / Math.log(high / low), 0), 1);
}
/** @param {number | null} value @param {number} low @param {number} high @returns {string} the name of a color */
function colorAt(value, low, high) {
  if (value === null) return "--no-data";
  return Number.isFinite(value) ? `--s${Math.round(positionOf(value, low, high) * (STOPS - 1))}` : "--not-finite";
}

// ---- curves
/** @param {Line[]} lines @returns {{low: number, high: number, isLog: boolean}} ends of the axis: of a run that diverges not all */
function axisOf(lines) {
  const finite = lines.map((line) => line.values.map(number).filter(Number.isFinite)), all = finite.flat();
  const whole = finite.filter((values, n) => values.length && values.length === lines[n].values.length).flat();
  let high = Math.max(...all);
  const low = Math.min(...all), most = Math.max(...whole);
  if (whole.length && whole.length < all.length && high > 10 * most && most > 0) high = 10 * most;
  if (!all.length) return { low: 0, high: 1, isLog: false };
  const isLog = low > 0 && high / low > 30, margin = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1 || 1;
  return isLog ? { low: low / 1.3, high: high * 1.3, isLog } : { low: low < 0 ? low - margin : Math.max(low - margin, 0), high: high + margin, isLog };
}
/** @param {Element} place @param {Panel} panel @param {number} wide @param {number} high */
function chart(place, { title, lines }, wide, high) {
  const { low, high: top, isLog } = axisOf(lines), left = wide > 400 ? 62 : 6, right = wide - 6, head = 14, foot = high - 16;
  const known = lines.filter((line) => line.steps.length), steps = known.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]);
  const first = Math.min(...steps), last = Math.max(...steps);
  const svg = make(place, "svg", { class: "curve", viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${title}: ${known.map((line) => `${line.name} ${figure(line.values[0])} to ${figure(line.values[line.values.length - 1])}`).join("; ")}` });
  const x = (/** @type {number} */ step) => left + (right - left) * (last > first ? (step - first) / (last - first) : 0.5);
  const share = (/** @type {number} */ value) => (isLog ? Math.log(value / low) / Math.log(top / low) : (value - low) / (top - low));
  const y = (/** @type {number} */ value) => foot - (foot - head) * Math.min(Math.max(share(value), 0), 1);
  for (const [n, line] of known.entries()) {
    /** @type {string[][]} */ const pieces = [[]];
    line.values.forEach((value, at) => {
      if (value === null || !Number.isFinite(number(value))) pieces.push([]); else pieces[pieces.length - 1].push(`${x(line.steps[at]).toFixed(1)},${y(number(value)).toFixed(1)}`);
      if (value !== null && !Number.isFinite(number(value))) make(svg, "line", { class: "bad", x1: x(line.steps[at]), x2: x(line.steps[at]), y1: head - 4, y2: foot });
    });
    for (const points of pieces) if (points.length > 1) make(svg, "polyline", { class: `c${n}`, points: points.join(" ") }); else if (points.length) make(svg, "circle", { class: `c${n}`, cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 2 });
  }
  make(svg, "text", { x: 4, y: 11, class: "note" }, `${figure(top)}${isLog ? " (logarithmic)" : ""}`);
  make(svg, "text", { x: 4, y: foot - 2, class: "note" }, figure(low));
  if (wide > 400) {
    const middle = isLog ? Math.sqrt(low * top) : (low + top) / 2;
    make(svg, "text", { x: 4, y: (head + foot) / 2 + 4, class: "note" }, figure(Number(middle.toPrecision(2))));
    for (const at of [0, 0.5, 1]) make(svg, "line", { class: "grid", x1: left, x2: right, y1: foot - (foot - head) * at, y2: foot - (foot - head) * at });
  }
  make(svg, "text", { x: left, y: high - 3, class: "note" }, `${nameOf(first)} to ${nameOf(last)}`);
  const now = make(svg, "line", { class: "now", y1: head - 4, y2: foot, x1: -9, x2: -9 }), words = make(svg, "text", { class: "note", x: right, y: 11, "text-anchor": "end" });
  const mark = () => {
    const step = stepNow(), at = step === null || step < first || step > last ? -9 : x(step);
    now.setAttribute("x1", String(at)); now.setAttribute("x2", String(at));
    words.textContent = step === null ? "" : `${nameOf(step)}: ${known.map((line) => { const value = figure(line.values[line.steps.indexOf(step)]); return known.length > 1 ? `${line.name} ${value}` : value; }).join(", ")}`;
  };
  mark();
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), { clientX } = /** @type {PointerEvent} */ (event);
    setStep(first + (((clientX - box.left) / box.width) * wide - left) / (right - left) * (last - first));
  });
  document.addEventListener("step", () => { if (svg.isConnected) mark(); });
}
function drawCurves(least = 0) {
  for (const [id, panels] of /** @type {[string, Panel[]][]} */ ([["loss-chart", run.panels.slice(0, 1)], ["charts", run.panels]])) {
    const place = document.getElementById(id);
    if (!place || !(place.clientWidth || least)) continue;
    place.replaceChildren();
    for (const panel of panels) {
      const head = make(place, "h3", {}, panel.title);
      panel.lines.forEach((line, n) => { if (panel.lines.length > 1) { make(head, "i", { class: `c${n}` }); make(head, "span", {}, line.name); } });
      chart(place, panel, Math.max(402, place.clientWidth || least), panel === run.panels[0] && id === "charts" ? 260 : 170);
    }
  }
}

// ---- heat map: a row a site, a column a step
const heat = /** @type {HTMLCanvasElement | null} */ (document.getElementById("heat"));
const LABELS = 230;
/** @type {[number, number]} */ let pointed = [-1, -1]; // row and column
function drawHeat() {
  const pen = heat?.getContext("2d"), rows = run.records.rows, steps = run.records.steps;
  if (!heat || !pen || !rows.length || !heat.clientWidth) return;
  const high = Math.min(16, Math.max(3, Math.floor(560 / rows.length))), wide = Math.max(400, heat.parentElement?.clientWidth || 0) - 4;
  heat.width = wide; heat.height = high * rows.length;
  const values = rows.map(([site, record]) => run.records.values[site][record].map((value) => (value === null ? null : number(value))));
  const finite = values.flat().filter((value) => value !== null && value > 0 && value < Infinity).map(Number);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity), top = Math.max(finite.reduce((a, b) => Math.max(a, b), 0), low * 10), each = (wide - LABELS) / steps.length;
  /** @type {Record<string, string>} */ const colors = {};
  const colored = (/** @type {string} */ name) => (colors[name] ||= theme(name));
  pen.font = '10px "DejaVu Sans", Verdana, Arial, sans-serif';
  let labeled = -20;
  rows.forEach(([site], row) => {
    values[row].forEach((value, at) => { pen.fillStyle = colored(colorAt(value, low, top)); pen.fillRect(LABELS + at * each, row * high, Math.max(each, 1), high > 4 ? high - 1 : high); });
    pen.fillStyle = colored(row === pointed[0] ? "--accent" : "--detail");
    if (row * high - labeled < 11 && row !== pointed[0]) return;
    pen.fillText(site.length > 38 ? `${site.slice(0, 14)}..${site.slice(-22)}` : site, 2, row * high + Math.min(high, 10), LABELS - 8);
    labeled = row * high;
  });
  const step = stepNow(), at = step === null ? -1 : steps.indexOf(step);
  if (at >= 0) { pen.strokeStyle = colored("--ink"); pen.strokeRect(LABELS + at * each, 0.5, Math.max(each, 2), heat.height - 1); }
  need("heat-ends", HTMLSpanElement).textContent = `${figure(low)} to ${figure(top)}, logarithmic`;
}
function point(/** @type {number} */ row, /** @type {number} */ at) {
  const { rows, steps, values } = run.records;
  pointed = [Math.min(Math.max(row, 0), rows.length - 1), Math.min(Math.max(at, 0), steps.length - 1)];
  const [site, record] = rows[pointed[0]];
  need("heat-value", HTMLSpanElement).textContent = `${site}, ${nameOf(steps[pointed[1]])}: ${record} ${figure(values[site][record][pointed[1]])}`;
  if (stepNow() === steps[pointed[1]]) drawHeat(); else setStep(steps[pointed[1]]);
}
const openPointed = () => { if (pointed[0] >= 0) document.dispatchEvent(new CustomEvent("site", { detail: run.records.rows[pointed[0]][0] })); };
heat?.addEventListener("pointermove", (event) => point(Math.floor(event.offsetY / heat.clientHeight * run.records.rows.length), Math.floor((event.offsetX / heat.clientWidth * heat.width - LABELS) / (heat.width - LABELS) * run.records.steps.length)));
heat?.addEventListener("click", openPointed);
heat?.addEventListener("keydown", (event) => {
  /** @type {Record<string, [number, number]>} */ const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const by = moves[event.key];
  if (pointed[0] < 0) { const { steps } = run.records, at = steps.indexOf(stepNow() ?? NaN); pointed = [-1, at < 0 ? steps.length - 1 : at]; }
  if (by) point(pointed[0] + by[0], pointed[1] + by[1]); else if (event.key === "Enter") openPointed(); else return;
  event.preventDefault(); event.stopPropagation();
});

// ---- the table: ten rows at first, the strongest clips on top, rows of one rule together, a filter
const FIRST = 10, LEAST = 3;
const table = document.querySelector("#report table"), body = table?.querySelector("tbody");
/** @type {HTMLTableRowElement[]} */ const allRows = body ? [...body.rows] : [];
/** @type {Set<string>} */ const openGroups = new Set();
let isWhole = false, sortedBy = -1, falling = true;
const cellOf = (/** @type {HTMLTableRowElement} */ row, /** @type {number} */ at) => row.cells[at].textContent || "";
const figureOf = (/** @type {string} */ text) => { const found = text.match(/-?[\d.]+(e[-+]?\d+)?/i); return found ? Number(found[0]) : NaN; };
function compareRows(/** @type {HTMLTableRowElement} */ a, /** @type {HTMLTableRowElement} */ b) {
  const isMarked = (/** @type {HTMLTableRowElement} */ row) => Number(cellOf(row, 0).includes("(see the verdict)"));
  if (sortedBy < 0 && isMarked(a) !== isMarked(b)) return isMarked(b) - isMarked(a);
  if (sortedBy < 0) return (figureOf(cellOf(b, 2)) || 0) - (figureOf(cellOf(a, 2)) || 0) || figureOf(cellOf(a, 3)) - figureOf(cellOf(b, 3)) || 0;
  const [x, y] = [cellOf(a, sortedBy), cellOf(b, sortedBy)], order = [0, 1, 10].includes(sortedBy) ? x.localeCompare(y) : (figureOf(x) || 0) - (figureOf(y) || 0);
  return falling ? -order : order;
}
function arrange() {
  if (!body) return;
  const wanted = need("filter", HTMLInputElement).value.trim().toLowerCase();
  const found = allRows.filter((row) => (row.textContent || "").toLowerCase().includes(wanted));
  const known = found.filter((row) => sortedBy >= 0 || cellOf(row, 0).includes("(see the verdict)") || !Number.isNaN(figureOf(cellOf(row, 2)))), rest = found.filter((row) => !known.includes(row));
  /** @type {Map<string, HTMLTableRowElement[]>} */ const groups = new Map();
  for (const row of [...known.sort(compareRows), ...rest]) {
    const name = row.dataset.group || "";
    groups.set(name, [...(groups.get(name) || []), row]);
  }
  body.replaceChildren();
  let shown = 0;
  for (const [name, rows] of groups) {
    const isGroup = rows.length >= LEAST && allRows.length > FIRST, isOpen = !isGroup || openGroups.has(name) || Boolean(wanted);
    for (const [n, row] of rows.entries()) {
      row.querySelector("button")?.remove();
      const isInOpened = n > 0 && isGroup && openGroups.has(name);
      if ((n > 0 && !isOpen) || (!isWhole && !wanted && shown >= FIRST && !isInOpened)) continue;
      if (n === 0 && isGroup && !wanted) {
        const button = make(row.cells[0], "button", { type: "button", "aria-expanded": String(isOpen) }, isOpen ? "fold" : `+ ${rows.length - 1} of ${name}`);
        button.addEventListener("click", () => { if (isOpen) openGroups.delete(name); else openGroups.add(name); arrange(); });
      }
      body.append(row);
      shown += 1;
    }
  }
  need("row-count", HTMLSpanElement).textContent = shown ? `${shown} of ${allRows.length} rows` : "no row matches";
  const all = need("all-rows", HTMLButtonElement);
  all.textContent = isWhole ? `show ${FIRST}` : `show all ${allRows.length}`;
  all.classList.toggle("gone", allRows.length <= FIRST || Boolean(wanted));
}
if (table && allRows.length > 1) {
  need("table-tools", HTMLDivElement).classList.remove("gone");
  need("filter", HTMLInputElement).addEventListener("input", arrange);
  onClick("all-rows", () => { isWhole = !isWhole; for (const row of isWhole ? allRows : []) openGroups.add(row.dataset.group || ""); if (!isWhole) openGroups.clear(); arrange(); });
  table.querySelectorAll("thead th").forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      falling = sortedBy === at ? !falling : true;
      sortedBy = at;
      table.querySelectorAll("thead th").forEach((one, n) => { if (n === at) one.setAttribute("aria-sort", falling ? "descending" : "ascending"); else one.removeAttribute("aria-sort"); });
      arrange();
    });
  });
  arrange();
}

document.addEventListener("step", drawHeat);
for (const button of document.querySelectorAll("[data-site]")) button.addEventListener("click", () => {
  const { site, step } = /** @type {HTMLElement} */ (button).dataset;
  setStep(Number(step));
  document.dispatchEvent(new CustomEvent("site", { detail: site }));
});
window.addEventListener("beforeprint", () => drawCurves(1000));
for (const one of ["tab", "resize"]) (one === "tab" ? document : window).addEventListener(one, () => { drawCurves(); drawHeat(); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawHeat);
document.documentElement.dataset.script = "yes";
/** @type {string | undefined} */ const before = history.state?.tab;
showTab(before && tabs.includes(before) ? before : tabs[0]);
slider.dispatchEvent(new Event("input"));
if (!tabs.includes("ladder")) document.documentElement.dataset.ready = "yes";
