// The frame of the page: which view is shown, what is new in the run, what the keys do.
import { ago, ask, forgetRequests, h, place, Refusal, whole } from "./dom.js";
import { distributionsPage } from "./distributions.js";
import { chosenBy } from "./episodes.js";
import { evalEpisodePage, evaluationsPage, taskPage } from "./evaluations.js";
import { failedPage, failuresPage, overviewPage, settingsPage } from "./overview.js";
import { searchPage } from "./search.js";
import { logPage, processesPage } from "./processes.js";
import { servicePage } from "./service.js";
import { metricsPage } from "./metrics.js";
import { groupPage, memberPage, stepPage, stepsPage } from "./steps.js";
import { tasksPage } from "./tasks.js";
import { timelinePage } from "./timeline.js";
import { nextTheme } from "./theme.js";
import { choose, hideTip, QUANTITIES } from "./tokens.js";

const main = document.getElementById("content");
const BUSY_MS = 2000;
const IDLE_MS = 10000;

let state = {};
let refresh = null;
let turn = 0;

function view([first, ...rest]) {
  const digits = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);
  const [one, two, three, four] = rest;
  if (first === undefined) return () => overviewPage(main, state);
  if (first === "metrics") return () => metricsPage(main);
  if (first === "distributions") return () => distributionsPage(main);
  if (first === "processes") return one === "log" ? () => logPage(main, two ?? "") : () => processesPage(main);
  if (first === "timeline") return () => timelinePage(main);
  if (first === "tasks") return () => tasksPage(main);
  if (first === "episodes") return () => searchPage(main);
  if (first === "steps") return () => stepsPage(main, state);
  if (first === "service") return () => servicePage(main);
  if (first === "settings") return () => settingsPage(main);
  if (first === "evaluations") return one === "task" ? () => taskPage(main, two ?? "") : () => evaluationsPage(main);
  if (first === "failures") return one === "episode" && digits(two) !== null ? () => failedPage(main, digits(two)) : () => failuresPage(main);
  if (first === "stale" && one === "group" && two !== undefined) {
    return three === "episode" && digits(four) !== null ? () => memberPage(main, null, two, digits(four)) : () => groupPage(main, null, two, state.bound);
  }
  const step = digits(one);
  if (step === null) return null;
  if (first === "eval" && two === "episode" && digits(three) !== null) return () => evalEpisodePage(main, step, digits(three));
  if (first !== "step") return null;
  if (two === undefined) return () => stepPage(main, step);
  if (two === "episode" && digits(three) !== null) return () => memberPage(main, step, null, digits(three));
  if (two !== "group" || three === undefined) return null;
  if (four === "episode" && digits(rest[4]) !== null) return () => memberPage(main, step, three, digits(rest[4]));
  return () => groupPage(main, step, three, state.bound);
}

const PAGES = { processes: "#/processes", metrics: "#/metrics", distributions: "#/distributions", timeline: "#/timeline", tasks: "#/tasks", episodes: "#/episodes", steps: "#/steps", step: "#/steps", evaluations: "#/evaluations", eval: "#/evaluations", failures: "#/failures", stale: "#/episodes", service: "#/service", settings: "#/settings" };

async function show({ keepPlace = false } = {}) {
  const mine = ++turn;
  forgetRequests();
  hideTip();
  refresh = null;
  const { segments } = place();
  const current = segments.length ? PAGES[segments[0]] : "#/";
  for (const one of document.querySelectorAll(".top nav a")) one.toggleAttribute("aria-current", one.getAttribute("href") === current);
  const draw = view(segments);
  const scrolled = scrollY;
  main.setAttribute("aria-busy", "true");
  try {
    if (!draw) throw new Refusal("There is no such page. The links above lead to those that there are.");
    const again = await draw();
    if (mine === turn) refresh = again ?? null;
  } catch (error) {
    if (mine !== turn || error.name === "AbortError") return;
    main.replaceChildren(h("div", { class: "card banner bad", role: "alert" }, h("p", {}, error instanceof Refusal ? error.message : `The page failed: ${error.message}`)));
    if (!(error instanceof Refusal)) console.error(error);
  } finally {
    if (mine === turn) main.removeAttribute("aria-busy");
  }
  const where = segments.join(" ");
  document.title = `${where ? `${where} · ` : ""}${state.name ?? ""} · Tidegate`;
  if (keepPlace) scrollTo(0, scrolled);
  else if (!segments.includes("turn")) scrollTo(0, 0);
}

function showState() {
  document.getElementById("name").textContent = state.name ?? "";
  document.querySelector('.top nav a[href="#/service"]').hidden = !state.service;
  const box = document.getElementById("status");
  const words = { starting: "starting", running: "running", completed: "completed", interrupted: "interrupted", failed: "failed", ended: "ended", quiet: "nothing new", stopped: "stopped without an end record" };
  const ended = ["completed", "interrupted", "failed", "ended"].includes(state.status);
  const meanings = {
    interrupted: "Ctrl-C or SIGTERM; --resume continues the run",
    quiet: "no metrics and no ledger entry for a minute, and no end is recorded",
    stopped: "no file of the run has been written for a minute, and no end is recorded: it was killed, or its machine was lost; --resume continues it",
  };
  const text = [
    state.step === null ? null : `step ${whole(state.step)}${state.planned ? ` of ${whole(state.planned)}` : ""}`,
    ended ? null : ago(state.silence),
  ].filter(Boolean).join(" · ");
  box.replaceChildren(h("span", { class: `light ${state.status}` }, words[state.status] ?? ""), ` ${text}`, state.version === null ? "" : h("span", { class: "version" }, ` · version ${state.version}`));
  box.title = state.why || (meanings[state.status] ?? "");
}

async function poll() {
  let wait = BUSY_MS;
  try {
    const found = await ask("state", {}, { signal: AbortSignal.timeout(20000) });
    const changed = found.stamp !== state.stamp;
    state = Object.assign(state, found);
    showState();
    if (changed && refresh && !document.hidden) {
      const mine = turn;
      const anew = await refresh().catch((error) => (error.name === "AbortError" ? false : Promise.reject(error)));
      if (anew && mine === turn) await show({ keepPlace: true });
    }
    wait = ["starting", "running"].includes(state.status) ? BUSY_MS : IDLE_MS;
  } catch (error) {
    const box = document.getElementById("status");
    box.replaceChildren(h("span", { class: "light lost" }, "no answer"), " is tidegate view still running?");
    wait = BUSY_MS;
    if (!(error instanceof Refusal) && error.name !== "TimeoutError") console.error(error);
  }
  setTimeout(poll, document.hidden ? IDLE_MS : wait);
}

function row(by) {
  const links = [...main.querySelectorAll("[data-row]")];
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.max(0, Math.min(links.length - 1, at + by))].focus();
}

function toTokens() {
  const tokens = [...main.querySelectorAll(".tok.chosen, .flow.sampled .tok, .flow .tok")].filter((one) => one.closest(".flow") && one.getClientRects().length);
  const token = main.querySelector(".flow .tok.chosen") ?? tokens.find((one) => one.closest(".sampled")) ?? tokens[0];
  if (token) choose(token);
}

const follow = (which) => main.querySelector(`[data-go="${which}"]`)?.click();
const goTo = { o: "#/", m: "#/metrics", d: "#/distributions", p: "#/processes", i: "#/timeline", t: "#/tasks", a: "#/episodes", s: "#/steps", e: "#/evaluations", f: "#/failures", v: "#/service", c: "#/settings" };
let going = 0;

function colourBy(index) {
  const key = Object.keys(QUANTITIES)[index];
  const input = main.querySelector(`.palette input[value="${key}"]`);
  if (input && key !== chosenBy()) input.click();
}

const KEYS = {
  j: () => row(1), k: () => row(-1), "[": () => follow("before"), "]": () => follow("after"), m: () => follow("messages"),
  u: () => main.dataset.up && (location.hash = main.dataset.up), x: toTokens, t: nextTheme,
  "?": () => document.getElementById("help").showModal(),
  1: () => colourBy(0), 2: () => colourBy(1), 3: () => colourBy(2), 4: () => colourBy(3),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input[type=text], input[type=number], textarea, select, dialog")) return;
  if (event.key === "Escape") return hideTip();
  if (Date.now() - going < 1500 && goTo[event.key]) {
    going = 0;
    location.hash = goTo[event.key];
  } else if (event.key === "g") going = Date.now();
  else if (KEYS[event.key]) {
    KEYS[event.key]();
    event.preventDefault();
  }
});

document.getElementById("keys").addEventListener("click", KEYS["?"]);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => show());
addEventListener("scroll", hideTip, { passive: true });
document.querySelector(".top .all").hidden = !location.pathname.startsWith("/run/");

try {
  Object.assign(state, await ask("state"));
  showState();
} catch (error) {
  console.error(error);
}
await show();
setTimeout(poll, BUSY_MS);
