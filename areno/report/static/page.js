// Fill the page.

const SECTIONS = [
  ["summary", "Verdict", verdict], ["curves", "Curves", curves], ["numbers", "Numbers", () => { numbers(); forecasts(); }], ["runs", "Runs", runs],
  ["samples", "Samples", samples], ["settings", "Settings", settings],
];
by("title").textContent = DATA.title;
for (const [id, title, fill] of SECTIONS) {
  by("nav").append(el("a", { href: `#${id}` }, title));
  fill();
}
