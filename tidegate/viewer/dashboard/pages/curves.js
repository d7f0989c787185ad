// Curves of the metrics that are chosen, of one run or of several: what is chosen stands in the address.
import { ask, brief, h, place } from "./dom.js";
import { figure } from "./charts.js";

const FIRST = ["reward/mean", "eval/reward", "entropy", "length/mean", "repetition/mean", "reward/zero_variance_ratio"];
const AXES = { step: "steps", tokens: "tokens", hours: "hours" };
const WEIGHTS = { none: 1, light: 0.2, strong: 0.05 };
const FEW = 30;

// What the address says: metrics, axis, smoothing, and the runs that are hidden.
function chosen(known) {
  const { query } = place();
  const named = query.getAll("m").filter((key) => known.has(key));
  return {
    keys: query.has("m") ? named : FIRST.filter((key) => known.has(key)),
    x: query.get("x") in AXES ? query.get("x") : "step",
    smoothing: query.get("s") in WEIGHTS ? query.get("s") : "light",
    hidden: new Set(query.getAll("hide").map(Number)),
  };
}

function remember({ keys, x, smoothing, hidden }) {
  const words = new URLSearchParams(keys.length ? keys.map((key) => ["m", key]) : [["m", ""]]);
  if (x !== "step") words.set("x", x);
  if (smoothing !== "light") words.set("s", smoothing);
  for (const run of [...hidden].sort()) words.append("hide", run);
  history.replaceState(null, "", `#/${place().segments.map(encodeURIComponent).join("/")}?${words}`);
}

// The moving average of formatting.py: what is missing before the first value is not counted as 0.
function smoothed(points, weight) {
  let total = 0;
  let share = 0;
  return points.map(([x, value]) => {
    total = (1 - weight) * total + weight * value;
    share = (1 - weight) * share + weight;
    return [x, total / share];
  });
}

const tone = (run) => `r${run % 6}`;
const stroke = (run) => (run < 6 ? "line" : "dash");

function seriesOf(points, name, run, weight) {
  if (points.length <= FEW) return [{ name, tone: tone(run), form: points.length <= 24 ? "dots" : stroke(run), points }];
  if (weight === 1) return [{ name, tone: tone(run), form: stroke(run), points }];
  return [
    { name: `${name}, each step`, tone: tone(run), form: "faint", points },
    { name, tone: tone(run), form: stroke(run), points: smoothed(points, weight) },
  ];
}

function chartOf(curve, axis, names, choice) {
  const shown = curve.runs.map((points, run) => [points, run]).filter(([points, run]) => points.length && !choice.hidden.has(run));
  const series = shown.flatMap(([points, run]) => seriesOf(points, names?.[run] ?? curve.key, run, WEIGHTS[choice.smoothing]));
  if (!series.length) return h("figure", { class: "card", "data-title": curve.key }, h("figcaption", {}, h("h3", {}, curve.key)), h("p", { class: "soft" }, "No value yet."));
  const spec = { title: curve.key, axes: [axis, curve.unit], y: [null, null], size: [540, 240], stacked: false, near: Boolean(names), series };
  const legend = names ? shown.map(([, run]) => [names[run], tone(run), stroke(run)]) : [];
  return figure({ title: curve.key, note: "", legend, data: JSON.stringify(spec) });
}

const groupOf = (key) => (key.includes("/") ? key.slice(0, key.indexOf("/")) : "optimiser step");

// A list of the metrics, grouped by the part of the name before the slash, with a search.
function chooser(metrics, choice, change) {
  const groups = Map.groupBy(metrics, (one) => groupOf(one.key));
  const box = ({ key, last }) => h("label", { class: "metric", "data-key": key },
    h("input", { type: "checkbox", value: key, checked: choice.keys.includes(key), onchange: ({ target }) => {
      choice.keys = target.checked ? [...choice.keys, key] : choice.keys.filter((one) => one !== key);
      change();
    } }),
    h("span", {}, key), last.length === 1 ? h("small", { class: "soft" }, brief(last[0])) : null);
  const parts = [...groups].sort().map(([name, members]) => h("details", { "data-group": name, open: members.some((one) => choice.keys.includes(one.key)) },
    h("summary", {}, name, h("small", { class: "soft" }, ` ${members.length}`)), members.map(box)));
  const search = h("input", { type: "text", class: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const part of parts) {
      const labels = [...part.querySelectorAll("label")];
      for (const label of labels) label.hidden = !words.every((word) => label.dataset.key.toLowerCase().includes(word));
      part.hidden = labels.every((label) => label.hidden);
      if (words.length) part.open = true;
    }
  } });
  return h("aside", { class: "card chooser" }, search, h("button", { type: "button", onclick: () => {
    choice.keys = [];
    for (const input of parts.flatMap((part) => [...part.querySelectorAll("input")])) input.checked = false;
    change();
  } }, "Clear"), h("div", { class: "metrics" }, parts));
}

function switches(name, options, value, pick) {
  return h("fieldset", { class: "choice", "aria-label": name }, Object.keys(options).map((one) => h("label", {},
    h("input", { type: "radio", name, value: one, checked: one === value, onchange: () => pick(one) }), h("span", {}, AXES[one] ?? one))));
}

function runSwitches(names, choice, change) {
  return h("div", { class: "chips runs" }, names.map((name, run) => h("label", { class: "chip" },
    h("input", { type: "checkbox", checked: !choice.hidden.has(run), onchange: ({ target }) => {
      if (target.checked) choice.hidden.delete(run);
      else choice.hidden.add(run);
      change();
    } }), h("i", { class: `swatch ${tone(run)} ${stroke(run)}` }), name)));
}

// Returns the element, and how to draw it anew when the runs have gone on. `names`: of several runs.
export async function curvesView({ names = null, changed = () => {} } = {}) {
  const { metrics } = await ask("metrics");
  const choice = chosen(new Set(metrics.map((one) => one.key)));
  const charts = h("div", { class: "charts curves" });
  let turn = 0;
  const draw = async () => {
    const mine = ++turn;
    const found = choice.keys.length ? await ask("curves", { key: choice.keys, x: choice.x }) : { curves: [] };
    if (mine !== turn) return;
    charts.replaceChildren(...found.curves.map((curve) => chartOf(curve, found.axis, names, choice)));
    if (!choice.keys.length) charts.append(h("p", { class: "soft" }, metrics.length ? "Choose metrics to see their curves." : "No step has been written yet."));
  };
  const change = async () => {
    remember(choice);
    await draw();
    await changed(choice);
  };
  const pick = (what) => (value) => {
    choice[what] = value;
    return change();
  };
  await draw();
  const bar = h("div", { class: "palette" },
    h("span", { class: "soft" }, "over"), switches("x axis", AXES, choice.x, pick("x")),
    h("span", { class: "soft" }, "smoothing"), switches("smoothing", WEIGHTS, choice.smoothing, pick("smoothing")));
  const element = h("div", { class: "curves-view" }, chooser(metrics, choice, change),
    h("div", {}, names ? runSwitches(names, choice, change) : null, bar, charts));
  return { element, choice, redraw: async () => charts.querySelector("figure:hover, figure:focus-within") || draw() };
}
