"use strict";

// ---- charts --------------------------------------------------------------------------------------

const charts = [];
for (const figure of document.querySelectorAll("figure.chart")) charts.push(draw(figure));

function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const data = uPlot.join(spec.series.map((s) => [s.x, s.y]));
  const show = (value) => (value == null ? "–" : Number(value.toPrecision(5)).toLocaleString("en"));
  const height = 320;
  const options = {
    width: Math.max(figure.clientWidth, 240), height,
    scales: { x: { time: false }, y: { distr: spec.log ? 3 : 1 } },
    axes: [
      { label: spec.x, values: (_, ticks) => ticks.map(short) },
      { label: spec.y, size: 64, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : short(tick))) },
    ],
    series: [
      { label: spec.x, value: (_, value) => show(value) },
      ...spec.series.map((s) => ({
        label: s.name, stroke: s.color, width: s.width, dash: s.dash, spanGaps: true,
        points: { show: s.points, size: 5 }, value: (_, value) => show(value),
      })),
    ],
    cursor: { focus: { prox: 24 }, dataIdx: nearest },
    focus: { alpha: 0.25 },
  };
  const chart = new uPlot(options, data, figure);
  new ResizeObserver(() => chart.setSize({ width: Math.max(figure.clientWidth, 240), height })).observe(figure);
  return { chart, names: spec.series.map((s) => s.name) };
}

// The point of a series that is next to the mouse: series are logged at different steps.
function nearest(chart, series, hovered, x) {
  const [xs, ys] = [chart.data[0], chart.data[series]];
  if (series == 0 || ys[hovered] != null) return hovered;
  let before = hovered, after = hovered;
  while (before > 0 && ys[before] == null) before--;
  while (after < ys.length - 1 && ys[after] == null) after++;
  if (ys[before] == null) return after;
  if (ys[after] == null) return before;
  return x - xs[before] < xs[after] - x ? before : after;
}

function short(number) {
  const size = Math.abs(number);
  if (size >= 1e9) return number / 1e9 + "G";
  if (size >= 1e6) return number / 1e6 + "M";
  if (size >= 1e4) return number / 1e3 + "k";
  return size > 0 && size < 1e-3 ? number.toExponential(0) : String(Number(number.toPrecision(6)));
}

// ---- tables --------------------------------------------------------------------------------------

for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (head) sort(table, head.cellIndex, head.ariaSort == "ascending" ? "descending" : "ascending");
  });
}

function sort(table, column, order) {
  const key = (row) => {
    const text = row.cells[column].textContent.trim();
    const number = Number(text.replaceAll(",", "").split("/")[0]);
    return text == "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);  // what is missing comes last, in both orders
    const sign = order == "ascending" ? 1 : -1;
    return sign * (typeof a == "number" && typeof b == "number" ? a - b : String(a).localeCompare(String(b)));
  };
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort(([a], [b]) => compare(a, b));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  for (const head of table.tHead.rows[0].cells) head.ariaSort = head.cellIndex == column ? order : "none";
  remember("sort", [column, order]);
}

const filter = document.getElementById("filter");
if (filter) filter.addEventListener("input", apply);

// Show the rows that contain all words of the filter, and the series of their names.
function apply() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const hidden = new Set();
  for (const row of document.querySelectorAll("table.sortable tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    if (row.hidden) hidden.add(row.dataset.name);
  }
  for (const { chart, names } of charts)
    names.forEach((name, i) => chart.setSeries(i + 1, { show: !hidden.has(name) }));
  remember("filter", filter.value);
}

// ---- what a page that refreshes itself remembers ---------------------------------------------------

function remember(name, value) {
  try { sessionStorage.setItem(location.pathname + name, JSON.stringify(value)); } catch { /* no storage */ }
}

function recall(name) {
  try { return JSON.parse(sessionStorage.getItem(location.pathname + name)); } catch { return null; }
}

if (recall("sort")) for (const table of document.querySelectorAll("table.sortable")) sort(table, ...recall("sort"));
if (filter && recall("filter")) { filter.value = recall("filter"); apply(); }
