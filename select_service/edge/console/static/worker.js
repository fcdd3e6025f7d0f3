// One worker: its record, its ranks, what it was chosen for, and the few changes there are routes for.

import { written } from "./address.js";
import { get } from "./api.js";
import { change } from "./change.js";
import { LineChart } from "./chart.js";
import { confirmed } from "./dialog.js";
import { count, emptiness, facts, h, panel, percent, pill, plural, rate } from "./dom.js";
import { LIFECYCLE_TONES, rankColumns, scaleOf, scopeOf } from "./fleet.js";
import { Poll } from "./poll.js";
import { TimeRange } from "./range.js";
import { LiveTable } from "./table.js";

const PROGRESS_MS = 1000;

export class WorkerPage {
  constructor(store, { argument, filters, keep, go, changed }) {
    this.store = store;
    this.id = argument ?? "";
    this.go = go;
    this.changed = changed;
    this.range = new TimeRange({ filters, keep });
    const note = "Over half a minute.";
    this.charts = [
      new LineChart({ name: "worker-rate", title: "Selections per second", range: this.range, format: rate, unit: "/s", note, lines: [{ id: "selections", label: "given", tone: "a", of: (one) => one.selections }] }),
      new LineChart({ name: "worker-hits", title: "Hit rate", range: this.range, top: 1, format: (value) => percent(value), note: `Share of their prompt tokens that it had cached. ${note}`, lines: [{ id: "hitRate", label: "hit rate", tone: "b", of: (one) => one.hitRate }] }),
    ];
    this.lifecycle = h("span", {});
    this.reasons = h("p", { class: "problem", hidden: true });
    this.progress = h("p", { class: "note", role: "status", id: "drain-progress", hidden: true });
    this.trouble = h("p", { class: "problem", hidden: true });
    this.facts = h("div", { class: "many-facts" });
    const can = store.about.actions;
    const button = (there, text, onclick, tone) => h("button", { type: "button", class: tone, disabled: !there, title: there ? null : "There is no route for it", onclick }, text);
    this.switcher = button(can.drain_worker, "Drain …", () => (this.drains ? this.putBack() : this.drain()));
    this.ranks = new LiveTable({
      name: "ranks",
      caption: "Its ranks",
      columns: [{ id: "rank", title: "Rank", sort: ({ rank }) => rank.dp_rank, once: true, cell: ({ rank }) => String(rank.dp_rank) }, ...rankColumns(store, () => scaleOf(this.rows)), { id: "trust", title: "Trust", numeric: true, hint: "How far its index is believed", sort: ({ rank }) => rank.trust, cell: ({ rank }) => percent(rank.trust) }],
      key: (row) => row.key,
      empty: emptiness("No rank takes part", "A worker that is not schedulable has no load and no index.", "no-ranks"),
    });
    const decisions = written({ name: "decisions", argument: null, filters: new URLSearchParams({ worker: this.id }) });
    this.there = h(
      "div",
      {},
      panel(
        "Record",
        h("p", { class: "worker-title" }, h("b", { class: "mono" }, this.id), this.lifecycle, h("a", { href: `#${decisions}` }, "Decisions for it")),
        this.reasons,
        this.progress,
        this.trouble,
        this.facts,
        h("div", { class: "buttons" }, this.switcher, button(can.cap_worker, "Cap requests …", () => this.cap()), button(can.remove_worker, "Remove …", () => this.remove(), "danger")),
      ),
      this.range.node,
      h("div", { class: "charts" }, this.charts.map((chart) => chart.node)),
      panel("Ranks", this.ranks.node),
    );
    this.absent = emptiness("No such worker", `No worker ${this.id} is registered.`, "no-worker");
    this.node = h("div", {}, h("p", { class: "back" }, h("a", { href: "#fleet" }, "← All workers")), this.absent, this.there);
    this.poll = new Poll(PROGRESS_MS, () => this.look(), this.trouble);
    this.update();
  }

  close() {
    this.poll.close();
    for (const chart of this.charts) chart.close();
  }

  get worker() {
    return this.store.workers.get(this.id);
  }

  update() {
    const { worker } = this;
    this.absent.hidden = Boolean(worker);
    this.there.hidden = !worker;
    if (!worker) {
      this.shown = null;
      return;
    }
    this.rows = this.store.rows().filter((row) => row.worker === worker && row.rank);
    this.ranks.show(this.rows);
    const series = this.store.served(this.id);
    for (const chart of this.charts) chart.show(series, this.store.atMs);
    if (worker === this.shown) return;
    this.shown = worker;
    this.showLifecycle(worker);
    const text = `Not schedulable: ${worker.reasons.join("; ")}`;
    this.reasons.hidden = worker.lifecycle !== "incomplete";
    if (this.reasons.textContent !== text) this.reasons.textContent = text;
    this.facts.replaceChildren(facts([["Endpoint", worker.endpoint], ["Model", worker.model_name], ["Tenant", worker.tenant_id], ["Role", worker.role], ["Registered by", worker.source], ["Block size", worker.block_size && plural(worker.block_size, "token")], ["Capacity of a rank", worker.total_kv_blocks && plural(worker.total_kv_blocks, "KV block")], ["Batch of a rank", worker.max_num_batched_tokens && plural(worker.max_num_batched_tokens, "token")], ["Sequences of a rank", worker.max_num_seqs && `${count(worker.max_num_seqs)} at a time`], ["Cap of requests", worker.max_inflight && `${count(worker.max_inflight)} at a time`], ["Taints", worker.taints.join(", ") || null], ["KV events", { engine: worker.replay ? "with replay" : "without replay", predicted: "none; its blocks are estimated from routing", none: "none" }[worker.kv_events]]]));
  }

  showLifecycle({ lifecycle, drains }) {
    this.drains = drains;
    this.switcher.textContent = drains ? "Put back …" : "Drain …";
    if (this.lifecycle.textContent !== lifecycle) this.lifecycle.replaceChildren(pill(lifecycle, LIFECYCLE_TONES[lifecycle]));
  }

  async look() {
    if (!this.worker) return;
    const drain = await get(`workers/${encodeURIComponent(this.id)}/drain`);
    this.showLifecycle(drain);
    this.progress.hidden = !drain.drains;
    const text = drain.drains ? drainText(drain) : "";
    if (this.progress.textContent !== text) this.progress.textContent = text;
  }

  live() {
    return plural(this.rows.reduce((sum, { rank }) => sum + rank.requests, 0), "live reservation");
  }

  change(method, path, body) {
    return change(method, `workers/${encodeURIComponent(this.id)}${path}`, body);
  }

  drain() {
    const { id, worker } = this;
    const others = [...this.store.workers.values()].filter((one) => one !== worker && one.lifecycle === "schedulable" && scopeOf(one) === scopeOf(worker)).length;
    const input = h("input", { type: "text", name: "reason", id: "drain-reason", maxlength: "256", autocomplete: "off", autofocus: true });
    confirmed({
      title: `Drain worker ${id}?`,
      text: [
        `It is given no more work. What it has goes on to its end (${this.live()}); who waits for this worker alone is refused.`,
        ...(others ? [] : [`It is the last schedulable worker of ${scopeOf(worker)}: its requests will be refused.`]),
      ],
      fields: [h("div", { class: "field" }, h("label", { for: "drain-reason" }, "Why, for others to read (may be empty)"), input)],
      verb: "Drain",
      act: async (form) => {
        const reason = form.get("reason").trim();
        await this.change("POST", "/drain", reason ? { reason } : {});
        await this.poll.once();
        this.changed(`Worker ${id} drains.`);
      },
    });
  }

  putBack() {
    const { id } = this;
    confirmed({
      title: `Put worker ${id} back?`,
      text: ["It may be chosen again at once."],
      verb: "Put back",
      act: async () => {
        await this.change("DELETE", "/drain");
        await this.poll.once();
        this.changed(`Worker ${id} is back.`);
      },
    });
  }

  cap() {
    const { id, worker } = this;
    const input = h("input", { type: "number", name: "max_inflight", id: "cap-number", min: "1", max: "4294967295", required: true, value: worker.max_inflight ?? "", autofocus: true });
    confirmed({
      title: `Cap worker ${id}?`,
      text: ["It takes at most this many requests at a time. Further ones wait or go to other workers. Requests that it already has go on."],
      fields: [h("div", { class: "field" }, h("label", { for: "cap-number" }, "Requests at a time"), input)],
      verb: "Cap it",
      act: async (form) => {
        await this.change("PATCH", "", { max_inflight: Number(form.get("max_inflight")) });
        this.changed(`Worker ${id} takes ${form.get("max_inflight")} requests at a time.`);
      },
    });
  }

  remove() {
    const { id } = this;
    confirmed({
      title: `Remove worker ${id}?`,
      text: [`Its record, its index and its ${this.live()} go at once. Whoever registered it may register it again; a worker that a file or Kubernetes names cannot be removed here.`],
      verb: "Remove",
      danger: true,
      act: async () => {
        await this.change("DELETE", "");
        this.changed(`Worker ${id} is removed.`);
        this.go("fleet");
      },
    });
  }
}

// How far a drain is, of the answer of its route.
function drainText(drain) {
  const why = drain.reason ? ` (${drain.reason})` : "";
  if (drain.safe_to_terminate) return `Drained${why}: nothing is in flight, it may be terminated.`;
  return `Draining${why}: waits for ${drain.waiting_for.join(", ")} · ${plural(drain.prefill_tokens, "prefill token")} to compute, ${plural(drain.decode_blocks, "KV block")} held`;
}
