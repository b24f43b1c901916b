// The curves. A click on a run, or on settings with several seeds, hides or shows its lines.

const DASHES = { solid: "solid", dot: "dotted", dash: "dashed", dashdot: "dash-dotted" };
const charts = []; // all nodes of charts
const hidden = new Set(); // runs that the reader has switched off
const PAPER = [{ width: 338, height: 164 }, { width: 222, height: 126 }]; // two beside each other on A4 and on Letter; three

/** The first and the last step of all runs, so that all charts have the same horizontal axis. */
const STEPS = DATA.runs.flatMap((run) => Object.values(run.series).flatMap(([steps]) => [steps[0], steps.at(-1)]));
const [FIRST, LAST] = STEPS.reduce(([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);

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

/** What tells a number from the others of its chart: the namespace, or the rest of the name where that is the same. */
function partOf(chart, name) {
  const spaces = chart.names.map((one) => one.split("/")[0]);
  return chart.stacked || new Set(spaces).size < spaces.length ? name.split("/").slice(1).join("/") : name.split("/")[0];
}

/** If several runs have several numbers in a chart: which kind of line is which. */
function kindsOf(chart) {
  const kinds = Object.values(DASHES);
  const parts = chart.names.map((name, place) => `${kinds[place % 4]}: ${partOf(chart, name)}`);
  return DATA.runs.length > 1 && parts.length > 1 ? parts.join(", ") : "";
}

/** The value of a colour that a style names. */
const resolved = (value) => value.replace(/^var\((.*)\)$/, (_, name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim());

/** Text for Plotly, which reads some markup. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** The mean over the runs of a group at the steps that all of them have. */
function meanOf(group, name) {
  const found = group.runs.map((run) => DATA.runs[run].series[name]).filter(Boolean).map(([steps, values]) => new Map(steps.map((step, at) => [step, values[at]])));
  if (found.length < 2) return null;
  const steps = [...found[0].keys()].filter((step) => found.every((one) => isNumber(one.get(step))));
  return [steps, steps.map((step) => found.reduce((sum, one) => sum + one.get(step), 0) / found.length)];
}

function traces(chart, weight) {
  const found = [], several = DATA.runs.length > 1, dashes = Object.keys(DASHES);
  chart.names.forEach((name, place) => {
    const part = chart.names.length > 1 ? partOf(chart, name) : "";
    const dash = several ? dashes[place % 4] : "solid";
    const add = (series, who, look, more = {}) => {
      const line = { dash, width: 1.8, ...look, color: resolved(look.color) };
      const common = { x: series[0], type: "scatter", connectgaps: true, name: plain([who, part].filter(Boolean).join(" ") || name), line,
        mode: series[0].length > 25 || line.width < 1.5 ? "lines" : "lines+markers", marker: { size: 5 }, ...more };
      if (weight && !chart.stacked) found.push({ ...common, y: series[1], opacity: 0.2, hoverinfo: "skip", showlegend: false });
      found.push({ ...common, y: weight && !chart.stacked ? smoothed(series[1], weight) : series[1], ...(chart.stacked ? { stackgroup: "one", mode: "lines" } : {}) });
    };
    DATA.runs.forEach((run, index) => {
      const series = run.series[name], grouped = GROUPS.some((group) => group.runs.length > 1 && group.runs.includes(index));
      if (!series || hidden.has(index)) return;
      const look = { color: several ? colour(index) : COLOURS[place % COLOURS.length] };
      if (grouped) add(series, run.name, { ...look, width: 1 }, { opacity: 0.45 });
      else add(series, several ? run.name : "", look);
    });
    for (const group of GROUPS) {
      const mean = group.runs.some((run) => hidden.has(run)) ? null : meanOf(group, name);
      if (mean) add(mean, `mean of ${group.title}`, { color: colour(group.runs[0]), width: 2.4 });
    }
  });
  return found;
}

function layoutOf(chart, drawn, onPaper) {
  const [ink, soft, line] = ["var(--ink)", "var(--soft)", "var(--line)"].map(resolved);
  const rim = (LAST - FIRST || 1) * 0.03;
  const legend = DATA.runs.length === 1 && chart.names.length > 1;
  const values = drawn.flatMap((trace) => trace.y.filter(isNumber));
  const most = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const axis = (text) => ({ title: { text: plain(text), standoff: 6, font: { size: 11, color: soft } }, gridcolor: line, zeroline: false, automargin: true });
  const range = values.length && values.every((value) => value === 0) ? { range: [-0.05, 1], tickvals: [0, 1] } : {};
  return {
    margin: { l: 40, r: 14, t: legend ? 26 : 8, b: 36 }, hovermode: "x unified", hoverlabel: { namelength: 60, font: { size: 11 } }, showlegend: legend,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
    xaxis: { ...axis("step"), range: [FIRST - rim, LAST + rim], tickformat: "d", ...(LAST - FIRST <= 8 ? { dtick: 1 } : { nticks: 7 }) },
    yaxis: { ...axis(chart.unit), exponentformat: chart.counts && most >= 1e3 ? "SI" : "power", hoverformat: ".4~g", nticks: 6, ...range }, uirevision: 1,
    ...(onPaper ? { ...PAPER[chart.small ? 1 : 0], autosize: false } : { autosize: true }),
  };
}

function draw(node, onPaper = false) {
  const drawn = traces(node.chart, Number(by("smooth").value));
  Plotly.react(node.plot, drawn, layoutOf(node.chart, drawn, onPaper),
    { responsive: !onPaper, displaylogo: false, displayModeBar: onPaper ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  node.drawn = true;
}

function chartNode(chart) {
  const kinds = kindsOf(chart);
  const plot = el("div", { class: "plot" });
  const node = el("figure", { class: "chart" }, el("figcaption", {}, chart.title, kinds ? el("span", { class: "told small" }, ` ${kinds}`) : null), plot);
  Object.assign(node, { chart, plot });
  charts.push(node);
  return node;
}

function redraw() {
  for (const node of charts) {
    if (node.drawn && node.near) draw(node);
    else node.drawn = false;
  }
}

function curves() {
  // A chart is drawn when it comes near the screen: a page of sixty of them opens at once.
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.near = entry.isIntersecting;
      if (entry.isIntersecting && !entry.target.drawn) draw(entry.target);
    }
  }, { rootMargin: "300px" });
  const home = by("curves"), several = DATA.runs.length > 1;
  home.append(el("h2", {}, "Curves"));
  if (several) home.append(legend());
  const [first] = Object.values(DATA.charts);
  if (!first) home.append(el("p", { class: "told" }, "Nothing is recorded yet."));
  for (const [heading, found] of Object.entries(DATA.charts)) {
    const rest = heading === "More";
    const grid = el("div", { class: rest ? "charts small-charts" : "charts" }, ...found.map((chart) => chartNode({ ...chart, small: rest })));
    grid.childNodes.forEach((node) => watch.observe(node));
    const repeated = several && (found === first || entries().length <= 8) ? el("div", { class: "paper-legend" }, ...entries().map(([about]) => about)) : null;
    const parts = [repeated, grid].filter(Boolean);
    if (rest) home.append(el("details", {}, el("summary", {}, el("b", {}, `All other numbers (${found.length})`)), ...parts));
    else home.append(el("h3", {}, heading), ...parts);
  }
  const constant = Object.entries(DATA.constant).map(([name, value]) => `${name} ${told(value)}`);
  if (constant.length) home.append(el("p", { class: "told small" }, el("b", {}, "The same in all steps: "), constant.join(" · ")));
  const smoothing = by("smoothing");
  by("smooth").addEventListener("input", () => {
    smoothing.textContent = by("smooth").value;
    smoothing.parentElement.classList.toggle("on", Number(by("smooth").value) > 0);
    redraw();
  });
}

/** What has a colour: [what it is called, its runs]. */
function entries() {
  if (!GROUPS.length) return DATA.runs.map((run, index) => [named(index), [index]]);
  const rest = DATA.runs.map((run, index) => index).filter((index) => !GROUPS.some((group) => group.runs.includes(index)));
  const of = (group) => el("span", { class: "run" }, swatch(group.runs[0]), group.title, el("span", { class: "told small" }, group.runs.length > 1 ? ` ${group.runs.length} seeds and their mean` : " 1 seed"));
  return [...GROUPS.map((group) => [of(group), group.runs]), ...rest.map((index) => [named(index), [index]])];
}

/** One for all charts, since a run has the same colour in each. */
function legend() {
  return el("div", { class: "controls legend" }, ...entries().map(([about, runs]) => {
    const button = el("button", { "aria-pressed": "true", title: "hide or show", onclick: () => {
      const off = runs.some((run) => hidden.has(run));
      for (const run of runs) hidden[off ? "delete" : "add"](run);
      button.setAttribute("aria-pressed", String(off));
      redraw();
    } }, about);
    return button;
  }));
}
