"use strict";
// What the page does when somebody chooses a metric, a cell of the stage table, or another colouring.
// Everything that comes from data is put in as text (textContent), never as markup.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
  const make = (name, text, attributes = {}) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // Curves

  const curves = read("curves");
  const dashes = { AA: "solid", BB: "solid", AB: "dash", BA: "dashdot", BB2: "dot" };
  const band = (metric) => {
    const { x, y } = metric.points.BB;
    const edge = (sign, more) => ({
      x, y: y.map((v) => v + sign * metric.band), mode: "lines", line: { width: 0 }, hoverinfo: "skip",
      legendgroup: "noise", ...more,
    });
    return [
      edge(-1, { showlegend: false }),
      edge(1, { fill: "tonexty", fillcolor: colour("band"), name: "noise around BB" }),
    ];
  };
  const traces = (metric) => [
    ...(metric.band === null ? [] : band(metric)),
    ...Object.entries(metric.points).map(([arm, { x, y }]) => ({
      x, y, name: curves.arms[arm], mode: x.length > 60 ? "lines" : "lines+markers", marker: { size: 5 },
      line: { color: colour(arm), width: arm === "BB" ? 5 : 2, dash: dashes[arm] },
      hovertemplate: `${arm} %{y:.5g}<extra></extra>`,
    })),
  ];
  const layout = (metric) => {
    const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
    const steps = Math.max(...Object.values(metric.points).map(({ x }) => x.length));
    const text = metric.unit ? `${metric.name} (${metric.unit})` : metric.name;
    return {
      paper_bgcolor: colour("paper"), plot_bgcolor: colour("paper"), font: { color: colour("ink"), size: 14 },
      margin: { l: 10, r: 10, t: 10, b: 10 }, hovermode: "x unified", hoverdistance: -1,
      hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      xaxis: { ...axis, title: { text: "step" }, tickformat: "d", ...(steps <= 12 ? { dtick: 1 } : {}) }, yaxis: { ...axis, title: { text } },
    };
  };
  const numbers = (metric) => {
    const arms = Object.keys(metric.points);
    const steps = [...new Set(arms.flatMap((arm) => metric.points[arm].x))].sort((a, b) => a - b);
    const at = Object.fromEntries(arms.map((arm) => [arm, new Map(metric.points[arm].x.map((x, i) => [x, metric.points[arm].y[i]]))]));
    const table = make("table", undefined, { class: "numbers" });
    const head = table.createTHead().insertRow();
    for (const name of ["step", ...arms]) head.append(make("th", name, { scope: "col" }));
    const body = table.createTBody();
    for (const step of steps) {
      const row = body.insertRow();
      row.append(make("th", step, { scope: "row" }));
      for (const arm of arms) row.append(make("td", at[arm].has(step) ? Number(at[arm].get(step).toPrecision(6)) : "–"));
    }
    document.getElementById("curve-numbers").replaceChildren(table);
  };
  const draw = () => {
    const chosen = document.querySelector("input[name=metric]:checked");
    if (!chosen || !window.Plotly) return;
    const metric = curves.metrics[Number(chosen.value)];
    const chart = document.getElementById("chart");
    chart.dataset.metric = metric.name;
    document.getElementById("band-source").textContent = `${metric.key}. Noise band: ${metric.source}. Drag to zoom, double-click to go back; a click on a name hides its curve.`;
    numbers(metric);
    window.Plotly.react(chart, traces(metric), layout(metric), {
      responsive: true, displayModeBar: false,
    });
  };
  for (const input of document.querySelectorAll("input[name=metric]")) input.addEventListener("change", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();

  // Cells of the stage table

  const cells = read("cells");
  const buttons = [...document.querySelectorAll("button[data-cell]")];
  const gapTable = (rows) => {
    const table = make("table", undefined, { class: "numbers gaps" });
    const head = table.createTHead().insertRow();
    for (const name of cells.head) head.append(make("th", name, { scope: "col" }));
    const body = table.createTBody();
    for (const [field, ...rest] of rows) {
      body.insertRow().append(make("th", field, { scope: "row" }), ...rest.map((text) => make("td", text)));
    }
    const box = make("div", undefined, { class: "scroll", tabindex: "0", role: "region", "aria-label": "what differs" });
    box.append(table);
    return box;
  };
  const show = (button) => {
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    for (const each of buttons) each.tabIndex = each === button ? 0 : -1;
    const shown = cells.found[button.dataset.cell].flatMap((finding) => {
      const sentence = make("p");
      sentence.append(make("strong", `${finding.judged}: `), finding.sentence);
      const parts = [make("h3", finding.title), sentence];
      if (finding.hint) parts.push(make("p", `Hint: ${finding.hint}`));
      if (finding.gaps) parts.push(gapTable(finding.gaps));
      if (finding.samples) parts.push(make("p", `Samples: ${finding.samples}`, { class: "note" }));
      return parts;
    });
    document.getElementById("cell").replaceChildren(...shown);
  };
  // Arrow keys move within the table, so that it is one stop for the Tab key.
  const move = (button, key) => {
    const row = [...button.closest("tr").querySelectorAll("button")];
    if (key === "ArrowLeft" || key === "ArrowRight") return row[row.indexOf(button) + (key === "ArrowRight" ? 1 : -1)];
    const step = button.closest("td").dataset.step;
    const column = [...button.closest("table").querySelectorAll(`td[data-step="${step}"] button`)];
    return column[column.indexOf(button) + (key === "ArrowDown" ? 1 : -1)];
  };
  for (const button of buttons) {
    button.addEventListener("click", () => show(button));
    button.addEventListener("keydown", (event) => {
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      const next = move(button, event.key);
      if (next) { next.focus(); show(next); }
    });
  }
  const first = document.querySelector("button[data-cell].first") ?? buttons[0];
  if (first) show(first);

  // Colours of the tokens

  for (const input of document.querySelectorAll("input[name=colour]")) {
    input.addEventListener("change", () => { document.body.dataset.colour = input.value; });
  }
})();
