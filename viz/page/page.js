"use strict";
// Everything is in the file: the scene as SVG, and its data as JSON. Text is only ever set as text.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const svg = $("graph"), view = $("view");
const G = data.geometry;

const make = (parent, name, attributes = {}, text = null) => {
  const element = parent.namespaceURI === NS || name === "svg"
    ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
};

// ---- the parts of the scene
const boxes = data.boxes.map((box) => ({ ...box }));
const byName = new Map();
[...svg.querySelectorAll(".boxes .node")].forEach((element, at) => {
  const box = boxes[at];
  box.element = element;
  box.rect = element.querySelector("rect");
  box.fill = box.rect.getAttribute("style") || "";
  if (!byName.has(box.key)) byName.set(box.key, box);
});
const paths = [...svg.querySelectorAll(".lines path")];
const lines = data.lines.map(([from, to, kind], at) => ({ from: boxes[from], to: boxes[to], kind, element: paths[at] }));
const bands = data.bands.map((band) => ({ ...band, folded: false })); // key, name, first, last, depth
const frames = svg.querySelector(".frames");
frames.replaceChildren();
const front = make(svg, "g", { class: "summaries" });
const rowBand = data.rows.map(() => []); // the bands around a row, outer ones first
bands.forEach((band, at) => { for (let r = band.first; r <= band.last; r++) rowBand[r].push(at); });
const boxesOf = data.rows.map(() => []);
boxes.forEach((box) => { if (data.nodes[box.key] && !box.pill) boxesOf[box.row].push(box); });
bands.forEach((band) => {
  band.inside = [];
  for (let row = band.first; row <= band.last; row++) band.inside.push(...boxesOf[row]);
  band.element = make(frames, "g", { class: "band", "data-band": band.key });
  band.rect = make(band.element, "rect", { rx: 3 });
  band.head = make(band.element, "g", { role: "button", tabindex: "0" });
  band.label = make(band.head, "text", {});
  make(band.head, "title", {}, `${band.key}: click to fold or unfold`);
  band.summary = ["forward", "backward"].map((lane) => {
    const nodes = band.inside.filter((box) => box.lane === lane);
    const inserted = nodes.filter((box) => box.inserted).length;
    const group = make(front, "g", { class: "summary gone" + (inserted ? " inserted" : "") });
    const rect = make(group, "rect", { width: G.box, height: G.high, rx: 3 });
    make(group, "text", { x: 5, y: G.high / 2 + 3.5 }, `${nodes.length} ops` + (inserted ? `, ${inserted} inserted` : ""));
    group.addEventListener("click", () => { if (!dragged) fold(band, false); });
    return { group, rect, lane, count: nodes.length, x: lane === "forward" ? G.forward : G.backward };
  });
  band.head.addEventListener("click", () => { if (!dragged) fold(band, !band.folded); });
  band.head.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    fold(band, !band.folded);
  });
});

// ---- layout: rows from above; a folded band is one row
const shown = { forward: true, backward: true, saved: true, carried: false };
let total = 0, scale = 1;
const foldedAround = (row) => rowBand[row].map((at) => bands[at]).find((band) => band.folded);

function layOut() {
  let y = G.top;
  const tops = new Array(data.rows.length).fill(null);
  for (let row = 0; row < data.rows.length; row++) {
    const folded = foldedAround(row);
    for (const at of rowBand[row]) {
      const band = bands[at];
      if (band.first === row) { band.y = y; band.isDrawn = !folded || band === folded || bands.indexOf(folded) > at; }
      if (band.first === row && band.isDrawn) y += G.header;
      if (band === folded) break;
    }
    if (!folded) { tops[row] = y + 2; y += data.rows[row] * G.pitch; }
    else if (folded.first === row) { folded.rowY = y + 2; y += G.pitch; }
    if (folded && folded.last !== row) continue;
    const ending = rowBand[row].map((at) => bands[at]).filter((band) => band.last === row && band.isDrawn).reverse();
    for (const band of ending) {
      if (folded && bands.indexOf(band) > bands.indexOf(folded)) continue;
      y += G.foot; band.height = y - band.y - 2;
    }
  }
  total = y + 20;
  for (const box of boxes) {
    const folded = foldedAround(box.row);
    box.visible = !folded && shown[box.lane];
    box.element.classList.toggle("gone", !box.visible);
    if (!folded) {
      box.y = tops[box.row] + box.line * G.pitch;
      box.element.setAttribute("transform", `translate(${box.x} ${box.y})`);
    }
  }
  bands.forEach(placeBand);
  placeLines();
  svg.setAttribute("viewBox", `0 0 ${G.width} ${total}`);
  zoom(scale);
}

function placeBand(band) {
  const outer = rowBand[band.first].map((at) => bands[at]).find((other) => other.folded);
  const hidden = outer && outer !== band && bands.indexOf(outer) < bands.indexOf(band);
  band.element.classList.toggle("gone", Boolean(hidden));
  if (hidden) { band.summary.forEach((part) => part.group.classList.add("gone")); return; }
  const x = 8 + 5 * Math.min(band.depth, 6);
  for (const [key, value] of Object.entries({ x, y: band.y, width: G.width - 2 * x, height: Math.max(band.height, 10) }))
    band.rect.setAttribute(key, value);
  band.label.setAttribute("x", x + 6);
  band.label.setAttribute("y", band.y + 11);
  band.label.textContent = `${band.folded ? "\u25b8" : "\u25be"} ${band.name}`;
  band.element.classList.toggle("folded", band.folded);
  for (const part of band.summary) {
    part.group.classList.toggle("gone", !band.folded || !part.count || !shown[part.lane]);
    part.group.setAttribute("transform", `translate(${part.x} ${band.rowY || 0})`);
  }
}

// What stands for a box: itself, or the summary of the outermost folded band around it.
function standIn(box) {
  const folded = foldedAround(box.row);
  if (!folded) return { x: box.x, y: box.y, width: box.width, height: box.height, lane: box.lane, row: box.row, key: box.key, pill: box.pill };
  const part = folded.summary[box.lane === "forward" ? 0 : 1];
  return { x: part.x, y: folded.rowY, width: G.box, height: G.high, lane: box.lane, row: folded.first, key: `${folded.key} ${box.lane}`, pill: false };
}

function placeLines() {
  const seen = new Set();
  for (const line of lines) {
    const a = standIn(line.from), b = standIn(line.to), key = `${a.key}\n${b.key}`;
    const off = a.key === b.key || !shown[a.lane] || !shown[b.lane] || seen.has(key)
      || (line.kind === "saved" && !shown.saved) || ((line.kind === "carried" || line.kind === "fan") && !shown.carried);
    line.element.classList.toggle("gone", off);
    if (off) continue;
    seen.add(key);
    line.element.setAttribute("d", route(a, b));
  }
}

function route(a, b) {
  const right = b.x > a.x, down = b.y > a.y;
  if (a.y === b.y || a.pill || b.pill || a.lane !== b.lane) {
    const from = [a.x + (right ? a.width : 0), a.y + a.height / 2], to = [b.x + (right ? 0 : b.width), b.y + b.height / 2];
    if (from[1] === to[1]) return `M${from}L${to}`;
    const reach = right ? 20 : -20;
    return `M${from}C${from[0] + reach} ${from[1]} ${to[0] - reach} ${to[1]} ${to}`;
  }
  const from = [a.x + a.width / 2, a.y + (down ? a.height : 0)], to = [b.x + b.width / 2, b.y + (down ? 0 : b.height)];
  if (Math.abs(from[1] - to[1]) < G.far * G.pitch) return `M${from}L${to}`;
  const bulge = Math.min(90, 24 + Math.abs(from[1] - to[1]) * 0.04) * (a.lane === "forward" ? -1 : 1);
  const side = a.lane === "forward" ? Math.min(from[0], to[0]) : Math.max(from[0], to[0]);
  return `M${from}C${side + bulge} ${from[1]} ${side + bulge} ${to[1]} ${to}`;
}

function fold(band, folded) { band.folded = folded; layOut(); say(`${band.name} ${folded ? "folded" : "unfolded"}`); }
function foldAll(folded) { bands.forEach((band) => { band.folded = folded; }); layOut(); }
function reveal(box) {
  const around = rowBand[box.row].map((at) => bands[at]).filter((band) => band.folded);
  if (!around.length && shown[box.lane]) return;
  for (const band of around) band.folded = false;
  shown[box.lane] = true;
  $("lane-" + box.lane).checked = true;
  layOut();
}

function zoom(to, focus = null) {
  const [x, y] = focus || [view.clientWidth / 2, view.clientHeight / 2];
  const at = [(view.scrollLeft + x) / scale, (view.scrollTop + y) / scale];
  scale = Math.min(4, Math.max(0.05, to));
  svg.setAttribute("width", G.width * scale);
  svg.setAttribute("height", total * scale);
  view.scrollLeft = at[0] * scale - x;
  view.scrollTop = at[1] * scale - y;
}

// ---- choosing a node
let selected = null;
function select(box, { scroll = true } = {}) {
  if (!box) return;
  reveal(box);
  svg.querySelectorAll(".selected, .partner").forEach((e) => e.classList.remove("selected", "partner"));
  selected = box;
  box.element.classList.add("selected");
  partners(box).forEach((other) => other.element.classList.add("partner"));
  if (scroll) {
    view.scrollLeft = (box.x + box.width / 2) * scale - view.clientWidth / 2;
    view.scrollTop = (box.y + box.height / 2) * scale - view.clientHeight / 2;
  }
  showDetails(box);
}
const partners = (box) => boxes.filter((other) => other.row === box.row && other.lane !== box.lane && !other.pill && data.nodes[other.key]);

function showDetails(box) {
  const place = $("details");
  place.replaceChildren();
  const node = data.nodes[box.key];
  if (!node) {
    const empty = box.key.startsWith("edit ") ? data.edits[Number(box.key.slice(5))] : null;
    make(place, "p", {}, empty ? `${empty.action} at ${empty.site}: no nodes of its own` : box.key);
    showRecords(place, box.sites);
    return;
  }
  const list = make(place, "dl");
  const rows = { node: box.key, calls: node.target, op: node.op, module: node.module || "(model)", lane: box.lane,
    shape: `[${node.shape}] ${node.dtype}`, source: node.source };
  if (node.edit >= 0) rows.inserted = `${data.edits[node.edit].action} at ${data.edits[node.edit].site}`;
  else if (box.inserted) rows.inserted = "carries records";
  if (box.sites.length) rows.sites = box.sites.join(", ");
  for (const [name, value] of Object.entries(rows)) if (value) { make(list, "dt", {}, name); make(list, "dd", {}, value); }
  make(place, "h2", {}, "code");
  make(place, "pre", {}, node.code || "(an input)");
  const others = partners(box);
  make(place, "h2", {}, others.length ? "partner in the other lane" : "no partner in the other lane");
  const names = make(place, "ul");
  for (const other of others.slice(0, 12)) {
    const button = make(make(names, "li"), "button", { "data-partner": other.key }, `${other.key}: ${data.nodes[other.key].target}`);
    button.addEventListener("click", () => select(other));
  }
  showRecords(place, box.sites);
}

function showRecords(place, sites) {
  for (const site of sites) {
    for (const [record, values] of Object.entries(data.records.values[site] || {})) {
      make(place, "h2", {}, `${record}@${site}`);
      curve(place, values);
    }
  }
}

const number = (value) => (typeof value === "string" ? Number(value) : value);
function curve(place, values) {
  const wide = 330, high = 70, known = values.map((v) => (v === null ? null : number(v)));
  const finite = known.filter((v) => v !== null && Number.isFinite(v));
  const low = Math.min(...finite, 0), top = Math.max(...finite, low);
  const chart = make(place, "svg", { class: "curve", viewBox: `0 0 ${wide} ${high}`, role: "img" });
  const x = (n) => 6 + (wide - 12) * (known.length > 1 ? n / (known.length - 1) : 0.5);
  const y = (v) => high - 14 - (high - 26) * ((v - low) / (top - low || 1));
  const points = known.map((v, n) => (v !== null && Number.isFinite(v) ? `${x(n)},${y(v)}` : null)).filter(Boolean);
  make(chart, "title", {}, `${finite.length} finite values of ${known.filter((v) => v !== null).length}`);
  make(chart, "polyline", { points: points.join(" ") });
  known.forEach((v, n) => { if (v !== null && !Number.isFinite(v)) make(chart, "line", { class: "bad", x1: x(n), x2: x(n), y1: 2, y2: high - 12 }); });
  const at = data.records.steps.indexOf(stepNow());
  if (at >= 0) make(chart, "line", { class: "now", x1: x(at), x2: x(at), y1: 2, y2: high - 12 });
  make(chart, "text", { x: 6, y: 9, class: "small" }, finite.length ? `${top.toPrecision(4)}` : "nothing finite");
  make(chart, "text", { x: 6, y: high - 2, class: "small" }, `steps ${data.records.steps[0]} to ${data.records.steps.at(-1)}`);
}

// ---- search
let hits = [], hit = -1;
function search(text) {
  const wanted = text.trim().toLowerCase();
  hits = wanted ? boxes.filter((box) => box.text.includes(wanted)) : [];
  hit = -1;
  const found = new Set(hits);
  svg.classList.toggle("searching", Boolean(wanted));
  boxes.forEach((box) => box.element.classList.toggle("hit", found.has(box)));
  for (const band of bands) for (const part of band.summary)
    part.group.classList.toggle("hit", band.inside.some((box) => box.lane === part.lane && found.has(box)));
  $("count").textContent = wanted ? `${hits.length} found` : "";
}
function nextHit(by) {
  if (!hits.length) return;
  hit = (hit + by + hits.length) % hits.length;
  $("count").textContent = `${hit + 1} of ${hits.length}`;
  select(hits[hit]);
}

// ---- colors by step
const stepNow = () => ($("step") && Number($("step").value) < data.records.steps.length ? data.records.steps[Number($("step").value)] : null);
function recolor() {
  if (!data.metrics.length) return;
  const metric = data.metrics[Number($("metric").value)], step = stepNow();
  $("stepname").textContent = step === null ? "all steps" : `step ${step}`;
  const at = data.records.steps.indexOf(step);
  for (const box of boxes) {
    let value = null;
    for (const site of box.sites) {
      const values = metric.values[site];
      if (values) value = step === null ? number(values.total) : (values.steps[at] === null ? null : number(values.steps[at]));
    }
    box.value = value === undefined ? null : value;
    box.rect.setAttribute("style", box.value === null ? "" : `fill:${color(metric, value)}`);
  }
  for (const band of bands) for (const part of band.summary) { // the strongest of what is folded
    const values = band.inside.filter((box) => box.lane === part.lane && box.value !== null).map((box) => box.value);
    const bad = values.find((value) => !Number.isFinite(value));
    const worst = bad === undefined ? Math.max(...values) : bad;
    part.rect.setAttribute("style", values.length ? `fill:${color(metric, worst)}` : "");
  }
  const legend = $("legend");
  legend.replaceChildren();
  for (const [fill, words] of metric.legend) {
    make(legend, "i").style.background = fill;
    make(legend, "span", {}, words);
  }
  if (selected) showDetails(selected);
}
function color(metric, value) {
  if (!Number.isFinite(value)) return data.palette.bad;
  if (metric.name === "not finite" && value <= 0) return data.palette.none;
  let place = 0;
  if (metric.name === "clip rate") place = value;
  else if (value > 0 && metric.low > 0) place = metric.high > metric.low ? Math.log(value / metric.low) / Math.log(metric.high / metric.low) : 1;
  const stops = data.palette.stops;
  return stops[Math.round(Math.min(1, Math.max(0, place)) * (stops.length - 1))];
}

function say(text) { $("status").textContent = text; }

// ---- controls
const actions = new Map(); // edits by action, each list to be opened
data.edits.forEach((edit) => actions.set(edit.action, (actions.get(edit.action) || 0) + 1));
for (const [action, count] of actions) {
  const group = make(make($("edits"), "li"), "details", { "data-action": action });
  if (data.edits.length <= data.most_listed || actions.size === 1) group.open = true;
  make(group, "summary", {}, `${action} (${count})`);
  actions.set(action, make(group, "ol"));
}
data.edits.forEach((edit, at) => {
  const list = actions.get(edit.action);
  const button = make(make(list, "li"), "button", { "data-jump": String(at), title: edit.action }, edit.site);
  button.addEventListener("click", () => { atEdit = at; select(byName.get(edit.nodes[0] || `edit ${at}`)); say(`edit ${at + 1} of ${data.edits.length}`); });
});
boxes.forEach((box) => box.element.addEventListener("click", () => { if (!dragged) select(box, { scroll: false }); }));
$("search").addEventListener("input", (event) => search(event.target.value));
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { nextHit(event.shiftKey ? -1 : 1); event.preventDefault(); }
  if (event.key === "Escape") { event.target.value = ""; search(""); view.focus(); }
});
$("fold").addEventListener("click", () => foldAll(true));
$("unfold").addEventListener("click", () => foldAll(false));
$("in").addEventListener("click", () => zoom(scale * 1.25));
$("out").addEventListener("click", () => zoom(scale / 1.25));
$("fit").addEventListener("click", () => { zoom(Math.min(view.clientWidth / G.width, 1.5)); view.scrollTop = 0; });
$("enlarge")?.addEventListener("click", () => {
  const large = $("large");
  if (!large.querySelector("img")) large.prepend($("curves").querySelector("img").cloneNode());
  large.showModal();
});
$("next").addEventListener("click", () => nextHit(1));
$("previous").addEventListener("click", () => nextHit(-1));
$("help").addEventListener("click", () => $("keys").showModal());
for (const name of ["forward", "backward", "saved", "carried"]) {
  const box = $(name === "forward" || name === "backward" ? "lane-" + name : name);
  box.checked = shown[name];
  box.addEventListener("change", () => { shown[name] = box.checked; layOut(); });
}
if (data.metrics.length) {
  data.metrics.forEach((metric, at) => make($("metric"), "option", { value: String(at) }, metric.name));
  $("metric").value = String(Math.max(0, data.metrics.findIndex((metric) => metric.name === data.color_by)));
  $("step").max = String(data.records.steps.length);
  $("step").value = $("step").max;
  $("metric").addEventListener("change", recolor);
  $("step").addEventListener("input", recolor);
} else $("colors").classList.add("gone");

let drag = null, dragged = false;
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
view.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const place = view.getBoundingClientRect();
  zoom(scale * Math.exp(-event.deltaY / 300), [event.clientX - place.left, event.clientY - place.top]);
}, { passive: false });

function step(lane, by) {
  if (!selected) { select(boxes.find((box) => data.nodes[box.key] && !box.pill)); return; }
  const same = boxes.filter((box) => box.lane === lane && !box.pill).sort((a, b) => a.row - b.row || a.line - b.line || a.x - b.x);
  const at = same.indexOf(selected);
  select(same[Math.min(same.length - 1, Math.max(0, at + by))]);
}
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input:not([type=checkbox]):not([type=range]), select") || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const band = selected && rowBand[selected.row].length ? bands[rowBand[selected.row].at(-1)] : null;
  const actions = {
    "/": () => $("search").focus(), "+": () => zoom(scale * 1.25), "=": () => zoom(scale * 1.25), "-": () => zoom(scale / 1.25),
    "0": () => $("fit").click(), n: () => step(selected ? selected.lane : "forward", 1), p: () => step(selected ? selected.lane : "forward", -1),
    o: () => selected && select(partners(selected)[0]), f: () => { const folded = selected && foldedAround(selected.row); if (folded || band) fold(folded || band, !folded); },
    F: () => foldAll(true), U: () => foldAll(false), e: () => nextEdit(1), E: () => nextEdit(-1), "?": () => $("keys").showModal(),
  };
  if (actions[event.key]) { actions[event.key](); event.preventDefault(); }
});
let atEdit = -1;
function nextEdit(by) {
  if (!data.edits.length) return;
  atEdit = (atEdit < 0 && by < 0 ? data.edits.length - 1 : atEdit + by + data.edits.length) % data.edits.length;
  $("edits").querySelector(`[data-jump="${atEdit}"]`).click();
}

const whole = data.boxes.length > data.most_unfolded || data.view === "overview";
if (whole) bands.forEach((band) => { band.folded = true; });
layOut();
$("fit").click();
recolor();
if (data.view === "site" && data.site) select(boxes.find((box) => box.sites.includes(data.site)));
document.documentElement.dataset.ready = "yes";
