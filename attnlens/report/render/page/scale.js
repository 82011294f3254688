// The map's key: the meaning of each colour, how many heads have it, and the null.
"use strict";

const KEY = { widest: 560, wide: 560, high: 46, bar: 9, bins: 56, foot: 30 };

function categories(measure) {
  return Object.entries(measure.labels).map(([number, label]) => {
    const count = measure.values.filter((value) => value !== null && Math.round(value) === Number(number)).length;
    const swatch = draw(
      "svg",
      { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
      draw("rect", { width: 10, height: 10, fill: colourOf(measure, Number(number)) }),
    );
    return make("span", { class: "category" }, swatch, `${label} (${count})`);
  });
}

function histogram(measure) {
  KEY.wide = Math.min(KEY.widest, element("frame").clientWidth);
  const { low, high, cut } = measure.palette;
  const values = sortedValues(measure);
  const counts = new Array(KEY.bins).fill(0);
  const bin = (value) =>
    Math.max(0, Math.min(KEY.bins - 1, Math.floor(((value - low) / (high - low || 1)) * KEY.bins)));
  for (const value of values) counts[bin(value)] += 1;
  const most = Math.max(...counts),
    wide = KEY.wide / KEY.bins;
  const bars = counts.map((count, at) => {
    const tall = count ? Math.max(1.5, ((KEY.high - 12) * count) / most) : 0;
    return draw("rect", { x: at * wide, y: KEY.high - tall, width: wide - 0.6, height: tall, class: "count" });
  });
  const strip = Array.from({ length: KEY.bins }, (_, at) =>
    draw("rect", {
      x: at * wide,
      y: KEY.high + 2,
      width: wide + 0.5,
      height: KEY.bar,
      fill: colourOf(measure, low + ((at + 0.5) / KEY.bins) * (high - low)),
    }),
  );
  const median = quantile(values, 0.5);
  const range = `${short(values[0])} to ${short(values[values.length - 1])}, median ${short(median)}`;
  const label = `Distribution of ${measure.title} over ${values.length} heads: ${range}`;
  const x = (value) => ((value - low) / (high - low || 1)) * KEY.wide;
  const marks = [
    tick(x(low), (cut === "min" || cut === "both" ? "≤ " : "") + short(low), "start"),
    tick(x(high), (cut === "max" || cut === "both" ? "≥ " : "") + short(high), "end"),
  ];
  const between = (value) => value > low + 0.12 * (high - low) && value < high - 0.12 * (high - low);
  if (between(0) && low < 0) marks.push(tick(x(0), "0", "middle"));
  return draw(
    "svg",
    { viewBox: `0 0 ${KEY.wide} ${KEY.high + KEY.bar + KEY.foot}`, role: "img", "aria-label": label },
    ...bars,
    ...strip,
    ...marks,
    ...pointers(measure, x, median),
  );
}

function tick(x, text, anchor) {
  return draw("text", { x, y: KEY.high + KEY.bar + 14, "text-anchor": anchor }, text);
}

// Draw pointers at the median over heads and at the median of the null means.
function pointers(measure, x, median) {
  const marks = [pointer(x(median), `median ${short(median)}`, "median")];
  const mean = quantile(Float64Array.from(measure.null_means.filter((one) => one !== null)).sort(), 0.5);
  if (mean === null) return marks;
  const position = Math.max(0, Math.min(KEY.wide, x(mean)));
  const arrow = position === x(mean) ? "" : position ? " →" : "← ";
  const label = position ? `null ${short(mean)}${arrow}` : `${arrow}null ${short(mean)}`;
  return [...marks, pointer(position, label, "null")];
}

function pointer(x, text, kind) {
  const room = 7 * text.length,
    foot = KEY.high + KEY.bar + (kind === "null" ? 27 : 0);
  const anchor = x < room / 2 ? "start" : x > KEY.wide - room / 2 ? "end" : "middle";
  const bottom = kind === "null" ? KEY.high + KEY.bar + 4 : KEY.high;
  return draw(
    "g",
    { class: kind },
    draw("line", { x1: x, x2: x, y1: kind === "null" ? KEY.high : 10, y2: bottom }),
    draw("text", { x, y: kind === "null" ? foot : 7, "text-anchor": anchor }, text),
  );
}
