// The samples: a table of all, and one with the others of its group in full.

const PAGE = 200; // rows of the table that are shown at once
async function unzipped(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
const unpacked = async (text) => JSON.parse(await unzipped(text));

const COLUMNS = [
  ["step", 0], ["sample", 1], ["reward", 3], ["prompt", 8], ["completion", 9], ["advantage", 4], ["tokens", 5], ["ended by", 6],
];
const isMinor = (place) => place === 4 || place === 6; // left out where there is little room: the cards have them
const VALUES = { // what a token can be coloured by: the values of a sample, and the value that has the strongest colour
  "log-probability": [(sample) => sample.logprobs, -5],
  "advantage": [(sample) => sample.token_advantages || (isNumber(sample.advantage) ? sample.tokens.map(() => sample.advantage) : null), 2],
  "rollout − training": [(sample) => sample.train_logprobs && sample.logprobs && sample.logprobs.map((value, at) => isNumber(sample.train_logprobs[at]) ? value - sample.train_logprobs[at] : null), 0.2],
};
const RED = "220, 60, 50", GREEN = "20, 150, 90";
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
    el("div", { class: "controls" }, withSamples.length > 1 ? run : el("span", { hidden: "" }, run),
      el("label", {}, "step ", el("select", { id: "step", onchange: again })),
      el("label", {}, "reward from ", el("input", { id: "low", type: "number", step: "any", oninput: again })),
      el("label", {}, "to ", el("input", { id: "high", type: "number", step: "any", oninput: again })),
      el("input", { id: "find", type: "search", placeholder: "text in prompt or completion", size: 30, oninput: search }),
      el("label", { id: "colour-by", hidden: "" }, "colour by ", el("select", { id: "colouring", onchange: open }), el("span", { id: "scale", class: "told" })),
      el("span", { id: "count", class: "told" })),
    el("p", { id: "left-out", class: "told" }),
    el("div", { class: "browser" }, el("div", { class: "wide", id: "list" }), el("div", { class: "group", id: "group" })),
  );
  const best = DATA.verdict.best;
  run.value = withSamples.includes(best) ? best : withSamples[0];
  load(Number(run.value));
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
    el("th", { "data-key": name, class: place > 7 ? "text" : isMinor(place) ? "number minor" : "number", onclick: sortBy(place) }, name + (browser.sort === place ? (browser.ascending ? " ▲" : " ▼") : "")));
  const rows = lines.slice(0, browser.most).map((line) => {
    const chosen = browser.chosen && browser.chosen[0] === line[0] && browser.chosen[1] === line[1];
    return el("tr", { class: chosen ? "sample chosen" : "sample", onclick: () => choose(line) },
      ...COLUMNS.map(([, place]) => place > 7 ? el("td", { class: "text", title: line[place] }, line[place]) : el("td", { class: isMinor(place) ? "number minor" : "number" }, cellOf(line[place]))));
  });
  const more = lines.length > browser.most ? el("button", { onclick: () => { browser.most += 5 * PAGE; list(); } }, "show more") : null;
  by("list").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)), ...(more ? [more] : []));
  by("count").textContent = `${lines.length} of ${browser.lines.length} samples`;
  by("samples").querySelector("h2").dataset.paper = `${DATA.runs[browser.run].name}, ${by("step").value === "" ? "all steps" : `step ${by("step").value}`}`;
}

const cellOf = (value) => (isNumber(value) ? told(value) : shown(value));

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
  offerColours(peers.map(([, sample]) => sample));
  const { prompt, prompt_tokens: tokens, solutions } = all[place];
  const asked = browser.lines.find((line) => line[0] === step && line[1] === place)[8];
  const facts = el("div", { class: "facts" }, `step ${step}, prompt of ${shown(tokens)} tokens`, solutions === undefined || solutions === null ? "" : `, solutions: ${shown(solutions)}`);
  const text = el("div", { class: "text-block" }, prompt || "");
  const isLong = all[place].trajectory && prompt; // the conversation below says it again
  const body = isLong ? [el("div", { class: "text-block" }, asked), el("details", {}, el("summary", { class: "told" }, "as the model read it"), text)] : [text];
  by("group").replaceChildren(el("div", { class: "card" }, facts, ...body), ...peers.map(([at, sample]) => card(at, sample, at === place)));
}

/** The values by which the tokens of these samples can be coloured; the choice is hidden where there are none. */
function offerColours(samples) {
  const plainText = samples.filter((sample) => sample.tokens && !sample.trajectory);
  const there = Object.keys(VALUES).filter((name) => plainText.some((sample) => VALUES[name][0](sample)));
  const chosen = by("colouring").value;
  by("colouring").replaceChildren(...there.map((name) => el("option", {}, name)));
  if (there.includes(chosen)) by("colouring").value = chosen;
  by("colour-by").hidden = !there.length;
  if (!there.length) return;
  const name = by("colouring").value, strongest = VALUES[name][1], both = name !== "log-probability";
  const stops = both ? [`rgba(${RED},.75)`, "transparent", `rgba(${GREEN},.75)`] : [`rgba(${RED},.75)`, "transparent"];
  by("scale").replaceChildren(` ${both ? -strongest : strongest} `, el("span", { class: "scale", style: `background:linear-gradient(90deg,${stops.join(",")})` }), ` ${both ? strongest : 0}`);
}

function card(at, sample, chosen) {
  const facts = [`sample ${at}`, `reward ${cellOf(sample.reward)}`];
  for (const [name, value] of Object.entries(sample.parts || {})) facts.push(`${name} ${cellOf(value)}`);
  if (sample.advantage !== undefined) facts.push(`advantage ${cellOf(sample.advantage)}`);
  facts.push(`${shown(sample.response_tokens)} tokens`, `ended by ${shown(sample.finish_reason)}`);
  if (sample.status && sample.status !== "ok") facts.push(`${sample.status}: ${sample.message || ""}`);
  if (sample.trajectory) facts.push(`${sample.trajectory.turns.length} turn${sample.trajectory.turns.length === 1 ? "" : "s"}`, ...sample.trajectory.rows.map(trained));
  const body = sample.trajectory ? conversation(sample.trajectory.turns) : [coloured(sample)];
  if (sample.trajectory) body.push(el("div", { class: "facts" }, "single tokens: ", el("code", {}, `areno replay ${DATA.runs[browser.run].path} --step ${browser.chosen[0]} --sample ${at} --row 0`)));
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
    nodes.push(message(turn.message, ` · sampled, ended by ${shown(turn.finish_reason)}${turn.reward === undefined ? "" : `, reward ${cellOf(turn.reward)}`}`));
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
  const [read, strongest] = VALUES[by("colouring").value] || [];
  const values = read && sample.tokens ? read(sample) : null;
  if (!values) {
    block.append(sample.completion || "");
    return block;
  }
  sample.tokens.forEach((token, at) => {
    const value = values[at];
    const share = value === null || value === undefined ? 0 : Math.min(1, Math.abs(value / strongest));
    const tint = by("colouring").value === "log-probability" || value < 0 ? RED : GREEN;
    block.append(el("span", { style: `background:rgba(${tint},${(0.75 * share).toFixed(3)})`, title: `${JSON.stringify(token)}  ${told(value)}` }, token));
  });
  return block;
}
