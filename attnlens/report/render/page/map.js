// The map of layers × heads: a canvas, one button that arrow keys move from cell to cell, and the tooltip of a cell.
"use strict";

const CELL = { widest: 76, highest: 32, tallest: 660, numbers: 40 };
const map = { left: 34, top: 4, bottom: 18, width: 0, wide: 0, high: 0, at: 0, grid: [] };

function startMap() {
  map.canvas = element("map");
  map.cursor = element("cell");
  map.tip = element("tip");
  map.left = new Set(data.parts).size > 1 ? 48 : 34;
  map.grid = data.layers.map(() => new Array(data.columns.length).fill(-1));
  data.places.forEach(([row, column], head) => {
    map.grid[row][column] = head;
  });
  fillMenu();
  map.canvas.addEventListener("pointermove", (event) => hover(headUnder(event)));
  map.canvas.addEventListener("pointerleave", () => hover(-1));
  map.canvas.addEventListener("click", (event) => {
    const head = headUnder(event);
    if (head >= 0) change({ head: keyOf(head) });
  });
  map.cursor.addEventListener("focus", () => hover(map.at));
  map.cursor.addEventListener("blur", () => hover(-1));
  map.cursor.addEventListener("click", () => change({ head: keyOf(map.at) }));
  map.cursor.addEventListener("keydown", moveCursor);
  watchers.push((names) => {
    if (names.includes("head")) map.at = chosenHead();
    if (names.includes("measure")) sayMeasure();
    drawMap();
  });
  new ResizeObserver(() => {
    if (element("frame").clientWidth === map.width) return;
    sayMeasure();
    drawMap();
  }).observe(element("frame"));
}

function fillMenu() {
  const menu = element("measure");
  for (const group of new Set(data.measures.map((measure) => measure.group))) {
    const own = data.measures.filter((measure) => measure.group === group);
    menu.append(
      make(
        "optgroup",
        { label: group || "other" },
        ...own.map((measure) => make("option", { value: measure.name }, measure.title)),
      ),
    );
  }
  menu.addEventListener("change", () => change({ measure: menu.value }));
}

function sayMeasure() {
  const measure = measureOf(state.measure);
  element("measure").value = measure.name;
  const formula = measure.formula ? make("span", { class: "formula" }, measure.formula) : "";
  element("meaning").replaceChildren(
    measure.meaning,
    measure.meaning && formula ? ": " : "",
    formula,
    measure.caution ? ` ${measure.caution}` : "",
  );
  element("scale").replaceChildren(
    ...(Object.keys(measure.labels).length ? categories(measure) : [histogram(measure)]),
  );
}

function headUnder(event) {
  const box = map.canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - map.left) / map.wide);
  const row = Math.floor((event.clientY - box.top - map.top) / map.high);
  return map.grid[row]?.[column] ?? -1;
}

function corner(head) {
  const [row, column] = data.places[head];
  return [map.left + column * map.wide, map.top + row * map.high];
}

function hover(head) {
  const { tip } = map;
  if (head < 0 && document.activeElement === map.cursor) head = map.at;
  tip.hidden = head < 0;
  map.canvas.style.cursor = head < 0 ? "default" : "pointer";
  if (head < 0) return;
  tip.replaceChildren(
    ...describeValue(measureOf(state.measure), head)
      .split(" · ")
      .map((line, first) => make(first ? "span" : "strong", {}, line)),
  );
  const [x, y] = corner(head);
  const most = element("frame").clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(most, x + map.wide / 2 - tip.offsetWidth / 2))}px`;
  const above = y - tip.offsetHeight - 6;
  tip.style.top = `${above > -24 ? above : y + map.high + 6}px`;
}

function moveCursor(event) {
  const steps = {
    ArrowLeft: [0, -1],
    ArrowRight: [0, 1],
    ArrowUp: [-1, 0],
    ArrowDown: [1, 0],
    Home: [0, -Infinity],
    End: [0, Infinity],
    PageUp: [-Infinity, 0],
    PageDown: [Infinity, 0],
  };
  const step = steps[event.key];
  if (!step) return;
  event.preventDefault();
  const [row, column] = data.places[map.at];
  const target = Number.isFinite(step[0] + step[1]) ? next(row, column, step) : farthest(row, column, step);
  if (target >= 0) map.at = target;
  placeCursor();
  hover(map.at);
}

function next(row, column, [down, right]) {
  for (let r = row + down, c = column + right; map.grid[r]?.[c] !== undefined; r += down, c += right)
    if (map.grid[r][c] >= 0) return map.grid[r][c];
  return -1;
}

function farthest(row, column, [down, right]) {
  const line = down ? map.grid.map((cells) => cells[column]) : map.grid[row];
  const heads = line.filter((head) => head >= 0);
  return down + right > 0 ? heads[heads.length - 1] : heads[0];
}

function placeCursor() {
  const { cursor } = map;
  const [x, y] = corner(map.at);
  Object.assign(cursor.style, { left: `${x}px`, top: `${y}px`, width: `${map.wide}px`, height: `${map.high}px` });
  cursor.setAttribute("aria-label", describeValue(measureOf(state.measure), map.at));
}

function drawMap() {
  const [rows, columns] = [data.layers.length, data.columns.length];
  const width = element("frame").clientWidth;
  if (!width) return;
  map.width = width;
  map.wide = Math.min(CELL.widest, (width - map.left - 4) / columns);
  map.high = Math.max(3, Math.min(CELL.highest, Math.max(map.wide, 12), CELL.tallest / rows));
  const height = map.top + rows * map.high + map.bottom;
  const ratio = devicePixelRatio || 1;
  Object.assign(map.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(map.canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = map.canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const ink = getComputedStyle(element("frame")).color;
  drawCells(pen, measureOf(state.measure), ink);
  drawNames(pen, ink);
  placeCursor();
}

function drawCells(pen, measure, ink) {
  const gap = map.wide > 14 && map.high > 10 ? 1 : 0;
  const numbers = map.wide >= CELL.numbers && map.high >= 18 && !Object.keys(measure.labels).length;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  data.places.forEach((_, head) => {
    const [x, y] = corner(head);
    const value = measure.values[head];
    pen.globalAlpha = shownHeads.has(head) ? 1 : 0.18;
    if (value === null) hatch(pen, x, y, gap, ink);
    else {
      const colour = colourOf(measure, value);
      pen.fillStyle = colour;
      pen.fillRect(x, y, map.wide - gap, map.high - gap);
      if (numbers) {
        pen.fillStyle = inkOn(colour);
        pen.fillText(formatNumber(value, Math.min(measure.decimals, 3)), x + map.wide / 2, y + map.high / 2 + 0.5);
      }
      if (measure.signs[head]) markHead(pen, x, y, measure.signs[head], numbers);
    }
  });
  pen.globalAlpha = 1;
  const [x, y] = corner(chosenHead());
  for (const [colour, line] of [
    ["#fff", 4],
    ["#000", 2],
  ]) {
    Object.assign(pen, { strokeStyle: colour, lineWidth: line });
    pen.strokeRect(x - gap / 2, y - gap / 2, map.wide, map.high);
  }
}

// Draw a dot in a head's cell: black above chance, white below; in the lower corner if the cell has a number.
function markHead(pen, x, y, sign, numbers) {
  const size = Math.min(numbers ? 2.2 : 3, map.wide / 5, map.high / 5);
  const away = (length) => (numbers ? length - size - 2.5 : length / 2);
  pen.beginPath();
  pen.arc(x + away(map.wide), y + away(map.high), size, 0, 2 * Math.PI);
  Object.assign(pen, { fillStyle: sign > 0 ? "#000" : "#fff", strokeStyle: sign > 0 ? "#fff" : "#000", lineWidth: 0.8 });
  pen.fill();
  pen.stroke();
}

function hatch(pen, x, y, gap, ink) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, map.wide - gap, map.high - gap);
  pen.clip();
  Object.assign(pen, { strokeStyle: ink, lineWidth: 0.8 });
  pen.globalAlpha *= 0.35;
  pen.beginPath();
  for (let start = x - map.high; start < x + map.wide; start += 5) {
    pen.moveTo(start, y + map.high);
    pen.lineTo(start + map.high, y);
  }
  pen.stroke();
  pen.restore();
}

function ticks(count, room) {
  const step = [1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100, 200, 500].find((one) => count <= one * room) ?? count;
  return Array.from({ length: Math.ceil(count / step) }, (_, at) => at * step);
}

function drawNames(pen, ink) {
  const [rows, columns] = [data.layers.length, data.columns.length];
  Object.assign(pen, { fillStyle: ink, globalAlpha: 0.75, textAlign: "right" });
  for (const row of ticks(rows, Math.max(2, (rows * map.high) / 14)))
    pen.fillText(data.layers[row], map.left - 6, map.top + (row + 0.5) * map.high);
  pen.textAlign = "center";
  const foot = map.top + rows * map.high + 10;
  for (const column of ticks(columns, Math.max(2, (columns * map.wide) / 22)))
    pen.fillText(data.columns[column], map.left + (column + 0.5) * map.wide, foot);
  drawParts(pen, ink);
  pen.globalAlpha = 1;
}

function drawParts(pen, ink) {
  const groups = [...new Set(data.parts)].map((part) => [
    part,
    data.parts.indexOf(part),
    data.parts.lastIndexOf(part) + 1,
  ]);
  if (groups.length < 2) return;
  for (const [part, first, end] of groups) {
    pen.save();
    pen.translate(9, map.top + ((first + end) / 2) * map.high);
    pen.rotate(-Math.PI / 2);
    pen.fillText(part, 0, 0, (end - first) * map.high);
    pen.restore();
    if (first)
      (Object.assign(pen, { fillStyle: ink }),
        pen.fillRect(map.left - 20, map.top + first * map.high - 1, data.columns.length * map.wide + 20, 1.5));
  }
}
