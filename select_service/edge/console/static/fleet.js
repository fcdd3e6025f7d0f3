// Every rank of every worker: load, KV use, how its event stream stands.

import { setFilter, written } from "./address.js";
import { count, duration, emptiness, h, NONE, percent, plural, rate } from "./dom.js";
import { LiveTable } from "./table.js";

export const LIFECYCLE_TONES = { schedulable: "good", incomplete: "warn", draining: "warn", unschedulable: "bad" };
const EVENT_TONES = { current: "good", silent: "plain", replaying: "warn", uncertain: "bad", unreachable: "bad", none: "plain" };
const TROUBLED = ["uncertain", "replaying", "unreachable"];

// Blocks in use of a rank: the worker's own word where it is larger, as admission has it.
function kvUse({ worker, rank }) {
  if (!rank) return null;
  const total = rank.kv_total_blocks ?? worker.total_kv_blocks;
  const used = Math.max(rank.decode_blocks, rank.kv_used_blocks ?? 0);
  return { used, total, share: total ? used / total : null };
}

const RATE_MS = 60 * 1000; // what a rank was chosen for, over so long

const OLDEST_S = 365 * 86400; // an engine whose clock says more than that has none

function ageOf(rank, atMs) {
  if (!rank || rank.event_at_ms === null) return null;
  const age = (atMs - rank.event_at_ms) / 1000;
  return Math.abs(age) < OLDEST_S ? age : null;
}

const isSilent = (rank) => ["none", "silent"].includes(rank.kv_state) || (rank.kv_state === "unreachable" && rank.event_at_ms === null);

function age(rank, atMs) {
  if (!rank || isSilent(rank)) return NONE;
  const seconds = ageOf(rank, atMs);
  return seconds === null ? "unknown" : duration(seconds);
}

export const scopeOf = (one) => (one.tenant_id === "default" ? one.model_name : `${one.model_name} · ${one.tenant_id}`);

// How late its events come; of some engines nobody knows.
export function lag(rank) {
  if (!rank || isSilent(rank)) return NONE;
  return rank.lag_s === null ? "unknown" : duration(rank.lag_s);
}

const hasProblem = ({ worker, rank }) => !["schedulable", "draining"].includes(worker.lifecycle) || (rank !== null && (rank.busy || rank.trust < 1 || rank.lost_batches > 0 || TROUBLED.includes(rank.kv_state)));

function events(rank) {
  if (!rank) return NONE;
  const estimated = rank.kv_state === "none" ? "estimated" : `${rank.kv_state}, estimated`;
  const state = rank.estimated ? estimated : rank.kv_state;
  if (rank.trust < 1) return { pill: `${state}, trusted ${percent(rank.trust)}`, tone: "warn", title: "What its index says counts for less: it was wrong, is late or has gaps" };
  let title = rank.estimated ? "No KV events: what it has cached is estimated from what routing put there" : undefined;
  if (rank.kv_state === "unreachable") title = "Nothing answers at its KV-event endpoint. Doctor shows cause and remedy.";
  return { pill: state, tone: EVENT_TONES[rank.kv_state], title };
}

function kv(row, room) {
  const use = kvUse(row);
  if (!use) return NONE;
  if (!use.total) return { bar: null, text: count(use.used), title: "The worker has not said how many blocks it has" };
  const tone = use.share > 0.95 ? "bad" : use.share > 0.8 ? "warn" : "kv";
  return { bar: use.share, text: `${count(use.used)} of ${count(use.total)}`, room, tone, title: percent(use.share, 1) };
}

function chosen(store, row) {
  const lately = store.servedBy(row.key, RATE_MS);
  if (!lately) return NONE;
  return lately.hitRate === null ? `${rate(lately.selections)}/s` : `${rate(lately.selections)}/s · ${percent(lately.hitRate)}`;
}

// What bars of a list are measured by: the longest queue, and the room that the longest text takes.
export function scaleOf(rows) {
  const digits = rows.map((row) => count(kvUse(row)?.total ?? 0).length);
  return { most: Math.max(1, ...rows.map(({ rank }) => rank?.prefill_tokens ?? 0)), room: 2 * Math.max(1, ...digits) + 4 };
}

// What is shown of a rank, wherever ranks are listed; `scale()`: as scaleOf returns it for the list.
export function rankColumns(store, scale) {
  return [
    { id: "prefill", title: "Prefill tokens", numeric: true, barred: true, hint: "Tokens booked and not computed yet", sort: ({ rank }) => rank?.prefill_tokens, cell: ({ rank }) => (rank ? { bar: rank.prefill_tokens / scale().most, text: count(rank.prefill_tokens) } : NONE) },
    { id: "kv", title: "KV blocks", numeric: true, barred: true, hint: "Blocks of live requests, of those the rank has", sort: (row) => kvUse(row)?.share ?? kvUse(row)?.used, cell: (row) => kv(row, scale().room) },
    { id: "requests", title: "Requests", numeric: true, hint: "Live ones", sort: ({ rank }) => rank?.requests, cell: ({ rank }) => count(rank?.requests) },
    { id: "chosen", title: "Rate · hits", numeric: true, hint: "Selections a second, and the share of their prompt tokens that it had cached, over a minute", sort: (row) => store.servedBy(row.key, RATE_MS)?.selections ?? null, cell: (row) => chosen(store, row) },
    { id: "cached", title: "Cached blocks", numeric: true, hint: "Blocks the index knows it to hold, on all tiers", sort: ({ rank }) => rank?.cached_blocks, cell: ({ rank }) => count(rank?.cached_blocks) },
    { id: "events", title: "KV events", sort: ({ rank }) => rank?.kv_state ?? null, cell: ({ rank }) => events(rank) },
    { id: "last", title: "Last event", numeric: true, hint: "How long ago, by the engine's clock", sort: ({ rank }) => ageOf(rank, store.atMs), cell: ({ rank }) => age(rank, store.atMs) },
    { id: "lag", title: "Lag", numeric: true, hint: "Lag: how much later its events come than the fastest of the last hours", sort: ({ rank }) => rank?.lag_s ?? null, cell: ({ rank }) => lag(rank) },
    { id: "gaps", title: "Gaps · lost", numeric: true, hint: "Gaps: how often numbers were missing between its batches of events · lost: batches that nobody can send again", sort: ({ rank }) => (rank ? rank.lost_batches * 1e6 + rank.gaps : null), cell: ({ rank }) => (rank ? `${count(rank.gaps)} · ${count(rank.lost_batches)}` : NONE) },
  ];
}

export class Fleet {
  constructor(store, { filters, keep }) {
    this.store = store;
    this.filters = filters;
    this.keep = keep;
    this.scale = scaleOf([]);
    this.cards = h("div", { class: "cards", role: "list", "aria-label": "In numbers" });
    this.search = h("input", { type: "search", id: "fleet-filter", placeholder: "id, endpoint, model, tenant, state …", autocomplete: "off", spellcheck: "false", value: filters.get("filter") ?? "", oninput: () => this.narrow() });
    this.only = h("select", { id: "fleet-only", onchange: () => this.narrow() }, [["all", "All ranks"], ["problems", "With a problem"], ["schedulable", "Schedulable"], ["incomplete", "Not schedulable"], ["draining", "Draining"], ["loaded", "With load"]].map(([value, text]) => h("option", { value, selected: value === filters.get("only") }, text)));
    this.shown = h("span", { class: "muted", id: "fleet-shown", role: "status" });
    this.table = new LiveTable({ name: "fleet", caption: "Workers and their ranks", columns: this.columns(), key: (row) => row.key, sort: { id: "worker", down: false }, empty: this.nobody() });
    this.node = h("div", {}, this.cards, h("div", { class: "filter" }, h("label", { for: "fleet-filter" }, "Filter"), this.search, h("label", { for: "fleet-only", class: "unseen" }, "Which"), this.only, this.shown), this.table.node);
    this.show();
  }

  nobody() {
    return emptiness("No workers", "No worker is registered yet. Add workers with POST /workers, --workers-file or --kubernetes-workers.", "no-workers");
  }

  columns() {
    return [
      { id: "worker", title: "Worker · rank", sort: (row) => row.key, once: true, cell: (row) => this.name(row) },
      { id: "scope", title: "Model · tenant", sort: ({ worker }) => `${worker.model_name}\n${worker.tenant_id}`, wide: true, cell: ({ worker }) => ({ clip: scopeOf(worker) }) },
      { id: "lifecycle", title: "Lifecycle", sort: ({ worker }) => worker.lifecycle, cell: ({ worker, rank }) => ({ pill: rank?.busy ? "busy" : worker.lifecycle, tone: rank?.busy ? "warn" : LIFECYCLE_TONES[worker.lifecycle], title: worker.reasons.join("; ") || undefined }) },
      ...rankColumns(this.store, () => this.scale),
    ];
  }

  name(row) {
    const { worker, rank } = row;
    const single = worker.ranks[1] === 1 && worker.ranks[0] === 0;
    const text = rank && !single ? `${worker.worker_id} · ${rank.dp_rank}` : worker.worker_id;
    return h("a", { class: "mono", href: `#${written({ name: "worker", argument: worker.worker_id })}` }, text);
  }

  update() {
    this.show();
  }

  narrow() {
    setFilter(this.filters, "filter", this.search.value.trim());
    setFilter(this.filters, "only", this.only.value === "all" ? "" : this.only.value);
    this.keep(this.filters);
    this.show();
  }

  show() {
    const rows = this.store.rows();
    this.scale = scaleOf(rows);
    const found = rows.filter((row) => this.matches(row));
    if (rows.length && !found.length) this.table.empty = emptiness("No rank matches", "Change the filter to see others.", "no-match");
    else this.table.empty = this.nobody();
    this.table.show(found);
    this.shown.textContent = found.length === rows.length ? plural(rows.length, "row") : `${count(found.length)} of ${plural(rows.length, "row")}`;
    this.summarise(rows);
  }

  matches(row) {
    const { worker, rank } = row;
    const only = this.only.value;
    if (only === "problems" && !hasProblem(row)) return false;
    if (only === "schedulable" && worker.lifecycle !== "schedulable") return false;
    if (only === "incomplete" && worker.lifecycle === "schedulable") return false;
    if (only === "draining" && worker.lifecycle !== "draining" && !worker.drains) return false;
    if (only === "loaded" && !rank?.requests) return false;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return true;
    const text = [row.key, worker.endpoint, worker.model_name, worker.tenant_id, worker.lifecycle, worker.role, worker.source, rank?.kv_state, rank?.busy ? "busy" : "", ...worker.taints].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  summarise(rows) {
    const workers = [...this.store.workers.values()];
    const seated = rows.filter((row) => row.rank);
    const uses = seated.map(kvUse).filter((use) => use.total);
    const used = uses.reduce((sum, use) => sum + use.used, 0);
    const total = uses.reduce((sum, use) => sum + use.total, 0);
    const schedulable = workers.filter((one) => one.lifecycle === "schedulable").length;
    const streams = seated.filter(({ rank }) => rank.kv_state !== "none");
    const silent = streams.filter(({ rank }) => isSilent(rank)).length; // in trouble or not
    const streamText = silent ? `${count(streams.length - silent)} of ${count(streams.length)} heard` : streams.length ? "in order" : NONE;
    const troubled = seated.filter(({ rank }) => TROUBLED.includes(rank.kv_state)).length;
    const sum = (name) => seated.reduce((all, { rank }) => all + rank[name], 0);
    const card = (name, title, value, note, tone) => h("div", { class: "card", role: "listitem", "data-card": name, "data-tone": tone }, h("span", { class: "card-title" }, title), h("b", {}, value), h("span", { class: "muted" }, note));
    this.cards.replaceChildren(
      card("workers", "Schedulable workers", `${count(schedulable)} of ${count(workers.length)}`, plural(seated.length, "rank"), schedulable < workers.length ? "warn" : null),
      card("requests", "Live requests", count(sum("requests")), `${count(this.store.state?.waiting)} waiting`),
      card("prefill", "Prefill booked", count(sum("prefill_tokens")), "tokens to compute"),
      card("kv", "KV blocks in use", total ? percent(used / total) : count(sum("decode_blocks")), total ? `${count(used)} of ${count(total)}` : "capacity unknown", total && used / total > 0.9 ? "warn" : null),
      card("cached", "Blocks in the index", count(sum("cached_blocks")), "on all ranks and tiers"),
      card("events", "Event streams", troubled ? `${count(troubled)} in trouble` : streamText, silent ? `${count(silent)} silent so far` : streams.length ? "none silent" : "none", troubled ? "bad" : null),
    );
  }
}
