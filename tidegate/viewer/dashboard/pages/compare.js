// Several runs side by side: curves, final values, and the settings that differ.
import { curvesView } from "./curves.js";
import { ask, brief, h, plural, Refusal, whole } from "./dom.js";
import "./theme.js";

const main = document.getElementById("content");
const BUSY_MS = 2000;
const IDLE_MS = 10000;
const HELD_OUT = /^eval\/(reward|.*\/reward$)/;

const duration = (seconds) => {
  if (seconds === null) return "–";
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
};

const heads = (runs, first) => h("thead", {}, h("tr", {}, h("th", { scope: "col" }, first),
  runs.map((run, index) => h("th", { scope: "col" }, h("a", { href: `/run/${index}/` }, run.name)))));

const row = (name, values) => h("tr", {}, h("th", { scope: "row", class: "name" }, name), values.map((value) => h("td", {}, value)));

function finalsTable(runs, found) {
  return h("div", { class: "card wide" }, h("table", { class: "list fit", id: "finals" }, heads(runs, ""), h("tbody", {},
    row("status", runs.map((run) => run.status)),
    row("signs now", runs.map((run) => run.signs.join(", ") || "none")),
    row("steps", found.steps.map((step, index) => `${whole(step ?? 0)}${runs[index].planned ? ` of ${whole(runs[index].planned)}` : ""}`)),
    row("sampled tokens", found.tokens.map(whole)),
    row("training time", found.seconds.map(duration)),
    found.metrics.map((one) => row(one.key, one.values.map(brief))))));
}

function settingsTable(runs, rows, id) {
  return h("div", { class: "card wide" }, h("table", { class: "list fit", id }, heads(runs, "setting"),
    h("tbody", {}, rows.map((one) => h("tr", {}, h("th", { scope: "row", class: "mono" }, one.key),
      one.values.map((value) => h("td", { class: "mono" }, value ?? h("span", { class: "soft" }, "not set"))))))));
}

// Settings that only some runs have, of different versions for example, stand apart.
function differencesOf(runs, found) {
  const unset = found.rows.filter((one) => new Set(one.values.filter((value) => value !== null)).size < 2);
  const rows = found.rows.filter((one) => !unset.includes(one));
  return [
    rows.length ? settingsTable(runs, rows, "differences") : h("p", { class: "soft" }, "The settings that these runs have in common are equal."),
    unset.length ? h("details", { class: "card signs" }, h("summary", {}, plural(unset.length, "setting that some runs do not have", "settings that some runs do not have")), settingsTable(runs, unset, "unset")) : "",
  ];
}

async function page() {
  let state = await ask("state");
  document.title = `${plural(state.runs.length, "run")} · Tidegate`;
  const finals = h("div");
  const differences = h("div");
  const tables = async (choice) => {
    const { metrics } = await ask("metrics");
    const held = metrics.map((one) => one.key).filter((key) => HELD_OUT.test(key));
    const keys = [...new Set([...held, ...choice.keys])].slice(0, 60);
    const found = await ask("finals", { key: keys.length ? keys : ["reward/mean"] });
    finals.replaceChildren(finalsTable(state.runs, found),
      h("p", { class: "soft small" }, `Metrics: the mean of the last ${found.window} steps; of evaluations, the newest value.`));
  };
  const view = await curvesView({ names: state.runs.map((run) => run.name), changed: tables });
  await tables(view.choice);
  differences.replaceChildren(...differencesOf(state.runs, await ask("differences")));
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, plural(state.runs.length, "run"))),
    view.element,
    h("h2", {}, "Final values"), finals,
    h("h2", {}, "Settings that differ"), differences);
  main.removeAttribute("aria-busy");
  return async () => {
    const found = await ask("state", {}, { signal: AbortSignal.timeout(20000) });
    const changed = found.stamp !== state.stamp;
    state = found;
    status();
    if (changed) {
      await view.redraw();
      await tables(view.choice);
    }
    return found.runs.some((run) => run.status === "running");
  };

  function status() {
    const running = state.runs.filter((run) => run.status === "running").length;
    document.getElementById("status").replaceChildren(h("span", { class: `light ${running ? "running" : "ended"}` }, running ? `${running} running` : "none is running"));
  }
}

async function poll(refresh) {
  let busy = true;
  try {
    busy = await refresh();
  } catch (error) {
    document.getElementById("status").replaceChildren(h("span", { class: "light lost" }, "no answer"), " is tidegate view still running?");
    if (!(error instanceof Refusal) && error.name !== "TimeoutError") console.error(error);
  }
  setTimeout(poll, busy && !document.hidden ? BUSY_MS : IDLE_MS, refresh);
}

try {
  const refresh = await page();
  await poll(refresh);
} catch (error) {
  main.removeAttribute("aria-busy");
  main.replaceChildren(h("div", { class: "card banner bad", role: "alert" }, h("p", {}, error.message)));
  if (!(error instanceof Refusal)) console.error(error);
}
