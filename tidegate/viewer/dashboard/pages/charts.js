// Charts with their legends; in the dashboard a click on one opens the step under the pointer.
import { embedded, h, link } from "./dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const RIGHT = 12;

export function shape(name, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function sample(tone, form) {
  const svg = shape("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
  if (form === "area") svg.append(shape("rect", { class: `area ${tone}`, x: 5, y: -1, width: 12, height: 12, rx: 2 }));
  else svg.append(shape("polyline", { class: `${form} ${tone}`, points: "0,5 22,5" }));
  if (form.includes("dots")) svg.append(shape("circle", { class: `dot ${tone}`, cx: 11, cy: 5, r: 4 }));
  return svg;
}

export function figure(chart) {
  const found = h(
    "figure",
    { class: "card", "data-chart": chart.data, "data-title": chart.title },
    h("figcaption", {}, h("h3", {}, chart.title), h("span", { class: "soft" }, chart.note)),
    chart.legend.length
      ? h("ul", { class: "legend" }, chart.legend.map(([name, tone, form]) => h("li", {}, sample(tone, form), name)))
      : null,
  );
  plot(found);
  found.addEventListener("click", () => {
    const step = Number(found.dataset.step);
    if (step >= 1 && !embedded) location.hash = link(["step", step]);
  });
  return found;
}

// Draws a box's drawing at the width that the box has, now and whenever that changes.
export function fitted(box, draw) {
  let width = 0;
  const fit = () => {
    const style = getComputedStyle(box);
    const now = Math.floor(box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
    if (!(now >= 80) || now === width) return; // NaN before the box is in the page
    width = now;
    const old = box.querySelector(":scope > svg");
    const svg = draw(width);
    const focused = old !== null && old === document.activeElement;
    if (old) old.replaceWith(svg);
    else box.append(svg);
    if (focused) svg.focus({ preventScroll: true });
  };
  fit();
  new ResizeObserver(fit).observe(box);
  return box;
}

// An element with a text that appears under the pointer.
export function titled(element, text) {
  element.append(shape("title", {}, text));
  return element;
}

// Below: a chart drawn at the width that it has; values under the pointer, or at the place that the arrow keys choose.

// Steps of 1, 2 or 5 times a power of ten.
function ticks(low, high, about) {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at <= Math.floor(high / step + 1e-9); at += 1) found.push(at * step);
  return found;
}

function label(value) {
  const size = Math.abs(value);
  const exact = (one) => String(Number(one.toPrecision(6)));
  let text = "0";
  if (size >= 1e6) text = `${exact(value / 1e6)}M`;
  else if (size >= 1000) text = Math.round(value).toLocaleString("en");
  else if (size >= 1e-3) text = String(Number(value.toPrecision(4)));
  else if (size >= 1e-12) text = value.toExponential(1).replace(".0e", "e");
  return text.replaceAll("-", "−");
}

function range(spec) {
  const all = spec.series.flatMap((one) => one.points);
  const xs = all.map(([x]) => x);
  const ys = all.map(([, y]) => y);
  const [least, most] = spec.y;
  let low = Math.min(...ys, least ?? Infinity);
  let high = Math.max(...ys, most ?? -Infinity);
  if (high - low < 1e-12) {
    const size = Math.max(Math.abs(low), Math.abs(high));
    const around = size > 1e-12 ? size / 2 : 0.5;
    [low, high] = [low - around, high + around];
  }
  const span = high - low;
  high += most === null || high > most ? 0.06 * span : 0.02 * span;
  low -= least === null || low < least ? 0.06 * span : 0;
  const left = Math.min(...xs);
  const right = Math.max(...xs);
  return { x: [left, right > left ? right : left + 1], y: [low, high] };
}

// Areas on top of each other, as [series, lower edge, upper edge].
function piled(series) {
  let floor = null;
  return series.map((one) => {
    const low = floor ?? one.points.map(([x]) => [x, 0]);
    floor = one.points.map(([x, y], index) => [x, low[index][1] + y]);
    return [one, low, floor];
  });
}

function layout(spec, width) {
  const height = width < 480 ? Math.min(spec.size[1], 230) : spec.size[1];
  const areas = spec.stacked ? piled(spec.series) : [];
  const { x, y } = range(spec.stacked ? { ...spec, series: [{ points: areas.at(-1)[2] }] } : spec);
  const yTicks = ticks(...y, height > 200 ? 5 : 3);
  const left = Math.max(spec.left ?? 34, 14 + 6.5 * Math.max(...yTicks.map((one) => label(one).length)));
  const box = { left, right: width - RIGHT, top: spec.axes[1] ? 24 : 10, bottom: height - (spec.axes[0] ? 40 : 26) };
  const across = (value) => box.left + ((value - x[0]) / (x[1] - x[0])) * (box.right - box.left);
  const up = (value) => box.bottom - ((value - y[0]) / (y[1] - y[0])) * (box.bottom - box.top);
  return { width, height, x, y, yTicks, box, areas, across, up };
}

function axes(spec, { x, width, height, yTicks, box, across, up }) {
  const parts = yTicks.flatMap((value) => [
    shape("line", { class: "grid", x1: box.left, x2: box.right, y1: up(value), y2: up(value) }),
    shape("text", { class: "tick end", x: box.left - 7, y: up(value), dy: 4 }, label(value)),
  ]);
  const steps = spec.axes[0].endsWith("step");
  const marks = ticks(...x, Math.max(3, Math.min(8, Math.floor(width / 90)))).filter((value) => !steps || Number.isInteger(value));
  parts.push(...marks.map((value) => shape("text", { class: "tick mid", x: across(value), y: box.bottom + 18 }, label(value))));
  if (spec.axes[1]) parts.push(shape("text", { class: "title", x: 0, y: 11 }, spec.axes[1]));
  if (spec.axes[0]) parts.push(shape("text", { class: "title end", x: box.right, y: height - 3 }, spec.axes[0]));
  return parts;
}

function curves(spec, { areas, across, up }) {
  const path = (points) => points.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
  if (spec.stacked) {
    return areas.map(([one, low, high]) => shape("polygon", { class: `area ${one.tone}`, points: path([...high, ...low.toReversed()]) }));
  }
  return spec.series.flatMap((one) => [
    shape("polyline", { class: `${one.form} ${one.tone}`, points: path(one.points) }),
    ...(one.form.includes("dots") || one.points.length === 1
      ? one.points.map(([x, y]) => shape("circle", { class: `dot ${one.tone}`, cx: across(x), cy: up(y), r: 4 }))
      : []),
  ]);
}

function drawn(figure, spec, width) {
  const frame = layout(spec, width);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${frame.height}`, width, height: frame.height, role: "img", tabindex: 0, "aria-label": `${spec.title}. Arrow keys show the values.` });
  const cursor = shape("line", { class: "cursor", y1: frame.box.top, y2: frame.box.bottom, x1: -9, x2: -9 });
  svg.append(...axes(spec, frame), ...curves(spec, frame), cursor);
  svg.addEventListener("pointermove", (event) => pointed(figure, spec, frame, svg, cursor, event));
  svg.addEventListener("pointerleave", () => unpointed(figure, cursor));
  svg.addEventListener("keydown", (event) => keyed(figure, spec, frame, svg, cursor, event));
  svg.addEventListener("blur", () => unpointed(figure, cursor));
  return svg;
}

const nearest = (points, at) => points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best), points[0]);

function unpointed(figure, cursor) {
  figure.querySelector(".tip").hidden = true;
  delete figure.dataset.step;
  delete figure.dataset.place;
  cursor.classList.remove("on");
}

function pointed(figure, spec, frame, svg, cursor, event) {
  const { x, box } = frame;
  const at = event.clientX - svg.getBoundingClientRect().left;
  if (at < box.left - 8 || at > box.right + 8) return unpointed(figure, cursor);
  const wanted = x[0] + ((at - box.left) / (box.right - box.left)) * (x[1] - x[0]);
  const [place] = nearest(spec.series.flatMap((one) => one.points), wanted);
  told(figure, spec, frame, svg, cursor, place);
}

const MOVES = { ArrowLeft: (at) => at - 1, ArrowRight: (at) => at + 1, Home: () => 0, End: () => Infinity };

// The arrow keys move from place to place, from the end that they lead away from; Enter is a click.
function keyed(figure, spec, frame, svg, cursor, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter") figure.click();
  if (event.key === "Escape") unpointed(figure, cursor);
  if (!MOVES[event.key]) return;
  event.preventDefault();
  const places = [...new Set(spec.series.flatMap((one) => one.points.map(([x]) => x)))].sort((one, other) => one - other);
  const now = figure.dataset.place === undefined ? (event.key === "ArrowLeft" ? places.length : -1) : places.indexOf(Number(figure.dataset.place));
  const to = Math.max(0, Math.min(places.length - 1, MOVES[event.key](now)));
  told(figure, spec, frame, svg, cursor, places[to]);
}

// Shows the values at a place of the x axis.
function told(figure, spec, { x, across }, svg, cursor, place) {
  const rect = svg.getBoundingClientRect();
  figure.dataset.place = place;
  const steps = spec.axes[0].endsWith("step");
  if (steps) figure.dataset.step = Math.round(place);
  const lines = [steps ? `step ${Math.round(place)}` : `${label(place)} ${spec.unit ?? spec.axes[0]}`];
  // Runs and evaluations have steps of their own: the nearest value within a hundredth of the width.
  const reach = spec.near ? (x[1] - x[0]) / 50 : 0;
  for (const one of spec.series) {
    const [there, value] = one.points.length ? nearest(one.points, place) : [Infinity];
    if (Math.abs(there - place) <= reach) lines.push(`${one.name}: ${value.toLocaleString("en", { maximumSignificantDigits: 4 })}`);
  }
  const tip = figure.querySelector(".tip");
  tip.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
  cursor.setAttribute("x1", across(place));
  cursor.setAttribute("x2", across(place));
  cursor.classList.add("on");
  tip.hidden = false;
  tip.style.top = `${rect.top - figure.getBoundingClientRect().top}px`;
  const left = rect.left - figure.getBoundingClientRect().left + across(place);
  tip.style.left = `${left + (across(place) > rect.width / 2 ? -tip.offsetWidth - 12 : 12)}px`;
}

// Draws the chart of a figure, now and whenever its width changes.
export function plot(figure) {
  const spec = JSON.parse(figure.dataset.chart);
  figure.append(Object.assign(document.createElement("div"), { className: "tip", hidden: true, role: "status" }));
  fitted(figure, (width) => drawn(figure, spec, width));
}
