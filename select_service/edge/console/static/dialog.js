// Questions before anything is changed, and what came of it. The native dialog keeps the focus
// inside, and Escape closes it.

import { h } from "./dom.js";

function open(node) {
  document.body.append(node);
  node.addEventListener("close", () => node.remove());
  node.showModal();
  return node;
}

// Asks, and does it only then. `act` may throw: what it says is shown, and the question stays.
export function confirmed({ title, text, verb, danger = false, fields = [], act }) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const node = h("dialog", { "aria-label": title, class: "sheet" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "primary" }, verb);
  const form = h("form", { method: "dialog" });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    problem.hidden = true;
    try {
      await act(new FormData(form));
      node.close("done");
    } catch (error) {
      problem.textContent = `Not done: ${error.message}`;
      problem.hidden = false;
    } finally {
      go.disabled = false;
    }
  });
  const cancel = h("button", { type: "button", autofocus: fields.length === 0, onclick: () => node.close() }, "Cancel");
  form.append(h("h2", {}, title), ...text.map((line) => h("p", {}, line)), ...fields, problem, h("div", { class: "buttons" }, cancel, go));
  node.append(form);
  return open(node);
}
