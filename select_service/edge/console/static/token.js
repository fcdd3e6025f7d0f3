// The token that the user has typed in, where the service asks for one: kept for this tab alone, and
// shown in a header of requests, never in an address, which logs would keep.

import { confirmed } from "./dialog.js";
import { h } from "./dom.js";

const KEY = "select-service-token";

let token = stored();
let question = null;
let mayAsk = true; // unasked: once, until a token has worked

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

function keep(text) {
  token = text;
  try {
    if (text) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
  } catch {
    // then it holds until the page is closed
  }
}

export const credentials = () => (token ? { authorization: `Bearer ${token}` } : {});

// A request was answered: with 401, or with what only a token can see.
export function judged(status) {
  const button = document.getElementById("token");
  button.hidden = button.hidden && !token && status !== 401;
  if (status !== 401) mayAsk = true;
  else if (mayAsk) dispatchEvent(new CustomEvent("token-wanted"));
}

// Asks for a token; `tried` resolves if it works, and says why if it does not.
export function askForToken(tried) {
  if (question?.open) return;
  mayAsk = false;
  const field = h("input", { type: "password", name: "token", id: "token-text", autocomplete: "off", spellcheck: "false", pattern: "[!-~]*", autofocus: true });
  question = confirmed({
    title: "Token",
    text: ["The service asks for a token. It is kept in this tab until the tab is closed."],
    verb: "Use it",
    fields: [h("div", { class: "field" }, h("label", { for: "token-text" }, "With the scope read"), field)],
    act: async (form) => {
      keep(form.get("token").trim());
      await tried();
    },
  });
}
