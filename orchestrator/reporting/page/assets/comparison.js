"use strict";
// Two runs side by side.

const CHANGES = rowsOf("changes");

/** The interval of a ratio; empty for two simulations, which share their error. */
const interval = (row) => (row.low === null ? "" : span(row.low, row.high));

function changesChart(holder, rows) {
  if (!rows.length) return nothing(holder, "No cell was timed at the same batch size in both runs.");
  const title = (row) => `${row.gpu} · ${row.job}\n${row.recipe}\nbatch ${row.batch}: ${short(row.ratio)}${interval(row) && ` (${interval(row)})`}, ${row.verdict}`;
  const shape = (row) => ({ ...row, basis: row.basis_before === "measured" && row.basis_after === "measured" ? "measured" : "simulated" });
  const shown = rows.map(shape);
  const ends = rows.flatMap((row) => [row.low ?? row.ratio, row.high ?? row.ratio]);
  return drawnRows(holder, rows.map((row) => row.name), 24, (room, width) => ({
    x: { ...labelled({ type: d3.max(ends) > 4 * d3.min(ends) ? "log" : "linear" }, "speed ratio"), grid: true, ticks: width < 400 ? 3 : 7 },
    marks: [
      Plot.ruleX([1], { stroke: "currentColor", strokeDasharray: "4 3" }),
      Plot.ruleY(shown.filter(interval), { x1: "low", x2: "high", y: "name", stroke: "var(--s0)", strokeWidth: 6, strokeOpacity: 0.3, dy: room / 2 }),
      ...points(shown, { x: "ratio", y: "name", dy: room / 2 }, "var(--s0)", 5),
      tip(shown, { x: "ratio", y: "name" }, title),
    ],
  }), `Examples per second of ${rows.length} cells, the second run over the first.`);
}

changesChart(document.getElementById("speeds-chart"), CHANGES);
numbersOf("speeds-numbers", {
  caption: "Examples per second of both runs", most: 20, columns: [
    { label: "GPU", of: (row) => row.gpu, head: true, under: (row) => row.job },
    { label: "recipe", of: (row) => row.recipe },
    { label: "batch size", of: (row) => row.batch, number: true },
    { label: "before", of: (row) => row.before, number: true, show: (row) => short(row.before), under: (row) => row.basis_before },
    { label: "after", of: (row) => row.after, number: true, show: (row) => short(row.after), under: (row) => row.basis_after },
    { label: "ratio", of: (row) => row.ratio, number: true, show: (row) => short(row.ratio), under: interval, csv: ["ratio", "low", "high"].map((name) => [name, (r) => r[name]]) },
    { label: "verdict", of: (row) => row.verdict },
  ],
}, () => CHANGES)();
document.querySelectorAll("[data-basis]").forEach((part) => part.prepend(mark(part.dataset.basis)));
document.documentElement.dataset.ready = "yes";
