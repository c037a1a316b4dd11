"use strict";
// Shows the values at the round under the pointer, or at the one chosen with the arrow keys.
for (const chart of document.querySelectorAll(".chart")) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  chart.append(tip);
  for (const svg of chart.querySelectorAll("svg")) {
    const series = JSON.parse(svg.dataset.series).reverse();
    const rounds = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
    let chosen = rounds.length - 1;
    const [left, right, top, bottom, most] = ["left", "right", "top", "bottom", "max"].map((k) => Number(svg.dataset[k]));
    const cursor = document.createElementNS(svg.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    const show = () => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const round = rounds[chosen];
      const x = left + (round / most) * (right - left);
      cursor.setAttribute("d", `M${x} ${top}V${bottom}`);
      tip.replaceChildren(`round ${round}`);
      for (const one of series) {
        const point = one.points.find((p) => p[0] === round);
        if (!point) continue;
        const row = document.createElement("div");
        const swatch = document.createElementNS(svg.namespaceURI, "svg");
        const line = document.createElementNS(svg.namespaceURI, "path");
        const value = document.createElement("b");
        swatch.setAttribute("viewBox", "0 0 26 10");
        line.setAttribute("class", `line ${one.style}`);
        line.setAttribute("d", "M1 5H25");
        value.textContent = point[1].toPrecision(3);
        swatch.append(line);
        row.append(swatch, one.label, value);
        tip.append(row);
      }
      tip.hidden = false;
      const place = box.left - chart.getBoundingClientRect().left + x / scale;
      const fits = place + 14 + tip.offsetWidth <= chart.clientWidth;
      tip.style.left = `${fits ? place + 14 : Math.max(0, place - 14 - tip.offsetWidth)}px`;
    };
    const hide = () => {
      tip.hidden = true;
      cursor.setAttribute("d", "");
    };
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const at = (((event.clientX - box.left) * scale - left) / (right - left)) * most;
      chosen = rounds.reduce((best, r, i) => (Math.abs(r - at) < Math.abs(rounds[best] - at) ? i : best), 0);
      show();
    };
    const press = (event) => {
      const last = rounds.length - 1;
      const next = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") return hide();
      if (next === undefined) return undefined;
      event.preventDefault();
      chosen = Math.min(Math.max(next, 0), last);
      return show();
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("keydown", press);
    svg.addEventListener("focus", () => svg.matches(":focus-visible") && show());
    svg.addEventListener("blur", hide);
  }
}
