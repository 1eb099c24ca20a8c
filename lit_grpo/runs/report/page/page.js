"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Make an element; its children are elements or texts, and a text is never read as HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Run the chart library. It is compressed: the page would be twice as large. */
async function loadPlotly(nonce) {
  const bytes = Uint8Array.from(atob(byId("plotly").textContent), (one) => one.charCodeAt(0));
  const code = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", { nonce, textContent: await new Response(code).text() }));
}

/* ---- What is shown ---- */

const DEFAULTS = { axis: "steps", q: "", step: "", run: "", kind: "", sort: "", down: "", page: "0" };
/** The axis of the curves, and what is shown of the completions. What differs from this stands in the address, so that a reload keeps it. */

const view = { ...DEFAULTS };

function readView() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (name in view) view[name] = value;
  }
}

function keepView() {
  const set = Object.entries(view).filter(([name, value]) => value && value !== DEFAULTS[name]);
  const state = new URLSearchParams(set).toString();
  // An empty fragment would scroll to the top.
  if (location.hash.slice(1) !== state) location.replace(`#${state || "all"}`);
}

/* ---- Curves ---- */

const RED = "#e5484d", AMBER = "#e08700", GREY = "#8d8780";
const MARK_COLORS = { crash: RED, stop: RED, rollback: RED, alert: AMBER, stall: AMBER };
const MAX_HOVER_CHARACTERS = 160;
const LABEL_WIDTH = 6; // pixels of a character
const hiddenRuns = new Set();
const plots = [];

const MINUTE = 60, HOUR = 3600;

/** Return the seconds that had passed after a number of steps of a run. */
function secondsAt(run, step) {
  const { steps, seconds } = data.runs[run].clock;
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return seconds[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const share = (step - steps[low]) / (steps[high] - steps[low]);
  return seconds[low] + share * (seconds[high] - seconds[low]);
}

/** Return how steps of runs lie on the axis of a chart: their places, and the unit. */
function axisOf(chart) {
  if (view.axis !== "time") return { unit: "", place: (run, step) => step + chart.offsets[run] };
  const passed = (run, step) => chart.secondsBefore[run] + secondsAt(run, step);
  const longest = Math.max(...Object.keys(chart.offsets).map((run) => passed(run, Infinity)));
  const [unit, size] = longest > 2 * HOUR ? ["h", HOUR] : longest > 2 * MINUTE ? ["min", MINUTE] : ["s", 1];
  return { unit, place: (run, step) => passed(run, step) / size };
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Plotly reads some HTML in texts. */
function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** Return what is shown of an event where the pointer is, in short lines. */
function hoverText(mark) {
  const run = data.isComparison ? `${data.runs[mark.run].label}: ` : "";
  const cause = mark.cause ? ` (${mark.cause})` : "";
  let text = `${run}${mark.kind} at step ${mark.step}${cause}${mark.message ? `: ${mark.message}` : ""}`;
  if (text.length > MAX_HOVER_CHARACTERS) text = `${text.slice(0, MAX_HOVER_CHARACTERS)}…`;
  const lines = [""];
  for (const word of text.split(/\s+/)) {
    if (lines[lines.length - 1].length + word.length > 44) lines.push("");
    lines[lines.length - 1] += `${word} `;
  }
  return lines.filter(Boolean).map(escaped).join("<br>");
}

function verticalLine(x, color) {
  const line = { color, width: 1, dash: "dot" };
  return { type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line };
}

/** Return the events of a chart's runs, as one trace of points above its lines. */
function drawMarks(chart, axis) {
  const marks = data.marks
    .filter((mark) => mark.run in chart.offsets && !hiddenRuns.has(mark.run))
    .map((mark) => ({ ...mark, x: axis.place(mark.run, mark.step) }));
  const color = (mark) => MARK_COLORS[mark.kind] || GREY;
  const trace = {
    type: "scatter", mode: "markers", yaxis: "y2", name: "event", showlegend: false,
    x: marks.map((mark) => mark.x),
    y: marks.map(() => 1),
    text: marks.map(hoverText),
    hovertemplate: "%{text}<extra></extra>",
    marker: { symbol: "triangle-down", size: 8, color: marks.map(color) },
    cliponaxis: false,
  };
  return { traces: marks.length ? [trace] : [], shapes: marks.map((one) => verticalLine(one.x, color(one))) };
}

/** Return a line and a name where one stage of a training ends and the next begins; a short one has no name. */
function drawStages(chart, axis, end, width) {
  const stages = Object.keys(chart.offsets).map((run) => [run, axis.place(run, axis.unit ? 0 : 0.5)]);
  if (data.isComparison || stages.length < 2) return { shapes: [], annotations: [] };
  const hasRoom = ([run, start], number) =>
    number === stages.length - 1 ||
    (stages[number + 1][1] - start) / end * width > LABEL_WIDTH * data.runs[run].label.length;
  const label = (run, x) => ({
    text: escaped(data.runs[run].label), x, y: 1, xref: "x", yref: "paper", xanchor: x > 0.7 * end ? "right" : "left", yanchor: "bottom", yshift: 5,
    showarrow: false, font: { size: 10, color: css("--quiet") },
  });
  return {
    shapes: stages.slice(1).map(([, start]) => verticalLine(start, GREY)),
    annotations: stages.filter(hasRoom).map(([run, start]) => label(run, start)),
  };
}

/** Return a line where a phase of a run's curriculum follows another; those of compared runs would mix. */
function drawPhases(chart, axis) {
  if (data.isComparison) return [];
  return Object.keys(chart.offsets).flatMap((run) =>
    data.runs[run].phases.map((step) => verticalLine(axis.place(run, step - (axis.unit ? 1 : 0.5)), GREY)),
  );
}

function layoutOf(chart, traces, { unit }, shapes, annotations) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
  const isAccuracy = chart.metric === "val/accuracy";
  const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true };
  const across = unit
    ? { ticksuffix: ` ${unit}`, showticksuffix: "last", hoverformat: ".3~r", unifiedhovertitle: { text: `%{x} ${unit}` } }
    : { tickformat: "d", hoverformat: "d", unifiedhovertitle: { text: "step %{x}" } };
  return {
    height: 240,
    margin: { l: 44, r: 14, t: annotations.length ? 22 : 10, b: 22 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { size: 11, color: css("--ink"), family: "system-ui, sans-serif" },
    hovermode: "x unified",
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: css("--ink"), size: 11 } },
    showlegend: false,
    xaxis: { ...axis, ...across, showspikes: false, nticks: 7 },
    yaxis: {
      ...axis,
      nticks: 6,
      ...(isAccuracy ? { range: [0, 1.05] } : Math.min(...values) >= 0 ? { rangemode: "tozero" } : {}),
    },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes,
    annotations,
  };
}

function drawChart({ chart, place }) {
  const axis = axisOf(chart);
  const curves = chart.traces
    .filter((trace) => !hiddenRuns.has(trace.meta))
    .map((trace) => ({ ...trace, x: trace.x.map((one) => axis.place(trace.meta, one - chart.offsets[trace.meta])) }));
  const marks = drawMarks(chart, axis);
  const end = Math.max(...curves.flatMap((trace) => trace.x));
  const stages = drawStages(chart, axis, end, place.clientWidth);
  const shapes = [...stages.shapes, ...drawPhases(chart, axis), ...marks.shapes];
  const layout = layoutOf(chart, curves, axis, shapes, stages.annotations);
  return Plotly.react(place, [...curves, ...marks.traces], layout, { responsive: true, displayModeBar: false });
}

/** Return the names of a chart's lines with their colours; Plotly would lay its legend over the curves. */
function namesOf(chart) {
  const named = chart.traces.filter((trace) => trace.showlegend);
  return named.map((trace) => {
    const swatch = make("i");
    swatch.style.background = trace.line.color;
    return make("span", {}, swatch, trace.name);
  });
}

const drawCharts = () => Promise.all(plots.map(drawChart));

function addCharts() {
  for (const chart of data.charts) {
    const place = make("div", { className: "plot" });
    const caption = make("figcaption", {}, chart.title, make("small", {}, chart.unit));
    byId("charts").append(make("figure", {}, caption, make("div", { className: "names" }, ...namesOf(chart)), place));
    plots.push({ chart, place });
  }
}

/** Let the buttons draw the curves over steps or over time. */
function addAxis() {
  const buttons = document.querySelectorAll("[data-axis]");
  const press = () => buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.axis === view.axis)));
  buttons.forEach((button) => {
    button.addEventListener("click", () => {
      view.axis = button.dataset.axis;
      keepView();
      press();
      if (window.Plotly) drawCharts();
    });
  });
  press();
}

/** Add a button for each of several runs, which shows or hides it in all charts. */
function addLegend() {
  if (!data.isComparison) return;
  data.runs.forEach((run, number) => {
    const line = make("i");
    line.style.borderTopColor = run.color;
    line.style.borderTopStyle = { dash: "dashed", dot: "dotted" }[run.dash] || "solid";
    const button = make("button", { type: "button" }, line, run.label);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hiddenRuns.delete(number)) hiddenRuns.add(number);
      button.setAttribute("aria-pressed", String(!hiddenRuns.has(number)));
      if (window.Plotly) drawCharts();
    });
    byId("legend").append(button);
  });
}

/* ---- Completions ---- */

const ROWS_PER_PAGE = 50;
const { prompts, rows, rewards } = data.completions;
const KINDS = {
  truncated: (row) => row.finish_reason === "length",
  excluded: (row) => row.valid === false,
  explained: (row) => Object.keys(row.details).length > 0,
};

const number = (value) => (value === null || value === undefined ? "–" : String(value));
const COLUMNS = [
  { name: "step", value: (row) => row.step, kind: "number" },
  ...(data.runs.length > 1 ? [{ name: "run", value: (row) => data.runs[row.run].label, kind: "short wide" }] : []),
  { name: "prompt", value: (row) => prompts[row.prompt], kind: "text wide" },
  { name: "completion", value: (row) => row.completion, kind: "text" },
  { name: "answer", value: (row) => row.answer ?? "", kind: "short wide" },
  { name: "reward", value: (row) => row.reward, kind: "number" },
  ...(rewards.length > 1 ? rewards : []).map((name) => ({ name, value: (row) => row.scores[name], kind: "number wide" })),
  { name: "advantage", value: (row) => row.advantage, kind: "number wide" },
  { name: "tokens", value: (row) => row.num_tokens, kind: "number wide" },
  { name: "remarks", value: remarks, kind: "short wide" },
];

function remarks(row) {
  return [row.finish_reason === "length" ? "truncated" : "", row.valid === false ? "excluded" : ""].filter(Boolean).join(", ");
}

function searchText(row) {
  const parts = [prompts[row.prompt], row.completion, row.answer, row.prompt_id, ...Object.values(row.details)];
  return parts.join("\n").toLowerCase();
}

function compare(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return 1;
  if (other === null || other === undefined) return -1;
  const order = typeof one === "number" ? one - other : String(one).localeCompare(String(other));
  return view.down ? -order : order;
}

function selectedRows() {
  const words = view.q.toLowerCase();
  const found = rows.filter(
    (row) =>
      (!view.step || String(row.step) === view.step) &&
      (!view.run || String(row.run) === view.run) &&
      (!view.kind || KINDS[view.kind](row)) &&
      (!words || searchText(row).includes(words)),
  );
  const column = COLUMNS.find((one) => one.name === view.sort);
  return column ? found.sort((one, other) => compare(column.value(one), column.value(other))) : found;
}

function detailOf(row) {
  const block = (name, text) => (text ? [make("h4", {}, name), make("pre", {}, text)] : []);
  const scores = rewards
    .filter((name) => name in row.scores)
    .map((name) => `${name}: ${number(row.scores[name])}${row.details[name] ? `  ${row.details[name]}` : ""}`);
  const facts = [
    ...(data.runs.length > 1 ? [`run ${data.runs[row.run].label}`] : []),
    `prompt ${row.prompt_id}`, `reward ${number(row.reward)}`, `advantage ${number(row.advantage)}`,
    `${row.num_tokens} tokens`, `finish reason ${row.finish_reason}`, remarks(row), `in completions/${row.file}`,
  ];
  const cell = make(
    "td", { colSpan: COLUMNS.length + 1 },
    ...block("prompt", prompts[row.prompt]), ...block("completion", row.completion), ...block("answer", row.answer),
    ...block("scores", scores.join("\n")), ...block("row", facts.filter(Boolean).join("  ·  ")),
  );
  return make("tr", { className: "detail" }, cell);
}

function drawRow(row) {
  const toggle = make("button", { type: "button", className: "toggle" }, "▸");
  toggle.setAttribute("aria-label", "Show the whole row");
  toggle.setAttribute("aria-expanded", "false");
  const cells = COLUMNS.map(({ value, kind }) => {
    const text = kind.startsWith("number") ? number(value(row)) : value(row);
    return make("td", { className: kind }, kind.startsWith("text") ? make("div", { className: "clamp" }, text) : text);
  });
  const line = make("tr", { className: "row" }, make("td", {}, toggle), ...cells);
  line.addEventListener("click", () => {
    if (String(getSelection())) return;
    const isOpen = line.nextSibling?.className === "detail";
    if (isOpen) line.nextSibling.remove();
    else line.after(detailOf(row));
    toggle.textContent = isOpen ? "▸" : "▾";
    toggle.setAttribute("aria-expanded", String(!isOpen));
  });
  return line;
}

function drawHeader() {
  const cells = COLUMNS.map(({ name, kind }) => {
    const isSorted = view.sort === name;
    const button = make("button", { type: "button" }, name, isSorted ? (view.down ? " ↓" : " ↑") : "");
    const cell = make("th", { className: kind }, button);
    if (isSorted) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    button.addEventListener("click", () => {
      const isNumber = kind.startsWith("number");
      const down = isSorted ? !view.down : isNumber;
      show({ sort: name, down: down ? "1" : "" });
    });
    return cell;
  });
  byId("rows").tHead.replaceChildren(make("tr", {}, make("th"), ...cells));
}

/** Change what is shown of the completions, and draw it. */
function show(changes) {
  Object.assign(view, { page: "0" }, changes);
  keepView();
  const found = selectedRows();
  const numPages = Math.max(1, Math.ceil(found.length / ROWS_PER_PAGE));
  const page = Math.min(Number(view.page) || 0, numPages - 1);
  drawHeader();
  byId("rows").tBodies[0].replaceChildren(...found.slice(page * ROWS_PER_PAGE, (page + 1) * ROWS_PER_PAGE).map(drawRow));
  byId("count").textContent = found.length === rows.length ? `${rows.length} rows` : `${found.length} of ${rows.length} rows`;
  byId("position").textContent = `page ${page + 1} of ${numPages}`;
  byId("previous").disabled = page === 0;
  byId("next").disabled = page >= numPages - 1;
  byId("previous").onclick = () => show({ page: String(page - 1) });
  byId("next").onclick = () => show({ page: String(page + 1) });
}

function addFilters() {
  const steps = [...new Set(rows.map((row) => row.step))].sort((one, other) => other - one);
  const runs = [...new Set(rows.map((row) => row.run))];
  byId("step").append(make("option", { value: "" }, "all steps"), ...steps.map((step) => make("option", { value: step }, `step ${step}`)));
  byId("run").append(make("option", { value: "" }, "all runs"), ...runs.map((run) => make("option", { value: run }, data.runs[run].label)));
  byId("run").hidden = runs.length < 2;
  if (!(view.kind in KINDS)) view.kind = "";
  for (const [id, name] of [["search", "q"], ["step", "step"], ["run", "run"], ["kind", "kind"]]) {
    byId(id).value = view[name];
    byId(id).addEventListener("input", () => show({ [name]: byId(id).value }));
  }
  show({ page: view.page });
}

/* ---- The rest of the page ---- */

async function copyEntry(button) {
  const entry = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(entry.textContent);
  } catch {
    getSelection().selectAllChildren(entry);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
}

function reloadWhileLive() {
  setTimeout(() => {
    const isRead = document.hidden || !byId("reload").checked || String(getSelection());
    if (isRead) reloadWhileLive();
    else location.reload();
  }, data.reloadSeconds * 1000);
}

document.querySelectorAll("[data-goto]").forEach((button) => {
  button.addEventListener("click", () => byId(button.dataset.goto).scrollIntoView({ behavior: "smooth" }));
});
document.querySelectorAll(".copy").forEach((button) => {
  button.addEventListener("click", () => copyEntry(button));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.Plotly && drawCharts());
readView();
addAxis();
addLegend();
addCharts();
if (rows.length) addFilters();
loadPlotly(document.currentScript.nonce)
  .then(drawCharts)
  .then(() => document.body.setAttribute("data-drawn", String(plots.length)))
  .catch((error) => byId("legend").append(`The charts need a browser of 2023 or later (${error}).`));
if (data.reloadSeconds) reloadWhileLive();
