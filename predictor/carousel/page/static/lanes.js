// The rows of the batch over time, and the time of each step below them, on one axis.

import { Surface, hatch } from "./canvas.js";
import { ENDS, seconds, shortId } from "./format.js";
import { WINDOW_S } from "./store.js";
import { colour, onTheme } from "./theme.js";

const GUTTER = 30;
const AXIS = 20;
const END = 16;
const MAX_HEIGHT = 520;
const DELAY_S = 0.35; // behind the server's clock, so that nothing appears after its time

export class Lanes {
  /** `open(sequence)` is called for the one that is clicked, `hover(sequence)` for the one under the pointer. */
  constructor(store, { lanes, steps, empty, target, open, hover }) {
    this.store = store;
    this.surface = new Surface(lanes);
    this.strip = new Surface(steps);
    this.empty = empty;
    this.target = target;
    this.hits = [];
    this.chosen = null;
    this.peak = 0;
    onTheme(() => { this.pattern = null; });
    lanes.addEventListener("click", (event) => {
      const one = this.#at(event);
      if (one) open(one);
    });
    lanes.addEventListener("pointermove", (event) => this.#over(this.#at(event), hover));
    lanes.addEventListener("pointerleave", () => this.#over(null, hover));
  }

  #over(one, hover) {
    if (one === this.chosen) return;
    this.chosen = one;
    hover(one);
  }

  #at(event) {
    const box = this.surface.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    return this.hits.findLast((hit) => x >= hit.x - 2 && x <= hit.x + hit.w + 2 && y >= hit.y && y < hit.y + hit.h)?.one
      ?? null;
  }

  draw() {
    const { store } = this;
    const clock = store.clock();
    this.end = clock === null ? 0 : Math.min(clock, store.time + 1.5) - DELAY_S;
    this.#drawLanes();
    this.#drawSteps();
  }

  #x(time) {
    const width = this.surface.width - GUTTER - END;
    return GUTTER + width * (1 - (this.end - time) / WINDOW_S);
  }

  #drawLanes() {
    const { store, surface } = this;
    const slots = store.hello?.slots ?? 8;
    const rows = Math.min(Math.max(store.rows, Math.min(slots, 8)), 256);
    const narrow = surface.canvas.clientWidth < 600;
    const pitch = Math.max(narrow ? 12 : 9, Math.min(narrow ? 22 : 30, (MAX_HEIGHT - AXIS) / rows));
    if (!surface.begin(Math.round(Math.max(pitch * rows + AXIS, 180)))) return;
    const { context, width } = surface;
    this.pattern ??= hatch(context, colour("prefill"), colour("prefill-line"));
    this.hits = [];
    for (let row = 0; row < rows; row += 1) {
      const y = row * pitch;
      context.fillStyle = colour("track");
      surface.bar(GUTTER, y + 1.5, width - GUTTER - END, pitch - 3, 4);
      context.fill();
      if (pitch > 12 || row % 4 === 0) {
        surface.text(String(row + 1), GUTTER - 8, y + pitch / 2, colour("muted"), { align: "right" });
      }
    }
    this.#axis(surface, rows * pitch, true);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, rows * pitch);
    context.clip();
    const since = this.end - WINDOW_S - 1;
    for (const one of store.sequences.values()) {
      for (const ride of one.rides) {
        if (ride.lane < rows && (ride.until ?? this.end) > since) this.#ride(one, ride, ride.lane * pitch, pitch);
      }
    }
    context.restore();
    this.empty.hidden = store.time === null || store.numRunning > 0 || this.hits.length > 0;
  }

  #axis(surface, bottom, words) {
    const { context } = surface;
    for (let ago = 5; ago < WINDOW_S; ago += 5) {
      const x = Math.round(this.#x(this.end - ago));
      context.fillStyle = colour("grid");
      context.fillRect(x, 0, 1, bottom);
      if (words) surface.text(`−${ago} s`, x, bottom + 11, colour("muted"), { align: "center" });
    }
    if (words) surface.text("now", surface.width - END, bottom + 11, colour("muted"), { align: "right" });
  }

  #ride(one, ride, top, pitch) {
    const { surface, end } = this;
    const { context } = surface;
    const stop = Math.min(ride.to ?? end, end);
    const x = this.#x(ride.from);
    const right = this.#x(stop);
    if (right < x) return;
    const [y, height] = [top + 2.5, pitch - 5];
    const middle = top + pitch / 2;
    this.hits.push({ one, x, y: top, w: this.#x(Math.min(ride.until ?? end, end)) - x, h: pitch });
    context.fillStyle = colour("hold");
    context.fillRect(x, middle - 1, right - x, 2);
    if (ride.decode !== null && ride.decode < stop) {
      context.fillStyle = colour("decode");
      const from = this.#x(ride.decode);
      surface.bar(from, y, right - from, height, 4);
      context.fill();
    }
    context.fillStyle = this.pattern;
    for (const [since, at] of ride.chunks) {
      const from = this.#x(Math.max(since, ride.from));
      surface.bar(from, y, Math.max(this.#x(Math.min(at, end)) - from - 1, 2), height, 2);
      context.fill();
    }
    if (ride.to !== null && ride.to <= end) this.#after(one, ride, right, y, height);
    this.#label(one, ride, x, right, middle, height);
    if (one === this.chosen) {
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      surface.bar(x, y, right - x, height, 4);
      context.stroke();
    }
  }

  /** How it left, and the row that a static batch goes on computing. */
  #after(one, ride, x, y, height) {
    const { surface } = this;
    const { context } = surface;
    const until = this.#x(Math.min(ride.until ?? this.end, this.end));
    if (until - x > 3) {
      context.strokeStyle = colour("idle");
      context.lineWidth = 1.5;
      context.setLineDash([4, 3]);
      surface.bar(x + 1, y + 1, until - x - 2, height - 2, 3);
      context.stroke();
      context.setLineDash([]);
    }
    const mark = ride.mark || (one.ended === ride.to ? ENDS[one.end]?.[0] : "") || "";
    if (mark && height >= 9) {
      surface.text(mark, x + 3, y + height / 2, colour(mark === "!" ? "bad" : "muted"), { size: Math.min(12, height) });
    }
  }

  #label(one, ride, x, right, middle, height) {
    if (height < 12) return;
    const from = Math.max(ride.decode === null ? x : this.#x(ride.decode), GUTTER) + 7;
    const room = Math.min(right, this.surface.width - END) - from;
    if (ride.decode === null || room < 24) return;
    const style = { size: Math.min(11.5, height), weight: 550 };
    const lengths = `${one.prompt} → ${one.output}`;
    const words = [`${shortId(one)}  ${lengths}`, lengths, String(one.output)]
      .find((text) => this.surface.measure(text, style) < room - 4);
    if (words) this.surface.text(words, from, middle + 0.5, "#08221e", style);
  }

  #drawSteps() {
    const { store, strip } = this;
    if (!strip.begin()) return;
    const { context, width, height } = strip;
    const target = store.hello?.target_ms || 0;
    const since = this.end - WINDOW_S;
    const steps = store.steps.filter((step) => step[1] + step[2] / 1000 > since && step[1] < this.end);
    const most = Math.max(10, target ? target * 1.15 : 0, ...steps.map((step) => step[2]));
    this.peak = this.peak ? this.peak + (most - this.peak) * 0.15 : most;
    const scale = (height - 6) / this.peak;
    this.#axis(strip, height, false);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER - END, height);
    context.clip();
    for (const [, started, ms, prefill, decode, idle] of steps) {
      const x = this.#x(started);
      const wide = Math.max(this.#x(Math.min(started + ms / 1000, this.end)) - x - 0.6, 0.8);
      const tall = Math.max(ms * scale, 1);
      const all = prefill + decode + idle || 1;
      const prompt = wide < 4 ? colour("prefill") : this.pattern;
      let y = height;
      for (const [share, fill] of [[decode, colour("decode")], [prefill, prompt], [idle, colour("idle")]]) {
        const part = tall * (share / all);
        context.fillStyle = fill;
        context.fillRect(x, y - part, wide, part);
        y -= part;
      }
    }
    context.restore();
    if (target) {
      const y = height - target * scale;
      context.strokeStyle = colour("text");
      context.lineWidth = 1;
      context.setLineDash([5, 4]);
      context.beginPath();
      context.moveTo(GUTTER, y);
      context.lineTo(width - END, y);
      context.stroke();
      context.setLineDash([]);
    }
    this.target.textContent = target ? `dashed: the target, ${seconds(target / 1000)}` : "no target is set";
  }
}
