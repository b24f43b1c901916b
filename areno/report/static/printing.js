// Paper shows what a screen shows on demand: every chart is drawn, what is folded away is open, wide tables go on below.

const paper = { on: false, opened: [] };

function toPaper() {
  if (paper.on) return;
  paper.on = true;
  document.documentElement.classList.add("paper"); // light colours, before the charts read them
  paper.opened = [...document.querySelectorAll("details:not([open])")];
  for (const node of paper.opened) node.open = true;
  for (const drawTable of byRun) drawTable(true);
  for (const node of charts) draw(node, true);
}

function toScreen() {
  if (!paper.on) return;
  paper.on = false;
  document.documentElement.classList.remove("paper");
  for (const node of paper.opened) node.open = false;
  for (const drawTable of byRun) drawTable(false);
  for (const node of charts) {
    node.drawn = false;
    Plotly.purge(node.plot);
    if (node.near) draw(node);
  }
}

window.addEventListener("beforeprint", toPaper);
window.addEventListener("afterprint", toScreen);
