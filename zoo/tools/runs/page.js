// Over a chart: a line at the nearest step, and the value of each curve there.
"use strict";
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { lines, share } = JSON.parse(svg.dataset.chart);
  const figure = svg.closest("figure"), cursor = svg.querySelector(".cursor");
  const tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
  const show = (value) => share ? (100 * value).toFixed(1) + " %" : Number(value.toPrecision(5)).toLocaleString("en");
  const nearest = (points, x) => points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const found = lines.map((line) => ({ line, point: nearest(line.points, x) }));
    const at = found.reduce((best, one) => Math.abs(one.point[0] - x) < Math.abs(best.point[0] - x) ? one : best).point;
    cursor.setAttribute("x1", at[0]);
    cursor.setAttribute("x2", at[0]);
    cursor.style.visibility = "visible";
    tip.replaceChildren("step " + at[1].toLocaleString("en"));
    for (const { line, point } of found) {
      const row = tip.appendChild(document.createElement("div"));
      row.textContent = (lines.length > 1 ? line.name + ": " : "") + show(point[2]) + (point[1] === at[1] ? "" : " (step " + point[1].toLocaleString("en") + ")");
      row.style.color = line.colour;
    }
    tip.hidden = false;
    const left = at[0] / svg.viewBox.baseVal.width * box.width;
    tip.style.left = (left > box.width / 2 ? left - tip.offsetWidth - 10 : left + 10) + "px";
    tip.style.top = "2.2em";
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.style.visibility = "hidden"; });
}
