// Leases and the reservations made last, asked for while they are looked at.

import { get } from "./api.js";
import { age, count, duration, emptiness, h, panel, plural } from "./dom.js";
import { scopeOf } from "./fleet.js";
import { Poll } from "./poll.js";
import { LiveTable } from "./table.js";

export class Bookings {
  constructor(store) {
    this.store = store;
    this.leases = new LiveTable({
      name: "leases",
      caption: "Leases",
      key: (row) => row.lease_id,
      empty: emptiness("No leases", "Owners open one with POST /leases; what they book under it lives as long as they renew it.", "no-leases"),
      columns: [
        { id: "lease", title: "Lease", sort: (row) => row.lease_id, once: true, wide: true, cell: (row) => h("span", { class: "mono" }, row.lease_id) },
        { id: "owner", title: "Owner", sort: (row) => row.owner, wide: true, cell: (row) => row.owner },
        { id: "held", title: "Reservations", numeric: true, sort: (row) => row.reservations, cell: (row) => count(row.reservations) },
        { id: "ttl", title: "Time to live", numeric: true, sort: (row) => row.ttl_s, cell: (row) => duration(row.ttl_s) },
        { id: "left", title: "Ends in", numeric: true, sort: (row) => row.expires_in_s, cell: (row) => ({ bar: row.ttl_s ? row.expires_in_s / row.ttl_s : null, text: age(row.expires_in_s), tone: row.expires_in_s < row.ttl_s / 4 ? "warn" : "load" }) },
      ],
    });
    this.reservations = new LiveTable({
      name: "reservations",
      caption: "Reservations, newest first",
      key: (row) => row.reservation_id,
      empty: emptiness("No reservations", "Nothing is booked at the moment.", "no-reservations"),
      columns: [
        { id: "id", title: "Reservation", sort: (row) => row.reservation_id, once: true, wide: true, cell: (row) => h("span", { class: "mono" }, row.reservation_id) },
        { id: "worker", title: "Worker · rank", sort: (row) => `${row.worker_id}/${row.dp_rank}`, cell: (row) => h("span", { class: "mono" }, `${row.worker_id} · ${row.dp_rank}`) },
        { id: "scope", title: "Model · tenant", sort: (row) => row.model_name, wide: true, cell: (row) => ({ clip: scopeOf(row) }) },
        { id: "phase", title: "Phase", sort: (row) => row.phase, cell: (row) => ({ pill: row.phase, tone: row.phase === "prefill" ? "prefill" : "decode" }) },
        { id: "isl", title: "Prompt / prefill, tokens", numeric: true, hint: "Tokens of the prompt; of them, to compute", sort: (row) => row.isl_tokens, cell: (row) => `${count(row.isl_tokens)} / ${count(row.prefill_tokens)}` },
        { id: "out", title: "Output blocks", numeric: true, hint: "So far", sort: (row) => row.output_blocks, cell: (row) => count(row.output_blocks) },
        { id: "age", title: "Age", numeric: true, sort: (row) => row.age_s, cell: (row) => age(row.age_s) },
        { id: "idle", title: "Idle", numeric: true, hint: "Since its last lifecycle call", sort: (row) => row.idle_s, cell: (row) => age(row.idle_s) },
        { id: "life", title: "Lives by", sort: (row) => row.lease_id ?? "", wide: true, cell: (row) => (row.lease_id ? `lease ${row.lease_id}` : row.ttl_s ? `${duration(row.ttl_s)} after a call` : "its end") },
      ],
    });
    this.total = h("p", { class: "note", id: "reservations-total" });
    this.trouble = h("p", { class: "problem", role: "status", hidden: true });
    this.node = h("div", {}, this.trouble, panel("Leases", this.leases.node), panel("Reservations", this.total, this.reservations.node));
    this.poll = new Poll(2000, () => this.look(), this.trouble);
  }

  async look() {
    const [leases, reservations] = await Promise.all([get("console/api/leases?limit=100"), get("console/api/reservations?limit=100")]);
    this.leases.show(leases.leases);
    this.reservations.show(reservations.reservations);
    const shown = reservations.reservations.length;
    this.total.textContent = shown < reservations.total ? `The newest ${shown} of ${plural(reservations.total, "reservation")}.` : plural(reservations.total, "live reservation");
  }

  update() {}

  close() {
    this.poll.close();
  }
}
