// The demonstration: the same load under static and under continuous batching.

import { headers, problem } from "./feed.js";
import { rate, seconds } from "./format.js";

const find = (id) => document.getElementById(id);
const SETTLE_MS = 2000;
const MEASURES = [
  ["All 24 done in", "seconds", seconds, false],
  ["Output tokens/s", "tokens_per_s", rate, true],
  ["First token, mean", "ttft_mean", seconds, false],
  ["First token, longest", "ttft_max", seconds, false],
];

export class Demo {
  constructor(store) {
    this.store = store;
    this.shown = "";
    this.chosen = -Infinity; // when the switch was last moved here: for a while the server may not know yet
    for (const name of ["load", "compare", "stop"]) {
      find(`demo-${name}`).addEventListener("click", () => this.#act(name));
    }
    for (const choice of document.querySelectorAll("input[name=batching]")) {
      choice.addEventListener("change", () => {
        this.chosen = performance.now();
        this.#act(choice.value);
      });
    }
  }

  async #act(what) {
    this.#say("");
    try {
      const response = await fetch("page/demo", {
        method: "POST",
        headers: headers({ "Content-Type": "application/json" }),
        body: JSON.stringify({ do: what }),
      });
      if (!response.ok) this.#say(await problem(response));
    } catch {
      this.#say("the server does not answer");
    }
  }

  show() {
    const { hello, demo, isStatic } = this.store;
    find("demo").hidden = find("empty-demo").hidden = !hello?.demo;
    if (!demo) return;
    const running = demo.running !== "";
    for (const id of ["demo-load", "demo-compare"]) find(id).disabled = running;
    find("demo-stop").hidden = !running;
    for (const choice of document.querySelectorAll("input[name=batching]")) {
      if (performance.now() - this.chosen > SETTLE_MS) choice.checked = (choice.value === "static") === isStatic;
      choice.disabled = running;
    }
    if (running) this.#say(`${demo.running}: ${demo.done} of ${demo.of} requests are done`);
    else if (demo.problem) this.#say(demo.problem);
    else if (find("demo-state").textContent.includes("requests are done")) this.#say("");
    this.#results(demo.results);
  }

  #say(words) {
    const place = find("demo-state");
    if (place.textContent !== words) place.textContent = words;
    place.hidden = !words;
  }

  #results(results) {
    const shown = JSON.stringify(results);
    if (shown === this.shown) return;
    this.shown = shown;
    const any = Object.keys(results).length > 0;
    find("demo-table").hidden = !any;
    find("demo-table").tBodies[0].replaceChildren(...MEASURES.map((measure) => this.#row(measure, results)));
  }

  #row([label, field, format, more], results) {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = label;
    row.append(head);
    const values = ["static", "continuous"].map((way) => results[way]?.[field] ?? null);
    const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
    const known = values.filter((value) => value !== null);
    const best = known.length === 2 ? (more ? Math.max(...known) : Math.min(...known)) : null;
    for (const value of values) {
      const cell = document.createElement("td");
      cell.textContent = value === null ? "–" : format(value) + (value === best ? " ✓" : "");
      if (value !== null) {
        const bar = document.createElement("div");
        bar.className = value === best ? "bar best" : "bar";
        bar.style.width = `${(100 * value) / most}%`;
        cell.append(bar);
      }
      row.append(cell);
    }
    return row;
  }
}
