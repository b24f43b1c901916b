// The settings in which runs differ; all settings and versions, once where they are equal.

function settings() {
  const home = by("settings"), several = DATA.runs.length > 1;
  if (several) {
    const rows = Object.entries(DATA.differences), differences = el("div");
    home.append(el("h2", {}, "What differs"), differences);
    if (rows.length) runTable(differences, (runs) => rows.map(([key, values]) => [el("code", {}, key), ...runs.map((run) => shown(values[run]))]), 6);
    else differences.append(el("p", { class: "told" }, "All settings are equal."));
  }
  const every = (what) => {
    const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run[what])))];
    const rows = keys.map((key) => [el("code", {}, key), equal(DATA.runs.map((run) => shown(run[what][key])))]);
    return el("div", { class: "wide pairs" }, table(["", several ? "all runs" : "value"], rows));
  };
  home.append(el("h2", {}, "Settings and versions"), el("details", {}, el("summary", {}, el("b", {}, "All settings")), every("settings")),
    el("details", { open: "" }, el("summary", {}, el("b", {}, "Versions")), every("versions")),
    el("p", { class: "told" }, `written by areno ${DATA.areno}`));
}

/** The value of all runs, or of each run where they differ. */
function equal(values) {
  if (new Set(values).size === 1) return values[0];
  return el("span", {}, ...values.flatMap((value, run) => [run ? ", " : "", swatch(run), value]));
}
