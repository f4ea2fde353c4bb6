// The KV pool as a map: one cell for each block, or for several in a large pool.

import { Surface } from "./canvas.js";
import { count } from "./format.js";
import { colour } from "./theme.js";

const SIDE = 12;
const MIN_CELLS = 256;

export class Pool {
  constructor(store, { canvas, total, used, shared, cached, free }) {
    this.store = store;
    this.surface = new Surface(canvas);
    Object.assign(this, { total, used, shared, cached, free });
  }

  /** `chosen`: a sequence whose blocks are framed. */
  draw(chosen) {
    const { kv, hello } = this.store;
    if (!kv) return;
    this.used.textContent = `used ${count(kv.used)}`;
    this.shared.textContent = `of them shared ${count(kv.shared)}`;
    this.cached.textContent = `cached ${count(kv.cached)}`;
    this.free.textContent = `free ${count(kv.free)}`;
    this.total.textContent = `${count(kv.all)} blocks of ${hello.block_tokens} tokens`;
    this.surface.canvas.setAttribute("aria-label",
      `Map of the KV blocks: ${kv.used} used, ${kv.shared} of them shared, ${kv.cached} cached, ${kv.free} free`);
    this.#map(kv, chosen);
  }

  #map(kv, chosen) {
    const { surface } = this;
    const wide = surface.canvas.clientWidth;
    if (!wide) return;
    // What was never used is free, and is drawn as far as it makes the map whole.
    const columns = Math.max(1, Math.floor(wide / SIDE));
    const known = kv.cells.length;
    const all = Math.ceil(kv.all / kv.per);
    const least = Math.min(all, Math.max(known, MIN_CELLS));
    const rows = Math.max(Math.ceil(least / columns), 1);
    const pitch = rows > 16 ? Math.max(6, SIDE * Math.sqrt(16 / rows)) : SIDE;
    const across = Math.floor(wide / pitch);
    const cells = Math.min(all, across * Math.ceil(least / across));
    if (!surface.begin(Math.ceil(cells / across) * pitch)) return;
    const framed = new Set();
    for (const [first, number] of chosen?.ranges ?? []) {
      for (let block = first; block < first + number; block += 1) framed.add(Math.floor(block / kv.per));
    }
    for (let cell = 0; cell < cells; cell += 1) {
      const [x, y] = [(cell % across) * pitch, Math.floor(cell / across) * pitch];
      this.#cell(kv.cells[cell] ?? ".", x, y, pitch - 2);
      if (framed.has(cell)) {
        surface.context.strokeStyle = colour("text");
        surface.context.lineWidth = 2;
        surface.bar(x, y, pitch - 2, pitch - 2, 2);
        surface.context.stroke();
      }
    }
  }

  #cell(kind, x, y, side) {
    const { surface } = this;
    const { context } = surface;
    if (kind === ".") {
      context.fillStyle = colour("hold");
      context.fillRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
      return;
    }
    if (kind === "c") {
      context.strokeStyle = colour("decode");
      context.lineWidth = 1.2;
      surface.bar(x + 0.8, y + 0.8, side - 1.6, side - 1.6, 2);
      context.stroke();
      return;
    }
    context.fillStyle = colour(kind === "s" ? "shared" : "decode");
    surface.bar(x, y, side, side, 2);
    context.fill();
    if (kind === "s") {
      context.fillStyle = colour("card");
      context.beginPath();
      context.arc(x + side / 2, y + side / 2, Math.max(side / 6, 1), 0, 7);
      context.fill();
    }
  }
}
