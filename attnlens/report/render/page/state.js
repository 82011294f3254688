// The state of the view, stored in the URL's fragment so that a link shows the same view to others.
"use strict";

const state = { measure: "", head: "", sort: "", filter: "", theme: "" };
const watchers = [];

function change(parts) {
  const changed = Object.keys(parts).filter((name) => state[name] !== parts[name]);
  if (!changed.length) return;
  Object.assign(state, parts);
  const kept = Object.entries(state).filter(([, value]) => value !== "");
  try {
    history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.href.split("#")[0]);
  } catch {
    // a page inside another document can lack an address of its own: it works, but without a link
  }
  tell(changed);
}

function tell(changed) {
  for (const watch of watchers) watch(changed);
}

// Read the state from the fragment; missing entries, and entries that this report lacks, get their defaults.
function restored() {
  const said = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return {
    measure: measureOf(said.measure) ? said.measure : data ? data.measures[0].name : "",
    head: headOf.has(said.head) ? said.head : "",
    sort: measureOf((said.sort ?? "").replace(/^-/, "")) || said.sort === "-" ? said.sort : "",
    filter: said.filter ?? "",
    theme: ["light", "dark"].includes(said.theme) ? said.theme : "",
  };
}

function restore() {
  Object.assign(state, restored());
  tell(Object.keys(state));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (state.theme ? state.theme === "dark" : dark.matches);

function showTheme(changed) {
  if (!changed.includes("theme")) return;
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  element("theme").textContent = isDark() ? "Light" : "Dark";
}

function startTheme() {
  const button = element("theme");
  button.hidden = false;
  button.addEventListener("click", () => change({ theme: isDark() ? "light" : "dark" }));
  watchers.push(showTheme);
  dark.addEventListener("change", () => tell(["theme"]));
}
