// Evaluations: scores over the run, and every held-out problem before and after.
import { ask, brief, crumbs, h, link, more, number, place, plural, rewardTone, signed, tag, whole } from "./dom.js";
import { episodePage, sideBySide } from "./episodes.js";
import { promptLine } from "./search.js";

const kindName = (kind) => `${kind.set ? kind.set.replaceAll("_", " ") : "held out"}, ${kind.mode}`;

function choiceOf(found, query) {
  const written = found.evaluations.filter((one) => one.written).map((one) => one.step);
  const known = (name, otherwise) => (query.has(name) ? Number(query.get(name)) : otherwise);
  const kind = found.kinds.find((one) => one.set === (query.get("set") ?? "") && one.mode === (query.get("mode") ?? "sampled")) ?? found.kinds[0];
  return { before: known("before", written[0]), after: known("after", written.at(-1)), set: kind?.set ?? "", mode: kind?.mode ?? "sampled" };
}

function scoreCell(one, key) {
  const found = one.intervals[key];
  return h("td", { class: "number" }, number(one.scores[key] ?? found?.mean, 3),
    found ? h("small", { class: "soft interval", title: `${found.method}, ${plural(found.tasks, "episode")}` }, `${number(found.low, 3)} to ${number(found.high, 3)}`) : null);
}

// The names of the intervals that the tables show.
function methods(found) {
  const own = found.evaluations.flatMap((one) => Object.values(one.intervals).map(({ method }) => method));
  const names = [...new Set([...own, ...found.results.map((one) => one.method)].filter(Boolean))];
  return names.length ? h("p", { class: "soft" }, `Below each score is its 95% interval over the held-out episodes: ${names.join(" or ")}. It covers the choice of the episodes, not a new training run.`) : null;
}

function scoresTable(found, choice) {
  const keys = Object.keys(found.names);
  const pick = (step, which, written) => h("td", { class: "number" }, written
    ? h("input", { type: "radio", name: which, "aria-label": `${which}: step ${step}`, checked: choice[which] === step, onchange: () => {
      location.hash = link(["evaluations"], { ...choice, [which]: step });
    } }) : "");
  return h("table", { class: "list fit" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"), keys.map((key) => h("th", { class: "number", scope: "col" }, found.names[key])), h("th", { class: "number", scope: "col" }, "before"), h("th", { class: "number", scope: "col" }, "after"))),
    h("tbody", {}, found.evaluations.map((one) => h("tr", {}, h("th", { scope: "row" }, whole(one.step)), keys.map((key) => scoreCell(one, key)), pick(one.step, "before", one.written), pick(one.step, "after", one.written)))));
}

const between = ([mean, low, high]) => (mean === null ? "" : [number(mean, 3), low === null ? null : h("small", { class: "soft interval" }, `${number(low, 3)} to ${number(high, 3)}`)]);

function resultsTable(results) {
  const ks = [...new Set(results.flatMap((one) => Object.keys(one.pass)))].sort((a, b) => a - b);
  const heads = ["results", "of", "agent", "set"].map((name) => h("th", { scope: "col" }, name));
  const numbers = ["temperature", "tasks", "samples", "failed", "reward", ...ks.map((k) => `pass@${k}`)];
  const row = (one) => [
    h("th", { scope: "row" }, one.directory, one.status === "completed" ? "" : ` (${one.status})`),
    ...[one.target, one.agent, one.set].map((text) => h("td", {}, text)),
    ...[one.temperature === null ? "" : brief(one.temperature), whole(one.tasks), whole(one.samples), whole(one.failed),
      between(one.reward), ...ks.map((k) => between(one.pass[k] ?? [null]))].map((text) => h("td", { class: "number" }, text)),
  ];
  return [
    h("h2", {}, "By tidegate eval"),
    h("div", { class: "card wide" }, h("table", { class: "list fit" },
      h("thead", {}, h("tr", {}, heads, numbers.map((name) => h("th", { class: "number", scope: "col" }, name)))),
      h("tbody", {}, results.map((one) => h("tr", {}, row(one)))))),
  ];
}

const verdict = (one) => (one === null ? h("span", { class: "soft" }, "not asked") : tag(one.reward === null ? one.outcome : brief(one.reward), rewardTone(one.reward)));

export async function evaluationsPage(main) {
  const found = await ask("evaluations");
  const title = h("div", { class: "heading" }, h("h1", {}, "Evaluations"));
  main.dataset.up = "#/";
  const results = found.results.length ? resultsTable(found.results) : [];
  if (!found.kinds.length) {
    main.replaceChildren(title, h("p", { class: "soft" }, "No evaluation has been written yet."), ...results);
    return;
  }
  const choice = choiceOf(found, place().query);
  const kinds = h("div", { class: "chips" }, found.kinds.map((kind) => {
    const on = kind.set === choice.set && kind.mode === choice.mode;
    return h("a", { class: `chip${on ? " on" : ""}`, "aria-current": on ? "true" : null, href: link(["evaluations"], { ...choice, ...kind }) }, kindName(kind));
  }));
  const body = h("tbody");
  const foot = h("div");
  const load = async (start) => {
    const page = await ask("compared", { ...choice, start, most: 200 });
    body.append(...page.tasks.map((row) => h("tr", {},
      h("th", { scope: "row" }, h("a", { href: link(["evaluations", "task", row.task], choice), "data-row": true }, row.task), promptLine(row.prompt)),
      h("td", {}, verdict(row.before)), h("td", {}, verdict(row.after)), h("td", { class: "number" }, signed(row.gain)))));
    const next = start + page.tasks.length;
    foot.replaceChildren(next < page.total ? more(`${plural(page.total - next, "more problem")}`, () => load(next)) : "");
    return page;
  };
  const page = await load(0);
  main.replaceChildren(
    title, methods(found) ?? "",
    h("div", { class: "card wide" }, scoresTable(found, choice)), ...results,
    h("h2", {}, `Problems: step ${choice.before} against step ${choice.after}`), kinds,
    h("p", { class: "soft" }, `${whole(page.better)} scored higher after, ${whole(page.same)} the same, ${whole(page.worse)} lower. Those that gained most come first.`),
    h("div", { class: "card wide" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, ["problem", `step ${choice.before}`, `step ${choice.after}`].map((one) => h("th", { scope: "col" }, one)), h("th", { class: "number", scope: "col" }, "gain"))), body)), foot);
}

export async function taskPage(main, task) {
  const found = await ask("evaluations");
  const choice = choiceOf(found, place().query);
  const { tasks } = await ask("compared", { ...choice, task });
  const up = link(["evaluations"], choice);
  const sides = [["before", choice.before], ["after", choice.after]].filter(([which]) => tasks[0]?.[which]);
  const entries = await Promise.all(sides.map(async ([which, step]) => {
    const address = { kind: "eval", step, line: tasks[0][which].line };
    return { one: await ask("episode", address), address, title: `Step ${step}`, href: link(["eval", step, "episode", address.line]) };
  }));
  main.dataset.up = up;
  const top = [crumbs([["Evaluations", up], [task, null]]), h("div", { class: "heading" }, h("h1", {}, task, h("small", {}, ` ${kindName(choice)}`)))];
  if (!entries.length) {
    main.replaceChildren(...top, h("p", { class: "soft" }, "Neither evaluation holds this problem."));
    return;
  }
  const { element, show } = sideBySide(entries);
  main.replaceChildren(...top, element);
  show();
}

export async function evalEpisodePage(main, step, line) {
  const trail = [["Evaluations", "#/evaluations"], [`Step ${step}`, null]];
  await episodePage(main, trail, { kind: "eval", step, line }, "#/evaluations", null);
}
