// Lines over the last minutes, drawn by uPlot: an axis that starts at zero, a readout for the moment
// pointed at, and the newest values in words for who cannot see it.

import { clock, h } from "./dom.js";

const HEIGHT = 168;
const AXIS_FONT = "11px system-ui, sans-serif";
const GRID_LINES = 3; // above zero, at most
const AWAY = { left: -10, top: -10 };

// Between two lines of the grid, so that the highest is at the peak or above it.
export function gridStep(peak, least = 0) {
  const power = 10 ** Math.floor(Math.log10(peak / GRID_LINES));
  const times = [1, 2, 5, 10].find((one) => one * power * GRID_LINES >= peak * (1 - 1e-9));
  return Math.max(least, times * power);
}

export class LineChart {
  // lines: [{id, label, tone, of(point)}]
  constructor({ name, title, lines, format, unit = "", top, range, note, stepLeast }) {
    this.lines = lines;
    this.format = format;
    this.unit = unit; // of what is read out; the title says it of the axis
    this.fixedTop = top;
    this.stepLeast = stepLeast; // between lines of the grid: of what is counted there is no half
    this.range = range;
    range.charts.push(this);
    this.title = title;
    this.points = [];
    this.values = new Map(lines.map((line) => [line.id, h("b", { "data-value": line.id }, "–")]));
    this.when = h("span", { class: "when" }, "now");
    const legend = lines.map((line, at) => h("span", { class: "key" }, h("i", { "data-tone": line.tone, "data-dashed": at > 0, "aria-hidden": "true" }), `${line.label} `, this.values.get(line.id)));
    this.picture = h("div", { class: "chart", role: "img", "aria-label": title, tabindex: "0" });
    this.picture.addEventListener("keydown", (event) => this.press(event));
    this.picture.addEventListener("dblclick", () => this.range.zoom(null));
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
    this.points = points;
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

  isSeen({ at_ms }) {
    const [from, to] = this.range.window(this.atMs);
    return from <= at_ms && at_ms <= to;
  }

  minutes(ms) {
    return (ms - this.atMs) / 60000;
  }

  // Columns: minutes before now, then the values of each line; a restart is a gap.
  data() {
    const columns = [this.points.map((one) => this.minutes(one.at_ms))];
    for (const line of this.lines) columns.push(this.points.map((one) => (one.isBreak ? null : (line.of(one) ?? null))));
    return columns;
  }

  options(width) {
    const color = (name) => () => getComputedStyle(this.picture).getPropertyValue(name).trim();
    const ends = () => this.range.window(this.atMs).map((ms) => this.minutes(ms));
    const middled = ([from, to]) => [from, (from + to) / 2, to];
    const at = (minutes) => (this.range.part ? clock(this.atMs + minutes * 60000) : minutes ? `−${-minutes} min` : "now");
    const axis = { stroke: color("--muted"), font: AXIS_FONT, ticks: { show: false } };
    const grid = { stroke: color("--line"), width: 1 };
    return {
      width,
      height: HEIGHT,
      padding: [10, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 5 } },
      scales: {
        x: { time: false, range: ends },
        y: { range: (_, least, most) => [0, this.fixedTop ?? this.gridTop(most > 0 ? most : 1)] },
      },
      axes: [
        { ...axis, grid: { show: false }, gap: 9, size: 26, splits: () => middled(ends()), values: (_, splits) => splits.map(at) },
        { ...axis, grid, size: 56, splits: (_, at, least, most) => this.splits(most), values: (_, splits) => splits.map((value) => this.format(value).replace(/\.0\b/, "")) },
      ],
      series: [{}, ...this.lines.map((line, number) => ({ label: line.label, stroke: color(`--${line.tone}`), width: 1.6, dash: number ? [5, 3] : undefined, points: { show: false } }))],
      hooks: { draw: [(plot) => this.markRestarts(plot), (plot) => this.readOut(plot)], setCursor: [(plot) => this.readOut(plot)], setSelect: [(plot) => this.look(plot)] },
    };
  }

  gridTop(peak) {
    const step = gridStep(peak, this.stepLeast);
    return step * Math.ceil(peak / step - 1e-9);
  }

  splits(top) {
    const step = this.fixedTop ? this.fixedTop / 2 : gridStep(top, this.stepLeast);
    return Array.from({ length: Math.round(top / step) + 1 }, (_, at) => at * step);
  }

  // uPlot leaves marks across a chart to its users.
  markRestarts(plot) {
    const marks = this.points.filter((one) => one.isBreak && this.isSeen(one)).map((one) => h("span", { class: "restart", css: { left: `${plot.valToPos(this.minutes(one.at_ms), "x")}px` } }, "restart"));
    for (const old of plot.over.querySelectorAll(".restart")) old.remove();
    plot.over.append(...marks);
  }

  // What was drawn over is looked at more closely.
  look(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.range.zoom([left, left + width].map((at) => this.atMs + plot.posToVal(at, "x") * 60000));
  }

  press(event) {
    if (event.key === "0") this.range.zoom(null);
    else if (event.key === "+") {
      const [from, to] = this.range.window(this.atMs);
      const chosen = this.points[this.plot?.cursor.idx ?? -1]?.at_ms ?? to;
      const begin = Math.max(from, Math.min(chosen - (to - from) / 4, (from + to) / 2));
      this.range.zoom([begin, begin + (to - from) / 2]);
    } else this.step(event);
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const first = this.points.findIndex((one) => this.isSeen(one));
    const last = this.points.findLastIndex((one) => this.isSeen(one));
    if (!by || last < 0 || !this.plot) return;
    event.preventDefault();
    const steps = Math.max(1, Math.round((last - first) / 60));
    const to = Math.max(first, Math.min(last, (this.plot.cursor.idx ?? last) + by * steps));
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][to], "x"), top: 0 });
  }

  readOut(plot) {
    const at = plot.cursor.idx ?? null;
    const chosen = at === null ? this.points.findLast((one) => !one.isBreak && this.isSeen(one)) : this.points[at];
    const words = [];
    for (const line of this.lines) {
      const value = chosen && !chosen.isBreak ? line.of(chosen) : null;
      const text = value === null || value === undefined ? "–" : this.format(value) + this.unit;
      this.values.get(line.id).textContent = text;
      words.push(`${line.label} ${text}`);
    }
    this.when.textContent = chosen && (at !== null || this.range.part) ? clock(chosen.at_ms) : "now";
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }
}
