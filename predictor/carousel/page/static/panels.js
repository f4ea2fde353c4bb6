// The figures above, the waiting queue and the table of requests.

import { Surface } from "./canvas.js";
import { ENDS, REASONS, REFUSALS, count, rate, seconds, shortId } from "./format.js";
import { state } from "./store.js";
import { colour } from "./theme.js";

const MAX_ROWS = 24;
const MAX_QUEUE = 30;
const find = (id) => document.getElementById(id);

function say(id, words) {
  const element = find(id);
  if (element.textContent !== words) element.textContent = words;
}

/** What a picture shows, for those who do not see it. */
function label(id, words) {
  const element = find(id);
  if (element.getAttribute("aria-label") !== words) element.setAttribute("aria-label", words);
}

export class Figures {
  constructor(store) {
    this.store = store;
    this.spark = new Surface(find("spark"));
  }

  show() {
    const { now, hello, numRunning, numWaiting, waiting } = this.store;
    if (!now) return;
    const target = hello.target_ms / 1000;
    say("f-out", rate(now.out));
    say("f-ttft", seconds(now.ttft[0]));
    say("f-ttft95", now.ttft[1] === null ? "median, one minute" : `95 of 100 within ${seconds(now.ttft[1])}`);
    say("f-itl", seconds(now.itl[0]));
    say("f-itl95", now.itl[1] === null ? "median, 5 seconds" : `95 of 100 within ${seconds(now.itl[1])}`);
    say("f-step", seconds(now.step[0]));
    say("f-target", target ? `target ${seconds(target)}` : "no target");
    find("f-step").closest(".figure").classList.toggle("over", target > 0 && now.step[0] > target);
    say("f-running", count(numRunning));
    say("f-slots", `of ${count(hello.slots)} slots`);
    say("f-prompt", now.prompt ? `${rate(now.prompt)} prompt tokens/s` : `policy ${hello.policy}`);
    say("f-waiting", count(numWaiting));
    const first = waiting[0];
    label("lanes", `Rows of the batch over time: ${numRunning} of ${hello.slots} are taken`);
    label("steps", `Time of each step: ${seconds(now.step[0])} in the median, ${target ? `target ${seconds(target)}` : "no target"}`);
    say("f-why", first ? `first: ${REASONS[first.reason]?.[1] ?? "waits"}` : "nobody");
  }

  draw() {
    const { rates } = this.store;
    const { spark } = this;
    if (rates.length < 2 || !spark.begin()) return;
    const most = Math.max(1, ...rates.map(([, value]) => value));
    const { context, width, height } = spark;
    const end = rates.at(-1)[0];
    context.beginPath();
    for (const [time, value] of rates) {
      context.lineTo(width * (1 - (end - time) / 60), height - 2 - (height - 4) * (value / most));
    }
    context.strokeStyle = colour("decode");
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.stroke();
  }
}

/** Children of a list, one for each item, made once and then kept, so that focus stays where it is. */
function keyed(parent, items, key, make, fill) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const name = String(key(item));
    let child = old.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    old.delete(name);
    fill(child, item);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  for (const child of old.values()) child.remove();
}

function opener(open) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "link";
  button.addEventListener("click", () => open(Number(button.dataset.order)));
  return button;
}

function name(button, one) {
  const words = shortId(one);
  if (button.textContent !== words) button.textContent = words;
  button.dataset.order = one.order;
  button.setAttribute("aria-label", `${one.id || words}: timeline`);
}

export class Queue {
  /** `open(order)` shows a request. */
  constructor(store, open) {
    Object.assign(this, { store, open });
  }

  show() {
    const { waiting, numWaiting, time } = this.store;
    keyed(find("queue"), waiting.slice(0, MAX_QUEUE), (one) => one.order, () => {
      const item = document.createElement("li");
      const [why, since] = [document.createElement("span"), document.createElement("span")];
      why.className = "why";
      since.className = "time";
      item.append(opener(this.open), why, since);
      return item;
    }, (item, one) => {
      const [button, why, since] = item.children;
      const [sign, words] = REASONS[one.reason] ?? ["…", "waits"];
      name(button, one);
      why.textContent = words;
      why.dataset.sign = sign;
      since.textContent = seconds(time - one.arrival);
    });
    find("queue-empty").hidden = numWaiting > 0;
    this.#refused(this.store.refused);
    say("queue-count", numWaiting > MAX_QUEUE ? `the first ${MAX_QUEUE} of ${count(numWaiting)}` : "");
  }

  /** Those who were turned away since the server began. */
  #refused(refused) {
    const kinds = Object.entries(refused);
    find("refused").hidden = !kinds.length;
    const words = kinds.map(([why, number]) => `${REFUSALS[why] ?? why.replaceAll("_", " ")} ${count(number)}`);
    say("refused", `Refused since the start: ${words.join(", ")}`);
  }
}

export class Requests {
  constructor(store, open) {
    Object.assign(this, { store, open });
  }

  show() {
    const running = this.store.running.slice(0, MAX_ROWS);
    const ended = this.store.lastEnded(MAX_ROWS - running.length);
    const rows = [...running, ...ended];
    keyed(find("rows"), rows, (one) => one.order, () => this.#row(), (row, one) => this.#fill(row, one));
    find("rows-empty").hidden = rows.length > 0;
  }

  #row() {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.append(opener(this.open));
    row.append(head);
    for (const kind of ["some", "", "num", "num some", "num", "num some", "num some"]) {
      const cell = document.createElement("td");
      cell.className = kind;
      row.append(cell);
    }
    return row;
  }

  #fill(row, one) {
    const [head, tenant, doing, prompt, cached, output, waited, first] = row.children;
    const [sign, words] = state(one, ENDS, REASONS);
    const seated = one.rides[0]?.from ?? null;
    name(head.firstChild, one);
    row.classList.toggle("gone", one.ended !== null);
    const put = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };
    put(tenant, one.tenant || "–");
    put(doing, `${sign} ${words}`);
    put(prompt, count(one.prompt));
    put(cached, one.cached ? count(one.cached) : "–");
    put(output, one.ended === null ? `${count(one.output)} of ${count(one.max)}` : count(one.output));
    put(waited, seated === null ? "–" : seconds(seated - one.arrival));
    put(first, one.first === null ? "–" : seconds(one.first - one.arrival));
  }
}
