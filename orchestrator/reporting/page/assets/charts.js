"use strict";
// The charts. Each draws rows of the page's tables and nothing else.

const CANVAS = "var(--card)";
const COLOURS = 8;
const FEW_OFFERS = 12;
const MOST_NAMES = 12;  // of GPUs in the chart of costs
const MARGINS = { marginLeft: 52, marginBottom: 38, marginTop: 22, marginRight: 18 };
const GPUS = [...new Set(CELLS.map((cell) => cell.gpu))];
const gpuColour = (gpu) => `var(--s${GPUS.indexOf(gpu) % COLOURS})`;

/** Draws a chart at the width of its holder, and again when the width changes. */
function drawn(holder, make) {
  let width = 0;
  const draw = () => {
    const now = Math.floor(holder.clientWidth);
    if (now < 40) return;
    width = now;
    holder.replaceChildren(make(width));
  };
  holder.observer?.disconnect();
  holder.observer = new ResizeObserver(() => {
    if (Math.abs(holder.clientWidth - width) > 8) requestAnimationFrame(draw);
  });
  holder.observer.observe(holder);
  draw();
}

/** Replaces a chart by the reason for its absence. */
function nothing(holder, why) {
  holder.observer?.disconnect();
  holder.replaceChildren(element("p", { class: "note" }, why));
}

/**
 * Draws a chart with a row for each name. Names stand beside the rows, or above them if narrow.
 *
 * make(room, width) returns the other options of the plot. room is the height of a name above its
 * row: the insetTop of bars; dots and rules move down by half of it. width is that of the drawing.
 */
function drawnRows(holder, names, size, make, label) {
  const longest = 6.7 * d3.max(names, (name) => name.length);
  return drawn(holder, (width) => {
    const isBeside = longest + 14 <= 0.5 * width;
    const marginLeft = isBeside ? longest + 14 : 14;
    const room = isBeside ? 0 : 3 + 15 * Math.ceil(longest / (0.9 * (width - 30)));
    const { marks, ...options } = make(room, width - marginLeft - 18);
    const y = { domain: names, label: null, tickSize: 0, ...(isBeside ? {} : { axis: null }) };
    const above = () => Plot.text(names, {
      y: (name) => name, text: (name) => name, frameAnchor: "left", textAnchor: "start", lineAnchor: "bottom",
      lineWidth: (width - 30) / 12, dx: -6, dy: room - 5 - (size + room) / 2, fill: "currentColor", stroke: CANVAS, strokeWidth: 4,
    });
    return plot({
      width, height: 56 + (size + room) * names.length, marginLeft, marginTop: 10, ...options, y,
      marks: isBeside ? marks : [...marks, above()],
    }, label);
  });
}

function plot(options, label) {
  const svg = Plot.plot({
    ...MARGINS,
    style: { background: "none", fontSize: "12px" },
    ...options,
  });
  const drawing = svg.tagName === "FIGURE" ? svg.querySelector("svg:last-of-type") : svg;
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", label);
  // The drawing has one name; the names that Plot gives its marks are not for screen readers.
  for (const part of drawing.children) part.setAttribute("aria-hidden", "true");
  return svg;
}

/** Points in the shapes of their bases: full if measured, hollow if not. */
function points(rows, channels, colour, size = 4.5) {
  return ["capped", "simulated", "measured"].map((basis) =>
    Plot.dot(rows.filter((row) => row.basis === basis), {
      ...channels, symbol: SHAPES[basis], r: size, strokeWidth: 1.6, stroke: colour,
      fill: IS_FULL[basis] ? colour : CANVAS,
    }));
}

function tip(rows, channels, title) {
  return Plot.tip(rows, Plot.pointer({ ...channels, title, fill: CANVAS, stroke: "var(--line)", fontSize: 12, maxRadius: 30 }));
}

/** A linear scale, or a logarithmic one for values that span more than a factor of six. */
function scaleOf(values, format) {
  const [least, most] = d3.extent(values);
  if (most <= 6 * least) {
    const room = Math.max(0.06 * (most - least), 0.04 * most);
    return { domain: [Math.max(0, least - room), most + room], ticks: 5, tickFormat: (v) => format(v) };
  }
  const decades = d3.range(Math.floor(Math.log10(least)), Math.ceil(Math.log10(most)) + 1);
  const ticks = decades.flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  // A tick that is near an end is part of the scale.
  const [low, high] = [d3.max(ticks.filter((v) => v <= least)), d3.min(ticks.filter((v) => v >= most))];
  const domain = [low > 0.8 * least ? 0.99 * low : 0.93 * least, high < 1.25 * most ? 1.01 * high : 1.07 * most];
  return { type: "log", domain, ticks: ticks.filter((v) => v >= domain[0] && v <= domain[1]), tickFormat: (v) => format(v) };
}

/** How many instances an offer rents, before their name; empty for one. */
const numberOf = (row) => (row.instances > 1 ? `${row.instances} x ` : "");
const without = (row) => (row.left_out ? " without generation" : "");
const priceOf = (row) => `${dollars(row.usd)} in ${hours(row.hours)}${without(row)}`;

function offerTitle(row) {
  return [
    `${row.cell.gpu}, ${row.basis}`,
    `${numberOf(row)}${row.provider} ${row.instance} ${row.market}`,
    `${dollars(row.usd)} (${span(row.usd_low, row.usd_high, cents)})`,
    `${hours(row.hours)} (${span(row.hours_low, row.hours_high)})${without(row)}`,
    ...(row.as_if_full ? ["if all examples have the full length"] : []),
  ].join("\n");
}

/** Where an offer stands in a drawing of cost against time, in pixels. */
function positionsOf(x, y, width, height) {
  const scaled = (scale, range) => (scale.type === "log" ? d3.scaleLog : d3.scaleLinear)(scale.domain, range);
  const [across, up] = [scaled(x, [MARGINS.marginLeft, width - MARGINS.marginRight]), scaled(y, [height - MARGINS.marginBottom, MARGINS.marginTop])];
  return (row) => [across(row.hours), up(row.usd)];
}

/** Offsets and anchors of the names of GPUs beside their points, so that no two overlap. */
function besidePoints(rows, positionOf, width) {
  const taken = [];
  const heights = [-14, 16, -29, 31, -44, 46, -59, 61, -74, 76];
  return rows.map((row) => {
    const [x, y] = positionOf(row);
    const long = 8 * row.cell.gpu.length;
    const sides = x > width / 2 ? ["end", "start"] : ["start", "end"];
    const places = heights.flatMap((dy) => sides.map((textAnchor) => {
      const left = textAnchor === "end" ? x - 10 - long : x + 10;
      return { textAnchor, dx: textAnchor === "end" ? -10 : 10, dy, left, top: y + dy - 7 };
    }));
    const isFree = ({ left, top }) => left >= 0 && left + long <= width && top >= 0
      && taken.every((other) => left > other.left + other.long || other.left > left + long || Math.abs(top - other.top) > 14);
    const { left, top, ...offset } = places.find(isFree) ?? places[0];
    taken.push({ left, top, long });
    return { row, ...offset };
  });
}

/** Cost against time: intervals, and the Pareto front. */
function costChart(holder, beyond, rows) {
  beyond.textContent = "";
  if (!rows.length) return nothing(holder, "No offer matches.");
  const byUsd = d3.sort(rows, (row) => row.usd);
  const firsts = [...d3.rollup(byUsd, (offers) => offers[0], (row) => row.cell.gpu).values()];
  const front = [];
  for (const row of d3.sort(rows, (r) => r.hours, (r) => r.usd)) {
    if (!front.length || row.usd < front.at(-1).usd) front.push(row);
  }
  const notable = [...new Set([...firsts, ...front])];
  const named = [...new Set([...front.filter((row) => firsts.includes(row)), ...firsts])].slice(0, MOST_NAMES);
  // Offers with idle GPUs are so expensive that they would squeeze all others.
  const most = rows.length > FEW_OFFERS ? 1.3 * d3.max(notable, (row) => row.usd_high) : Infinity;
  const near = rows.filter((row) => row.usd <= most);
  const far = rows.length - near.length;
  beyond.textContent = [
    far ? `More expensive offers, listed only in the table: ${far}.` : "",
    named.length < firsts.length ? `Of ${firsts.length} GPUs, ${named.length} have their names: the unbeaten ones, then the cheapest.` : "",
  ].join(" ");
  const at = { x: "hours", y: "usd" };
  const colour = (row) => gpuColour(row.cell.gpu);
  const ends = (name) => [...notable.flatMap((row) => [row[`${name}_low`], row[`${name}_high`]]), ...near.map((row) => row[name])];
  const [x, y] = [scaleOf(ends("hours"), short), scaleOf(ends("usd"), dollars)];
  const label = `Cost against time of ${rows.length} offers. The cheapest: ${offerTitle(byUsd[0]).replaceAll("\n", ", ")}.`;
  const height = (width) => Math.max(260, Math.min(380, width * 0.6));
  return drawn(holder, (width) => plot({
    width, height: height(width),
    x: { ...labelled(x, "hours"), grid: true },
    y: { ...labelled(y, "dollars", upwards), grid: true },
    marks: [
      Plot.line(front, { ...at, curve: "step-after", stroke: "currentColor", strokeDasharray: "2 4", strokeOpacity: 0.7 }),
      Plot.link(notable, { x1: "hours_low", x2: "hours_high", y1: "usd_low", y2: "usd_high", stroke: colour, strokeWidth: 3, strokeOpacity: 0.35, strokeLinecap: "round" }),
      ...points(near.filter((row) => !notable.includes(row)), at, colour, 2.8),
      ...points(notable, at, colour, 5.5),
      Plot.dot([byUsd[0]], { ...at, r: 11, stroke: "currentColor", strokeWidth: 1.5 }),
      ...besidePoints(named, positionsOf(x, y, width, height(width)), width).map(({ row, ...offset }) => Plot.text([row], {
        ...at, ...offset, text: () => row.cell.gpu, fill: colour, stroke: CANVAS, strokeWidth: 5, fontWeight: 600,
      })),
      tip(near, at, offerTitle),
    ],
  }, label));
}

/** One small chart for each GPU, side by side, with the same scales. */
function forEachGpu(holder, rowsOfAll, make) {
  const gpus = GPUS.filter((gpu) => rowsOfAll.some((row) => row.cell.gpu === gpu));
  const figures = gpus.map((gpu) => {
    const chart = element("div", { class: "chart" });
    return { gpu, chart, figure: element("figure", {}, element("figcaption", {}, gpu), chart) };
  });
  holder.replaceChildren(...figures.map(({ figure }) => figure));
  for (const { gpu, chart } of figures) make(chart, gpu, (rows) => rows.filter((row) => row.cell.gpu === gpu));
  return gpus.length;
}

const sparsities = (rows) => d3.sort(new Set(rows.map((row) => row.cell.sparsity)));
const DASHES = [null, "7 4", "2 3", "9 3 2 3"];

/** Lines of one cell, stack and basis each, with the colour and dash of their sparsity. */
function bySparsity(rows, all, draw) {
  const order = sparsities(all);
  const curve = (row) => [CELLS.indexOf(row.cell), row.stack ?? row.software, row.basis].join(" ");
  return [...d3.group(rows, curve).values()].flatMap((ofCurve) => {
    const at = order.indexOf(ofCurve[0].cell.sparsity);
    return draw(ofCurve, { colour: `var(--s${at % COLOURS})`, dash: DASHES[at % DASHES.length] });
  });
}

/** Names of the rows' stacks, for their tips; empty where a cell has one alone. */
function stackNames(rows) {
  const stacks = d3.rollup(rows, (ofCell) => new Set(ofCell.map((row) => row.stack).filter(Boolean)).size, (row) => row.cell);
  return (row) => (stacks.get(row.cell) > 1 ? `, stack ${row.stack ?? "unknown"}` : "");
}

function sparsityKey(holder, rows) {
  const order = sparsities(rows);
  const cells = order.map((sparsity) => rows.find((row) => row.cell.sparsity === sparsity).cell);
  holder.replaceChildren(...cells.map((cell, at) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("viewBox", "0 0 28 8");
    line.setAttribute("width", "28");
    line.setAttribute("height", "8");
    line.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", "M0 4H28");
    path.setAttribute("stroke", `var(--s${at % COLOURS})`);
    path.setAttribute("stroke-width", "2.5");
    if (DASHES[at % DASHES.length]) path.setAttribute("stroke-dasharray", DASHES[at % DASHES.length]);
    line.append(path);
    return element("span", {}, line, ` ${experts(cell)}`);
  }));
}

/** A scale with the label of its axis, which says where it is logarithmic. */
function labelled(scale, name, arrow = (text) => `${text} →`) {
  return { ...scale, label: arrow(scale.type === "log" ? `${name}, log scale` : name) };
}

const upwards = (text) => `↑ ${text}`;

/** Whole numbers of a logarithmic axis: about so many powers of two, or others where they are few. */
function wholeTicks(least, most, count) {
  const powers = d3.range(Math.ceil(Math.log2(least)), Math.floor(Math.log2(most)) + 1).map((power) => 2 ** power);
  const every = Math.ceil(powers.length / count);
  return powers.length > 2 ? powers.filter((_, n) => n % every === 0) : d3.ticks(least, most, count).filter(Number.isInteger);
}

/** Unit of the batch sizes of rows: a micro-batch is that of each GPU, and several make a step. */
const microBatch = (rows) => `micro-batch${rows.some((row) => row.cell.ranks > 1) ? " per GPU" : ""} (${rows[0].cell.rows})`;
const microBatchOf = (row) => `micro-batch of ${row.batch} ${row.cell.rows}${row.cell.ranks > 1 ? " on each GPU" : ""}`;

function batchScale(rows) {
  const domain = [1, Math.max(d3.max(rows, (row) => row.batch), 2)];
  return { ...labelled({ type: "log", base: 2 }, microBatch(rows)), domain, ticks: wholeTicks(...domain, 6), tickFormat: "d", grid: true };
}

/** Throughput against batch size: visits as points, the law and its 90 % interval. */
function speedCharts(holder, key, probes, laws) {
  const timed = probes.filter((row) => row.examples_per_second !== null && row.basis !== "capped" && row.outcome === "FITS");
  const all = [...timed, ...laws];
  if (!timed.length) return nothing(holder, "No steps were timed.");
  sparsityKey(key, all);
  const stack = stackNames(timed);
  const most = (gpu) => d3.max([...gpu(timed).map((row) => row.examples_per_second), ...gpu(laws).map((row) => row.examples_per_second_high)]);
  const title = (row) => [
    `${row.cell.gpu}, ${experts(row.cell)}, ${row.basis}${stack(row)}`,
    microBatchOf(row),
    `${short(row.examples_per_second)} ${row.cell.rows}/s, steps of ${short(row.step_seconds)} s`,
  ].join("\n");
  return forEachGpu(holder, timed, (chart, gpu, own) => drawn(chart, (width) => plot({
    width, height: 230,
    x: batchScale(own(all)),
    y: { domain: [0, most(own)], label: upwards(`${timed[0].cell.rows}/s`), grid: true, ticks: 5 },
    marks: [
      ...bySparsity(own(laws), all, (rows, { colour, dash }) => [
        Plot.areaY(rows, { x: "batch", y1: "examples_per_second_low", y2: "examples_per_second_high", fill: colour, fillOpacity: 0.16 }),
        Plot.line(rows, { x: "batch", y: "examples_per_second", stroke: colour, strokeWidth: 2, strokeDasharray: dash }),
      ]),
      ...bySparsity(own(timed), all, (rows, { colour }) => points(rows, { x: "batch", y: "examples_per_second" }, colour)),
      tip(own(timed), { x: "batch", y: "examples_per_second" }, title),
    ],
  }, `Throughput on ${gpu} against batch size, with the law and its 90 % interval.`)));
}

/** Peak memory against batch size: what fitted, what did not, the law, and the limit. */
function memoryCharts(holder, key, probes, laws) {
  const peaked = probes.filter((row) => row.peak_gib !== null || row.outcome === "OUT_OF_MEMORY");
  if (!peaked.some((row) => row.peak_gib !== null)) return nothing(holder, "No peak was measured.");
  sparsityKey(key, peaked);
  const stack = stackNames(peaked);
  const [unit, name] = d3.max(peaked, (row) => row.limit_gib) < 1 ? [1024, "MiB"] : [1, "GiB"];
  const peak = (row) => unit * row.peak_gib;
  const title = (row) => [
    `${row.cell.gpu}, ${experts(row.cell)}, ${row.basis}${stack(row)}`,
    `${microBatchOf(row)}: ${outcomeOf(row)}`,
    row.peak_gib === null ? "" : `${short(peak(row))} ${name} at most`,
  ].join("\n");
  return forEachGpu(holder, peaked, (chart, gpu, own) => {
    const probesOfGpu = own(peaked);
    const limit = unit * d3.min(probesOfGpu, (row) => row.limit_gib);
    const fitted = probesOfGpu.filter((row) => row.peak_gib !== null);
    const missed = probesOfGpu.filter((row) => row.outcome === "OUT_OF_MEMORY" || row.outcome === "THRASHING");
    const inside = own(laws).filter((row) => unit * row.gib < 1.08 * limit);
    drawn(chart, (width) => plot({
      width, height: 230,
      x: batchScale(probesOfGpu),
      y: { domain: [0, 1.12 * limit], label: `↑ ${name}`, grid: true, ticks: 5 },
      marks: [
        Plot.ruleY([limit], { stroke: "currentColor", strokeWidth: 1.5, strokeDasharray: "6 3" }),
        Plot.text([limit], { y: (v) => v, frameAnchor: "left", text: (v) => `limit ${short(v)} ${name}`, dx: 4, dy: -8, textAnchor: "start", fill: "currentColor" }),
        ...bySparsity(inside, peaked, (rows, { colour, dash }) => [
          Plot.areaY(rows, { x: "batch", y1: (r) => unit * r.gib_low, y2: (r) => unit * r.gib_high, fill: colour, fillOpacity: 0.16, clip: true }),
          Plot.line(rows, { x: "batch", y: (r) => unit * r.gib, stroke: colour, strokeWidth: 2, strokeDasharray: dash, clip: true }),
        ]),
        ...bySparsity(fitted, peaked, (rows, { colour }) => points(rows, { x: "batch", y: peak }, colour, 4)),
        ...bySparsity(missed, peaked, (rows, { colour }) => [
          Plot.dot(rows, { x: "batch", y: limit, symbol: "times", r: 5, stroke: colour, strokeWidth: 2 }),
        ]),
        tip(fitted, { x: "batch", y: peak }, title),
      ],
    }, `Peak memory on ${gpu} against batch size, with the limit of ${short(limit)} ${name}.`));
  });
}

/** The largest batch of each cell, measured or simulated, and predicted from the other cells. */
function largestChart(holder, rows) {
  if (!rows.length) return nothing(holder, "No largest batch was found.");
  const name = (row) => [row.cell.gpu, ...(row.cell.experts === null ? [] : [experts(row.cell)]), `${row.cell.seq_len} tokens`].join(", ");
  const unique = new Map(rows.map((row) => [name(row), row]));
  const values = rows.flatMap((row) => [row.largest, row.low, row.high]).filter((v) => v > 0);
  const colour = (row) => gpuColour(row.cell.gpu);
  const title = (row) => [
    name(row), `${row.basis}: ${row.largest ?? "unknown"}`,
    row.predicted === null ? "no prediction from the other cells" : `predicted: ${row.predicted} (${span(row.low, row.high)})`,
  ].join("\n");
  const predicted = rows.filter((row) => row.predicted !== null);
  const limits = rows.filter((row) => row.largest > 0);
  const [least, most] = d3.extent(values);
  const scale = most > 8 * least ? { type: "log", base: 2, domain: [least, most] } : { domain: [0, most] };
  const ticks = (count) => (scale.type ? wholeTicks(least, most, count) : d3.ticks(0, most, count).filter(Number.isInteger));
  return drawnRows(holder, [...unique.keys()], 24, (room, width) => ({
    x: { ...labelled(scale, microBatch(rows)), grid: true, ticks: ticks(width < 400 ? 4 : 8), tickFormat: "d" },
    marks: [
      Plot.ruleY(predicted, { x1: "low", x2: "high", y: name, stroke: colour, strokeWidth: 7, strokeOpacity: 0.28, dy: room / 2 }),
      Plot.tickX(predicted, { x: "predicted", y: name, stroke: colour, strokeWidth: 2, insetTop: 6 + room, insetBottom: 6 }),
      ...points(limits, { x: "largest", y: name, dy: room / 2 }, colour, 5),
      Plot.tip(rows, Plot.pointerY({ x: (row) => row.largest ?? row.predicted, y: name, title, fill: CANVAS, stroke: "var(--line)" })),
    ],
  }), `Largest batch of ${unique.size} cells, with the prediction from the other cells.`);
}

/** Cross-validation errors of the candidate laws; the chosen one is marked. */
function errorsChart(holder, rows) {
  if (!rows.length) return nothing(holder, "No law was fitted.");
  const laws = [...new Set(d3.sort(rows, (row) => row.error).map((row) => row.law))];
  const most = d3.max(rows, (row) => Math.min(row.error + row.standard_error, 1));
  const title = (row) => [`${row.law}${row.chosen ? ", chosen" : ""}, ${row.basis}`, `error ${percent(row.error)} ± ${percent(row.standard_error)}`].join("\n");
  const at = { x: "error", y: "law" };
  return drawnRows(holder, laws, 26, (room, width) => ({
    x: { domain: [0, most], label: "mean error of the throughput, one point excluded →", grid: true, tickFormat: (v) => percent(v), ticks: width < 400 ? 3 : 6 },
    marks: [
      Plot.ruleY(rows, { x1: (r) => Math.max(r.error - r.standard_error, 0), x2: (r) => Math.min(r.error + r.standard_error, 1), y: "law", stroke: "var(--s0)", strokeWidth: 2, strokeOpacity: 0.5, dy: room / 2 }),
      ...points(rows, { ...at, dy: room / 2 }, "var(--s0)", 5),
      Plot.text(rows.filter((row) => row.chosen), { ...at, text: () => "chosen", dx: 10, dy: room / 2, textAnchor: "start", stroke: CANVAS, strokeWidth: 4, fill: "currentColor" }),
      tip(rows, at, title),
    ],
  }), `Cross-validation errors of ${laws.length} laws.`);
}
