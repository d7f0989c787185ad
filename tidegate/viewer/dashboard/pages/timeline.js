// What the trainer, the engines, the agents and the groups did during some steps, and who waited for whom.
import { figure, fitted, shape, titled } from "./charts.js";
import { ask, brief, episodeLink, facts, h, link, neighbours, number, place, plural, whole } from "./dom.js";

const LEFT = 60;
const RIGHT = 12;
const LANE = 7;
const MOST_LANES = 150;
const SPANS = [1, 3, 10];

// A colour has one meaning on this page; style.css defines them.
const VERSIONS = 4;
const PHASES = { "wait for groups": "t-wait", "wait for teacher": "t-teacher", update: "t-update", "publish gate": "t-gate", publish: "t-publish", promotion: "t-promotion", evaluation: "t-evaluation", other: "t-other" };
const toneOf = (version) => (version === null ? "t-unknown" : `t-v${version % VERSIONS}`);
const toneOfCurve = (name) => (name === "tools" ? "t-tools" : name === "rewards" ? "t-rewards" : name === "between calls" ? "t-between" : toneOf(Number.isNaN(Number(name.slice(8))) ? null : Number(name.slice(8))));
const seconds = (value) => `${number(value, value < 10 ? 2 : 1)} s`;

function loadChart(found) {
  const series = found.load.map(({ name, points }) => ({ name, tone: toneOfCurve(name), form: "area", points }));
  if (!series.length) return null;
  const spec = { title: "Episodes", axes: [`seconds since step ${found.first} began`, "episodes"], unit: "s", y: [0, null], size: [960, 260], stacked: true, left: LEFT, series };
  return figure({ title: "Episodes in a call, by version of the engine's policy", note: "A call includes its wait in the gateway's queue. Between calls: the agent's own code.", legend: series.map((one) => [one.name, one.tone, "area"]), data: JSON.stringify(spec) });
}

function waitingChart(found) {
  if (!found.waiting.some(([, count]) => count)) return null;
  const spec = { title: "Groups", axes: [`seconds since step ${found.first} began`, "groups"], unit: "s", y: [0, null], size: [960, 180], stacked: false, left: LEFT,
    series: [{ name: "waiting groups", tone: "accent", form: "line", points: found.waiting }] };
  return figure({ title: "Finished groups that wait for the trainer", note: "Groups of the batches, from the end of their last episode to the update that trained on them.", legend: [], data: JSON.stringify(spec) });
}

// The first lane that is free when an episode begins.
function packed(episodes) {
  const free = [];
  return episodes.map((one) => {
    const start = Math.min(...one.calls.map(([from]) => from));
    const end = Math.max(...one.calls.map(([, to]) => to));
    let lane = free.findIndex((at) => at <= start);
    if (lane < 0) lane = free.push(0) - 1;
    free[lane] = end;
    return { one, lane, start, end };
  });
}

function lanes(found, rows, across, top) {
  return rows.filter(({ lane }) => lane < MOST_LANES).map(({ one, lane, start, end }) => {
    const y = top + lane * LANE;
    const bar = (from, to, height, attributes) => shape("rect", { x: across(from), width: Math.max(0.8, across(to) - across(from)), y: y + (LANE - height) / 2, height, ...attributes });
    const told = `${one.group || one.task}, ${one.reward === null ? one.outcome : `reward ${brief(one.reward)}`}, ${one.kind === "step" ? `batch of step ${one.step}` : one.kind === "eval" ? "evaluation" : one.kind}`;
    return titled(shape("a", { href: episodeLink(one), class: "lane", tabindex: -1 }, bar(start, end, 1.5, { class: "area t-between" }),
      ...one.calls.map(([from, to, version, name, part]) => titled(bar(from, to, 5, { class: `area ${part === "engine" ? toneOf(version) : toneOfCurve(part)}` }), `${name || `version ${version ?? "unknown"}`}, ${seconds(to - from)}; ${told}`))), told);
  });
}

const key = (tone, name, kind = "block") => h("li", {}, h("i", { class: `${kind} ${tone}` }), name);

// What the bars of the trainer, the marks, and the bars of the episodes mean.
function legends(found) {
  const phases = [...new Set(found.trainer.filter((one) => one.end > one.start).map((one) => one.name))];
  const calls = found.episodes.flatMap((one) => one.calls);
  const parts = ["tools", "rewards"].filter((part) => calls.some((call) => call[4] === part));
  const versions = new Map();
  for (const version of [...new Set(calls.filter((call) => call[4] === "engine").map((call) => call[2]))].sort((one, other) => (one ?? -1) - (other ?? -1))) {
    versions.set(toneOf(version), [...(versions.get(toneOf(version)) ?? []), version]);
  }
  const named = ([tone, of]) => key(tone, of[0] === null ? "unknown version" : `version ${of.join(", ")}`);
  return [
    h("ul", { class: "legend", "aria-label": "The trainer" }, phases.map((name) => key(PHASES[name], name)), found.publishes.length ? key("t-publish", "publish of a version", "mark") : null),
    h("ul", { class: "legend", "aria-label": "Episodes" }, [...versions].map(named), parts.map((part) => key(toneOfCurve(part), part)), found.episodes.length ? key("t-between", "between calls", "block thin") : null),
  ];
}

function gantt(found) {
  const rows = packed(found.episodes);
  const most = Math.min(MOST_LANES, 1 + Math.max(-1, ...rows.map(({ lane }) => lane)));
  const box = h("figure", { class: "card timeline" },
    h("figcaption", {}, h("h3", {}, "Trainer and episodes"), h("span", { class: "soft" }, "Upper bar: phases of each step. Dashed lines: publishes, with the version. Below, a line for each episode: calls of an engine in the colour of the policy's version, calls of tools, rewards, and between them a thread. A click opens the episode.")),
    ...legends(found));
  const draw = (width) => {
    const across = (value) => LEFT + (Math.max(0, Math.min(found.seconds, value)) / found.seconds) * (width - LEFT - RIGHT);
    const height = 64 + most * LANE;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Timeline of steps ${found.first} to ${found.step}` });
    svg.append(shape("text", { class: "tick", x: 0, y: 27 }, "trainer"), shape("text", { class: "tick", x: 0, y: 64 }, "episodes"));
    for (const one of found.trainer) svg.append(titled(shape("rect", { class: `area ${PHASES[one.name]}`, x: across(one.start), width: Math.max(0.5, across(one.end) - across(one.start)), y: 14, height: 20 }), `step ${one.step}: ${one.name}, ${seconds(one.end - one.start)}`));
    let written = -40;
    for (const one of found.publishes) {
      const x = across(one.at);
      svg.append(shape("line", { class: "publish", x1: x, x2: x, y1: 10, y2: height }));
      if (x - written > 26) {
        svg.append(shape("text", { class: "tick mid", x, y: 8 }, `v${one.version}`));
        written = x;
      }
    }
    svg.append(...lanes(found, rows, across, 52));
    return svg;
  };
  fitted(box, draw);
  const hidden = rows.filter(({ lane }) => lane >= MOST_LANES).length + found.omitted;
  return [box, hidden ? h("p", { class: "soft small" }, `${plural(hidden, "episode")} more ran in this time and are not drawn.`) : null];
}

function shares(found) {
  const sums = {};
  for (const one of found.trainer) sums[one.name] = (sums[one.name] ?? 0) + one.end - one.start;
  return facts([["time shown", seconds(found.seconds)], ["episodes", whole(found.episodes.length)],
    ...Object.entries(sums).filter(([, sum]) => sum >= 0.01).map(([name, sum]) => [name, `${seconds(sum)} (${whole((100 * sum) / found.seconds)}%)`])]);
}

export async function timelinePage(main) {
  const { query } = place();
  const span = SPANS.includes(Number(query.get("span"))) ? Number(query.get("span")) : 3;
  const step = /^\d{1,15}$/.test(query.get("step") ?? "") ? Number(query.get("step")) : null;
  const found = await ask("timeline", { step, span });
  const to = (other, wide = span) => (other === null ? null : link(["timeline"], { step: other, span: wide === 3 ? "" : wide }));
  main.replaceChildren(...[
    h("div", { class: "heading" }, h("h1", {}, found.first === found.step ? `Step ${found.step}` : `Steps ${found.first} to ${found.step}`),
      h("div", { class: "chips" }, SPANS.map((one) => h("a", { class: `chip${one === span ? " on" : ""}`, "aria-current": one === span ? "true" : null, href: to(found.step, one) }, plural(one, "step")))),
      neighbours(to(found.before), to(found.after), "part")),
    shares(found), ...gantt(found), loadChart(found), waitingChart(found),
  ].filter(Boolean));
  main.dataset.up = "#/steps";
}
