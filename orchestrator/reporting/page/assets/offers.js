"use strict";
// The offers of the selected job: filters, the recommendation, odds, table and chart are one state,
// which the fragment of the page's address holds, so that a view can be sent.

const OFFERS = rowsOf("offers");
const SELECTS = ["gpu", "provider", "market"];
const LIMITS = { deadline: ["hours", "a deadline"], budget: ["usd", "a budget"] };
const at = (id) => document.getElementById(id);
let job = 0;

/** The limit in a field; null if it is empty or no positive number. */
function limitOf(id) {
  const value = Number.parseFloat(at(id).value);
  return Number.isFinite(value) && value > 0 ? value : null;
}

/** A sentence on the first field that holds no positive number; empty where none does. */
function mistake() {
  const wrong = Object.keys(LIMITS).filter((id) => {
    const isWrong = limitOf(id) === null && (at(id).value !== "" || at(id).validity.badInput);
    at(id).setAttribute("aria-invalid", isWrong);
    return isWrong;
  });
  return wrong.map((id) => `${at(id).value || "This"} is not ${LIMITS[id][1]}: enter a number above 0.`).join(" ");
}

const mayMiss = (row) => limitOf("deadline") !== null && row.hours_high > limitOf("deadline");
const mayExceed = (row) => limitOf("budget") !== null && row.usd_high > limitOf("budget");
const isFiltered = () => SELECTS.some((id) => at(id).value) || Object.keys(LIMITS).some((id) => limitOf(id) !== null);

function isSelected(row) {
  return (!at("gpu").value || row.cell.gpu === at("gpu").value)
    && (!at("provider").value || row.provider === at("provider").value)
    && (!at("market").value || row.market === at("market").value);
}

function wanted(row) {
  return isSelected(row)
    && Object.entries(LIMITS).every(([id, [name]]) => limitOf(id) === null || row[name] <= limitOf(id));
}

// Draws of the errors, always the same. A 90 % interval ends 1.645 standard deviations from its middle.
const DRAWS = 1000;
const QUANTILE = 1.645;
const NORMALS = new Map();

function normals(name) {
  if (!NORMALS.has(name)) {
    const normal = d3.randomNormal.source(d3.randomLcg((NORMALS.size + 0.5) / 65536))();
    NORMALS.set(name, Float64Array.from({ length: DRAWS }, normal));
  }
  return NORMALS.get(name);
}

const NEAR = Math.log1p(DATA.indifference);  // costs this close count as the same

/** Set the probability of each row that it is the cheapest of these, and whether it may be as cheap. */
function setChances(rows) {
  const least = new Float64Array(DRAWS).fill(Infinity);
  const drawn = rows.map((row) => {
    const above = Math.log(row.hours_high / row.hours) / QUANTILE;
    const below = Math.log(row.hours / row.hours_low) / QUANTILE;
    const price = Math.sqrt(Math.max(0, (Math.log(row.usd_high / row.usd) / QUANTILE) ** 2 - above ** 2));
    const [own, shared] = [Math.sqrt(row.own_error_share), Math.sqrt(1 - row.own_error_share)];
    const [alone, together] = [normals(`${CELLS.indexOf(row.cell)} ${row.basis}`), normals(row.basis)];
    const prices = price > 1e-6 ? normals(`price ${OFFERS.indexOf(row)}`) : null;
    return Float64Array.from({ length: DRAWS }, (_, i) => {
      const error = (z) => (z > 0 ? above : below) * z;
      const log = Math.log(row.usd) + own * error(alone[i]) + shared * error(together[i]) + (prices ? price * prices[i] : 0);
      least[i] = Math.min(least[i], log);
      return log;
    });
  });
  rows.forEach((row, n) => {
    row.chance = d3.mean(drawn[n], (log, i) => Number(log <= least[i]));
    row.isClose = d3.mean(drawn[n], (log, i) => Number(log <= least[i] + NEAR)) >= DATA.tied;
  });
}

const strong = (text) => element("strong", {}, text);

/** The recommendation among rows, as the page's own is worded. */
function adviceOf(rows) {
  const best = d3.least(rows, (row) => row.rank);
  const isCheapest = rows.every((row) => row.usd >= best.usd);  // else the run's objective is time
  const likeliest = d3.greatest(rows, (row) => row.chance);
  const isLikeliest = likeliest.chance <= best.chance;
  // Offers at the same cost are the cheapest together, others one at a time.
  const ofGpu = d3.rollup(rows.filter((row) => row.cell.gpu === best.cell.gpu), (same) => d3.max(same, (row) => row.chance), (row) => row.usd);
  const gpuOdds = odds(Math.min(1, d3.sum(ofGpu.values())));
  const few = best.few_steps === null ? "" : ` (${best.few_steps} optimizer steps an epoch)`;
  const isOwnCard = best.owned && best.instance === best.cell.gpu && best.gpus_per_instance === 1;
  const ifFull = best.as_if_full ? ", if all examples have the full length" : "";
  const lead = element("p", { class: "lead" }, isOwnCard ? "Use your " : best.owned ? "Use " : "Rent ", strong(best.cell.gpu),
    `${isOwnCard ? "" : ` ${best.where}`} at ${dollars(best.usd_per_hour)} an hour: the job costs `, strong(dollars(best.usd)),
    ` (${span(best.usd_low, best.usd_high, cents)}) and takes `, strong(hours(best.hours)),
    ` (${span(best.hours_low, best.hours_high)}),${best.basis === "simulated" ? " simulated," : ""} at batch size ${best.batches}${best.each}${few}${best.left_out ? "; generation comes on top" : ""}. `,
    ...(rows.length === 1 ? [`No other offer matches.${ifFull && ` Its cost holds${ifFull.slice(1)}.`}`]
      : isCheapest ? [`Of the ${rows.length} offers that match, it ${isLikeliest ? "is" : "has the lowest expected cost, and is"} the cheapest with a probability of `, strong(odds(best.chance)),
        isLikeliest ? (gpuOdds === odds(best.chance) ? "" : ` (some offer of ${best.cell.gpu}: ${gpuOdds})`)
          : `; ${likeliest.cell.gpu} ${likeliest.where} is likelier to be the cheapest (${odds(likeliest.chance)})`, `${ifFull}.`]
        : [`It is the fastest of the ${rows.length} offers that match${ifFull}.`]));
  const named = [best];
  const others = [
    ["Cheapest without interruptions", best.market === "spot" ? d3.least(rows.filter((row) => row.market !== "spot"), (row) => row.usd) : null],
    ["Cheapest other GPU", d3.least(rows.filter((row) => row.cell.gpu !== best.cell.gpu), (row) => row.usd)],
    ["Faster, but more expensive", d3.least(rows.filter((row) => row.hours < 0.9 * best.hours), (row) => row.hours)],
  ].filter(([, row]) => row && !named.includes(row) && named.push(row));
  const apart = (row) => (isCheapest && row.isClose ? `, may still be the cheapest (${odds(row.chance)})` : "");
  const list = others.map(([label, row]) => element("li", {}, `${label}: ${row.cell.gpu} ${row.where}: ${priceOf(row)}${apart(row)}.`));
  const doubts = [...(best.doubts ?? []), mayMiss(best) ? "The 90 % interval of its hours ends after the deadline." : "", mayExceed(best) ? "The 90 % interval of its cost ends above the budget." : ""];
  return [lead, list.length ? element("ul", {}, ...list) : null, ...doubts.filter(Boolean).map((text) => element("p", { class: "warn" }, text))];
}

/** The reason for an empty state: the best of the selected offers by the limit that it misses, or by both. */
function noneOf(ofJob) {
  const selected = ofJob.filter(isSelected);
  const [fastest, cheapest] = [d3.least(selected, (row) => row.hours), d3.least(selected, (row) => row.usd)];
  const of = SELECTS.some((id) => at(id).value) ? " of those selected" : "";
  if (!selected.length) return element("p", { class: "lead" }, `None of ${ofJob.length} offers has this GPU, provider and market.`);
  const best = [["deadline", fastest.hours, `The fastest${of} takes ${hours(fastest.hours)}.`], ["budget", cheapest.usd, `The cheapest${of} costs ${dollars(cheapest.usd)}.`]];
  const missed = best.filter(([id, value]) => limitOf(id) !== null && value > limitOf(id));
  const why = (missed.length ? missed : best).map(([, , text]) => ` ${text}`).join("");
  return element("p", { class: "lead" }, `None of ${ofJob.length} offers matches.${why}`);
}

/** Columns of a saved file with the names of ranking.csv. */
const saved = (...names) => names.map((name) => [name, (row) => row[name]]);

const offerColumns = [
  {
    label: "GPU and offer", of: (row) => row.cell.gpu, head: true,
    under: (row) => `${numberOf(row)}${row.provider} ${row.instance}${row.gpus_per_instance > 1 ? ` (${row.gpus_per_instance} GPUs)` : ""}, ${row.region}, ${row.market}`,
    csv: [
      ...saved("gpu"), ...["model", "weights", "recipe", "sparsity", "active_experts", "seq_len"].map((name) => [name, (r) => r.cell[name]]),
      ...saved("layout", "rank", "provider", "instance", "region", "market", "gpus_per_instance", "instances"), ["examples", () => DATA.examples], ...saved("epochs"),
    ],
  },
  {
    label: "cost", of: (row) => row.usd, number: true, show: (row) => dollars(row.usd), under: (row) => `${span(row.usd_low, row.usd_high, cents)}${mayExceed(row) ? ", may exceed the budget" : ""}`,
    csv: saved("usd", "usd_low", "usd_high"),
  },
  {
    label: "time", of: (row) => row.hours, number: true, show: (row) => hours(row.hours), under: (row) => `${span(row.hours_low, row.hours_high)}${mayMiss(row) ? ", may miss the deadline" : ""}`,
    csv: saved("hours", "hours_low", "hours_high"),
  },
  {
    label: "P(cheapest)", of: (row) => row.chance, number: true, show: (row) => odds(row.chance), csv: [["probability_cheapest", (r) => r.chance]],
    under: (row) => [row.isClose && row !== ranking.best ? "may still be cheapest" : "", row.pareto ? "none beats it" : ""].filter(Boolean).join(", "),
  },
  {
    label: "basis", of: (row) => row.basis, show: (row) => basisOf(row.basis), csv: saved("basis", "elsewhere"),
    under: (row) => [row.elsewhere ? "measured elsewhere" : "", row.source.startsWith("law") ? row.source : "", row.extrapolated ? "extrapolated" : ""].filter(Boolean).join(", "),
  },
  { label: "$/h", of: (row) => row.usd_per_hour, number: true, show: (row) => cents(row.usd_per_hour), under: (row) => row.price_as_of ?? row.price_recorded, csv: saved("usd_per_hour", "price_as_of", "price_recorded") },
  { label: "batch size", of: (row) => row.batch_size, number: true, show: (row) => row.batches, under: (row) => `max ${row.largest_batch ?? "unknown"}${row.each}`, csv: saved("batch_size", "largest_batch") },
  { label: "throughput", of: (row) => row.examples_per_second, number: true, show: (row) => short(row.examples_per_second), under: (row) => `${row.cell.rows}/s`, csv: saved("examples_per_second", "stack") },
];

const ranking = new Table(at("ranking"), {
  caption: "Offers, the cheapest first", columns: offerColumns, sort: 1, most: 10, cards: true, isBest: (row) => row === ranking.best,
});

function showOffers() {
  const ofJob = OFFERS.filter((row) => row.cell.job === job);
  const rows = ofJob.filter(wanted);
  const wrong = mistake();
  if (rows.length === ofJob.length) rows.forEach((row) => Object.assign(row, { chance: row.odds, isClose: row.tied }));
  else setChances(rows);
  ranking.best = d3.least(rows, (row) => row.rank);
  ranking.fill(rows);
  at("matches").textContent = wrong || (ofJob.length ? `${rows.length} of ${ofJob.length} offers` : "No offer can be ranked: see Excluded cells.");
  at("matches").classList.toggle("warn", Boolean(wrong));
  const replaces = isFiltered() && ofJob.length > 0;
  document.querySelectorAll(".answer[data-job]").forEach((part) => { part.hidden = replaces || Number(part.dataset.job) !== job; });
  at("filtered").hidden = !replaces;
  at("filtered").replaceChildren(...(!replaces ? [] : rows.length ? adviceOf(rows) : [noneOf(ofJob)]).filter(Boolean));
  costChart(at("cost"), at("beyond"), rows);
}

/** Offer the GPUs and providers of the job's offers as filters; keep what is selected if it is one. */
function listChoices() {
  const ofJob = OFFERS.filter((row) => row.cell.job === job);
  for (const [id, of] of [["gpu", (row) => row.cell.gpu], ["provider", (row) => row.provider]]) {
    const kept = at(id).value;
    at(id).replaceChildren(element("option", { value: "" }, "all"), ...d3.sort(new Set(ofJob.map(of))).map((name) => element("option", { value: name }, name)));
    select(id, kept);
  }
}

/** Select a value if the field has it, else the first; whether it does. */
function select(id, value) {
  const has = [...at(id).options].some((option) => option.value === value);
  if (has) at(id).value = value;
  else at(id).selectedIndex = id === "job" ? at(id).selectedIndex : 0;
  return has;
}

/** Take the job and the filters from the address, and name what this report does not have. */
function readView() {
  const view = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const absent = [];
  const take = (id) => {
    if (!select(id, view.get(id) ?? "") && view.get(id)) absent.push(`${id} ${view.get(id)}`);
  };
  take("job");
  job = at("job").selectedIndex;
  listChoices();
  SELECTS.forEach(take);
  for (const id of Object.keys(LIMITS)) {
    at(id).value = view.get(id) ?? "";
    if (view.get(id) && at(id).value === "") absent.push(`${id} ${view.get(id)}`);
  }
  at("absent").hidden = !absent.length;
  at("absent").textContent = `The link asks for ${absent.join(" and ")}, which this report does not have.`;
}

/** Put the job and the filters into the address. */
function writeView() {
  const view = new URLSearchParams({ job: at("job").value });
  for (const id of SELECTS) if (at(id).value) view.set(id, at(id).value);
  for (const id of Object.keys(LIMITS)) if (limitOf(id) !== null) view.set(id, at(id).value);
  history.replaceState(null, "", `#${view}`);
  at("absent").hidden = true;
}
