// What the page changes, after a question: with a token of its own where the one that looks on may
// not. That token is asked for when the service wants it, and goes with changes alone.

import { ask } from "./api.js";
import { askForChanges, credentialsForChanges } from "./token.js";

const isForToken = (error) => error.status === 401 || error.status === 403;

export async function change(method, path, body) {
  const once = () => ask(method, path, body, credentialsForChanges());
  try {
    return await once();
  } catch (refusal) {
    if (!isForToken(refusal)) throw refusal;
    return askForChanges(refusal, once, isForToken);
  }
}
