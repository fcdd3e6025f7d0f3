// The last minutes as lines: rate, latency, hit rate, and what waits.

import { LineChart } from "./chart.js";
import { count, duration, emptiness, h, panel, percent, rate } from "./dom.js";
import { TimeRange } from "./range.js";

export class Traffic {
  constructor(store, { filters, keep }) {
    this.store = store;
    const range = new TimeRange({ filters, keep });
    this.charts = [
      new LineChart({ name: "rate", title: "Selections per second", range, format: rate, unit: "/s", lines: [{ id: "selections", label: "answered", tone: "a", of: (one) => one.selections }, { id: "failed", label: "refused", tone: "bad", of: (one) => one.failed }] }),
      new LineChart({ name: "latency", title: "Latency of selections", range, format: duration, note: "Over ten seconds, by the buckets of /metrics; waiting in the queue is part of it.", lines: [{ id: "p50", label: "p50", tone: "a", of: (one) => one.p50 }, { id: "p99", label: "p99", tone: "b", of: (one) => one.p99 }] }),
      new LineChart({ name: "hits", title: "Hit rate", range, top: 1, format: (value) => percent(value), note: "Share of prompt tokens that the chosen worker had cached, over ten seconds.", lines: [{ id: "hitRate", label: "hit rate", tone: "b", of: (one) => one.hitRate }] }),
      new LineChart({ name: "waiting", title: "Requests", range, format: count, stepLeast: 1, lines: [{ id: "reservations", label: "reserved", tone: "a", of: (one) => one.reservations }, { id: "waiting", label: "waiting", tone: "warn", of: (one) => one.waiting }] }),
    ];
    this.failed = h("div");
    this.node = h("div", {}, range.node, h("div", { class: "charts" }, this.charts.map((chart) => chart.node)), panel("Selections refused since the start", this.failed));
    this.update();
  }

  close() {
    for (const chart of this.charts) chart.close();
  }

  update() {
    const series = this.store.series();
    for (const chart of this.charts) chart.show(series, this.store.atMs);
    const failed = Object.entries(this.store.state?.failed ?? {});
    const sign = JSON.stringify(failed);
    if (sign === this.sign) return;
    this.sign = sign;
    this.failed.replaceChildren(
      failed.length
        ? h("table", { "data-table": "failed", "aria-label": "Selections refused, by code" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Code"), h("th", { scope: "col", class: "num" }, "Requests"))), h("tbody", {}, failed.map(([code, number]) => h("tr", {}, h("th", { scope: "row", class: "mono" }, code), h("td", { class: "num" }, count(number))))))
        : emptiness("None refused", "Every selection so far was answered with a worker.", "none-refused"),
    );
  }
}
