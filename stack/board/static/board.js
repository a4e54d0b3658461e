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
  let settledAt = null; // when all that a round asked for was answered; null while one is under way
  let view = 0; // counts boards, ranges and choices; an answer to an older one is dropped
  let round = 0; // counts refreshes; what is off the screen sits one out
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
  const requests = () => {
    const models = parameters.getAll("var-model_name").filter((one) => one && one !== "All" && one !== "$__all");
    const next = new URLSearchParams(models.map((one) => ["model", one]));
    for (const name of ["from", "to"]) if (parameters.get(name)) next.append(name, parameters.get(name));
    return `/requests?${next}`;
  };
  const note = (changes, drop = []) => {
    parameters = kept(changes, drop);
    if (!SNAPSHOT) history.pushState(null, "", addressOf(board.uid, parameters));
  };
  const change = (changes, drop = [], { rebuild = false } = {}) => {
    note(changes, drop);
    if (rebuild) return build();
    controls(true);
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
    variables: async () => (SNAPSHOT ? { ...range, ...SNAPSHOT.boards[board.uid] } : ask(`/api/variables/${board.uid}`)),
  };
  // One question of a kind at a time: what is still being answered is not asked again, so that a slow Prometheus gets to its answer.
  const once = (asker, ask) => {
    if (asker.pending) return;
    const pending = ask().catch(reportError).finally(() => {
      if (asker.pending === pending) asker.pending = null;
    });
    asker.pending = pending;
  };
  const beside = { pending: null }; // choices and annotations
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
  let known = []; // what the server offered last
  let lacking = []; // preconditions of the board that are not met, each with the panels that would be empty
  let refusal = ""; // which choice it refuses, or why it offers nothing
  let bar = null;
  let main = null;

  // What can be chosen is known without an answer too, so that a choice which the server refuses can be corrected.
  const variables = () =>
    board.variables.map((one) => {
      const given = parameters.getAll(`var-${one.name}`).filter((value) => value !== "");
      const offer = known.find((other) => other.name === one.name) || { options: [], error: "", note: refusal || "Prometheus has not answered yet." };
      if (one.kind !== "query") return { ...one, chosen: given.length ? given[0] : one.default, error: offer.error };
      const chosen = given.includes("All") || given.includes("$__all") ? [] : given;
      return { ...one, chosen, options: [...new Set([...offer.options, ...chosen])], error: offer.error, note: offer.note };
    });

  const tabs = () => [
    ...DATA.boards.map((one) =>
      make("a", {
        href: SNAPSHOT ? `#${one.uid}` : addressOf(one.uid, kept({}, ["viewPanel"])), text: title(one.title), "aria-current": one.uid === board.uid ? "page" : false,
      }),
    ),
    SNAPSHOT || !DATA.requests ? "" : make("a", { class: "aside", href: requests(), text: "Requests" }),
    SNAPSHOT || !DATA.runbooks ? "" : make("a", { class: DATA.requests ? "" : "aside", href: "/runbooks/", text: "Runbooks" }),
  ];

  const closeOthers = (event) => {
    for (const open of document.querySelectorAll("details.pop[open]")) if (!event || !open.contains(event.target)) open.open = false;
  };
  document.addEventListener("click", closeOthers);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const open = document.querySelector("details.pop[open] > summary");
    closeOthers();
    if (open) open.focus();
    draw.hideTip();
  });
  // What opens stays within the window.
  document.addEventListener("toggle", ({ target }) => {
    if (!target.matches("details.pop[open]")) return;
    const popup = target.querySelector(".popup");
    popup.style.translate = "";
    const { left, right } = popup.getBoundingClientRect();
    const room = document.documentElement.clientWidth - 8;
    popup.style.translate = `${left < 8 ? 8 - left : Math.min(0, room - right)}px`;
  }, true);

  const picker = (variable) => {
    const name = `var-${variable.name}`;
    if (variable.kind === "custom") {
      const wrong = variable.options.includes(variable.chosen) ? null : make("option", { value: variable.chosen, text: `${variable.chosen}?`, selected: true, disabled: true });
      const select = make("select", { onchange: () => change({ [name]: select.value === variable.default ? "" : select.value }), "aria-invalid": wrong ? "true" : false, title: variable.error }, wrong, ...variable.options.map((one) => make("option", { value: one, text: one, selected: one === variable.chosen })));
      return make("label", { class: "choice" }, make("span", { text: variable.label }), select);
    }
    if (variable.kind === "text") {
      const enter = () => {
        const entered = input.value.trim();
        change({ [name]: entered === variable.default ? "" : entered });
      };
      const input = make("input", { value: variable.chosen, size: "8", onchange: enter, "aria-invalid": variable.error ? "true" : false, title: variable.error });
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
      change({ [name]: [...chosen] });
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
      const hint = found.length ? variable.note : variable.error || variable.note || "Nothing has this label in this range; All matches also what lacks it.";
      if (hint) list.append(make("p", { class: "hint", text: hint }));
    };
    fill();
    const summary = make("summary", { class: chosen.size ? "set" : "" }, make("span", { text: variable.label }), shown);
    if (variable.error) summary.append(make("i", { class: "warn", text: "!", title: variable.error }));
    return make("details", { class: "pop choice", "data-name": variable.name, ontoggle: (event) => event.target.open || controls() }, summary, make("div", { class: "popup" }, search, all, list));
  };

  const local = (ms) => new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19);

  const relative = () => get("to") === "now" && /^now-\d+[smhdw]$/.test(get("from"));
  const quickly = () => relative() && QUICK.some(([, value]) => value === get("from"));
  const rangeName = () => {
    if (relative()) return quickly() ? "custom" : get("from").replace("now-", "last ");
    return range ? `${draw.clock(range.start, 1e12).slice(5)} – ${draw.clock(range.end, 1e12).slice(5)}` : "custom";
  };

  const timePicker = () => {
    const quick = QUICK.map(([text, value]) =>
      make("button", { type: "button", "aria-pressed": relative() && value === get("from") ? "true" : "false", text, onclick: () => change({ from: value === DEFAULT.from ? "" : value }, ["to"]) }),
    );
    const start = make("input", { type: "datetime-local", step: "1", name: "from", "aria-label": "From" });
    const end = make("input", { type: "datetime-local", step: "1", name: "to", "aria-label": "To" });
    const opened = (event) => {
      if (!event.target.open) return controls();
      const now = range || { start: Date.now() - 3600e3, end: Date.now() };
      start.value = local(now.start);
      end.value = local(now.end);
      return undefined;
    };
    const told = make("p", { class: "hint", text: "" });
    const apply = () => {
      const [a, b] = [new Date(start.value).getTime(), new Date(end.value).getTime()];
      if (!(b > a)) told.textContent = "The end must come after the start.";
      else {
        closeOthers();
        change({ from: String(a), to: String(b) });
      }
    };
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
      make("details", { class: "pop", ontoggle: opened }, make("summary", { class: quickly() ? "" : "set" }, make("b", { text: rangeName() })), make("div", { class: "popup right" }, make("label", {}, make("span", { text: "From" }), start), make("label", {}, make("span", { text: "To" }), end), told, make("button", { type: "button", class: "primary", text: "Show", onclick: apply }))),
      make("div", { class: "buttons", role: "group", "aria-label": "Move in time" },
        make("button", { type: "button", text: "◀", title: "Earlier", "aria-label": "Earlier", onclick: () => move(-0.5) }),
        make("button", { type: "button", text: "▶", title: "Later", "aria-label": "Later", onclick: () => move(0.5) }),
        make("button", { type: "button", text: "−", title: "Zoom out", "aria-label": "Zoom out", onclick: wider })),
    );
  };

  const refreshPicker = () => {
    const choose = () => {
      note({ refresh: select.value === DEFAULT.refresh ? "" : select.value });
      controls(true);
      schedule();
    };
    const select = make("select", { "aria-label": "Refresh", title: "Refresh", onchange: choose }, ...REFRESH.map((one) => make("option", { value: one, text: one === "off" ? "refresh off" : `every ${one}`, selected: one === get("refresh") })));
    return make("div", { class: "refresh" }, select, make("button", { type: "button", text: "↻", title: "Refresh now", "aria-label": "Refresh now", onclick: () => refresh() }));
  };

  const toggles = () => {
    const hidden = new Set(parameters.getAll("hide"));
    return board.annotations.map((one) => {
      const box = make("input", { type: "checkbox", onchange: () => {
        if (box.checked) hidden.delete(one.name);
        else hidden.add(one.name);
        parameters = kept({ hide: [...hidden] });
        if (!SNAPSHOT) history.replaceState(null, "", addressOf(board.uid, parameters));
        controls();
        redraw();
      } });
      box.checked = !hidden.has(one.name);
      const swatch = make("i", { class: "swatch bar" });
      swatch.style.background = `var(--mark-${one.colour})`;
      const found = marks.find((group) => group.name === one.name);
      const count = found ? (found.error ? "!" : String(found.marks.length)) : "";
      return make("label", { title: found ? found.error || found.note : "" }, box, swatch, make("span", { text: one.name }), make("small", { text: count }));
    });
  };

  const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
  // Where clocks change within the range, every time in it is told by the clock at its end.
  const zone = () => {
    const hours = range ? -draw.offset(range.end) / 3600e3 : 0;
    return range && draw.offset(range.start) !== draw.offset(range.end) ? `times in ${ZONE}, all as UTC${hours < 0 ? "−" : "+"}${Math.abs(hours)}` : `times in ${ZONE}`;
  };

  // On a small screen choices, time and marks are folded away until they are asked for.
  const folder = () => {
    const button = make("button", { type: "button", class: "fold", "aria-expanded": "false", text: "Filters and time", onclick: () => {
      button.setAttribute("aria-expanded", String(bar.classList.toggle("unfolded")));
    } });
    return button;
  };

  const shell = () =>
    make(
      "header", { class: "top" },
      make("div", { class: "line" }, make("nav", { class: "tabs", "aria-label": "Boards" }), folder(), make("div", { class: "status" }), make("div", { class: "unseen", role: "status" })),
      SNAPSHOT
        ? make("div", { class: "line taken", text: `Snapshot taken ${draw.clock(SNAPSHOT.takenAt, 1e12)} from ${SNAPSHOT.prometheus}, showing ${draw.clock(SNAPSHOT.start, 1e12)} to ${draw.clock(SNAPSHOT.end, 1e12)} (${ZONE}).` })
        : make("div", { class: "line chosen" }, make("div", { class: "choices" }), make("div", { class: "spring" }), make("div", { class: "when" })),
      make("div", { class: "line thin" }, make("p", { class: "question" }), make("div", { class: "marks", role: "group", "aria-label": "Annotations" }), make("span", { class: "zone" })),
    );

  const controls = (forced = false) => {
    if (!bar) {
      bar = shell();
      document.body.prepend(bar);
    }
    const address = `${board.uid}?${parameters}`;
    renew("tabs", address, tabs, forced);
    const tab = bar.querySelector(".tabs [aria-current]");
    if (tab) bar.querySelector(".tabs").scrollLeft = tab.offsetLeft - 60;
    const set = board.variables.filter((one) => parameters.getAll(`var-${one.name}`).some((value) => value && value !== "$__all" && value !== "All")).length;
    bar.querySelector(".fold").textContent = `Filters and time: ${SNAPSHOT ? "" : quickly() ? get("from").replace("now-", "last ") : rangeName()}${set ? `, ${set} set` : ""}`;
    if (!SNAPSHOT) {
      const offered = variables();
      renew("choices", JSON.stringify(offered), () => offered.map(picker), forced);
      renew("when", JSON.stringify([get("from"), get("to"), get("refresh"), rangeName()]), () => [timePicker(), refreshPicker()], forced);
    }
    renew("question", board.uid, () => [board.question], forced);
    renew("marks", JSON.stringify([board.uid, parameters.getAll("hide"), marks.map((group) => [group.name, group.error, group.note, group.marks.length])]), toggles, forced);
    renew("zone", zone(), () => [zone()], forced);
  };

  // A part of the bar is made anew only when what it shows has changed, and not while something of it is open or being written; focus stays.
  const renew = (name, shows, content, forced) => {
    const place = bar.querySelector(`.${name}`);
    const focused = document.activeElement;
    if (place.shows === shows || place.querySelector("details.pop[open]")) return;
    if (!forced && place.contains(focused) && focused.matches("select, input:not([type=checkbox])")) return;
    const stops = () => [...place.querySelectorAll("a, button, input, select, summary")].filter((one) => !one.closest(".popup"));
    const at = stops().indexOf(focused);
    place.replaceChildren(...content());
    place.shows = shows;
    if (at >= 0 && stops()[at]) stops()[at].focus({ preventScroll: true });
  };

  // What is missing is said once, in the place of all the panels that would be empty without it.
  const sayOnce = () => {
    const left = lacking.filter((one) => one.panels.some((id) => panels.has(String(id)) && !panels.get(String(id)).alone));
    const without = new Set(left.flatMap((one) => one.panels.map(String)));
    for (const [id, part] of panels) part.element.hidden = without.has(id);
    for (const grid of main.querySelectorAll(".grid")) (grid.closest("details.row") || grid).hidden = !grid.querySelector(".panel:not([hidden])");
    draw.put(main.querySelector(".notices"), make("div", {}, ...left.map((one) => make("p", { class: "notice", text: one.text }))));
  };

  // How old the oldest figure on the screen is, or what is wrong. Read aloud is only that it went wrong, or right again.
  const say = () => {
    const asked = [...panels.values()].filter((part) => part.round === round);
    const failed = asked.filter((part) => part.drawn && part.drawn.errors.length).length;
    const oldest = Math.min(...asked.filter((part) => part.visible).map((part) => part.answeredAt));
    const wrong = refusal || (failed ? `${failed} panel${failed > 1 ? "s" : ""} failed` : "");
    const status = bar.querySelector(".status");
    status.textContent = wrong || (SNAPSHOT || oldest === Infinity ? "" : oldest ? `updated ${draw.clock(oldest, 0)}` : "loading…");
    if (status.classList.toggle("bad", Boolean(wrong)) === said) return;
    said = !said;
    bar.querySelector(".unseen").textContent = wrong || "All panels answer again";
  };
  let said = false;

  // --- panels

  const about = (panel) => {
    const links = [];
    if (panel.detail) links.push(make("a", { href: SNAPSHOT ? `#${panel.detail}` : addressOf(panel.detail, kept({}, ["viewPanel"])), text: `More: ${title((DATA.boards.find((one) => one.uid === panel.detail) || { title: panel.detail }).title)} board` }));
    if (!SNAPSHOT && DATA.requests) links.push(make("a", { href: requests(), text: "Requests of this time" }));
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
        if (part.visible && part.round !== round) fetchPanel(part);
      }
      say();
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
    const part = { panel, alone, element, chart, note, errors, legend, drawn: null, visible: false, round: -1, pending: null, answeredAt: 0, hidden: new Set(), colours: new Map(), size: "" };
    panels.set(id, part);
    chart.dataset.id = id;
    watcher.observe(element);
    sizes.observe(chart);
    return element;
  };

  const fetchPanel = (part) => {
    part.round = round;
    once(part, () => answer(part));
  };

  const answer = async (part) => {
    const asked = view;
    const slow = setTimeout(() => part.element.classList.add("busy"), 250);
    try {
      const points = Math.max(100, Math.round(part.chart.clientWidth / 100) * 100 || 600);
      const drawn = await source.panel(String(part.panel.id), points);
      if (["lines", "stack", "heatmap"].includes(drawn.shape) && !drawn.empty) await plotly;
      if (asked !== view) return;
      part.drawn = drawn;
      if (!drawn.errors.length) part.answeredAt = Date.now();
    } catch (error) {
      if (error.name === "AbortError" || asked !== view) return;
      part.drawn = { shape: part.panel.shape, errors: [error.message], empty: "", failed: true };
    } finally {
      clearTimeout(slow);
      if (asked === view) part.element.classList.remove("busy");
    }
    paint(part);
    say();
  };

  const shownMarks = () => marks.filter((group) => !parameters.getAll("hide").includes(group.name));

  const mean = (values) => {
    const there = values.filter((value) => value !== null);
    return there.reduce((sum, value) => sum + value, 0) / there.length;
  };

  const legendOf = (part) => {
    const { drawn, panel, hidden, legend } = part;
    const all = drawn.series && !drawn.empty && !drawn.failed && ["lines", "stack"].includes(drawn.shape) ? drawn.series : [];
    const means = new Map(all.map((one) => [one, mean(one.values)]));
    const series = panel.ranked ? [...all].sort((a, b) => means.get(b) - means.get(a)) : all;
    const names = JSON.stringify(series.map((one) => one.name));
    if (part.named !== names) {
      part.named = names;
      legend.replaceChildren(...series.map((one) => legendItem(part, one.name, series)));
      legend.classList.toggle("table", Boolean(panel.ranked));
      if (panel.ranked && series.length) legend.append(make("div", { class: "head" }, make("span", { text: "mean" }), make("span", { text: "last" })));
      if (panel.threshold && series.length) legend.append(make("span", { class: "limit", title: panel.threshold.why }, make("i", { class: "swatch dash" }), `limit ${units.format(panel.threshold.value, panel.unit)}`));
    }
    const colours = palettes(part);
    const last = (values) => values.length - ((values[values.length - 1] ?? null) === null ? 2 : 1);
    series.forEach((one, i) => {
      const [swatch, , value, average] = legend.children[i].children;
      if (average) average.textContent = units.format(means.get(one), one.unit);
      legend.children[i].classList.toggle("off", hidden.has(one.name));
      swatch.style.background = colours(one.name);
      value.textContent = units.told(one, last(one.values));
    });
  };

  const legendItem = (part, name, series) => {
    const { hidden } = part;
    const others = series.filter((other) => other.name !== name).map((other) => other.name);
    const toggle = (event) => {
      const alone = others.length > 0 && others.every((other) => hidden.has(other)) && !hidden.has(name);
      if (event.ctrlKey || event.metaKey) {
        if (hidden.has(name)) hidden.delete(name);
        else hidden.add(name);
      } else {
        hidden.clear();
        if (!alone) for (const other of others) hidden.add(other);
      }
      paint(part);
    };
    return make("button", { type: "button", title: `${name}: show it alone; with Ctrl, hide it`, onclick: toggle }, make("i", { class: "swatch" }), make("span", { text: name }), make("b"), part.panel.ranked ? make("em") : null);
  };

  const paint = (part) => {
    const { drawn, panel, chart } = part;
    if (!drawn) return;
    part.errors.hidden = drawn.errors.length === 0;
    const errors = drawn.errors.join("\n");
    if (part.told !== errors) part.errors.replaceChildren(...drawn.errors.map((text) => make("p", { text })));
    part.told = errors;
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
    if (nothing) return void (drawn.empty ? draw.put(chart, make("p", { class: "empty", text: drawn.empty })) : chart.replaceChildren());
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
    const content = [make("div", { class: "notices", role: "status" })];
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

  // Another view: whatever was asked for the one before is void.
  function load() {
    view += 1;
    stopping.abort();
    stopping = new AbortController();
    beside.pending = null;
    for (const part of panels.values()) {
      Object.assign(part, { pending: null, answeredAt: 0 });
      part.element.classList.remove("busy");
    }
    refresh();
  }

  // The same view again. The next round waits until all on the screen is answered, however long that takes.
  async function refresh() {
    const mine = (round += 1);
    clearTimeout(timer);
    settledAt = null;
    once(beside, fetchBeside);
    for (const part of panels.values()) if (part.visible) fetchPanel(part);
    const waiting = () => [beside, ...panels.values()].filter((one) => one.pending && (one === beside || one.visible)).map((one) => one.pending);
    for (let left = waiting(); left.length; left = waiting()) await Promise.allSettled(left);
    if (mine !== round) return;
    settledAt = Date.now();
    schedule();
  }

  async function fetchBeside() {
    const asked = view;
    const failed = (error) => error;
    const [choices, found] = await Promise.all([source.variables().catch(failed), source.annotations().catch(failed)]);
    if (asked !== view) return;
    if (choices instanceof Error) refusal = choices.message;
    else {
      range = { start: choices.start, end: choices.end };
      known = choices.variables;
      lacking = choices.missing;
      sayOnce();
      refusal = known.filter((one) => one.kind !== "query" && one.error).map((one) => one.error).join("; ");
    }
    const seen = () => JSON.stringify(shownMarks().flatMap((group) => group.marks));
    const before = seen();
    marks = found instanceof Error ? [] : found;
    if (before !== seen()) redraw();
    controls();
    say();
  }

  function schedule() {
    clearTimeout(timer);
    const every = /^(\d+)s$/.exec(get("refresh"));
    if (SNAPSHOT || settledAt === null || !every || !get("to").startsWith("now")) return;
    const due = settledAt + Math.max(Number(every[1]), 5) * 1000;
    timer = setTimeout(() => document.hidden || refresh(), Math.max(0, due - Date.now()));
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("visibilitychange", () => document.hidden || schedule()); // a tab that was hidden for longer is due at once
  if (SNAPSHOT) {
    addEventListener("hashchange", () => {
      pick();
      build();
    });
    pick();
  }
  build();
})();
