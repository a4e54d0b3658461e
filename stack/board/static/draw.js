// Turns what charts.py computed into marks on the screen: charts by Plotly, figures and tables by hand. Names are foreign text: textContent only.
"use strict";
const draw = (() => {
  const MARGIN = { l: 54, r: 10, t: 8, b: 22 };
  const charts = new Set(); // elements that hold a chart, for the shared crosshair

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  };

  // Makes `old` say what `fresh` says and keeps its elements: focus, scroll positions and half-made clicks live in them.
  const match = (old, fresh) => {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const [have, want] = [[...old.childNodes], [...fresh.childNodes]];
    for (const extra of have.slice(want.length)) extra.remove();
    want.forEach((node, i) => {
      if (!have[i]) old.append(node);
      else if (have[i].nodeName !== node.nodeName) have[i].replaceWith(node);
      else if (node.nodeType !== Node.TEXT_NODE) match(have[i], node);
      else if (have[i].data !== node.data) have[i].data = node.data;
    });
  };
  const put = (element, fresh) => {
    const old = element.firstElementChild;
    if (old && element.childElementCount === 1 && old.tagName === fresh.tagName) match(old, fresh);
    else element.replaceChildren(fresh);
  };

  // --- colours and time

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const styles = { true: new Map(), false: new Map() }; // by theme: asking the browser for styles is slow
  const colour = (name) => {
    const known = styles[dark.matches];
    if (!known.has(name)) known.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    return known.get(name);
  };
  const palette = () => Array.from({ length: 10 }, (_, i) => colour(`line-${i}`));
  const faint = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

  // Plotly shows every date as UTC; times are moved so that it shows this browser's. One offset for a whole range, that of its end: where clocks
  // are set back, an axis would else run back too.
  const offset = (end) => new Date(end).getTimezoneOffset() * 60000;
  const shift = (ms, end) => ms - offset(end);
  const unshift = (ms, end) => ms + offset(end);
  const clock = (ms, span, end = ms) => {
    const text = new Date(shift(ms, end)).toISOString();
    return span > 20 * 3600e3 ? `${text.slice(0, 10)} ${text.slice(11, 16)}` : text.slice(11, 19);
  };
  const dateFormat = (span) => (span <= 10 * 60e3 ? "%H:%M:%S" : span <= 36 * 3600e3 ? "%H:%M" : span <= 4 * 86400e3 ? "%d %b %H:%M" : "%d %b");

  // --- one tooltip for all

  let tip = null;
  const hideTip = () => {
    if (tip) tip.hidden = true;
    for (const chart of charts) if (chart.cross) chart.cross.hidden = true;
  };
  const showTip = (event, title, rows, notes) => {
    if (!tip) {
      tip = make("div", { class: "tip", role: "presentation" });
      document.body.append(tip);
    }
    tip.replaceChildren(
      make("div", { class: "tip-title", text: title }),
      ...rows.map((row) => {
        const swatch = make("i", { class: "swatch" });
        swatch.style.background = row.colour || "transparent";
        return make("div", { class: row.strong ? "tip-row strong" : "tip-row" }, swatch, make("span", { class: "tip-name", text: row.name }), make("b", { text: row.value }));
      }),
      ...notes.map((note) => {
        const swatch = make("i", { class: "swatch bar" });
        swatch.style.background = note.colour;
        return make("div", { class: "tip-note" }, swatch, make("span", { text: note.text }));
      }),
    );
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
  };

  // The same moment in every chart.
  const cross = (ms) => {
    for (const chart of charts) {
      if (!chart.isConnected) {
        charts.delete(chart);
        continue;
      }
      if (!chart.drawnOnce) continue;
      const { start, end } = chart.shown;
      const inside = chart.clientWidth - chart.left - chart.right;
      const at = (ms - start) / (end - start);
      if (!chart.cross || !chart.cross.isConnected) {
        chart.cross = make("div", { class: "cross" });
        chart.append(chart.cross);
      }
      chart.cross.hidden = at < 0 || at > 1;
      chart.cross.style.left = `${chart.left + at * inside}px`;
      chart.cross.style.top = `${MARGIN.t}px`;
      chart.cross.style.bottom = `${MARGIN.b}px`;
    }
  };

  // --- charts

  const xs = (drawn, size) => Array.from({ length: size }, (_, i) => shift(drawn.start + i * drawn.step, drawn.end));

  const axisFont = () => ({ family: colour("font") || "sans-serif", size: 11, color: colour("muted") });

  // Wide enough for its words; equal for most, so that panels under each other line up.
  const room = (axis) => (axis ? Math.max(MARGIN.l, Math.max(0, ...axis.ticktext.map((text) => text.length)) * 6.6 + 10) : MARGIN.r);

  const layoutOf = (element, drawn, extra) => ({
    width: Math.max(element.clientWidth, 80), height: Math.max(element.clientHeight, 60), autosize: false,
    margin: { ...MARGIN, l: (element.left = room(extra.yaxis)), r: (element.right = room(extra.yaxis2)), pad: 0 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: false, dragmode: "zoom", font: axisFont(),
    xaxis: {
      type: "date", range: [shift(drawn.start, drawn.end), shift(drawn.end, drawn.end)], tickformat: dateFormat(drawn.end - drawn.start), nticks: Math.max(2, Math.floor(element.clientWidth / 85)),
      gridcolor: colour("grid"), linecolor: colour("grid"), zeroline: false, tickfont: axisFont(), ticks: "", automargin: false,
    },
    ...extra,
  });

  const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false, responsive: false, scrollZoom: false, displaylogo: false };

  const markShapes = (drawn, marks) => {
    const at = (ms) => shift(ms, drawn.end);
    return marks.flatMap((group) =>
      group.marks.flatMap((mark) => {
        const line = { type: "line", xref: "x", yref: "paper", y0: 0, y1: 1, line: { color: colour(`mark-${group.colour}`), width: 1, dash: "dot" } };
        const from = Math.max(mark.from, drawn.start);
        const to = Math.min(mark.to, drawn.end);
        if (to < from) return [];
        const foot = { type: "rect", xref: "x", yref: "paper", x0: at(from), x1: at(Math.max(to, from)), y0: -0.02, y1: 0, line: { width: 2, color: colour(`mark-${group.colour}`) }, fillcolor: colour(`mark-${group.colour}`) };
        if (to === from) return [{ ...line, x0: at(from), x1: at(from) }, foot];
        const region = { type: "rect", layer: "below", xref: "x", yref: "paper", x0: at(from), x1: at(to), y0: 0, y1: 1, line: { width: 0 }, fillcolor: faint(colour(`mark-${group.colour}`), 0.09) };
        return [region, foot];
      }),
    );
  };

  const marksNear = (marks, ms, slack, end) =>
    marks.flatMap((group) =>
      group.marks
        .filter((mark) => mark.from - slack <= ms && ms <= mark.to + slack)
        .slice(-6)
        .map((mark) => ({ colour: colour(`mark-${group.colour}`), text: `${group.name}: ${mark.title}${mark.to > mark.from ? "" : ` at ${clock(mark.from, 0, end)}`}` })),
    );

  const lonely = (values) => values.some((v, i) => v !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);

  const highest = (series, stacked) => {
    let top = -Infinity;
    let bottom = Infinity;
    if (stacked && series.length) {
      for (let i = 0; i < series[0].values.length; i += 1) top = Math.max(top, series.reduce((sum, one) => sum + (one.values[i] || 0), 0));
      return [0, top];
    }
    for (const one of series) for (const v of one.values) if (v !== null) [top, bottom] = [Math.max(top, v), Math.min(bottom, v)];
    return [bottom, top];
  };

  // Which part of the axis is shown. A threshold far above everything is named in the legend and does not flatten the lines.
  const yRange = (panel, series, unit, withThreshold) => {
    let [low, high] = highest(series, panel.shape === "stack");
    if (unit === "bool_on_off") return [-0.1, 1.15];
    if (!Number.isFinite(high)) return [0, 1];
    if (unit === "percentunit" && panel.fullScale && high <= 1.0001 && low >= 0) return [0, 1.02];
    const limit = withThreshold && panel.threshold ? panel.threshold.value : null;
    if (limit !== null && (limit <= high * 3 || high <= 0)) high = Math.max(high, limit * 1.04);
    if (low >= 0) low = 0;
    if (high === low) high = low + (Math.abs(low) || (unit === "percentunit" ? 0.1 : 1));
    return [low < 0 ? low - (high - low) * 0.05 : 0, high + (high - low) * 0.05];
  };

  const yAxis = (range, unit, height) => {
    const values = units.ticks(range[0], range[1], unit, Math.max(2, Math.floor((height - MARGIN.t - MARGIN.b) / 38)));
    return {
      range, tickvals: values, ticktext: values.map((v) => escapeText(units.format(v, unit))), tickmode: "array", fixedrange: true,
      gridcolor: colour("grid"), zeroline: false, tickfont: axisFont(), automargin: false, ticks: "",
    };
  };

  // Plotly reads a little HTML in its texts.
  const escapeText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // Where figures come with the page there is nobody to ask for another range: the picture itself is zoomed, a double click undoes it.
  const zoom = (element, from, to) => {
    element.shown = { start: from, end: to };
    element.quiet = true;
    Plotly.relayout(element, { "xaxis.range": [shift(from, element.range.end), shift(to, element.range.end)] }).then(() => {
      element.quiet = false;
    });
  };

  const react = (element, traces, layout, { zoomed, alone }) => {
    const first = !element.drawnOnce;
    element.drawnOnce = true;
    element.shown = { start: element.range.start, end: element.range.end };
    Plotly.react(element, traces, layout, alone ? { ...CONFIG, doubleClick: "reset" } : CONFIG);
    if (!first) return;
    charts.add(element);
    element.on("plotly_relayout", (change) => {
      if (element.quiet || !("xaxis.range[0]" in change)) return;
      const read = (value) => unshift(typeof value === "number" ? value : Date.parse(`${String(value).replace(" ", "T")}Z`), element.range.end);
      zoomed(Math.round(read(change["xaxis.range[0]"])), Math.round(read(change["xaxis.range[1]"])));
    });
    if (element.listening) return; // a purge takes away what Plotly listens to, and not this
    element.listening = true;
    element.addEventListener("mousemove", (event) => {
      if (!element.drawnOnce) return undefined;
      const { start, end } = element.shown;
      const box = element.getBoundingClientRect();
      const at = (event.clientX - box.left - element.left) / (box.width - element.left - element.right);
      const high = (event.clientY - box.top - MARGIN.t) / (box.height - MARGIN.t - MARGIN.b);
      if (at < 0 || at > 1 || high < 0 || high > 1 || event.buttons) return hideTip();
      const drawn = element.range;
      const index = Math.round((start + at * (end - start) - drawn.start) / drawn.step);
      const ms = drawn.start + index * drawn.step;
      cross(ms);
      element.hover(event, index, ms, 1 - high);
      return undefined;
    });
    element.addEventListener("mouseleave", hideTip);
  };

  // What lies under each series of a stack and up to where it reaches; null where nobody has a figure, which is no zero.
  const bands = (series) => {
    let low = (series[0] ? series[0].values : []).map((_, i) => (series.every((one) => one.values[i] === null) ? null : 0));
    return series.map((one) => {
      const under = low;
      low = under.map((sum, i) => (sum === null ? null : sum + (one.values[i] || 0)));
      return { low: under, high: low };
    });
  };

  // The outline of a band, one closed stretch between any two holes.
  const outline = (x, { low, high }) => {
    const edge = { x: [], y: [] };
    for (let i = 0; i < x.length; i += 1) {
      const first = i;
      while (i < x.length && high[i] !== null) i += 1;
      if (i === first) continue;
      edge.x.push(...x.slice(first, i), ...x.slice(first, i).reverse(), null);
      edge.y.push(...high.slice(first, i), ...low.slice(first, i).reverse(), null);
    }
    return edge;
  };

  // Where only a bound is known: a dotted line at it, and below the first one a band down to 0.
  const beyond = (line, one, mark, own) => {
    const y = one.values.map((v, at) => (one.marks[at] === mark ? v : null));
    return { ...line, y, mode: lonely(y) ? "lines+markers" : "lines", line: { color: own, width: 1, dash: "dot" }, ...(mark === "<" ? { fill: "tozeroy", fillcolor: faint(own, 0.09) } : { fill: "none" }) };
  };

  const lines = (element, panel, drawn, context) => {
    const { marks, hidden, colours } = context;
    const shown = drawn.series.filter((one) => !hidden.has(one.name));
    const size = shown.length ? shown[0].values.length : 0;
    const x = xs(drawn, size);
    const stacked = panel.shape === "stack";
    const second = panel.shape === "lines" ? shown.find((one) => one.unit !== panel.unit) : undefined;
    const banded = stacked ? bands(shown) : [];
    const traces = shown.flatMap((one, i) => {
      const own = colours(one.name);
      const y = stacked ? banded[i].high : one.marks ? one.values.map((v, at) => (one.marks[at] ? null : v)) : one.values;
      const line = {
        type: "scatter", x, y, mode: lonely(y) ? "lines+markers" : "lines", marker: { size: 4, color: own },
        line: { color: own, width: stacked ? (one.values.some(Boolean) ? 1 : 0) : 1.6 }, hoverinfo: "skip", connectgaps: false, yaxis: one.unit === panel.unit || !second ? "y" : "y2",
        ...(!stacked && shown.length <= 2 ? { fill: "tozeroy", fillcolor: faint(own, 0.09) } : {}),
      };
      if (!stacked && one.marks) return [line, ...["<", ">"].map((mark) => beyond(line, one, mark, own))];
      return stacked ? [{ type: "scatter", ...outline(x, banded[i]), mode: "none", fill: "toself", fillcolor: faint(own, 0.35), hoverinfo: "skip" }, line] : [line];
    });
    const mine = second ? shown.filter((one) => one.unit === panel.unit) : shown;
    const range = yRange(panel, mine, panel.unit, true);
    const shapes = markShapes(drawn, marks);
    const annotations = [];
    const limit = panel.threshold ? panel.threshold.value : null;
    if (limit !== null && limit <= range[1] && limit >= range[0]) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: limit, y1: limit, line: { color: colour("bad"), width: 1.2, dash: "dash" } });
      annotations.push({
        xref: "paper", x: 1, xanchor: "right", yref: "y", y: limit, yanchor: limit > range[0] + (range[1] - range[0]) * 0.85 ? "top" : "bottom", showarrow: false,
        text: escapeText(units.format(limit, panel.unit)), font: { ...axisFont(), color: colour("bad") },
      });
    }
    const extra = { yaxis: yAxis(range, panel.unit, element.clientHeight), shapes, annotations };
    if (second) {
      const other = yRange({ ...panel, fullScale: false }, shown.filter((one) => one.unit !== panel.unit), second.unit, false);
      extra.yaxis2 = { ...yAxis(other, second.unit, element.clientHeight), overlaying: "y", side: "right", showgrid: false };
    }
    element.range = drawn;
    element.hover = (event, index, ms) => {
      const rows = shown
        .map((one) => ({ name: one.name, raw: one.values[index], value: units.told(one, index), colour: colours(one.name) }))
        .filter((row) => row.raw !== null && row.raw !== undefined)
        .sort((a, b) => b.raw - a.raw);
      const more = rows.length > 14 ? [{ name: `and ${rows.length - 14} more`, value: "" }] : [];
      const told = rows.slice(0, 14);
      if (stacked && rows.length > 1) more.push({ name: "together", value: units.format(rows.reduce((sum, row) => sum + row.raw, 0), panel.unit), strong: true });
      showTip(event, clock(ms, drawn.end - drawn.start, drawn.end), [...told, ...more], marksNear(marks, ms, Math.max(drawn.step, ((drawn.end - drawn.start) * 5) / element.clientWidth), drawn.end));
    };
    react(element, traces, layoutOf(element, drawn, extra), context);
  };

  const heatmap = (element, panel, drawn, context) => {
    const { marks } = context;
    const size = drawn.cells.length ? drawn.cells[0].length : 0;
    const name = (bound) => (bound === null ? "∞" : units.format(bound, panel.unit));
    const z = drawn.cells.map((row) => row.map((v) => (v ? Math.sqrt(v) : null)));
    const scale = Array.from({ length: 5 }, (_, i) => [i / 4, colour(`heat-${i}`)]);
    const trace = {
      type: "heatmap", x: xs(drawn, size), y: drawn.bounds.map((_, i) => i), z, colorscale: scale, zmin: 0, zauto: false, zmax: z.flat().reduce((a, b) => Math.max(a, b || 0), 0) || 1,
      showscale: false, hoverinfo: "skip", ygap: 1, xgap: 0,
    };
    const every = Math.ceil(drawn.bounds.length / Math.max(2, Math.floor((element.clientHeight - 30) / 20)));
    const marked = drawn.bounds.map((_, i) => i).filter((i) => (drawn.bounds.length - 1 - i) % every === 0);
    const shapes = markShapes(drawn, marks);
    const yaxis = {
      range: [-0.5, drawn.bounds.length - 0.5], tickmode: "array", tickvals: marked.map((i) => i + 0.5), ticktext: marked.map((i) => escapeText(name(drawn.bounds[i]))),
      fixedrange: true, showgrid: false, zeroline: false, tickfont: axisFont(), automargin: false, ticks: "",
    };
    element.range = drawn;
    element.hover = (event, index, ms, up) => {
      const at = Math.min(drawn.bounds.length - 1, Math.floor(up * drawn.bounds.length));
      const total = drawn.cells.reduce((sum, row) => sum + (row[index] || 0), 0);
      const below = at > 0 ? name(drawn.bounds[at - 1]) : "0";
      const value = drawn.cells[at] ? drawn.cells[at][index] : null;
      showTip(
        event, clock(ms, drawn.end - drawn.start, drawn.end),
        [
          { name: `${below} to ${name(drawn.bounds[at])}`, value: units.format(value, "short"), colour: colour("heat-3"), strong: true },
          { name: "share of all at this time", value: total ? units.format((value || 0) / total, "percentunit") : "–" },
        ],
        marksNear(marks, ms, drawn.step, drawn.end),
      );
    };
    react(element, [trace], layoutOf(element, drawn, { yaxis, shapes }), context);
  };

  // --- figures and tables

  // As Grafana colours it: from the limit on it is bad; what nothing judges is neutral, because green would be a promise.
  const judged = (value, unit, limit) => {
    if (limit === null) return unit === "bool_on_off" ? (value >= 1 ? "good" : value < 0 ? "absent" : "bad") : "";
    return value >= limit ? "bad" : "good";
  };

  const numbers = (element, panel, drawn) => {
    const grid = make("div", { class: drawn.series.length > 8 ? "numbers many" : drawn.series.length === 1 ? "numbers one" : "numbers" });
    for (const one of drawn.series) {
      const state = judged(one.value, one.unit, one.unit === panel.unit ? panel.limit : null);
      grid.append(make("div", { class: `number ${state}` }, make("span", { class: "number-name", text: one.name, title: one.name }), make("strong", { text: units.told(one) })));
    }
    put(element, grid);
  };

  const table = (element, panel, drawn, context) => {
    const firstFigure = drawn.columns.findIndex((column) => !("label" in column));
    const head = make("tr", {}, ...drawn.columns.map((column) => make("th", { scope: "col", class: "label" in column ? "" : "figure", text: "label" in column ? column.label.replace(/_/g, " ") : column.name })));
    const rows = drawn.rows.map((row) =>
      make(
        "tr", {},
        ...row.map((cell, i) => {
          const column = drawn.columns[i];
          if (!("label" in column)) {
            const state = cell !== null && i === firstFigure ? judged(cell, column.unit, panel.limit) : cell !== null && column.unit === "bool_on_off" ? judged(cell, column.unit, null) : "";
            return make("td", { class: `figure ${state}`, text: units.format(cell, column.unit) });
          }
          if (column.label === "severity") return make("td", {}, make("span", { class: `severity ${["critical", "warning", "info"].includes(cell) ? cell : ""}`, text: cell }));
          if (column.label === "alertname" && context.runbook(cell)) return make("td", {}, make("a", { href: context.runbook(cell), text: cell }));
          return make("td", { text: cell });
        }),
      ),
    );
    put(element, make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  };

  return { make, put, palette, clock, offset, hideTip, zoom, numbers, table, lines, heatmap };
})();
