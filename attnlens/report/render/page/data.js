// The report's data, and functions that format numbers and make elements; text is always inserted as text.
"use strict";

const element = (id) => document.getElementById(id);
const data = element("data") ? JSON.parse(element("data").textContent) : null;
const NO_VALUE = "–";

function make(tag, traits = {}, ...children) {
  return fillElement(document.createElement(tag), traits, children);
}

function draw(tag, traits = {}, ...children) {
  return fillElement(document.createElementNS("http://www.w3.org/2000/svg", tag), traits, children);
}

function fillElement(node, traits, children) {
  for (const [name, value] of Object.entries(traits))
    if (value !== null && value !== false) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

function formatNumber(number, decimals) {
  if (number === null || number === undefined) return NO_VALUE;
  if (decimals < 0)
    return number
      .toExponential(1)
      .replace(/e([+-])(\d)$/, "e$10$2")
      .replaceAll("-", "−");
  const text = number.toFixed(decimals);
  return (/^-0\.?0*$/.test(text) ? text.slice(1) : text).replace("-", "−");
}

// Format an error with these decimals, or as `<0.0005` if a positive error would be shown as 0.
function spread(number, decimals) {
  const text = formatNumber(number, decimals);
  return number > 0 && /^0\.?0*$/.test(text) ? `<${(0.5 * 10 ** -decimals).toFixed(decimals + 1)}` : text;
}

function short(number) {
  if (number === null) return NO_VALUE;
  const size = Math.abs(number);
  return (
    size !== 0 && (size < 1e-3 || size >= 1e5) ? number.toExponential(1) : String(Number(number.toPrecision(3)))
  ).replace("-", "−");
}

const measureOf = (name) => (data ? data.measures.find((measure) => measure.name === name) : undefined);

function valueText(measure, head) {
  const value = measure.values[head];
  if (value === null) return NO_VALUE;
  const label = measure.labels[Math.round(value)];
  if (label !== undefined) return label;
  const error = measure.errors[head] ?? null;
  return formatNumber(value, measure.decimals) + (error === null ? "" : ` ± ${spread(error, measure.decimals)}`);
}

const reasonOf = (measure, head) =>
  measure.why.length && measure.why[head] >= 0 ? measure.reasons[measure.why[head]] : "";

function nullText(measure, head) {
  const mean = measure.null_means[head] ?? null;
  if (mean === null) return "";
  const sd = measure.null_sds[head] ?? 0;
  const decimals = sd > 0 ? 1 - Math.floor(Math.log10(sd)) : 9;
  return decimals >= 0 && decimals < 6
    ? `${formatNumber(mean, decimals)} ± ${formatNumber(sd, decimals)}`
    : `${short(mean)} ± ${short(sd)}`;
}

function zOf(measure, head) {
  const [value, mean, sd] = [measure.values[head], measure.null_means[head] ?? null, measure.null_sds[head] ?? 0];
  return value === null || mean === null || !sd ? null : (value - mean) / sd;
}

function zText(measure, head) {
  const z = zOf(measure, head);
  return z === null ? "" : formatNumber(z, Math.abs(z) < 10 ? 1 : 0);
}

function nameOf(head, part = true) {
  const [row, column] = data.places[head];
  const which = part && new Set(data.parts).size > 1 ? `${data.parts[row]} ` : "";
  return `${which}layer ${data.layers[row]} head ${data.columns[column]}`;
}

const keyOf = (head) => `${data.names[data.places[head][0]]}.${data.columns[data.places[head][1]]}`;
const headOf = new Map(data ? data.places.map((_, head) => [keyOf(head), head]) : []);

// Describe a head's value in one line (value or reason, null, z), for hover, focus and screen readers.
function describeValue(measure, head) {
  const value = valueText(measure, head);
  const parts = [`${nameOf(head)}: ${measure.title} ${value === NO_VALUE ? "has no value" : value}`];
  if (value === NO_VALUE) parts.push(reasonOf(measure, head));
  const chance = nullText(measure, head);
  if (chance) parts.push(`null ${chance}`, `z ${zText(measure, head) || NO_VALUE}`);
  return parts.filter(Boolean).join(" · ");
}

const valueCache = new Map();
function sortedValues(measure) {
  if (!valueCache.has(measure))
    valueCache.set(measure, Float64Array.from(measure.values.filter((value) => value !== null)).sort());
  return valueCache.get(measure);
}

// Compute a quantile of values in ascending order.
function quantile(values, share) {
  if (!values.length) return null;
  const place = share * (values.length - 1);
  const low = Math.floor(place);
  return values[low] + (place - low) * ((values[low + 1] ?? values[low]) - values[low]);
}

// Compute the percentile of a head's value: 100 · (values below it + half of those equal to it) / values.
function percentile(measure, head) {
  const value = measure.values[head];
  if (value === null) return null;
  const values = sortedValues(measure);
  if (values.length < 2 || values[0] === values[values.length - 1]) return null;
  let below = 0,
    same = 0;
  for (const other of values)
    if (other < value) below += 1;
    else if (other === value) same += 1;
  return (100 * (below + same / 2)) / values.length;
}

function colourOf(measure, value) {
  const { colours, low, high } = measure.palette;
  if (Object.keys(measure.labels).length) return colours[Math.round(value)] ?? colours[0];
  const share = high > low ? (value - low) / (high - low) : 0.5;
  return colours[Math.max(0, Math.min(colours.length - 1, Math.floor(share * colours.length)))];
}

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 ? "#111" : "#fff";
}
