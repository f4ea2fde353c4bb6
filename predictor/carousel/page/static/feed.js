// The server's events: read over fetch, which can show an API key where EventSource cannot, and asked for again when
// they end. The key stays in this module; ticked, in the tab's storage.

const KEY = "carousel-key";
const LONGEST_WAIT_MS = 10_000;

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch { /* storage is switched off */ }

export const hasKey = () => key !== "";

export function setKey(value, keep) {
  key = value;
  try {
    if (keep && value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch { /* storage is switched off */ }
}

export function headers(extra = {}) {
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

/** The messages of a stream of server-sent events, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** What went wrong, in the server's own words where it has some. */
export async function problem(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export class Feed {
  /** `on.message(message)`, `on.state(state, words)` with live, wait or lost, `on.locked()` when a key is wanted. */
  constructor(on) {
    this.on = on;
    this.run = 0;
  }

  /** Begin, or begin again with another key. */
  async start() {
    const run = ++this.run;
    this.stopper?.abort();
    let wait = 500;
    while (run === this.run) {
      this.stopper = new AbortController();
      let words = "connection lost, trying again";
      try {
        const response = await fetch("page/events", { headers: headers(), signal: this.stopper.signal });
        if (response.status === 401) {
          this.on.state("lost", "locked");
          this.on.locked();
          return;
        }
        if (response.ok) {
          for await (const data of events(response)) {
            if (run !== this.run) return;
            const message = JSON.parse(data);
            if (message.k === "bye") words = "the server is stopping";
            if (message.k === "tick") wait = 500;
            this.on.message(message);
          }
        } else {
          words = await problem(response);
        }
      } catch {
        if (run !== this.run) return;
      }
      this.on.state(words.includes("loading") ? "wait" : "lost", words);
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }
}
