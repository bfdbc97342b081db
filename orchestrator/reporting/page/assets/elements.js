"use strict";
// The data of the page, its elements and its tables. Text goes in as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** The rows of a table as objects; `cell`, where there is one, is the cell itself. */
function rowsOf(name) {
  const { columns, rows } = DATA.tables[name];
  return rows.map((row) => {
    const made = Object.fromEntries(columns.map((column, i) => [column, row[i]]));
    if (name !== "cells" && typeof made.cell === "number") made.cell = CELLS[made.cell];
    return made;
  });
}

const CELLS = rowsOf("cells");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// The shape shows whether a value was measured; colour alone would not do for every reader.
const SHAPES = { measured: d3.symbolCircle, simulated: d3.symbolDiamond2, capped: d3.symbolSquare };
const IS_FULL = { measured: true, simulated: false, capped: false };

function mark(basis, colour = "currentColor") {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", d3.symbol(SHAPES[basis] ?? d3.symbolTriangle, 42)());
  path.setAttribute("fill", IS_FULL[basis] ? colour : "none");
  path.setAttribute("stroke", colour);
  path.setAttribute("stroke-width", "1.6");
  svg.append(path);
  svg.setAttribute("viewBox", "-6 -6 12 12");
  svg.setAttribute("class", "mark");
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

function basisOf(basis) {
  return element("span", { class: "basis" }, mark(basis), basis);
}

/** A number with three significant digits, never with an exponent. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, 15) });
}

/** Dollars as in `number_text.dollars`: to the cent below 100. */
function cents(usd) {
  if (usd === null || Math.abs(usd) >= 99.995) return short(usd);
  const [value, most] = Math.abs(usd) >= 1 ? [usd, 2] : [Number(usd.toPrecision(3)), 20];
  return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: most });
}

const dollars = (value) => (value === null ? "" : `$${cents(value)}`);
const hours = (value) => (value === null ? "" : `${short(value)} h`);
const percent = (value, digits = 2) => (value === null ? "" : `${short(100 * value, digits)} %`);
const odds = (value) => (value >= 0.995 ? "> 99 %" : value < 0.005 ? "< 1 %" : `${(100 * value).toFixed(0)} %`);
const span = (low, high, format = short) => `${format(low)} to ${format(high)}`;
const experts = (cell) =>
  cell.experts === null ? "no experts" : `${cell.active_experts} of ${cell.experts} experts`;

/** The outcome of a probe in words. */
const outcomeOf = (row) => DATA.outcomes[row.outcome];

const cellColumns = [
  { label: "GPU", of: (row) => row.cell.gpu, head: true },
  { label: "experts", of: (row) => row.cell.active_experts, show: (row) => (row.cell.experts === null ? "none" : `${row.cell.active_experts}\u00a0of\u00a0${row.cell.experts}`) },
  { label: "tokens", of: (row) => row.cell.seq_len, number: true },
];
const whatColumns = [
  { label: "model", of: (row) => row.cell.model },
  { label: "recipe", of: (row) => row.cell.recipe, wide: true },
];
const basisColumn = { label: "basis", of: (row) => row.basis, show: (row) => basisOf(row.basis) };

/** A hint that is shown while a table is wider than what scrolls it. */
function hintOf(scroll, table) {
  const hint = element("span", { class: "note", hidden: true }, "Scroll sideways for more columns →");
  const observer = new ResizeObserver(() => { hint.hidden = scroll.scrollWidth <= scroll.clientWidth + 1; });
  observer.observe(scroll);
  observer.observe(table);
  return hint;
}

document.querySelectorAll(".report .scroll, .report.scroll").forEach((scroll) => scroll.after(hintOf(scroll, scroll.firstElementChild)));

/**
 * A table that sorts by any column and shows its first rows, or all of them.
 *
 * A column has a label and of(row), the value to sort by; optionally show(row), the content of its
 * cell, under(row), small text below it, and the flags number, wide and head (the row's header).
 * With cards, a phone shows each row as a card: styles then change how the elements are laid out,
 * and their roles say that they are a table all the same.
 */
class Table {
  constructor(holder, { caption, columns, most = 12, sort = null, descending = false, isBest, cards = false }) {
    Object.assign(this, { columns, most, sort, descending, isBest, rows: [], all: false });
    this.heads = columns.map((column) => this.head(column));
    this.body = element("tbody", { role: "rowgroup" });
    this.more = element("button", { type: "button", onclick: () => this.showAll() });
    this.save = element("button", { type: "button", onclick: () => this.download() }, "Save as CSV");
    this.caption = caption;
    const table = element(
      "table", { role: "table", class: cards ? "cards" : null },
      element("caption", { class: "visually-hidden" }, caption),
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...this.heads)),
      this.body,
    );
    const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    const hint = hintOf(scroll, table);
    holder.replaceChildren(scroll, element("div", { class: "after" }, this.more, this.save, hint));
  }

  head(column) {
    const at = this.columns.indexOf(column);
    const button = element("button", { type: "button", onclick: () => this.sortBy(at) }, column.label);
    const classed = column.number ? "number" : null;
    return element("th", { scope: "col", role: "columnheader", "aria-sort": "none", class: classed }, button);
  }

  fill(rows) {
    this.rows = rows;
    this.draw();
  }

  sortBy(at) {
    this.descending = this.sort === at ? !this.descending : false;
    this.sort = at;
    this.draw();
  }

  showAll() {
    this.all = !this.all;
    this.draw();
  }

  sorted() {
    if (this.sort === null) return this.rows;
    const { of } = this.columns[this.sort];
    const turn = this.descending ? -1 : 1;
    const isAbsent = (value) => value === null || value === undefined;
    return [...this.rows].sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      if (isAbsent(x) || isAbsent(y)) return isAbsent(x) - isAbsent(y);
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return turn * order;
    });
  }

  draw() {
    this.heads.forEach((head, at) => {
      const way = this.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", at === this.sort ? way : "none");
    });
    const rows = this.sorted();
    this.body.replaceChildren(...(this.all ? rows : rows.slice(0, this.most)).map((row) => this.row(row)));
    this.more.hidden = rows.length <= this.most;
    this.more.textContent = this.all ? `Show the first ${this.most}` : `Show all ${rows.length}`;
  }

  row(row) {
    const cells = this.columns.map((column) => {
      const content = column.show ? column.show(row) : column.of(row);
      const small = column.under ? column.under(row) : "";
      const holder = column.head
        ? element("th", { scope: "row", role: "rowheader" })
        : element("td", { role: "cell", "data-label": column.label, class: column.number ? "number" : column.wide ? "wide" : null });
      holder.append(content === null || content === undefined ? "" : content instanceof Node ? content : String(content));
      if (small) holder.append(element("small", {}, small));
      return holder;
    });
    return element("tr", { role: "row", class: this.isBest?.(row) ? "best" : null }, ...cells);
  }

  download() {
    const quoted = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      // A spreadsheet must not take a name for a formula.
      const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
      return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    const columns = this.columns.flatMap((column) => column.csv ?? [[column.label, column.of]]);
    const lines = [columns.map(([label]) => label), ...this.sorted().map((row) => columns.map(([, of]) => of(row)))];
    const text = lines.map((line) => line.map(quoted).join(",")).join("\n");
    const link = element("a", {
      href: URL.createObjectURL(new Blob([`${text}\n`], { type: "text/csv" })),
      download: `${[DATA.name, this.caption, DATA.made].join("-").replace(/\W+/g, "-").toLowerCase()}.csv`,
    });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

/** The table of a chart, filled when it is opened. */
function numbersOf(id, options, rows) {
  const details = document.getElementById(id);
  const holder = details.querySelector("div");
  const fill = () => {
    if (!details.open) return;
    details.table ??= new Table(holder, options);
    details.table.fill(rows());
  };
  details.addEventListener("toggle", fill);
  return fill;
}
