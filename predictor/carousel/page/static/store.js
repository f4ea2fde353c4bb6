// What the page knows: the sequences of the last while, the steps, and how things stand. All of it is bounded.

export const WINDOW_S = 20;
const KEPT_S = 90;
const MAX_ENDED = 400;
const MAX_RIDES = 40;
const MAX_CHUNKS = 300;
const MAX_STEPS = 4000;
const MAX_RATES = 240;
const FORGET_S = 5;

function sequence(order, id, index, tenant, prompt, max, arrival) {
  return {
    order, id, index, tenant, prompt, max, arrival,
    cached: 0, computed: 0, output: 0, blocks: 0, ranges: [], reason: null,
    first: null, ended: null, end: "", losses: 0, rides: [],
  };
}

export class Store {
  constructor() {
    this.hello = null;
    this.clear();
  }

  clear() {
    this.sequences = new Map();
    this.running = [];
    this.waiting = [];
    this.numRunning = 0;
    this.numWaiting = 0;
    this.steps = [];
    this.rates = [];
    this.now = null;
    this.kv = null;
    this.refused = {};
    this.isStatic = false;
    this.demo = null;
    this.time = null;
    this.heard = 0;
    this.rows = 1;
    this.offset = null;
    this.forgot = -1;
  }

  /** The server's time at this moment, running smoothly between its messages. */
  clock() {
    return this.offset === null ? null : performance.now() / 1000 + this.offset;
  }

  take(message) {
    if (message.k === "hello") {
      this.clear();
      this.hello = message;
      this.steps = message.steps.slice(-MAX_STEPS);
      return;
    }
    if (message.k !== "tick" || !this.hello) return;
    this.#setClock(message.t);
    if (message.gap) this.#closeGaps(message);
    for (const event of message.ev) this.#event(event);
    for (const step of message.steps) this.steps.push(step);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.#views(message);
    this.now = message.now;
    this.kv = message.kv;
    this.isStatic = message.static;
    this.demo = message.demo ?? null;
    this.refused = { ...message.refused, ...message.quotas };
    this.numRunning = message.running;
    this.numWaiting = message.waiting;
    this.rates.push([message.t, message.now.out]);
    if (this.rates.length > MAX_RATES) this.rates.shift();
    if (message.t > this.forgot + FORGET_S) this.#forget();
  }

  #setClock(t) {
    this.time = t;
    this.heard = performance.now();
    const offset = t - performance.now() / 1000;
    // Messages are late by more or less: the clock follows the earliest, and drifts back slowly.
    if (this.offset === null || Math.abs(offset - this.offset) > 2) this.offset = offset;
    else this.offset = Math.max(offset, this.offset - 0.02);
  }

  #event([kind, at, order, ...rest]) {
    if (kind === "a") {
      const [id, index, tenant, prompt, max] = rest;
      this.sequences.set(order, sequence(order, id, index, tenant, prompt, max, at));
      return;
    }
    const one = this.sequences.get(order);
    if (!one) return;
    const ride = one.rides.at(-1);
    if (kind === "s") {
      const [lane, cached, left] = rest;
      if (!one.rides.length) one.cached = cached;
      this.#ride(one, lane, at);
      if (left <= 1 && one.first !== null) one.rides.at(-1).decode = at;
    } else if (!ride) {
      if (kind === "e") this.#end(one, at, rest[0], rest[1]);
    } else if (kind === "c") {
      const [since, tokens, left] = rest;
      if (ride.chunks.length < MAX_CHUNKS) ride.chunks.push([since, at, tokens]);
      if (left === 0 || (left === 1 && one.first !== null)) ride.decode ??= at;
    } else if (kind === "f") {
      one.first = at;
      ride.decode ??= at;
    } else if (kind === "p") {
      one.losses += 1;
      Object.assign(ride, { to: at, mark: "↩", until: at });
    } else if (kind === "e") {
      const [output, reason, held] = rest;
      this.#end(one, at, output, reason);
      Object.assign(ride, { to: at, until: held ? null : at });
    } else if (kind === "r") {
      ride.until = at;
    }
  }

  #end(one, at, output, reason) {
    Object.assign(one, { ended: at, output, end: reason });
  }

  #ride(one, lane, from) {
    one.rides.push({ lane, from, to: null, until: null, chunks: [], decode: null, mark: "" });
    if (one.rides.length > MAX_RIDES) one.rides.shift();
    this.rows = Math.max(this.rows, lane + 1);
  }

  #views(message) {
    const read = (view, seated) => {
      const [order, id, index, tenant, prompt, cached, computed, output, max, blocks, losses, arrival, admitted, first,
        decoding, lane, reason, ranges] = view;
      let one = this.sequences.get(order);
      if (!one) {
        one = sequence(order, id, index, tenant, prompt, max, arrival);
        this.sequences.set(order, one);
      }
      if (one.ended !== null) one.ended = null;
      if (seated && lane >= 0 && (!one.rides.length || one.rides.at(-1).to !== null)) {
        this.#ride(one, lane, one.rides.length ? message.t : admitted ?? message.t);
      }
      const ride = one.rides.at(-1);
      if (seated && ride && decoding) ride.decode ??= Math.max(first ?? message.t, ride.from);
      Object.assign(one, { cached, computed, output, blocks, losses, first, ranges, reason });
      return one;
    };
    this.running = message.run.map((view) => read(view, true));
    this.waiting = message.wait.map((view) => read(view, false));
  }

  /** After a gap nothing is known of those that are no longer there but that they have gone. */
  #closeGaps(message) {
    const live = new Set([...message.run, ...message.wait].map((view) => view[0]));
    for (const one of this.sequences.values()) {
      if (live.has(one.order)) continue;
      one.ended ??= message.t;
      const ride = one.rides.at(-1);
      if (ride) {
        ride.to ??= message.t;
        ride.until ??= ride.to;
      }
    }
  }

  #forget() {
    this.forgot = this.time;
    const ended = [...this.sequences.values()].filter((one) => one.ended !== null && one.rides.at(-1)?.until !== null);
    ended.sort((a, b) => a.ended - b.ended);
    const surplus = ended.length - MAX_ENDED;
    ended.forEach((one, place) => {
      if (place < surplus || one.ended < this.time - KEPT_S) this.sequences.delete(one.order);
    });
    const seen = [...this.sequences.values()].flatMap((one) => one.rides)
      .filter((ride) => ride.to === null || ride.to > this.time - WINDOW_S - 2);
    this.rows = Math.max(1, ...seen.map((ride) => ride.lane + 1));
  }

  /** The last to leave, the latest first. */
  lastEnded(number) {
    return [...this.sequences.values()].filter((one) => one.ended !== null)
      .sort((a, b) => b.ended - a.ended).slice(0, number);
  }
}

/** What a sequence is doing: a sign and a word. */
export function state(one, ends, reasons) {
  if (one.ended !== null) return ends[one.end] ?? ["·", "gone"];
  const ride = one.rides.at(-1);
  if (!ride || ride.to !== null) return ["…", reasons[one.reason]?.[1] ?? "waits"];
  return ride.decode !== null ? ["▶", "decoding"] : ["▨", "prompt"];
}
