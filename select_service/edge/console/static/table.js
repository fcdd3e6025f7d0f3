// A table whose rows stay where they are while their numbers change: sortable by its heads, one
// element per row for as long as the row lives, and only cells that say something else are touched.

import { emptiness, h, NONE, plural } from "./dom.js";

const PAGE = 300;

function paint(cell, value) {
  if (typeof value === "string") {
    if (cell.textContent !== value || cell.childElementCount) cell.textContent = value;
    return;
  }
  if (value instanceof Node) {
    cell.replaceChildren(value);
    return;
  }
  const sign = JSON.stringify(value);
  if (cell.sign === sign) return;
  cell.sign = sign;
  if ("bar" in value) paintBar(cell, value);
  else if ("clip" in value) cell.replaceChildren(h("span", { class: "clip", title: value.clip }, value.clip));
  else cell.replaceChildren(h("span", { class: "pill", "data-tone": value.tone, title: value.title }, value.pill));
}

function paintBar(cell, { bar, text, tone, title, room }) {
  const share = bar === null ? 0 : Math.max(0, Math.min(1, bar));
  let box = cell.firstElementChild;
  if (!box) {
    box = h("span", { class: "bar" }, h("span", { class: "bar-track", "aria-hidden": "true" }, h("span", { class: "bar-fill" })), h("span", { class: "bar-text" }));
    cell.replaceChildren(box);
  }
  const fill = box.firstElementChild.firstElementChild;
  fill.style.setProperty("inline-size", `${(share * 100).toFixed(1)}%`);
  fill.dataset.tone = tone ?? "load";
  box.firstElementChild.hidden = bar === null;
  box.lastElementChild.textContent = text;
  box.lastElementChild.style.setProperty("min-inline-size", `${room ?? 5}ch`); // so that bars begin and end together
  if (title) box.title = title;
  else box.removeAttribute("title");
}

export class LiveTable {
  // columns: {id, title, cell(row), sort?(row), numeric?, barred?, once?, wide?, hint?}; `once`: the cell never
  // changes; `barred`: it begins with a bar, and so the head stands above that.
  constructor({ name, caption, columns, key, sort, empty, page }) {
    this.columns = columns;
    this.key = key;
    this.order = sort ?? { id: null, down: false };
    this.empty = empty ?? emptiness("Nothing here");
    this.page = page ?? PAGE;
    this.limit = this.page;
    this.lines = new Map();
    this.rows = [];
    this.heads = new Map();
    this.body = h("tbody");
    const heads = columns.map((column) => this.head(column));
    this.table = h("table", { class: "live", "data-table": name }, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, heads)), this.body);
    this.more = h("button", { type: "button", class: "more", hidden: true, onclick: () => this.showMore() });
    this.place = h("div", { class: "empty-place" });
    this.node = h("div", { class: "table-box" }, this.table, this.place, this.more);
  }

  head(column) {
    const cell = h("th", { scope: "col", class: [column.numeric && "num", column.barred && "barred"].filter(Boolean).join(" ") || null, title: column.hint });
    if (column.sort) {
      cell.append(h("button", { type: "button", class: "sort", onclick: () => this.sortBy(column) }, column.title));
      this.heads.set(column.id, cell);
    } else cell.append(column.title);
    return cell;
  }

  sortBy(column) {
    const same = this.order.id === column.id;
    this.order = { id: column.id, down: same ? !this.order.down : Boolean(column.numeric) };
    this.show(this.rows, { settle: true });
  }

  showMore() {
    this.limit += this.page;
    this.show(this.rows, { settle: true });
  }

  show(rows, { settle = false } = {}) {
    this.rows = rows;
    const isHeld = !settle && this.body.matches(":hover, :focus-within");
    const sorted = this.sorted(rows, isHeld);
    const shown = sorted.slice(0, this.limit);
    const keys = new Set(shown.map(this.key));
    for (const [key, line] of this.lines) {
      if (!keys.has(key)) {
        line.tr.remove();
        this.lines.delete(key);
      }
    }
    let next = this.body.firstElementChild;
    for (const row of shown) {
      const tr = this.line(row);
      if (tr === next) next = next.nextElementSibling;
      else this.body.insertBefore(tr, next);
    }
    for (const [id, cell] of this.heads) {
      if (id === this.order.id) cell.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    this.table.hidden = rows.length === 0;
    this.place.replaceChildren(...(rows.length ? [] : [this.empty]));
    const left = sorted.length - shown.length;
    this.more.hidden = left === 0;
    this.more.textContent = `Show ${plural(Math.min(left, this.page), "more row")} of ${left}`;
  }

  // While somebody points at a row it does not move away from under them.
  sorted(rows, isHeld) {
    const column = this.columns.find((one) => one.id === this.order.id);
    if (isHeld) {
      const place = new Map([...this.lines.keys()].map((key, at) => [key, at]));
      const order = new Map([...this.body.children].map((tr, at) => [tr.dataset.key, at]));
      const at = (row) => order.get(String(this.key(row))) ?? place.size + 1;
      return [...rows].sort((a, b) => at(a) - at(b));
    }
    if (!column?.sort) return rows;
    const values = new Map(rows.map((row) => [row, column.sort(row)]));
    const sign = this.order.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const one = values.get(a);
      const two = values.get(b);
      if (one === two) return compare(this.key(a), this.key(b));
      if (one === null || one === undefined) return 1;
      if (two === null || two === undefined) return -1;
      return sign * compare(one, two);
    });
  }

  line(row) {
    const key = this.key(row);
    let line = this.lines.get(key);
    if (!line) {
      const cells = this.columns.map((column, at) => h(at ? "td" : "th", { scope: at ? null : "row", class: [column.numeric && "num", column.wide && "wide"].filter(Boolean).join(" ") || null }));
      line = { tr: h("tr", { "data-key": key }, cells), cells, isNew: true };
      this.lines.set(key, line);
    }
    this.columns.forEach((column, at) => {
      if (line.isNew || !column.once) paint(line.cells[at], column.cell(row) ?? NONE);
    });
    line.isNew = false;
    return line.tr;
  }
}

// Ids are numbers beyond what numbers can be here: by length first, then digit by digit.
export function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  const one = String(a);
  const two = String(b);
  const digits = /^\d+(\/\d+)?$/;
  if (digits.test(one) && digits.test(two)) {
    const [x, p = "0"] = one.split("/");
    const [y, q = "0"] = two.split("/");
    return x.length - y.length || (x < y ? -1 : x > y ? 1 : Number(p) - Number(q));
  }
  return one < two ? -1 : one > two ? 1 : 0;
}
