// Everything the page asks of the service. Paths are relative, so that a proxy may put a prefix
// before them; all goes to where the page came from (its policy allows nothing else).

import { credentials, judged } from "./token.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15000;
const SILENCE_MS = 6000; // the service says something every second

class Refusal extends Error {
  constructor(status, body) {
    super(body?.error ?? `status ${status}`);
    this.status = status;
    this.code = body?.code ?? null;
  }
}

// `shown`: credentials other than those of who looks on; what becomes of them is the caller's.
export async function ask(method, path, body, shown = null) {
  const headers = { accept: "application/json", ...(shown ?? credentials()) };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    signal: AbortSignal.timeout(15000),
  });
  if (shown === null) judged(answer.status);
  const text = await answer.text();
  let value = null;
  try {
    value = text ? JSON.parse(text) : null;
  } catch {
    value = null;
  }
  if (!answer.ok) throw new Refusal(answer.status, value);
  return value;
}

export const get = (path) => ask("GET", path);

// Follows the event stream for ever: `onEvent(kind, data)` for every message, `onState(state)`
// with {state: "live"} or {state: "lost", why, retryAt} as connections come and go.
export class Follower {
  constructor(path, onEvent, onState) {
    this.path = path;
    this.onEvent = onEvent;
    this.onState = onState;
    this.pause = FIRST_PAUSE_MS;
    this.wake = null;
    const hurry = () => this.hurry();
    addEventListener("online", hurry);
    document.addEventListener("visibilitychange", () => document.hidden || hurry());
    this.run();
  }

  // Try again now.
  hurry() {
    this.pause = FIRST_PAUSE_MS;
    this.wake?.();
  }

  async run() {
    for (;;) {
      let why = "the stream has ended";
      try {
        await this.once();
      } catch (error) {
        why = error instanceof Refusal ? error.message : "no answer";
      }
      const pause = this.pause * (0.75 + Math.random() / 2);
      this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 1.8);
      this.onState({ state: "lost", why, retryAt: Date.now() + pause });
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, pause);
        this.wake = () => (clearTimeout(timer), resolve());
      });
      this.wake = null;
    }
  }

  async once() {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), SILENCE_MS);
    try {
      const answer = await fetch(this.path, {
        headers: { accept: "text/event-stream", ...credentials() },
        cache: "no-store",
        signal: stop.signal,
      });
      judged(answer.status);
      if (!answer.ok) throw new Refusal(answer.status, await answer.json().catch(() => null));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => stop.abort(), SILENCE_MS);
        const messages = (rest + value).split("\n\n");
        rest = messages.pop();
        for (const message of messages) this.take(message);
      }
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
  }

  take(message) {
    let kind = "message";
    const data = [];
    for (const line of message.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data.push(line.slice(6));
    }
    if (!data.length) return;
    this.pause = FIRST_PAUSE_MS;
    this.onEvent(kind, JSON.parse(data.join("\n")));
    this.onState({ state: "live" });
  }
}
