// Why this worker? The decisions made last, and one of them with every candidate: what it would
// have cost in which parts, who was left out and why, and by how much the winner won.

import { setFilter, written } from "./address.js";
import { get } from "./api.js";
import { clock, count, decimal, duration, emptiness, facts, h, NONE, panel, percent, pill, plural, weight } from "./dom.js";
import { Poll } from "./poll.js";

const OUTCOMES = { placed: "good", refused: "bad", cache_threshold: "warn" };
const REASONS = {
  not_allowed: "not among the allowed workers",
  pinned_elsewhere: "the request is pinned to another",
  taint: "lacks a required taint",
  busy: "above a busy threshold",
  full: "at its cap of requests",
  role: "its role does not take this part",
  cache_hit: "holds too little of the prompt",
  draining: "drains and takes no new work",
  not_schedulable: "its record is incomplete or contradicts others",
  batch: "the rank was chosen for a whole batch",
  failing: "passed over: its requests failed",
  unreachable: "passed over: its event publisher is out of reach",
  refused: "the request was refused before",
  session: "its session is on another",
};
const SHOWN = 40;
const ENDS = [["", "all"], ["placed", "placed"], ["refused", "refused"], ["cache_threshold", "below its cache threshold"]];

// The parts of a candidate's cost, in blocks; they add up to its cost, as the formula has them:
// (prefill_load_scale · (prefill_cost − credit + pull_cost + delay_cost + eviction_cost + interference_cost)
//  + decode_load_scale · decode_cost + context_load_scale · context_cost
//  + decode_active_request_weight · requests) · slowness · taint_factor.
export function parts(one, weights) {
  if (one.cost === null || one.cost === undefined) return null;
  const factor = (one.slowness ?? 1) * (one.taint_factor ?? 1);
  const scale = (weights.prefill_load_scale ?? 1) * factor;
  return {
    prefill: scale * (one.prefill_cost - one.credit + (one.pull_cost ?? 0)),
    delay: scale * ((one.delay_cost ?? 0) + (one.interference_cost ?? 0)),
    eviction: scale * (one.eviction_cost ?? 0),
    decode: ((weights.decode_load_scale ?? 1) * one.decode_cost + (weights.context_load_scale ?? 0) * (one.context_cost ?? 0) + (weights.decode_active_request_weight ?? 0) * (one.requests ?? 0)) * factor,
    credit: scale * one.credit,
  };
}

const nameOf = (one) => `${one.worker_id} · ${one.dp_rank}`;

export class Decisions {
  constructor(store, { argument, filters, keep, go }) {
    this.store = store;
    this.go = go;
    this.filters = filters;
    this.keep = keep;
    this.chosen = argument ?? null;
    this.list = h("ol", { class: "choices", id: "decision-list" });
    this.detail = h("div", { class: "detail", id: "decision" }, emptiness("Pick a decision", "Its candidates are shown here.", "no-choice"));
    this.trouble = h("p", { class: "problem", role: "status", hidden: true });
    this.hold = h("input", { type: "checkbox", id: "decisions-hold" });
    this.find = h("input", { type: "search", id: "decision-id", placeholder: "selection or reservation id", spellcheck: "false", autocomplete: "off" });
    const search = h("form", { class: "filter", role: "search" }, h("label", { for: "decision-id" }, "Find"), this.find, h("button", { type: "submit" }, "Show"), h("label", { class: "check" }, this.hold, "Hold the list"));
    search.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.find.value.trim()) this.pick(this.find.value.trim());
    });
    const models = new Set([...store.workers.values()].map((one) => one.model_name));
    const chosen = filters.get("model");
    if (chosen) models.add(chosen);
    const select = (name, title, options) => h("select", { id: `decisions-${name}`, "aria-label": title, onchange: (event) => this.narrow(name, event.target.value) }, options.map(([value, text]) => h("option", { value, selected: value === filters.get(name) }, text)));
    const worker = h("input", { id: "decisions-worker", "aria-label": "Worker", placeholder: "any worker", inputmode: "numeric", autocomplete: "off", value: filters.get("worker") ?? "", onchange: (event) => this.narrow("worker", event.target.value.trim()) });
    const narrowed = h("div", { class: "filter" }, h("span", {}, "Only"), worker, select("model", "Model", [["", "any model"], ...[...models].sort().map((one) => [one, one])]), select("outcome", "Outcome", ENDS.map(([value, text]) => [value, value ? text : "any outcome"])));
    this.node = h("div", {}, this.trouble, search, narrowed, h("div", { class: "split" }, h("section", { class: "panel", "aria-label": "Decisions, newest first" }, h("h2", {}, "Newest first"), this.list), this.detail));
    this.poll = new Poll(2000, () => this.look(), this.trouble);
    if (this.chosen) this.show(this.chosen);
  }

  narrow(name, value) {
    setFilter(this.filters, name, value);
    this.keep(this.filters);
    this.list.replaceChildren();
    this.poll.once();
  }

  async look() {
    if (this.hold.checked && this.list.querySelector("button")) return;
    const narrowed = String(this.filters);
    const asked = new URLSearchParams({ limit: 50 });
    for (const [name, field] of [["worker", "worker_id"], ["model", "model_name"], ["outcome", "outcome"]]) if (this.filters.get(name)) asked.set(field, this.filters.get(name));
    const answer = await get(`console/api/decisions?${asked}`);
    if (String(this.filters) !== narrowed) return; // it was narrowed otherwise meanwhile
    if (!answer.available) {
      this.list.replaceChildren(emptiness("No decisions are kept", answer.why, "ring-off"));
      return;
    }
    if (!answer.decisions.length && asked.size > 1) {
      this.list.replaceChildren(emptiness("No decision matches", "Of those that are kept, none is about this worker, model and outcome.", "no-match"));
      return;
    }
    if (!answer.decisions.length) {
      this.list.replaceChildren(emptiness("No decisions yet", "Selections appear here as they are made.", "no-decisions"));
      return;
    }
    this.merge(answer.decisions);
  }

  // New ones come first and old ones go; a line that stays is the same element, with its focus.
  merge(decisions) {
    const before = new Map([...this.list.querySelectorAll("button")].map((button) => [button.dataset.decision, button.parentElement]));
    const lines = decisions.map((one) => before.get(one.decision_id) ?? this.line(one));
    const wanted = new Set(lines);
    for (const child of [...this.list.children]) if (!wanted.has(child) && !child.contains(document.activeElement)) child.remove();
    let next = this.list.firstElementChild;
    for (const line of lines) {
      if (line === next) next = next.nextElementSibling;
      else this.list.insertBefore(line, next);
    }
  }

  line(one) {
    const what = one.chosen ? `worker ${nameOf(one.chosen)}` : (one.refusal?.code ?? one.outcome.replaceAll("_", " "));
    const margin = one.chosen && one.chosen.margin !== null && one.chosen.margin !== undefined ? `margin ${decimal(one.chosen.margin)} blocks` : "";
    return h(
      "li",
      {},
      h(
        "button",
        { type: "button", "data-decision": one.decision_id, "aria-current": one.decision_id === this.chosen ? "true" : null, onclick: () => this.pick(one.decision_id) },
        h("span", { class: "choice-top" }, h("time", {}, clock(one.at_ms)), h("b", {}, what), one.outcome !== "placed" && pill(one.outcome.replaceAll("_", " "), OUTCOMES[one.outcome])),
        h("span", { class: "choice-bottom" }, h("span", { class: "mono" }, one.decision_id), h("span", { title: "How much cheaper it is than the next best rank" }, margin)),
      ),
    );
  }

  pick(id) {
    this.chosen = id;
    for (const button of this.list.querySelectorAll("button")) {
      if (button.dataset.decision === id) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    this.go(written({ name: "decisions", argument: id, filters: this.filters }));
    this.show(id);
  }

  async show(id) {
    try {
      const one = await get(`console/api/decisions/${encodeURIComponent(id)}`);
      if (this.chosen === id) this.detail.replaceChildren(...this.describe(one));
    } catch (error) {
      if (this.chosen === id) this.detail.replaceChildren(emptiness("This decision cannot be shown", error.status ? error.message : "no answer from the service", "no-decision"));
    }
  }

  describe(one) {
    const blocks = [h("h2", { class: "mono", id: "decision-title" }, one.decision_id), this.verdict(one)];
    if (one.refusal) blocks.push(h("p", { class: "problem" }, `${one.refusal.error} (${[one.refusal.code, one.refusal.gate && `gate ${one.refusal.gate}`, one.refusal.reason].filter(Boolean).join(", ")})`));
    blocks.push(this.candidates(one));
    const { prompt } = one;
    blocks.push(
      h(
        "div",
        { class: "columns" },
        panel("Request", facts([["At", clock(one.at_ms)], ["Route", one.route], ["Model · tenant", `${one.model_name} · ${one.tenant_id}`], ["Selection", one.selection_id], ["Reservation", one.reservation_id], ["Waited", duration(one.waited_s)], ["Prompt", `${plural(prompt.isl_tokens, "token")}, ${plural(prompt.blocks, "block")} of ${prompt.block_size}`], ["Admission", one.admission ? `${one.admission.outcome} by ${one.admission.policy}${one.admission.reason ? ` (${one.admission.reason})` : ""}` : "not judged"]]), h("p", {}, h("button", { type: "button", onclick: () => this.go(`prefix/${encodeURIComponent(one.decision_id)}`) }, "Who holds this prompt now?"))),
        panel("Weights in force", facts(Object.entries(one.weights).map(([name, value]) => [weight(this.store, name), { true: "yes", false: "no" }[value] ?? String(value)]))),
      ),
    );
    if (one.shadow) blocks.push(this.shadow(one.shadow));
    if (one.pair) blocks.push(panel("Pair", facts([["Mode", one.pair.mode], ["Reason", one.pair.reason], ["One worker costs", decimal(one.pair.aggregated_cost, 2)], ["The pair costs", decimal(one.pair.disaggregated_cost, 2)]])));
    return blocks;
  }

  verdict(one) {
    const { chosen } = one;
    if (!chosen) return h("p", { id: "verdict" }, pill(one.outcome.replaceAll("_", " "), OUTCOMES[one.outcome]), " Nobody was chosen.");
    const how = { lowest: "has the lowest cost", tie: `was drawn among ${chosen.ties} of equal cost`, softmax: "was drawn by temperature", only: "was the only candidate" }[chosen.picked_by] ?? chosen.picked_by;
    const margin = chosen.runner_up ? `; ${decimal(Math.abs(chosen.margin), 2)} blocks ${chosen.margin < 0 ? "dearer than" : "cheaper than"} worker ${nameOf(chosen.runner_up)}` : "";
    return h("p", { id: "verdict" }, h("b", {}, `Worker ${nameOf(chosen)}`), ` ${how} (${decimal(chosen.cost, 2)} blocks)${margin}.`);
  }

  shadow({ agrees, shadow, ...one }) {
    const whom = agrees ? "the same rank" : `worker ${nameOf(shadow)}`;
    return panel("Other weights", h("p", { id: "shadow-verdict" }, `The shadow weights would have chosen ${whom}.`), facts([["It costs more, by the live weights", `${decimal(one.regret_by_live_weights, 2)} blocks`], ["The live choice costs more, by the shadow's", `${decimal(one.regret_by_shadow_weights, 2)} blocks`], ["To prefill, live", plural(one.live.prefill_tokens, "token")], ["To prefill, shadow", plural(shadow.prefill_tokens, "token")]]));
  }

  candidates(one) {
    const all = one.candidates ?? [];
    const isChosen = (other) => one.chosen && other.worker_id === one.chosen.worker_id && other.dp_rank === one.chosen.dp_rank;
    const priced = all.filter((other) => !other.excluded && other.cost !== null);
    const barred = all.filter((other) => other.excluded || other.cost === null);
    priced.sort((a, b) => Number(isChosen(b)) - Number(isChosen(a)) || a.cost - b.cost);
    const most = Math.max(1e-9, ...priced.map((other) => { const p = parts(other, one.weights); return p.prefill + p.delay + p.eviction + p.decode + p.credit; }));
    const lines = [...priced.map((other) => this.candidate(other, one, most, isChosen(other))), ...barred.map((other) => this.barred(other))];
    const body = h("ol", { class: "candidates", id: "candidates" }, lines.slice(0, SHOWN));
    const rest = lines.slice(SHOWN);
    const more = h("button", { type: "button", class: "more", hidden: rest.length === 0, onclick: () => { body.append(...rest); more.remove(); } }, `Show ${rest.length} more`);
    const key = (tone, text, title) => h("span", { class: "key", title }, h("i", { "data-tone": tone, "aria-hidden": "true" }), text);
    return panel(
      `Candidates (${priced.length} of ${plural(all.length, "rank")})`,
      h("p", { class: "legend" }, key("decode", "decoding", "Blocks that the rank holds for its requests, with this one's"), key("prefill", "prefill to compute", "Prompt tokens that the rank has to compute, with what of this prompt it has not cached"), key("delay", "delay of others", "The wait of requests behind this one, and of those that the rank decodes"), key("eviction", "evicted from the cache", "Cached blocks that this prompt evicts"), key("credit", "spared by the cache", "What of this prompt the rank has cached or is booked with; it costs nothing"), h("span", { class: "when" }, "cost in blocks, less is better")),
      all.length ? body : emptiness("No candidates", "No worker was considered.", "no-candidates"),
      more,
    );
  }

  candidate(other, one, most, isChosen) {
    const p = parts(other, one.weights);
    const piece = (tone, value) => h("span", { class: "piece", "data-tone": tone, css: { "inline-size": `${(Math.max(0, value) / most) * 100}%` } });
    const held = other.device_blocks + other.host_blocks + other.disk_blocks;
    const total = one.prompt.blocks || 1;
    const doubts = [other.index?.estimated ? "estimated, no KV events" : null, other.index && other.index.state !== "current" && other.index.state !== "none" ? other.index.state : null, other.index?.open_gaps ? plural(other.index.open_gaps, "open gap") : null, other.trust < 1 ? `trusted ${percent(other.trust)}` : null].filter(Boolean);
    const lag = other.index && other.index.lag_s !== null ? `index ${duration(other.index.lag_s)} old` : other.index ? `index ${other.index.state}` : null;
    return h(
      "li",
      { class: "candidate", "data-rank": `${other.worker_id}/${other.dp_rank}`, "data-chosen": isChosen ? "true" : null },
      h("span", { class: "who mono", title: other.endpoint }, nameOf(other), isChosen && h("span", { class: "winner" }, " chosen")),
      h("span", { class: "stack", role: "img", "aria-label": `prefill ${decimal(p.prefill, 2)}, delay of others ${decimal(p.delay, 2)}, eviction ${decimal(p.eviction, 2)}, decode ${decimal(p.decode, 2)}, spared ${decimal(p.credit, 2)}` }, piece("decode", p.decode), piece("prefill", p.prefill), piece("delay", p.delay), piece("eviction", p.eviction), piece("credit", p.credit)),
      h("b", { class: "num cost" }, decimal(other.cost, 2)),
      h("span", { class: "why muted" }, `${count(held)} of ${count(total)} blocks cached${other.host_blocks || other.disk_blocks ? ` (${count(other.host_blocks)} host, ${count(other.disk_blocks)} disk)` : ""} · ${plural(other.prefill_tokens, "token")} queued, ${plural(other.decode_blocks, "block")} in use · `, doubts.length ? h("span", { class: "doubt", title: "How far the rank's KV events are believed; what it has cached counts for less" }, doubts.join(", ")) : (lag ?? "no events"), other.taint_factor !== null && other.taint_factor !== undefined ? ` · taints × ${decimal(other.taint_factor, 3)}` : ""),
    );
  }

  barred(other) {
    const why = REASONS[other.excluded] ?? other.excluded ?? "not priced";
    return h("li", { class: "candidate barred", "data-rank": `${other.worker_id}/${other.dp_rank}`, "data-excluded": other.excluded }, h("s", { class: "who mono", title: other.endpoint }, nameOf(other)), h("span", { class: "stack" }), h("b", { class: "num cost" }, NONE), h("span", { class: "why" }, why, other.excluded && h("code", {}, other.excluded)));
  }

  update() {}

  close() {
    this.poll.close();
  }
}
