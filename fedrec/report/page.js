"use strict";
// Shows the values at the round under the pointer.
for (const chart of document.querySelectorAll(".chart")) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  chart.append(tip);
  for (const svg of chart.querySelectorAll("svg")) {
    const series = JSON.parse(svg.dataset.series).reverse();
    const rounds = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))];
    const [left, right, top, bottom, most] = ["left", "right", "top", "bottom", "max"].map((k) => Number(svg.dataset[k]));
    const cursor = document.createElementNS(svg.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    svg.append(cursor);
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const at = (((event.clientX - box.left) * scale - left) / (right - left)) * most;
      const round = rounds.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
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
        value.textContent = point[1].toFixed(3);
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
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
}
