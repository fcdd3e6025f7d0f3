// What the doctor finds: cause and remedy, the worst first.

import { get } from "./api.js";
import { count, duration, emptiness, h, pill, plural } from "./dom.js";
import { Poll } from "./poll.js";

const ORDER = { error: 0, warning: 1, info: 2 };
const SHOWN_AT_ONCE = 5; // of one kind; the others unfold
const TONES = { error: "bad", warning: "warn", info: "plain" };

const SUBJECT = ["worker_id", "dp_rank", "peer", "source", "endpoint", "model_name", "tenant_id"]; // who it is comes first

function about(one) {
  const subject = SUBJECT.map((name) => [name, one.subject?.[name]]).filter(([, value]) => value !== null && value !== undefined);
  const since = one.since_s !== undefined && one.since_s !== null && ` · for ${duration(one.since_s)}`;
  const until = one.finding_in_s !== undefined && ` · a problem if it lasts ${duration(Math.ceil(one.finding_in_s))} longer`;
  return [subject.map(([name, value]) => [" · ", `${name.replaceAll("_", " ")} `, h("span", { class: "mono" }, String(value))]), since, until];
}

// What stands between backticks is to be typed.
const worded = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

export class Doctor {
  constructor() {
    this.list = h("section", { class: "findings", "aria-label": "Findings" }, emptiness("Asking the doctor …", "Its findings appear here when it has answered.", "asking"));
    this.trouble = h("p", { class: "problem", role: "status", hidden: true });
    this.unfolded = new Set();
    this.node = h("div", {}, this.trouble, this.list);
    this.poll = new Poll(3000, () => this.look(), this.trouble);
  }

  async look() {
    const report = await get("console/api/findings");
    const sign = JSON.stringify(report, (key, value) => (["since_s", "finding_in_s"].includes(key) ? undefined : value));
    const suspected = report.suspected ?? [];
    // what counts down is shown anew each time
    const age = suspected.length ? suspected[0].since_s : Math.floor((report.findings?.[0]?.since_s ?? 0) / 10);
    // while somebody has the focus in it, being older by ten seconds is no reason to make it anew
    if (sign === this.sign && (age === this.age || this.list.contains(document.activeElement))) return;
    [this.sign, this.age] = [sign, age];
    const found = report.findings;
    if (!report.available) this.list.replaceChildren(emptiness("The doctor is not available", report.why, "no-doctor"));
    else if (!found.length && !suspected.length) this.list.replaceChildren(emptiness("No problems found", null, "no-findings"));
    else {
      const none = found.length ? [] : [emptiness("No lasting problem found yet", null, "none-lasting")];
      const more = report.left_out ? [h("p", { class: "note" }, `${plural(report.left_out, "more finding")} beyond --doctor-findings-max.`)] : [];
      const pending = suspected.length ? [h("section", { class: "findings", id: "suspected", "aria-label": "Seen just now" }, h("p", {}, "Seen just now, and a problem if it lasts:"), this.cards(suspected))] : [];
      this.list.replaceChildren(...none, ...this.cards(found), ...more, ...pending);
    }
  }

  // The worst first; of a thousand workers cause and remedy are read once.
  cards(found) {
    const kinds = new Map();
    for (const one of [...found].sort((a, b) => (ORDER[a.severity] ?? 3) - (ORDER[b.severity] ?? 3))) {
      const kind = JSON.stringify([one.severity, one.code, one.why, one.remedy]);
      kinds.set(kind, [...(kinds.get(kind) ?? []), one]);
    }
    return [...kinds.values()].map((alike) => this.card(alike));
  }

  card(alike) {
    const [one] = alike;
    const single = alike.length === 1;
    return h(
      "article",
      { class: "panel finding", "data-severity": one.severity, "data-code": single ? one.code : null },
      h("h2", {}, pill(one.severity, TONES[one.severity]), single ? ` ${one.what}` : ` ${plural(alike.length, "finding")}`),
      h("p", { class: "muted" }, h("code", {}, one.code), single && about(one)),
      !single && this.members(alike),
      h("dl", { class: "facts" }, h("dt", {}, "Why"), h("dd", {}, worded(one.why)), h("dt", {}, "Remedy"), h("dd", {}, worded(one.remedy))),
    );
  }

  members(alike) {
    const lines = alike.map((one) => h("li", { "data-code": one.code }, one.what, h("span", { class: "muted" }, about(one))));
    const [first, rest] = [lines.slice(0, SHOWN_AT_ONCE), lines.slice(SHOWN_AT_ONCE)];
    if (!rest.length) return h("ul", {}, first);
    const { code } = alike[0];
    const toggled = ({ target }) => (target.open ? this.unfolded.add(code) : this.unfolded.delete(code));
    return [h("ul", {}, first), h("details", { open: this.unfolded.has(code), ontoggle: toggled }, h("summary", {}, `${count(rest.length)} more`), h("ul", {}, rest))];
  }

  update() {}

  close() {
    this.poll.close();
  }
}
