// Episodes: one by itself, several side by side.
import { ask, brief, crumbs, facts, h, link, neighbours, number, place, plural, rewardTone, signed, stateTag, tag, whole } from "./dom.js";
import { choose, flow, listen, palette } from "./tokens.js";

const LONG = 400;

export const BY = "logprob";
export const chosenBy = () => place().query.get("by") ?? BY;

export function rememberBy(by) {
  const { segments, query } = place();
  query.set("by", by);
  history.replaceState(null, "", link(segments, Object.fromEntries(query)));
}

const versionsOf = (turn) => [...new Set(turn.spans.map(([version]) => version))];

function turnFlows(one, turn, address, { given = true, sequence = null } = {}) {
  const shared = sequence !== null && !sequence.own.includes(turn.index);
  const base = { address, turn: turn.index, policy: turn.policy, advantage: one.advantage, newest: one.newest, shared };
  return [
    given ? flow(turn.given_tokens, { ...base, part: "given" }) : null,
    flow(turn.sampled_tokens, { ...base, part: "sampled", reasons: turn.reasons }),
  ];
}

function turnWords(turn) {
  const versions = versionsOf(turn);
  return [
    turn.branch ? tag(`branch: ${turn.branch}`, "sand") : null,
    turn.delivered ? null : tag("not delivered", "bad"),
    turn.exempt ? tag(`not trained on: ${turn.exempt}`, "sand") : null,
    turn.structured ? tag(turn.structured === "grammar" ? "JSON under a grammar" : "JSON asked for, sampled as free text", "sand") : null,
    versions.length > 1 ? tag(`straddles a publish: ${versions.join(" → ")}`, "accent") : null,
    turn.finish === "length" ? tag("cut at the token limit", "sand") : turn.finish === "client_closed" ? tag("stream closed by the client", "sand") : turn.finish === "stop" ? null : tag(turn.finish, "sand"),
    turn.parse === "malformed" ? tag("malformed tool call", "bad") : null,
    turn.kv_version !== null ? tag(`KV of version ${turn.kv_version}`, "sand") : null,
  ];
}

function turnBlock(one, turn, address, sequence) {
  const given = turn.given_tokens.total;
  const [before, sampled] = turnFlows(one, turn, address, { sequence });
  const told = `${plural(given, "token")} given${turn.parent === null ? ", the whole prompt" : ""}`;
  const head = h(
    "header", {},
    h("h3", {}, `Turn ${turn.index}`),
    turn.policy ? tag(turn.policy, "accent") : null,
    turn.parent === null || turn.parent === turn.index - 1 ? null : h("span", { class: "soft small" }, `after turn ${turn.parent}`),
    h("span", { class: "soft small" }, [
      `${plural(turn.sampled, "token")} sampled after ${whole(turn.before + turn.given)}`,
      versionsOf(turn).length === 1 ? `version ${versionsOf(turn)[0]}` : null,
      turn.temperature === null || turn.temperature === 1 ? null : `temperature ${brief(turn.temperature)}`,
      turn.cached ? `${whole(turn.cached)} cached` : null,
      turn.seconds === null ? null : `${number(turn.seconds, 2)} s`,
    ].filter(Boolean).join(" · ")),
    turnWords(turn),
  );
  const body = given > LONG
    ? [h("details", {}, h("summary", {}, told), h("div", { class: "said" }, before)), h("div", { class: "said" }, sampled)]
    : h("div", { class: "said" }, before, sampled);
  return h("section", { class: `turn${turn.delivered ? "" : " undelivered"}`, id: `turn-${turn.index}` }, head, body);
}

// Calls of the environment's tools that began after a turn (null: before the first).
function toolBlocks(one, index) {
  return one.tools.filter((tool) => tool.turn === index).map((tool) => h(
    "section", { class: "turn tool" },
    h("header", {},
      h("code", { class: "call" }, tool.call),
      tool.error ? tag("tool error", "bad") : null,
      tool.seconds === null ? null : h("span", { class: "soft small" }, `${number(tool.seconds, 3)} s`)),
    h("p", { class: `said ${tool.result.length > 3000 ? "long" : ""}` }, tool.result)));
}

const toolsTable = (one) => h("div", { class: "turns" }, [null, ...one.turns.map((turn) => turn.index)].flatMap((index) => toolBlocks(one, index)));

export function message(line) {
  const known = ["system", "user", "assistant", "tool"].includes(line.role) ? line.role : "other";
  return h(
    "div", { class: `message ${known}` },
    h("span", { class: "role" }, line.role),
    h("div", { class: line.text.length > 3000 ? "long" : "" },
      line.text ? h("p", { class: "said" }, line.text) : null,
      line.calls.map((call) => h("code", { class: "call" }, call)),
      line.origin ? h("span", { class: "origin" }, line.origin) : null),
  );
}

function errorBanner(one) {
  return one.error ? h("div", { class: "card banner bad" }, h("p", { class: "said" }, one.error)) : null;
}

export function labelled(label, text, origin = "") {
  return h("div", { class: "message other" }, h("span", { class: "role" }, label),
    h("div", { class: text.length > 3000 ? "long" : "" }, h("p", { class: "said" }, text), origin ? h("span", { class: "origin" }, origin) : null));
}

const goldAnswer = (one) => (one.answer ? labelled("gold answer", one.answer) : null);

function resultOf(one) {
  const output = one.output === null ? null : labelled("returned", one.output, one.returned_last_reply ? "its last reply" : "");
  const gold = goldAnswer(one);
  return output || gold ? h("div", { class: "card problem result" }, output, gold) : null;
}

function numbers(title, values) {
  const pairs = Object.entries(values);
  return pairs.length ? [title, pairs.map(([name, value]) => `${name} ${brief(value)}`).join(", ")] : null;
}

function versionsTold(one) {
  if (one.oldest === null) return "unknown";
  return one.oldest === one.newest ? String(one.oldest) : `${one.oldest} – ${one.newest}`;
}

function factsOf(one) {
  return facts([
    ["reward", number(one.reward, 3), "the environment's, as trained on"],
    numbers("reward parts", one.reward_parts) ?? ["", null],
    numbers("rewards of policies", one.policy_rewards) ?? ["", null],
    one.advantage === null ? ["advantage", null] : ["advantage", signed(one.advantage, 3), "the reward against the group's mean"],
    ["outcome", one.outcome],
    ["turns", whole(one.turns.length)],
    one.tools.length ? ["tool calls", whole(one.tools.length), "of the environment's tools"] : ["", null],
    ["tokens sampled", whole(one.tokens)],
    ["versions", versionsTold(one)],
    one.seconds === null ? ["took", null] : ["took", `${number(one.seconds, 1)} s`],
    one.agent_reward === null ? ["", null] : ["the agent's own reward", number(one.agent_reward, 3)],
    numbers("the agent's metrics", one.metrics) ?? ["", null],
    ["attempt", one.attempt],
    ["session", one.session],
  ]);
}

function tokensView(one, address) {
  const root = h("div", { class: "turns" });
  const draw = (sequence) => {
    const shown = sequence === null ? one.turns : sequence.turns.map((index) => one.turns.find((turn) => turn.index === index));
    root.replaceChildren(...toolBlocks(one, null), ...shown.flatMap((turn) => [turnBlock(one, turn, address, sequence), ...toolBlocks(one, turn.index)]));
  };
  draw(null);
  listen(root);
  const { bar, show } = palette(root, chosenBy(), rememberBy);
  const outline = one.turns.length > 6 ? h("nav", { class: "outline", "aria-label": "Turns" }, one.turns.map((turn) =>
    h("button", { type: "button", class: turn.delivered ? "" : "faint", title: turn.branch ?? "", onclick: () => document.getElementById(`turn-${turn.index}`)?.scrollIntoView() }, String(turn.index)))) : null;
  const parts = one.sequences.length > 1 ? sequenceChoice(one, (sequence) => {
    draw(sequence);
    show();
  }) : null;
  return { element: h("div", {}, bar, parts, outline, root), show, root };
}

// A branching episode is exported as several sequences; each can be looked at as it is trained.
function sequenceChoice(one, changed) {
  const button = (text, sequence, title) => h("label", { title }, h("input", { type: "radio", name: "sequence", checked: sequence === null, onchange: () => changed(sequence) }), h("span", {}, text));
  return h("div", { class: "palette" }, h("fieldset", { class: "choice" },
    h("legend", { class: "unseen" }, "Sequence"),
    button("all turns", null, "the whole tree of turns"),
    one.sequences.map((sequence, index) => button(`sequence ${index + 1}`, sequence, `turns ${sequence.turns.join(", ")}`))),
  h("span", { class: "soft small" }, `This episode branches: it is trained as ${one.sequences.length} sequences; what they share is trained in the first.`));
}

export async function episodePage(main, trail, address, up, links) {
  const one = await ask("episode", address);
  const slot = one.slot === null ? `Episode ${one.line}` : `Slot ${one.slot}`;
  const { segments, query } = place();
  const messages = query.get("view") === "messages";
  const view = messages ? null : tokensView(one, address);
  const other = link(segments, { ...Object.fromEntries(query), view: messages ? "" : "messages" });
  main.replaceChildren(
    crumbs([...trail, [slot, null]]),
    h("div", { class: "heading" },
      h("h1", {}, slot, h("small", {}, ` of ${one.task}`)),
      stateTag(one.state), tag(one.reward === null ? one.outcome : `reward ${brief(one.reward)}`, rewardTone(one.reward)),
      h("a", { class: "button", href: other, "data-go": "messages", title: "key m" }, messages ? "as tokens" : "as messages"),
      neighbours(links?.before, links?.after, "episode")),
    factsOf(one), ...[errorBanner(one), resultOf(one), one.no_tokenizer ? h("p", { class: "soft" }, one.no_tokenizer) : null].filter(Boolean),
    one.turns.length ? "" : h("p", { class: "soft" }, "No reply was sampled in this episode."),
    messages ? h("div", { class: "card" }, one.messages.map(message)) : view.element,
    messages && one.tools.length ? h("div", { class: "card" }, h("h2", {}, "Calls of the environment's tools"), toolsTable(one)) : "",
  );
  main.dataset.up = up;
  view?.show();
  if (view) chooseFromAddress(view.root, segments);
  view?.root.addEventListener("chosen", ({ detail }) => {
    const { segments: now, query: words } = place();
    const at = now.indexOf("turn");
    const base = at < 0 ? now : now.slice(0, at);
    const part = detail.part === "given" ? "given" : "token";
    history.replaceState(null, "", link([...base, "turn", detail.turn, part, detail.at], Object.fromEntries(words)));
  });
}

function chooseFromAddress(root, segments) {
  const at = segments.indexOf("turn");
  if (at < 0) return;
  const [turn, part, token] = segments.slice(at + 1, at + 4);
  const kind = part === "given" ? "given" : "sampled";
  const found = [...root.querySelectorAll(".flow")].find((one) => one.dataset.turn === turn && one.dataset.part === kind);
  const chosen = found && [...found.querySelectorAll(".tok")].find((one) => one.dataset.at === token);
  found?.closest("details")?.setAttribute("open", "");
  if (chosen) choose(chosen);
  else root.querySelector(`[id="turn-${Number(turn)}"]`)?.scrollIntoView();
}

const sameStart = (episodes) => {
  const first = episodes[0]?.turns[0]?.given_tokens.ids.join();
  return episodes.length > 1 && episodes.every((one) => one.turns[0]?.given_tokens.ids.join() === first);
};

const problemOf = (one) => {
  const end = one.messages.findIndex((line) => line.role === "assistant");
  return one.messages.slice(0, end < 0 ? one.messages.length : end);
};

// Cards beside each other; the problem that all begin with stands above them once.
export function sideBySide(entries) {
  const episodes = entries.map(({ one }) => one);
  const shared = sameStart(episodes);
  const root = h("div", { class: "members" }, entries.map(({ one, address, title, href }) =>
    h("article", { class: "card member" },
      h("header", {},
        h("h3", {}, h("a", { href, "data-row": true }, title)),
        tag(one.reward === null ? one.outcome : `reward ${brief(one.reward)}`, rewardTone(one.reward)),
        one.advantage === null ? null : h("span", { class: "soft small", title: "advantage" }, `A ${signed(one.advantage)}`)),
      h("p", { class: "soft small" }, `${plural(one.tokens, "token")}, ${plural(one.turns.length, "turn")}, version ${versionsTold(one)}${one.outcome === "completed" ? "" : `, ${one.outcome}`}`),
      Object.keys(one.reward_parts).length > 1 ? h("p", { class: "soft small" }, numbers("", one.reward_parts)[1]) : null,
      one.error ? h("p", { class: "small bad" }, one.error) : null,
      h("div", { class: "said" }, one.turns.map((turn, index) => h("div", { class: `turn${turn.delivered ? "" : " undelivered"}` }, turnFlows(one, turn, address, { given: !(shared && index === 0) })))),
      one.output === null || one.returned_last_reply ? null : labelled("returned", one.output),
      shared ? null : goldAnswer(one))));
  listen(root);
  const { bar, show } = palette(root, chosenBy(), rememberBy);
  const problem = shared ? h("div", { class: "card problem" }, problemOf(episodes[0]).map(message), goldAnswer(episodes.find((one) => one.answer) ?? episodes[0])) : null;
  const missing = episodes.find((one) => one.no_tokenizer)?.no_tokenizer;
  return { element: h("div", {}, problem, missing ? h("p", { class: "soft" }, missing) : null, bar, root), show };
}
