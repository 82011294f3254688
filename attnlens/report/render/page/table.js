// The table of all heads: sorted by a column, filtered by words and comparisons; only rows in view are drawn.
"use strict";

const ROW = 26,
  AROUND = 8;
const table = { order: [], columns: [], first: -1, last: -1 };
let shownHeads = new Set(data ? data.places.keys() : []);

function startTable() {
  const groups = [...new Set(data.measures.map((measure) => measure.group))];
  table.columns = groups.flatMap((group) => data.measures.filter((measure) => measure.group === group));
  element("groups").append(
    make("td", {}),
    ...groups.map((group) =>
      make(
        "th",
        { scope: "colgroup", colspan: table.columns.filter((measure) => measure.group === group).length },
        group,
      ),
    ),
  );
  element("columns").append(...[null, ...table.columns].map(columnHead));
  element("filter").addEventListener("input", (event) => change({ filter: event.target.value }));
  element("rows").addEventListener("scroll", () => requestAnimationFrame(() => drawRows()), { passive: true });
  element("body").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-head]");
    if (row) change({ head: keyOf(Number(row.dataset.head)) });
  });
  new ResizeObserver(() => drawRows()).observe(element("rows"));
  watchers.push((names) => {
    if (names.includes("filter") || names.includes("sort")) arrange();
    if (names.some((name) => ["filter", "sort", "head", "measure"].includes(name))) drawRows(true);
  });
}

function columnHead(measure) {
  const name = measure ? measure.name : "";
  const button = make(
    "button",
    { type: "button", title: measure ? measure.meaning || false : false },
    measure ? measure.title : "layer · head",
  );
  button.addEventListener("click", () => {
    const [descendingSort, ascendingSort] = [`-${name}`, name];
    const nextSort = state.sort === descendingSort ? ascendingSort : descendingSort;
    change({ sort: name === "" ? (state.sort === "-" ? "" : "-") : nextSort });
  });
  return make("th", { scope: "col", "data-sort": name }, button);
}

// Find the heads for which all terms of the filter hold, and sort them.
function arrange() {
  if (element("filter").value !== state.filter) element("filter").value = state.filter;
  const { tests, problem } = terms(state.filter);
  table.order = data.places.map((_, head) => head).filter((head) => tests.every((test) => test(head)));
  shownHeads = new Set(table.order);
  element("counted").textContent = problem || `${table.order.length} of ${data.places.length} heads`;
  element("counted").classList.toggle("problem", Boolean(problem));
  sortRows();
  element("rows").scrollTop = 0;
}

function sortRows() {
  const isDescending = state.sort.startsWith("-"),
    measure = measureOf(state.sort.replace(/^-/, ""));
  if (measure) {
    const placeholder = isDescending ? -Infinity : Infinity;
    const value = (head) => measure.values[head] ?? placeholder;
    table.order.sort((one, other) =>
      value(one) === value(other) ? one - other : value(one) < value(other) === isDescending ? 1 : -1,
    );
  } else if (isDescending) table.order.reverse();
  for (const head of element("columns").children) {
    const own = head.dataset.sort === state.sort.replace(/^-/, "");
    head.setAttribute("aria-sort", own ? (isDescending ? "descending" : "ascending") : "none");
  }
}

// Parse a filter: `3.7`, `layer 3`, a word, `entropy < 0.3`, `z of symmetry > 5`; a comma means "and".
function terms(text) {
  const tests = [];
  let problem = "";
  for (const term of text
    .split(",")
    .map((one) => one.trim().toLowerCase())
    .filter(Boolean)) {
    const match = /^(z of )?(.+?)\s*(<=|>=|<|>|=)\s*(-?[\d.]+(?:e[+-]?\d+)?)$/.exec(term.replaceAll("−", "-"));
    const test = match ? comparison(match) : wordTest(term);
    if (test) tests.push(test);
    else problem = `No measure is called “${match[2]}”`;
  }
  return { tests, problem };
}

const OPERATORS = {
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};

function comparison([, ofZ, words, sign, number]) {
  const holds = (value) => value !== null && value !== undefined && OPERATORS[sign](value, Number(number));
  if (words === "layer") return (head) => holds(data.layers[data.places[head][0]]);
  if (words === "head") return (head) => holds(data.columns[data.places[head][1]]);
  const plain = (text) => text.toLowerCase().replaceAll("_", " ");
  const phrase = plain(words);
  const measure =
    data.measures.find((one) => [plain(one.name), plain(one.title)].includes(phrase)) ??
    data.measures.find((one) => plain(one.name).includes(phrase));
  if (!measure) return null;
  return ofZ ? (head) => holds(zOf(measure, head)) : (head) => holds(measure.values[head]);
}

function wordTest(term) {
  const place = /^([a-z]+\.)?(\d+)\s*[.·]\s*(\d+)$/.exec(term);
  if (place?.[1]) return (head) => keyOf(head) === `${place[1]}${place[2]}.${place[3]}`;
  if (place) {
    const [layer, column] = [Number(place[2]), Number(place[3])];
    const here = (head) => [data.layers[data.places[head][0]], data.columns[data.places[head][1]]];
    return (head) => here(head)[0] === layer && here(head)[1] === column;
  }
  const axisMatch = /^(layer|head) (\d+)$/.exec(term);
  if (axisMatch) return comparison([null, "", axisMatch[1], "=", axisMatch[2]]);
  const labelledMeasures = data.measures.filter((measure) => Object.keys(measure.labels).length);
  const words = (head) => [
    nameOf(head),
    data.sites[data.places[head][0]],
    ...labelledMeasures.map((measure) => valueText(measure, head)),
  ];
  return (head) => words(head).join(" ").toLowerCase().includes(term);
}

// Draw the rows in view and a few around them; spacers replace all other rows.
function drawRows(again = false) {
  const box = element("rows"),
    count = table.order.length;
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - AROUND);
  const last = Math.min(count, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + AROUND);
  if (!again && first === table.first && last === table.last) return;
  Object.assign(table, { first, last });
  const focusedHead = document.activeElement?.closest?.("#body tr")?.dataset.head;
  element("body").replaceChildren(
    spacer(first),
    ...table.order.slice(first, last).map((head, at) => headRow(head, first + at)),
    spacer(count - last),
  );
  element("all").setAttribute("aria-rowcount", count + 2);
  if (focusedHead !== undefined)
    element("body").querySelector(`tr[data-head="${focusedHead}"] button`)?.focus({ preventScroll: true });
}

function spacer(rows) {
  const row = make("tr", { class: "spacer", "aria-hidden": "true" });
  row.style.height = `${rows * ROW}px`;
  return row;
}

function headRow(head, at) {
  const [row, column] = data.places[head];
  const part = new Set(data.parts).size > 1 ? `${data.parts[row]} ` : "";
  const name = make(
    "th",
    { scope: "row" },
    make("button", { type: "button" }, `${part}${data.layers[row]} · ${data.columns[column]}`),
  );
  const cells = table.columns.map((measure) =>
    make(
      "td",
      { class: measure.name === state.measure ? "current" : false, title: reasonOf(measure, head) || false },
      valueText(measure, head),
    ),
  );
  const isChosen = chosenHead() === head;
  return make(
    "tr",
    {
      "data-head": head,
      "aria-rowindex": at + 3,
      class: isChosen ? "chosen" : false,
      "aria-current": isChosen ? "true" : false,
    },
    name,
    ...cells,
  );
}
