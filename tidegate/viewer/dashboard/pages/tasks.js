// Solve rates: by kind over the run, and of each task.
import { figure } from "./charts.js";
import { ask, bar, h, link, more, number, place, plural, stateTag, whole } from "./dom.js";

const SORTS = { hardest: "hardest first", easiest: "easiest first", newest: "newest first", groups: "most groups first" };

const interval = (one) => (one.rate === null ? "–" : `${number(one.rate, 2)}`);
const between = (one) => (one.rate === null ? "" : `${number(one.low, 2)} to ${number(one.high, 2)}`);

const cells = (one) => [
  h("td", { class: "number" }, interval(one)), h("td", {}, bar(one.rate)), h("td", { class: "number soft" }, between(one)),
  h("td", { class: "number" }, one.episodes ? `${whole(one.solved)} of ${whole(one.episodes)}` : "–"), h("td", { class: "number" }, whole(one.groups)),
];
const heads = (first, last) => h("thead", {}, h("tr", {}, [[first], ["solve rate", "number"], [""], ["95% interval", "number"], ["solved", "number"], ["groups", "number"], [last]]
  .map(([name, side]) => h("th", { class: side, scope: "col" }, name))));

function kindRow(one, chosen) {
  const href = link(["tasks"], { ...chosen, kind: one.name === chosen.kind ? "" : one.name });
  return h("tr", { class: one.name === chosen.kind ? "on" : "" }, h("th", { scope: "row", class: "name" }, h("a", { href, "aria-current": one.name === chosen.kind ? "true" : null }, one.name || "no kind")), cells(one),
    h("td", {}, one.states.map(([state, count]) => `${state} ${whole(count)}`).join(", ")));
}

function taskRow(one) {
  return h("tr", {}, h("th", { scope: "row", class: "name" }, h("a", { href: link(["episodes"], { task: one.name }), "data-row": true }, one.name)), cells(one),
    h("td", {}, one.states.slice(0, 2).map(([state]) => stateTag(state)), one.step === null ? "" : h("a", { href: link(["step", one.step]), class: "where" }, ` step ${one.step}`)));
}

export async function tasksPage(main) {
  const { query } = place();
  const chosen = { sort: query.get("sort") in SORTS ? query.get("sort") : "hardest", kind: query.get("kind") ?? "", text: query.get("text") ?? "" };
  const body = h("tbody");
  const foot = h("div");
  const load = async (start) => {
    const found = await ask("tasks", { ...chosen, start });
    body.append(...found.tasks.map(taskRow));
    const next = start + found.tasks.length;
    foot.replaceChildren(next < found.total ? more(plural(found.total - next, "more task"), () => load(next)) : "");
    return found;
  };
  const found = await load(0);
  const go = (change) => (location.hash = link(["tasks"], { ...chosen, ...change }));
  const title = h("div", { class: "heading" }, h("h1", {}, "Tasks"));
  main.dataset.up = "#/";
  if (!found.all) {
    main.replaceChildren(title, h("p", { class: "soft" }, "No task has been issued yet."));
    return;
  }
  main.replaceChildren(
    title,
    h("p", { class: "soft" }, "How often the episodes of the leased groups solved their task. Of a group with different rewards, the episodes above the middle between its lowest and highest one count as solved."),
    ...(found.chart ? [figure(found.chart)] : []),
    h("h2", {}, "Kinds of tasks"),
    h("div", { class: "card wide" }, h("table", { class: "list" }, heads("kind", "groups by state"), h("tbody", {}, found.kinds.map((one) => kindRow(one, chosen))))),
    h("h2", {}, plural(found.total, "task")),
    h("form", { class: "card filters", onsubmit: (event) => event.preventDefault(), onchange: ({ currentTarget: { elements } }) => go({ text: elements.text.value.trim(), sort: elements.sort.value }) },
      h("label", {}, "task", h("input", { type: "text", name: "text", value: chosen.text })),
      h("label", {}, "order", h("select", { name: "sort" }, Object.entries(SORTS).map(([key, text]) => h("option", { value: key, selected: key === chosen.sort }, text)))),
      chosen.kind ? h("a", { class: "chip on", href: link(["tasks"], { ...chosen, kind: "" }) }, `${chosen.kind} ×`) : null),
    h("div", { class: "card wide" }, h("table", { class: "list" }, heads("task", "newest group"), body)), foot);
}
