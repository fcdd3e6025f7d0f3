// The time that the charts of a view show: the last minutes, or a part of them that was drawn over
// with the pointer. Kept in the address.

import { setFilter } from "./address.js";
import { clock, h } from "./dom.js";

const MINUTES = [1, 5, 15];
const USUAL = 5;
const SHORTEST_MS = 5000;

export class TimeRange {
  constructor({ filters, keep }) {
    this.filters = filters;
    this.keep = keep;
    this.charts = [];
    const minutes = Number(filters.get("minutes"));
    this.minutes = MINUTES.includes(minutes) ? minutes : USUAL;
    const [from, to] = [Number(filters.get("from")), Number(filters.get("to"))];
    this.part = from > 0 && to >= from + SHORTEST_MS ? [from, to] : null;
    this.select = h("select", { id: "range", onchange: () => this.last(Number(this.select.value)) }, MINUTES.map((one) => h("option", { value: one, selected: one === this.minutes }, `Last ${one} min`)));
    this.whole = h("button", { type: "button", id: "range-whole", onclick: () => this.zoom(null) }, "Show all of it");
    this.words = h("span", { class: "muted", id: "range-shown", role: "status" });
    this.node = h("div", { class: "filter" }, h("label", { for: "range" }, "Time"), this.select, this.whole, this.words);
    this.say();
  }

  // From and to, in milliseconds.
  window(atMs) {
    return this.part ?? [atMs - this.minutes * 60000, atMs];
  }

  last(minutes) {
    this.minutes = minutes;
    setFilter(this.filters, "minutes", minutes === USUAL ? "" : String(minutes));
    this.zoom(null);
  }

  zoom(part) {
    if (part && part[1] - part[0] < SHORTEST_MS) {
      const middle = (part[0] + part[1]) / 2;
      part = [middle - SHORTEST_MS / 2, middle + SHORTEST_MS / 2];
    }
    this.part = part && part.map(Math.round);
    setFilter(this.filters, "from", this.part && String(this.part[0]));
    setFilter(this.filters, "to", this.part && String(this.part[1]));
    this.keep(this.filters);
    this.say();
    for (const chart of this.charts) chart.draw();
  }

  say() {
    this.whole.hidden = this.part === null;
    this.words.textContent = this.part ? `${clock(this.part[0])} to ${clock(this.part[1])}` : "Draw over a chart to look closer. On the keyboard, + looks closer and 0 shows all again.";
  }
}
