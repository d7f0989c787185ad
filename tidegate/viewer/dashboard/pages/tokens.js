// Tokens as coloured text: what each is told about, how it is coloured, and how one moves among them.
import { ask, h, number, percent, pressed, signed, whole } from "./dom.js";

export const QUANTITIES = { logprob: "Logprob", version: "Version", advantage: "Advantage", mask: "Mask", policy: "Policy" };

export const REASONS = {
  trained: ["trained", "It was sampled by the policy and is trained on."],
  given: ["given", "Not trained: it was given to the policy (task, tool result, template), not sampled by it."],
  grammar: ["changed by a grammar", "Not trained: a grammar excluded ids that the policy might have drawn, so its probability is not the policy's."],
  exempt: ["exempt", "Not trained: the call was an auxiliary one, by its header or its model's name, or its policy is frozen."],
  undelivered: ["not delivered", "Not trained: the reply never reached the agent."],
  shared: ["shared", "Not trained here: this sequence shares it with an earlier one, in which it is trained."],
  filtered: ["group filtered", "Not trained: all rewards of its group are equal, so comparing them gives no signal."],
  stale: ["group stale", "Not trained: its group was older than the staleness bound when the batch was assembled."],
  failed: ["failed", "Not trained: the episode failed, and a failure is never reward 0."],
  cancelled: ["cancelled", "Not trained: the episode was cancelled."],
  abandoned: ["discarded", "It was trained on, but the run was resumed from a checkpoint before that, so its step was discarded."],
  live: ["not ended", "The ledger does not say yet what became of its group."],
  eval: ["evaluation", "Not trained: evaluations never are."],
};

const flows = new WeakMap();

const rank = (version) => `v${((version % 6) + 6) % 6}`;

// One run of tokens. `facts`: kind, turn, part, advantage, reasons [[word, count]…], newest (version).
export function flow(columns, facts) {
  const element = h("span", { class: `flow ${facts.part}`, "data-turn": facts.turn, "data-part": facts.part, "data-policy": facts.policy || null });
  flows.set(element, { ...facts, columns: { ...columns }, words: spread(facts.reasons) });
  fill(element, columns);
  return element;
}

function spread(reasons) {
  return (reasons ?? []).flatMap(([word, count]) => Array(count).fill(word));
}

function fill(element, columns) {
  const { ids, texts, special, parts, start } = columns;
  const marked = new Set(special);
  const broken = new Set(parts);
  const pieces = ids.map((id, place) => {
    const text = texts ? texts[place] : String(id);
    const odd = !texts ? "bare" : marked.has(place) ? "special" : broken.has(place) || text === "" ? "part" : "";
    return h("span", { class: `tok ${odd}`, "data-at": start + place }, odd === "part" ? "·" : visible(text));
  });
  element.append(...pieces);
  const left = columns.total - start - ids.length;
  if (left > 0) element.append(rest(element, start + ids.length, left));
}

function visible(text) {
  return text.includes("\n") ? text.split("\n").flatMap((one, index) => (index ? [h("i", { class: "nl" }, "↵"), "\n", one] : [one])) : text;
}

function rest(element, start, left) {
  const { address, turn, part } = flows.get(element);
  return h("button", { type: "button", class: "more inline", onclick: ({ target }) => pressed(target, async () => {
    const next = await ask("tokens", { ...address, turn, part, start });
    const { columns } = flows.get(element);
    for (const name of ["ids", "texts", "logprobs", "versions", "likeliest"]) if (columns[name]) columns[name] = columns[name].concat(next[name]);
    target.remove();
    fill(element, next);
    paint(element, element.closest("[data-by]")?.dataset.by ?? "logprob");
  }) }, `${whole(left)} more tokens`);
}

// All that is known of one token.
export function about(token) {
  const element = token.closest(".flow");
  const { columns, words, ...facts } = flows.get(element);
  const at = Number(token.dataset.at);
  const sampled = facts.part === "sampled";
  const word = sampled ? (facts.shared && words[at] === "trained" ? "shared" : (words[at] ?? "live")) : "given";
  const logprob = sampled ? (columns.logprobs?.[at] ?? null) : null;
  return {
    at, word, logprob, sampled, turn: facts.turn, part: facts.part, total: columns.total,
    id: columns.ids[at],
    text: columns.texts ? columns.texts[at] : null,
    likeliest: sampled ? (columns.likeliest?.[at] ?? null) : null,
    version: sampled ? (columns.versions?.[at] ?? null) : null,
    policy: sampled ? facts.policy : "",
    advantage: sampled ? facts.advantage : null,
    trained: word === "trained",
    newest: facts.newest,
  };
}

// How strongly a token is coloured, 0 to 1, and in what.
function colour(one, by, policies) {
  if (by === "mask") return [`m-${one.word}`, 1];
  if (!one.sampled) return ["", 0];
  if (by === "version") return one.version === null ? ["m-live", 1] : [rank(one.version), 1];
  if (by === "policy") return one.policy ? [rank(policies.get(one.policy)), 1] : ["", 0];
  if (by === "advantage") {
    if (!one.trained || one.advantage === null) return ["", 0];
    return [one.advantage >= 0 ? "up" : "down", Math.min(1, Math.abs(one.advantage) / 2)];
  }
  if (one.logprob === null) return ["", 0];
  return ["unlikely", Math.sqrt(Math.min(1, -one.logprob / 4))];
}

const policiesIn = (root) => [...new Set([...root.querySelectorAll(".flow[data-policy]")].map((one) => one.dataset.policy))].sort();

export function paint(root, by) {
  const policies = new Map(policiesIn(root).map((name, index) => [name, index]));
  for (const token of root.querySelectorAll(".tok")) {
    const [kind, weight] = colour(about(token), by, policies);
    const odd = ["special", "part", "bare"].filter((one) => token.classList.contains(one));
    const open = token.classList.contains("chosen") ? ["chosen"] : [];
    token.className = ["tok", ...odd, ...open, kind].filter(Boolean).join(" ");
    token.style.setProperty("--w", `${Math.round(weight * 58)}%`);
  }
}

export function legend(root, by) {
  const all = [...root.querySelectorAll(".tok")].map(about);
  const patch = (kind, text, title) => h("li", { title }, h("i", { class: `tok ${kind}`, style: { "--w": "45%" } }), text);
  if (by === "logprob") {
    return [h("li", {}, h("i", { class: "scale unlikely" }), "probability 100% → 2% and less; what the policy did not choose is plain")];
  }
  if (by === "version") {
    const versions = [...new Set(all.filter((one) => one.sampled && one.version !== null).map((one) => one.version))].sort((a, b) => a - b);
    const unknown = all.some((one) => one.sampled && one.version === null);
    return [
      ...versions.slice(0, 12).map((one) => patch(rank(one), `version ${one}`)),
      versions.length > 12 ? h("li", {}, `and ${versions.length - 12} more`) : null,
      unknown ? patch("m-live", "unknown") : null,
    ];
  }
  if (by === "policy") return policiesIn(root).map((name, index) => patch(rank(index), name));
  if (by === "advantage") {
    if (!all.some((one) => one.trained)) return [h("li", {}, "nothing here was trained on, so nothing has an advantage")];
    return [patch("up", "better than its group: made likelier"), patch("down", "worse than its group: made less likely")];
  }
  const words = new Map();
  for (const one of all) words.set(one.word, (words.get(one.word) ?? 0) + 1);
  return Object.keys(REASONS).filter((word) => words.has(word)).map((word) =>
    patch(`m-${word}`, `${REASONS[word][0]} (${whole(words.get(word))})`, REASONS[word][1]),
  );
}

export function rows(one) {
  const told = one.text === null ? null : JSON.stringify(one.text);
  return [
    ["token", `${whole(one.at + 1)} of ${whole(one.total)}, ${one.sampled ? "sampled in" : "given to"} turn ${one.turn}`],
    ["id", String(one.id)],
    told === null ? null : ["text", told === '""' ? "a part of a character, completed further on" : told],
    one.sampled ? ["logprob", one.logprob === null ? "not recorded" : number(one.logprob, 4)] : null,
    one.logprob === null ? null : ["probability", percent(Math.exp(one.logprob), one.logprob < -4 ? 3 : 1)],
    one.likeliest === null ? null : ["likeliest", one.likeliest.map(([text, logprob]) => `${JSON.stringify(text)} ${percent(Math.exp(logprob), logprob < -4 ? 3 : 1)}`).join(", ")],
    one.policy ? ["policy", one.policy] : null,
    one.sampled ? ["version", one.version === null ? "unknown: no engine attested one" : String(one.version)] : null,
    one.sampled && one.advantage !== null ? ["advantage", `${signed(one.advantage, 3)}${one.advantage === 0 ? ": no gradient" : ""}`] : null,
    [one.trained ? "trained" : "why not", REASONS[one.word]?.[1] ?? one.word],
  ].filter(Boolean);
}

const tooltip = () => document.getElementById("tooltip");

export function hideTip() {
  tooltip().hidden = true;
}

export function showTip(token) {
  const box = tooltip();
  box.replaceChildren(h("dl", {}, rows(about(token)).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  box.hidden = false;
  const rect = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.max(8, Math.min(rect.left, innerWidth - box.offsetWidth - 8));
  const below = rect.bottom + 6 + box.offsetHeight < innerHeight;
  box.style.left = `${left}px`;
  box.style.top = `${below ? rect.bottom + 6 : Math.max(8, rect.top - box.offsetHeight - 6)}px`;
}

// One token of the page is chosen at a time; it takes part in the order of Tab for all of them.
export function choose(token, { focus = true } = {}) {
  for (const other of document.querySelectorAll(".tok.chosen")) {
    other.classList.remove("chosen");
    other.removeAttribute("tabindex");
  }
  token.classList.add("chosen");
  token.setAttribute("tabindex", "0");
  if (focus) {
    token.focus({ preventScroll: true });
    const rect = token.getBoundingClientRect();
    if (rect.top < 90 || rect.bottom > innerHeight - 40) token.scrollIntoView({ block: "center" });
  }
  showTip(token);
  document.getElementById("spoken").textContent = rows(about(token)).map(([name, value]) => `${name}: ${value}`).join(", ");
  token.dispatchEvent(new CustomEvent("chosen", { bubbles: true, detail: about(token) }));
}

const shown = (root) => [...root.querySelectorAll(".tok")].filter((one) => one.getClientRects().length);

function above(all, at, direction) {
  const from = all[at].getClientRects()[0];
  const line = (rect) => (direction < 0 ? rect.bottom <= from.top + 2 : rect.top >= from.bottom - 2);
  let best = null;
  for (let next = at + direction; next >= 0 && next < all.length; next += direction) {
    const rect = all[next].getClientRects()[0];
    if (!line(rect)) continue;
    if (best !== null && Math.abs(rect.top - best.top) > 4) break;
    const away = Math.abs(rect.left - from.left);
    if (best === null || away < best.away) best = { next, away, top: rect.top };
  }
  return best === null ? at : best.next;
}

export function move(root, token, key) {
  const all = shown(root);
  const at = all.indexOf(token);
  const last = all.length - 1;
  const to = {
    ArrowRight: () => Math.min(last, at + 1), ArrowLeft: () => Math.max(0, at - 1), Home: () => 0, End: () => last,
    ArrowDown: () => above(all, at, 1), ArrowUp: () => above(all, at, -1),
  }[key];
  if (!to || at < 0) return false;
  choose(all[to()]);
  return true;
}

export function listen(root) {
  root.addEventListener("pointerover", (event) => {
    const token = event.target.closest?.(".tok");
    if (token && root.contains(token) && token.closest(".flow")) showTip(token);
  });
  root.addEventListener("pointerout", () => {
    const chosen = root.querySelector(".tok.chosen");
    if (chosen && document.activeElement === chosen) showTip(chosen);
    else hideTip();
  });
  root.addEventListener("click", (event) => {
    const token = event.target.closest?.(".flow .tok");
    if (token) choose(token);
  });
  root.addEventListener("keydown", (event) => {
    const token = event.target.closest?.(".flow .tok");
    if (token && !event.metaKey && !event.ctrlKey && !event.altKey && move(root, token, event.key)) event.preventDefault();
  });
  root.addEventListener("focusout", hideTip);
}

// The choice of what colours the tokens under `root`, with its legend.
export function palette(root, by, changed) {
  const explained = h("ul", { class: "legend tokens" });
  const show = (chosen) => {
    root.dataset.by = chosen;
    paint(root, chosen);
    explained.replaceChildren(...legend(root, chosen).filter(Boolean));
  };
  const shown = Object.entries(QUANTITIES).filter(([key]) => key !== "policy" || policiesIn(root).length);
  const first = shown.some(([key]) => key === by) ? by : shown[0][0];
  const buttons = shown.map(([key, name], index) =>
    h("label", {}, h("input", { type: "radio", name: "by", value: key, checked: key === first, onchange: () => {
      show(key);
      changed(key);
    } }), h("span", { title: `key ${index + 1}` }, name)),
  );
  const bar = h("div", { class: "palette" }, h("fieldset", { class: "choice" }, h("legend", { class: "unseen" }, "Colour tokens by"), buttons), explained);
  return { bar, show: () => show(bar.querySelector("input:checked").value) };
}

