// Histograms by step: a column for each step, the darker the more of its episodes are in a bin.
import { fitted, shape, titled } from "./charts.js";
import { ask, brief, h, link, percent, place, plural, whole } from "./dom.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 24;
const BOTTOM = 40;
const WHICH = { all: "all episodes", trained: "trained on" };
const TICKS = 6;

const bins = (one) => (one.levels ? one.levels.length : one.edges.length - 1);
const nameOf = (one, bin) => (one.levels ? brief(one.levels[bin]) : `${brief(one.edges[bin])} to ${brief(one.edges[bin + 1])}`);
const sum = (counts) => counts.reduce((total, count) => total + count, 0);

// The position of a value, in bins from the first edge.
function placeOf(one, value) {
  if (one.levels) {
    const above = one.levels.findIndex((level) => level >= value);
    if (above <= 0) return above < 0 ? one.levels.length - 0.5 : 0.5;
    const [low, high] = [one.levels[above - 1], one.levels[above]];
    return above - 0.5 + (value - low) / (high - low);
  }
  return (value - one.edges[0]) / (one.edges[1] - one.edges[0]);
}

function marks(one) {
  const count = one.levels ? one.levels.length : one.edges.length;
  const every = Math.max(1, Math.ceil(count / TICKS));
  const at = [...Array(count).keys()].filter((index) => index % every === 0);
  return at.map((index) => (one.levels ? [index + 0.5, one.levels[index]] : [index, one.edges[index]]));
}

function heat(one, steps, width) {
  const height = 220;
  const inside = { width: width - LEFT - RIGHT, height: height - TOP - BOTTOM };
  const up = (bin) => TOP + inside.height * (1 - bin / bins(one));
  const wide = inside.width / steps.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${one.name} by step` });
  svg.append(shape("rect", { class: "ground", x: LEFT, y: TOP, ...inside }));
  one.counts.forEach((counts, column) => {
    const total = sum(counts);
    const most = Math.max(...counts);
    const said = total ? `step ${whole(steps[column])}: mean ${brief(one.mean[column])}, middle 80% from ${brief(one.low[column])} to ${brief(one.high[column])}, ${plural(total, "episode")}` : `step ${whole(steps[column])}: no episode`;
    counts.forEach((count, bin) => count && svg.append(titled(shape("rect", {
      class: "cell", x: LEFT + column * wide, width: wide + 0.3, y: up(bin + 1), height: up(bin) - up(bin + 1),
      "fill-opacity": (0.08 + 0.92 * (count / most)).toFixed(3), "data-step": steps[column],
    }), `${said}\n${nameOf(one, bin)}: ${plural(count, "episode")} (${percent(count / total)})`)));
  });
  const means = one.mean.map((value, column) => (value === null ? null : `${(LEFT + (column + 0.5) * wide).toFixed(1)},${up(placeOf(one, value)).toFixed(1)}`)).filter(Boolean);
  svg.append(shape("polyline", { class: "line ink", points: means.join(" ") }));
  for (const [at, value] of marks(one)) svg.append(shape("text", { class: "tick end", x: LEFT - 7, y: up(at), dy: 4 }, brief(value)));
  const every = Math.ceil(steps.length / Math.max(2, Math.floor(inside.width / 70)));
  steps.forEach((step, column) => column % every === 0 && svg.append(shape("text", { class: "tick mid", x: LEFT + (column + 0.5) * wide, y: height - BOTTOM + 18 }, whole(step))));
  svg.append(shape("text", { class: "title", x: 0, y: 11 }, one.unit), shape("text", { class: "title end", x: width - RIGHT, y: height - 3 }, "step"));
  return svg;
}

function bars(one, width) {
  const [counts] = one.counts;
  const height = 190;
  const inside = { width: width - LEFT - RIGHT, height: height - TOP - BOTTOM };
  const wide = inside.width / bins(one);
  const most = Math.max(1, ...counts);
  const total = sum(counts);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Histogram of ${one.name.toLowerCase()}` });
  for (const mark of [...new Set([0, Math.round(most / 2), most])]) {
    const y = TOP + inside.height * (1 - mark / most);
    svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), shape("text", { class: "tick end", x: LEFT - 7, y, dy: 4 }, whole(mark)));
  }
  counts.forEach((count, bin) => {
    const high = (inside.height * count) / most;
    svg.append(titled(shape("rect", { class: "cell", x: LEFT + bin * wide + 1, width: Math.max(1, Math.min(60, wide - 2)), y: TOP + inside.height - high, height: high }), `${nameOf(one, bin)}: ${plural(count, "episode")} (${percent(count / total)})`));
  });
  const shown = marks(one).filter((_, index, all) => index % Math.ceil(all.length / Math.max(2, Math.floor(inside.width / 55))) === 0);
  for (const [at, value] of shown) svg.append(shape("text", { class: "tick mid", x: LEFT + (one.levels ? Math.min(wide * at, wide * (at - 0.5) + 30) : wide * at), y: height - BOTTOM + 18 }, brief(value)));
  svg.append(shape("text", { class: "title", x: 0, y: 11 }, "episodes"), shape("text", { class: "title end", x: width - RIGHT, y: height - 3 }, one.unit));
  return svg;
}

function card(one, note, draw) {
  const box = h("figure", { class: "card distribution", "data-title": one.name }, h("figcaption", {}, h("h3", {}, one.name), h("span", { class: "soft" }, note)));
  if (!one.counts.some((counts) => sum(counts))) {
    box.append(h("p", { class: "soft" }, "No value."));
    return box;
  }
  return fitted(box, draw);
}

function cards(found) {
  return found.quantities.map((one) => {
    const box = card(one, one.note, (width) => heat(one, found.steps, width));
    box.addEventListener("click", ({ target }) => target.dataset.step && (location.hash = link(["step", target.dataset.step])));
    return box;
  });
}

// The histograms of one step, for its page.
export async function stepHistograms(step) {
  const found = await ask("distributions", { step });
  const note = (one) => (one.mean[0] === null || one.mean[0] === undefined ? "" : `Mean ${brief(one.mean[0])}, middle 80% from ${brief(one.low[0])} to ${brief(one.high[0])}.`);
  return h("div", { class: "charts four" }, found.quantities.map((one) => card(one, note(one), (width) => bars(one, width))));
}

export async function distributionsPage(main) {
  const { query } = place();
  const which = query.get("which") in WHICH ? query.get("which") : "all";
  const charts = h("div", { class: "charts" });
  const told = h("p", { class: "soft", role: "status" });
  const load = async () => {
    for (let left = 1; left; ) {
      const found = await ask("distributions", { which });
      left = found.unread;
      charts.replaceChildren(...(found.steps.length ? cards(found) : [h("p", { class: "soft" }, "No step has been written yet.")]));
      const some = found.steps.length < found.of ? `${whole(found.steps.length)} of ${plural(found.of, "step")}. ` : "";
      told.textContent = `${some}A column is a step: the stronger the colour, the more of its episodes have the value. The line is the mean. A click opens the step.`;
    }
  };
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Distributions"),
      h("div", { class: "chips" }, Object.entries(WHICH).map(([name, text]) => h("a", { class: `chip${name === which ? " on" : ""}`, "aria-current": name === which ? "true" : null, href: link(["distributions"], { which: name === "all" ? "" : name }) }, text)))),
    told, charts);
  main.dataset.up = "#/";
  await load();
  return async () => {
    if (!charts.querySelector("figure:hover, figure:focus-within")) await load();
    return false;
  };
}
