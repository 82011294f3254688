// Start the page: the theme switch always, and the explorer if the report has heads.
"use strict";

function linkHeads() {
  for (const name of document.querySelectorAll("li > b")) {
    const match = /^layer ([a-z.]*\d+) head (\d+)$/.exec(name.textContent);
    const key = match ? `${match[1]}.${match[2]}` : "";
    if (!headOf.has(key)) continue;
    const link = make("button", { type: "button", class: "link" }, name.textContent);
    link.addEventListener("click", () => {
      change({ head: key });
      element("panel").scrollIntoView({ block: "nearest" });
    });
    name.replaceChildren(link);
  }
}

startTheme();
if (data) {
  element("explorer").hidden = false;
  startTable();
  startMap();
  startHead();
  linkHeads();
}
addEventListener("hashchange", restore);
restore();
document.documentElement.dataset.ready = "yes";
