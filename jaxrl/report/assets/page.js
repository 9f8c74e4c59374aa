/* Draws the report from the JSON in the page. Every text of a run becomes a text node, never markup. */
(() => {
"use strict";
const errors = [];
addEventListener("error", e => { errors.push(String(e.message)); document.documentElement.dataset.errors = errors.join("\n"); });
const began = performance.now();
let D = JSON.parse(document.getElementById("data").textContent);
const state = { run: 0, sample: 0, row: 0, colour: "logprob", search: "", only: "all", step: {}, filter: "", option: "" };

// ---- small things

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(c => c !== null && c !== undefined && c !== false).map(c => c instanceof Node ? c : String(c)));
  return node;
}
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = i => css("--c" + i % 9);
const fade = (hex, a) => hex + Math.round(255 * a).toString(16).padStart(2, "0");

function fmt(x, unit) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (unit === "%") return +(100 * x).toPrecision(4) + " %";
  const a = Math.abs(x);
  if (a !== 0 && (a >= 1e6 || a < 1e-3)) return x.toExponential(2).replace("e+", "e");
  return a >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(4));
}
function duration(s) {
  s = Math.round(s);
  return s < 60 ? s + " s" : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
}
const table = (header, rows, numeric = []) => el("div", { className: "wide" }, el("table", { className: "t" },
  el("thead", null, el("tr", null, header.map(h => el("th", null, h)))),
  el("tbody", null, rows.map(row => el("tr", { className: row.changed ? "changed" : "" },
    row.map((cell, i) => el("td", { className: numeric.includes(i) ? "n" : "" }, cell)))))));
const section = (id, title, ...children) => el("section", { id }, el("h2", null, title), ...children);
const menu = (label, options, value, change) => el("label", null, label + " ", el("select", { onchange: e => change(e.target.value) },
  options.map(([v, text]) => el("option", { value: v, selected: String(v) === String(value) }, text))));

// ---- plots

const waiting = new Map();
const watcher = new IntersectionObserver(seen => { for (const s of seen) if (s.isIntersecting) draw(s.target); }, { rootMargin: "300px" });
const sizes = new ResizeObserver(seen => {
  for (const s of seen) if (s.target.chart && s.contentRect.width > 0)
    s.target.chart.setSize({ width: Math.floor(s.contentRect.width), height: s.target.chart.height });
});
function plot(make) {
  const node = el("div", { className: "plot" });
  waiting.set(node, make);
  watcher.observe(node);
  return node;
}
function draw(node) {
  const make = waiting.get(node);
  if (!make) return;
  waiting.delete(node);
  watcher.unobserve(node);
  const [options, data] = make();
  node.chart = new uPlot({ width: Math.max(240, Math.floor(node.clientWidth)), height: 190, ...options }, data, node);
  node.make = make;
  sizes.observe(node);
}
function redraw() {  // in the colours of the theme that has just been chosen
  for (const node of document.querySelectorAll(".plot")) if (node.chart) {
    sizes.unobserve(node);
    node.chart.destroy();
    waiting.set(node, node.make);
    draw(node);
  }
}
function axes(unit, format) {
  const common = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif" };
  return [{ ...common, label: "step", labelSize: 16, size: 26, values: (u, v) => v.map(x => x === Math.round(x) ? fmt(x) : "") },
          { ...common, label: unit || undefined, labelSize: 15, size: 58, values: (u, v) => v.map(format) }];
}
function chart(name) {
  const { doc, unit, lines } = D.charts[name];
  const make = () => {
    const tables = lines.flatMap(l => [l.lo ? [l.x, l.y, l.lo, l.hi] : [l.x, l.y], ...(l.tx ? [[l.tx, l.ty]] : [])]);
    const data = uPlot.join(tables, tables.map(t => t.map(() => 1)));
    const series = [{ label: "step", value: (u, v) => fmt(v) }], bands = [];
    for (const l of lines) {
      const c = colour(l.g), few = l.x.length <= 60, value = (u, v) => fmt(v, unit), label = D.groups.length > 1 ? D.groups[l.g].name : "";
      series.push({ label: l.lo ? `${label} mean of ${l.of}`.trim() : label || "value", stroke: l.tx ? fade(c, .4) : c, width: l.tx ? 1 : 1.5, value, points: { show: few, size: 4 } });
      if (l.lo) {
        const at = series.length, edge = { stroke: fade(c, .45), width: 1, value, points: { show: false } };
        series.push({ ...edge, label: "smallest" }, { ...edge, label: "largest" });
        bands.push({ series: [at + 1, at], fill: fade(c, .16) });
      }
      if (l.tx) series.push({ label: `${label} mean of ${l.per} steps`.trim(), stroke: c, width: 2, value, points: { show: false } });
    }
    return [{ series, bands, axes: axes(unit, v => unit === "%" ? +(100 * v).toPrecision(3) + "%" : fmt(v)),
      cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, a, b) => range(a, b) } } }, data];
  };
  return el("div", { className: "chart", "data-metric": name }, el("h3", null, name), el("div", { className: "soft" }, doc), plot(make));
}
function range(a, b) {
  if (a === null || b === null) return [0, 1];
  if (a === b) return a === 0 ? [-.05, 1] : [a - Math.abs(a) / 10, a + Math.abs(a) / 10];
  const room = (b - a) * .06;
  return [a >= 0 && a - room < 0 ? 0 : a - room, b + room];
}

// ---- sections

function head() {
  const rows = D.runs, names = [...new Set(rows.flatMap(r => Object.keys(r.facts)))];
  const say = (n, v) => v === undefined ? "–" : n === "seconds" ? duration(v) : n.startsWith("accuracy") ? fmt(v, "%") : String(v);
  const label = n => n === "seconds" ? "time" : n.startsWith("accuracy") ? "held-out " + n : n;
  const body = rows.length <= 4
    ? table(["", ...rows.map(r => r.name)], names.map(n => [label(n), ...rows.map(r => say(n, r.facts[n]))]))
    : table(["run", ...names.map(label)], rows.map(r => [r.name, ...names.map(n => say(n, r.facts[n]))]));
  return el("header", null, el("h1", null, rows.map(r => r.name).join(", ")),
    el("div", { className: "soft" }, `jaxrl ${D.jaxrl}, written ${D.made}` + (D.watch ? `, looks again every ${D.watch} s` : "")),
    el("nav", null, [["warnings", "Warnings"], ...(D.explained.some(l => l.length) ? [["explained", "Explained"]] : []),
      ...(D.tried.some(l => l.length) ? [["tried", "Other settings"]] : []), ...D.sections.map((s, i) => ["curves" + i, s[0]]), ["timeline", "Time"], ["plan", "Plan"],
      ["samples", "Completions"], ["options", "Options"]].map(([id, text]) => document.getElementById(id) || true
        ? el("a", { href: "#" + id }, text) : null)), body,
    D.runs.length > 1 && el("p", null, D.groups.map((g, i) => el("span", { className: "key" },
      el("i", { className: "dot", style: { background: `var(--c${i % 9})` } }), g.name))));
}
function warnings() {
  const found = D.findings.flatMap((list, i) => list.map(f => ({ ...f, run: i })));
  return section("warnings", "Warnings", found.length ? found.map(f => el("div", { className: "finding" + (f.grave ? " grave" : "") },
    D.runs.length > 1 && el("b", null, D.runs[f.run].name + ": "), f.text,
    f.steps && el("div", { className: "soft" }, `${f.count} of ${f.of} steps: ${f.steps}`))) : el("p", null, "None."));
}
const percent = v => fmt(v, "%"), signed = v => (v > 0 ? "+" : "") + fmt(v);
const whose = i => D.runs.length > 1 ? D.runs[i].name + ", " : "";
function explained() {
  const found = D.explained.flatMap((list, i) => list.map(s => [s, i]));
  if (!found.length) return null;
  return section("explained", "Steps that were explained", el("p", { className: "soft" },
    "By run.mode=explain: a group's share is that of the gradient before the optimizer, shares of all groups add up to 1; log-probs are changes per token."),
    found.map(([s, i]) => el("div", null, el("h3", null, `${whose(i)}step ${s.step}: ${s.why}`),
      el("div", { className: "soft" }, s.anomalies.map(a => el("div", null, a)),
        `replay: ${s.replay}; step of length ${fmt(s.facts.step_length)}, KL ${fmt(s.facts.kl)} per token, ${percent(s.facts.clipped_fraction)} of tokens outside the clip range, ` +
        `${percent(s.facts.corrected_fraction)} corrected, ${fmt(s.facts.masked_answers)} answers masked, ${fmt(s.facts.truncated_answers)} truncated`),
      el("div", { className: "soft" }, "groups by share: " + s.groups.map(([g, v]) => `${g} ${v > 0 ? "+" : ""}${percent(v)}`).join(", ")),
      table(["group", "sample", "score", "advantage", "tokens", "gap", "log-prob", "share", "answer"], s.answers.map(a => Object.assign([a.group, a.sample, fmt(a.score),
        signed(a.advantage), fmt(a.length), fmt(a.gap), signed(a.change), a.share === null ? "–" : percent(a.share),
        el("div", null, a.reason && el("b", null, a.reason + ": "), a.text)], { changed: !!a.reason })), [2, 3, 4, 5, 6, 7]))));
}
function tried() {
  const found = D.tried.flatMap((list, i) => list.map(t => [t, i]));
  if (!found.length) return null;
  return section("tried", "Other settings on one batch", found.map(([t, i]) => el("div", null, el("h3", null, `${whose(i)}step ${t.step}`),
    table(["setting", "step in parameters", "angle", "KL", "outside clip", "rewarded, predicted", "realised", "other answers"], t.rows.map(r => [r.setting,
      fmt(r.step), r.angle === null ? "–" : r.angle.toFixed(1) + "°", fmt(r.kl), percent(r.outside_clip), signed(r.predicted), signed(r.realised), signed(r.others)]),
      [1, 2, 3, 4, 5, 6, 7]), settings(t.rows))));
}
function settings(all) {
  const rows = all.filter(r => r.kl !== null && r.realised !== null);
  if (rows.length < 2) return null;
  const make = () => {
    const x = [...new Set(rows.map(r => r.kl))].sort((a, b) => a - b), at = (r, v) => x.map(k => k === r.kl ? v : null);
    const dots = (r, k, what, fill) => ({ label: `${r.setting}, ${what}`, stroke: colour(k), paths: () => null, value: (u, v) => fmt(v),
      points: { show: true, size: 10, width: 2, fill: fill ? colour(k) : css("--card") } });
    const series = [{ label: "KL", value: (u, v) => fmt(v) }, ...rows.flatMap((r, k) => [dots(r, k, "realised", true), dots(r, k, "predicted", false)])];
    const [across, up] = axes("nats per token", v => fmt(v)), wide = (x[x.length - 1] - x[0]) * .06 || x[0] * .1 || 1;
    return [{ height: 260, series, axes: [{ ...across, label: "KL that the step made, per token", values: (u, v) => v.map(k => fmt(k)) }, up],
      scales: { x: { time: false, range: [x[0] - wide, x[x.length - 1] + wide] }, y: { range: (u, a, b) => range(a, b) } } },
      [x, ...rows.flatMap(r => [at(r, r.realised), at(r, r.predicted)])]];
  };
  return el("div", { className: "chart" }, el("h3", null, "what each setting gained, against how far it went"), el("div", { className: "soft" },
    "mean change of log-prob of rewarded answers: filled as it came, hollow as the gradient predicts it to first order"), plot(make));
}
function curves([title, names], i) {
  if (title !== "All other metrics")
    return section("curves" + i, title, el("div", { className: "charts" }, names.map(chart)));
  const box = el("div", { className: "charts" }), fill = () => box.replaceChildren(...names.filter(n => n.includes(state.filter)).map(chart));
  const more = el("details", { ontoggle: e => { if (e.target.open && !box.firstChild) fill(); } },
    el("summary", null, `${names.length} further metrics`), el("div", { className: "controls" }, el("input", { type: "search",
      placeholder: "part of a name", oninput: e => { state.filter = e.target.value; fill(); } })), box);
  return section("curves" + i, title, more);
}
function timeline() {
  const parts = D.phases.map((p, i) => p.names ? el("div", null, D.runs.length > 1 && el("h3", null, D.runs[i].name), phases(p, i)) : null);
  return section("timeline", "Time: phases of a step", el("p", { className: "soft" },
    "Seconds of the training loop on process 0; the phases of a step add up to it. What goes on beside it (sampling ahead, saving) shows only where it was waited for."),
    parts.some(Boolean) ? parts : el("p", null, "No times were recorded."));
}
function phases(p, i) {
  const shown = p.names.map((n, k) => k).filter(k => p.y[k].some(v => v > 0));
  const make = () => {
    const x = [...p.x, p.last + 1], sums = [];
    let below = x.map(() => 0);
    for (const k of shown) { below = below.map((b, j) => b + p.y[k][Math.min(j, p.x.length - 1)]); sums.push(below); }
    const stepped = uPlot.paths.stepped({ align: 1 }), top = shown.length - 1;
    const value = k => (u, v, s, j) => j === null ? "–" : fmt(p.y[k][Math.min(j, p.x.length - 1)]) + " s";
    const series = [{ label: "step", value: (u, v) => fmt(v) }, ...shown.map((_, r) => top - r).map(r => ({ label: p.names[shown[r]],
      stroke: colour(shown[r]), fill: fade(colour(shown[r]), .8), width: 0, paths: stepped, points: { show: false }, value: value(shown[r]) }))];
    const bands = shown.slice(1).map((_, r) => ({ series: [r + 1, r + 2] }));
    return [{ height: 260, series, bands, axes: axes("seconds", v => fmt(v)), scales: { x: { time: false }, y: { range: (u, a, b) => [0, b * 1.05 || 1] } },
      cursor: { sync: { key: "step" } } }, [x, ...shown.map((_, r) => sums[top - r])]];
  };
  const choices = [["usual", p.usual], ["newest", p.newest], ...p.slow.map((s, k) => [`slow${k}`, s])];
  const total = s => s.seconds.reduce((a, b) => a + b, 0);
  const text = (key, s) => `step ${s.step}, ${fmt(total(s))} s` + (key === "usual" ? " (the median)" : key === "newest" ? " (the last)" : " (one of the slowest)");
  const bars = el("div", { className: "gantt" });
  const show = key => {
    const s = (choices.find(c => c[0] === key) || choices[0])[1], all = total(s) || 1;
    let at = 0;
    state.step[i] = key;
    bars.replaceChildren(...p.names.flatMap((n, k) => {
      const left = at, seconds = s.seconds[k];
      at += seconds;
      return seconds > 0 ? [el("span", { title: p.doing[k] }, n), el("span", { className: "track" }, el("i", { style: {
        left: 100 * left / all + "%", width: 100 * seconds / all + "%", background: `var(--c${k % 9})` } })),
        el("span", null, `${fmt(seconds)} s, ${(100 * seconds / all).toFixed(1)} %`)] : [];
    }));
  };
  show(state.step[i] || "usual");
  return [el("div", { className: "chart" }, el("h3", null, "seconds per step by phase"), el("div", { className: "soft" },
    p.per > 1 ? `each column is the mean of up to ${p.per} steps` : "each column is a step"), plot(make)),
    el("div", { className: "controls" }, menu("One step:", choices.map(([k, s]) => [k, text(k, s)]), state.step[i] || "usual", show),
      el("span", { className: "soft" }, "in the order of a step; a phase that comes twice in it is drawn once")), bars];
}
function plans() {
  const rows = D.plan.flatMap((list, i) => list.map(([what, unit, planned, measured]) => [...(D.runs.length > 1 ? [D.runs[i].name] : []), what, unit,
    fmt(planned), fmt(measured), planned && measured ? (measured / planned).toFixed(2) : "–"]));
  const header = [...(D.runs.length > 1 ? ["run"] : []), "of a step", "unit", "planned", "measured", "measured / planned"], n = header.length;
  return section("plan", "Plan against measured", rows.length ? [el("p", { className: "soft" },
    "Planned: prompts and completions at their longest, nothing compiled. Measured: medians behind the first two steps. Written when a run ends."),
    table(header, rows, [n - 3, n - 2, n - 1])] : el("p", null, "Nothing was planned, or the run has not ended."));
}
function differences() {
  const out = [];
  if (D.runs.length > 1) out.push(D.differ.length ? table(["option", ...D.runs.map(r => r.name)], D.differ)
    : el("p", null, "The runs have the same options and versions."));
  const box = el("div");
  const fill = () => {
    const rows = D.options[state.run].filter(([n, v, c]) => (n + v).includes(state.option) && (c || state.option || more.checked));
    box.replaceChildren(table(["option", "value"], rows.map(([n, v, c]) => Object.assign([n, v], { changed: c }))));
  };
  const more = el("input", { type: "checkbox", onchange: fill });
  out.push(el("details", { open: D.runs.length === 1 }, el("summary", null, "Options of a run that are not at their default"), el("div", { className: "controls" },
    D.runs.length > 1 && menu("run", D.runs.map((r, i) => [i, r.name]), state.run, v => { state.run = +v; fill(); }),
    el("input", { type: "search", placeholder: "part of a name or value", oninput: e => { state.option = e.target.value; fill(); } }),
    el("label", null, more, " all options")), box));
  fill();
  return section("options", D.runs.length > 1 ? "Options: differences between runs" : "Options", out);
}

// ---- completions

const COLOURS = { logprob: "log-prob of each token", advantage: "advantage", gap: "gap: trainer less sampler", trained: "trained or not", none: "no colour" };
function shade(mode, row, piece, i) {
  const at = name => piece[name] ? piece[name][i] : null, logprob = at("logprobs"), gap = at("gaps");
  const advantage = piece.advantages && i !== null ? at("advantages") : row.advantage;
  if (mode === "trained") return piece.trained ? "rgba(var(--up), .25)" : "rgba(var(--down), .2)";
  if (!piece.trained) return "";
  if (mode === "logprob" && logprob !== null && logprob !== undefined) return `rgba(var(--low), ${Math.min(.75, .75 * -logprob / 6).toFixed(3)})`;
  if (mode === "advantage" && advantage) return `rgba(var(--${advantage > 0 ? "up" : "down"}), ${Math.min(.6, .1 + .25 * Math.abs(advantage)).toFixed(3)})`;
  if (mode === "gap" && gap) return `rgba(var(--gap), ${Math.min(.75, Math.max(0, .75 + .125 * Math.log10(Math.abs(gap)))).toFixed(3)})`;
  return "";
}
function pieceText(row, piece) {
  const box = el("div", { className: "text" + (piece.trained ? "" : " put") });
  if (!piece.tokens) {
    box.append(el("span", { className: "token", style: { background: shade(state.colour, row, piece, null) } }, piece.text));
    return box;
  }
  for (let i = 0; i < piece.tokens.length; i++) {
    const p = piece.logprobs[i];
    box.append(el("span", { className: "token", style: { background: shade(state.colour, row, piece, i) }, title: [
      `token ${i + 1}`, p !== null && `log-prob ${fmt(p)}, probability ${fmt(Math.exp(p), "%")}`, piece.advantages && `advantage ${fmt(piece.advantages[i])}`,
      piece.gaps && `gap ${fmt(piece.gaps[i])}`].filter(Boolean).join(": ") }, piece.tokens[i]));
  }
  return box;
}
function pictures(part, row) {
  if (!row.images) return null;
  const kept = row.images.filter(n => D.pictures[part.run][n]), more = row.images.length - kept.length;
  return el("div", { className: "pictures" }, kept.map(n => el("img", { src: D.pictures[part.run][n], title: n, alt: n })),
    more > 0 && el("span", { className: "soft" }, `${more} image${more > 1 ? "s" : ""} not kept (log.thumbnails)`));
}
function detail(part, row) {
  const verdict = Object.entries(row.parts).map(([n, v]) => `${n} ${fmt(v)}`).join(", ");
  const facts = [["score", row.score], ["advantage", row.advantage]].filter(([, v]) => v !== undefined).map(([n, v]) => `${n} ${fmt(v)}`);
  if (row.accurate !== undefined) facts.push(row.accurate ? "accurate" : "not accurate");
  facts.push(`${row.length} tokens sampled`, `finish: ${row.finish}`, `group ${row.group}, sample ${row.sample}`);
  if (row.version[0] >= 0) facts.push(row.version[0] === row.version[1] ? `weights ${row.version[0]}` : `weights ${row.version[0]} to ${row.version[1]}`);
  if (row.outcomes) facts.push("outcomes: " + Object.entries(row.outcomes).map(([n, v]) => `${n} ${v}`).join(", "));
  const spelt = row.pieces.some(p => p.tokens);
  const legend = state.colour === "logprob" ? (spelt ? [el("i", { className: "scale", style: { background: "linear-gradient(90deg, rgba(var(--low), 0), rgba(var(--low), .75))" } }),
    " the sampler's log-prob, 0 to -6 nats and below"] : "no tokenizer of this run was found, or its tokens do not spell this text: no colour by token")
    : state.colour === "advantage" ? [el("i", { className: "scale", style: { background: "linear-gradient(90deg, rgba(var(--down), .6), rgba(var(--down), 0), rgba(var(--up), 0), rgba(var(--up), .6))" } }), " below and above 0, " + (row.pieces.some(x => x.advantages) ? "of each token" : "of the completion")]
    : state.colour === "gap" ? (row.pieces.some(x => x.gaps) ? [el("i", { className: "scale", style: { background: "linear-gradient(90deg, rgba(var(--gap), 0), rgba(var(--gap), .75))" } }),
      " |trainer's log-prob - sampler's|, 1e-6 to 1 nat, logarithmic"] : "only recorded steps (record.every) in which the trainer scored old log-probs tell a gap by token")
    : state.colour === "trained" ? [el("i", { className: "dot", style: { background: "rgba(var(--up), .4)" } }), " sampled and trained  ", el("i", { className: "dot", style: { background: "rgba(var(--down), .4)" } }), " put in between, not trained"] : "";
  return [el("div", null, facts.join(" · ")), verdict && el("div", { className: "soft" }, "rewards: " + verdict),
    row.answer !== undefined && el("div", { className: "soft" }, "reference answer: " + row.answer), el("div", { className: "soft" }, legend),
    el("div", { className: "piece" }, el("span", { className: "soft" }, "prompt"), pictures(part, row), el("div", { className: "text put" }, row.prompt)),
    ...row.pieces.map(p => el("div", { className: "piece" }, el("span", { className: "soft" }, p.trained
      ? (p.turn === undefined ? "completion" : `model, turn ${p.turn + 1}`) + (p.reward ? `, reward ${fmt(p.reward)}` : "") + (p.opens ? ", a new sequence" : "")
      : "put in between, not trained"), pieceText(row, p)))];
}
function browser() {
  if (!D.samples.length) return section("samples", "Completions", el("p", null, "None were recorded (log.rollouts), or the run has no step yet."));
  const list = el("div", { className: "rows" }), said = el("div", { className: "said" }), count = el("span", { className: "soft" });
  const spread = g => new Set(g.map(r => r.score)).size > 1;
  const fill = () => {
    const part = D.samples[state.sample] || D.samples[0], groups = {};
    for (const r of part.rows) (groups[r.group] = groups[r.group] || []).push(r);
    const text = r => (r.prompt + r.pieces.map(p => p.tokens ? p.tokens.join("") : p.text).join("")).toLowerCase();
    const rows = part.rows.filter(r => (!state.search || text(r).includes(state.search.toLowerCase())) && (state.only === "all" ||
      state.only === "better" && r.advantage > 0 || state.only === "worse" && r.advantage < 0 || state.only === "cut" && r.finish === "length" ||
      state.only === "spread" && spread(groups[r.group])));
    count.textContent = `${rows.length} shown, ${part.rows.length} in this page, ${part.of} in the run's file`;
    const pick = k => { state.row = k; [...list.children].forEach((c, j) => c.classList.toggle("on", j === k)); said.replaceChildren(...(rows[k] ? detail(part, rows[k]).filter(Boolean) : ["Nothing fits."])); };
    list.replaceChildren(...rows.map((r, k) => el("button", { className: "row", onclick: () => pick(k) }, el("b", null, fmt(r.score) +
      (r.advantage !== undefined ? `  (advantage ${r.advantage > 0 ? "+" : ""}${fmt(r.advantage)})` : "")), ` group ${r.group}`,
      el("span", null, r.pieces.filter(p => p.trained).map(p => p.tokens ? p.tokens.join("") : p.text).join(" … ").slice(0, 120)))));
    pick(rows[state.row] ? state.row : 0);
  };
  const named = D.samples.map((s, k) => [k, `${D.runs.length > 1 ? D.runs[s.run].name + ", " : ""}${s.what}, step ${s.step}`]);
  const out = section("samples", "Completions", el("p", { className: "soft" }, "Some of each step, whole groups, those with different rewards first; all of them stand in rollouts/ and eval/ of the run."),
    el("div", { className: "controls" }, menu("of", named, state.sample, v => { state.sample = +v; state.row = 0; fill(); }),
      menu("show", [["all", "all"], ["spread", "groups with different scores"], ["better", "advantage above 0"], ["worse", "advantage below 0"], ["cut", "cut by the length limit"]], state.only, v => { state.only = v; state.row = 0; fill(); }),
      menu("colour", Object.entries(COLOURS), state.colour, v => { state.colour = v; fill(); }),
      el("input", { type: "search", placeholder: "search their text", value: state.search, oninput: e => { state.search = e.target.value; state.row = 0; fill(); } }), count),
    el("div", { className: "browse" }, list, said));
  fill();
  return out;
}

function show() {
  waiting.clear();
  document.getElementById("page").replaceChildren(...[head(), warnings(), explained(), tried(), ...D.sections.map(curves), timeline(), plans(),
    browser(), differences()].filter(Boolean));
}
show();
document.documentElement.dataset.drawn = Math.round(performance.now() - began);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
if (D.watch) setInterval(async () => {
  const busy = document.activeElement && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (document.hidden || busy) return;
  try {
    const answer = await fetch("data.json"), found = answer.ok ? await answer.json() : null;
    if (found && found.made !== D.made) { const y = scrollY; D = found; show(); scrollTo(0, y); }
  } catch (e) { /* the server has ended: the page stays as it is */ }
}, 1000 * D.watch);
})();
