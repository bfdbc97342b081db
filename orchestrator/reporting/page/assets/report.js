"use strict";
// The report of one run. Charts and tables follow the selected job.

const OFFERS = rowsOf("offers");
const PROBES = rowsOf("probes");
const SPEEDS = rowsOf("speeds");
const MEMORY = rowsOf("memory");
const LARGEST = rowsOf("largest");
const ERRORS = rowsOf("errors");
const at = (id) => document.getElementById(id);

const offerColumns = [
  {
    label: "GPU and offer", of: (row) => row.cell.gpu, head: true,
    under: (row) => `${row.provider} ${row.instance}${row.gpus > 1 ? ` (${row.gpus} GPUs)` : ""}, ${row.region}, ${row.market}`,
    csv: [["gpu", (r) => r.cell.gpu], ...["provider", "instance", "region", "market", "gpus"].map((name) => [name, (r) => r[name]])],
  },
  {
    label: "cost", of: (row) => row.usd, number: true, show: (row) => dollars(row.usd), under: (row) => span(row.usd_low, row.usd_high),
    csv: ["usd", "usd_low", "usd_high"].map((name) => [name, (r) => r[name]]),
  },
  {
    label: "time", of: (row) => row.hours, number: true, show: (row) => hours(row.hours), under: (row) => `${span(row.hours_low, row.hours_high)}${mayMiss(row) ? ", may miss the deadline" : ""}`,
    csv: ["hours", "hours_low", "hours_high"].map((name) => [name, (r) => r[name]]),
  },
  {
    label: "P(cheapest)", of: (row) => row.odds, number: true, show: (row) => odds(row.odds),
    under: (row) => [row.tied && row.rank > 1 ? "not distinguishable" : "", row.pareto ? "Pareto-optimal" : ""].filter(Boolean).join(", "),
  },
  {
    label: "basis", of: (row) => row.basis, show: (row) => basisOf(row.basis),
    under: (row) => [row.elsewhere ? "measured elsewhere" : "", row.source.startsWith("law") ? row.source : "", row.extrapolated ? "extrapolated" : ""].filter(Boolean).join(", "),
  },
  { label: "$/h", of: (row) => row.usd_per_hour, number: true, show: (row) => short(row.usd_per_hour) },
  { label: "batch size", of: (row) => row.batch, number: true, under: (row) => `max ${row.cell.largest ?? "unknown"}` },
  { label: "examples/s", of: (row) => row.examples_per_second, number: true, show: (row) => short(row.examples_per_second) },
  { label: "price date", of: (row) => row.price_of },
  { label: "stack", of: (row) => row.stack },
];

let job = 0;

const deadline = () => {
  const value = Number.parseFloat(at("deadline").value);
  return Number.isFinite(value) && value > 0 ? value : null;
};
const mayMiss = (row) => deadline() !== null && row.hours <= deadline() && row.hours_high > deadline();

function wanted(row) {
  return row.cell.job === job
    && (!at("provider").value || row.provider === at("provider").value)
    && (!at("market").value || row.market === at("market").value)
    && (deadline() === null || row.hours <= deadline());
}

const ranking = new Table(at("ranking"), {
  caption: "Offers, the cheapest first", columns: offerColumns, sort: 1, most: 10, isBest: (row) => row === ranking.best,
});

function showOffers() {
  const ofJob = OFFERS.filter((row) => row.cell.job === job);
  const rows = ofJob.filter(wanted);
  ranking.best = d3.least(rows, (row) => row.usd);
  ranking.fill(rows);
  const best = ranking.best;
  at("matches").textContent = best
    ? rows.length === ofJob.length ? `All ${rows.length} offers are shown.`
      : `${rows.length} of ${ofJob.length} offers match. The cheapest: ${best.cell.gpu} from ${best.provider} (${best.instance}, ${best.market}), ${dollars(best.usd)} in ${hours(best.hours)}.`
    : ofJob.length ? `None of ${ofJob.length} offers matches. Set a later deadline, or choose another provider or market.` : "No offer can be ranked: see Excluded cells.";
  costChart(at("cost"), at("beyond"), rows);
}

function showJob() {
  const chosen = CELLS.find((cell) => cell.job === job);
  document.querySelectorAll("[data-job]").forEach((part) => { part.hidden = Number(part.dataset.job) !== job; });
  const providers = d3.sort(new Set(OFFERS.filter((row) => row.cell.job === job).map((row) => row.provider)));
  const kept = at("provider").value;
  at("provider").replaceChildren(
    element("option", { value: "" }, "all"), ...providers.map((name) => element("option", { value: name }, name)));
  at("provider").value = providers.includes(kept) ? kept : "";
  showOffers();
  const isAlike = (cell) => cell.model === chosen.model && cell.weights === chosen.weights && cell.recipe === chosen.recipe;
  const alike = (row) => isAlike(row.cell) && row.cell.seq_len === chosen.seq_len;
  const caption = `${chosen.model}, ${chosen.recipe}`;
  document.querySelectorAll("[data-of=length]").forEach((part) => { part.textContent = `${caption}, ${chosen.seq_len} tokens per example`; });
  document.querySelectorAll("[data-of=recipe]").forEach((part) => { part.textContent = caption; });
  const shown = {
    probes: PROBES.filter(alike), speeds: SPEEDS.filter(alike), memory: MEMORY.filter(alike),
    largest: LARGEST.filter((row) => isAlike(row.cell)),
    errors: ERRORS.filter((row) => row.model === (chosen.weights === "random" ? chosen.model : `${chosen.model}, ${chosen.weights}`) && row.recipe === chosen.recipe),
  };
  speedCharts(at("speed-charts"), at("speed-key"), shown.probes, shown.speeds);
  memoryCharts(at("memory-charts"), at("memory-key"), shown.probes, shown.memory);
  largestChart(at("largest-chart"), shown.largest);
  errorsChart(at("errors-chart"), shown.errors);
  Object.assign(SHOWN, shown);
  NUMBERS.forEach((fill) => fill());
}

const SHOWN = {};
const batchColumn = { label: "batch size", of: (row) => row.batch, number: true };
const numeric = (label, name, format = short) => ({ label, of: (row) => row[name], number: true, show: (row) => format(row[name]) });
const outcomeColumn = { label: "outcome", of: outcomeOf };
const stackColumn = { label: "stack", of: (row) => row.stack };
const NUMBERS = [
  numbersOf("speed-points", { caption: "Timed probes", columns: [...cellColumns, basisColumn, batchColumn, numeric("examples/s", "examples_per_second"), numeric("seconds per step", "step_seconds"), numeric("steps", "steps"), ...whatColumns, stackColumn], sort: 4 },
    () => SHOWN.probes.filter((row) => row.examples_per_second !== null)),
  numbersOf("speed-laws", { caption: "Throughput by the law", columns: [...cellColumns, basisColumn, batchColumn, numeric("examples/s", "examples_per_second"), numeric("low", "examples_per_second_low"), numeric("high", "examples_per_second_high"), { label: "law", of: (row) => row.law }, { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns, stackColumn] },
    () => SHOWN.speeds),
  numbersOf("memory-points", { caption: "Memory peaks", columns: [...cellColumns, basisColumn, batchColumn, outcomeColumn, numeric("peak GiB", "peak_gib"), numeric("limit GiB", "limit_gib"), ...whatColumns, stackColumn], sort: 4 },
    () => SHOWN.probes.filter((row) => row.peak_gib !== null || row.outcome === "OUT_OF_MEMORY")),
  numbersOf("memory-laws", { caption: "Memory by the law", columns: [...cellColumns, basisColumn, batchColumn, numeric("GiB", "gib"), numeric("low", "gib_low"), numeric("high", "gib_high"), { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns] },
    () => SHOWN.memory),
  numbersOf("largest-numbers", { caption: "Largest batches", columns: [...cellColumns, basisColumn, numeric("largest", "largest", (v) => v ?? "unknown"), { label: "next batch size", of: (row) => row.next }, numeric("predicted", "predicted"), numeric("low", "low"), numeric("high", "high"), { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns], most: 20 },
    () => SHOWN.largest),
  numbersOf("errors-numbers", { caption: "Cross-validation errors", columns: [{ label: "law", of: (row) => row.law, head: true }, { label: "model", of: (row) => row.model }, { label: "recipe", of: (row) => row.recipe }, basisColumn, { label: "chosen", of: (row) => (row.chosen ? "yes" : "") }, numeric("error, one point excluded", "error", percent), numeric("±", "standard_error", percent), numeric("error, larger batches excluded", "growing_error", percent), numeric("error, one length excluded", "length_error", percent), numeric("points", "points"), { label: "software", of: (row) => row.software }], most: 30 },
    () => SHOWN.errors),
  numbersOf("all-probes", { caption: "Every probe", columns: [...cellColumns, basisColumn, ...whatColumns, { label: "purpose", of: (row) => row.purpose }, batchColumn, { ...outcomeColumn, under: (row) => row.detail ?? "", csv: [["outcome", (r) => r.outcome], ["detail", (r) => r.detail]] }, numeric("seconds per step", "step_seconds"), numeric("peak GiB", "peak_gib"), numeric("seconds", "seconds"), { label: "host", of: (row) => row.host }, stackColumn, { label: "started", of: (row) => row.started }], most: 50 },
    () => PROBES),
];

new Table(at("spending-table"), {
  caption: "Cost of the sweep", most: 50, columns: [
    { label: "GPU", of: (row) => row.gpu, head: true }, numeric("probes", "probes"), numeric("probe hours", "probe_hours"),
    numeric("hours lost in failed trials", "lost_hours"), numeric("nodes", "nodes"),
    numeric("assumed start-up hours", "assumed_start_hours"), { label: "offer", of: (row) => row.offer ?? "price unknown" },
    numeric("$/h", "usd_per_hour"), numeric("cost", "usd", dollars),
  ],
}).fill(rowsOf("spending"));

job = Number(at("job").value);
at("job").addEventListener("change", () => { job = Number(at("job").value); showJob(); });
for (const id of ["provider", "market", "deadline"]) at(id).addEventListener("input", showOffers);
document.querySelectorAll("[data-basis]").forEach((part) => part.prepend(mark(part.dataset.basis)));
showJob();
document.documentElement.dataset.ready = "yes";
