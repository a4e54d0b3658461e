// Figures as people read them, by Grafana's names of units, those that dashboards.model writes. One formatter for axes, tables, large figures and tooltips.
"use strict";
const units = (() => {
  const SI = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const SHORT = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"], [1, ""]];
  const IEC = [[2 ** 50, "Pi"], [2 ** 40, "Ti"], [2 ** 30, "Gi"], [2 ** 20, "Mi"], [1024, "Ki"], [1, ""]];
  const TIME = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];

  // Three significant digits, none of them a trailing zero; thousands are grouped.
  const plain = (value) => {
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(3)));
  };

  // Steps up when rounding would: 999.6 is 1k, not 1,000.
  const scaled = (value, names, unit, gap = " ") => {
    const size = Math.abs(value);
    const at = names.find(([factor]) => Number((size / factor).toPrecision(3)) >= 1) || (size ? names[names.length - 1] : [1, names.find(([f]) => f === 1)[1]]);
    const suffix = at[1] + unit;
    return plain(value / at[0]) + (suffix ? gap + suffix : "");
  };

  const percent = (value) => {
    const shown = value * 100;
    if (shown > 99 && shown < 100) return Math.min(99.99, Number(shown.toFixed(2))) + "%"; // three nines are not 100 %
    return plain(shown) + "%";
  };

  const ago = (milliseconds) => {
    const s = (milliseconds - Date.now()) / 1000;
    const size = Math.abs(s);
    if (size < 1) return "now";
    const [factor, name] = TIME.find(([f]) => size >= f && f >= 1) || [1, "s"];
    const span = `${Math.floor(size / factor)} ${name}`;
    return s < 0 ? `${span} ago` : `in ${span}`;
  };

  const NAMED = {
    s: (v) => scaled(v, TIME, ""),
    percentunit: percent,
    bytes: (v) => scaled(v, IEC, "B"),
    Bps: (v) => scaled(v, SI, "B/s"),
    reqps: (v) => scaled(v, SHORT, " req/s", ""),
    cps: (v) => scaled(v, SHORT, "/s", ""),
    watt: (v) => scaled(v, SI, "W"),
    joule: (v) => scaled(v, SI, "J"),
    celsius: (v) => `${plain(v)} °C`,
    hertz: (v) => scaled(v, SI, "Hz"),
    dateTimeFromNow: ago,
    bool_on_off: (v) => (v < 0 ? "not present" : v ? "yes" : "no"),
    short: (v) => scaled(v, SHORT, "", ""),
  };

  // As it stands in the ladder: 7,680 s and not 2.13 h.
  const bound = (value, unit) => (unit === "s" && value >= 1 ? `${plain(value)} s` : format(value, unit));

  // A series at a step: beyond its buckets the bound with < or >, else the figure and the bounds of its bucket where they are known.
  const told = (one, i = 0) => {
    const value = format(one.values[i], one.unit);
    const [mark, low, high] = [one.marks, one.low, one.high].map((list) => (list ? (list[i] ?? null) : null));
    if (mark !== null) return `${mark} ${bound(one.values[i], one.unit)}`;
    return low === null || high === null ? value : `${value} (${bound(low, one.unit)} to ${bound(high, one.unit)})`;
  };

  const format = (value, unit) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (unit.startsWith("suffix:")) return `${Math.abs(value) >= 1e6 ? scaled(value, SHORT, "", "") : plain(value)} ${unit.slice(7).trim()}`;
    return (NAMED[unit] || NAMED.short)(value);
  };

  const LONG = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

  // Round figures from low to high, about `count` of them.
  const ticks = (low, high, unit, count) => {
    if (unit === "bool_on_off") return [0, 1];
    const raw = (high - low) / Math.max(count, 1);
    if (!(raw > 0)) return [low];
    let base = 10 ** Math.floor(Math.log10(raw));
    let nice = [1, 2, 2.5, 5, 10];
    if (unit === "bytes" && raw >= 1) {
      base = 1024 ** Math.floor(Math.log(raw) / Math.log(1024));
      nice = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    }
    let step = nice.map((n) => n * base).find((n) => n >= raw * 0.999) || 10 * base;
    if (unit === "s" && raw > 15) step = LONG.find((n) => n >= raw) || Math.ceil(raw / 86400) * 86400;
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(Number((n * step).toPrecision(12)));
    return found;
  };

  return { format, told, ticks };
})();
