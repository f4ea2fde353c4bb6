// One request: its figures, its time from arrival to end, and everything that happened to it.

import { Surface, hatch } from "./canvas.js";
import { ENDS, REASONS, count, seconds } from "./format.js";
import { state } from "./store.js";
import { colour } from "./theme.js";

const find = (id) => document.getElementById(id);
const MAX_EVENTS = 60;

export class Detail {
  constructor(store) {
    this.store = store;
    this.one = null;
    this.dialog = find("detail");
    this.surface = new Surface(find("detail-bar"));
    find("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => { this.one = null; });
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
  }

  open(one) {
    if (!one) return;
    this.one = one;
    this.shown = "";
    if (!this.dialog.open) this.dialog.showModal();
    this.show();
  }

  show() {
    const { one } = this;
    if (!one) return;
    this.#facts(one);
    this.#bar(one);
    const events = this.#events(one);
    const shown = events.map((event) => event.join(" ")).join("\n");
    if (shown === this.shown) return;
    this.shown = shown;
    find("detail-events").replaceChildren(...events.map(([at, words]) => {
      const item = document.createElement("li");
      for (const text of [at, words]) {
        const part = document.createElement("span");
        part.textContent = text;
        item.append(part);
      }
      return item;
    }));
  }

  #facts(one) {
    const end = one.ended ?? this.store.time;
    const [sign, words] = state(one, ENDS, REASONS);
    const seated = one.rides[0]?.from ?? null;
    const pace = one.output > 1 && one.first !== null ? (end - one.first) / (one.output - 1) : null;
    const facts = [
      ["Id", one.id || "hidden: it is another tenant’s", "long"],
      ["State", `${sign} ${words}`],
      ["Tenant", one.tenant || "–"],
      ["Prompt", `${count(one.prompt)} tokens${one.cached ? `, ${count(one.cached)} cached` : ""}`],
      ["Output", `${count(one.output)} of at most ${count(one.max)}`],
      ["Waited", seated === null ? "still waits" : seconds(seated - one.arrival)],
      ["First token", one.first === null ? "–" : seconds(one.first - one.arrival)],
      ["Between tokens", seconds(pace)],
      [one.ended === null ? "So far" : "In all", seconds(end - one.arrival)],
      ["Preemptions", count(one.losses)],
      ["KV blocks", one.ended === null ? count(one.blocks) : "given back"],
    ];
    find("detail-facts").replaceChildren(...facts.map(([label, value, kind]) => {
      const group = document.createElement("div");
      const [term, text] = [document.createElement("dt"), document.createElement("dd")];
      group.className = kind ?? "";
      term.textContent = label;
      text.textContent = value;
      group.append(term, text);
      return group;
    }));
  }

  #bar(one) {
    const { surface } = this;
    if (!surface.begin()) return;
    const { context, width } = surface;
    const end = Math.max(one.ended ?? this.store.time, one.arrival + 0.001);
    const x = (time) => Math.max(0, Math.min(1, (time - one.arrival) / (end - one.arrival))) * width;
    const [top, tall] = [4, 26];
    context.fillStyle = colour("track");
    surface.bar(0, top, width, tall, 4);
    context.fill();
    const pattern = hatch(context, colour("prefill"), colour("prefill-line"));
    for (const ride of one.rides) {
      const stop = ride.to ?? end;
      context.fillStyle = colour("hold");
      context.fillRect(x(ride.from), top + tall / 2 - 1, x(stop) - x(ride.from), 2);
      if (ride.decode !== null) {
        context.fillStyle = colour("decode");
        surface.bar(x(ride.decode), top, x(stop) - x(ride.decode), tall, 4);
        context.fill();
      }
      context.fillStyle = pattern;
      for (const [since, at] of ride.chunks) {
        surface.bar(x(Math.max(since, ride.from)), top, Math.max(x(at) - x(Math.max(since, ride.from)) - 1, 2), tall, 2);
        context.fill();
      }
    }
    surface.text("arrival", 0, 46, colour("muted"));
    surface.text(seconds(end - one.arrival), width, 46, colour("muted"), { align: "right" });
  }

  #events(one) {
    const events = [[one.arrival, `arrives with ${count(one.prompt)} tokens`]];
    one.rides.forEach((ride, number) => {
      events.push([ride.from, number ? "steps on again" : "steps on" + (one.cached ? `, ${count(one.cached)} tokens of its prompt are cached` : "")]);
      for (const [since, at, tokens] of ride.chunks) events.push([at, `${count(tokens)} prompt tokens computed in ${seconds(at - since)}`]);
      if (ride.mark) events.push([ride.to, "is preempted: what was computed will be computed again"]);
    });
    if (one.first !== null) events.push([one.first, "first token"]);
    if (one.ended !== null) events.push([one.ended, `steps off: ${ENDS[one.end]?.[1] ?? "gone"}, ${count(one.output)} tokens`]);
    events.sort((a, b) => a[0] - b[0]);
    const surplus = events.length - MAX_EVENTS;
    if (surplus > 0) events.splice(MAX_EVENTS / 2, surplus, [events[MAX_EVENTS / 2][0], `… ${surplus} more`]);
    return events.map(([at, words]) => [`+${(at - one.arrival).toFixed(3)} s`, words]);
  }
}
