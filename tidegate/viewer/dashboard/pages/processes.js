// The processes of the run: their load over time, and the ends of their logs.
import { figure } from "./charts.js";
import { ask, bytes, crumbs, h, link, more, number, whole } from "./dom.js";

const MOST = 64000;
const HEADS = ["process", "log", "cores now", "mean", "peak", "memory now", "peak", "processes"];

const cores = (value) => number(value, 2);
const gigabytes = (value) => (value === null || value === undefined ? "–" : bytes(value * 1e9));

function row(one) {
  const logged = one.log === null ? "–" : h("a", { href: link(["processes", "log", one.name]), "data-row": true }, one.log ? bytes(one.log) : "empty");
  return h("tr", {}, h("th", { scope: "row" }, one.name),
    [logged, cores(one.cpu), cores(one.cpu_mean), cores(one.cpu_peak), gigabytes(one.memory), gigabytes(one.memory_peak), one.processes ? whole(one.processes) : "–"].map((cell) => h("td", { class: "number" }, cell)));
}

export async function processesPage(main) {
  const draw = async () => {
    const found = await ask("processes");
    const measured = found.processes.some((one) => one.cpu_mean !== undefined);
    main.replaceChildren(
      h("div", { class: "heading" }, h("h1", {}, "Processes")),
      measured ? h("p", { class: "soft" }, "Sampled every five seconds on the trainer's machine. Each process counts with all that it has started; processes on other machines are not recorded.")
        : h("p", { class: "soft" }, "The load of this run's processes is not recorded: the run is of an older version, or has just started, or its system has no /proc."),
      found.charts.length ? h("div", { class: "charts" }, found.charts.map(figure)) : "",
      found.processes.length ? h("div", { class: "card wide after" }, h("table", { class: "list" },
        h("thead", {}, h("tr", {}, HEADS.map((name, index) => h("th", { scope: "col", class: index ? "number" : "" }, name)))),
        h("tbody", {}, found.processes.map(row)))) : "");
  };
  await draw();
  main.dataset.up = "#/";
  return async () => {
    if (!main.querySelector("figure:hover, figure:focus-within") && !main.contains(document.activeElement?.closest("table"))) await draw();
    return false;
  };
}

// The end of a log, which follows the file until the reader scrolls up.
export async function logPage(main, name) {
  let most = MOST;
  const text = h("pre", { class: "log", tabindex: 0, "aria-label": `End of the log ${name}` });
  const told = h("p", { class: "soft", role: "status" });
  const load = async () => {
    const follows = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    const found = await ask("log", { name, most });
    text.textContent = found.text || "The log is empty.";
    told.replaceChildren(found.shown < found.size ? `The last ${bytes(found.shown)} of ${bytes(found.size)}. ` : `${bytes(found.size)}. `, h("code", {}, found.path), " ",
      found.shown < found.size && most < 2000000 ? more("more", () => {
        most = Math.min(2000000, most * 8);
        return load();
      }) : "");
    if (follows) text.scrollTop = text.scrollHeight;
  };
  main.replaceChildren(crumbs([["Processes", "#/processes"], [name, null]]), h("div", { class: "heading" }, h("h1", {}, `Log of ${name}`)), told, text);
  main.dataset.up = "#/processes";
  await load();
  text.scrollTop = text.scrollHeight;
  return async () => {
    await load();
    return false;
  };
}
