// Puts the page together: messages come in, canvases are drawn by the screen's rate, tables once in a while.

import { Chat } from "./chat.js";
import { Demo } from "./demo.js";
import { Detail } from "./detail.js";
import { Feed, hasKey, setKey } from "./feed.js";
import { Lanes } from "./lanes.js";
import { Figures, Queue, Requests } from "./panels.js";
import { Pool } from "./pool.js";
import { Store } from "./store.js";
import { onTheme, startTheme } from "./theme.js";

const TABLES_MS = 500;
const SILENT_S = 4;
const find = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

startTheme(find("theme"));
const store = new Store();
const detail = new Detail(store);
const openOrder = (order) => detail.open(store.sequences.get(order));
const figures = new Figures(store);
const queue = new Queue(store, openOrder);
const requests = new Requests(store, openOrder);
const demo = new Demo(store);
const chat = new Chat(store, () => askForKey("The server does not take this key."));
let hovered = null;
const lanes = new Lanes(store, {
  lanes: find("lanes"),
  steps: find("steps"),
  empty: find("empty"),
  target: find("strip-target"),
  open: (one) => detail.open(one),
  hover: (one) => { hovered = one; },
});
const pool = new Pool(store, {
  canvas: find("pool"),
  total: find("pool-count"),
  used: find("p-used"),
  shared: find("p-shared"),
  cached: find("p-cached"),
  free: find("p-free"),
});

// ---- the state of the connection

function show(state, words) {
  const pill = find("status");
  if (pill.dataset.state !== state) pill.dataset.state = state;
  const short = { live: "live", wait: "loading", lost: "not connected" }[state];
  if (pill.textContent !== short) pill.textContent = short;
  const notice = find("notice");
  notice.hidden = state === "live";
  if (notice.textContent !== words) notice.textContent = words;
}

const feed = new Feed({
  message: (message) => {
    store.take(message);
    if (message.k === "hello") greet(message);
    if (message.k === "tick") show("live", "");
    if (still.matches) draw();
  },
  state: show,
  locked: () => askForKey(hasKey() ? "The server does not take this key." : ""),
});

function greet(hello) {
  document.title = `${hello.model} · Carousel`;
  find("model").textContent = hello.model;
  find("version").textContent = `Carousel ${hello.version}.`;
  find("key-button").hidden = !hello.keys;
  find("chat-max").max = hello.context;
}

// ---- the key

function askForKey(why) {
  show("lost", why || "This server wants an API key.");
  find("key-button").hidden = false;
  if (why) find("key-why").textContent = why;
  const dialog = find("key-dialog");
  if (!dialog.open) dialog.showModal();
}

find("key-button").addEventListener("click", () => find("key-dialog").showModal());
find("key-cancel").addEventListener("click", () => find("key-dialog").close());
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(find("key-input").value.trim(), find("key-keep").checked);
  find("key-input").value = "";
  find("key-dialog").close();
  feed.start();
});

// ---- drawing

function draw() {
  lanes.draw();
  pool.draw(detail.one ?? hovered);
  figures.draw();
}

let last = 0;
function frame(now) {
  requestAnimationFrame(frame);
  if (document.hidden || still.matches || now - last < 30) return;
  last = now;
  draw();
}

function tables() {
  if (document.hidden) return;
  figures.show();
  queue.show();
  requests.show();
  demo.show();
  detail.show();
  const mode = find("mode");
  mode.hidden = !store.hello;
  const words = store.isStatic ? "static batches" : "continuous batching";
  if (mode.textContent !== words) mode.textContent = words;
  if (store.time !== null && performance.now() - store.heard > SILENT_S * 1000 && find("status").dataset.state === "live") {
    show("wait", "The server has said nothing for some seconds: a step takes long, or the connection does.");
  }
}

onTheme(() => draw());
addEventListener("resize", () => { if (still.matches) draw(); });
setInterval(tables, TABLES_MS);
requestAnimationFrame(frame);
draw();
feed.start();

export { draw, lanes, store, tables };
