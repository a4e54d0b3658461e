// Draws the pictures of a report from what charts.py computed. Names are foreign text: textContent, or escaped where Plotly reads them.
"use strict";
(() => {
  const content = JSON.parse(document.getElementById("data").textContent);
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const CONFIG = { displayModeBar: false, responsive: false, displaylogo: false, showTips: false };
  const places = new Map(); // element of a chart -> what draws it

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) name === "text" ? (element.textContent = value) : element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const escapeText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colourOf = (variant) => colour(`line-${variant % 10}`);
  const faint = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const variantName = (variant) => escapeText(content.variants[variant]);
  const font = () => ({ family: colour("font") || "sans-serif", size: 12, color: colour("muted") });
  const axis = (extra) => ({ gridcolor: colour("grid"), linecolor: colour("edge"), zeroline: false, automargin: true, ...extra });
  const layout = (element, extra) => ({
    width: Math.max(element.clientWidth, 120), height: Math.max(element.clientHeight, 120), margin: { l: 8, r: 12, t: 8, b: 8 }, font: font(), showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("edge"), font: { ...font(), color: colour("text") }, align: "left" }, ...extra,
  });
  const unitOf = (one) => (one.unit ? ` (${one.unit})` : "");

  // Logarithmic where the figures span so much that most would lie on one line.
  const scale = (values, base) => {
    const positive = values.filter((v) => v > 0).sort((a, b) => a - b);
    if (!positive.length || positive.length < values.length) return { rangemode: base };
    const wide = positive[positive.length - 1] / positive[Math.floor(positive.length * 0.02)] > 30;
    if (!wide) return { rangemode: base };
    const steps = positive[positive.length - 1] / positive[0] > 300 ? [1] : [1, 2, 5];
    const first = Math.floor(Math.log10(positive[0]));
    const ticks = Array.from({ length: 12 }, (_, i) => steps.map((step) => Number((step * 10 ** (first + i)).toPrecision(3)))).flat();
    return { type: "log", tickvals: ticks, ticktext: ticks.map((value) => value.toLocaleString("en-US", { maximumSignificantDigits: 3 })) };
  };

  const spread = (element, one) => {
    const traces = one.curves.map((curve) => ({
      type: "scatter", mode: "lines", x: curve.at, y: content.shares.map((share) => share * 100), line: { color: colourOf(curve.variant), width: 2, dash: DASHES[curve.variant % 6] },
      hovertemplate: `${variantName(curve.variant)}: %{y:.4g} % of ${curve.count.toLocaleString("en-US")} requests<br>at most %{x:,.4g} ${escapeText(one.unit)}<extra></extra>`,
    }));
    const xaxis = axis({ title: { text: escapeText(one.title + unitOf(one)), standoff: 6 }, nticks: 6, ...scale(one.curves.flatMap((curve) => curve.at), "normal") });
    Plotly.react(element, traces, layout(element, { xaxis, yaxis: axis({ range: [0, 101], dtick: 25, ticksuffix: " %" }) }), CONFIG);
  };

  const dots = (element, one) => {
    const order = [...new Set(one.dots.map((dot) => dot.run))];
    const place = (run) => order.indexOf(run) + 1;
    const traces = content.variants.map((_, variant) => {
      const mine = one.dots.filter((dot) => dot.variant === variant);
      return {
        type: "scatter", mode: "markers", x: mine.map((dot) => place(dot.run)), y: mine.map((dot) => dot.value), customdata: mine.map((dot) => `run ${dot.run}${dot.cut ? ", cut" : ""}`),
        marker: { size: 9, symbol: mine.map((dot) => SYMBOLS[variant % 6] + (dot.cut ? "-open" : "")), color: colourOf(variant), line: { color: colourOf(variant), width: 1.5 } },
        hovertemplate: `${variantName(variant)}, %{customdata}<br>%{y:,.4g} ${escapeText(one.unit)}<extra></extra>`,
      };
    });
    const line = (variant, y) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colourOf(variant), width: 1.2, dash: DASHES[variant % 6] }, opacity: 0.7, layer: "below",
    });
    const shapes = one.medians.flatMap((y, variant) => (y === null ? [] : [line(variant, y)]));
    const annotations = [];
    if (one.band) {
      shapes.push({ type: "rect", layer: "below", xref: "paper", x0: 0, x1: 1, y0: one.band[0], y1: one.band[1], line: { width: 0 }, fillcolor: faint(colour("good"), 0.16) });
      annotations.push({ xref: "paper", x: 0.01, xanchor: "left", y: one.band[1], yanchor: "top", showarrow: false, text: "expected", font: { ...font(), color: colour("good") } });
    }
    const values = [...one.dots.map((dot) => dot.value), ...(one.band || [])];
    const xaxis = axis({ range: [0.4, order.length + 0.6], tick0: 1, dtick: Math.ceil(order.length / 8),  title: { text: "runs in their order", standoff: 6 } });
    const high = Math.max(...values, 0) * 1.08 || 1;
    const low = Math.min(...values, 0);
    Plotly.react(element, traces, layout(element, { xaxis, yaxis: axis({ range: [low < 0 ? low * 1.08 : 0, high], nticks: 6 }), shapes, annotations }), CONFIG);
  };

  const overTime = (element, one) => {
    const traces = one.points.filter((set) => set.at.length).map((set) => ({
      type: "scatter", mode: "markers", x: set.at, y: set.value, customdata: set.run, marker: { size: 5, color: colourOf(set.variant), symbol: SYMBOLS[set.variant % 6], opacity: 0.7 },
      hovertemplate: `${variantName(set.variant)}, run %{customdata}<br>%{y:,.4g} ${escapeText(one.unit)}, ended %{x|%H:%M:%S}<extra></extra>`,
    }));
    if (one.failed.length) {
      traces.push({
        type: "scatter", mode: "markers", yaxis: "y2", x: one.failed.map((each) => each.at), y: one.failed.map(() => 0), customdata: one.failed.map((each) => `${variantName(each.variant)}, run ${each.run}<br>${escapeText(each.why)}`),
        marker: { size: 8, symbol: "x", color: colour("bad") }, hovertemplate: "failed: %{customdata}<extra></extra>",
      });
    }
    const shapes = one.runs.flatMap((run) => [
      { type: "rect", layer: "below", xref: "x", yref: "paper", x0: run.from, x1: run.to, y0: 0, y1: 1, line: { width: 0 }, fillcolor: faint(colourOf(run.variant), 0.08) },
      { type: "line", layer: "below", xref: "x", yref: "paper", x0: run.from, x1: run.from, y0: 0, y1: 1, line: { color: colour("edge"), width: 1 } },
      { type: "line", layer: "below", xref: "x", yref: "paper", x0: run.to, x1: run.to, y0: 0, y1: 1, line: { color: colour(run.cut ? "bad" : "edge"), width: 1 } },
    ]);
    const span = one.end - one.start || 1;
    const wide = (ms) => (ms / span) * element.clientWidth;
    const annotations = one.runs.filter((run) => wide(run.to - run.from) > 18).map((run) => ({
      xref: "x", x: (run.from + run.to) / 2, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: String(run.run) + (run.cut ? " cut" : ""), font: { ...font(), size: 11, color: colourOf(run.variant) },
    }));
    const mark = colour("mark-purple");
    for (const [i, event] of one.events.entries()) {
      for (const [from, to] of event.windows) shapes.push({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 1.075, y1: 1.105, line: { width: 0 }, fillcolor: faint(mark, 0.6) });
      if (event.end !== null) shapes.push({ type: "rect", layer: "below", xref: "x", yref: "paper", x0: event.at, x1: event.end, y0: 0, y1: 1.06, line: { width: 0 }, fillcolor: faint(mark, 0.14) });
      shapes.push({ type: "line", xref: "x", yref: "paper", x0: event.at, x1: event.at, y0: 0, y1: 1.09, line: { color: mark, width: 1.5, dash: "dot" } });
      annotations.push({ xref: "x", x: event.at, yref: "paper", y: 1.11, yanchor: "bottom", yshift: (i % 2) * 13, showarrow: false, text: escapeText(event.name), font: { ...font(), size: 11, color: mark } });
    }
    const ends = [one.start, one.end, ...one.events.flatMap((event) => [event.at, event.end ?? event.at, ...event.windows.flat()])];
    const low = Math.max(Math.min(...ends), one.start - span / 3); // an event of another day would leave the bench no room
    const high = Math.min(Math.max(...ends), one.end + span / 3);
    const pad = (high - low) * 0.01 || 1000;
    const extra = {
      xaxis: axis({ type: "date", anchor: "free", position: 0, range: [low - pad, high + pad], title: { text: "UTC, when a request ended", standoff: 6 }, showgrid: false }),
      yaxis: axis({ domain: [one.failed.length ? 0.08 : 0, 1], title: { text: escapeText(one.title + unitOf(one)), standoff: 6 }, ...scale(one.points.flatMap((set) => set.value), "tozero") }),
      yaxis2: { domain: [0, 0.06], range: [-1, 1], visible: false, fixedrange: true }, shapes, annotations, margin: { l: 8, r: 12, t: one.events.length ? 62 : 24, b: 8 },
    };
    Plotly.react(element, traces, layout(element, extra), CONFIG);
  };

  // One line for each variant, through its loads in their order: it bends back where a higher load brings less.
  const loadCurve = (element, one) => {
    const traces = one.lines.flatMap((line) => {
      const name = variantName(line.variant);
      const marker = { size: 9, symbol: line.beyond.map((beyond) => SYMBOLS[line.variant % 6] + (beyond ? "-open" : "")), color: colourOf(line.variant), line: { color: colourOf(line.variant), width: 1.5 } };
      const ring = line.last === null ? [] : [{
        type: "scatter", mode: "markers", hoverinfo: "skip", x: [line.throughput[line.last]], y: [line.latency[line.last]],
        marker: { size: 18, symbol: "circle-open", color: colour("good"), line: { color: colour("good"), width: 2 } },
      }];
      return [...ring, {
        type: "scatter", mode: "lines+markers+text", x: line.throughput, y: line.latency, text: line.load.map(escapeText), textposition: "top left", textfont: { ...font(), size: 11, color: colour("muted") }, cliponaxis: false, marker,
        line: { color: colourOf(line.variant), width: 1.5, dash: DASHES[line.variant % 6] },
        hovertemplate: `${name}, %{text}<br>%{y:,.4g} ${escapeText(one.unit)} at %{x:,.4g} ${escapeText(one.throughput)}<extra></extra>`,
      }];
    });
    const shapes = [];
    const annotations = [];
    const yaxis = axis({ title: { text: escapeText(one.unit), standoff: 6 }, nticks: 6, ...scale(one.lines.flatMap((line) => line.latency), "tozero") });
    if (one.slo !== null) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: one.slo, y1: one.slo, line: { color: colour("bad"), width: 1.5, dash: "dash" } });
      annotations.push({ xref: "paper", x: 1, xanchor: "right", y: yaxis.type === "log" ? Math.log10(one.slo) : one.slo, yanchor: "bottom", showarrow: false, text: `SLO ${one.slo.toLocaleString("en-US")} ${escapeText(one.unit)}`, font: { ...font(), color: colour("bad") } });
    }
    Plotly.react(element, traces, layout(element, { xaxis: axis({ title: { text: escapeText(one.throughput), standoff: 6 }, nticks: 6, rangemode: "tozero" }), yaxis, shapes, annotations, margin: { l: 8, r: 16, t: 18, b: 8 } }), CONFIG);
  };

  const picture = (title, sentence, kind, one, paint) => {
    const chart = make("div", { class: `picture ${kind}`, role: "img", "aria-label": `${title}: ${sentence}` });
    places.set(chart, () => paint(chart, one));
    return make("figure", {}, make("figcaption", { text: title }), chart);
  };

  const legend = (shapes) =>
    make("p", { class: "variants" }, ...content.variants.map((name, variant) => {
      const sign = make("i", { class: `sign ${SYMBOLS[variant % 6]}` });
      sign.style.background = colourOf(variant);
      return make("span", {}, sign, make("span", { text: name }));
    }), make("small", { text: shapes }));

  const draw = () => places.forEach((paint, chart) => (chart.isConnected ? paint() : places.delete(chart)));

  const showGroup = (into, group) => {
    into.replaceChildren(
      make("h3", { text: "How long requests took: the share that took at most so long" }),
      group.spread.length ? make("div", { class: "three" }, ...group.spread.map((one) => picture(one.title, "distribution over requests", "small", one, spread))) : make("p", { text: "No answered request has times." }),
      make("h3", { text: "Each run, in the order in which they ran" }),
      group.dots.length ? make("div", { class: "three" }, ...group.dots.map((one) => picture(one.title + unitOf(one), "a dot a run", "small", one, dots))) : make("p", { text: "No run has figures." }),
    );
  };

  const build = () => {
    for (const place of document.querySelectorAll(".pictures")) {
      if (place.dataset.what === "time") {
        const one = content.time;
        place.replaceChildren(legend("numbers above: runs; a red line ends one that was cut; a red cross: a failed request; E1, E2: events, above them the windows before and after"), picture(`${one.title} of each request`, "over time", "large", one, overTime));
        if (one.note) place.append(make("p", { class: "said", text: one.note }));
        continue;
      }
      if (place.dataset.what === "curves") {
        place.replaceChildren(legend("hollow: beyond the SLO; green ring: the last load within it; dashed: the SLO"), ...content.curves.flatMap((group) => [
          make("h3", { text: group.title }),
          make("div", { class: "three" }, ...group.charts.map((one) => picture(one.title + unitOf(one), "latency against throughput", "small", one, loadCurve))),
        ]));
        continue;
      }
      const shown = make("div");
      const select = make("select", { "aria-label": "workload and load" }, ...content.groups.map((group, i) => make("option", { value: i, text: group.title })));
      select.addEventListener("change", () => {
        showGroup(shown, content.groups[Number(select.value)]);
        draw();
      });
      const title = content.groups.length > 1 ? make("label", { class: "which" }, make("span", { text: "shown: " }), select) : make("p", { class: "which", text: content.groups[0].title });
      place.replaceChildren(title, legend("lines: medians over the runs; hollow: a run that was cut"), shown);
      showGroup(shown, content.groups[0]);
    }
    draw();
  };

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  build();
})();
