// Fill the page.

const SECTIONS = [
  ["summary", "Verdict", verdict], ["curves", "Curves", curves], ["numbers", "Numbers", () => { numbers(); forecasts(); }], ["runs", "Runs", () => { runs(); checks(); }],
  ["samples", "Samples", samples], ["settings", "Settings", settings],
];
by("title").textContent = DATA.title;

async function fillPage() {
  if (typeof DecompressionStream === "undefined") {
    by("summary").append(el("p", {}, "This page needs a browser of 2023 or later."));
    return;
  }
  document.head.append(el("script", {}, await unzipped(by("plotly").textContent)));
  for (const [id, title, fill] of SECTIONS) {
    by("nav").append(el("a", { href: `#${id}` }, title));
    fill();
  }
}
fillPage();
