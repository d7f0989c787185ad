// The run at a glance; what failed; its settings.
import { figure } from "./charts.js";
import { ask, bar, embedded, h, link, more, number, plural, rewardTone, stateTag, tag, whole } from "./dom.js";
import { episodePage, labelled, message } from "./episodes.js";
import { promptLine } from "./search.js";

const right = (text) => h("td", { class: "number" }, text);

function verdict(scores) {
  if (!scores.length) return "";
  const [first] = scores;
  return h("div", { class: "verdict" },
    first.before === null ? null : [h("span", { class: "big from" }, number(first.before)), h("span", { class: "big from" }, "→")],
    h("span", { class: "big to" }, number(first.after)),
    h("span", { class: "soft" }, `mean reward, ${first.name}${first.over ? `, ${first.over}` : ""}`));
}

function counted(title, pairs, label = (one) => one) {
  if (!pairs.length) return null;
  const total = pairs.reduce((sum, [, count]) => sum + count, 0);
  return [h("h3", {}, title), h("table", {}, pairs.map(([name, count]) => h("tr", {}, h("td", {}, label(name)), right(whole(count)), h("td", {}, bar(count / total)))))];
}

function booksOf(books) {
  if (!books) return [];
  const issued = Math.max(1, books.issued[0]);
  return [
    h("h2", {}, "The ledger"),
    h("p", { class: "soft" }, "Every group and every slot attempt is entered once and ends once. ", h("code", {}, "stepped"), " was trained on and awaits the next checkpoint."),
    h("div", { class: "columns" },
      h("div", { class: "card wide" }, h("h3", {}, "Where everything ended"), h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "state"), h("th", { class: "number", scope: "col" }, "groups"), h("th", {}), h("th", { class: "number", scope: "col" }, "attempts"))),
        h("tbody", {}, books.states.map(([state, groups, attempts]) => h("tr", {}, h("th", { scope: "row" }, stateTag(state)), right(whole(groups)), h("td", {}, bar(groups / issued)), right(whole(attempts))))),
        h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "issued"), right(whole(books.issued[0])), h("td", {}), right(whole(books.issued[1])))))),
      h("div", { class: "card wide" },
        counted("Staleness of what was trained on, in versions", books.staleness),
        counted("Outcomes of attempts", books.outcomes),
        counted("Why attempts failed", books.reasons))),
  ];
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function signsOf(found) {
  return [
    ...found.signs.map((one) => h("div", { class: "card banner sign", "data-sign": one.name },
      h("p", {}, h("b", {}, capital(one.name)), ` since step ${one.since}: ${one.numbers}. `, h("span", { class: "soft" }, `Threshold: ${one.threshold}.`)),
      h("p", {}, one.remedy))),
    found.past_signs.length
      ? h("details", { class: "card signs" }, h("summary", {}, plural(found.past_signs.length, "sign that ended", "signs that ended")),
        h("ul", {}, found.past_signs.map((one) => h("li", {}, h("b", {}, capital(one.name)), `, steps ${one.since}–${one.until}: ${one.numbers}.`))))
      : null,
  ];
}

function pairsOf({ how, pairs }) {
  const episode = (one) => h("div", {},
    h("h3", {}, capital(one.title), tag(one.verdict, rewardTone(one.reward) === "good" ? "good" : "bad")),
    one.parts ? h("p", { class: "soft small" }, one.parts) : null, one.messages.map(message),
    one.returned_last_reply ? h("p", { class: "soft small" }, "The agent returned its last reply.") : one.output === null ? null : labelled("returned", one.output));
  return [
    h("h2", {}, "Episodes, before and after"), h("p", { class: "soft" }, how),
    ...pairs.map((pair) => h("article", { class: "card pair" },
      h("header", {}, h("h3", {}, "Problem ", h("span", { class: "mono" }, pair.task))),
      pair.problem.map(message), pair.answer ? labelled("gold answer", pair.answer) : null,
      h("div", { class: `versus${pair.episodes.length > 1 ? "" : " alone"}` }, pair.episodes.map(episode)))),
  ];
}

const stepsOf = (steps) => [h("h2", {}, "Next steps"),
  h("div", { class: "card" }, steps.map(([purpose, command]) => [h("p", { class: "small soft" }, capital(purpose)), h("pre", {}, command)]))];

export async function overviewPage(main, state) {
  const draw = async () => {
    const found = await ask("overview");
    const charts = [found.reward, ...found.charts].filter(Boolean);
    main.replaceChildren(
      h("div", { class: "heading" }, h("h1", {}, state.name)),
      h("p", { class: "soft" }, found.opening),
      verdict(found.scores),
      ...found.banners.map((text) => h("div", { class: `card banner${state.status === "failed" && text.startsWith("The run failed") ? " bad" : ""}` }, h("p", {}, text))),
      ...signsOf(found).filter(Boolean),
      h("dl", { class: "tiles" }, found.tiles.map((tile) => h("div", { class: "tile" }, h("dt", {}, tile.name), h("dd", {}, tile.value, tile.more ? h("small", {}, ` ${tile.more}`) : null)))),
      h("h2", {}, "How it learned"),
      found.reward ? figure(found.reward) : h("p", { class: "soft" }, "No two steps have been written yet."),
      ...(found.charts.length ? [h("h2", {}, "How it flowed"), h("div", { class: "charts" }, found.charts.map(figure))] : []),
      ...(charts.length && !embedded ? [h("p", { class: "soft small" }, "A click on a chart opens the step under the pointer; the arrow keys show the values of a chart that has the focus, and Enter opens the step.")] : []),
      ...(found.chosen ? pairsOf(found.chosen) : []),
      ...booksOf(found.books),
      ...(found.health.length ? [h("h2", {}, "Signs of health"), h("div", { class: "charts health" }, found.health.map(figure))] : []),
      ...(found.steps ? stepsOf(found.steps) : []));
  };
  await draw();
  main.dataset.up = "#/";
  return async () => {
    // Not under the pointer of someone who is reading a chart.
    if (!main.querySelector("figure:hover, figure:focus-within")) await draw();
    return false;
  };
}

function failedRow(one) {
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: link(["failures", "episode", one.line]), "data-row": true }, one.attempt || one.task || `episode ${one.line}`)),
    h("td", { class: "said-in-list" }, one.task, promptLine(one.prompt)), h("td", {}, one.outcome), right(whole(one.turns)), h("td", {}, one.error));
}

export async function failuresPage(main) {
  const body = h("tbody");
  const foot = h("div");
  const load = async (before) => {
    const page = await ask("failures", { before });
    body.append(...page.episodes.map(failedRow));
    foot.replaceChildren(page.more ? more("older ones", () => load(page.episodes.at(-1).line)) : "");
    return page;
  };
  const found = await load(null);
  const heads = [["attempt"], ["task"], ["outcome"], ["turns", "number"], ["why"]];
  main.replaceChildren(...[
    h("div", { class: "heading" }, h("h1", {}, "Failures")),
    h("p", { class: "soft" }, "A failure is never reward 0: a failed attempt is not trained on, its slot is tried again, and a task whose slot is out of attempts is quarantined."),
    h("div", { class: "columns" },
      found.reasons.length ? h("div", { class: "card wide" }, counted("Why attempts failed", found.reasons)) : null,
      found.outcomes.length ? h("div", { class: "card wide" }, counted("Outcomes of attempts", found.outcomes)) : null),
    found.quarantined.length ? [h("h2", {}, "Quarantined tasks"), h("div", { class: "card wide" }, h("table", {}, found.quarantined.map((one) => h("tr", {}, h("th", { scope: "row" }, one.task), h("td", { class: "mono" }, one.group), h("td", {}, one.outcome), h("td", {}, one.why)))))] : null,
    h("h2", {}, "Failed episodes"),
    found.episodes.length ? h("div", { class: "card wide" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, heads.map(([name, side]) => h("th", { class: side, scope: "col" }, name)))), body)) : h("p", { class: "soft" }, "No episode has failed."),
    foot,
  ].flat().filter(Boolean));
  main.dataset.up = "#/";
}

export async function failedPage(main, line) {
  await episodePage(main, [["Failures", "#/failures"]], { kind: "failed", line }, "#/failures", null);
}

export async function settingsPage(main) {
  const found = await ask("settings");
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Settings")),
    h("p", { class: "soft" }, "As the run resolved them, from ", h("code", {}, `${found.dir}/config.toml`), "."),
    found.sections.length ? h("div", { class: "card" }, h("div", { class: "settings" }, found.sections.map((section) =>
      h("section", {}, h("h3", {}, section.name), h("table", {}, section.rows.map(([key, value]) => h("tr", {}, h("td", {}, key), h("td", { class: "mono" }, value)))))))) : h("p", { class: "soft" }, "The run has no readable config.toml."));
  main.dataset.up = "#/";
}
