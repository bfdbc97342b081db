"use strict";
// The report of one run. Charts and tables follow the selected job.

const PROBES = rowsOf("probes");
const SPEEDS = rowsOf("speeds");
const MEMORY = rowsOf("memory");
const LARGEST = rowsOf("largest");
const ERRORS = rowsOf("errors");

function showJob() {
  const chosen = CELLS.find((cell) => cell.job === job);
  document.querySelectorAll("[data-job]").forEach((part) => { part.hidden = Number(part.dataset.job) !== job; });
  listChoices();
  showOffers();
  const isAlike = (cell) => cell.model === chosen.model && cell.weights === chosen.weights && cell.recipe === chosen.recipe;
  const gpus = new Set(OFFERS.filter((row) => row.cell.job === job && wanted(row)).map((row) => row.cell.gpu));
  const onGpu = (row) => !isFiltered() || gpus.has(row.cell.gpu);
  const alike = (row) => isAlike(row.cell) && row.cell.seq_len === chosen.seq_len && onGpu(row);
  const caption = `${chosen.model}, ${chosen.recipe_words}`;
  document.querySelectorAll("[data-of=length]").forEach((part) => { part.textContent = `${caption}, ${chosen.seq_len} tokens per ${chosen.row}`; });
  document.querySelectorAll("[data-of=recipe]").forEach((part) => { part.textContent = caption; });
  const shown = {
    probes: PROBES.filter(alike), speeds: SPEEDS.filter(alike), memory: MEMORY.filter(alike),
    largest: LARGEST.filter((row) => isAlike(row.cell) && onGpu(row)),
    errors: ERRORS.filter((row) => row.model === (chosen.weights === "random" ? chosen.model : `${chosen.model}, ${chosen.weights}`) && row.recipe === chosen.recipe),
  };
  const ofGpus = [
    ["speed-charts", () => speedCharts(at("speed-charts"), at("speed-key"), shown.probes, shown.speeds)],
    ["memory-charts", () => memoryCharts(at("memory-charts"), at("memory-key"), shown.probes, shown.memory)],
    ["largest-chart", () => largestChart(at("largest-chart"), shown.largest)],
  ];
  for (const [id, draw] of ofGpus) {
    if (isFiltered() && !gpus.size) nothing(at(id), "No offer matches.");
    else draw();
  }
  errorsChart(at("errors-chart"), shown.errors);
  Object.assign(SHOWN, shown);
  NUMBERS.forEach((fill) => fill());
}

const SHOWN = {};
const batchColumn = { label: "batch size", of: (row) => row.batch, number: true };
const numeric = (label, name, format = short) => ({ label, of: (row) => row[name], number: true, show: (row) => format(row[name]) });
const throughputColumn = { ...numeric("throughput", "examples_per_second"), under: (row) => `${row.cell.rows}/s`, csv: [["examples_per_second", (row) => row.examples_per_second]] };
const outcomeColumn = { label: "outcome", of: outcomeOf };
const stackColumn = { label: "stack", of: (row) => row.stack };
const softwareColumn = { label: "software", of: (row) => row.software };
const NUMBERS = [
  numbersOf("speed-points", { caption: "Timed probes", columns: [...cellColumns, basisColumn, batchColumn, throughputColumn, numeric("seconds per step", "step_seconds"), numeric("steps", "steps"), ...whatColumns, stackColumn], sort: 4 },
    () => SHOWN.probes.filter((row) => row.examples_per_second !== null)),
  numbersOf("speed-laws", { caption: "Throughput by the law", columns: [...cellColumns, basisColumn, batchColumn, throughputColumn, numeric("low", "examples_per_second_low"), numeric("high", "examples_per_second_high"), { label: "law", of: (row) => row.law }, { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns, stackColumn] },
    () => SHOWN.speeds),
  numbersOf("memory-points", { caption: "Memory peaks", columns: [...cellColumns, basisColumn, batchColumn, outcomeColumn, numeric("peak GiB", "peak_gib"), numeric("limit GiB", "limit_gib"), ...whatColumns, stackColumn], sort: 4 },
    () => SHOWN.probes.filter((row) => row.peak_gib !== null || row.outcome === "OUT_OF_MEMORY")),
  numbersOf("memory-laws", { caption: "Memory by the law", columns: [...cellColumns, basisColumn, batchColumn, numeric("GiB", "gib"), numeric("low", "gib_low"), numeric("high", "gib_high"), { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns, softwareColumn] },
    () => SHOWN.memory),
  numbersOf("largest-numbers", { caption: "Largest batches", columns: [...cellColumns, basisColumn, numeric("largest", "largest", (v) => v ?? "unknown"), { label: "next batch size", of: (row) => row.next }, numeric("predicted", "predicted"), numeric("low", "low"), numeric("high", "high"), { label: "extrapolated", of: (row) => (row.extrapolated ? "yes" : "") }, ...whatColumns], most: 20 },
    () => SHOWN.largest),
  numbersOf("errors-numbers", { caption: "Cross-validation errors", columns: [{ label: "law", of: (row) => row.law, head: true }, { label: "model", of: (row) => row.model }, { label: "recipe", of: (row) => row.recipe }, basisColumn, { label: "chosen", of: (row) => (row.chosen ? "yes" : "") }, numeric("error, one point excluded", "error", percent), numeric("standard error", "standard_error", percent), numeric("error, larger batches excluded", "growing_error", percent), numeric("error, one length excluded", "length_error", percent), numeric("points", "points"), softwareColumn], most: 30 },
    () => SHOWN.errors),
  numbersOf("all-probes", { caption: "Every probe", columns: [...cellColumns, basisColumn, ...whatColumns, { label: "purpose", of: (row) => row.purpose }, batchColumn, { ...outcomeColumn, under: (row) => row.detail ?? "", csv: [["outcome", (r) => r.outcome], ["detail", (r) => r.detail]] }, numeric("seconds per step", "step_seconds"), numeric("peak GiB", "peak_gib"), numeric("seconds", "seconds"), { label: "host", of: (row) => row.host }, stackColumn, { label: "started", of: (row) => row.started }], most: 50 },
    () => PROBES),
];

if (rowsOf("spending").length) new Table(at("spending-table"), {
  caption: "Cost of the sweep", most: 50, columns: [
    { label: "GPU", of: (row) => row.gpu, head: true }, numeric("probes", "probes"), numeric("probe hours", "probe_hours"),
    numeric("hours lost in failed trials", "lost_hours"), numeric("nodes", "nodes"),
    numeric("assumed start-up hours", "assumed_start_hours"), { label: "offer", of: (row) => row.offer ?? "price unknown" },
    numeric("$/h", "usd_per_hour", cents), { label: "price of", of: (row) => row.price_of }, numeric("cost", "usd", dollars),
  ],
}).fill(rowsOf("spending"));

readView();
at("job").addEventListener("change", () => { job = at("job").selectedIndex; showJob(); writeView(); });
at("filters").addEventListener("input", () => { showJob(); writeView(); });
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("filters").addEventListener("reset", () => setTimeout(() => { showJob(); writeView(); }));
window.addEventListener("hashchange", () => { if (location.hash.includes("=")) { readView(); showJob(); } });
document.querySelectorAll("[data-basis]").forEach((part) => part.prepend(mark(part.dataset.basis)));
showJob();
document.documentElement.dataset.ready = "yes";
