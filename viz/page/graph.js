"use strict";
// The graph: the overview as SVG, the ladder as JSON, of which only what is in sight is drawn.
// All lengths come from Python (_layout.py); heights are added up here.
/* global need, make, say, onClick, theme, number, run, showTab, stepNow, normOf, positionOf, colorAt, chart, figure */

/** @typedef {{x: number, width: number, heading: string}} Column */
/** @typedef {{top: number, header: number, foot: number, gap: number, box: number, bar: number, chip: number, pad: number, width: number, columns: Record<string, Column>, insets: number[]}} Geometry */
/** @typedef {[string, string[]]} Cell a layer or call, and its sites */
/** @typedef {{key: string, row: number, column: string, y: number, height: number, text: string, small: string, classes: string, title: string, nodes: string[], shown: string[], edits: number[], sites: string[], cells: Cell[]}} PartData */
/** @typedef {PartData & {at: number, top: number, isOpen: boolean, words: string}} Part */
/** @typedef {{key: string, name: string, first: number, last: number, depth: number, isApart: boolean, folded: boolean, y: number, height: number, isDrawn: boolean}} Band */
/** @typedef {{key: string, x: number, y: number, width: number, height: number, band: Band | null}} Place */
/** @typedef {[number, number, string, number, [number, number, number][]]} LineData source, target, kind, tensors, points (x, 0 source or 1 target, share of the height) */
/** @typedef {{target: string, module: number, value: string, source: number, code: string}} NodeData */
/** @typedef {{name: string, weak: number, strong: number, legend: [string, string][], values: Record<string, {total: Value, steps: Value[]}>}} Metric */
/** @typedef {{site: string, action: string, nodes: string[], replaced: [number, number][], isFigure: boolean}} EditData */
/** @typedef {RunData & {geometry: Geometry, rows: number[], parts: PartData[], bands: Band[], lines: LineData[], nodes: Record<string, NodeData>, sources: string[], modules: string[], edits: EditData[], overview: {sites: string[], cells: Cell[], small: string, width: number, isIdle: boolean}[], metrics: Metric[], color_by: string, most_rows: number}} PageData */

const data = /** @type {PageData} */ (run), G = data.geometry;
const view = need("ladder", HTMLDivElement), map = need("map", HTMLCanvasElement), svg = /** @type {SVGSVGElement} */ (/** @type {unknown} */ (document.getElementById("graph")));

// ---- the parts of the ladder
/** @type {Part[]} */ const parts = data.parts.map((part, at) => ({ ...part, at, top: 0, isOpen: false, words: "" }));
/** @type {Band[]} */ const bands = data.bands.map((band) => ({ ...band, folded: false, y: 0, height: 0, isDrawn: false }));
const hasBars = data.norms !== null, SUMMARY = G.box + (hasBars ? G.bar : 0);
/** @type {Map<string, Part>} */ const partOf = new Map();
for (const part of parts) { partOf.set(part.key, part); for (const name of part.nodes) partOf.set(name, part); }
/** @type {Part[][]} */ const partsOf = data.rows.map(() => []);
for (const part of parts) partsOf[part.row].push(part);
/** @type {Band[][]} */ const opening = data.rows.map(() => []);
for (const band of bands) opening[band.first].push(band);
/** @type {number[][]} */ const linesOf = parts.map(() => []);
data.lines.forEach(([from, to], at) => { linesOf[from].push(at); linesOf[to].push(at); });
const behind = make(svg, "g", { class: "frames" }), between = make(svg, "g", { class: "lines" });
const front = make(svg, "g", { class: "boxes" }), upon = make(svg, "g", { class: "lines" }), headings = make(svg, "g", { class: "headings" });

// ---- layout: heights of rows from above; a folded band is one row
/** @type {(Band | null)[]} */ let foldedAt = [];
/** @type {{key: string, points: number[][], kind: string, at: number, top: number, bottom: number}[]} */ let drawnLines = [];
/** @type {Place[]} */ let places = [];
let total = 0, scale = 1;

function layOut() {
  foldedAt = data.rows.map(() => null);
  places = [];
  /** @type {Band[]} */ const open = [];
  for (const band of bands) band.isDrawn = false;
  let y = G.top;
  for (let row = 0; row < data.rows.length;) {
    let folded = null;
    for (const band of opening[row]) {
      band.y = y; band.isDrawn = true;
      open.push(band);
      y += G.header;
      if (band.folded) { folded = band; break; }
    }
    if (folded) {
      for (let r = folded.first; r <= folded.last; r++) foldedAt[r] = folded;
      placeSummary(folded, y + 2);
      y += SUMMARY + G.gap;
      row = folded.last + 1;
    } else {
      y += placeRow(row, y + 2);
      row += 1;
    }
    for (let band = open.at(-1); band && band.last < row; band = open.at(-1)) { open.pop(); y += G.foot; band.height = y - band.y - 4; }
  }
  total = y + 20;
  placeLines();
  zoom(scale);
  drawMap();
}

function placeRow(/** @type {number} */ row, /** @type {number} */ y) {
  /** @type {Record<string, number>} */ const extra = {};
  let height = data.rows[row];
  for (const part of partsOf[row]) {
    const above = extra[part.column] || 0, own = part.isOpen ? part.shown.length * G.chip : 0;
    part.top = y + part.y + above;
    extra[part.column] = above + own;
    height = Math.max(height, part.y + above + part.height + own + G.gap);
    places.push({ key: part.key, x: G.columns[part.column].x, y: part.top, width: G.columns[part.column].width, height: part.height + own, band: null });
  }
  return height;
}

function placeSummary(/** @type {Band} */ band, /** @type {number} */ y) {
  const columns = new Set();
  for (let row = band.first; row <= band.last; row++) for (const part of partsOf[row]) { part.top = y; columns.add(part.column); }
  for (const column of columns) places.push({ key: `${band.key} ${column}`, x: G.columns[column].x, y, width: G.columns[column].width, height: SUMMARY, band });
}

function standIn(/** @type {Part} */ part) {
  const band = foldedAt[part.row];
  return band ? { key: `${band.key} ${part.column}`, y: part.top, height: SUMMARY } : { key: part.key, y: part.top, height: part.height };
}

function placeLines() {
  drawnLines = [];
  const seen = new Set();
  const isShown = { saved: need("saved", HTMLInputElement).checked, fan: need("fan", HTMLInputElement).checked };
  data.lines.forEach(([from, to, kind, , points], at) => {
    const ends = [standIn(parts[from]), standIn(parts[to])], key = `${ends[0].key}\n${ends[1].key}`;
    if ((ends[0].key === ends[1].key && (kind !== "carried" || foldedAt[parts[from].row])) || seen.has(key) || (kind === "saved" && !isShown.saved) || (kind === "fan" && !isShown.fan)) return;
    seen.add(key);
    const placed = points.map(([x, end, share]) => [x, ends[end].y + share * ends[end].height]);
    const ys = placed.map(([, y]) => y);
    drawnLines.push({ key, points: placed, kind, at, top: Math.min(...ys), bottom: Math.max(...ys) });
  });
}

// ---- drawing of what is in sight
/** @type {Map<string, Element>} */ const elements = new Map();
let isWaiting = false;
function draw() {
  isWaiting = false;
  const high = view.clientHeight / scale, top = view.scrollTop / scale - high / 2, bottom = top + 2 * high;
  const kept = new Set();
  /** @param {string} key @param {() => Element} create */
  const keep = (key, create) => { kept.add(key); if (!elements.has(key)) elements.set(key, create()); };
  for (const band of bands) if (band.isDrawn && band.y < bottom && band.y + band.height > top) keep(`band ${band.key} ${band.y} ${band.height} ${band.folded}`, () => drawBand(band));
  for (const place of places) if (place.y < bottom && place.y + place.height > top) keep(`box ${place.key} ${place.y} ${place.height}`, () => drawBox(place));
  for (const line of drawnLines) if (line.top < bottom && line.bottom > top) keep(`line ${line.at} ${line.top} ${line.bottom}`, () => drawLine(line));
  for (const [from, to] of selected ? replacedBy(selected) : []) keep(`replaced ${from.key} ${to.key} ${standIn(from).y} ${standIn(to).y}`, () => drawReplaced(from, to));
  for (const [key, element] of elements) if (!kept.has(key)) { element.remove(); elements.delete(key); }
  headings.setAttribute("transform", `translate(0 ${view.scrollTop / scale})`);
  drawMap();
}
function drawSoon() { if (!isWaiting) { isWaiting = true; requestAnimationFrame(draw); } }
function redraw() { for (const element of elements.values()) element.remove(); elements.clear(); draw(); }

function drawBand(/** @type {Band} */ band) {
  const group = make(behind, "g", { class: "band", "data-band": band.key }), x = G.insets[Math.min(band.depth, G.insets.length - 1)];
  make(group, "rect", { x, y: band.y, width: G.width - 2 * x, height: Math.max(band.height, 10), rx: 3 });
  const head = make(group, "g", { role: "button", tabindex: 0, "aria-expanded": String(!band.folded), "aria-label": band.name });
  make(head, "title", {}, `${band.key}: click to fold or unfold`);
  make(head, "text", { x: x + 6, y: band.y + 14 }, `${band.folded ? "\u25b8" : "\u25be"} ${band.name}`);
  head.addEventListener("click", () => { if (!dragged) fold(band, !band.folded); });
  head.addEventListener("keydown", (event) => {
    const { key } = /** @type {KeyboardEvent} */ (event);
    if (key !== "Enter" && key !== " ") return;
    event.preventDefault(); event.stopPropagation();
    fold(band, !band.folded);
    [...svg.querySelectorAll(".band")].find((one) => one.getAttribute("data-band") === band.key)?.querySelector("g")?.focus();
  });
  return group;
}

function drawBox(/** @type {Place} */ place) {
  const part = partOf.get(place.key), band = place.band;
  const inside = part ? [part] : band ? insideOf(band, place.key.slice(band.key.length + 1)) : [];
  const isInserted = inside.some((one) => one.edits.length > 0);
  const classes = part ? part.classes : `node summary${isInserted ? " inserted" : ""}`;
  const group = make(front, "g", { class: classes, transform: `translate(${place.x} ${place.y})`, "data-part": place.key });
  if (part && part.edits.length) group.setAttribute("data-edit", data.edits[part.edits[0]].site);
  const texts = part ? [part.text, part.small] : [band ? band.name : "", `${inside.length} ${isInserted ? "edit" : place.x === G.columns.input?.x ? "input" : "op"}${inside.length > 1 ? "s" : ""}`];
  make(group, "title", {}, part ? part.title : texts.join(": "));
  const high = part ? part.height : SUMMARY, cells = part ? part.cells : band && place.x === G.columns.backward?.x ? cellsOf(band) : [];
  const rect = make(group, "rect", { width: place.width, height: high, rx: 3 });
  const fill = inside.some((one) => one.edits.length) && inside.every((one) => !one.edits.length || one.classes.includes("idle")) ? "" : fillOf(inside);
  if (fill) rect.setAttribute("style", `fill:${fill}`);
  const text = cells.length || high > G.box ? G.box : high;
  const small = [texts[1], normText(cells)].filter(Boolean).join(" \u00b7 ");
  make(group, "text", { x: G.pad, y: small ? text / 2 - 3 : text / 2 + 4 }, fitted(texts[0], place.width, Boolean(part)));
  if (small) make(group, "text", { x: G.pad, y: text - 6, class: fill ? "small" : "note" }, fitted(small, place.width, false));
  drawMarks(group, cells, place.width);
  for (const name of part && !part.isOpen ? part.nodes : []) make(make(group, "g", { "data-node": name }), "title", {}, name);
  if (part && part.isOpen) part.shown.forEach((name, at) => drawChip(group, part, name, high + at * G.chip, place.width));
  group.classList.toggle("selected", part === selected && part !== undefined && part !== null);
  group.classList.toggle("partner", Boolean(part && selected && partners(selected).includes(part)));
  group.classList.toggle("hit", inside.some((one) => hitSet.has(one)));
  group.addEventListener("click", () => { if (!dragged) { if (part) select(part, { scroll: false, open: part === selected ? !part.isOpen : part.isOpen }); else if (band) fold(band, false); } });
  group.addEventListener("pointerenter", () => light(inside, true));
  group.addEventListener("pointerleave", () => light(inside, false));
  return group;
}

/** @param {Element} group @param {Part} part @param {string} name @param {number} y @param {number} width */
function drawChip(group, part, name, y, width) {
  const chip = make(group, "g", { class: "chip", transform: `translate(12 ${y})`, "data-node": name });
  make(chip, "title", {}, `${name}: ${data.nodes[name].target}`);
  make(chip, "rect", { width: width - 12, height: G.chip - 2, rx: 3 });
  make(chip, "text", { x: G.pad, y: G.chip / 2 + 4 }, fitted(`${data.nodes[name].target.split(".")[1] || data.nodes[name].target}: ${name}`, width - 12, false));
  chip.addEventListener("click", (event) => { event.stopPropagation(); if (!dragged) select(part, { scroll: false, node: name }); });
}

// ---- norms on boxes: a bar, or of a folded box a strip of cells
/** @returns {number} the place of the step whose norms are shown */
const normStep = () => { const step = stepNow(); return step === null ? (data.norms ? data.norms.now : 0) : data.records.steps.indexOf(step); };
/** @param {Band} band @returns {Cell[]} a cell for each part of it that has norms */
function cellsOf(band) {
  const inner = bands.filter((one) => one.depth === band.depth + 1 && band.first <= one.first && one.last <= band.last);
  const rows = inner.length > 1 ? inner : data.rows.slice(band.first, band.last + 1).map((_, n) => ({ name: "", first: band.first + n, last: band.first + n }));
  const found = rows.map(({ name, first, last }) => /** @type {Cell} */ ([name, partsOf.slice(first, last + 1).flat().flatMap((part) => part.cells.flatMap(([, sites]) => sites))]));
  return inner.length > 1 ? found : found.filter(([, sites]) => sites.length);
}
/** @param {Cell[]} cells @returns {string} */
function normText(cells) {
  const values = cells.map(([, sites]) => normOf(sites, normStep())).filter((value) => value !== null).map(Number);
  if (!data.norms || !values.length) return "";
  const ends = new Set([Math.min(...values), Math.max(...values)].map((value) => figure(Number(value.toPrecision(3)))));
  return `${data.norms.record} ${[...ends].join(" to ")}`;
}
/** @param {Element} group @param {Cell[]} cells @param {number} width */
function drawMarks(group, cells, width) {
  const norms = data.norms, at = normStep();
  if (!norms || !cells.length) return;
  const top = G.box, left = G.pad, wide = width - 2 * G.pad, thick = 5;
  const put = (/** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ w, /** @type {number} */ h, /** @type {string} */ fill) => make(group, "rect", { class: "mark", x, y, width: w, height: h, style: `fill:var(${fill})` });
  const known = cells.filter(([, sites]) => normOf(sites, at) !== null);
  const shown = known.length > 1 ? cells : known.length ? known : cells.slice(0, 1);
  if (shown.length > 1) {
    shown.forEach(([name, sites], n) => {
      const value = normOf(sites, at), mark = put(left + wide * n / shown.length, top, wide / shown.length, thick, colorAt(value, norms.low, norms.high));
      make(mark, "title", {}, `${name}: ${norms.record} ${figure(value)}`);
    });
    return;
  }
  const [, sites] = shown[0], value = normOf(sites, at), begin = normOf(sites, norms.start);
  const bound = sites.reduce((least, site) => Math.min(least, norms.bounds[site] ?? Infinity), Infinity);
  put(left, top, wide, thick, "--no-data");
  if (value !== null) put(left, top, Math.max(2, wide * positionOf(value, norms.low, norms.high)), thick, colorAt(value, norms.low, norms.high));
  if (begin !== null) put(left + wide * positionOf(begin, norms.low, norms.high) - 0.5, top - 2, 1, thick + 3, "--detail");
  if (bound < Infinity) put(left + wide * positionOf(bound, norms.low, norms.high) - 1, top - 2, 2, thick + 3, "--inserted-edge");
}

const pen = map.getContext("2d");
function fitted(/** @type {string} */ text, /** @type {number} */ width, /** @type {boolean} */ isFitted) {
  if (isFitted || !pen) return text;
  pen.font = '12px "DejaVu Sans", Verdana, Arial, sans-serif';
  let shown = text;
  for (let kept = text.length - 1; kept >= 0 && pen.measureText(shown).width > width - 2 * G.pad; kept--) {
    let head = Math.floor(kept / 3), tail = text.length - (kept - head);
    for (const number of text.matchAll(/-?\d+(\.\d+)?(e[+-]?\d+)?/g)) {  // none is cut
      const end = number.index + number[0].length;
      if (number.index < head && head < end) head = number.index;
      if (number.index < tail && tail < end) tail = end;
    }
    shown = `${text.slice(0, head)}..${text.slice(tail)}`;
  }
  return shown;
}

/** @param {{points: number[][], kind: string, at: number}} line */
function drawLine({ points, kind, at }) {
  const [from, to, , tensors] = data.lines[at], [first, ...rest] = points;
  const path = make(between, "path", { d: `M${first.join(" ")}${rest.length > 1 ? "C" : "L"}${rest.map((p) => p.join(" ")).join(" ")}`, class: kind, "data-line": at });
  if (tensors > 1) path.setAttribute("style", `stroke-width:${1 + 0.4 * Math.log2(tensors)}`);
  path.classList.toggle("lit", Boolean(selected && (from === selected.at || to === selected.at)));
  return path;
}

/** @returns {[Part, Part][]} the edges of the plain graph that the edits of a box replaced */
function replacedBy(/** @type {Part} */ part) { return part.edits.flatMap((at) => data.edits[at].replaced).map(([from, to]) => [parts[from], parts[to]]); }

/** @param {Part} from @param {Part} to */
function drawReplaced(from, to) {
  const ends = [from, to].map((part) => ({ x: G.columns[part.column].x + G.columns[part.column].width / 2, y: standIn(part).y + standIn(part).height / 2 }));
  const x = (ends[0].x + ends[1].x) / 2, y = (ends[0].y + ends[1].y) / 2, group = make(upon, "g");
  make(group, "path", { d: `M${ends[0].x} ${ends[0].y}L${ends[1].x} ${ends[1].y}`, class: "cut" });
  make(group, "path", { d: `M${x - 6} ${y - 6}L${x + 6} ${y + 6}M${x - 6} ${y + 6}L${x + 6} ${y - 6}`, class: "cross" });
  return group;
}

function light(/** @type {Part[]} */ inside, /** @type {boolean} */ isLit) {
  for (const part of inside.slice(0, 50)) for (const at of linesOf[part.at]) for (const path of between.querySelectorAll(`[data-line="${at}"]`)) path.classList.toggle("lit", isLit || part === selected);
}

function insideOf(/** @type {Band} */ band, /** @type {string} */ column) {
  const found = [];
  for (let row = band.first; row <= band.last; row++) for (const part of partsOf[row]) if (part.column === column) found.push(part);
  return found;
}

function drawHeadings() {
  make(headings, "rect", { width: G.width, height: 22 });
  for (const { x, heading } of Object.values(G.columns)) make(headings, "text", { x, y: 15 }, heading);
}

// ---- the map of the whole ladder
function drawMap() {
  const isShown = !view.classList.contains("gone") && total * scale > 1.5 * view.clientHeight;
  map.classList.toggle("gone", !isShown);
  if (!pen || !isShown) return;
  const wide = map.width / G.width, high = map.height / total;
  pen.clearRect(0, 0, map.width, map.height);
  let last = -1;
  for (const place of places) {
    const y = Math.round(place.y * high), isEdit = place.x === G.columns.edit?.x;
    if (y === last && !isEdit) continue;
    last = y;
    pen.fillStyle = theme(isEdit ? "--inserted-edge" : "--faint");
    pen.fillRect(place.x * wide, y, place.width * wide, Math.max(1, place.height * high - 1));
  }
  pen.strokeStyle = theme("--accent");
  pen.strokeRect(view.scrollLeft / scale * wide, view.scrollTop / scale * high, view.clientWidth / scale * wide, view.clientHeight / scale * high);
}
map.addEventListener("pointerdown", (event) => {
  view.scrollTop = event.offsetY / map.height * total * scale - view.clientHeight / 2;
  view.scrollLeft = event.offsetX / map.width * G.width * scale - view.clientWidth / 2;
});

// ---- folding and zoom
function fold(/** @type {Band} */ band, /** @type {boolean} */ folded) { band.folded = folded; layOut(); say(`${band.name} ${folded ? "folded" : "unfolded"}`); }
function foldAll(/** @type {boolean} */ folded) { for (const band of bands) band.folded = folded; layOut(); say(folded ? "all folded" : "all unfolded"); }
function reveal(/** @type {Part} */ part) {
  showTab("ladder");
  const around = bands.filter((band) => band.folded && band.first <= part.row && part.row <= band.last);
  for (const band of around) band.folded = false;
  return around.length > 0;
}
/** @param {number} to @param {[number, number] | null} focus */
function zoom(to, focus = null) {
  const [x, y] = focus || [view.clientWidth / 2, view.clientHeight / 2];
  const at = [(view.scrollLeft + x) / scale, (view.scrollTop + y) / scale], before = scale;
  scale = Math.min(4, Math.max(0.05, to));
  svg.setAttribute("viewBox", `0 0 ${G.width} ${total}`);
  svg.setAttribute("width", String(G.width * scale));
  svg.setAttribute("height", String(total * scale));
  if (scale !== before) { view.scrollLeft = at[0] * scale - x; view.scrollTop = at[1] * scale - y; }
  draw();
}
document.addEventListener("tab", (event) => {
  if (/** @type {CustomEvent} */ (event).detail === "ladder") draw(); else drawMap();
  fitOverview();
});
/** Let the overview fill the window. */
function fitOverview() {
  const place = need("overview", HTMLDivElement), picture = place.querySelector("svg");
  if (!picture || !place.clientWidth) return;
  const [, , wide, high] = (picture.getAttribute("viewBox") || "0 0 1 1").split(" ").map(Number);
  const by = Math.min(Math.max(Math.min(place.clientWidth / wide, Math.max(place.clientHeight / high, 1)), 0.75), 1.8);
  picture.setAttribute("width", String(wide * by));
  picture.setAttribute("height", String(high * by));
}

// ---- choosing a box
/** @type {Part | null} */ let selected = null;
/** @param {Part | undefined | null} part @param {{scroll?: boolean, open?: boolean, node?: string}} options */
function select(part, { scroll = true, open = false, node = "" } = {}) {
  if (!part) return;
  selected = part;
  const isOpen = part.nodes.length > 0 && (open || node !== "");
  const isChanged = reveal(part) || isOpen !== part.isOpen;
  part.isOpen = isOpen;
  if (isChanged) layOut();
  if (scroll) {
    const column = G.columns[part.column];
    view.scrollLeft = (column.x + column.width / 2) * scale - view.clientWidth / 2;
    view.scrollTop = part.top * scale - view.clientHeight / 2;
  }
  redraw();
  showDetails(part, node);
  const name = node || (part.edits.length ? data.edits[part.edits[0]].site : part.nodes[0]);
  if (name && location.protocol !== "about:") history.replaceState(null, "", `#${encodeURIComponent(name)}`); // a notebook's frame has no address
}
function partners(/** @type {Part} */ part) {
  const isLane = (/** @type {Part} */ one) => Number(one.edits.length > 0);
  return partsOf[part.row].filter((other) => other !== part && !["input", "output", part.column].includes(other.column)).sort((a, b) => isLane(a) - isLane(b));
}
function list(/** @type {Element} */ parent, /** @type {string} */ title, /** @type {Part[]} */ found) {
  if (!found.length) return;
  make(parent, "h3", {}, title);
  const names = make(parent, "ul");
  for (const other of found.slice(0, 12)) {
    const button = make(make(names, "li"), "button", { type: "button", "data-partner": other.key }, [other.text, other.small].filter(Boolean).join(" \u00b7 "));
    button.addEventListener("click", () => select(other));
  }
  if (found.length > 12) make(parent, "p", {}, `and ${found.length - 12} more`);
}
const MOST_CURVES = 6; // sites
function showDetails(/** @type {Part} */ part, /** @type {string} */ node) {
  const place = need("details", HTMLDivElement);
  place.replaceChildren();
  const named = make(place, "dl"), first = data.nodes[node || part.nodes[0]];
  /** @type {Record<string, string | undefined>} */ const rows = { box: [part.text, part.small].filter(Boolean).join(" \u00b7 "), column: part.column, module: first && (data.modules[first.module] || "(model)"),
    node, calls: node && first ? first.target : "", shape: first && first.value, source: first && data.sources[first.source] };
  if (part.edits.length) rows.edit = part.edits.map((at) => `${data.edits[at].action} at ${data.edits[at].site}`).join("; ");
  rows.sites = part.sites.filter((site) => site.includes(":")).join(", ");
  for (const [name, value] of Object.entries(rows)) if (value) { make(named, "dt", {}, name); make(named, "dd", {}, value); }
  const measured = new Set([...part.sites, ...part.cells.flatMap(([, sites]) => sites)].filter((site) => data.records.values[site]));
  for (const site of [...measured].slice(0, MOST_CURVES)) for (const [record, values] of Object.entries(data.records.values[site])) {
    make(place, "h3", {}, `${record}@${site}`);
    chart(place, { title: `${record}@${site}`, lines: [{ name: record, steps: data.records.steps, values }] }, 310, 70);
  }
  if (measured.size > MOST_CURVES) make(place, "p", {}, `and ${measured.size - MOST_CURVES} more sites with records`);
  const shown = node ? [node] : part.shown;
  if (shown.length) make(place, "pre", {}, shown.slice(0, 30).map((name) => data.nodes[name].code || name).join("\n") + (shown.length > 30 ? `\nand ${shown.length - 30} more` : ""));
  list(place, "partners", partners(part));
  list(place, "inputs", linesOf[part.at].filter((at) => data.lines[at][1] === part.at).map((at) => parts[data.lines[at][0]]));
  list(place, "users", linesOf[part.at].filter((at) => data.lines[at][0] === part.at).map((at) => parts[data.lines[at][1]]));
  list(place, "edges that it replaced, to", replacedBy(part).map(([, to]) => to));
}

// ---- search: exact sites and edits first, then what begins with the words, then the rest; grouped by module
/** @type {Part[]} */ let hits = [];
/** @type {Set<Part>} */ let hitSet = new Set();
let hit = -1;
function wordsOf(/** @type {Part} */ part) {
  part.words ||= [part.title, part.text, ...part.sites, ...part.nodes, ...part.nodes.map((name) => `${data.nodes[name].target} ${data.sources[data.nodes[name].source]}`)].join("\n").toLowerCase();
  return part.words;
}
function rank(/** @type {Part} */ part, /** @type {string} */ wanted) {
  if (part.sites.some((site) => site.toLowerCase() === wanted)) return part.edits.length ? 0 : 1;
  if (part.nodes.includes(wanted)) return 1;
  if (part.edits.length) return part.sites.some((site) => site.toLowerCase().includes(wanted)) ? 2 : 4;
  return part.text.toLowerCase().startsWith(wanted) ? 3 : 5;
}
function search(/** @type {string} */ text) {
  const wanted = text.trim().toLowerCase();
  const ranked = (wanted ? parts.filter((part) => wordsOf(part).includes(wanted)) : []).map((part) => ({ part, rank: rank(part, wanted) }));
  hits = ranked.sort((a, b) => a.rank - b.rank || a.part.at - b.part.at).map(({ part }) => part);
  hitSet = new Set(hits);
  hit = -1;
  svg.classList.toggle("searching", Boolean(wanted));
  need("count", HTMLSpanElement).textContent = wanted ? `${hits.length} found` : "";
  const place = need("results", HTMLDivElement);
  place.replaceChildren();
  if (wanted) make(place, "h2", {}, "results by module");
  /** @type {Map<string, Element>} */ const groups = new Map();
  hits.slice(0, 200).forEach((part, at) => {
    const first = data.nodes[part.nodes[0]], module = (first && data.modules[first.module]) || "(model)";
    if (!groups.has(module)) {
      const group = make(place, "details");
      group.toggleAttribute("open", groups.size < 4);
      make(group, "summary", {}, module);
      groups.set(module, make(group, "ul"));
    }
    const button = make(make(/** @type {Element} */ (groups.get(module)), "li"), "button", { type: "button", "data-result": at }, [part.text, part.small].filter(Boolean).join(" \u00b7 "));
    button.addEventListener("click", () => { hit = at - 1; nextHit(1); });
  });
  redraw();
}
function nextHit(/** @type {number} */ by) {
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  need("count", HTMLSpanElement).textContent = `${hit + 1} of ${hits.length}`;
  select(hits[hit]);
}

// ---- colors by step
const chosen = need("metric", HTMLSelectElement);
function colorOf(/** @type {string[]} */ sites) {
  const metric = data.metrics[Number(chosen.value)], step = stepNow();
  if (!metric) return "";
  const at = step === null ? -1 : data.records.steps.indexOf(step);
  const found = sites.flatMap((site) => {
    const values = metric.values[site], value = values && (step === null ? values.total : values.steps[at]);
    return value === undefined || value === null ? [] : [number(value)];
  });
  if (!found.length) return "";
  if (found.some((value) => !Number.isFinite(value))) return "var(--not-finite)";
  return metric.strong < metric.weak ? color(metric, Math.min(...found)) : color(metric, Math.max(...found));
}
function color(/** @type {Metric} */ metric, /** @type {number} */ value) {
  if (value === 0 && metric.weak < metric.strong) return "var(--paper)";
  const place = (Math.log(value) - Math.log(metric.weak)) / (Math.log(metric.strong) - Math.log(metric.weak));
  return `var(--s${Math.round(Math.min(Math.max(place, 0), 1) * 8)})`;
}
/** @param {Part[]} inside @returns {string} */
const fillOf = (inside) => colorOf(inside.flatMap((part) => part.sites));
function recolor() {
  const metric = data.metrics[Number(chosen.value)], legend = need("legend", HTMLSpanElement), norms = data.norms;
  legend.replaceChildren();
  /** @type {[string, string][]} */ const entries = [...(metric ? metric.legend : [])];
  if (norms) entries.push(["var(--s8)", `bar: ${norms.record}, ${figure(norms.low)} to ${figure(norms.high)}, logarithmic; ticks: start, bound`], ["var(--no-data)", "no data"]);
  if (norms && !entries.some(([fill]) => fill === "var(--not-finite)")) entries.push(["var(--not-finite)", "NaN or infinite"]);
  for (const [fill, words] of entries) {
    /** @type {HTMLElement} */ (make(legend, "i")).style.background = fill;
    make(legend, "span", {}, words);
  }
  overviewBoxes.forEach((box, at) => {
    const { sites, cells, small, width, isIdle } = data.overview[at], fill = isIdle ? "" : colorOf(sites);
    box.querySelector("rect")?.setAttribute("style", fill ? `fill:${fill}` : "");
    for (const mark of box.querySelectorAll(".mark")) mark.remove();
    drawMarks(box, cells, width);
    const note = box.querySelector("text.note, text.small");
    note?.setAttribute("class", fill ? "small" : "note");
    if (note && cells.length) note.textContent = fitted([small, normText(cells)].filter(Boolean).join(" \u00b7 "), width, false);
  });
  redraw();
  if (selected) showDetails(selected, "");
}

// ---- controls
const overviewBoxes = [...need("overview", HTMLDivElement).querySelectorAll(".boxes > g")];
for (const box of overviewBoxes) {
  const go = () => {
    const name = box.querySelector("[data-node]")?.getAttribute("data-node");
    const site = box.getAttribute("data-edit") || box.querySelector("[data-edit]")?.getAttribute("data-edit");
    const at = site ? data.edits.findIndex((edit) => edit.site === site) : -1;
    select(partOf.get(`edit ${at}`) || partOf.get(name || ""));
  };
  box.setAttribute("tabindex", "0");
  box.setAttribute("role", "button");
  box.addEventListener("click", go);
  box.addEventListener("keydown", (event) => { if (["Enter", " "].includes(/** @type {KeyboardEvent} */ (event).key)) { event.preventDefault(); event.stopPropagation(); go(); view.focus(); } });
}
let atEdit = -1;
function nextEdit(/** @type {number} */ by) {
  if (!data.edits.length) return;
  jump((atEdit < 0 && by < 0 ? data.edits.length - 1 : atEdit + by + data.edits.length) % data.edits.length);
}
function jump(/** @type {number} */ at) { atEdit = at; select(partOf.get(`edit ${at}`)); say(`edit ${at + 1} of ${data.edits.length}`); }
function listEdits() {
  const place = need("edits", HTMLDivElement);
  /** @type {Map<string, number[]>} */ const byAction = new Map();
  data.edits.forEach(({ action, isFigure }, at) => { if (isFigure) return; const numbers = byAction.get(action); if (numbers) numbers.push(at); else byAction.set(action, [at]); });
  for (const [action, numbers] of byAction) {
    const group = make(place, "details");
    group.toggleAttribute("open", byAction.size === 1 || data.edits.length <= 40);
    make(group, "summary", {}, `${action} (${numbers.length})`);
    const names = make(group, "ol");
    for (const at of numbers) {
      const { site, nodes } = data.edits[at];
      const button = make(make(names, "li"), "button", { type: "button", title: nodes.join(" ") || "no nodes", "data-jump": at, "data-edit": site }, site);
      button.addEventListener("click", () => jump(at));
    }
  }
  if (!data.edits.length) make(place, "p", {}, "no edits");
}

onClick("fold", () => foldAll(true));
onClick("unfold", () => foldAll(false));
onClick("in", () => zoom(scale * 1.25));
onClick("out", () => zoom(scale / 1.25));
onClick("fit", () => { zoom(Math.min(view.clientWidth / G.width, 1.5)); view.scrollTop = 0; });
onClick("next", () => nextHit(1));
onClick("previous", () => nextHit(-1));
onClick("help", () => need("keys", HTMLDialogElement).showModal());
for (const id of ["saved", "fan"]) document.getElementById(id)?.addEventListener("change", layOut);
const field = need("search", HTMLInputElement);
field.addEventListener("input", () => search(field.value));
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") { nextHit(event.shiftKey ? -1 : 1); event.preventDefault(); }
  if (event.key === "Escape") { field.value = ""; search(""); view.focus(); }
});
data.metrics.forEach((metric, at) => make(chosen, "option", { value: at }, metric.name));
chosen.value = String(Math.max(0, data.metrics.findIndex((metric) => metric.name === data.color_by)));
chosen.addEventListener("change", recolor);
document.addEventListener("step", recolor);
need("metric-label", HTMLLabelElement).classList.toggle("gone", !data.metrics.length);
document.addEventListener("site", (event) => openSite(/** @type {CustomEvent} */ (event).detail));

/** @type {{x: number, y: number, left: number, top: number} | null} */ let drag = null;
let dragged = false;
view.addEventListener("scroll", drawSoon);
view.addEventListener("pointerdown", (event) => {
  dragged = false;
  if (event.button === 0 && event.pointerType === "mouse") drag = { x: event.clientX, y: event.clientY, left: view.scrollLeft, top: view.scrollTop };
});
window.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const x = event.clientX - drag.x, y = event.clientY - drag.y;
  if (!dragged && Math.hypot(x, y) < 4) return;
  dragged = true;
  view.classList.add("dragging");
  view.scrollLeft = drag.left - x;
  view.scrollTop = drag.top - y;
});
window.addEventListener("pointerup", () => { drag = null; view.classList.remove("dragging"); });
window.addEventListener("resize", () => { drawSoon(); fitOverview(); });
window.addEventListener("hashchange", () => openHash());
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const place = view.getBoundingClientRect();
  zoom(scale * Math.exp(-event.deltaY / 300), [event.clientX - place.left, event.clientY - place.top]);
}, { passive: false });

function stepBox(/** @type {number} */ by) {
  const lane = selected ? selected.column : "forward";
  const same = parts.filter((part) => part.column === lane);
  select(selected ? same[Math.min(same.length - 1, Math.max(0, same.indexOf(selected) + by))] : same[0]);
}
document.addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (target.matches("input:not([type=checkbox]):not([type=range]), select") || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const around = selected ? bands.filter((band) => selected && band.first <= selected.row && selected.row <= band.last) : [];
  const band = around.find((one) => one.folded) || around.at(-1);
  /** @type {Record<string, () => void>} */ const actions = {
    "1": () => showTab("overview"), "2": () => showTab("ladder"), ...(document.getElementById("report") ? { "3": () => showTab("report"), "4": () => showTab("curves") } : {}), "/": () => field.focus(),
    "+": () => zoom(scale * 1.25), "=": () => zoom(scale * 1.25), "-": () => zoom(scale / 1.25), "0": () => zoom(1),
    n: () => stepBox(1), p: () => stepBox(-1), o: () => { if (selected) select(partners(selected)[0]); },
    x: () => { if (selected) select(selected, { open: !selected.isOpen }); }, f: () => { if (band) fold(band, !band.folded); },
    F: () => foldAll(true), U: () => foldAll(false), e: () => nextEdit(1), E: () => nextEdit(-1), "?": () => need("keys", HTMLDialogElement).showModal(),
  };
  if (actions[event.key]) { actions[event.key](); event.preventDefault(); }
});

/** @returns {boolean} whether the address names a node or a site */
function openHash() {
  let name = location.hash.slice(1);
  try { name = decodeURIComponent(name); } catch { /* a name with a percent sign that was typed as it is */ }
  return openSite(name);
}
/** @returns {boolean} whether there is a box of a node or a site */
function openSite(/** @type {string} */ name) {
  const part = partOf.get(name) || parts.find((one) => one.edits.length > 0 && one.sites.includes(name)) || parts.find((one) => one.sites.includes(name) || one.cells.some(([, sites]) => sites.includes(name)));
  if (part) select(part, { node: part.nodes.includes(name) && part.nodes.length > 1 ? name : "" });
  return part !== undefined;
}

if (data.rows.length > data.most_rows) {
  for (const band of bands) band.folded = true;
  for (const apart of bands) if (apart.isApart) for (const band of bands) if (band.first <= apart.first && apart.last <= band.last) band.folded = false;
}
const opened = document.body.dataset.tab || "overview";
listEdits();
drawHeadings();
showTab("ladder");
layOut();
showTab(opened);
recolor();
const blamed = parts.filter((part) => part.classes.split(" ").includes("root_cause"));
if (blamed.length) {
  const place = need("blamed", HTMLDivElement);
  make(place, "h2", {}, "first non-finite value");
  list(place, "made by", blamed);
}
openHash();
document.documentElement.dataset.ready = "yes";
