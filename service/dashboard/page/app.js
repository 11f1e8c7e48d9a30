"use strict";
// Everything that comes from the service is shown as text: nothing here ever parses it as HTML.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function node(tag, attributes, ...children) {
  const n = document.createElement(tag);
  return fill(n, attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(n, attributes, children) {
  for (const [k, v] of Object.entries(attributes || {})) if (v !== undefined && v !== false) n.setAttribute(k, v === true ? "" : v);
  n.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return n;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (n >= 1024 && u < units.length - 1) { n /= 1024; u++; }
  return (u === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)) + " " + units[u];
}

function count(n) {
  if (n < 10000) return Number.isInteger(n) ? String(n) : n.toFixed(n < 10 ? 1 : 0);
  if (n < 1e6) return (n / 1e3).toFixed(n < 1e5 ? 1 : 0) + "k";
  return (n / 1e6).toFixed(n < 1e7 ? 2 : 1) + "M";
}

function seconds(s) {
  if (s < 0.95) return Math.round(s * 1000) + " ms";
  if (s < 90) return s.toFixed(s < 10 ? 1 : 0) + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  if (s < 172800) return (s / 3600).toFixed(1) + " h";
  return Math.round(s / 86400) + " d";
}

// Rates are differences of counters between two statuses, a little smoothed. They are of the service's clock, so a page that slept shows no burst.
const before = new Map();

function rates(run) {
  const zero = { put: 0, acked: 0, bytesIn: 0, bytesOut: 0, tokensIn: 0, tokensOut: 0 };
  const now = { at: run.elapsed_seconds, put: run.put, acked: run.acked, bytesIn: run.bytes_put, bytesOut: run.bytes_acked, tokensIn: run.tokens_put, tokensOut: run.tokens_acked };
  const last = before.get(run.run_id);
  const r = { ...zero };
  if (last && now.at > last.at) {
    for (const k of Object.keys(zero)) {
      const fresh = Math.max(0, (now[k] - last[k]) / (now.at - last.at));
      r[k] = last.rate ? 0.5 * last.rate[k] + 0.5 * fresh : fresh;
      if (r[k] < 1e-3) r[k] = 0;
    }
  } else if (last && now.at === last.at && last.rate) {
    Object.assign(r, last.rate);
  }
  before.set(run.run_id, { ...now, rate: r });
  return r;
}

// basin draws the store: its level between the marks, what flows in through the gate and out to the trainers.
function basin(run, rate) {
  const h = run.health, caps = h.caps;
  const inBytes = caps.max_bytes > 0;
  const cap = inBytes ? caps.max_bytes : caps.max_samples;
  const show = inBytes ? bytes : count;
  const resident = inBytes ? h.resident_bytes : h.resident_samples;
  const reserved = inBytes ? h.reserved_bytes : h.reserved_samples;
  const dead = inBytes ? h.dead_bytes : h.dead_samples;
  const high = inBytes ? caps.high_watermark_bytes : caps.high_watermark_samples;
  const low = inBytes ? caps.low_watermark_bytes : caps.low_watermark_samples;
  const left = 44, right = 296, top = 24, bottom = 160;
  const y = (v) => bottom - (cap > 0 ? Math.min(1, v / cap) : 0) * (bottom - top);
  const band = (cls, from, to) => to > from ? svg("rect", { class: cls, x: left + 2, width: right - left - 4, y: y(to), height: Math.max(0, y(from) - y(to)) }) : null;
  const used = resident + reserved;
  const share = cap > 0 ? Math.round(100 * used / cap) : 0;
  const label = `${run.run_id}: ${show(used)} of ${show(cap)} used, ${share} percent; producers pause at ${show(high)} and go on at ${show(low)}`;
  const mark = (v, text) => [
    svg("line", { class: "mark", x1: left, x2: right, y1: y(v), y2: y(v) }),
    svg("text", { class: "label", x: right - 10, y: y(v) - 5, "text-anchor": "end" }, text + " " + show(v)),
  ];
  const picture = svg("svg", { class: "basin", viewBox: "0 0 340 186", role: "img", "aria-label": label },
    svg("title", {}, label),
    band("deadwater", 0, dead), band("water", dead, resident), band("reserved", resident, used),
    svg("path", { class: "wall", d: `M${left} ${top - 14}V${bottom}H${right}V${bottom - 12}` }),
    svg("path", { class: "wall", d: `M${right} ${top - 14}V${bottom - 32}` }),
    ...mark(high, "high"), ...mark(low, "low"),
    svg("path", { class: "stream" + (rate.put > 0 ? "" : " dry"), d: `M4 ${top - 4}H${left + 14}V${Math.max(top + 4, y(used) - 2)}` }),
    svg("path", { class: "pipe", d: `M2 ${top - 12}H${left - 6}M2 ${top + 4}H${left - 6}` }),
    svg("rect", { class: "gate" + (run.paused ? " shut" : ""), x: left - 20, width: 8, y: run.paused ? top - 12 : top - 24, height: run.paused ? 17 : 12 }),
    svg("path", { class: "stream" + (rate.acked > 0 ? "" : " dry"), d: `M${right - 10} ${bottom - 22}H336` }),
    svg("path", { class: "pipe", d: `M${right + 4} ${bottom - 30}H338M${right + 4} ${bottom - 14}H338` }),
    svg("text", { class: "big", x: (left + right) / 2, y: bottom + 20, "text-anchor": "middle" }, `${show(used)} of ${show(cap)} · ${share} %`),
  );
  const side = (cls, head, samples, data, tokens, more) => node("div", { class: cls },
    node("div", { class: "head" }, head), node("div", { class: "rate" }, count(samples) + " samples/s"), node("div", {}, bytes(data) + "/s"), node("div", {}, count(tokens) + " tokens/s"), more);
  return node("div", { class: "flow" },
    side("in", "in", rate.put, rate.bytesIn, rate.tokensIn, node("div", {}, run.paused ? "gate shut" : "gate open")), picture,
    side("out", "out", rate.acked, rate.bytesOut, rate.tokensOut, reserved > 0 ? node("div", {}, show(reserved) + " reserved") : null));
}

function figure(name, value, cls) {
  return node("div", {}, node("dt", {}, name), node("dd", { class: cls }, value));
}

function table(heads, rows) {
  return node("div", { class: "wide" }, node("table", {},
    node("thead", {}, node("tr", {}, ...heads.map(([text, n]) => node("th", { class: n && "n", scope: "col" }, text)))),
    node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((cell, i) => node("td", { class: heads[i][1] && "n" }, cell)))))));
}

const specs = new Map(); // what does not change of a run, asked once
const letters = new Map(); // dead letters by run, asked again when their number changes
const opened = new Set(); // runs whose dead letters are unfolded

async function ask(path) {
  const r = await fetch(path, { headers: { Accept: "application/json" }, credentials: "same-origin" });
  if (r.status === 401) { location.assign("/login"); }
  if (!r.ok) throw new Error(r.statusText);
  return r.json();
}

function path(run) { return "/v1/runs/" + encodeURIComponent(run); }

function learn(run) {
  const id = run.run_id;
  if (!specs.has(id)) {
    specs.set(id, null);
    ask(path(id)).then((d) => specs.set(id, d.spec)).catch(() => specs.delete(id));
  }
  const known = letters.get(id);
  if (run.dead > 0 && (!known || known.count !== run.dead || known.total !== run.dead_total)) {
    letters.set(id, { count: run.dead, total: run.dead_total, list: known ? known.list : [] });
    ask(path(id) + "/dead-letters").then((d) => { letters.get(id).list = d.dead_letters; draw(); }).catch(() => letters.delete(id));
  }
}

function deadLetters(run) {
  if (run.dead === 0) return null;
  const known = letters.get(run.run_id);
  const list = known ? known.list : [];
  const most = 50;
  const d = node("details", { open: opened.has(run.run_id) },
    node("summary", {}, `${count(run.dead)} dead ${run.dead === 1 ? "letter" : "letters"}`),
    node("ul", { class: "letters" },
      ...list.slice(0, most).map((l) => node("li", {},
        node("code", {}, l.ref.sample_id), ` failed ${l.fails}, ran out ${l.expiries}${l.freed ? ", bytes freed" : ""}`,
        node("div", { class: "why" }, (l.reasons || []).slice(-1)[0] || "no reason was given"))),
      list.length > most ? node("li", {}, `and ${count(list.length - most)} more: sluice dead-letters ${run.run_id}`) : null));
  d.addEventListener("toggle", () => { if (d.open) opened.add(run.run_id); else opened.delete(run.run_id); });
  return d;
}

function chips(run) {
  const chip = (text, cls) => node("span", { class: "chip " + cls }, text);
  return [
    run.wedged ? chip("wedged", "bad") : null,
    run.closed ? chip(run.cause ? "failed" : run.pending + run.outstanding > 0 ? "draining" : "done", run.cause ? "bad" : "") : chip("open", "ok"),
    run.paused ? chip("producers paused", "warn") : null,
    run.missing_ranks ? chip(`no consumer of ${run.missing_ranks.length === 1 ? "rank " + run.missing_ranks[0] : run.missing_ranks.length + " ranks"}`, "bad") : null,
    run.starving ? chip("consumers starve", "warn") : null,
  ];
}

function card(run) {
  if (run.unavailable) return node("article", { "data-run": run.run_id }, node("h2", {}, run.run_id, node("span", { class: "chip bad" }, "unavailable")), node("p", { class: "wedge" }, run.unavailable));
  const rate = rates(run);
  learn(run);
  const spec = specs.get(run.run_id);
  const life = spec ? spec.visibility_timeout_seconds : 0;
  const old = run.oldest_lease_seconds;
  const waits = [];
  if (run.producers_waiting > 0) waits.push(`${run.producers_waiting} ${run.producers_waiting === 1 ? "producer waits" : "producers wait"} for room`);
  if (run.consumers_waiting > 0) waits.push(`${run.consumers_waiting} ${run.consumers_waiting === 1 ? "consumer waits" : "consumers wait"} for samples`);
  return node("article", { class: run.wedged ? "wedged" : undefined, "data-run": run.run_id },
    node("h2", {}, run.run_id, ...chips(run)),
    run.wedged ? node("p", { class: "wedge" }, "Nothing can move: " + run.wedged) : node("p", { class: "sentence" }, "Bottleneck: " + run.bottleneck + (waits.length ? ". Now " + waits.join(", ") + "." : ".")),
    run.cause ? node("p", { class: "wedge" }, "Closed: " + run.cause) : null,
    basin(run, rate),
    node("dl", {},
      figure("pending", count(run.pending)), figure("leased", count(run.outstanding)), figure("put", count(run.put)), figure("acked", count(run.acked)),
      figure("redelivered", count(run.redelivered), run.redelivered > 0 ? "warn" : undefined), figure("dead", count(run.dead), run.dead > 0 ? "bad" : undefined),
      figure("oldest lease", run.outstanding > 0 ? seconds(old) + (life ? " of " + seconds(life) : "") : "none", life && old > 0.8 * life ? "warn" : undefined),
      run.windows_opened > 0 ? figure("windows", count(run.windows_opened)) : null),
    run.producers.length ? table([["producer"], ["state"], ["put", true], ["last seen", true]],
      run.producers.map((p) => [p.name, p.state, count(p.put), seconds(p.last_seen_seconds) + " ago"])) : null,
    run.consumers.length ? table([["consumer"], ["rank", true], ["leases", true], ["held", true], ["acked", true], ["last seen", true]],
      run.consumers.map((c) => [c.name + (c.waiting ? " (waits)" : ""), String(c.rank), count(c.leases), bytes(c.leased_bytes), count(c.acked), seconds(c.last_seen_seconds) + " ago"])) : null,
    deadLetters(run));
}

let status = null;

function draw() {
  if (!status) return;
  const s = status;
  byId("service").textContent = `${s.host} · ${s.ready ? "ready" : "opening its runs"} · up ${seconds(s.uptime_seconds)} · caps ${bytes(s.cap_bytes)}${s.max_bytes > 0 ? ` of ${bytes(s.max_bytes)}` : ""} · ${count(s.sessions)} ${s.sessions === 1 ? "session" : "sessions"} · durable against ${s.durability === "power" ? "power cuts" : "killed processes"} · ${s.version}`;
  const focused = document.activeElement && document.activeElement.tagName === "SUMMARY" ? document.activeElement.closest("article").dataset.run : null;
  const runs = [...s.runs].sort((a, b) => (b.wedged ? 1 : 0) - (a.wedged ? 1 : 0) || (a.closed ? 1 : 0) - (b.closed ? 1 : 0) || a.run_id.localeCompare(b.run_id));
  byId("runs").replaceChildren(...(runs.length ? runs.map(card) : [node("p", { class: "empty" }, "No runs yet. Make one with ", node("code", {}, "sluice runs create"), " or POST /v1/runs; it shows up here by itself.")]));
  if (focused !== null) { // the card was made anew; who walks through the page with keys stays where they were
    for (const article of document.querySelectorAll("article")) {
      const summary = article.dataset.run === focused && article.querySelector("summary");
      if (summary) summary.focus();
    }
  }
  for (const id of [...before.keys()]) if (!s.runs.some((r) => r.run_id === id)) { before.delete(id); specs.delete(id); letters.delete(id); }
}

function log(e) {
  byId("log").hidden = false;
  const at = new Date(e.time);
  byId("events").prepend(node("li", {}, node("time", { datetime: e.time }, at.toLocaleTimeString()), node("span", {}, e.run_id),
    node("span", {}, e.kind.replaceAll("_", " ") + (e.subject ? " " + e.subject : "") + (e.text ? ": " + e.text : ""))));
  while (byId("events").children.length > 200) byId("events").lastChild.remove();
}

let lostAt = 0;

function lost() {
  if (!lostAt) lostAt = Date.now();
  byId("banner").hidden = false;
  byId("banner").textContent = `No connection to the service since ${new Date(lostAt).toLocaleTimeString()}: what you see is from then. Trying again.`;
}

function connect() {
  const events = new EventSource("/v1/events");
  events.addEventListener("status", (m) => {
    lostAt = 0;
    byId("banner").hidden = true;
    status = JSON.parse(m.data);
    draw();
  });
  events.addEventListener("event", (m) => log(JSON.parse(m.data)));
  events.addEventListener("error", () => {
    lost();
    if (events.readyState === EventSource.CLOSED) { // refused, not merely cut: find out whether the login has ended, and begin again
      ask("/v1/status").catch(() => {});
      setTimeout(connect, 2000);
    }
  });
}

connect();
