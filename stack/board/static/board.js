// The page: builds a board from its description, asks for figures, keeps the address true to what is shown.
// Figures come from the server that this page came from; in a snapshot they are in the page.
"use strict";
(() => {
  const { make } = draw;
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const SNAPSHOT = DATA.snapshot;
  const QUICK = [["5m", "now-5m"], ["15m", "now-15m"], ["1h", "now-1h"], ["6h", "now-6h"], ["24h", "now-24h"], ["7d", "now-7d"]];
  const REFRESH = ["off", "5s", "10s", "30s"];
  const DEFAULT = { from: "now-1h", to: "now", refresh: "30s" };

  let board = DATA.shown[0];
  let parameters = new URLSearchParams(location.search);
  let panels = new Map(); // panel id -> its parts on the page
  let marks = [];
  let range = SNAPSHOT ? { start: SNAPSHOT.start, end: SNAPSHOT.end } : null;
  let timer = 0;
  let generation = 0; // an answer to an older question is dropped
  let stopping = new AbortController();

  const get = (name) => parameters.get(name) || DEFAULT[name] || "";
  const runbook = (alert) => (SNAPSHOT || !/^[A-Za-z]+$/.test(alert) ? "" : `/runbooks/${alert}`);

  // --- the address

  const kept = (changes = {}, drop = []) => {
    const next = new URLSearchParams(parameters);
    for (const name of drop) next.delete(name);
    for (const [name, value] of Object.entries(changes)) {
      next.delete(name);
      for (const one of Array.isArray(value) ? value : [value]) if (one !== "" && one !== null) next.append(name, one);
    }
    return next;
  };
  const addressOf = (uid, next) => {
    const text = next.toString();
    return `/d/${uid}${text ? `?${text}` : ""}`;
  };
  const change = (changes, drop = [], { rebuild = false, quiet = false } = {}) => {
    parameters = kept(changes, drop);
    if (!SNAPSHOT) history.pushState(null, "", addressOf(board.uid, parameters));
    if (rebuild) return build();
    if (!quiet) controls();
    return load();
  };
  addEventListener("popstate", () => {
    parameters = new URLSearchParams(location.search);
    if (SNAPSHOT) pick();
    build();
  });

  // --- asking

  const ask = async (path, extra = {}) => {
    const query = new URLSearchParams();
    for (const [name, value] of parameters) if (name.startsWith("var-") || name === "from" || name === "to") query.append(name, value);
    for (const [name, value] of Object.entries(extra)) query.set(name, value);
    let response;
    try {
      response = await fetch(`${path}?${query}`, { signal: stopping.signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The board itself does not answer; is vllm-watch board still running?", { cause: error });
    }
    if (!response.ok) throw new Error((await response.text()).trim() || `The board answers HTTP ${response.status}.`);
    return response.json();
  };
  const source = {
    panel: async (id, points) => (SNAPSHOT ? SNAPSHOT.boards[board.uid].panels[id] : ask(`/api/panel/${board.uid}/${id}`, { points })),
    annotations: async () => (SNAPSHOT ? SNAPSHOT.boards[board.uid].annotations : ask(`/api/annotations/${board.uid}`)),
    variables: async () => (SNAPSHOT ? { ...range, variables: SNAPSHOT.boards[board.uid].variables } : ask(`/api/variables/${board.uid}`)),
  };
  const plotly = new Promise((resolve, reject) => {
    const script = document.getElementById("plotly");
    if (typeof Plotly !== "undefined" || !script) resolve();
    else {
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => reject(new Error("The script that draws charts did not load; reload the page.")));
    }
  });

  // --- the bar

  const title = (name) => name.replace(/^vLLM \/ /, "");
  let variables = [];
  let bar = null;
  let main = null;

  const tabs = () =>
    make(
      "nav", { class: "tabs", "aria-label": "Boards" },
      ...DATA.boards.map((one) =>
        make("a", {
          href: SNAPSHOT ? `#${one.uid}` : addressOf(one.uid, kept({}, ["viewPanel"])), text: title(one.title), "aria-current": one.uid === board.uid ? "page" : false,
        }),
      ),
      SNAPSHOT ? null : make("a", { class: "aside", href: "/runbooks/", text: "Runbooks" }),
    );

  const closeOthers = (event) => {
    for (const open of document.querySelectorAll("details.pop[open]")) if (!event || !open.contains(event.target)) open.open = false;
  };
  document.addEventListener("click", closeOthers);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    closeOthers();
    draw.hideTip();
  });

  const picker = (variable) => {
    const name = `var-${variable.name}`;
    if (variable.kind === "custom") {
      const choose = () => {
        variable.chosen = select.value;
        change({ [name]: select.value === variable.default ? "" : select.value });
      };
      const select = make("select", { onchange: choose }, ...variable.options.map((one) => make("option", { value: one, text: one, selected: one === variable.chosen })));
      return make("label", { class: "choice" }, make("span", { text: variable.label }), select);
    }
    if (variable.kind === "text") {
      const enter = () => {
        variable.chosen = input.value.trim();
        change({ [name]: variable.chosen === variable.default ? "" : variable.chosen });
      };
      const input = make("input", { value: variable.chosen, size: "8", onchange: enter });
      return make("label", { class: "choice" }, make("span", { text: variable.label }), input);
    }
    const chosen = new Set(variable.chosen);
    const text = () => (chosen.size === 0 ? "All" : chosen.size > 2 ? `${chosen.size} of ${variable.options.length}` : [...chosen].join(", "));
    const shown = make("b", { text: text(), title: [...chosen].join("\n") || "All" });
    const row = (label, checked, act) => {
      const box = make("input", { type: "checkbox", onchange: act });
      box.checked = checked;
      return make("label", { class: "option" }, box, make("span", { text: label }));
    };
    const list = make("div", { class: "options" });
    const search = variable.options.length > 8 ? make("input", { type: "search", placeholder: "search", "aria-label": `Search ${variable.label}`, oninput: () => fill() }) : null;
    // What is open is changed in place, never rebuilt under the pointer.
    const set = () => {
      shown.textContent = text();
      all.firstChild.checked = chosen.size === 0;
      variable.chosen = [...chosen];
      change({ [name]: [...chosen] }, [], { quiet: true });
    };
    const all = row("All", chosen.size === 0, () => {
      chosen.clear();
      fill();
      set();
    });
    const fill = () => {
      const word = search ? search.value.toLowerCase() : "";
      const found = variable.options.filter((one) => one.toLowerCase().includes(word));
      list.replaceChildren(
        ...found.map((one) =>
          row(one, chosen.has(one), (event) => {
            if (event.target.checked) chosen.add(one);
            else chosen.delete(one);
            set();
          }),
        ),
      );
      if (!found.length) list.append(make("p", { class: "hint", text: variable.error || "Nothing has this label in this range; All matches also what lacks it." }));
    };
    fill();
    const summary = make("summary", { class: chosen.size ? "set" : "" }, make("span", { text: variable.label }), shown);
    if (variable.error) summary.append(make("i", { class: "warn", text: "!", title: variable.error }));
    return make("details", { class: "pop choice", "data-name": variable.name, ontoggle: (event) => event.target.open || controls() }, summary, make("div", { class: "popup" }, search, all, list));
  };

  const local = (ms) => new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19);

  const timePicker = () => {
    const from = get("from");
    const relative = get("to") === "now" && /^now-\d+[smhdw]$/.test(from);
    const known = QUICK.some(([, value]) => value === from);
    const quick = QUICK.map(([text, value]) =>
      make("button", { type: "button", "aria-pressed": relative && value === from ? "true" : "false", text, onclick: () => change({ from: value === DEFAULT.from ? "" : value }, ["to"]) }),
    );
    const start = make("input", { type: "datetime-local", step: "1", name: "from", "aria-label": "From" });
    const end = make("input", { type: "datetime-local", step: "1", name: "to", "aria-label": "To" });
    const now = range || { start: Date.now() - 3600e3, end: Date.now() };
    start.value = local(now.start);
    end.value = local(now.end);
    const told = make("p", { class: "hint", text: "" });
    const apply = () => {
      const [a, b] = [new Date(start.value).getTime(), new Date(end.value).getTime()];
      if (!(b > a)) told.textContent = "The end must come after the start.";
      else change({ from: String(a), to: String(b) });
    };
    const label = relative ? (known ? "custom" : from.replace("now-", "last ")) : range ? `${draw.clock(range.start, 1e12).slice(5)} – ${draw.clock(range.end, 1e12).slice(5)}` : "custom";
    const move = (part) => {
      const [a, b] = [range.start, range.end];
      const by = (b - a) * part;
      change({ from: String(Math.round(a + by)), to: String(Math.round(Math.min(b + by, Date.now()))) });
    };
    const wider = () => {
      const span = range.end - range.start;
      change({ from: String(Math.round(range.start - span / 2)), to: String(Math.round(Math.min(range.end + span / 2, Date.now()))) });
    };
    return make(
      "div", { class: "time" },
      make("div", { class: "buttons", role: "group", "aria-label": "Time range" }, ...quick),
      make("details", { class: "pop" }, make("summary", { class: relative && known ? "" : "set" }, make("b", { text: label })), make("div", { class: "popup right" }, make("label", {}, make("span", { text: "From" }), start), make("label", {}, make("span", { text: "To" }), end), told, make("button", { type: "button", class: "primary", text: "Show", onclick: apply }))),
      make("div", { class: "buttons", role: "group", "aria-label": "Move in time" },
        make("button", { type: "button", text: "◀", title: "Earlier", "aria-label": "Earlier", onclick: () => move(-0.5) }),
        make("button", { type: "button", text: "▶", title: "Later", "aria-label": "Later", onclick: () => move(0.5) }),
        make("button", { type: "button", text: "−", title: "Zoom out", "aria-label": "Zoom out", onclick: wider })),
    );
  };

  const refreshPicker = () => {
    const select = make("select", { "aria-label": "Refresh", title: "Refresh", onchange: () => change({ refresh: select.value === DEFAULT.refresh ? "" : select.value }) }, ...REFRESH.map((one) => make("option", { value: one, text: one === "off" ? "refresh off" : `every ${one}`, selected: one === get("refresh") })));
    return make("div", { class: "refresh" }, select, make("button", { type: "button", text: "↻", title: "Refresh now", "aria-label": "Refresh now", onclick: load }));
  };

  const toggles = () => {
    const hidden = new Set(parameters.getAll("hide"));
    return make(
      "div", { class: "marks", role: "group", "aria-label": "Annotations" },
      ...board.annotations.map((one) => {
        const box = make("input", { type: "checkbox", onchange: () => {
          if (box.checked) hidden.delete(one.name);
          else hidden.add(one.name);
          parameters = kept({ hide: [...hidden] });
          if (!SNAPSHOT) history.replaceState(null, "", addressOf(board.uid, parameters));
          redraw();
        } });
        box.checked = !hidden.has(one.name);
        const swatch = make("i", { class: "swatch bar" });
        swatch.style.background = draw.colour(`mark-${one.colour}`);
        const found = marks.find((group) => group.name === one.name);
        const count = found ? (found.error ? "!" : String(found.marks.length)) : "";
        return make("label", { title: found ? found.error || found.note : "" }, box, swatch, make("span", { text: one.name }), make("small", { text: count }));
      }),
    );
  };

  const controls = () => {
    const status = bar ? bar.querySelector(".status") : null;
    const said = status || make("div", { class: "status", role: "status" });
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
    const fresh = make(
      "header", { class: "top" },
      make("div", { class: "line" }, tabs(), said),
      SNAPSHOT
        ? make("div", { class: "line taken", text: `Snapshot taken ${draw.clock(SNAPSHOT.takenAt, 1e12)} from ${SNAPSHOT.prometheus}, showing ${draw.clock(SNAPSHOT.start, 1e12)} to ${draw.clock(SNAPSHOT.end, 1e12)} (${zone}).` })
        : make("div", { class: "line" }, make("div", { class: "choices" }, ...variables.map(picker)), make("div", { class: "spring" }), make("div", { class: "when" }, timePicker(), refreshPicker())),
      make("div", { class: "line thin" }, make("p", { class: "question", text: board.question }), toggles(), make("span", { class: "zone", text: `times in ${zone}` })),
    );
    if (bar) bar.replaceWith(fresh);
    else document.body.prepend(fresh);
    bar = fresh;
  };

  const say = () => {
    const status = bar.querySelector(".status");
    const failed = [...panels.values()].filter((part) => part.drawn && part.drawn.errors.length).length;
    const told = failed ? `${failed} panel${failed > 1 ? "s" : ""} failed` : SNAPSHOT ? "" : `updated ${draw.clock(Date.now(), 0)}`;
    status.textContent = told;
    status.classList.toggle("bad", failed > 0);
  };

  // --- panels

  const about = (panel) => {
    const links = [];
    if (panel.detail) links.push(make("a", { href: SNAPSHOT ? `#${panel.detail}` : addressOf(panel.detail, kept({}, ["viewPanel"])), text: `More: ${title((DATA.boards.find((one) => one.uid === panel.detail) || { title: panel.detail }).title)} board` }));
    for (const alert of panel.alerts) links.push(runbook(alert) ? make("a", { href: runbook(alert), text: `Runbook: ${alert}` }) : make("span", { text: `Runbook: ${alert}` }));
    if (SNAPSHOT && !DATA.boards.some((one) => one.uid === panel.detail)) links.splice(0, panel.detail ? 1 : 0);
    return [
      make("p", { text: panel.means }),
      make("p", {}, make("b", { class: "good", text: "Good: " }), panel.good),
      make("p", {}, make("b", { class: "warn", text: "Otherwise: " }), panel.act),
      panel.threshold ? make("p", {}, make("b", { class: "bad", text: `Line at ${units.format(panel.threshold.value, panel.unit)}: ` }), panel.threshold.why) : null,
      links.length ? make("p", { class: "links" }, ...links) : null,
    ];
  };

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const part = panels.get(entry.target.dataset.id);
        if (!part) continue;
        part.visible = entry.isIntersecting;
        if (part.visible && part.generation !== generation) fetchPanel(part);
      }
    },
    { rootMargin: "300px 0px" },
  );
  const sizeOf = (element) => `${element.clientWidth} ${element.clientHeight}`;
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const part = panels.get(entry.target.dataset.id);
      if (part && part.drawn && part.size !== sizeOf(part.chart)) paint(part);
    }
  });

  const palettes = (part) => (name) => {
    if (!part.colours.has(name)) part.colours.set(name, part.colours.size);
    const all = draw.palette();
    return all[part.colours.get(name) % all.length];
  };

  const panelElement = (panel, alone) => {
    const id = String(panel.id);
    const chart = make("div", { class: "chart", "data-id": id });
    const note = make("div", { class: "note", hidden: true });
    const errors = make("div", { class: "errors", role: "alert", hidden: true });
    const legend = make("div", { class: "legend" });
    const view = SNAPSHOT ? null : addressOf(board.uid, kept({ viewPanel: id }));
    const heading = view ? make("a", { href: view, text: panel.title, title: alone ? "" : "Show this panel alone" }) : make("span", { text: panel.title });
    const more = panel.detail && DATA.boards.some((one) => one.uid === panel.detail) ? make("a", { class: "more", href: SNAPSHOT ? `#${panel.detail}` : addressOf(panel.detail, kept({}, ["viewPanel"])), text: "→", title: "The board that explains it further", "aria-label": `More about ${panel.title}` }) : null;
    const info = alone ? null : make("details", { class: "pop info" }, make("summary", { "aria-label": `About ${panel.title}`, title: "What this is, what is good, what to do", text: "i" }), make("div", { class: "popup right" }, ...about(panel)));
    const head = make("header", {}, make("h3", {}, heading), make("span", { class: "spring" }), more, info);
    const element = make("section", { class: alone ? "panel alone" : "panel", "data-id": id, "aria-label": panel.title }, head, errors, chart, legend, note);
    element.style.setProperty("--w", panel.width);
    element.style.setProperty("--h", panel.height);
    const part = { panel, element, chart, note, errors, legend, drawn: null, visible: false, generation: -1, hidden: new Set(), colours: new Map(), size: "" };
    panels.set(id, part);
    chart.dataset.id = id;
    watcher.observe(element);
    sizes.observe(chart);
    return element;
  };

  const fetchPanel = async (part) => {
    const asked = generation;
    part.generation = asked;
    const slow = setTimeout(() => part.element.classList.add("busy"), 250);
    try {
      const points = Math.max(100, Math.round(part.chart.clientWidth / 100) * 100 || 600);
      const drawn = await source.panel(String(part.panel.id), points);
      if (["lines", "stack", "heatmap"].includes(drawn.shape) && !drawn.empty) await plotly;
      if (asked !== generation) return;
      part.drawn = drawn;
    } catch (error) {
      if (error.name === "AbortError" || asked !== generation) return;
      part.drawn = { shape: part.panel.shape, errors: [error.message], empty: "", failed: true };
    } finally {
      clearTimeout(slow);
      if (asked === generation) part.element.classList.remove("busy");
    }
    paint(part);
    say();
  };

  const shownMarks = () => marks.filter((group) => !parameters.getAll("hide").includes(group.name));

  const legendOf = (part) => {
    const { drawn, panel, hidden } = part;
    if (!drawn.series || drawn.empty || drawn.failed || !["lines", "stack"].includes(drawn.shape)) return part.legend.replaceChildren();
    const colours = palettes(part);
    const last = (values) => values[values.length - 1] ?? values[values.length - 2] ?? null;
    const items = drawn.series.map((one) => {
      const swatch = make("i", { class: "swatch" });
      swatch.style.background = colours(one.name);
      const others = drawn.series.filter((other) => other.name !== one.name).map((other) => other.name);
      const toggle = (event) => {
        const alone = others.length > 0 && others.every((name) => hidden.has(name)) && !hidden.has(one.name);
        if (event.ctrlKey || event.metaKey) {
          if (hidden.has(one.name)) hidden.delete(one.name);
          else hidden.add(one.name);
        } else {
          hidden.clear();
          if (!alone) for (const name of others) hidden.add(name);
        }
        paint(part);
      };
      return make("button", { type: "button", class: hidden.has(one.name) ? "off" : "", title: `${one.name}: show it alone; with Ctrl, hide it`, onclick: toggle }, swatch, make("span", { text: one.name }), make("b", { text: units.format(last(one.values), one.unit) }));
    });
    if (panel.threshold) items.push(make("span", { class: "limit", title: panel.threshold.why }, make("i", { class: "swatch dash" }), `limit ${units.format(panel.threshold.value, panel.unit)}`));
    return part.legend.replaceChildren(...items);
  };

  const paint = (part) => {
    const { drawn, panel, chart } = part;
    if (!drawn) return;
    part.errors.hidden = drawn.errors.length === 0;
    part.errors.replaceChildren(...drawn.errors.map((text) => make("p", { text })));
    part.note.hidden = !drawn.note;
    part.note.textContent = drawn.note || "";
    legendOf(part);
    part.size = sizeOf(chart);
    const nothing = drawn.failed || drawn.empty || (drawn.errors.length && !(drawn.series || drawn.rows || drawn.cells || []).length);
    chart.dataset.state = drawn.errors.length ? "error" : drawn.empty ? "empty" : "drawn";
    const plotted = ["lines", "stack", "heatmap"].includes(drawn.shape) && !nothing;
    if (chart.drawnOnce && !plotted) {
      Plotly.purge(chart);
      chart.drawnOnce = false;
    }
    chart.classList.toggle("plotted", plotted);
    if (nothing) return void chart.replaceChildren(drawn.empty ? make("p", { class: "empty", text: drawn.empty }) : "");
    if (plotted && !chart.drawnOnce) chart.replaceChildren();
    const context = {
      alone: Boolean(SNAPSHOT), marks: shownMarks(), hidden: part.hidden, colours: palettes(part), runbook,
      zoomed: (from, to) => {
        if (SNAPSHOT) panels.forEach((other) => other.chart.drawnOnce && draw.zoom(other.chart, from, to));
        else change({ from: String(from), to: String(Math.max(to, from + 10000)) });
      },
    };
    ({ lines: draw.lines, stack: draw.lines, heatmap: draw.heatmap, number: draw.numbers, table: draw.table })[drawn.shape](chart, panel, drawn, context);
  };
  const redraw = () => panels.forEach(paint);

  // --- all of it

  const pick = () => {
    const asked = location.hash.slice(1);
    board = DATA.shown.find((one) => one.uid === asked) || DATA.shown[0];
  };

  function build() {
    closeOthers();
    draw.hideTip();
    watcher.disconnect();
    sizes.disconnect();
    for (const part of panels.values()) if (part.chart.drawnOnce) Plotly.purge(part.chart);
    panels = new Map();
    document.title = `${board.title} · vLLM`;
    controls();
    const wanted = (parameters.get("viewPanel") || "").replace(/^panel-/, "");
    const every = board.rows.flatMap((row) => row.panels);
    const alone = wanted ? every.find((panel) => String(panel.id) === wanted) : null;
    const content = [];
    if (wanted) content.push(make("a", { class: "back", href: addressOf(board.uid, kept({}, ["viewPanel"])), text: "← all panels of this board", onclick: (event) => {
      event.preventDefault();
      change({}, ["viewPanel"], { rebuild: true });
    } }));
    if (wanted && !alone) content.push(make("p", { class: "empty", text: `This board has no panel ${wanted}.` }));
    else if (alone) content.push(panelElement(alone, true), make("aside", { class: "about" }, ...about(alone)));
    else {
      for (const row of board.rows) {
        const grid = make("div", { class: "grid" }, ...row.panels.map((panel) => panelElement(panel, false)));
        content.push(row.title ? make("details", { class: "row", open: !row.collapsed }, make("summary", {}, make("h2", { text: row.title }), make("small", { text: `${row.panels.length}` })), grid) : grid);
      }
    }
    const fresh = make("main", {}, ...content);
    if (main) main.replaceWith(fresh);
    else document.body.append(fresh);
    main = fresh;
    load();
  }

  async function load() {
    generation += 1;
    const asked = generation;
    stopping.abort();
    stopping = new AbortController();
    clearTimeout(timer);
    for (const part of panels.values()) if (part.visible) fetchPanel(part);
    const drop = (error) => (error.name === "AbortError" ? null : error);
    const [choices, found] = await Promise.all([source.variables().catch(drop), source.annotations().catch(drop)]);
    if (asked !== generation) return;
    if (choices && !(choices instanceof Error)) {
      range = { start: choices.start, end: choices.end };
      variables = choices.variables;
    }
    if (found && !(found instanceof Error)) {
      const seen = () => JSON.stringify(shownMarks().flatMap((group) => group.marks));
      const before = seen();
      marks = found;
      if (before !== seen()) redraw();
    }
    const used = bar.querySelector("details.pop[open]") || (bar.contains(document.activeElement) && document.activeElement.matches("input, select"));
    if (!used) controls();
    schedule();
  }

  function schedule() {
    clearTimeout(timer);
    const every = /^(\d+)s$/.exec(get("refresh"));
    if (SNAPSHOT || !every || !get("to").startsWith("now")) return;
    timer = setTimeout(() => (document.hidden ? schedule() : load()), Math.max(Number(every[1]), 5) * 1000);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    controls();
    redraw();
  });
  document.addEventListener("visibilitychange", () => document.hidden || (timer && schedule()));
  if (SNAPSHOT) {
    addEventListener("hashchange", () => {
      pick();
      build();
    });
    pick();
  }
  build();
})();
