// Every rank of every worker: load, KV use, how its event stream stands. Opens a worker's record,
// and from there the few changes there are routes for.

import { get } from "./api.js";
import { change } from "./change.js";
import { confirmed, sheet } from "./dialog.js";
import { count, duration, emptiness, facts, h, NONE, percent, pill, plural } from "./dom.js";
import { Poll } from "./poll.js";
import { LiveTable } from "./table.js";

const LIFECYCLE_TONES = { schedulable: "good", incomplete: "warn", draining: "warn", unschedulable: "bad" };
const EVENT_TONES = { current: "good", silent: "plain", replaying: "warn", uncertain: "bad", unreachable: "bad", none: "plain" };
const TROUBLED = ["uncertain", "replaying", "unreachable"];

// Blocks in use of a rank: the worker's own word where it is larger, as admission has it.
function kvUse({ worker, rank }) {
  if (!rank) return null;
  const total = rank.kv_total_blocks ?? worker.total_kv_blocks;
  const used = Math.max(rank.decode_blocks, rank.kv_used_blocks ?? 0);
  return { used, total, share: total ? used / total : null };
}

const PROGRESS_MS = 1000;

const OLDEST_S = 365 * 86400; // an engine whose clock says more than that has none

function ageOf(rank, atMs) {
  if (!rank || rank.event_at_ms === null) return null;
  const age = (atMs - rank.event_at_ms) / 1000;
  return Math.abs(age) < OLDEST_S ? age : null;
}

const isUnheard = (rank) => ["none", "silent"].includes(rank.kv_state) || (rank.kv_state === "unreachable" && rank.event_at_ms === null);

function age(rank, atMs) {
  if (!rank || isUnheard(rank)) return NONE;
  const seconds = ageOf(rank, atMs);
  return seconds === null ? "unknown" : duration(seconds);
}

export const scopeOf = (one) => (one.tenant_id === "default" ? one.model_name : `${one.model_name} · ${one.tenant_id}`);

// How late its events come; of some engines nobody knows.
export function lag(rank) {
  if (!rank || isUnheard(rank)) return NONE;
  return rank.lag_s === null ? "unknown" : duration(rank.lag_s);
}

const hasProblem = ({ worker, rank }) => !["schedulable", "draining"].includes(worker.lifecycle) || (rank !== null && (rank.busy || rank.trust < 1 || rank.lost_batches > 0 || TROUBLED.includes(rank.kv_state)));

export class Fleet {
  constructor(store, { changed }) {
    this.store = store;
    this.changed = changed;
    this.most = 1;
    this.cards = h("div", { class: "cards", role: "list", "aria-label": "In numbers" });
    this.search = h("input", { type: "search", id: "fleet-filter", placeholder: "id, endpoint, model, tenant, state …", autocomplete: "off", spellcheck: "false", oninput: () => this.show() });
    this.only = h("select", { id: "fleet-only", onchange: () => this.show() }, [["all", "All ranks"], ["problems", "With a problem"], ["schedulable", "Schedulable"], ["incomplete", "Not schedulable"], ["draining", "Draining"], ["loaded", "With load"]].map(([value, text]) => h("option", { value }, text)));
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
      { id: "prefill", title: "Prefill tokens", numeric: true, hint: "Tokens booked and not computed yet", sort: ({ rank }) => rank?.prefill_tokens, cell: ({ rank }) => (rank ? { bar: rank.prefill_tokens / this.most, text: count(rank.prefill_tokens) } : NONE) },
      { id: "kv", title: "KV blocks", numeric: true, hint: "Blocks of live requests, of those the rank has", sort: (row) => kvUse(row)?.share ?? kvUse(row)?.used, cell: (row) => this.kv(row) },
      { id: "requests", title: "Requests", numeric: true, sort: ({ rank }) => rank?.requests, cell: ({ rank }) => count(rank?.requests) },
      { id: "cached", title: "Cached", numeric: true, hint: "Blocks the index knows it to hold, on all tiers", sort: ({ rank }) => rank?.cached_blocks, cell: ({ rank }) => count(rank?.cached_blocks) },
      { id: "events", title: "KV events", sort: ({ rank }) => rank?.kv_state ?? null, cell: ({ rank }) => this.events(rank) },
      { id: "last", title: "Last event", numeric: true, hint: "How long ago, by the engine's clock", sort: ({ rank }) => ageOf(rank, this.store.atMs), cell: ({ rank }) => age(rank, this.store.atMs) },
      { id: "lag", title: "Lag", numeric: true, hint: "How late its events come, against the fastest of the last hours", sort: ({ rank }) => rank?.lag_s ?? null, cell: ({ rank }) => lag(rank) },
      { id: "gaps", title: "Gaps · lost", numeric: true, hint: "Gaps in the numbers of its batches · batches that will never come", sort: ({ rank }) => (rank ? rank.lost_batches * 1e6 + rank.gaps : null), cell: ({ rank }) => (rank ? `${count(rank.gaps)} · ${count(rank.lost_batches)}` : NONE) },
    ];
  }

  name(row) {
    const { worker, rank } = row;
    const single = worker.ranks[1] === 1 && worker.ranks[0] === 0;
    const text = rank && !single ? `${worker.worker_id} · ${rank.dp_rank}` : worker.worker_id;
    return h("button", { type: "button", class: "link mono", title: "Show its record", onclick: () => this.open(worker.worker_id) }, text);
  }

  events(rank) {
    if (!rank) return NONE;
    if (rank.trust < 1) return { pill: `${rank.kv_state}, trusted ${percent(rank.trust)}`, tone: "warn", title: "What its index says counts for less: it was wrong, is late or has gaps" };
    const title = rank.kv_state === "unreachable" ? "Nothing answers at its KV-event endpoint. Doctor shows cause and remedy." : undefined;
    return { pill: rank.kv_state, tone: EVENT_TONES[rank.kv_state], title };
  }

  kv(row) {
    const use = kvUse(row);
    if (!use) return NONE;
    if (!use.total) return { bar: null, text: count(use.used), title: "The worker has not said how many blocks it has" };
    const tone = use.share > 0.95 ? "bad" : use.share > 0.8 ? "warn" : "kv";
    return { bar: use.share, text: `${count(use.used)} of ${count(use.total)}`, room: 2 * count(use.total).length + 4, tone, title: percent(use.share, 1) };
  }

  update() {
    this.show();
  }

  show() {
    const rows = this.store.rows();
    this.most = Math.max(1, ...rows.map(({ rank }) => rank?.prefill_tokens ?? 0));
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
    const silent = seated.filter(({ rank }) => rank.kv_state === "silent").length;
    const troubled = seated.filter(({ rank }) => TROUBLED.includes(rank.kv_state)).length;
    const sum = (name) => seated.reduce((all, { rank }) => all + rank[name], 0);
    const card = (name, title, value, note, tone) => h("div", { class: "card", role: "listitem", "data-card": name, "data-tone": tone }, h("span", { class: "card-title" }, title), h("b", {}, value), h("span", { class: "muted" }, note));
    this.cards.replaceChildren(
      card("workers", "Schedulable workers", `${count(schedulable)} of ${count(workers.length)}`, plural(seated.length, "rank"), schedulable < workers.length ? "warn" : null),
      card("requests", "Live requests", count(sum("requests")), `${count(this.store.state?.waiting)} waiting`),
      card("prefill", "Prefill booked", count(sum("prefill_tokens")), "tokens to compute"),
      card("kv", "KV blocks in use", total ? percent(used / total) : count(sum("decode_blocks")), total ? `${count(used)} of ${count(total)}` : "capacity not told", total && used / total > 0.9 ? "warn" : null),
      card("cached", "Blocks in the index", count(sum("cached_blocks")), "on all ranks and tiers"),
      card("events", "Event streams", !seated.length ? NONE : troubled ? `${count(troubled)} in trouble` : "in order", silent ? `${count(silent)} silent so far` : seated.length ? "none silent" : "none", troubled ? "bad" : null),
    );
  }

  open(id) {
    const worker = this.store.workers.get(id);
    if (!worker) return;
    const mine = this.store.rows().filter((row) => row.worker.worker_id === id && row.rank);
    const can = this.store.about.actions;
    const lines = mine.map((row) => h("tr", {}, h("th", { scope: "row" }, String(row.rank.dp_rank)), h("td", { class: "num" }, count(row.rank.prefill_tokens)), h("td", { class: "num" }, count(kvUse(row).used)), h("td", { class: "num" }, count(row.rank.requests)), h("td", {}, row.rank.kv_state), h("td", { class: "num" }, percent(row.rank.trust)), h("td", { class: "num" }, age(row.rank, this.store.atMs)), h("td", { class: "num" }, lag(row.rank))));
    const ranks = mine.length ? h("table", { "aria-label": "Its ranks" }, h("thead", {}, h("tr", {}, [["Rank"], ["Prefill", "num"], ["Blocks", "num"], ["Requests", "num"], ["KV events"], ["Trust", "num"], ["Last event", "num"], ["Lag", "num"]].map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))), h("tbody", {}, lines)) : emptiness("No rank takes part", "A worker that is not schedulable has no load and no index.", "no-ranks");
    const button = (there, text, why, onclick, tone) => h("button", { type: "button", class: tone, disabled: !there, title: there ? null : why, onclick }, text);
    const lifecycle = h("span", {}, pill(worker.lifecycle, LIFECYCLE_TONES[worker.lifecycle]));
    const progress = h("p", { class: "note", role: "status", id: "drain-progress", hidden: true });
    const trouble = h("p", { class: "problem", hidden: true });
    let drains = worker.drains;
    const switcher = button(can.drain_worker, drains ? "Put back …" : "Drain …", "There is no route for it", () => (drains ? this.putBack(id) : this.drain(worker)));
    const poll = new Poll(PROGRESS_MS, async () => {
      const told = await get(`workers/${encodeURIComponent(id)}/drain`);
      drains = told.drains;
      switcher.textContent = drains ? "Put back …" : "Drain …";
      lifecycle.replaceChildren(pill(told.lifecycle, LIFECYCLE_TONES[told.lifecycle]));
      progress.hidden = !drains;
      const text = drains ? drainText(told) : "";
      if (progress.textContent !== text) progress.textContent = text;
    }, trouble);
    this.look = () => poll.once();
    const node = sheet(
      `Worker ${id}`,
      [
        worker.lifecycle === "incomplete" && h("p", { class: "problem" }, `Not schedulable: ${worker.reasons.join("; ")}`),
        progress,
        trouble,
        facts([["Lifecycle", lifecycle], ["Endpoint", worker.endpoint], ["Model", worker.model_name], ["Tenant", worker.tenant_id], ["Role", worker.role], ["Registered by", worker.source], ["Block size", worker.block_size && `${worker.block_size} tokens`], ["KV blocks of a rank", worker.total_kv_blocks && count(worker.total_kv_blocks)], ["Batched tokens", worker.max_num_batched_tokens && count(worker.max_num_batched_tokens)], ["Sequences of a rank", worker.max_num_seqs && count(worker.max_num_seqs)], ["Requests at a time", worker.max_inflight && count(worker.max_inflight)], ["Taints", worker.taints.join(", ") || null], ["Events", worker.kv_events ? (worker.replay ? "with replay" : "without replay") : "none"]]),
        ranks,
      ],
      [
        switcher,
        button(can.cap_worker, "Cap requests …", "There is no route for it", () => this.cap(worker)),
        button(can.remove_worker, "Remove …", "There is no route for it", () => this.remove(worker), "danger"),
      ],
    );
    node.addEventListener("close", () => poll.close());
  }

  live(id) {
    return this.store.rows().filter((row) => row.worker.worker_id === id).reduce((sum, { rank }) => sum + (rank?.requests ?? 0), 0);
  }

  drain(worker) {
    const id = worker.worker_id;
    const others = [...this.store.workers.values()].filter((one) => one !== worker && one.lifecycle === "schedulable" && scopeOf(one) === scopeOf(worker)).length;
    const input = h("input", { type: "text", name: "reason", id: "drain-reason", maxlength: "256", autocomplete: "off", autofocus: true });
    confirmed({
      title: `Drain worker ${id}?`,
      text: [
        `It is given no more work. What it has goes on to its end (${plural(this.live(id), "live reservation")}); who waits for this worker alone is refused.`,
        ...(others ? [] : [`It is the last schedulable worker of ${scopeOf(worker)}: its requests will be refused.`]),
      ],
      fields: [h("div", { class: "field" }, h("label", { for: "drain-reason" }, "Why, for others to read (may be empty)"), input)],
      verb: "Drain",
      act: async (form) => {
        const reason = form.get("reason").trim();
        await change("POST", `workers/${encodeURIComponent(id)}/drain`, reason ? { reason } : {});
        await this.look();
        this.changed(`Worker ${id} drains.`);
      },
    });
  }

  putBack(id) {
    confirmed({
      title: `Put worker ${id} back?`,
      text: ["It may be chosen again at once."],
      verb: "Put back",
      act: async () => {
        await change("DELETE", `workers/${encodeURIComponent(id)}/drain`);
        await this.look();
        this.changed(`Worker ${id} is back.`);
      },
    });
  }

  cap(worker) {
    const id = worker.worker_id;
    const input = h("input", { type: "number", name: "max_inflight", id: "cap-number", min: "1", max: "4294967295", required: true, value: worker.max_inflight ?? "", autofocus: true });
    confirmed({
      title: `Cap worker ${id}?`,
      text: ["It takes at most this many requests at a time. Further ones wait or go to other workers. Requests that it already has go on."],
      fields: [h("div", { class: "field" }, h("label", { for: "cap-number" }, "Requests at a time"), input)],
      verb: "Cap it",
      act: async (form) => {
        await change("PATCH", `workers/${encodeURIComponent(id)}`, { max_inflight: Number(form.get("max_inflight")) });
        this.changed(`Worker ${id} takes ${form.get("max_inflight")} requests at a time.`);
      },
    });
  }

  remove(worker) {
    const id = worker.worker_id;
    confirmed({
      title: `Remove worker ${id}?`,
      text: [`Its record, its index and its ${plural(this.live(id), "live reservation")} go at once. Whoever registered it may register it again; a worker that a file or Kubernetes names cannot be removed here.`],
      verb: "Remove",
      danger: true,
      act: async () => {
        await change("DELETE", `workers/${encodeURIComponent(id)}`);
        for (const node of document.querySelectorAll("dialog.sheet")) if (!node.querySelector("form")) node.close();
        this.changed(`Worker ${id} is removed.`);
      },
    });
  }
}

// How far a drain is, of the answer of its route.
function drainText(told) {
  const why = told.reason ? ` (${told.reason})` : "";
  if (told.safe_to_terminate) return `Drained${why}: nothing is in flight, it may be terminated.`;
  return `Draining${why}: waits for ${told.waiting_for.join(", ")} · ${plural(told.prefill_tokens, "prefill token")} to compute, ${plural(told.decode_blocks, "KV block")} held`;
}
