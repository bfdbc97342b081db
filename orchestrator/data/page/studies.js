"use strict";
// Where the time of steps goes, and how training goes: of runs that asked for it.

const PROFILES = rowsOf("profiles");
const LOADS = rowsOf("loads");
const LEARNING = rowsOf("learning");

/** A colour for each of so many names: those of the palette, then paler ones. */
const colourAt = (at) => {
  const colour = `var(--s${at % COLOURS})`;
  return at < COLOURS ? colour : `color-mix(in srgb, ${colour} 45%, var(--card))`;
};

/** Stacked bars, a part each as long as its share; the larger ones are named inside. */
function barsChart(holder, rows) {
  const name = (row) => `${row.model} · ${row.bar}`;
  const bars = [...new Set(rows.map(name))];
  const parts = [...new Set(rows.map((row) => row.part))];
  const margin = labelMargin(bars);
  const title = (row) => `${name(row)}\n${row.part}: ${percent(row.share, 3)} of the time, ${short(row.seconds)} s`;
  const chart = element("div", { class: "chart" });
  const swatches = parts.map((part, at) => element("span", {}, swatch(colourAt(at)), part));
  holder.replaceChildren(chart, element("p", { class: "key" }, ...swatches));
  drawn(chart, (width) => {
    const room = (width - margin(width)) / 7.2;
    const stack = Plot.stackX({ x: "share", y: name, z: "part", order: parts });
    return plot({
      width, height: 56 + 30 * bars.length, marginLeft: margin(width), marginTop: 8,
      x: { domain: [0, 1], label: "part of the time →", tickFormat: (v) => percent(v), ticks: width < 500 ? 3 : 6 },
      y: { domain: bars, label: null, tickSize: 0 },
      marks: [
        Plot.barX(rows, { ...stack, fill: (row) => colourAt(parts.indexOf(row.part)), stroke: CANVAS, strokeWidth: 1 }),
        Plot.text(rows, {
          ...stack, text: (row) => (row.share * room > row.part.length + 1 ? row.part : ""),
          fill: (row) => (parts.indexOf(row.part) < COLOURS ? CANVAS : "currentColor"), fontWeight: 600,
        }),
        Plot.tip(rows, Plot.pointer({ ...stack, title, fill: CANVAS, stroke: "var(--line)" })),
      ],
    }, `Shares of the time of ${bars.length} profiles: ${parts.join(", ")}.`);
  });
}

function swatch(colour) {
  const svg = mark("measured", colour);
  svg.firstChild.setAttribute("d", "M-5 -5H5V5H-5Z");
  return svg;
}

/** Tokens of each expert, before training and after it. */
function loadsChart(holder, rows) {
  const names = [...new Set(rows.map((row) => `${row.model} · ${row.bar}`))];
  const figures = names.map((name) => {
    const own = rows.filter((row) => `${row.model} · ${row.bar}` === name);
    const chart = element("div", { class: "chart" });
    return { name, own, chart, figure: element("figure", {}, element("figcaption", {}, name), chart) };
  });
  holder.replaceChildren(...figures.map((each) => each.figure));
  const most = d3.max(rows, (row) => row.tokens);
  for (const { name, own, chart } of figures) {
    drawn(chart, (width) => plot({
      width, height: 210,
      x: { type: "point", label: "expert →", padding: 0.5 },
      y: { domain: [0, most], label: "↑ tokens a query", grid: true, ticks: 5 },
      marks: [
        Plot.ruleX(own.filter((row) => row.when === "before"), { x: "expert", y1: 0, y2: "tokens", stroke: "var(--s0)", strokeWidth: 6, strokeOpacity: 0.35 }),
        Plot.dot(own, {
          x: "expert", y: "tokens", r: 5, symbol: (row) => row.when, strokeWidth: 1.8,
          stroke: (row) => (row.when === "before" ? "var(--s0)" : "var(--s1)"), fill: CANVAS,
        }),
        tip(own, { x: "expert", y: "tokens" }, (row) => `expert ${row.expert}, ${row.when} training\n${short(row.tokens)} tokens a query`),
      ],
      symbol: { domain: ["before", "after"], range: [d3.symbolSquare, d3.symbolTriangle] },
    }, `Tokens of each expert of ${name}, before and after training.`));
  }
}

/** A score of the held-out queries, epoch by epoch. */
function learningChart(holder, rows, score, label) {
  const curves = [...new Set(rows.map((row) => row.curve))];
  const colour = (row) => colourAt(curves.indexOf(row.curve));
  const symbols = [d3.symbolCircle, d3.symbolSquare, d3.symbolTriangle, d3.symbolDiamond2, d3.symbolStar];
  drawn(holder, (width) => plot({
    width, height: 260, marginRight: 24,
    x: { label: "epoch →", tickFormat: "d", ticks: Math.min(10, d3.max(rows, (row) => row.epoch) + 1), domain: [0, Math.max(1, d3.max(rows, (row) => row.epoch))] },
    y: { label: `↑ ${label}`, grid: true, ticks: 5, zero: true },
    marks: [
      Plot.line(rows, { x: "epoch", y: score, z: "curve", stroke: colour, strokeWidth: 2 }),
      ...curves.map((curve, at) => Plot.dot(rows.filter((row) => row.curve === curve), {
        x: "epoch", y: score, r: 4, symbol: symbols[at % symbols.length], stroke: colour, strokeWidth: 1.6, fill: CANVAS,
      })),
      Plot.text(curves.map((curve) => rows.findLast((row) => row.curve === curve)), {
        x: "epoch", y: score, text: "curve", textAnchor: "end", dy: -12, fill: colour, stroke: CANVAS, strokeWidth: 4,
      }),
      tip(rows, { x: "epoch", y: score }, (row) => `${row.curve}\nepoch ${row.epoch}: ${label} ${short(row[score])}`),
    ],
  }, `${label} of ${curves.length} curves, epoch by epoch.`));
}

if (PROFILES.length) {
  for (const of of ["stages", "layers", "inside"]) {
    barsChart(document.getElementById(`profile-${of}`), PROFILES.filter((row) => row.of === of));
  }
  loadsChart(document.getElementById("loads-charts"), LOADS);
  document.getElementById("loads").hidden = LOADS.length === 0;
  const named = (label, name) => ({ label, of: (row) => row[name] });
  const number = (label, name, said = short) => ({ label, of: (row) => row[name], number: true, show: (row) => said(row[name]) });
  numbersOf("profile-numbers", { caption: "Where the time goes", most: 30, columns: [{ ...named("part", "part"), head: true }, named("of", "of"), named("profile", "bar"), number("seconds", "seconds"), number("of the time", "share", percent), number("of the FLOPs", "flops", percent), named("GPU", "gpu"), named("model", "model"), named("recipe", "recipe")] }, () => PROFILES)();
  numbersOf("loads-numbers", { caption: "Tokens of each expert", most: 32, columns: [{ label: "expert", of: (row) => row.expert, head: true }, named("training", "when"), number("tokens a query", "tokens"), named("profile", "bar"), named("GPU", "gpu"), named("model", "model")] }, () => LOADS)();
}
if (LEARNING.length) {
  learningChart(document.getElementById("loss-chart"), LEARNING, "loss", "held-out loss");
  learningChart(document.getElementById("accuracy-chart"), LEARNING, "accuracy", "accuracy");
  numbersOf("learning-numbers", { caption: "Curves of learning", most: 40, columns: [
    { label: "curve", of: (row) => row.curve, head: true }, { label: "epoch", of: (row) => row.epoch, number: true },
    { label: "loss in training", of: (row) => row.train_loss, number: true, show: (row) => short(row.train_loss) },
    { label: "held-out loss", of: (row) => row.loss, number: true, show: (row) => short(row.loss) },
    { label: "accuracy", of: (row) => row.accuracy, number: true, show: (row) => percent(row.accuracy, 3) },
    { label: "data", of: (row) => row.data }, { label: "recipe", of: (row) => row.recipe }, { label: "GPU", of: (row) => row.gpu },
  ] }, () => LEARNING)();
}
