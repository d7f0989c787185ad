// The report's charts; a click on one opens the step under the pointer.
import { h, link } from "./dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";

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
  globalThis.plot(found);
  found.addEventListener("click", () => {
    const step = Number(found.dataset.step);
    if (step >= 1) location.hash = link(["step", step]);
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
    if (old) old.replaceWith(svg);
    else box.append(svg);
  };
  new ResizeObserver(fit).observe(box);
  return box;
}

// An element with a text that appears under the pointer.
export function titled(element, text) {
  element.append(shape("title", {}, text));
  return element;
}
