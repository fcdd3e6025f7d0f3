// Who holds which part of a prompt: paste its tokens, or take the prompt of a recent decision.

import { ask, get } from "./api.js";
import { clock, count, emptiness, facts, h, panel, percent, plural } from "./dom.js";

// Token ids as people paste them: a JSON array, or numbers with anything between them.
export function readTokens(text) {
  const words = text.match(/-?\d+(\.\d+)?/g) ?? [];
  if (/[a-z]/i.test(text.replaceAll(/token_ids|input_ids/g, ""))) throw new Error("This is not a list of token ids: it contains letters.");
  if (!words.length) throw new Error("Paste token ids first: 1, 2, 3 …");
  return words.map((word, at) => {
    const number = Number(word);
    if (!Number.isInteger(number) || number < 0 || number > 4294967295) throw new Error(`Token ${at + 1}, ${word}, is no token id.`);
    return number;
  });
}

export class Prefix {
  constructor(store, { argument }) {
    this.store = store;
    const scopes = [...new Map([...store.workers.values()].map((one) => [JSON.stringify([one.model_name, one.tenant_id]), one])).entries()];
    this.scope = h("select", { id: "prefix-scope", name: "scope" }, scopes.length ? scopes.map(([value, one]) => h("option", { value }, `${one.model_name} · ${one.tenant_id}`)) : h("option", { value: '["default","default"]' }, "default · default"));
    this.tokens = h("textarea", { id: "prefix-tokens", rows: "4", spellcheck: "false", placeholder: "[1, 2, 3, …]  token ids, as the engine gets them" });
    this.lora = h("input", { id: "prefix-lora", autocomplete: "off", spellcheck: "false" });
    this.salt = h("input", { id: "prefix-salt", autocomplete: "off", spellcheck: "false" });
    this.recent = h("select", { id: "prefix-recent" }, h("option", { value: "" }, "—"));
    this.recent.addEventListener("change", () => this.recent.value && this.byDecision(this.recent.value));
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.result = h("div", { id: "prefix-result", "aria-live": "polite" }, emptiness("No prompt yet", "Paste token ids or pick a recent decision.", "no-prompt"));
    const form = h(
      "form",
      { class: "panel prefix-form" },
      h("h2", {}, "A prompt"),
      h("div", { class: "row" }, h("div", { class: "field" }, h("label", { for: "prefix-scope" }, "Model · tenant"), this.scope), h("div", { class: "field" }, h("label", { for: "prefix-recent" }, "Or the prompt of a recent decision"), this.recent)),
      h("div", { class: "field" }, h("label", { for: "prefix-tokens" }, "Token ids"), this.tokens),
      h("div", { class: "row" }, h("div", { class: "field" }, h("label", { for: "prefix-lora" }, "Adapter (lora_name)"), this.lora), h("div", { class: "field" }, h("label", { for: "prefix-salt" }, "Cache salt"), this.salt), h("button", { type: "submit", class: "primary" }, "Look it up")),
      this.problem,
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.byTokens();
    });
    this.node = h("div", {}, form, this.result);
    this.offer();
    if (argument) this.byDecision(argument);
  }

  async offer() {
    try {
      const recent = await get("console/api/decisions?limit=50");
      const options = recent.decisions.map((one) => h("option", { value: one.decision_id }, `${clock(one.at_ms)} · ${one.model_name} · ${one.decision_id}`));
      this.recent.append(...options);
      this.recent.options[0].textContent = !recent.available ? recent.why : options.length ? "—" : "no decisions yet";
      this.recent.disabled = options.length === 0;
    } catch {
      this.recent.disabled = true;
    }
  }

  async attempt(make) {
    this.problem.hidden = true;
    try {
      const { body, about } = await make();
      this.show(await ask("POST", "console/api/prefix", body), about);
    } catch (error) {
      this.problem.textContent = error.message;
      this.problem.hidden = false;
      this.result.replaceChildren(emptiness("Nothing to show", "The prompt could not be looked up.", "no-lookup"));
    }
  }

  byTokens() {
    return this.attempt(async () => {
      const [model_name, tenant_id] = JSON.parse(this.scope.value);
      return { body: { model_name, tenant_id, token_ids: readTokens(this.tokens.value), lora_name: this.lora.value || null, cache_salt: this.salt.value || null }, about: null };
    });
  }

  byDecision(id) {
    return this.attempt(async () => {
      const one = await get(`console/api/decisions/${encodeURIComponent(id)}`);
      const { prompt } = one;
      if (!prompt.block_hashes.length) throw new Error("The prompt of this decision has no whole block.");
      return { body: { model_name: one.model_name, tenant_id: one.tenant_id, block_hashes: prompt.block_hashes }, about: `Prompt of ${id}${prompt.is_cut ? `: its first ${prompt.block_hashes.length} of ${plural(prompt.blocks, "block")}` : ""}` };
    });
  }

  show(result, about) {
    const holders = result.holders;
    const head = facts([["Prompt", about ?? `${plural(result.isl_tokens, "token")}`], ["Blocks", `${count(result.blocks)}, each of ${result.block_size} tokens`], ["Held by", h("span", { id: "prefix-held" }, `${count(result.holders_total)} of ${plural(result.ranks_total, "rank")}`)]]);
    if (!result.blocks) {
      this.result.replaceChildren(panel("Who holds it", head, emptiness("No whole block", `The prompt is shorter than a block of ${result.block_size} tokens: nothing of it can be cached.`, "no-block")));
      return;
    }
    if (!holders.length) {
      this.result.replaceChildren(panel("Who holds it", head, emptiness("No worker holds any of it", "Its first block is not in the index of this model and tenant. Are adapter and salt right?", "no-holders")));
      return;
    }
    const depth = Math.max(...holders.map((one) => one.ranges.at(-1)[2]));
    const lines = holders.map((one) => this.holder(one, result.blocks));
    const key = (tone, text) => h("span", { class: "key" }, h("i", { "data-tone": tone, "aria-hidden": "true" }), text);
    const note = result.holders_total > holders.length ? h("p", { class: "note" }, `The ${holders.length} that hold most are shown.`) : null;
    this.result.replaceChildren(
      panel(
        "Who holds it",
        head,
        h("p", { class: "legend" }, key("device", "device"), key("host", "host"), key("disk", "disk"), h("span", { class: "when" }, `blocks 0–${count(result.blocks - 1)}; at best ${percent(depth / result.blocks)} are held`)),
        h("div", { class: "table-box" }, h("table", { class: "live", "data-table": "holders" }, h("caption", { class: "unseen" }, "Ranks and the blocks each holds"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Worker · rank"), h("th", { scope: "col", class: "wide-bar" }, "Blocks of the prompt"), h("th", { scope: "col", class: "num" }, "Held"), h("th", { scope: "col" }, "Ranges"))), h("tbody", {}, lines))),
        note,
      ),
    );
  }

  holder(one, blocks) {
    const end = one.ranges.at(-1)[2];
    const pieces = one.ranges.map(([tier, from, to]) => h("span", { class: "piece", "data-tone": tier, title: `${tier}: blocks ${from} to ${to - 1}`, css: { "inset-inline-start": `${(from / blocks) * 100}%`, "inline-size": `${((to - from) / blocks) * 100}%` } }));
    const text = one.ranges.map(([tier, from, to]) => `${tier} ${from}–${to - 1}`).join(", ");
    return h("tr", { "data-rank": `${one.worker_id}/${one.dp_rank}` }, h("th", { scope: "row", class: "mono", title: one.endpoint }, `${one.worker_id} · ${one.dp_rank}`), h("td", {}, h("span", { class: "strip", role: "img", "aria-label": text }, pieces)), h("td", { class: "num" }, `${count(end)} (${percent(end / blocks)})`), h("td", { class: "muted" }, text));
  }

  update() {}
}
