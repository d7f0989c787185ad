// Search over the episodes of the run; what is searched for stands in the address.
import { ask, episodeLink, h, link, more, place, plural, rewardTone, brief, stateTag, tag, whole } from "./dom.js";

const KINDS = { step: "training", eval: "evaluations", failed: "failed attempts", stale: "stale groups" };
const OUTCOMES = ["completed", "truncated", "agent_error", "infra_error", "reward_error", "timeout", "cancelled", "unrewarded"];
const STATES = ["trained", "stepped", "filtered", "stale", "cancelled", "abandoned"];
const HEADS = [["episode"], ["reward"], ["state"], ["turns", "number"], ["tokens", "number"], ["task and prompt"]];
const FIELDS = ["kind", "outcome", "state", "low", "high", "task", "text"];

// The prompt of a task, cut at one line; empty if it is not recorded.
export const promptLine = (text) => (text ? h("span", { class: "prompt", title: text }, text) : null);

function row(one) {
  const { kind } = one;
  const slot = one.slot === null ? "" : ` · slot ${one.slot}`;
  const where = { step: `step ${one.step} · ${one.group}${slot}`, eval: `step ${one.step} · ${one.eval_set || "held out"}, ${one.mode}`, failed: one.attempt || `episode ${one.line}`, stale: `before a batch · ${one.group}${slot}` }[kind];
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: episodeLink(one), "data-row": true }, where)),
    h("td", {}, one.reward === null ? tag(one.outcome, "bad") : tag(brief(one.reward), rewardTone(one.reward))),
    h("td", {}, kind === "step" || kind === "stale" ? stateTag(one.state) : null, one.outcome === "truncated" ? tag("truncated", "sand") : null),
    h("td", { class: "number" }, whole(one.turns)), h("td", { class: "number" }, whole(one.tokens)),
    h("td", { class: "said-in-list" }, one.task, promptLine(one.prompt)));
}

const choice = (name, label, options, value) => h("label", {}, label, h("select", { name }, options.map(([key, text]) => h("option", { value: key, selected: key === value }, text))));

function form(query, search) {
  const value = (name) => query.get(name) ?? "";
  const any = (names) => [["", "any"], ...names.map((one) => [one, one.replaceAll("_", " ")])];
  const field = (name, label, type, more) => h("label", {}, label, h("input", { name, type, value: value(name), ...more }));
  const element = h("form", { class: "card filters", onsubmit: (event) => {
    event.preventDefault();
    search(Object.fromEntries(FIELDS.map((name) => [name, element.elements[name].value.trim()])));
  }, onchange: () => element.requestSubmit() },
    choice("kind", "episodes of", Object.entries(KINDS), value("kind") || "step"),
    choice("outcome", "outcome", any(OUTCOMES), value("outcome")), choice("state", "state", any(STATES), value("state")),
    field("low", "reward from", "number", { step: "any", class: "short" }), field("high", "to", "number", { step: "any", class: "short" }),
    field("task", "task", "text", {}), field("text", "text in the prompt", "text", { class: "long" }),
    h("button", { type: "submit" }, "Search"));
  return element;
}

export async function searchPage(main) {
  const { query } = place();
  const words = Object.fromEntries(FIELDS.map((name) => [name, query.get(name) || null]));
  const kind = words.kind in KINDS ? words.kind : "step";
  const body = h("tbody");
  const foot = h("div", { class: "found", role: "status" });
  let searched = 0;
  const table = h("div", { class: "card wide" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, HEADS.map(([name, side]) => h("th", { class: side, scope: "col" }, name)))), body));
  const load = async (from) => {
    const found = await ask("episodes", { ...words, kind, ...from });
    searched += found.searched;
    body.append(...found.episodes.map(row));
    table.hidden = !body.children.length;
    foot.replaceChildren(h("p", { class: "soft" }, `${plural(body.children.length, "episode")} found among ${whole(searched)}.`),
      found.next ? more(kind === "failed" ? "search further" : found.next.step ? `search further, from step ${found.next.step} back` : "search further, among groups that were stale before a batch", () => load(found.next)) : "");
  };
  await load({});
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Episodes")),
    form(query, (values) => {
      location.hash = link(["episodes"], values.kind === "step" ? { ...values, kind: "" } : values);
    }),
    table, foot);
  main.dataset.up = "#/";
}
