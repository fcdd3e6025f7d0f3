// Who is let in: the policy in force, what became of every class, refusals by reason, thresholds.

import { change } from "./change.js";
import { confirmed } from "./dialog.js";
import { count, emptiness, facts, h, panel, percent } from "./dom.js";
import { LiveTable } from "./table.js";

const LIMITS = [
  ["active_prefill_tokens_threshold", "Prefill tokens", "1", "whole number of tokens"],
  ["active_prefill_tokens_threshold_frac", "Prefill, batches", "any", "multiple of max_num_batched_tokens"],
  ["active_decode_blocks_threshold", "KV blocks, share of all", "any", "0 to 1 of the rank's blocks"],
];

export class Admission {
  constructor(store, { changed }) {
    this.store = store;
    this.changed = changed;
    this.off = h("div");
    this.policy = h("div");
    this.classes = new LiveTable({
      name: "classes",
      caption: "What became of requests, by class",
      key: (row) => row.name,
      sort: { id: "priority", down: true },
      empty: emptiness("Nothing is counted", "Requests are counted by class while admission is on.", "no-classes"),
      columns: [
        { id: "name", title: "Class", sort: (row) => row.name, once: true, cell: (row) => row.name },
        { id: "priority", title: "Priority", numeric: true, sort: (row) => row.priority, cell: (row) => count(row.priority) },
        { id: "offered", title: "Offered", numeric: true, sort: (row) => row.offered, cell: (row) => count(row.offered) },
        { id: "admitted", title: "Admitted", numeric: true, sort: (row) => row.admitted, cell: (row) => count(row.admitted) },
        { id: "refused", title: "Shed", numeric: true, barred: true, sort: (row) => row.refused, cell: (row) => ({ bar: row.offered ? row.refused / row.offered : null, text: row.offered ? `${count(row.refused)} (${percent(row.refused / row.offered)})` : count(row.refused), tone: "bad" }) },
        { id: "withdrawn", title: "Withdrawn", numeric: true, sort: (row) => row.withdrawn, cell: (row) => count(row.withdrawn) },
        { id: "waiting", title: "Waiting", numeric: true, sort: (row) => row.waiting, cell: (row) => count(row.waiting) },
      ],
    });
    const text = (id, title, at) => ({ id, title, sort: (row) => row[at], once: true, cell: (row) => row[at] });
    this.reasons = new LiveTable({
      name: "sheds",
      caption: "Refusals, waits and ends of waiting by reason",
      key: (row) => row.slice(0, 5).join("\n"),
      sort: { id: "count", down: true },
      page: 50,
      empty: emptiness("Nothing refused or made to wait", null, "no-sheds"),
      columns: [text("gate", "Gate", 1), text("outcome", "Decision", 2), text("reason", "Reason", 3), text("class", "Class", 4), text("policy", "Policy", 0), { id: "count", title: "Times", numeric: true, sort: (row) => row[5], cell: (row) => count(row[5]) }],
    });
    this.scopes = new LiveTable({
      name: "scopes",
      caption: "Pools",
      key: (row) => `${row.model_name}\n${row.tenant_id}`,
      sort: { id: "saturation", down: true },
      page: 50,
      empty: emptiness("No pool is under admission control", "Set a policy, a busy threshold or a cap on requests.", "no-scopes"),
      columns: [
        { id: "scope", title: "Model · tenant", sort: (row) => row.model_name, once: true, wide: true, cell: (row) => `${row.model_name} · ${row.tenant_id}` },
        { id: "saturation", title: "Saturation", numeric: true, barred: true, sort: (row) => row.saturation, cell: (row) => ({ bar: row.saturation, text: percent(row.saturation), tone: row.saturation >= 1 ? "bad" : "load" }) },
        { id: "rate", title: "Tokens/s of a rank", numeric: true, sort: (row) => row.prefill_tokens_per_s, cell: (row) => count(row.prefill_tokens_per_s) },
        { id: "waiting", title: "Requests waiting", numeric: true, sort: (row) => row.waiting, cell: (row) => count(row.waiting) },
        { id: "busy", title: "Busy ranks", numeric: true, sort: (row) => row.busy_ranks, cell: (row) => count(row.busy_ranks) },
        { id: "full", title: "Full ranks", numeric: true, sort: (row) => row.full_ranks, cell: (row) => count(row.full_ranks) },
        { id: "promises", title: "Promises", numeric: true, sort: (row) => row.promises, cell: (row) => count(row.promises) },
      ],
    });
    this.thresholds = new LiveTable({
      name: "thresholds",
      caption: "Busy thresholds",
      key: (row) => `${row.model}\n${row.tenant_id ?? ""}`,
      sort: { id: "model", down: false },
      page: 50,
      empty: emptiness("No thresholds", "Each model that has workers has a line here. None has workers now.", "no-thresholds"),
      columns: [
        { id: "model", title: "Model · tenant", sort: (row) => row.model, once: true, wide: true, cell: (row) => (row.tenant_id === undefined ? row.model : `${row.model} · ${row.tenant_id}`) },
        ...LIMITS.map(([name, title]) => ({ id: name, title, numeric: true, sort: (row) => row[name], cell: (row) => (row[name] === null ? "not checked" : String(row[name])) })),
        { id: "change", title: "Change", cell: (row) => this.changer(row), once: true },
      ],
    });
    this.node = h("div", {}, this.off, h("div", { class: "columns" }, panel("In force", this.policy), panel("Classes, by requests", this.classes.node)), panel("Pools", this.scopes.node), panel("Shed, by reason", this.reasons.node), panel("Busy thresholds", this.thresholds.node));
    this.update();
  }

  update() {
    const status = this.store.admission;
    if (!status) return;
    const isOff = status.gates === 0;
    this.node.dataset.admission = isOff ? "off" : "on";
    const sign = JSON.stringify([isOff, status.policy, status.config, status.mode]);
    if (sign !== this.sign) {
      this.sign = sign;
      this.off.replaceChildren(...(isOff ? [emptiness("Admission is off", "Every request is let in. --admission-policy, --admission-control, caps of workers and PUT /admission turn it on.", "admission-off")] : []));
      this.policy.replaceChildren(facts([["Policy", status.policy], ["Configuration", Object.keys(status.config).length ? h("code", {}, JSON.stringify(status.config)) : "none"], ["Thresholds", status.mode === "none" ? "off (--admission-control none)" : status.mode]]));
    }
    const classes = Object.entries(status.counters).map(([name, counts]) => ({ name, priority: status.classes[name] ?? null, ...counts }));
    this.classes.show(classes.some((one) => one.offered) || !isOff ? classes : []); // zeros would say that nothing has come
    this.scopes.show(status.scopes);
    this.reasons.show(status.decisions);
    this.thresholds.show(status.thresholds);
  }

  changer(row) {
    const { admission, about } = this.store;
    const why = !about.actions.busy_threshold ? "There is no route for it" : admission.mode === "none" ? "Off: the service runs with --admission-control none" : null;
    return h("button", { type: "button", disabled: why !== null, title: why, onclick: () => this.ask(row) }, "Change …");
  }

  ask(row) {
    const name = row.tenant_id === undefined ? row.model : `${row.model}, tenant ${row.tenant_id}`;
    const now = this.store.admission.thresholds.find((one) => one.model === row.model && one.tenant_id === row.tenant_id) ?? row;
    const fields = LIMITS.map(([field, title, step, hint], at) => h("div", { class: "field" }, h("label", { for: `limit-${at}` }, title), h("input", { id: `limit-${at}`, name: field, type: "number", min: "0", step, value: now[field] ?? "", placeholder: "not checked", autofocus: at === 0 }), h("span", { class: "muted" }, hint)));
    confirmed({
      title: `Busy thresholds of ${name}`,
      text: ["A rank above any of these is passed over; when all are, requests are refused. In force at once. An empty field is not checked."],
      fields,
      verb: "Put in force",
      act: async (form) => {
        const body = { model: row.model, clear: [] };
        if (row.tenant_id !== undefined) body.tenant_id = row.tenant_id;
        for (const [field] of LIMITS) {
          const text = form.get(field).trim();
          if (text === "") body.clear.push(field);
          else body[field] = Number(text);
        }
        await change("POST", "busy_threshold", body);
        this.changed(`Busy thresholds of ${name} are in force.`);
      },
    });
  }
}
