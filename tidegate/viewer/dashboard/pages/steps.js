// Steps, the groups of a step, the episodes of a group.
import { ask, bar, brief, crumbs, facts, h, link, moment, more, neighbours, number, percent, place, plural, rewardBars, stateTag, whole } from "./dom.js";
import { episodePage, sideBySide } from "./episodes.js";
import { stepHistograms } from "./distributions.js";
import { promptLine } from "./search.js";

function stepRow(row, bound) {
  const over = bound !== null && row.staleness_max > bound;
  return h(
    "tr", { "data-step": row.step },
    h("th", { scope: "row" }, h("a", { href: link(["step", row.step]), "data-row": true }, whole(row.step))),
    h("td", { class: "number" }, number(row.reward)), h("td", {}, bar(row.reward)),
    h("td", { class: "number" }, number(row.eval)),
    h("td", { class: `number${over ? " bad" : ""}` }, `${number(row.staleness, 2)} / ${whole(row.staleness_max)}`),
    h("td", { class: "number" }, percent(row.dropped)),
    h("td", { class: "number" }, whole(row.tokens)),
    h("td", { class: "number" }, number(row.entropy, 3)),
    h("td", { class: "number" }, brief(row.lag_kl)),
    h("td", { class: "number" }, number(row.waited, 1)),
    h("td", { class: "number" }, number(row.seconds, 1)),
  );
}

const HEADS = [
  ["step"], ["reward", "mean over the batch and what was filtered"], [""], ["held out", "sampled evaluation"],
  ["staleness", "mean / max, in policy versions"], ["dropped", "share of the episodes that came with this batch and were not trained on"],
  ["tokens", "trained on"], ["entropy", "nats a token"], ["lag KL", "sampling policy against the current one"], ["waited", "seconds the trainer waited for data"], ["seconds", "the whole step"],
];

const head = (names) => h("thead", {}, h("tr", {}, names.map(([name, title], index) => h("th", { class: index && name ? "number" : "", title, scope: "col" }, name))));

export async function stepsPage(main, state) {
  const body = h("tbody");
  const foot = h("div");
  const load = async (before) => {
    const found = await ask("steps", { before, most: 200 });
    body.append(...found.steps.map((row) => stepRow(row, state.bound)));
    const last = found.steps.at(-1)?.step;
    foot.replaceChildren(found.more ? more("older steps", () => load(last)) : "");
  };
  await load();
  const empty = body.children.length ? null : h("p", { class: "soft" }, "No step was taken yet. This page shows the first one by itself. Groups that were filtered are under ", h("a", { href: link(["episodes"]) }, "Episodes"), ".");
  main.replaceChildren(
    h("div", { class: "heading" }, h("h1", {}, "Steps")),
    empty ?? h("div", { class: "card wide" }, h("table", { class: "list" }, head(HEADS), body)), foot);
  main.dataset.up = "#/";
  return async () => {
    const found = await ask("steps", { most: 200 });
    const known = new Set([...body.children].map((row) => row.dataset.step));
    const fresh = found.steps.filter((row) => !known.has(String(row.step)));
    if (!fresh.length) return false;
    // A run that went back takes steps again: then everything is drawn anew.
    if (empty || fresh.some((row) => row.step < Number(body.firstElementChild?.dataset.step))) return true;
    body.prepend(...fresh.map((row) => stepRow(row, state.bound)));
    return false;
  };
}

function groupRow(group, step) {
  const versions = group.oldest === null ? "–" : group.oldest === group.newest ? group.oldest : `${group.oldest} – ${group.newest}`;
  return h(
    "tr", {},
    h("th", { scope: "row" }, h("a", { href: link(["step", step, "group", group.id]), "data-row": true }, group.id)),
    h("td", { class: "said-in-list" }, group.task, promptLine(group.prompt)), h("td", {}, stateTag(group.state)),
    h("td", {}, rewardBars(group.members)),
    h("td", { class: "number" }, number(group.mean)),
    h("td", { class: "number" }, number(group.tokens, 1)),
    h("td", { class: "number" }, String(versions)),
    h("td", { class: "number" }, group.staleness === null ? "–" : String(group.staleness)),
    h("td", { class: "number" }, group.lost ? String(group.lost) : ""),
  );
}

const GROUP_HEADS = [["group"], ["task"], ["became"], ["rewards by slot"], ["mean"], ["tokens", "sampled, mean of an episode"], ["versions", "of its sampled tokens"], ["staleness", "when the batch was assembled"], ["unsuccessful", "attempts that failed or were cancelled"]]
  .map(([name, title], index) => [name, title, index > 3]);

export async function stepPage(main, step) {
  const found = await ask("step", { step });
  const wanted = place().query.get("state");
  const body = h("tbody");
  const foot = h("div");
  let groups = { counts: {}, total: 0, groups: [] };
  const load = async (start) => {
    groups = await ask("groups", { step, state: wanted, start, most: 200 });
    body.append(...groups.groups.map((one) => groupRow(one, step)));
    const next = start + groups.groups.length;
    foot.replaceChildren(next < groups.total ? more(`${plural(groups.total - next, "more group")}`, () => load(next)) : "");
  };
  if (found.written) await load(0);
  const chips = Object.entries(groups.counts).map(([name, count]) => h("a", { class: `chip${name === wanted ? " on" : ""}`, href: link(["step", step], { state: name === wanted ? "" : name }), "aria-current": name === wanted ? "true" : null }, `${name} ${whole(count)}`));
  const metrics = found.metrics ?? {};
  const taken = found.metrics || groups.counts.trained || groups.counts.stepped || groups.counts.abandoned;
  const untaken = "This step has not been taken. The groups below were dropped while its batch was assembled.";
  main.replaceChildren(...[
    crumbs([["Steps", "#/steps"], [`Step ${step}`, null]]),
    h("div", { class: "heading" }, h("h1", {}, `Step ${step}`), found.metrics ? h("a", { class: "chip", href: link(["timeline"], { step, span: 1 }) }, "timeline") : null, neighbours(found.before && link(["step", found.before]), found.after && link(["step", found.after]), "step")),
    found.metrics ? stepFacts(metrics) : h("p", { class: "soft" }, taken || !found.written ? "This step's metrics are not written: it is being taken, or the run went back to before it." : untaken),
    found.metrics ? allMetrics(metrics) : "",
    found.written && taken ? [h("h2", {}, "Distributions"), await stepHistograms(step)] : "",
    h("h2", {}, "Groups"),
    h("p", { class: "soft" }, "The groups that were trained on in this step, and those that were dropped while its batch was assembled. Filtered: all rewards of the group are equal. ", h("a", { href: STALE }, "All stale groups of the run"), ", also those that the trainer never fetched, are under Episodes."),
    h("div", { class: "chips" }, chips),
    found.written
      ? h("div", { class: "card wide" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, GROUP_HEADS.map(([name, title, right]) => h("th", { title, class: right ? "number" : "", scope: "col" }, name)))), body))
      : h("p", { class: "soft" }, "The episodes of this step were not written."),
    foot].flat());
  main.dataset.up = "#/steps";
}

function stepFacts(metrics) {
  return facts([
    ["reward", `${number(metrics["reward/mean"], 3)} ± ${number(metrics["reward/std"], 3)}`],
    ["staleness", `${number(metrics["staleness/mean"], 2)}, at most ${whole(metrics["staleness/max"])}`],
    ["tokens trained on", whole(metrics["tokens/trained"])],
    ["loss", brief(metrics.loss)], ["gradient norm", brief(metrics.grad_norm)], ["entropy", brief(metrics.entropy)],
    ["lag KL", brief(metrics.lag_kl)], ["mismatch KL", brief(metrics.mismatch_kl)],
    ["waited for data", metrics["time/wait_for_batch"] === undefined ? null : `${number(metrics["time/wait_for_batch"], 1)} s`],
    ["whole step", metrics["time/step"] === undefined ? null : `${number(metrics["time/step"], 1)} s`],
    metrics["eval/reward"] === undefined ? ["", null] : ["held out", number(metrics["eval/reward"], 3)],
  ]);
}

function allMetrics(metrics) {
  const names = Object.keys(metrics).sort();
  return h("details", { class: "card" }, h("summary", {}, `All ${names.length} metrics of the step`),
    h("div", { class: "settings" }, h("table", {}, names.map((name) => h("tr", {}, h("td", {}, name), h("td", { class: "mono number" }, brief(metrics[name])))))));
}

function lostTable(entry) {
  if (!entry?.lost.length) return "";
  return h("div", { class: "card wide" }, h("h3", {}, "Unsuccessful attempts"), h("table", {},
    entry.lost.map((one) => h("tr", {}, h("td", { class: "mono" }, one.id), h("td", {}, `slot ${one.slot ?? "?"}`), h("td", {}, stateTag(one.state)), h("td", {}, one.outcome), h("td", {}, one.why)))));
}

// Why a group was not trained on, in a sentence; null where it was.
function whyDropped(group, bound, step) {
  if (group.state === "filtered") {
    const rewards = [...new Set(group.members.map((one) => one.reward))];
    const equal = rewards.length === 1 && rewards[0] !== null ? `All ${whole(group.members.length)} rewards are ${number(rewards[0], 3)}` : "The rewards do not differ enough";
    return `${equal}: compared with their mean, no episode is better than another. The group gives no signal and was not trained on.`;
  }
  return group.state === "stale" ? whyStale(group, bound, step) : null;
}

function whyStale(group, bound, step) {
  const replaced = group.ledger?.replaced_by ? `; ${group.ledger.replaced_by} replaced it` : "";
  const when = step === null ? "The group became stale before the trainer fetched it for a batch" : `The group was dropped while the batch of step ${whole(step)} was assembled`;
  const oldest = group.ledger?.oldest ?? group.oldest;
  const version = group.ledger?.ended_version ?? null;
  const known = bound !== null && bound !== undefined;
  const limit = known ? `the bound of ${bound}` : "the bound";
  const age = group.staleness === null ? "its oldest sampled token was too old" : `its oldest sampled token was of version ${oldest ?? "unknown"}, ${plural(group.staleness, "version")} behind the trainer${version === null ? "" : `, whose version was ${version}`}`;
  // Within the bound it ended so for a version that was rolled back, or discarded by a resume.
  const reason = known && group.staleness !== null && group.staleness <= bound ? `${age}: within ${limit} (trainer.max_staleness), but a token is of an abandoned version` : `${age}: more than ${limit} (trainer.max_staleness)`;
  return `${when}: ${reason}. It was not trained on${replaced}.`;
}

function staleFacts(group, bound) {
  return [
    ["trainer's version then", entryOf(group, "ended_version")], ["bound", bound ?? null, "trainer.max_staleness"],
    ["episodes finished", moment(group.finished)], ["became stale", moment(group.ledger?.ended)],
  ];
}

const entryOf = (group, name) => (group.ledger?.[name] === null || group.ledger?.[name] === undefined ? null : String(group.ledger[name]));

const STALE = link(["episodes"], { kind: "stale" });

// Where a group is: in a step's file, or, without a step, among those that became stale before a batch.
const source = (step) => (step === null ? { kind: "stale" } : { kind: "step", step });
const groupAt = (step) => (step === null ? ["stale", "group"] : ["step", step, "group"]);
const trailTo = (step) => (step === null ? [["Stale episodes", STALE]] : [["Steps", "#/steps"], [`Step ${step}`, link(["step", step])]]);

export async function groupPage(main, step, id, bound) {
  const group = await ask("group", { ...source(step), id });
  const addresses = group.members.map((one) => ({ ...source(step), line: one.line, budget: 1500 }));
  const episodes = await Promise.all(addresses.map((address) => ask("episode", address)));
  const entries = episodes.map((one, index) => ({
    one, address: addresses[index], title: one.slot === null ? `Episode ${one.line}` : `Slot ${one.slot}`,
    href: link([...groupAt(step), id, "episode", one.line]),
  }));
  const { element, show } = sideBySide(entries);
  const entry = group.ledger;
  const other = (name) => (name ? link([...groupAt(step), name]) : null);
  main.replaceChildren(
    crumbs([...trailTo(step), [id, null]]),
    h("div", { class: "heading" }, h("h1", {}, id, h("small", {}, ` of ${group.task}`)), stateTag(group.state), rewardBars(group.members), neighbours(other(group.before), other(group.after), "group")),
    facts([
      ["mean reward", number(group.mean, 3)],
      ["episodes", whole(group.members.length)],
      ["issued at version", entry?.version === null || entry === null ? null : String(entry.version)],
      ["oldest token's version", group.oldest === null ? "unknown" : String(group.oldest)],
      ["staleness", group.staleness === null ? null : String(group.staleness)],
      ...(group.state === "stale" ? staleFacts(group, bound) : []),
      ["tokens", `${number(group.tokens, 1)} an episode`],
      ["replaces", entry?.replaces || null], ["replaced by", entry?.replaced_by || null],
    ]),
    ...[whyDropped(group, bound, step)].filter(Boolean).map((why) => h("div", { class: "card banner why-dropped" }, h("p", {}, why))),
    lostTable(entry), element);
  main.dataset.up = step === null ? STALE : link(["step", step]);
  show();
}

export async function memberPage(main, step, id, line) {
  const group = id === null ? null : await ask("group", { ...source(step), id });
  const lines = group?.members.map((one) => one.line) ?? [];
  const at = lines.indexOf(line);
  const to = (other) => (other === undefined ? null : link([...groupAt(step), id, "episode", other], Object.fromEntries(place().query)));
  const up = id === null ? link(["step", step]) : link([...groupAt(step), id], { by: place().query.get("by") });
  const trail = [...trailTo(step), ...(id === null ? [] : [[id, up]])];
  await episodePage(main, trail, { ...source(step), line }, up, { before: to(lines[at - 1]), after: at < 0 ? null : to(lines[at + 1]) });
}
