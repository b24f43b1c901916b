"use strict";
// What all parts of the page are made of: elements, numbers, tables.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = Array.from({ length: 8 }, (_, at) => `var(--line-${at})`);
const SVG = "http://www.w3.org/2000/svg";
const by = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Settings of which several runs were made, with other seeds: their curves have one colour and a mean. */
const PLACES = DATA.verdict.places;
const GROUPS = PLACES.length > 1 && PLACES.some((place) => place.runs.length > 1) ? PLACES : [];
/** The colour of a run, or of its settings. More runs than colours: hues in the order of the ranking. */
function colour(run) {
  const most = GROUPS.length || DATA.runs.length;
  const rank = PLACES.findIndex((place) => place.runs.includes(run));
  if (most > COLOURS.length) return rank < 0 ? "var(--soft)" : `hsl(${(225 + (300 * rank) / most) % 360} 62% 52%)`;
  return COLOURS[(GROUPS.length && rank >= 0 ? rank : run) % COLOURS.length];
}

/** An element with attributes and children; texts are always texts, never markup. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A number as people write it: four digits, 15k for a large count, 5e-8 for what is small. */
function told(value, counts = false) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= (counts ? 1e15 : 1e7))) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (counts && size >= 1e4) {
    const at = Math.min(3, Math.floor(Math.log10(size) / 3));
    return Number((value / 1000 ** at).toPrecision(3)) + ["", "k", "M", "G"][at];
  }
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
}

/** A standard deviation, of which two digits are known at best. */
const spread = (std) => (std === null ? "" : ` ± ${told(Number(std.toPrecision(2)))}`);

/** Any value; a setting as it was given, not rounded. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  if (isNumber(value)) return value && Math.abs(value) < 1e-3 ? value.toExponential() : String(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const number = (value, counts) => el("td", { class: "number" }, told(value, counts));
const swatch = (run) => el("span", { class: "swatch", style: `background:${colour(run)}` });
const named = (run) => el("span", { class: "run" }, swatch(run), DATA.runs[run].name);

function table(head, rows) {
  const isCell = (cell) => cell instanceof Node && cell.tagName === "TD";
  const line = (cells) => el("tr", {}, ...cells.map((cell) => (isCell(cell) ? cell : el("td", {}, cell))));
  const headings = head.map((name, place) => el("th", { class: rows.length && isCell(rows[0][place]) ? rows[0][place].className : null }, name));
  return el("table", {}, el("thead", {}, el("tr", {}, ...headings)), el("tbody", {}, ...rows.map(line)));
}

const wide = (...tables) => el("div", { class: "wide" }, ...tables);

/** A table with a column for each run. On a screen it scrolls; on paper (`most` columns fit) it goes on below. */
const byRun = []; // functions that draw such a table again
function runTable(home, rowsOf, most = 4) {
  const draw = (onPaper) => {
    const runs = DATA.runs.map((run, index) => index);
    const size = onPaper ? Math.ceil(runs.length / Math.ceil(runs.length / most)) : runs.length; // all about as wide
    const blocks = [];
    for (let from = 0; from < runs.length; from += size) blocks.push(runs.slice(from, from + size));
    home.replaceChildren(...blocks.map((block) => wide(table(["", ...block.map(named)], rowsOf(block)))));
  };
  byRun.push(draw);
  draw(false);
}

/** A curve the size of a word, with a dot at its end. */
function sparkline(series, tint, label) {
  const [width, height, rim] = [96, 22, 3];
  const every = Math.ceil(series[0].length / 200); // more than pixels
  const points = series[0].map((step, at) => [step, series[1][at]]).filter(([, value], at, all) => value !== null && (at % every === 0 || at === all.length - 1));
  if (points.length < 2) return svg("svg", { class: "sparkline", width, height });
  const bounds = (at) => [Math.min(...points.map((point) => point[at])), Math.max(...points.map((point) => point[at]))];
  const [[left, right], [low, high]] = [bounds(0), bounds(1)];
  const x = (step) => rim + ((width - 2 * rim) * (step - left)) / (right - left || 1);
  const y = (value) => (high === low ? height / 2 : height - rim - ((height - 2 * rim) * (value - low)) / (high - low));
  const path = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const [step, value] = points.at(-1);
  return svg("svg", { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("polyline", { points: path, fill: "none", stroke: tint, "stroke-width": 1.4, "stroke-linejoin": "round" }),
    svg("circle", { cx: x(step).toFixed(1), cy: y(value).toFixed(1), r: 2.2, fill: tint }));
}
