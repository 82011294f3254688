// The state of the view, stored in the URL's fragment so that a link shows the same view to others.
"use strict";

const state = { measure: "", head: "", sort: "", filter: "", theme: "" };
const watchers = [];

function change(parts) {
  const names = Object.keys(parts).filter((name) => state[name] !== parts[name]);
  if (!names.length) return;
  Object.assign(state, parts);
  const entries = Object.entries(state).filter(([, value]) => value !== "");
  try {
    history.replaceState(null, "", entries.length ? `#${new URLSearchParams(entries)}` : location.href.split("#")[0]);
  } catch {
    // a page inside another document can lack an address of its own: it works, but without a link
  }
  notify(names);
}

function notify(names) {
  for (const watch of watchers) watch(names);
}

// Read the state from the fragment; missing entries, and entries that this report lacks, get their defaults.
function readState() {
  const fragment = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return {
    measure: measureOf(fragment.measure) ? fragment.measure : data ? data.measures[0].name : "",
    head: headOf.has(fragment.head) ? fragment.head : "",
    sort: measureOf((fragment.sort ?? "").replace(/^-/, "")) || fragment.sort === "-" ? fragment.sort : "",
    filter: fragment.filter ?? "",
    theme: ["light", "dark"].includes(fragment.theme) ? fragment.theme : "",
  };
}

function restore() {
  Object.assign(state, readState());
  notify(Object.keys(state));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (state.theme ? state.theme === "dark" : dark.matches);

function showTheme(names) {
  if (!names.includes("theme")) return;
  if (state.theme) document.documentElement.dataset.theme = state.theme;
  else delete document.documentElement.dataset.theme;
  element("theme").textContent = isDark() ? "Light" : "Dark";
}

function startTheme() {
  const button = element("theme");
  button.hidden = false;
  button.addEventListener("click", () => change({ theme: isDark() ? "light" : "dark" }));
  watchers.push(showTheme);
  dark.addEventListener("change", () => notify(["theme"]));
}
