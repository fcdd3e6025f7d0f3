// The tokens that the user has typed in, where the service asks for one: kept for this tab alone, and
// shown in a header of requests, never in an address, which logs would keep. One is for looking on;
// another, with more rights, goes with changes only, and may be forgotten at once.

import { confirmed } from "./dialog.js";
import { h } from "./dom.js";

const KEY = "select-service-token";
const CHANGES_KEY = "select-service-token-for-changes";

let token = stored(KEY);
let forChanges = stored(CHANGES_KEY);
let question = null;
let mayAsk = true; // unasked: once, until a token has worked

function stored(key) {
  try {
    return sessionStorage.getItem(key) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

function store(key, text) {
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    // then it holds until the page is closed
  }
}

function keep(text) {
  token = text;
  store(KEY, text);
}

function keepForChanges(text) {
  forChanges = text;
  store(CHANGES_KEY, text);
  showForgetting();
}

function showForgetting() {
  document.getElementById("forget").hidden = !forChanges;
}

export function forgetForChanges() {
  keepForChanges("");
}

const bearer = (text) => (text ? { authorization: `Bearer ${text}` } : {});
export const credentials = () => bearer(token);
export const credentialsForChanges = () => bearer(forChanges || token);

const tokenField = (label) => h("div", { class: "field" }, h("label", { for: "token-text" }, label), h("input", { type: "password", name: "token", id: "token-text", autocomplete: "off", spellcheck: "false", pattern: "[!-~]*", autofocus: true }));

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
  question = confirmed({
    title: "Token",
    text: ["The service asks for a token. It is kept in this tab until the tab is closed."],
    verb: "Use it",
    fields: [tokenField("With the scope read")],
    act: async (form) => {
      keep(form.get("token").trim());
      await tried();
    },
  });
}

// A change was refused for its token: asks for another one and tries again, until it is done or the
// user gives up. A token that is refused is not kept.
export function askForChanges(refusal, once, isForToken) {
  return new Promise((resolve, reject) => {
    const node = confirmed({
      title: "Token for changes",
      text: [`The service refused: ${refusal.message}.`, "Another token is shown with changes alone, and kept in this tab until the tab is closed."],
      verb: "Use it",
      fields: [tokenField("With the scope this takes: admin has them all")],
      act: async (form) => {
        keepForChanges(form.get("token").trim());
        try {
          resolve(await once());
        } catch (error) {
          if (isForToken(error)) {
            keepForChanges("");
            throw error;
          }
          reject(error); // it was good enough; what else is wrong is said where it was asked for
        }
      },
    });
    node.addEventListener("close", () => reject(refusal));
  });
}

showForgetting();
