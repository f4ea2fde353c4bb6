// Light, dark, or as the system has it. Canvases ask here for the colours of the style sheet.

const WORDS = { auto: "Auto", light: "Light", dark: "Dark" };
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let choice = "auto";
let colours = {};

try {
  choice = localStorage.getItem("carousel-theme") in WORDS ? localStorage.getItem("carousel-theme") : "auto";
} catch { /* storage is switched off: the choice lasts as long as the page */ }

function apply() {
  const dark = choice === "dark" || (choice === "auto" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const style = getComputedStyle(document.documentElement);
  colours = {};
  for (const name of ["card", "line", "text", "muted", "accent", "decode", "prefill", "prefill-line", "hold", "idle",
    "shared", "bad", "grid", "track"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  for (const listener of listeners) listener();
}

export const colour = (name) => colours[name];

export function onTheme(listener) {
  listeners.push(listener);
}

export function startTheme(button) {
  const show = () => {
    button.textContent = WORDS[choice];
    button.setAttribute("aria-label", `Colours: ${choice === "auto" ? "as the system" : choice}`);
  };
  button.addEventListener("click", () => {
    const order = Object.keys(WORDS);
    choice = order[(order.indexOf(choice) + 1) % order.length];
    try {
      localStorage.setItem("carousel-theme", choice);
    } catch { /* as above */ }
    apply();
    show();
  });
  system.addEventListener("change", apply);
  apply();
  show();
}
