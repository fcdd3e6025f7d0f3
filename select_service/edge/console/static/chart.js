// Lines over the last minutes, drawn by uPlot: an axis that starts at zero, a readout for the moment
// pointed at, and the newest values in words for who cannot see it.

import { clock, h } from "./dom.js";

const HEIGHT = 168;
const AXIS_FONT = "11px system-ui, sans-serif";
const AWAY = { left: -10, top: -10 };

export class LineChart {
  // lines: [{id, label, tone, of(point)}]
  constructor({ name, title, lines, format, top, spanMs, note }) {
    this.lines = lines;
    this.format = format;
    this.fixedTop = top;
    this.spanMs = spanMs;
    this.title = title;
    this.points = [];
    this.values = new Map(lines.map((line) => [line.id, h("b", { "data-value": line.id }, "–")]));
    this.when = h("span", { class: "when" }, "now");
    const legend = lines.map((line) => h("span", { class: "key" }, h("i", { "data-tone": line.tone, "aria-hidden": "true" }), `${line.label} `, this.values.get(line.id)));
    this.picture = h("div", { class: "chart", role: "img", "aria-label": title, tabindex: "0" });
    this.picture.addEventListener("keydown", (event) => this.step(event));
    this.picture.addEventListener("blur", () => this.plot?.setCursor(AWAY));
    this.node = h("section", { class: "panel chart-panel", "data-chart": name, "aria-label": title }, h("h2", {}, title), h("p", { class: "legend" }, legend, this.when), this.picture, note && h("p", { class: "note" }, note));
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.node);
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
  }

  show(points, atMs) {
    this.atMs = atMs;
    this.points = points.filter((one) => one.at_ms >= atMs - this.spanMs);
    this.draw();
  }

  // Nothing is drawn while the chart is hidden: it has no width then.
  draw() {
    const width = this.picture.clientWidth;
    if (!width || !this.atMs) return;
    if (!this.plot) {
      this.plot = new uPlot(this.options(width), this.data(), this.picture);
      return;
    }
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
    this.plot.setData(this.data());
  }

  // Columns: minutes before now, then the values of each line; a restart is a gap.
  data() {
    const columns = [this.points.map((one) => (one.at_ms - this.atMs) / 60000)];
    for (const line of this.lines) columns.push(this.points.map((one) => (one.isBreak ? null : (line.of(one) ?? null))));
    return columns;
  }

  options(width) {
    const color = (name) => () => getComputedStyle(this.picture).getPropertyValue(name).trim();
    const minutes = this.spanMs / 60000;
    const axis = { stroke: color("--muted"), font: AXIS_FONT, ticks: { show: false } };
    const grid = { stroke: color("--line"), width: 1 };
    return {
      width,
      height: HEIGHT,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 } },
      scales: {
        x: { time: false, range: () => [-minutes, 0] },
        y: { range: (_, least, most) => [0, this.fixedTop ?? uPlot.rangeNum(0, most > 0 ? most : 1, 0.1, true)[1]] },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, splits: () => [-minutes, -minutes / 2, 0], values: (_, splits) => splits.map((at) => (at ? `−${-at} min` : "now")) },
        { ...axis, grid, size: 56, space: 40, values: (_, splits) => splits.map((value) => this.format(value)) },
      ],
      series: [{}, ...this.lines.map((line) => ({ label: line.label, stroke: color(`--${line.tone}`), width: 1.6, points: { show: false } }))],
      hooks: { draw: [(plot) => this.markRestarts(plot), (plot) => this.readOut(plot)], setCursor: [(plot) => this.readOut(plot)] },
    };
  }

  // uPlot leaves marks across a chart to its users.
  markRestarts(plot) {
    const marks = this.points.filter((one) => one.isBreak).map((one) => h("span", { class: "restart", css: { left: `${plot.valToPos((one.at_ms - this.atMs) / 60000, "x")}px` } }, "restart"));
    for (const old of plot.over.querySelectorAll(".restart")) old.remove();
    plot.over.append(...marks);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const last = this.points.length - 1;
    if (!by || last < 0 || !this.plot) return;
    event.preventDefault();
    const steps = Math.max(1, Math.round(last / 60));
    const to = Math.max(0, Math.min(last, (this.plot.cursor.idx ?? last) + by * steps));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][to], "x"), top: 0 });
  }

  readOut(plot) {
    const at = plot.cursor.idx ?? null;
    const chosen = at === null ? this.points.findLast((one) => !one.isBreak) : this.points[at];
    const words = [];
    for (const line of this.lines) {
      const value = chosen && !chosen.isBreak ? line.of(chosen) : null;
      const text = value === null || value === undefined ? "–" : this.format(value);
      this.values.get(line.id).textContent = text;
      words.push(`${line.label} ${text}`);
    }
    this.when.textContent = at !== null && chosen ? clock(chosen.at_ms) : "now";
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }
}
