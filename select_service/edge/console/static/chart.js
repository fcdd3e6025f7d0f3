// Lines over the last minutes, in plain SVG: an axis that starts at zero, a readout for the moment
// pointed at, and the newest values in words for who cannot see it.

import { clock, h, svg } from "./dom.js";

const HEIGHT = 168;
const LEFT = 52;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 20;

// A round number at or above the greatest value.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];
  return power * steps.find((step) => step * power >= value * 0.9999);
}

export class LineChart {
  // lines: [{id, label, tone, of(point)}]
  constructor({ name, title, lines, format, top, spanMs, note }) {
    this.lines = lines;
    this.format = format;
    this.fixedTop = top;
    this.spanMs = spanMs;
    this.points = [];
    this.pointed = null;
    this.values = new Map(lines.map((line) => [line.id, h("b", { "data-value": line.id }, "–")]));
    this.when = h("span", { class: "when" }, "now");
    const legend = lines.map((line) => h("span", { class: "key" }, h("i", { "data-tone": line.tone, "aria-hidden": "true" }), `${line.label} `, this.values.get(line.id)));
    this.picture = svg("svg", { class: "chart", role: "img", height: HEIGHT, "aria-label": title, tabindex: "0" });
    this.picture.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.picture.addEventListener("pointerleave", () => this.point(null));
    this.picture.addEventListener("keydown", (event) => this.step(event));
    this.picture.addEventListener("blur", () => this.point(null));
    this.title = title;
    this.node = h("section", { class: "panel chart-panel", "data-chart": name, "aria-label": title }, h("h2", {}, title), h("p", { class: "legend" }, legend, this.when), this.picture, note && h("p", { class: "note" }, note));
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.node);
  }

  close() {
    this.watch.disconnect();
  }

  point(x) {
    this.pointed = x;
    this.draw();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const width = this.picture.clientWidth;
    const step = (width - LEFT - RIGHT) / 60;
    this.point(Math.max(LEFT, Math.min(width - RIGHT, (this.pointed ?? width - RIGHT) + by * step)));
  }

  show(points, atMs) {
    this.points = points;
    this.atMs = atMs;
    this.draw();
  }

  draw() {
    const width = this.picture.clientWidth;
    if (!width || !this.atMs) return;
    const from = this.atMs - this.spanMs;
    const seen = this.points.filter((one) => one.at_ms >= from);
    let most = 0;
    for (const point of seen) for (const line of this.lines) most = Math.max(most, point.isBreak ? 0 : (line.of(point) ?? 0));
    const top = this.fixedTop ?? ceiling(most);
    const x = (ms) => LEFT + ((ms - from) / this.spanMs) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HEIGHT - TOP - BOTTOM);
    const parts = this.grid(width, top, y);
    for (const line of this.lines) {
      let path = "";
      let pen = "M";
      for (const point of seen) {
        const value = point.isBreak ? null : line.of(point);
        if (value === null) {
          pen = "M";
          continue;
        }
        path += `${pen}${x(point.at_ms).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      }
      parts.push(svg("path", { d: path || "M0 0", class: "line", "data-tone": line.tone }));
    }
    for (const point of seen.filter((one) => one.isBreak)) {
      parts.push(svg("line", { class: "restart", x1: x(point.at_ms), x2: x(point.at_ms), y1: TOP, y2: HEIGHT - BOTTOM }));
      parts.push(svg("text", { class: "axis", x: x(point.at_ms) + 3, y: TOP + 9 }, "restart"));
    }
    this.readOut(seen, x, parts);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...parts);
  }

  grid(width, top, y) {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(svg("text", { class: "axis", x: LEFT - 6, y: at + 3, "text-anchor": "end" }, this.format(top * share)));
    }
    const minutes = this.spanMs / 60000;
    for (const share of [0, 0.5, 1]) {
      const label = share === 1 ? "now" : `−${minutes * (1 - share)} min`;
      const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
      parts.push(svg("text", { class: "axis", x: LEFT + share * (width - LEFT - RIGHT), y: HEIGHT - 5, "text-anchor": anchor }, label));
    }
    return parts;
  }

  readOut(seen, x, parts) {
    const real = seen.filter((one) => !one.isBreak);
    let chosen = real.at(-1);
    if (this.pointed !== null && real.length) {
      chosen = real.reduce((best, one) => (Math.abs(x(one.at_ms) - this.pointed) < Math.abs(x(best.at_ms) - this.pointed) ? one : best));
      parts.push(svg("line", { class: "cursor", x1: x(chosen.at_ms), x2: x(chosen.at_ms), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    const words = [];
    for (const line of this.lines) {
      const value = chosen ? line.of(chosen) : null;
      const text = value === null || value === undefined ? "–" : this.format(value);
      this.values.get(line.id).textContent = text;
      words.push(`${line.label} ${text}`);
    }
    this.when.textContent = this.pointed !== null && chosen ? clock(chosen.at_ms) : "now";
    this.picture.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }
}
