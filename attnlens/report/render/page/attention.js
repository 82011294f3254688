// Two columns of a sequence's tokens, with lines from each query to its keys; one token is highlighted at a time.
"use strict";

const LINE = { high: 19, wide: 150, steps: 8, least: 0.06 };

function attentionPicture(rows) {
  if (!rows) return [];
  const count = Math.max(rows.queries.length, rows.keys.length),
    high = count * LINE.high;
  const note = make("p", { id: "attends", role: "status" }, "Left: queries; right: the keys that they attend to. Hover or focus a token.");
  const lines = draw("svg", {
    class: "lines",
    viewBox: `0 0 ${LINE.wide} ${high}`,
    width: LINE.wide,
    height: high,
    "aria-hidden": "true",
  });
  const view = { rows, note, lines, over: draw("g", { class: "over" }), columns: {} };
  lines.append(...faintLines(rows), view.over);
  for (const side of ["queries", "keys"]) view.columns[side] = column(view, side);
  const { queries, keys } = view.columns;
  const box = make(
    "div",
    { class: "attended", role: "group", "aria-label": "Queries and the keys they attend to: arrow keys move" },
    queries,
    lines,
    keys,
  );
  box.addEventListener("pointerleave", () => look(view, "", -1));
  return [make("h4", {}, "Attention on the first sequence"), note, box];
}

const middle = (place) => (place + 0.5) * LINE.high;
const curve = (query, key) =>
  `M0,${middle(query)}C${LINE.wide / 2},${middle(query)} ${LINE.wide / 2},${middle(key)} ${LINE.wide},${middle(key)}`;

// Draw all lines, with one path per level of weight.
function faintLines(rows) {
  const paths = Array.from({ length: LINE.steps }, () => []);
  rows.places.forEach((keys, query) =>
    keys.forEach((key, at) => {
      const step = Math.min(LINE.steps - 1, Math.floor((rows.weights[query][at] / 1000) * LINE.steps));
      paths[step].push(curve(query, key));
    }),
  );
  return paths.map((lines, step) =>
    draw("path", { d: lines.join(""), opacity: LINE.least + (0.6 * (step + 0.5)) / LINE.steps }),
  );
}

function column(view, side) {
  const list = make("ol", { class: side });
  list.append(
    ...view.rows[side].map((token, place) =>
      make("li", {}, make("button", { type: "button", tabindex: place ? -1 : 0, "data-place": place }, token)),
    ),
  );
  const placeOf = (event) => Number(event.target.dataset?.place ?? -1);
  list.addEventListener("pointerover", (event) => placeOf(event) >= 0 && look(view, side, placeOf(event)));
  list.addEventListener("focusin", (event) => look(view, side, placeOf(event)));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const other = step && list.children[placeOf(event) + step]?.firstChild;
    if (!other) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    other.tabIndex = 0;
    other.focus();
  });
  return list;
}

// Mark a query and the keys that it attends to, or a key and the queries that attend to it; place −1 clears all marks.
function look(view, side, place) {
  const { rows, note, over, lines, columns } = view;
  for (const token of lines.parentNode.querySelectorAll(".lit")) {
    token.classList.remove("lit");
    token.style.removeProperty("--weight");
  }
  lines.classList.toggle("looking", place >= 0);
  const pairs = place < 0 ? [] : side === "queries" ? outgoingPairs(rows, place) : incomingPairs(rows, place);
  over.replaceChildren(
    ...pairs.map(([query, key, weight]) =>
      draw("path", { d: curve(query, key), "stroke-width": 0.8 + 5 * weight, opacity: 0.35 + 0.65 * weight }),
    ),
  );
  if (place < 0) return;
  const light = (which, at, weight) => {
    const token = columns[which].children[at].firstChild;
    token.classList.add("lit");
    token.style.setProperty("--weight", `${Math.round(15 + 75 * weight)}%`);
  };
  light(side, place, 1);
  for (const [query, key, weight] of pairs)
    light(side === "queries" ? "keys" : "queries", side === "queries" ? key : query, weight);
  note.textContent = sentence(rows, side, place, pairs);
}

const outgoingPairs = (rows, query) =>
  rows.places[query].map((key, at) => [query, key, rows.weights[query][at] / 1000]);
const incomingPairs = (rows, key) =>
  rows.places.flatMap((keys, query) =>
    keys.includes(key) ? [[query, key, rows.weights[query][keys.indexOf(key)] / 1000]] : [],
  );

function sentence(rows, side, place, pairs) {
  const most = [...pairs].sort((one, other) => other[2] - one[2]).slice(0, 6);
  if (side === "queries") {
    const texts = most.map(([, key, weight]) => `“${rows.keys[key]}” ${weight.toFixed(2)}`);
    const others =
      pairs.reduce((sum, one) => sum + one[2], rows.rest[place] / 1000) - most.reduce((sum, one) => sum + one[2], 0);
    const list = texts.join(", ");
    return `Token ${place}, “${rows.queries[place]}”, attends to ${list}; to the rest ${others.toFixed(2)}.`;
  }
  const texts = most.map(([query, , weight]) => `“${rows.queries[query]}” (${query}) ${weight.toFixed(2)}`);
  if (!texts.length)
    return `No token attends to token ${place}, “${rows.keys[place]}”, with one of its largest weights.`;
  const more = pairs.length > most.length ? ` and ${pairs.length - most.length} more` : "";
  return `Token ${place}, “${rows.keys[place]}”, is attended to by ${texts.join(", ")}${more}.`;
}
