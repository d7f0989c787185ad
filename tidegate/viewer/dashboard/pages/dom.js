// Elements, numbers and the server. Text is put into the page as text nodes only, never as markup.

// The answers that a report has instead of a server, by request; null in the dashboard.
export const embedded = JSON.parse(document.getElementById("data")?.textContent ?? "null");

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (embedded && name === "href") continue; // to a page that a report does not have
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

export class Refusal extends Error {}

let reading = new AbortController();

// What was asked for by a page that is no longer shown need not be answered.
export function forgetRequests() {
  reading.abort();
  reading = new AbortController();
}

export async function ask(path, query = {}, { signal = reading.signal } = {}) {
  if (embedded) return embedded[path];
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const words = new URLSearchParams(given.flatMap(([name, value]) => [value].flat().map((one) => [name, one]))).toString();
  let response;
  try {
    // Relative: of several runs, each has its page below /run/.
    response = await fetch(`api/${path}${words ? `?${words}` : ""}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is `tidegate view` still running?");
  }
  const found = await response.json().catch(() => null);
  if (!response.ok) throw new Refusal(found?.error?.message ?? `The server answered ${response.status}.`);
  return found;
}

// As text.py writes numbers; rewards have three decimals.
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

export const whole = (value) => number(value, 0);

export function brief(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size > 0 && size < 1e-4 ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
  return text.replaceAll("-", "−");
}

export function bytes(value) {
  const [size, unit] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([one]) => value >= one) ?? [1, "bytes"];
  return `${brief(Number((value / size).toPrecision(3)))} ${unit}`;
}

export const signed = (value, digits = 3) =>
  value === null || value === undefined ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value), digits)}`;

export const percent = (value, digits = 0) => (value === null || value === undefined ? "–" : `${number(100 * value, digits)}%`);

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "nothing written yet";
  if (seconds < 90) return `written ${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `written ${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `written ${Math.round(seconds / 3600)} h ago`;
  return `written ${Math.round(seconds / 86400)} days ago`;
}

export const moment = (seconds) => (seconds === null || seconds === undefined ? null : new Date(1000 * seconds).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }));

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

// A place in the page's address: path segments, and what is chosen there.
export function link(segments, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const words = new URLSearchParams(given).toString();
  return `#/${segments.map((one) => encodeURIComponent(one)).join("/")}${words ? `?${words}` : ""}`;
}

export function place() {
  const [path, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const decoded = (one) => {
    try {
      return decodeURIComponent(one);
    } catch {
      return one;
    }
  };
  return { segments: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(words) };
}

export const tag = (text, tone = "") => h("span", { class: `tag ${tone}` }, text);

const TONES = { trained: "accent", stepped: "accent", filtered: "quiet", stale: "sand", failed: "bad", cancelled: "bad", abandoned: "sand", eval: "quiet" };
export const stateTag = (state) => tag(state, TONES[state] ?? "quiet");

export const rewardTone = (reward) => (reward === null ? "quiet" : reward > 0 ? "good" : "bad");

// A bar that is filled by a share from 0 to 1.
export const bar = (share) => h("span", { class: "bar", "aria-hidden": "true" }, h("i", { style: { "--share": percent(Math.max(0, Math.min(1, share ?? 0)), 1) } }));

// The page of an episode in a list.
export function episodeLink({ kind, step, line, group }) {
  if (kind === "failed") return link(["failures", "episode", line]);
  if (kind === "stale") return link(["stale", "group", group, "episode", line]);
  if (kind === "eval") return link(["eval", step, "episode", line]);
  return link(group ? ["step", step, "group", group, "episode", line] : ["step", step, "episode", line]);
}

// One small bar an episode, as high as its reward is between the least and the most.
export function rewardBars(members, low = 0, high = 1) {
  const rewards = members.map((one) => one.reward).filter((one) => one !== null);
  const bottom = Math.min(low, ...rewards);
  const top = Math.max(high, ...rewards);
  const said = members.map((one) => (one.reward === null ? one.outcome : brief(one.reward))).join(", ");
  return h(
    "span",
    { class: "bars", role: "img", "aria-label": `rewards: ${said}`, title: `rewards by slot: ${said}` },
    members.map((one) => {
      if (one.reward === null) return h("i", { class: "none" });
      const share = (one.reward - bottom) / (top - bottom || 1);
      return h("i", { class: share > 0.5 ? "high" : "low", style: { "--high": `${10 + 90 * share}%` } });
    }),
  );
}

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value, title]) =>
      h("div", { title }, h("dt", {}, name), h("dd", {}, value)),
    ),
  );
}

export function crumbs(parts) {
  return h(
    "nav",
    { class: "crumbs", "aria-label": "Where this is" },
    parts.map(([text, href], index) => [
      index ? h("span", { "aria-hidden": "true" }, "›") : null,
      href ? h("a", { href }, text) : h("span", { "aria-current": "page" }, text),
    ]),
  );
}

export function neighbours(before, after, what) {
  return h(
    "span",
    { class: "neighbours" },
    before ? h("a", { href: before, class: "button", "data-go": "before", title: `${what} before ( [ )` }, "← before") : null,
    after ? h("a", { href: after, class: "button", "data-go": "after", title: `next ${what} ( ] )` }, "next →") : null,
  );
}

export const more = (text, act) =>
  h("button", { type: "button", class: "more", onclick: ({ target }) => pressed(target, act) }, text);

// A button that asks the server: it can't be pressed twice, and says why where there is no answer.
export async function pressed(button, act) {
  button.disabled = true;
  try {
    await act();
  } catch (error) {
    if (error.name === "AbortError") return;
    button.disabled = false;
    button.textContent = `${error.message} Try again`;
  }
}
