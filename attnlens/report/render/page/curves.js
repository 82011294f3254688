// The curve of one head, with the quartiles of its part of the model and the median of its layer.
"use strict";

const PLOT = { wide: 250, high: 150, left: 34, right: 8, top: 6, bottom: 29 };

// Compute the median over a layer's heads at each step that at least half of them reach.
function layerMedian(curve, row) {
  const lines = map.grid[row]
    .filter((head) => head >= 0)
    .map((head) => curve.lines[head])
    .filter((line) => line.length);
  const values = curve.steps.map((_, at) =>
    Float64Array.from(lines.filter((line) => line.length > at).map((line) => line[at])).sort(),
  );
  return values
    .filter((stepValues) => stepValues.length && stepValues.length * 2 >= lines.length)
    .map((stepValues) => quantile(stepValues, 0.5));
}

function curvePicture(curve, head) {
  const line = curve.lines[head];
  if (!line.length) return make("p", { class: "quiet" }, `${curve.title}: this head has no such curve.`);
  const row = data.places[head][0];
  const [lower, model, upper] = curve.quartiles[data.parts[row]],
    layer = layerMedian(curve, row);
  const { x, y, marks } = axes(curve, [...line, ...lower, ...model, ...upper, ...layer]);
  const path = (values) =>
    values.map((value, at) => `${at ? "L" : "M"}${x(curve.steps[at]).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const back = lower
    .map((value, at) => `L${x(curve.steps[at]).toFixed(1)},${y(value).toFixed(1)}`)
    .reverse()
    .join("");
  const ends = (values) => `from ${short(values[0] ?? null)} to ${short(values[values.length - 1] ?? null)}`;
  const median = `median of its layer ${ends(layer)}`;
  const label = `${curve.title} of ${nameOf(head)}, over ${curve.axis}: ${ends(line)}; ${median}`;
  const picture = draw(
    "svg",
    { viewBox: `0 0 ${PLOT.wide} ${PLOT.high}`, role: "img", "aria-label": label, class: "curve" },
    draw("path", { class: "band", d: `${path(upper)}${back}Z` }),
    ...marks,
    draw("path", { class: "model", d: path(model) }),
    draw("path", { class: "layer", d: path(layer) }),
    draw("path", { class: "own", d: path(line) }),
  );
  const note = curve.steps.length < curve.length ? `; ${curve.steps.length} of ${curve.length} steps are drawn` : "";
  return make(
    "figure",
    {},
    make(
      "figcaption",
      {},
      make("strong", {}, curve.title),
      make("span", { class: "quiet" }, ` ${curve.formula || curve.meaning}${note}`),
    ),
    picture,
  );
}

function axes(curve, values) {
  const log = curve.logarithmic;
  const shownValues = log ? values.filter((value) => value > 0) : values;
  let low = Math.min(...shownValues),
    high = Math.max(...shownValues);
  if (log) low = Math.max(low, 1e-6 * high);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const scale = (value) => (log ? Math.log(Math.max(value, low)) : value);
  const [first, last] = [curve.steps[0], curve.steps[curve.steps.length - 1]];
  const x = (step) => PLOT.left + ((step - first) / Math.max(1, last - first)) * (PLOT.wide - PLOT.left - PLOT.right);
  const y = (value) =>
    PLOT.top +
    (1 - (scale(value) - scale(low)) / (scale(high) - scale(low))) * (PLOT.high - PLOT.top - PLOT.bottom);
  const foot = PLOT.high - PLOT.bottom;
  const marks = [draw("line", { class: "axis", x1: PLOT.left, x2: PLOT.wide - PLOT.right, y1: foot, y2: foot })];
  for (const value of log ? decades(low, high) : steady(low, high)) {
    marks.push(
      draw("line", { class: "grid", x1: PLOT.left, x2: PLOT.wide - PLOT.right, y1: y(value), y2: y(value) }),
      draw("text", { x: PLOT.left - 5, y: y(value) + 3.5, "text-anchor": "end" }, short(value)),
    );
  }
  for (const step of [
    ...new Set([first, ...steady(first, last, 5).filter((one) => Number.isInteger(one) && one > first)]),
  ]) {
    marks.push(draw("text", { x: x(step), y: foot + 12, "text-anchor": "middle" }, String(step)));
  }
  marks.push(draw("text", { x: (PLOT.left + PLOT.wide) / 2, y: PLOT.high - 3, "text-anchor": "middle" }, curve.axis));
  return { x, y, marks };
}

// Return roughly `about` equally spaced round numbers from `low` to `high`.
function steady(low, high, about = 4) {
  const rough = (high - low) / about,
    size = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= rough) ?? size;
  const numbers = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-9); at += 1)
    numbers.push(Number((at * step).toPrecision(12)));
  return numbers;
}

function decades(low, high) {
  const powers = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.floor(Math.log10(high)); power += 1)
    powers.push(10 ** power);
  return powers.length > 1
    ? powers.filter((_, at) => at % Math.ceil(powers.length / 5) === 0)
    : [...new Set([...powers, low, high].map((value) => Number(value.toPrecision(2))))];
}
