// The settings in which runs differ; all settings and versions, once where they are equal.

function settings() {
  const home = by("settings"), several = DATA.runs.length > 1;
  if (several) {
    const found = Object.entries(DATA.differences), differences = el("div");
    home.append(el("h2", {}, "What differs"), differences);
    if (!found.length) differences.append(el("p", { class: "told" }, "All settings are equal."));
    else if (found.length <= 5 && found.length <= DATA.runs.length) { // a row for each run is narrower
      const rows = DATA.runs.map((run, index) => [named(index), ...found.map(([, values]) => shown(values[index]))]);
      differences.append(wide(table(["", ...found.map(([key]) => el("code", {}, key))], rows)));
    } else runTable(differences, (runs) => found.map(([key, values]) => [el("code", {}, key), ...runs.map((run) => shown(values[run]))]));
  }
  const every = (what) => {
    const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run[what])))];
    const rows = keys.map((key) => [el("code", {}, key), equal(DATA.runs.map((run) => shown(run[what][key])))]);
    return el("div", { class: "wide pairs" }, table(["", several ? "all runs" : "value"], rows));
  };
  const folded = (title, what, isOpen) => (DATA.runs.some((run) => Object.keys(run[what]).length)
    ? [el("details", isOpen ? { open: "" } : {}, el("summary", {}, el("b", {}, title)), every(what))] : []);
  home.append(el("h2", {}, "Settings and versions"), ...folded("All settings", "settings", false), ...folded("Versions", "versions", true),
    el("p", { class: "told" }, `written by areno ${DATA.areno}`));
}

/** The value of all runs, or of each run where they differ. */
function equal(values) {
  if (new Set(values).size === 1) return values[0];
  return el("span", {}, ...values.flatMap((value, run) => [run ? ", " : "", swatch(run), value]));
}
