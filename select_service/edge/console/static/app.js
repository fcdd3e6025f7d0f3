// The frame: which view is open, how the connection stands, the numbers that are always there.

import { About } from "./about.js";
import { read, written } from "./address.js";
import { Admission } from "./admission.js";
import { Follower, get } from "./api.js";
import { Bookings } from "./bookings.js";
import { Decisions } from "./decisions.js";
import { Doctor } from "./doctor.js";
import { ago, count, decimal, duration, h, NONE, percent } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Prefix } from "./prefix.js";
import { Replicas } from "./replicas.js";
import { Shadow } from "./shadow.js";
import { Store } from "./store.js";
import { askForToken, forgetForChanges } from "./token.js";
import { Traffic } from "./traffic.js";
import { WorkerPage } from "./worker.js";

const VIEWS = [
  ["fleet", "Fleet", Fleet],
  ["traffic", "Traffic", Traffic],
  ["admission", "Admission", Admission],
  ["decisions", "Decisions", Decisions],
  ["shadow", "Shadow", Shadow],
  ["prefix", "Prefix", Prefix],
  ["reservations", "Reservations", Bookings],
  ["replicas", "Replicas", Replicas],
  ["doctor", "Doctor", Doctor],
  ["about", "About", About],
];
const PAGES = [...VIEWS, ["worker", "Worker", WorkerPage]]; // with an address, and no tab of its own
const FINDINGS_MS = 10000;
const NOTICE_MS = 8000;

const place = (id) => document.getElementById(id);
const store = new Store();
let view = null;
let current = "";
let link = { state: "connecting" };

// -- views ---------------------------------------------------------------------------------------

function address() {
  const at = read(location.hash.slice(1));
  return PAGES.some(([id]) => id === at.name) ? at : { ...at, name: "fleet" };
}

function open() {
  if (!store.about) return;
  const at = address();
  const { name, argument, filters } = at;
  const wanted = written(at);
  if (wanted === current) return;
  const before = read(current);
  const isOther = name !== before.name || String(filters) !== String(before.filters);
  current = wanted;
  for (const node of document.querySelectorAll("dialog")) node.close(); // it asks about what was there
  if (view && !isOther && name === "decisions") {
    if (argument && argument !== view.chosen) view.pick(argument);
    return;
  }
  view?.close?.();
  const [, title, View] = PAGES.find(([id]) => id === name);
  view = new View(store, { argument, filters, keep, go, changed: announce });
  const heading = name === "worker" ? `${title} ${argument ?? ""}` : title;
  place("content").replaceChildren(h("h2", { class: "unseen" }, heading), view.node);
  place("content").dataset.view = name;
  document.title = `${heading} · select-service`;
  for (const tab of document.querySelectorAll("#tabs a")) {
    if (tab.dataset.view === (name === "worker" ? "fleet" : name)) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  view.update();
}

function go(hash) {
  if (location.hash !== `#${hash}`) location.hash = hash;
}

// A view was narrowed: its address says so, and it stays as it is.
function keep(filters) {
  current = written({ ...address(), filters });
  history.replaceState(null, "", `#${current}`);
}

function announce(text) {
  const notice = place("notice");
  notice.textContent = text;
  notice.hidden = false;
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => (notice.hidden = true), NOTICE_MS);
}

// -- what is always there --------------------------------------------------------------------------

function showConnection() {
  const node = place("connection");
  const isLive = link.state === "live";
  let text = "Connecting …";
  if (isLive) text = "Live";
  else if (link.state === "lost") {
    const last = store.receivedAt ? `last update ${ago((Date.now() - store.receivedAt) / 1000)}` : "never connected";
    const left = Math.max(0, Math.ceil((link.retryAt - Date.now()) / 1000));
    text = `Connection lost · ${last} · ${left ? `trying again in ${left} s` : "trying again"} (${link.why})`;
  }
  if (node.textContent !== text) node.textContent = text;
  node.dataset.state = link.state;
  const isOther = document.documentElement.dataset.link !== link.state;
  document.documentElement.dataset.link = link.state;
  place("reconnect").hidden = link.state !== "lost";
  if (isOther && store.about) showVitals();
}

function showVitals() {
  const last = store.series().findLast((one) => !one.isBreak);
  const { state } = store;
  const isLost = link.state === "lost"; // whether it is ready now, nobody here knows
  const ready = isLost ? "unknown" : state.ready ? "ready" : `not ready: ${[...(state.schedulable_workers ? [] : ["no schedulable worker"]), ...state.waiting_for].join(", ")}`;
  const isIdle = !(last?.selections > 0); // then what is over ten seconds is of requests that are over
  const vital = (name, title, value, tone, hint) => h("div", { "data-vital": name, "data-tone": tone, title: hint }, h("dt", {}, title), h("dd", {}, value));
  place("vitals").replaceChildren(
    vital("ready", "Service", ready, isLost ? null : state.ready ? "good" : "bad"),
    vital("rate", "Selections", last ? `${decimal(last.selections, last.selections < 10 ? 1 : 0)}/s` : "–"),
    vital("p99", "Latency, p99", isIdle ? NONE : duration(last.p99), null, "Of the selections of the last ten seconds"),
    vital("hits", "Hit rate", isIdle ? NONE : percent(last.hitRate), null, "Share of the prompt tokens of the last ten seconds that the chosen worker had cached"),
    vital("waiting", "Requests waiting", count(state.waiting)),
    vital("reservations", "Reservations", count(state.reservations)),
  );
}

// Looked for every few seconds, and at once when the service is there again.
async function showFindings() {
  clearTimeout(showFindings.timer);
  const badge = document.querySelector("#tabs [data-view=doctor] .badge");
  try {
    const report = link.state === "live" && !document.hidden ? await get("console/api/findings") : null;
    if (report) {
      const grave = report.findings.filter((one) => one.severity !== "info");
      badge.textContent = grave.length ? `${grave.length}${report.left_out ? "+" : ""}` : "";
      badge.dataset.tone = grave.some((one) => one.severity === "error") ? "bad" : "warn";
    }
  } catch {
    badge.textContent = "";
  }
  clearTimeout(showFindings.timer);
  showFindings.timer = setTimeout(showFindings, FINDINGS_MS);
}

function take(kind, data) {
  store.take(kind, data);
  if (kind === "snapshot" && store.assets !== store.about.assets) announce("The service was updated: reload this page.");
  showVitals();
  if (view) view.update();
  else open();
}

// -- light and dark --------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function readTheme() {
  try {
    const found = localStorage.getItem("select-service-theme");
    return THEMES.includes(found) ? found : "system";
  } catch {
    return "system"; // storage may be forbidden
  }
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  place("theme").textContent = `Theme: ${theme}`;
  try {
    localStorage.setItem("select-service-theme", theme);
  } catch {
    // then it holds until the page is closed
  }
}

// -- go --------------------------------------------------------------------------------------------

place("tabs").append(...VIEWS.map(([id, title]) => h("li", {}, h("a", { href: `#${id}`, "data-view": id }, title, id === "doctor" && h("span", { class: "badge" })))));
let theme = readTheme();
setTheme(theme);
place("theme").addEventListener("click", () => setTheme((theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is open
  place("content").focus();
});
addEventListener("hashchange", open);
const follower = new Follower("console/events", take, (state) => {
  const isBack = state.state === "live" && link.state !== "live";
  link = state;
  showConnection();
  if (isBack) showFindings();
});
place("reconnect").addEventListener("click", () => follower.hurry());
const askAndTry = () =>
  askForToken(async () => {
    await get("console/api/findings");
    follower.hurry();
  });
place("token").addEventListener("click", askAndTry);
place("forget").addEventListener("click", () => {
  forgetForChanges();
  announce("The token for changes is forgotten.");
});
addEventListener("token-wanted", askAndTry);
setInterval(showConnection, 1000);
