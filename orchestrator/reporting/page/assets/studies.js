"use strict";
// Profiles of steps, training curves and prices over time, for runs that have them.

const PROFILES = rowsOf("profiles");
const LOADS = rowsOf("loads");
const LEARNING = rowsOf("learning");

/** Colour of the name at an index: the palette first, then paler colours. */
const colourAt = (at) => {
  const colour = `var(--s${at % COLOURS})`;
  return at < COLOURS ? colour : `color-mix(in srgb, ${colour} 45%, var(--card))`;
};

/** Stacked bars of shares; large parts are named inside. */
function barsChart(holder, rows) {
  const bars = [...new Set(rows.map((row) => row.name))];
  const parts = [...new Set(rows.map((row) => row.part))];
  const title = (row) => `${row.name}\n${row.part}: ${percent(row.share, 3)} of the time, ${short(row.seconds)} s`;
  const chart = element("div", { class: "chart" });
  const swatches = parts.map((part, at) => element("span", {}, swatch(colourAt(at)), part));
  holder.replaceChildren(chart, element("p", { class: "key" }, ...swatches));
  const stack = Plot.stackX({ x: "share", y: "name", z: "part", order: parts });
  drawnRows(chart, bars, 30, (room, width) => ({
    x: { domain: [0, 1], label: "share of the time →", tickFormat: (v) => percent(v), ticks: width < 400 ? 3 : 6 },
    marks: [
      Plot.barX(rows, { ...stack, insetTop: room, fill: (row) => colourAt(parts.indexOf(row.part)), stroke: CANVAS, strokeWidth: 1 }),
      Plot.text(rows, {
        ...stack, dy: room / 2, text: (row) => (row.share * width / 7.2 > row.part.length + 1 ? row.part : ""),
        fill: (row) => (parts.indexOf(row.part) < COLOURS ? CANVAS : "currentColor"), fontWeight: 600,
      }),
      Plot.tip(rows, Plot.pointer({ ...stack, title, fill: CANVAS, stroke: "var(--line)" })),
    ],
  }), `Shares of the time of ${bars.length} profiles: ${parts.join(", ")}.`);
}

/** Symbol of a key: a full square, or a hollow symbol. */
function swatch(colour, symbol = null) {
  const svg = mark(symbol === null ? "measured" : "simulated", colour);
  svg.firstChild.setAttribute("d", symbol === null ? "M-5 -5H5V5H-5Z" : d3.symbol(symbol, 60)());
  return svg;
}

// Side by side, since they hardly differ after a little training.
const TRAINING = {
  before: { colour: "var(--s0)", symbol: d3.symbolSquare, dx: -6 },
  after: { colour: "var(--s1)", symbol: d3.symbolTriangle, dx: 6 },
};

/** Tokens of each expert, before training and after it. */
function loadsChart(holder, rows) {
  const figures = d3.groups(rows, (row) => row.name).map(([name, own]) => {
    const chart = element("div", { class: "chart" });
    return { name, own, chart, figure: element("figure", {}, element("figcaption", {}, name), chart) };
  });
  const swatches = Object.entries(TRAINING).map(([when, { colour, symbol }]) => element("span", {}, swatch(colour, symbol), `${when} training`));
  holder.replaceChildren(...figures.map(({ figure }) => figure));
  holder.after(element("p", { class: "key" }, ...swatches));
  const most = d3.max(rows, (row) => row.tokens);
  for (const { name, own, chart } of figures) {
    drawn(chart, (width) => plot({
      width, height: 210,
      x: { type: "point", label: "expert →", padding: 0.5 },
      y: { domain: [0, 1.08 * most], label: "↑ tokens per example", grid: true, ticks: 5 },
      marks: [
        ...Object.entries(TRAINING).flatMap(([when, { colour, symbol, dx }]) => {
          const then = own.filter((row) => row.when === when);
          return [
            Plot.ruleX(then, { x: "expert", y1: 0, y2: "tokens", stroke: colour, strokeWidth: 6, strokeOpacity: 0.35, dx }),
            Plot.dot(then, { x: "expert", y: "tokens", r: 4.5, symbol, strokeWidth: 1.8, stroke: colour, fill: CANVAS, dx }),
          ];
        }),
        tip(own, { x: "expert", y: "tokens" }, (row) => `expert ${row.expert}, ${row.when} training\n${short(row.tokens)} tokens per example`),
      ],
    }, `Tokens of each expert of ${name}, before and after training.`));
  }
}

const SYMBOLS = [d3.symbolCircle, d3.symbolSquare, d3.symbolTriangle, d3.symbolDiamond2, d3.symbolStar];
const CURVES = d3.groups(LEARNING, (row) => row.curve).map(([key, rows], at) => ({
  key, rows, name: rows[0].name, colour: colourAt(at), symbol: SYMBOLS[at % SYMBOLS.length],
}));

/** A score on the held-out examples, epoch by epoch. */
function learningChart(holder, score, label, format = short) {
  const epochs = Math.max(1, d3.max(LEARNING, (row) => row.epoch));
  drawn(holder, (width) => plot({
    width, height: 260, marginRight: 24,
    x: { label: "epoch →", tickFormat: "d", ticks: Math.min(10, epochs), domain: [0, epochs] },
    y: { label: `↑ ${label}`, grid: true, ticks: 5, zero: true, tickFormat: (v) => format(v) },
    marks: [
      ...CURVES.flatMap(({ rows, colour, symbol }) => [
        Plot.line(rows, { x: "epoch", y: score, stroke: colour, strokeWidth: 2 }),
        Plot.dot(rows, { x: "epoch", y: score, r: 4, symbol, stroke: colour, strokeWidth: 1.6, fill: CANVAS }),
      ]),
      tip(LEARNING, { x: "epoch", y: score }, (row) => `${row.name}\nepoch ${row.epoch}: ${label} ${format(row[score])}`),
    ],
  }, `${label} of ${CURVES.length} curves, epoch by epoch.`));
}

const PRICES = rowsOf("prices").map((row) => ({ ...row, day: new Date(row.date) }));
const PRICED = d3.groups(PRICES, (row) => row.gpu).map(([gpu], at) => ({ gpu, colour: colourAt(at), symbol: SYMBOLS[at % SYMBOLS.length] }));

/** What each GPU has cost in a market, snapshot by snapshot. */
function pricesChart(holder, rows, market) {
  if (!rows.length) return nothing(holder, `No snapshot has a ${market} price.`);
  const scale = scaleOf(rows.map((row) => row.usd), dollars);
  const label = `↑ dollars per GPU and hour${scale.type === "log" ? ", log scale" : ""}`;
  return drawn(holder, (width) => plot({
    width, height: 280, marginRight: 24, marginLeft: 60,
    x: { type: "utc", label: "snapshot →", domain: d3.extent(PRICES, (row) => row.day), ticks: width < 400 ? 3 : 6 },
    y: { ...scale, label, grid: true },
    marks: [
      ...PRICED.flatMap(({ gpu, colour, symbol }) => {
        const own = rows.filter((row) => row.gpu === gpu);
        return [
          Plot.line(own, { x: "day", y: "usd", stroke: colour, strokeWidth: 2, curve: "step-after" }),
          Plot.dot(own, { x: "day", y: "usd", r: 4, symbol, stroke: colour, strokeWidth: 1.6, fill: CANVAS }),
        ];
      }),
      tip(rows, { x: "day", y: "usd" }, (row) => `${row.gpu}, ${row.market}\n${dollars(row.usd)} an hour on ${row.date}`),
    ],
  }, `Lowest ${market} prices of ${new Set(rows.map((row) => row.gpu)).size} GPUs in each snapshot.`));
}

if (PRICES.length) {
  for (const market of ["on-demand", "spot"]) {
    pricesChart(document.getElementById(`${market}-prices`), PRICES.filter((row) => row.market === market), market);
  }
  document.getElementById("prices-key").replaceChildren(
    ...PRICED.map(({ gpu, colour, symbol }) => element("span", {}, swatch(colour, symbol), gpu)));
  numbersOf("prices-numbers", { caption: "Lowest prices", most: 40, columns: [
    { label: "GPU", of: (row) => row.gpu, head: true }, { label: "market", of: (row) => row.market }, { label: "snapshot", of: (row) => row.date },
    { label: "$/h per GPU", of: (row) => row.usd, number: true, show: (row) => short(row.usd, 4) },
  ] }, () => PRICES)();
}
if (PROFILES.length) {
  for (const chart of ["stages", "layers", "inside"]) {
    barsChart(document.getElementById(`profile-${chart}`), PROFILES.filter((row) => row.chart === chart));
  }
  loadsChart(document.getElementById("loads-charts"), LOADS);
  document.getElementById("loads").hidden = LOADS.length === 0;
  const named = (label, name) => ({ label, of: (row) => row[name] });
  const number = (label, name, format = short) => ({ label, of: (row) => row[name], number: true, show: (row) => format(row[name]) });
  numbersOf("profile-numbers", { caption: "Where the time goes", most: 30, columns: [{ ...named("part", "part"), head: true }, named("chart", "chart"), named("profile", "bar"), number("seconds", "seconds"), number("share of the time", "share", percent), number("share of the FLOPs", "flops", percent), named("GPU", "gpu"), named("model", "model"), named("recipe", "recipe")] }, () => PROFILES)();
  numbersOf("loads-numbers", { caption: "Tokens of each expert", most: 32, columns: [{ label: "expert", of: (row) => row.expert, head: true }, named("training", "when"), number("tokens per example", "tokens"), named("profile", "bar"), named("GPU", "gpu"), named("model", "model"), named("recipe", "recipe")] }, () => LOADS)();
}
if (LEARNING.length) {
  learningChart(document.getElementById("loss-chart"), "loss", "held-out loss");
  learningChart(document.getElementById("accuracy-chart"), "accuracy", "accuracy", percent);
  document.getElementById("learning-key").replaceChildren(
    ...CURVES.map(({ name, colour, symbol }) => element("span", {}, swatch(colour, symbol), name)));
  numbersOf("learning-numbers", { caption: "Training curves", most: 40, columns: [
    { label: "curve", of: (row) => row.name, head: true }, { label: "epoch", of: (row) => row.epoch, number: true },
    { label: "training loss", of: (row) => row.train_loss, number: true, show: (row) => short(row.train_loss) },
    { label: "held-out loss", of: (row) => row.loss, number: true, show: (row) => short(row.loss) },
    { label: "accuracy", of: (row) => row.accuracy, number: true, show: (row) => percent(row.accuracy, 3) },
    { label: "learning rate", of: (row) => row.rate, number: true }, { label: "batch size", of: (row) => row.batch, number: true }, { label: "seed", of: (row) => row.seed, number: true },
    { label: "data", of: (row) => row.data }, { label: "recipe", of: (row) => row.recipe }, { label: "GPU", of: (row) => row.gpu },
  ] }, () => LEARNING)();
}
