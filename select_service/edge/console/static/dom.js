// Elements and words. Text goes in as text, never as markup: names of models, workers and
// endpoints are whatever somebody has registered.

function build(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

export const h = (tag, props, ...children) => build(document.createElement(tag), props, children);

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) >= 1e7 ? short.format(value) : whole.format(value);
}

export function decimal(value, digits = 1) {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : value.toFixed(digits);
}

export function percent(value, digits = 0) {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : `${(value * 100).toFixed(digits)} %`;
}

// A second; of a unit of its own.
export const rate = (value) => (value >= 100 ? count(value) : decimal(value, value >= 10 ? 0 : 1));

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const s = Math.max(0, seconds);
  if (s === 0) return "0 s";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 1) return `${(s * 1e3).toFixed(s < 0.01 ? 1 : 0)} ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return twoUnits(Math.round(s), 60, "min", "s");
  if (s < 86400) return twoUnits(Math.round(s / 60), 60, "h", "min");
  return `${Math.floor(s / 86400)} d`;
}

function twoUnits(number, size, large, little) {
  const rest = number % size;
  return `${Math.floor(number / size)} ${large}${rest ? ` ${rest} ${little}` : ""}`;
}

// Of what is known to a tenth of a second.
export const age = (seconds) => (seconds !== null && seconds < 10 ? `${decimal(Math.max(0, seconds))} s` : duration(seconds));

export const ago = (seconds) => (seconds === null || !Number.isFinite(seconds) ? NONE : `${duration(Math.max(0, Math.round(seconds)))} ago`);

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

// What stands where a table or a chart would be: what is missing, and what would change that.
export function emptiness(title, why, name) {
  return h("div", { class: "empty", "data-empty": name ?? title }, h("p", { class: "empty-title" }, title), why && h("p", {}, why));
}

export function pill(text, tone) {
  return h("span", { class: "pill", "data-tone": tone ?? "plain" }, text);
}

export function panel(title, ...content) {
  return h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), ...content);
}

// A weight by its own name, which can be searched for; what it is, and its flag, on hovering.
export function weight(store, name) {
  return h("code", { title: store.about.weights[name] }, name);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value ?? NONE)]));
}
