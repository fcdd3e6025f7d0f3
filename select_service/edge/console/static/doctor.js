// What the doctor finds: cause and remedy, the worst first.

import { get } from "./api.js";
import { duration, emptiness, h, pill, plural } from "./dom.js";
import { Poll } from "./poll.js";

const ORDER = { error: 0, warning: 1, info: 2 };
const TONES = { error: "bad", warning: "warn", info: "plain" };

export class Doctor {
  constructor() {
    this.list = h("div", { class: "findings", role: "list", "aria-label": "Findings" });
    this.trouble = h("p", { class: "problem", role: "status", hidden: true });
    this.node = h("div", {}, this.trouble, this.list);
    this.poll = new Poll(3000, () => this.look(), this.trouble);
  }

  async look() {
    const told = await get("console/api/findings");
    const sign = JSON.stringify(told, (key, value) => (key === "since_s" ? Math.floor(value / 10) : value));
    if (sign === this.sign) return;
    this.sign = sign;
    const found = [...told.findings].sort((a, b) => (ORDER[a.severity] ?? 3) - (ORDER[b.severity] ?? 3));
    if (!told.available) this.list.replaceChildren(emptiness("The doctor is not available", told.why, "no-doctor"));
    else if (!found.length) this.list.replaceChildren(emptiness("No findings", "None of the known miswirings is to be seen.", "no-findings"));
    else {
      const more = told.left_out ? [h("p", { class: "note" }, `${plural(told.left_out, "more finding")} beyond --doctor-findings-max.`)] : [];
      this.list.replaceChildren(...found.map((one) => this.card(one)), ...more);
    }
  }

  card(one) {
    const subject = Object.entries(one.subject ?? {}).filter(([, value]) => value !== null && value !== undefined);
    return h(
      "article",
      { class: "panel finding", role: "listitem", "data-code": one.code, "data-severity": one.severity },
      h("h2", {}, pill(one.severity, TONES[one.severity]), ` ${one.what}`),
      h("p", { class: "muted" }, h("code", {}, one.code), subject.map(([name, value]) => [" · ", `${name.replaceAll("_", " ")} `, h("span", { class: "mono" }, String(value))]), one.since_s !== undefined && one.since_s !== null && ` · for ${duration(one.since_s)}`),
      h("dl", { class: "facts" }, h("dt", {}, "Why"), h("dd", {}, one.why), h("dt", {}, "Remedy"), h("dd", {}, one.remedy)),
    );
  }

  update() {}

  close() {
    this.poll.close();
  }
}
