"use strict";
// Two runs side by side.

const CHANGES = rowsOf("changes");

function changesChart(holder, rows) {
  if (!rows.length) return nothing(holder, "No cell was timed at the same batch size in both.");
  const name = (row) => `${row.gpu} · ${row.job}`;
  const names = [...new Set(rows.map(name))];
  const title = (row) => `${name(row)}\n${row.recipe}\nbatch ${row.batch}: ${short(row.ratio)} (${span(row.low, row.high)}), ${row.verdict}`;
  const shape = (row) => ({ ...row, y: name(row), basis: row.basis_before === "measured" && row.basis_after === "measured" ? "measured" : "simulated" });
  const shown = rows.map(shape);
  const margin = labelMargin(names);
  return drawn(holder, (width) => plot({
    width, height: 60 + 24 * names.length, marginLeft: margin(width), marginTop: 10,
    x: { type: d3.max(rows, (row) => row.high) > 4 * d3.min(rows, (row) => row.low) ? "log" : "linear", label: "times as fast →", grid: true, ticks: width < 500 ? 3 : 7, tickFormat: (v) => short(v) },
    y: { domain: names, label: null, tickSize: 0 },
    marks: [
      Plot.ruleX([1], { stroke: "currentColor", strokeDasharray: "4 3" }),
      Plot.ruleY(shown, { x1: "low", x2: "high", y: "y", stroke: "var(--s0)", strokeWidth: 6, strokeOpacity: 0.3 }),
      ...points(shown, { x: "ratio", y: "y" }, "var(--s0)", 5),
      tip(shown, { x: "ratio", y: "y" }, title),
    ],
  }, `Queries per second of ${rows.length} cells, the second run over the first.`));
}

changesChart(document.getElementById("speeds-chart"), CHANGES);
numbersOf("speeds-numbers", {
  caption: "Queries per second of both runs", most: 20, columns: [
    { label: "GPU", of: (row) => row.gpu, head: true, under: (row) => row.job },
    { label: "recipe", of: (row) => row.recipe },
    { label: "batch", of: (row) => row.batch, number: true },
    { label: "before", of: (row) => row.before, number: true, show: (row) => short(row.before), under: (row) => row.basis_before },
    { label: "after", of: (row) => row.after, number: true, show: (row) => short(row.after), under: (row) => row.basis_after },
    { label: "ratio", of: (row) => row.ratio, number: true, show: (row) => short(row.ratio), under: (row) => span(row.low, row.high) },
    { label: "", of: (row) => row.verdict },
  ],
}, () => CHANGES)();
document.querySelectorAll("[data-basis]").forEach((each) => each.prepend(mark(each.dataset.basis)));
document.documentElement.dataset.ready = "yes";
