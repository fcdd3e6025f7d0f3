// Other processes of the service: who is listened to, and how far each has been followed.

import { ago, count, emptiness, facts, h, panel } from "./dom.js";
import { LiveTable } from "./table.js";

const TONES = { synced: "good", behind: "warn", gone: "bad", foreign: "plain", connected: "good", connecting: "warn" };

export class Replicas {
  constructor(store) {
    this.store = store;
    this.summary = h("div");
    this.publishers = new LiveTable({
      name: "publishers",
      caption: "Publishers",
      key: (row) => row.router_id,
      sort: { id: "state", down: false },
      empty: emptiness("No publisher is known", "Replicas send a heartbeat every second. A peer that stays silent may be down.", "no-publishers"),
      columns: [
        { id: "router", title: "Router", sort: (row) => row.router_id, once: true, cell: (row) => h("span", { class: "mono" }, row.router_id) },
        { id: "peer", title: "Received from", sort: (row) => row.peer, cell: (row) => row.peer || "other replicas" },
        { id: "state", title: "State", sort: (row) => row.state, cell: (row) => ({ pill: row.state, tone: TONES[row.state] }) },
        { id: "seq", title: "Newest statement", numeric: true, hint: "Its newest statement received", sort: (row) => row.seq, cell: (row) => count(row.seq) },
        { id: "missing", title: "Statements missing", numeric: true, hint: "Older ones not received yet", sort: (row) => row.missing, cell: (row) => count(row.missing) },
        { id: "claims", title: "Reservations owned", numeric: true, hint: "By its own word", sort: (row) => row.claims, cell: (row) => count(row.claims) },
        { id: "unbooked", title: "Unbooked", numeric: true, hint: "Of them, those not booked here", sort: (row) => row.unbooked, cell: (row) => count(row.unbooked) },
        { id: "received", title: "Last message", numeric: true, sort: (row) => row.heard_s_ago, cell: (row) => ago(row.heard_s_ago) },
        { id: "pulls", title: "Pulls · failed", numeric: true, sort: (row) => row.pulls, cell: (row) => `${count(row.pulls)} · ${count(row.pulls_failed)}` },
      ],
    });
    this.peers = new LiveTable({
      name: "peers",
      caption: "Peers",
      key: (row) => row.endpoint,
      empty: emptiness("No peers", "Name some with --replica-sync-peers, --replica-sync-dns or POST /replica_sync/register_peer.", "no-peers"),
      columns: [
        { id: "endpoint", title: "Endpoint", sort: (row) => row.endpoint, once: true, cell: (row) => h("span", { class: "mono" }, row.endpoint) },
        { id: "link", title: "Link", sort: (row) => row.link, cell: (row) => ({ pill: row.link, tone: TONES[row.link] ?? "plain" }) },
      ],
    });
    this.on = h("div", {}, panel("This process", this.summary), panel("Publishers", this.publishers.node), panel("Peers", this.peers.node));
    this.off = emptiness("Replica sync is off", "This process runs alone: it was started without --replica-sync-port.", "replicas-off");
    this.node = h("div", {}, this.off, this.on);
    this.update();
  }

  update() {
    const status = this.store.replicas;
    if (!status) return;
    this.off.hidden = status.enabled;
    this.on.hidden = !status.enabled;
    if (!status.enabled) return;
    const ours = status.publishers.filter((one) => one.state !== "foreign");
    const synced = ours.filter((one) => one.state === "synced").length;
    const missing = ours.reduce((sum, one) => sum + one.missing, 0);
    const text = ours.length === 0 ? "nobody to converge with" : synced === ours.length && missing === 0 ? `converged: all ${ours.length} in sync` : `${synced} of ${ours.length} in sync, ${count(missing)} statements missing`;
    this.summary.replaceChildren(facts([["This router", h("span", { class: "mono" }, status.router_id)], ["Convergence", h("span", { id: "convergence" }, text)]]));
    this.publishers.show(status.publishers);
    this.peers.show(status.peers);
  }
}
