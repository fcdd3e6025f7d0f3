// Which version this is, where to look further, and the settings in force.

import { ask } from "./api.js";
import { change } from "./change.js";
import { emptiness, facts, h, panel } from "./dom.js";
import { LiveTable } from "./table.js";
import { credentials, credentialsForChanges } from "./token.js";

function said(value) {
  if (value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length)) return "not set";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

const SOURCES = { env: "environment", put: "PUT /config" };

export class About {
  constructor(store, { filters, keep }) {
    this.settings = [];
    const { about, replicas } = store;
    const link = (text, address, note) => h("li", {}, h("a", { href: address, target: "_blank", rel: "noreferrer" }, text), ` ${note}`);
    const links = [
      link("Documentation", about.links.documentation, "how to run, wire and tune it"),
      link("API", "docs", "every route and field, to read and to try"),
      link("OpenAPI", "openapi.json", "the same for programs"),
      link("Metrics", "metrics", "for Prometheus"),
      link("Readiness", "ready?verbose=true", "what it waits for, and the doctor's findings"),
      about.links.grafana ? link("Grafana", about.links.grafana, "the dashboard") : h("li", { class: "muted" }, "Grafana: --console-grafana-url names your dashboard"),
    ];
    this.only = h("input", { type: "checkbox", id: "settings-only", checked: filters.get("all") === null, onchange: () => this.narrow(filters, keep) });
    this.search = h("input", { type: "search", id: "settings-filter", placeholder: "part of a name", autocomplete: "off", spellcheck: "false", oninput: () => this.show() });
    this.table = new LiveTable({
      name: "settings",
      caption: "Settings in force",
      key: (row) => row.name,
      sort: { id: "name", down: false },
      page: 400,
      empty: emptiness("Nothing was set", "Every setting is at its default.", "all-default"),
      columns: [
        { id: "name", title: "Setting", sort: (row) => row.name, once: true, cell: (row) => h("code", {}, row.name) },
        { id: "value", title: "In force", wide: true, cell: (row) => said(row.value) },
        { id: "source", title: "Set by", sort: (row) => row.source, cell: (row) => SOURCES[row.source] ?? row.source },
        { id: "default", title: "Default", wide: true, cell: (row) => said(row.default) },
        { id: "reloads", title: "Changes", sort: (row) => row.reloads, cell: (row) => (row.reloads ? "at run time" : "with a restart") },
      ],
    });
    this.problem = h("p", { class: "problem", role: "status", hidden: true });
    this.other = h("button", { type: "button", hidden: true, onclick: () => this.load(() => change("GET", "config")) }, "Show with another token …");
    this.node = h(
      "div",
      {},
      h("div", { class: "columns" }, panel("This service", facts([["Version", h("span", { id: "version" }, about.version)], ["Replication", replicas?.enabled ? `router ${replicas.router_id}` : "off: it runs alone"]])), panel("Links", h("ul", { class: "links" }, links), credentials().authorization && h("p", { class: "note" }, "A link shows no token: what needs one answers 401 there."))),
      panel("Settings", h("div", { class: "filter" }, h("label", { for: "settings-filter" }, "Filter"), this.search, h("label", { class: "check" }, this.only, "Only what was set")), this.problem, this.other, this.table.node),
    );
    this.load(() => ask("GET", "config", undefined, credentialsForChanges()));
  }

  async load(get) {
    try {
      const configuration = await get();
      this.settings = Object.entries(configuration.settings).map(([name, one]) => ({ name, ...one }));
      this.problem.hidden = this.other.hidden = true;
      this.show();
    } catch (error) {
      this.problem.textContent = error.status ? `The settings are not shown: ${error.message}.` : "No answer from the service.";
      this.problem.hidden = false;
      this.other.hidden = ![401, 403].includes(error.status);
    }
  }

  narrow(filters, keep) {
    if (this.only.checked) filters.delete("all");
    else filters.set("all", "1");
    keep(filters);
    this.show();
  }

  show() {
    const word = this.search.value.trim().toLowerCase().replaceAll("-", "_");
    this.table.show(this.settings.filter((one) => one.name.includes(word) && (!this.only.checked || one.source !== "default")));
  }

  update() {}
}
