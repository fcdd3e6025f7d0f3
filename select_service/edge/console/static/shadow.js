// What other weights would have done with the same traffic, beside what was done.

import { get } from "./api.js";
import { LineChart } from "./chart.js";
import { count, decimal, duration, emptiness, facts, h, NONE, panel, percent, plural, weight } from "./dom.js";
import { scopeOf } from "./fleet.js";
import { Poll } from "./poll.js";
import { TimeRange } from "./range.js";

const WHY = {
  sample: "not drawn (--shadow-sample)",
  budget: "the time for it was spent (--shadow-cost-max)",
  only: "there was one candidate",
  pair: "about a prefill and a decode rank",
  batch: "placed as part of a batch",
};
const GAINS = [
  ["prefill_tokens", "Prompt tokens to prefill"],
  ["cached_tokens", "Prompt tokens cached"],
  ["queued_prefill_tokens", "Prefill tokens queued before"],
  ["decode_blocks", "Decode blocks with the prompt"],
];

const said = (value) => ({ true: "yes", false: "no" })[value] ?? String(value);

function table(name, heads, rows) {
  const cells = (row) => row.map((value, at) => (at ? h("td", { class: "num" }, value) : h("th", { scope: "row" }, value)));
  return h("table", { "data-table": name, "aria-label": name.replaceAll("-", " ") }, h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: at ? "num" : null }, head)))), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))));
}

// The classes of regret as words: [text, by live weights, by the shadow's].
export function classes(bounds, live, shadow) {
  return live.map((number, at) => {
    const text = at === 0 ? "none" : at < bounds.length ? `up to ${count(bounds[at])}` : `above ${count(bounds.at(-1))}`;
    return [text, number, shadow[at]];
  });
}

export class Shadow {
  constructor(store, { filters, keep }) {
    this.store = store;
    this.range = new TimeRange({ filters, keep });
    const { range } = this;
    this.charts = [
      new LineChart({ name: "agreement", title: "Agreement", range, top: 1, format: (value) => percent(value), note: "Share of the decisions scored in which both chose the same rank, over ten seconds.", lines: [{ id: "agreement", label: "agreement", tone: "a", of: (one) => one.agreement }] }),
      new LineChart({ name: "shadow-prefill", title: "Prompt tokens to prefill per request", range, format: count, unit: " tokens", note: "As predicted for the rank chosen, over ten seconds; less is better.", lines: [{ id: "live", label: "live", tone: "a", of: (one) => one.livePrefill }, { id: "shadow", label: "shadow", tone: "b", of: (one) => one.shadowPrefill }] }),
    ];
    this.cards = h("div", { class: "cards", role: "list", "aria-label": "In numbers" });
    this.report = h("div");
    this.trouble = h("p", { class: "problem", role: "status", hidden: true });
    this.plots = h("div", { hidden: true }, range.node, h("div", { class: "charts" }, this.charts.map((chart) => chart.node)));
    this.node = h("div", {}, this.trouble, this.cards, this.plots, this.report);
    this.poll = new Poll(2000, () => this.look(), this.trouble);
    this.update();
  }

  close() {
    this.poll.close();
    for (const chart of this.charts) chart.close();
  }

  update() {
    const series = this.store.series();
    for (const chart of this.charts) chart.show(series, this.store.atMs);
  }

  async look() {
    const status = await get("console/api/shadow");
    this.plots.hidden = !status.enabled;
    if (status.enabled) this.show(status);
    else {
      this.cards.replaceChildren();
      this.report.replaceChildren(emptiness("No shadow weights", 'Start the service with --shadow-weights prefill_load_scale=2, say, or put them in force now: PUT /config {"settings": {"shadow_weights": {"prefill_load_scale": 2}}}. They score live traffic and act on nothing.', "no-shadow"));
    }
  }

  show(status) {
    const { total } = status;
    const card = (name, title, value, note) => h("div", { class: "card", role: "listitem", "data-card": name }, h("span", { class: "card-title" }, title), h("b", {}, value), h("span", { class: "muted" }, note));
    const saved = total.choices?.gain.prefill_tokens;
    this.cards.replaceChildren(
      card("agreement", "Agreement", percent(total.agreement, 1), `${count(total.agreed)} of ${count(total.scored)}`),
      card("regret-live", "Regret by live weights", decimal(total.regret_by_live_weights.mean, 2), "blocks, of the shadow's choice"),
      card("regret-shadow", "Regret by its weights", decimal(total.regret_by_shadow_weights.mean, 2), "blocks, of the live choice"),
      card("gain", "Prefill it would save", saved === undefined ? NONE : decimal(saved), "tokens a request, predicted"),
      card("cost", "Its cost", duration(status.cost_s), `since the start; at most ${percent(status.cost_max, 2)} of the time`),
      card("since", "These weights for", duration(status.since_s), `${percent(status.sample, 1)} of decisions drawn`),
    );
    const weights = Object.entries(status.shadow_weights).map(([name, value]) => [weight(this.store, name), said(status.live_weights[name]), value === status.live_weights[name] ? said(value) : h("b", {}, said(value))]);
    const regrets = classes(status.regret_bounds, total.regret_by_live_weights.counts, total.regret_by_shadow_weights.counts);
    const gains = total.choices && GAINS.map(([name, text]) => [text, decimal(total.choices.live[name]), decimal(total.choices.shadow[name]), decimal(total.choices.gain[name])]);
    const skipped = Object.entries(total.skipped).map(([why, number]) => [WHY[why] ?? why, count(number)]);
    const scopes = status.scopes.map((one) => [scopeOf(one), count(one.numbers.scored), percent(one.numbers.agreement, 1), decimal(one.numbers.regret_by_live_weights.mean, 2), decimal(one.numbers.regret_by_shadow_weights.mean, 2), decimal(one.numbers.choices?.gain.prefill_tokens)]);
    const nothing = (name) => emptiness("Nothing scored yet", "Selections among several ranks are scored as they are made.", name);
    this.report.replaceChildren(
      h(
        "div",
        { class: "columns" },
        panel("Weights in force", table("shadow-weights", ["Weight", "Live", "Shadow"], weights)),
        panel("Regret in blocks, by decisions", total.scored ? this.bars(regrets, total.scored) : nothing("no-regret")),
      ),
      panel("Predicted per request", gains ? table("shadow-gain", ["On average", "Live", "Shadow", "Gain"], gains) : nothing("no-gain"), h("p", { class: "note" }, "Open loop: the shadow sees the loads and caches that the live choices made. What it would make of its own, the simulator tells.")),
      panel("By model and tenant", h("div", { class: "table-box", role: "group", "aria-label": "By model and tenant", tabindex: "0" }, table("shadow-scopes", ["Model · tenant", "Scored decisions", "Agreement", "Regret, live, blocks", "Regret, shadow, blocks", "Prefill saved, tokens a request"], scopes)), status.scopes_total > scopes.length && h("p", { class: "note" }, `${plural(status.scopes_total - scopes.length, "more scope")} in GET /shadow.`)),
      panel("Not scored", skipped.length ? table("shadow-skipped", ["Why", "Decisions"], skipped) : facts([["Decisions", "0"]])),
    );
  }

  bars(rows, scored) {
    const bar = (number) => h("span", { class: "bar" }, h("span", { class: "bar-track", "aria-hidden": "true" }, h("span", { class: "bar-fill", css: { "inline-size": `${((number / scored) * 100).toFixed(1)}%` } })), h("span", { class: "bar-text" }, count(number)));
    return table("shadow-regret", ["Regret", "By live weights", "By the shadow's"], rows.map(([text, live, shadow]) => [text, bar(live), bar(shadow)]));
  }
}
