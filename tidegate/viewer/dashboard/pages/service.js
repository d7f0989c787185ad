// A standing service: its clients' conversations and feedback, rewards by version, publishes and tests of versions.
import { figure, shape } from "./charts.js";
import { ask, brief, embedded, facts, h, link, number, percent, plural, tag, whole } from "./dom.js";

const right = (text, title) => h("td", { class: "number", title }, text);
const heads = (names) => h("thead", {}, h("tr", {}, names.map(([name, side, title]) => h("th", { class: side, scope: "col", title }, name))));
const TITLES = {
  waiting: "accepted, and neither trained on nor dropped so far",
  filtered: "accepted, and without a gradient",
  stale: "accepted, and too old when the batch was assembled",
  unrewarded: "ended without feedback in time",
  refused: "not accepted by the trainer, which gave a reason",
  cancelled: "accepted, and in no step when the training ended",
  failed: "ended for another reason: a reward function, an engine",
};
const TONES = { live: "accent", "in test": "sand", "rolled back": "bad" };
const LEVEL = "the 95% confidence interval";

function interval(one) {
  if (one.count === 0) return "–";
  return one.low === null ? "unknown" : `${number(one.low)} to ${number(one.high)}`;
}

const mean = (one) => [right(number(one.mean)), right(interval(one), LEVEL)];

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 99.5) return `${number(seconds, seconds < 9.95 ? 1 : 0)} s`;
  if (seconds < 5970) return `${number(seconds / 60, 0)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 1)} h` : `${number(seconds / 86400, 1)} days`;
}

function overviewOf(found) {
  const ends = Object.fromEntries(found.columns.map((name, at) => [name, found.total.ends[at]]));
  const { reward } = found.total;
  const tile = (name, value, small) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, ` ${small}`) : null));
  const thumbs = found.feedback.reduce((sum, one) => sum + (one.delays ? one.count : 0), 0);
  return h("dl", { class: "tiles" },
    tile("Conversations that ended", whole(found.total.count)),
    tile("Trained on", whole(ends.trained), found.total.count ? percent(ends.trained / found.total.count) : ""),
    tile("Without feedback", whole(ends.unrewarded), found.total.count ? percent(ends.unrewarded / found.total.count) : ""),
    tile("Mean reward", number(reward.mean), reward.low === null ? "" : `(${interval(reward)})`),
    tile("Values of feedback", whole(thumbs)));
}

function keysOf(found) {
  const names = [["project key"], ["all", "number"], ...found.columns.map((name) => [name, "number", TITLES[name]]), ["mean reward", "number"], ["95% interval", "number"]];
  const row = (one, name) => h("tr", {}, h("th", { scope: "row" }, name), right(whole(one.count)), one.ends.map((count) => right(count ? whole(count) : "–")), mean(one.reward));
  return [
    h("h2", {}, "Conversations by project key"),
    h("p", { class: "soft" }, "Conversations that ended, and groups that clients formed, each with what became of it. Rewards are those of accepted and refused ones."),
    found.total.count ? h("div", { class: "card wide" }, h("table", { class: "list" }, heads(names),
      h("tbody", {}, found.keys.map((one) => row(one, one.name))),
      found.keys.length > 1 ? h("tfoot", {}, row(found.total, "all keys")) : null)) : h("p", { class: "soft" }, "No conversation has ended yet."),
    found.erased ? h("p", { class: "soft" }, `The texts of ${plural(found.erased, "conversation or group", "conversations or groups")} were erased by their clients.`) : null,
    found.refusals.length ? [h("h3", {}, "Why the trainer refused some"), h("div", { class: "card wide" }, h("table", { class: "list" },
      found.refusals.map(([why, count]) => h("tr", {}, right(whole(count)), h("td", {}, why)))))] : null,
  ];
}

function noteCard(one) {
  const what = [one.name, one.value === null ? null : brief(one.value), `reply ${one.turn + 1}`].filter(Boolean).join(" · ");
  return h("div", { class: "card note" },
    h("p", { class: "soft small" }, h("a", { href: link(["step", one.step, "group", one.group, "episode", one.line]), "data-row": true }, one.group), ` · ${what}`, tag(one.state)),
    one.comment === null ? null : h("p", { class: "said" }, one.comment),
    one.correction === null ? null : [h("p", { class: "soft small" }, "should have been"), h("p", { class: "said correction" }, one.correction)]);
}

function feedbackOf(found, notes) {
  const names = [["name"], ["values", "number"], ["mean", "number"], ["95% interval", "number"], ["least", "number"], ["largest", "number"],
    ["median delay", "number", "from the end of the reply to the feedback"], ["90%", "number", "nine of ten came sooner"], ["longest", "number"]];
  const rows = found.feedback.map((one) => h("tr", {}, h("th", { class: "name", scope: "row" }, one.name), right(whole(one.count)), mean(one),
    right(brief(one.least)), right(brief(one.largest)), (one.delays ?? [null, null, null]).map((seconds) => right(span(seconds)))));
  const hidden = found.names - found.feedback.length;
  const kept = [found.comments ? plural(found.comments, "comment") : null, found.corrections ? plural(found.corrections, "correction") : null].filter(Boolean).join(" and ");
  return [
    h("h2", {}, "Feedback"),
    h("p", { class: "soft" }, "Values by name, and how long after its reply each came. A name without delays is that of a reward function."),
    rows.length ? h("div", { class: "card wide" }, h("table", { class: "list" }, heads(names), h("tbody", {}, rows))) : h("p", { class: "soft" }, "No value has come yet."),
    hidden > 0 ? h("p", { class: "soft" }, `${plural(hidden, "rarer name")} not shown.`) : null,
    kept ? [h("h3", {}, "Comments and corrections"),
      h("p", { class: "soft" }, `${kept}${embedded ? "." : notes.length ? "; the newest of trained or dropped conversations:" : "; their conversations are in no step yet, or were refused or erased."}`),
      h("div", { class: "notes" }, notes.map(noteCard))] : null,
  ];
}

function versionsOf(found) {
  const tested = found.versions.some((one) => one.why);
  const names = [["version"], ["step", "number"], ["state"], ["episodes", "number"], ["mean reward", "number"], ["95% interval", "number"], ...(tested ? [["test"]] : [])];
  const rows = found.versions.map((one) => h("tr", {},
    h("th", { scope: "row" }, String(one.version)), right(one.step ? h("a", { href: link(["step", one.step]) }, whole(one.step)) : "0"),
    h("td", {}, tag(one.state, TONES[one.state] ?? "quiet")), right(whole(one.rewards.count)), mean(one.rewards),
    tested ? h("td", { class: "why" }, one.why ?? "") : null));
  return [
    h("h2", {}, "Rewards by policy version"),
    found.rewards_chart ? figure(found.rewards_chart) : null,
    h("p", { class: "soft" }, "Counted are episodes with all tokens of one version.", found.mixed.count ? ` ${plural(found.mixed.count, "episode has", "episodes have")} tokens of several; their mean reward is ${number(found.mixed.mean)}.` : ""),
    rows.length ? h("details", { class: "card", "data-keep": "versions", open: rows.length <= 12 }, h("summary", {}, `Versions, the newest first${found.older ? ` (${plural(found.older, "older one")} not shown)` : ""}`),
      h("div", { class: "wide" }, h("table", { class: "list" }, heads(names), h("tbody", {}, rows)))) : null,
  ];
}

function gateOf(gate) {
  const limit = gate.limit_s === null ? "" : `, at most ${span(gate.limit_s)}`;
  const now = gate.waited_s === null ? "No publish waits now." : `A publish has waited for ${span(gate.waited_s)}.`;
  return [
    h("h2", {}, "Publish gate"),
    gate.waited_s !== null && gate.waited_s >= 1 ? h("div", { class: "card banner" }, h("p", {}, now)) : h("p", {}, now),
    h("p", { class: "soft" }, `A publish waits while more than ${percent(gate.share, 1)} of the open conversations would exceed the staleness bound${limit}.`),
    facts([["publishes", whole(gate.publishes)], ["waited 1 s or more", whole(gate.waited)], ["mean wait", span(gate.mean)], ["longest wait", span(gate.largest)]]),
    gate.chart ? figure(gate.chart) : null,
  ];
}

// The bounds of the difference as a bar, with 0 and the margin marked.
function bounds(test) {
  const difference = test.reward - test.live_reward;
  const size = 1.15 * Math.max(test.margin, Math.abs(test.low), Math.abs(test.high), 1e-9);
  const at = (value) => 200 + (190 * Math.min(1, Math.max(-1, value / size)));
  const svg = shape("svg", { viewBox: "-90 0 500 46", role: "img", class: "bounds", "aria-label": `difference ${brief(difference)}, between ${brief(test.low)} and ${brief(test.high)}; margin ${brief(test.margin)}` });
  const mark = (value, text, anchor) => {
    svg.append(shape("line", { class: "grid", x1: at(value), x2: at(value), y1: 4, y2: 28 }), shape("text", { class: "tick", x: at(value), y: 42, "text-anchor": anchor }, text));
  };
  mark(-test.margin, `−margin ${number(test.margin, 2)}`, "end");
  mark(0, "0", "middle");
  svg.append(shape("rect", { class: "area accent", x: at(test.low), y: 11, width: Math.max(2, at(test.high) - at(test.low)), height: 10, rx: 3 }), shape("circle", { class: "dot accent", cx: at(difference), cy: 16, r: 4 }));
  return svg;
}

function testOf(promotion) {
  const { test } = promotion;
  if (promotion.in_test === null) return h("p", {}, "No version is in test now.");
  if (!test) return h("div", { class: "card banner" }, h("p", {}, `Version ${promotion.in_test} is in test.`));
  const known = test.low !== null;
  return h("div", { class: "card banner" },
    h("p", {}, `Version ${promotion.in_test} is in test.`),
    facts([
      ["candidate", `${number(test.reward)} of ${plural(test.episodes, "conversation")}`],
      ["live version", `${number(test.live_reward)} of ${plural(test.live_episodes, "conversation")}`],
      ["difference", number(test.reward - test.live_reward)],
      ["bounds, each 99% at any time", known ? `${number(test.low)} to ${number(test.high)}` : null],
    ]),
    known ? bounds(test) : null,
    h("p", { class: "soft small" }, known
      ? `It goes live when the lower bound is above −${number(test.margin)}, and is rolled back when the upper bound is below 0.`
      : `The test decides nothing before both versions have ${whole(test.least)} rewards.`));
}

function promotionOf(promotion) {
  return [
    h("h2", {}, "Promotion"),
    h("p", { class: "soft" }, promotion.mode === "always" ? "Every version goes live at once; roll-backs were requested by hand." : `Mode ${promotion.mode}, margin ${number(promotion.margin, 2)}.`),
    promotion.mode === "always" ? null : testOf(promotion),
    facts([["promoted", whole(promotion.promoted)], ["rolled back", whole(promotion.rolled_back)]]),
  ];
}

export async function servicePage(main) {
  let notes = [];
  let noted = -1;
  const draw = async () => {
    const found = await ask("service");
    const ended = found.total.ends[0] + found.comments + found.corrections;
    if (found.comments + found.corrections && ended !== noted) ({ notes } = await ask("notes", { most: 9 }));
    noted = ended;
    const open = main.querySelector("[data-keep=versions]")?.open;
    main.replaceChildren(...[
      h("div", { class: "heading" }, h("h1", {}, "Service")),
      overviewOf(found), keysOf(found), feedbackOf(found, notes), versionsOf(found),
      found.promotion ? promotionOf(found.promotion) : null, found.gate ? gateOf(found.gate) : null,
    ].flat(Infinity).filter((one) => one !== null));
    const details = main.querySelector("[data-keep=versions]");
    if (details && open !== undefined) details.open = open;
  };
  await draw();
  main.dataset.up = "#/";
  return async () => {
    if (!main.querySelector("figure:hover, figure:focus-within")) await draw();
    return false;
  };
}
