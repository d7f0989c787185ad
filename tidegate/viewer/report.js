// Reading values off a chart: the nearest step under the pointer, every series' value there.
function readable(figure) {
  const { x, box, series } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector(":scope > svg");
  const cursor = svg.querySelector(".cursor");
  const tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
  const hide = () => {
    tip.hidden = true;
    delete figure.dataset.step;
    cursor.classList.remove("on");
  };
  const nearest = (points, at) =>
    points.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best), points[0]);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const rect = svg.getBoundingClientRect();
    const unit = ((event.clientX - rect.left) / rect.width) * box[2];
    if (unit < box[0] - 8 || unit > box[1] + 8) return hide();
    const wanted = x[0] + ((unit - box[0]) / (box[1] - box[0])) * (x[1] - x[0]);
    const all = series.flatMap((one) => one.points);
    const step = nearest(all, wanted)[0];
    figure.dataset.step = Math.round(step);
    const lines = [`step ${Math.round(step)}`];
    for (const one of series) {
      const [at, value] = nearest(one.points, step);
      if (at === step) lines.push(`${one.name}: ${value.toLocaleString("en", { maximumSignificantDigits: 4 })}`);
    }
    tip.replaceChildren(
      ...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })),
    );
    const place = box[0] + ((step - x[0]) / (x[1] - x[0])) * (box[1] - box[0]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.classList.add("on");
    tip.hidden = false;
    tip.style.top = `${rect.top - figure.getBoundingClientRect().top}px`;
    const left = (place / box[2]) * rect.width;
    tip.style.left = `${left + (left > rect.width / 2 ? -tip.offsetWidth - 12 : 12)}px`;
  });
}
for (const figure of document.querySelectorAll("figure[data-chart]")) readable(figure);
