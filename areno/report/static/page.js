"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3557d6", "#e07b00", "#0b8a5a", "#b3329b", "#c0392b", "#6f7c8f", "#8a6d00", "#00838f"];
const colour = (run) => COLOURS[run % COLOURS.length];
const by = (id) => document.getElementById(id);
const PAGE = 200; // rows of the table of samples that are shown at once

/** An element with attributes and children; texts are always texts, never markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && !Number.isInteger(value)) return Number(value.toPrecision(4)).toString();
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function table(head, rows) {
  const isCell = (cell) => cell instanceof Node && cell.tagName === "TD";
  const line = (cells) => el("tr", {}, ...cells.map((cell) => (isCell(cell) ? cell : el("td", {}, cell))));
  const headings = head.map((name, place) => el("th", { class: rows.length && isCell(rows[0][place]) ? "number" : null }, name));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, ...headings)), el("tbody", {}, ...rows.map(line))));
}

const number = (value) => el("td", { class: "number" }, shown(value));
const named = (run) => el("span", { class: "run" }, el("span", { class: "swatch", style: `background:${colour(run)}` }), DATA.runs[run].name);

// -- summary ---------------------------------------------------------------------------------------------------------

function summary() {
  const rows = DATA.headlines.map(([title, run, first, best, last]) => [title, named(run), number(first), number(best), number(last)]);
  const states = DATA.runs.map((run, index) => [
    named(index), el("span", { class: run.status || "" }, shown(run.status)), number(run.steps), el("code", {}, run.path),
    el("code", {}, run.overrides.join(" ")),
  ]);
  by("summary").append(
    el("h2", {}, DATA.runs.length > 1 ? "Runs" : "Run"), table(["run", "state", "steps", "folder", "given on the command line"], states),
    el("h2", {}, "First, best and last"), table(["", "run", "first", "best", "last"], rows),
  );
}

// -- curves ----------------------------------------------------------------------------------------------------------

/** Exponential moving average without a bias towards its first value. */
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

const DASHES = { solid: "solid", dot: "dotted", dash: "dashed", dashdot: "dash-dotted" };
const hidden = new Set(); // runs that the reader has switched off

/** What tells a number from the others of its chart: the namespace, or the rest of the name where that is the same. */
function partOf(chart, name) {
  const spaces = chart.names.map((one) => one.split("/")[0]);
  return chart.stacked || new Set(spaces).size < spaces.length ? name.split("/").slice(1).join("/") : name.split("/")[0];
}

/** The title of a chart and, if several runs have several numbers in it, which kind of line is which. */
function titled(chart) {
  const kinds = Object.values(DASHES);
  const parts = chart.names.map((name, place) => `${kinds[place % 4]}: ${partOf(chart, name)}`);
  return DATA.runs.length > 1 && parts.length > 1 ? `${chart.title} <span style="font-size:11px">(${parts.join(", ")})</span>` : chart.title;
}

function traces(chart, weight) {
  const found = [];
  DATA.runs.forEach((run, index) => {
    if (hidden.has(index)) return;
    const dashes = Object.keys(DASHES);
    chart.names.forEach((name, place) => {
      const series = run.series[name];
      if (!series) return;
      const part = chart.names.length > 1 ? partOf(chart, name) : "";
      const label = [DATA.runs.length > 1 ? run.name : "", part].filter(Boolean).join(" ");
      const line = { color: chart.stacked || DATA.runs.length === 1 ? colour(chart.stacked || chart.names.length > 1 ? place : 0) : colour(index),
                     dash: DATA.runs.length > 1 ? dashes[place % 4] : "solid", width: 1.7 };
      const common = { x: series[0], type: "scatter", mode: series[0].length > 25 ? "lines" : "lines+markers", connectgaps: true, name: label || name };
      if (weight && !chart.stacked) found.push({ ...common, y: series[1], line, opacity: 0.2, hoverinfo: "skip", showlegend: false });
      const stack = chart.stacked && DATA.runs.length === 1 ? { stackgroup: "one" } : {};
      found.push({ ...common, y: weight ? smoothed(series[1], weight) : series[1], line, ...stack });
    });
  });
  return found;
}

function draw(node) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
  const chart = node.chart;
  const layout = {
    title: { text: titled(chart), font: { size: 13 }, x: 0.03, y: 0.96 }, margin: { l: 52, r: 14, t: 34, b: 34 },
    hovermode: "x unified", showlegend: DATA.runs.length === 1 && chart.names.length > 1, legend: { orientation: "h", y: -0.13, font: { size: 11 } },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
    xaxis: { gridcolor: line, zeroline: false }, yaxis: { gridcolor: line, zeroline: false }, uirevision: 1,
  };
  Plotly.react(node, traces(chart, Number(by("smooth").value)), layout,
    { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  node.drawn = true;
}

function curves() {
  // A chart is drawn when it comes near the screen: a page of sixty of them opens at once.
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.near = entry.isIntersecting;
      if (entry.isIntersecting && !entry.target.drawn) draw(entry.target);
    }
  }, { rootMargin: "300px" });
  const home = by("curves");
  home.append(el("h2", {}, "Curves"));
  const all = [];
  const redraw = () => {
    for (const node of all) {
      if (node.drawn && node.near) draw(node);
      else node.drawn = false;
    }
  };
  if (DATA.runs.length > 1) home.append(legend(redraw));
  for (const [heading, charts] of Object.entries(DATA.charts)) {
    const grid = el("div", { class: "charts" });
    for (const chart of charts) {
      const node = el("div", { class: "chart" });
      node.chart = chart;
      all.push(node);
      grid.append(node);
      watch.observe(node);
    }
    if (heading === "More") home.append(el("details", {}, el("summary", {}, el("b", {}, `All other numbers (${charts.length})`)), grid));
    else home.append(el("h3", {}, heading), grid);
  }
  by("smooth").addEventListener("input", redraw);
}

/** One for all charts, since a run has the same colour in each: a click on a run hides or shows its lines. */
function legend(redraw) {
  const entry = (index) => {
    const button = el("button", { "aria-pressed": "true", title: "hide or show", onclick: () => {
      if (!hidden.delete(index)) hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      redraw();
    } }, named(index));
    return button;
  };
  return el("div", { class: "controls legend" }, ...DATA.runs.map((run, index) => entry(index)));
}

// -- samples ---------------------------------------------------------------------------------------------------------

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const COLUMNS = [
  ["step", 0], ["sample", 1], ["reward", 3], ["prompt", 8], ["completion", 9], ["advantage", 4], ["tokens", 5], ["ended by", 6],
];
const VALUES = { // what a token can be coloured by: the values of a sample, and the value that has the strongest colour
  "log-probability": [(sample) => sample.logprobs, -5],
  "advantage": [(sample) => sample.token_advantages || (sample.tokens || []).map(() => sample.advantage), 2],
  "rollout − training": [(sample) => sample.train_logprobs && sample.logprobs.map((value, at) => value - sample.train_logprobs[at]), 0.2],
};
const browser = { run: 0, lines: [], sort: 0, ascending: true, chosen: null, cache: new Map(), most: PAGE };

function samples() {
  const home = by("samples");
  const withSamples = DATA.runs.map((run, index) => index).filter((index) => DATA.runs[index].samples.index);
  home.append(el("h2", {}, "Samples"));
  if (!withSamples.length) {
    home.append(el("p", { class: "told" }, "No samples were kept."));
    return;
  }
  const run = el("select", { id: "run", onchange: () => load(Number(run.value)) },
    ...withSamples.map((index) => el("option", { value: index }, DATA.runs[index].name)));
  const again = () => { browser.most = PAGE; list(); };
  const search = async () => { // in the whole texts, which have to be unpacked first
    if (by("find").value) await Promise.all(Object.keys(DATA.runs[browser.run].samples.steps).map(samplesOf));
    again();
  };
  home.append(
    el("div", { class: "controls" }, run,
      el("label", {}, "step ", el("select", { id: "step", onchange: again })),
      el("label", {}, "reward from ", el("input", { id: "low", type: "number", step: "any", oninput: again })),
      el("label", {}, "to ", el("input", { id: "high", type: "number", step: "any", oninput: again })),
      el("input", { id: "find", type: "search", placeholder: "text in prompt or completion", size: 30, oninput: search }),
      el("label", {}, "colour by ", el("select", { id: "colouring", onchange: open }, ...Object.keys(VALUES).map((name) => el("option", {}, name)))),
      el("span", { id: "count", class: "told" })),
    el("p", { id: "left-out", class: "told" }),
    el("div", { class: "browser" }, el("div", { class: "wide", id: "list" }), el("div", { class: "group", id: "group" })),
  );
  load(withSamples[0]);
}

async function load(run) {
  const packed = DATA.runs[run].samples;
  Object.assign(browser, { run, lines: await unpacked(packed.index), chosen: null, most: PAGE });
  const steps = Object.keys(packed.steps).map(Number).sort((one, other) => one - other);
  by("step").replaceChildren(el("option", { value: "" }, "all"), ...steps.map((step) => el("option", { value: step }, step)));
  by("step").value = steps.at(-1);
  by("left-out").textContent = packed.left_out;
  list();
  const first = filtered()[0];
  if (first) choose(first);
}

/** All samples of a step in full. */
async function samplesOf(step) {
  const key = `${browser.run}/${step}`;
  if (!browser.cache.has(key)) browser.cache.set(key, await unpacked(DATA.runs[browser.run].samples.steps[step]));
  return browser.cache.get(key);
}

function says(line, find) {
  const step = browser.cache.get(`${browser.run}/${line[0]}`);
  return step !== undefined && `${step[line[1]].prompt}\n${step[line[1]].completion}`.toLowerCase().includes(find);
}

function filtered() {
  const text = (id) => by(id).value;
  const low = text("low") === "" ? -Infinity : Number(text("low")), high = text("high") === "" ? Infinity : Number(text("high"));
  const step = text("step"), find = text("find").toLowerCase();
  const kept = browser.lines.filter((line) =>
    (step === "" || line[0] === Number(step)) && ((low === -Infinity && high === Infinity) || (line[3] !== null && line[3] >= low && line[3] <= high)) &&
    (!find || says(line, find)));
  const sign = browser.ascending ? 1 : -1, at = browser.sort;
  const order = (one, other) => {
    if (one[at] === other[at]) return one[0] - other[0] || one[1] - other[1];
    if (one[at] === null) return 1;
    if (other[at] === null) return -1;
    return (one[at] < other[at] ? -1 : 1) * sign;
  };
  return kept.sort(order);
}

function list() {
  const lines = filtered();
  const sortBy = (place) => () => {
    browser.ascending = browser.sort === place ? !browser.ascending : true;
    browser.sort = place;
    list();
  };
  const head = COLUMNS.map(([name, place]) =>
    el("th", { "data-key": name, class: place > 7 ? null : "number", onclick: sortBy(place) }, name + (browser.sort === place ? (browser.ascending ? " ▲" : " ▼") : "")));
  const rows = lines.slice(0, browser.most).map((line) => {
    const chosen = browser.chosen && browser.chosen[0] === line[0] && browser.chosen[1] === line[1];
    return el("tr", { class: chosen ? "sample chosen" : "sample", onclick: () => choose(line) },
      ...COLUMNS.map(([, place]) => el("td", { class: place > 7 ? "text" : "number" }, shown(line[place]))));
  });
  const more = lines.length > browser.most ? el("button", { onclick: () => { browser.most += 5 * PAGE; list(); } }, "show more") : null;
  by("list").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)), ...(more ? [more] : []));
  by("count").textContent = `${lines.length} of ${browser.lines.length} samples`;
}

function choose(line) {
  browser.chosen = line;
  list();
  open();
}

async function open() {
  if (!browser.chosen) return;
  const [step, place, group] = browser.chosen;
  const all = await samplesOf(step);
  const peers = all.map((sample, at) => [at, sample]).filter(([at, sample]) => at === place || (group !== null && (sample.group ?? sample.row) === group));
  peers.sort(([one], [other]) => (other === place) - (one === place) || one - other);
  const prompt = el("div", { class: "card" }, el("div", { class: "facts" }, `step ${step}, prompt of ${shown(all[place].prompt_tokens)} tokens`,
    all[place].solutions === undefined ? "" : `, solutions: ${shown(all[place].solutions)}`), el("div", { class: "text-block" }, all[place].prompt || ""));
  by("group").replaceChildren(prompt, ...peers.map(([at, sample]) => card(at, sample, at === place)));
}

function card(at, sample, chosen) {
  const facts = [`sample ${at}`, `reward ${shown(sample.reward)}`];
  for (const [name, value] of Object.entries(sample.parts || {})) facts.push(`${name} ${shown(value)}`);
  if (sample.advantage !== undefined) facts.push(`advantage ${shown(sample.advantage)}`);
  facts.push(`${shown(sample.response_tokens)} tokens`, `ended by ${shown(sample.finish_reason)}`);
  if (sample.status && sample.status !== "ok") facts.push(`${sample.status}: ${sample.message || ""}`);
  if (sample.trajectory) facts.push(`${sample.trajectory.turns.length} turns`, ...sample.trajectory.rows.map(trained));
  const body = sample.trajectory ? conversation(sample.trajectory.turns) : [coloured(sample)];
  return el("div", { class: chosen ? "card chosen" : "card" }, el("div", { class: "facts" }, facts.join(" · ")), ...body);
}

/** How much of a row of an agent is trained; runs of [0 or 1, number of tokens]. */
function trained(row, at) {
  const count = (runs) => runs.reduce((sum, [value, tokens]) => sum + value * tokens, 0);
  return `row ${at}: ${count(row.trained)} of ${row.tokens.length} tokens trained`;
}

/** The messages of an agent's turns. A turn repeats those before it; where it does not, another conversation begins. */
function conversation(turns) {
  const nodes = [];
  let before = [];
  for (const turn of turns) {
    const goesOn = turn.messages.length >= before.length && before.every((one, at) => one.role === turn.messages[at].role);
    if (before.length && !goesOn) nodes.push(el("div", { class: "facts" }, "another conversation"));
    for (const one of goesOn ? turn.messages.slice(before.length) : turn.messages) nodes.push(message(one, ""));
    nodes.push(message(turn.message, ` · sampled, ended by ${shown(turn.finish_reason)}`));
    before = [...turn.messages, turn.message];
  }
  return nodes;
}

function message(one, more) {
  const said = typeof one.content === "string" || !one.content ? one.content || "" : JSON.stringify(one.content, null, 1);
  const reasoning = one.reasoning_content ? `${one.reasoning_content}\n` : "";
  const calls = (one.tool_calls || []).map((call) => `${call.function?.name}(${call.function?.arguments})`);
  return el("div", { class: `message ${more && "sampled"}` }, el("div", { class: "facts" }, `${one.role}${more}`),
    el("div", { class: "text-block" }, reasoning + said), ...calls.map((call) => el("div", { class: "text-block call" }, call)));
}

function coloured(sample) {
  const block = el("div", { class: "text-block" });
  const [read, strongest] = VALUES[by("colouring").value];
  const values = sample.tokens ? read(sample) : null;
  if (!values) {
    block.append(sample.completion || "");
    return block;
  }
  sample.tokens.forEach((token, at) => {
    const value = values[at];
    const share = value === null || value === undefined ? 0 : Math.min(1, Math.abs(value / strongest));
    const tint = by("colouring").value === "log-probability" || value < 0 ? "220, 60, 50" : "20, 150, 90";
    block.append(el("span", { style: `background:rgba(${tint},${(0.75 * share).toFixed(3)})`, title: `${JSON.stringify(token)}  ${shown(value)}` }, token));
  });
  return block;
}

// -- settings --------------------------------------------------------------------------------------------------------

function settings() {
  const home = by("settings");
  const head = ["", ...DATA.runs.map((run, index) => named(index))];
  if (DATA.runs.length > 1) {
    const rows = Object.entries(DATA.differences).map(([key, values]) => [el("code", {}, key), ...values.map(shown)]);
    home.append(el("h2", {}, "What differs"), rows.length ? table(head, rows) : el("p", { class: "told" }, "All settings are equal."));
  }
  const every = (what) => {
    const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run[what])))];
    return table(["", ...DATA.runs.map((run, index) => named(index))], keys.map((key) => [el("code", {}, key), ...DATA.runs.map((run) => shown(run[what][key]))]));
  };
  home.append(el("h2", {}, "Settings and versions"), el("details", {}, el("summary", {}, el("b", {}, "All settings")), every("settings")),
    el("details", { open: "" }, el("summary", {}, el("b", {}, "Versions")), every("versions")),
    el("p", { class: "told" }, `written by areno ${DATA.areno}`));
}

for (const [id, title] of [["summary", "Summary"], ["curves", "Curves"], ["samples", "Samples"], ["settings", "Settings"]]) {
  by("nav").append(el("a", { href: `#${id}` }, title));
}
summary();
curves();
samples();
settings();
