// One head: the shares of its scores, its curves, its selection, and every measure with its error and null.
"use strict";

// True if any measure has percentiles among heads of other trained models.
const BESIDE = Boolean(data?.measures.some((measure) => measure.typical.length));

function startHead() {
  document.querySelectorAll(".compared").forEach((node) => (node.hidden = !BESIDE));
  for (const [name, step] of [
    ["previous", -1],
    ["next", 1],
  ]) {
    element(name).addEventListener("click", () => {
      const count = data.places.length;
      change({ head: keyOf((chosenHead() + step + count) % count) });
    });
  }
  watchers.push((names) => {
    if (names.includes("head")) showHead(chosenHead());
    else if (names.includes("measure")) markMeasure();
  });
}

// Return the head in the fragment, or else the head farthest from the median of the first measure.
function chosenHead() {
  return headOf.get(state.head) ?? FARTHEST;
}

const FARTHEST = data ? farthestHead(data.measures[0]) : -1;

function farthestHead(measure) {
  const median = quantile(sortedValues(measure), 0.5);
  let result = 0,
    most = -1;
  measure.values.forEach((value, head) => {
    const away = value === null ? -1 : Math.abs(value - median);
    if (away > most) [result, most] = [head, away];
  });
  return result;
}

function showHead(head) {
  const [row, column] = data.places[head];
  const key = data.key_heads[head] === data.columns[column] ? "" : ` · uses key head ${data.key_heads[head]}`;
  const name = nameOf(head);
  element("who").textContent = name[0].toUpperCase() + name.slice(1);
  element("site").textContent = data.sites[row] + key;
  element("anatomy").replaceChildren(...data.wholes.map((whole) => shareBar(whole, head)).filter(Boolean));
  element("curves").replaceChildren(
    ...data.curves.map((curve) => curvePicture(curve, head)),
    data.curves.length ? curveKey() : "",
  );
  element("selection").replaceChildren(...selectionParts(data.selections[keyOf(head)]));
  element("attention").replaceChildren(...attentionPicture(data.attention?.[keyOf(head)]));
  element("numbers").replaceChildren(...numberRows(head));
  markMeasure();
}

function shareBar(whole, head) {
  const parts = whole.parts.map(([name, label, colour]) => ({ measure: measureOf(name), label, colour }));
  const values = parts.map(({ measure }) => measure.values[head]);
  if (values.includes(null)) {
    const why = reasonOf(parts[values.indexOf(null)].measure, head);
    return make("p", { class: "quiet" }, `${whole.title}: no value, because ${why}.`);
  }
  const shares = parts.map(({ measure, label }) => `${label} ${valueText(measure, head)}`).join(", ");
  const description = `${whole.title} of ${nameOf(head)}: ${shares}`;
  const medians = parts.map(({ measure }) => quantile(sortedValues(measure), 0.5));
  const sum = medians.reduce((total, one) => total + one, 0) || 1;
  return make(
    "figure",
    {},
    make(
      "figcaption",
      {},
      make("strong", {}, whole.title),
      make("span", { class: "quiet" }, ` ${whole.group}; thin bar: median of all heads`),
    ),
    draw(
      "svg",
      { viewBox: "0 0 340 30", role: "img", "aria-label": description, class: "bar" },
      ...stackBars(parts, values, 0, 20),
      ...stackBars(
        parts,
        medians.map((one) => one / sum),
        23,
        5,
      ),
    ),
    make(
      "ul",
      { class: "key" },
      ...parts.map(({ measure, label, colour }) =>
        make("li", {}, swatch(colour), `${label} ${valueText(measure, head)}`),
      ),
    ),
  );
}

function stackBars(parts, values, top, tall) {
  let left = 0;
  return values.map((value, at) => {
    const bar = draw("rect", {
      x: left * 340,
      y: top,
      width: Math.max(0, value * 340),
      height: tall,
      fill: parts[at].colour,
    });
    left += value;
    return bar;
  });
}

const swatch = (colour) =>
  draw(
    "svg",
    { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
    draw("rect", { width: 10, height: 10, fill: colour }),
  );

function curveKey() {
  const line = (kind) =>
    draw(
      "svg",
      { class: "stroke", viewBox: "0 0 20 8", "aria-hidden": "true" },
      draw("path", { class: kind, d: kind === "band" ? "M0,1H20V7H0Z" : "M0,4H20" }),
    );
  const several = new Set(data.parts).size > 1 ? "its part of the model" : "the model";
  return make(
    "ul",
    { class: "key" },
    ...[
      ["own", "this head"],
      ["layer", "median of its layer"],
      ["model", `median of ${several}`],
      ["band", "quartiles"],
    ].map(([kind, text]) => make("li", {}, line(kind), text)),
  );
}

const MARKS = { query: "query", selected: "selected token", support: "support vector" };

function selectionParts(section) {
  if (!section) return [];
  const passages = section.passages.map(([fact, pieces]) =>
    make(
      "figure",
      { class: "passage" },
      make("figcaption", { class: "quiet" }, fact),
      make(
        "p",
        {},
        ...pieces.map(([text, kinds]) =>
          kinds.length
            ? make("mark", { class: kinds.join(" "), title: kinds.map((kind) => MARKS[kind] ?? kind).join(", ") }, text)
            : text,
        ),
      ),
    ),
  );
  return [
    make("h4", {}, "Selection"),
    ...section.notes.map((note) => make("p", { class: "quiet" }, note)),
    ...passages,
  ];
}

function numberRows(head) {
  const rows = [];
  for (const group of new Set(data.measures.map((measure) => measure.group))) {
    const columns = BESIDE ? 6 : 5;
    rows.push(make("tr", { class: "group" }, make("th", { colspan: columns, scope: "rowgroup" }, group || "measures")));
    for (const measure of data.measures.filter((one) => one.group === group)) rows.push(numberRow(measure, head));
  }
  return rows;
}

function numberRow(measure, head) {
  const choose = make("button", { type: "button", title: measure.meaning || false }, measure.title);
  choose.addEventListener("click", () => change({ measure: measure.name }));
  const text = valueText(measure, head),
    place = percentile(measure, head);
  const value =
    text === NO_VALUE
      ? make("td", { class: "why", colspan: BESIDE ? 5 : 4 }, reasonOf(measure, head))
      : make("td", {}, text);
  const more =
    text === NO_VALUE
      ? []
      : [
          make("td", {}, nullText(measure, head)),
          make("td", {}, zText(measure, head)),
          make("td", {}, place === null || Object.keys(measure.labels).length ? "" : String(Math.round(place))),
          BESIDE ? make("td", {}, String(measure.typical[head] ?? "")) : "",
        ];
  return make("tr", { "data-measure": measure.name }, make("th", { scope: "row" }, choose), value, ...more);
}

function markMeasure() {
  for (const row of element("numbers").children) row.classList.toggle("current", row.dataset.measure === state.measure);
}
