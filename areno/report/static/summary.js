// The verdict, the table of first, best and last, and the runs.

const MOST_PLACES = 6; // of a sweep, before the rest is folded away

function verdict() {
  const found = DATA.verdict, single = DATA.runs.length === 1;
  const notes = found.notes.map((note) => el("p", {}, note));
  const card = el("div", { class: "verdict" },
    el("div", {}, found.places.length > 1 ? "Best: " : "", el("b", { class: "winner" }, found.title)),
    el("div", { class: "big" }, el("span", {}, told(found.value), el("span", { class: "std" }, spread(found.std))), found.scalar ? sparkline(DATA.runs[0].series[found.scalar], colour(0), found.title) : null), el("div", { class: "told" }, found.spread), ...notes);
  by("summary").append(
    el("h2", {}, "Verdict", el("small", { class: single ? DATA.runs[0].status : null }, found.about)),
    el("div", { class: "verdicts" }, card, single ? tiles() : ranking(found.places)));
}

/** The other numbers of a single run. */
function tiles() {
  const rows = DATA.headlines.filter((row) => row.name !== DATA.verdict.scalar).slice(0, 6);
  return el("div", { class: "tiles" }, ...rows.map((row) => {
    const [first, best, last] = row.runs[0];
    const more = best === null ? "" : `, best ${told(best)}`;
    return el("div", { class: "tile" }, el("div", { class: "told" }, row.title), el("div", { class: "value" }, told(last), sparkline(DATA.runs[0].series[row.name], colour(0), row.title)),
      el("div", { class: "told small" }, `first ${told(first)}${more}`));
  }));
}

function ranking(places) {
  if (!places.length) return null;
  const values = places.flatMap((place) => place.values), bounds = [Math.min(...values), Math.max(...values)];
  const seeds = places.some((place) => place.runs.length > 1);
  const head = ["", seeds ? "settings" : "run", seeds ? "mean ± std" : "result", `${told(bounds[0])} … ${told(bounds[1])}`, ...(seeds ? ["runs"] : [])];
  const rows = places.map((place, at) => [
    el("td", { class: "number" }, String(at + 1)), el("span", { class: "run long" }, swatch(place.runs[0]), place.title),
    el("td", { class: "number" }, told(place.value) + spread(place.std)),
    strip(place, bounds), ...(seeds ? [String(place.runs.map((run) => DATA.runs[run].name.split(" ")[0]).join(", "))] : []),
  ]);
  const rest = rows.length - MOST_PLACES;
  return el("div", { class: "wide ranking" }, table(head, rows.slice(0, MOST_PLACES)),
    rest > 0 ? el("details", {}, el("summary", {}, `${rest} more`), table(head, rows.slice(MOST_PLACES))) : null);
}

/** The results of the runs of a place as dots on one scale, and their mean as a line. */
function strip(place, [low, high]) {
  const [width, height, rim] = [150, 18, 5];
  const x = (value) => (high === low ? width / 2 : rim + ((width - 2 * rim) * (value - low)) / (high - low)).toFixed(1);
  const tint = colour(place.runs[0]);
  return svg("svg", { class: "strip", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": place.values.map((value) => told(value)).join(", ") },
    svg("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2, class: "axis" }),
    ...place.values.map((value) => svg("circle", { cx: x(value), cy: height / 2, r: 3.5, fill: tint, "fill-opacity": 0.6 })),
    place.runs.length > 1 ? svg("line", { x1: x(place.value), x2: x(place.value), y1: 1, y2: height - 1, stroke: tint, "stroke-width": 2 }) : null);
}

/** One row for a number, one column for a run: its curve, the first and the last value, the best with its step. */
function numbers() {
  const cell = (row, run) => {
    const found = row.runs[run];
    if (!found) return el("td", {}, "–");
    const [first, best, last, step] = found;
    return el("td", { class: "course" }, sparkline(DATA.runs[run].series[row.name], colour(run), `${row.title} of ${DATA.runs[run].name}`),
      el("div", {}, told(first, row.counts), el("span", { class: "told" }, " → "), el("b", {}, told(last, row.counts))),
      best === null ? null : el("div", { class: "told small" }, `best ${told(best, row.counts)} at step ${step}`));
  };
  const title = (row) => el("span", {}, row.title, row.title.endsWith(row.unit) ? null : el("span", { class: "told small" }, ` (${row.unit})`));
  const home = el("div");
  if (!DATA.headlines.length) return;
  by("numbers").append(el("h2", {}, "First, best and last"), home);
  runTable(home, (runs) => DATA.headlines.map((row) => [title(row), ...runs.map((run) => cell(row, run))]));
}

/** One row for a phase of a step, one column for a run: predicted and measured seconds, and peaks of memory. */
function forecasts() {
  const phases = [...new Set(DATA.runs.flatMap((run) => run.forecast.map((phase) => phase.name)))];
  if (!phases.length) return;
  const pair = ([predicted, measured], unit) => [told(predicted), el("span", { class: "told" }, " / "), el("b", {}, told(measured)), el("span", { class: "told small" }, ` ${unit}`)];
  const cell = (name, run) => {
    const found = DATA.runs[run].forecast.find((phase) => phase.name === name);
    return found ? el("td", { class: "course" }, el("div", {}, ...pair(found.seconds, "s")), el("div", {}, ...pair(found.gib, "GiB"))) : el("td", {}, "–");
  };
  const home = el("div");
  by("numbers").append(el("h2", {}, "Predicted and measured", el("small", {}, "seconds of a step (median) and peak of memory")), home);
  runTable(home, (runs) => phases.map((name) => [name, ...runs.map((run) => cell(name, run))]));
}

/** What `areno check` found before each run, and whether the run is still the one that was checked. */
function checks() {
  const found = DATA.runs.flatMap((run, index) => (run.check ? [[run.check, index]] : []));
  if (!found.length) return;
  const count = (check, verdict) => check.findings.filter((finding) => finding.verdict === verdict).length;
  const rows = found.map(([check, index]) => [
    named(index), check.time, ...["green", "red", "not checked"].map((verdict) => number(count(check, verdict))),
    check.differs.length ? el("b", {}, `no longer matches: other ${check.differs.join(", ")}`) : "this run is the one that was checked",
  ]);
  const red = found.flatMap(([check, index]) => check.findings.filter((finding) => finding.verdict === "red").map((finding) => [named(index), el("code", {}, finding.name), finding.line]));
  by("runs").append(el("h2", {}, "Checked before the start"), wide(table(["run", "checked", "green", "red", "not checked", ""], rows)),
    ...(red.length ? [wide(table(["run", "red", "what was found"], red))] : []));
}

function runs() {
  const given = DATA.runs.map((run) => run.overrides);
  const common = DATA.runs.length > 1 ? given[0].filter((line) => given.every((lines) => lines.includes(line))) : [];
  const rows = DATA.runs.map((run, index) => [
    named(index), el("span", { class: run.status || "" }, shown(run.status)), number(run.steps), el("td", { class: "number" }, run.duration),
    el("code", {}, run.path), el("code", {}, run.overrides.filter((line) => !common.includes(line)).join(" ")),
  ]);
  by("runs").append(el("h2", {}, DATA.runs.length > 1 ? "Runs" : "Run"), wide(table(["run", "state", "steps", "duration", "folder", "given on the command line"], rows)),
    ...(common.length ? [el("p", { class: "told" }, "given to all: ", el("code", {}, common.join(" ")))] : []));
}
