// A conversation with the model, over the OpenAI route that every client uses.

import { events, headers, problem } from "./feed.js";
import { seconds } from "./format.js";

const MAX_TURNS = 40;
const find = (id) => document.getElementById(id);

export class Chat {
  /** `locked()` is called when the server wants a key. */
  constructor(store, locked) {
    this.store = store;
    this.locked = locked;
    this.turns = [];
    this.stopper = null;
    find("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    find("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    find("chat-stop").addEventListener("click", () => this.stopper?.abort());
    find("chat-clear").addEventListener("click", () => this.#clear());
  }

  #clear() {
    this.stopper?.abort();
    this.turns = [];
    find("chat-log").replaceChildren();
    find("chat-log").hidden = find("chat-clear").hidden = true;
    find("chat-text").focus();
  }

  #bubble(kind, text) {
    const log = find("chat-log");
    log.hidden = find("chat-clear").hidden = false;
    const bubble = document.createElement("div");
    bubble.className = `turn ${kind}`;
    bubble.textContent = text;
    log.append(bubble);
    while (log.children.length > MAX_TURNS) log.firstChild.remove();
    log.scrollTop = log.scrollHeight;
    return bubble;
  }

  async #send() {
    const text = find("chat-text").value.trim();
    if (!text || this.stopper || !this.store.hello) return;
    find("chat-text").value = "";
    this.turns.push({ role: "user", content: text });
    this.turns = this.turns.slice(-MAX_TURNS);
    this.#bubble("mine", text);
    const bubble = this.#bubble("theirs", "…");
    this.stopper = new AbortController();
    this.#busy(true);
    try {
      await this.#answer(bubble);
    } catch (error) {
      if (error.name === "AbortError") this.#note(bubble, "stopped");
      else this.#fail(bubble, error.message);
    }
    this.stopper = null;
    this.#busy(false);
  }

  #busy(busy) {
    find("chat-send").disabled = busy;
    find("chat-stop").hidden = !busy;
  }

  #fail(bubble, words) {
    bubble.className = "turn bad";
    bubble.textContent = words;
    this.turns.pop();
  }

  #note(bubble, words) {
    const note = document.createElement("small");
    note.textContent = words;
    bubble.append(note);
  }

  async #answer(bubble) {
    const began = performance.now();
    const most = Math.max(1, Math.min(4096, Number(find("chat-max").value) || 120));
    const response = await fetch("openai/v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ model: this.store.hello.model, messages: this.turns, max_tokens: most, stream: true }),
      signal: this.stopper.signal,
    });
    if (response.status === 401) this.locked();
    if (!response.ok) throw new Error(await problem(response));
    let [answer, first, number] = ["", null, 0];
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      const piece = chunk.choices?.[0]?.delta?.content ?? "";
      if (!piece) continue;
      first ??= performance.now();
      number += 1;
      answer += piece;
      bubble.textContent = answer;
      find("chat-log").scrollTop = find("chat-log").scrollHeight;
    }
    const took = (performance.now() - began) / 1000;
    this.turns.push({ role: "assistant", content: answer });
    if (first === null) bubble.textContent = "(an empty answer)";
    else this.#note(bubble, `first words after ${seconds((first - began) / 1000)}, all after ${seconds(took)}`);
  }
}
