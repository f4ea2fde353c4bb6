// Numbers, times and names, as people read them.

const grouped = new Intl.NumberFormat("en");

export const count = (value) => grouped.format(value);

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? grouped.format(Math.round(value)) : String(Math.round(value * 10) / 10);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return "0 ms";
  if (value < 0.0995) return `${(value * 1000).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 99.95) return `${value.toPrecision(3)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function shortId(sequence) {
  if (!sequence.id) return "another tenant’s";
  const name = sequence.id.replace(/^(chat)?cmpl-/, "");
  const short = name.length > 12 ? `${name.slice(0, 4)}…${name.slice(-4)}` : name;
  return sequence.index ? `${short} #${sequence.index}` : short;
}

export const ENDS = {
  eos: ["✓", "finished"],
  stop: ["✓", "stop string"],
  length: ["■", "length reached"],
  cancelled: ["✕", "client left"],
  timeout: ["◷", "timed out"],
  error: ["!", "failed"],
};

export const REFUSALS = {
  invalid: "wrong fields",
  too_long: "too long",
  queue_full: "queue full",
  unavailable: "not ready",
  queue_share: "tenant’s part of the queue full",
  requests: "quota of requests",
  tokens: "quota of tokens",
  concurrent: "quota at once",
};

export const REASONS = {
  slots: ["▦", "no slot free"],
  blocks: ["▤", "too few KV blocks"],
  budget: ["◔", "step is full"],
  prefix: ["»", "shares a prefix soon"],
  policy: ["↕", "behind others"],
  group: ["◧", "static group runs"],
  next: ["→", "next step"],
};
