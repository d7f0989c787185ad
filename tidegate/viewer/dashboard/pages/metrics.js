// Curves of every metric of the run.
import { curvesView } from "./curves.js";
import { h } from "./dom.js";

export async function metricsPage(main) {
  const view = await curvesView();
  main.replaceChildren(h("div", { class: "heading" }, h("h1", {}, "Metrics")), view.element);
  main.dataset.up = "#/";
  return async () => {
    await view.redraw();
    return false;
  };
}
