// The page's frame: what is served, what it takes and gives, where it comes from and how it fares. It asks
// the public calls alone. Texts of the server become text nodes and nothing else: names may be hostile.
"use strict";

const STATISTICS_MS = 2000;
const INDEX_MS = 10000;
// Looks that the picture of the rate spans.
const LOOKS = 60;

const state = { index: [], shownIndex: "", shown: "", looks: new Map(), token: "" };
const byId = (id) => document.getElementById(id);

// An element with attributes and children; strings among these become text.
function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "polyline", "polygon"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== undefined && child !== null));
  return made;
}

// What the server refused, and with which status; 0 when it did not answer.
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Integers beyond what a double holds stay whole, in browsers that tell how they were written.
function parse(text) {
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")
      ? BigInt(context.source)
      : value);
}

// One REST call; `body` is JSON text, and none makes it a GET.
async function call(path, body) {
  const options = { cache: "no-store", headers: {} };
  if (state.token) options.headers.authorization = `Bearer ${state.token}`;
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body });
    options.headers["content-type"] = "application/json";
  }
  let response, text;
  try {
    response = await fetch(path, options);
    text = await response.text();
  } catch {
    throw new Refused(0, "the server does not answer");
  }
  if (response.ok) return text ? parse(text) : {};
  if (response.status === 401 || response.status === 403) byId("access").hidden = false;
  let said = text;
  try {
    said = JSON.parse(text).error ?? text;
  } catch { /* Not the server's own words, but those of something before it. */ }
  throw new Refused(response.status, String(said || response.statusText));
}

const pathOf = (model, version) =>
  `v2/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}`;
const linkOf = (model, version) => `#${encodeURIComponent(model)}/${encodeURIComponent(version)}`;
const whole = (value) => (typeof value === "bigint" ? value : Math.round(value)).toLocaleString("en");
const short = (value) => (value >= 100 ? whole(value) : Number(value.toPrecision(3)).toString());
const shapeOf = (shape) => `[${shape.map((extent) => (extent < 0 ? "any" : extent)).join(", ")}]`;

// Nanoseconds as people read them: number and unit.
function time(nanos) {
  if (nanos >= 1e9) return [short(nanos / 1e9), "s"];
  return nanos >= 1e6 ? [short(nanos / 1e6), "ms"] : [short(nanos / 1e3), "µs"];
}

const pill = (kind, text) => element("span", { class: `pill ${kind}` }, text);
const KINDS = { READY: "good", LOADING: "warn", UNAVAILABLE: "bad" };
const badge = (entry) => pill(KINDS[entry.state] ?? "", String(entry.state).toLowerCase());
const notice = (text) => element("p", { class: "notice bad", role: "alert" }, text);
const card = (title, ...content) => element("section", { class: "card", "aria-label": title }, element("h3", {}, title), ...content);

function table(caption, headers, rows) {
  const head = headers.map((text) => element("th", { scope: "col" }, text));
  const row = (cells) => element("tr", {}, cells.map((cell) => (cell instanceof Node && cell.nodeName === "TD" ? cell : element("td", {}, cell))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows.map(row))));
}

function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== undefined && value !== "");
  return element("dl", { class: "facts" }, told.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// ---- What is served

// Says how the server is; screen readers tell it, so only what is new is said.
function say(...parts) {
  const server = byId("server");
  const text = (nodes) => [...nodes].map((node) => node.textContent).join();
  if (text(server.childNodes) !== text(parts)) server.replaceChildren(...parts);
}

async function look() {
  try {
    const [index, told, ready] = await Promise.all([
      call("v2/repository/index", "{}"),
      call("v2"),
      call("v2/health/ready").then(() => true, (refused) => { if (refused.status !== 503) throw refused; return false; }),
    ]);
    state.index = index;
    say(element("span", { class: "quiet" }, `${told.name} ${told.version}`), ready ? pill("good", "ready") : pill("warn", "not ready"));
  } catch (refused) {
    say(pill("bad", refused.message));
    return;
  }
  const text = JSON.stringify(state.index);
  if (text !== state.shownIndex) {
    state.shownIndex = text;
    showModels();
  }
  await showDetail();
}

// Versions of a model, the newest first.
const versionsOf = (model) =>
  state.index.filter((entry) => entry.name === model).sort((a, b) => Number(b.version) - Number(a.version));

function chosen() {
  const [model, version] = location.hash.slice(1).split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  const versions = versionsOf(model ?? "");
  const best = (all) => all.find((entry) => entry.state === "READY") ?? all[0];
  const entry = versions.find((entry) => entry.version === version) ?? best(versions);
  return entry ?? (model ? undefined : best(state.index));
}

function showModels() {
  const names = [...new Set(state.index.map((entry) => entry.name))].sort();
  const line = (name) => {
    const versions = versionsOf(name);
    const ready = versions.filter((entry) => entry.state === "READY");
    const newest = ready[0] ?? versions[0];
    const other = versions.length - ready.length;
    const text = `${ready.length} of ${versions.length} version${versions.length === 1 ? "" : "s"} ready`;
    return element("li", {}, element("a", { href: linkOf(name, newest.version), "data-model": name },
      element("span", { class: "name" }, name),
      other && !ready.length ? badge(newest) : element("span", { class: "rate", "data-rate": name }),
      element("span", { class: "quiet" }, text)));
  };
  byId("models").replaceChildren(names.length
    ? element("ul", {}, names.map(line))
    : element("p", { class: "quiet" }, "There are no models."));
  markCurrent();
}

function markCurrent() {
  const entry = chosen();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.model === entry?.name) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

// ---- One version

async function showDetail() {
  const entry = chosen();
  markCurrent();
  const shown = JSON.stringify([entry, state.index.filter((other) => other.name === entry?.name), location.hash]);
  if (shown === state.shown) return;
  state.shown = shown;
  const main = byId("detail");
  if (!entry) {
    document.title = "Millrace models";
    main.replaceChildren(location.hash.length > 1
      ? notice("This server has no such model.")
      : card("No models yet", element("p", {}, "A model shows here as soon as the repository holds a complete version of it.")));
    return;
  }
  document.title = `${entry.name} · Millrace models`;
  const versions = versionsOf(entry.name).map((other) =>
    element("a", { href: linkOf(other.name, other.version), "aria-current": other === entry ? "page" : undefined }, `version ${other.version}`));
  const heading = element("div", { class: "heading" }, element("h2", {}, entry.name), badge(entry),
    element("div", { class: "versions", role: "group", "aria-label": "Versions" }, versions));
  const reason = entry.reason ? [notice(entry.reason)] : [];
  main.replaceChildren(heading, ...reason);
  if (entry.state !== "READY") return;
  const path = pathOf(entry.name, entry.version);
  try {
    const [metadata, config, lineage] = await Promise.all([
      call(path), call(`${path}/config`), call(`${path}/lineage`),
    ]);
    if (state.shown !== shown) return;
    const live = card("Now", element("p", { class: "quiet" }, "Counting…"));
    live.id = "live";
    const left = element("div", { class: "stack" }, tryCard(entry, metadata), live);
    const right = element("div", { class: "stack" }, signatureCard(metadata, config), lineageCard(lineage));
    main.append(element("div", { class: "halves" }, left, right));
    showStatistics();
  } catch (refused) {
    if (state.shown !== shown) return;
    state.shown = "";
    main.append(notice(refused.message));
  }
}

function signatureCard(metadata, config) {
  const rows = (kind, tensors) => tensors.map((tensor) =>
    [kind, element("span", { class: "mono" }, tensor.name), tensor.datatype, element("span", { class: "mono" }, shapeOf(tensor.shape))]);
  const groups = (config.instance_group ?? []).map((group) =>
    `${group.count} on ${String(group.kind).replace("KIND_", "")}${(group.gpus ?? []).map((gpu) => ` ${gpu}`).join(",")}`);
  return card("Signature",
    table("What it takes and gives", ["", "Name", "Type", "Shape"], [...rows("input", metadata.inputs), ...rows("output", metadata.outputs)]),
    element("p", { class: "quiet" }, [
      config.max_batch_size > 0 ? `Up to ${whole(config.max_batch_size)} rows in a request. ` : "A request is one run: it has no rows. ",
      groups.length ? `Sessions: ${groups.join(", ")}.` : "",
      config.ensemble_scheduling ? `Steps: ${config.ensemble_scheduling.step.map((step) => step.model_name).join(", ")}.` : "",
    ].join("")));
}

function lineageCard({ created_at, lineage, metrics, files }) {
  const landed = Object.entries(lineage.offsets).map(([topic, partitions]) => {
    const each = Object.entries(partitions).map(([partition, offset]) => `partition ${partition} up to ${whole(offset)}`);
    return element("div", {}, `${topic}: ${each.join(", ")}`);
  });
  const trained = lineage.steps > 0
    ? `${whole(lineage.steps)} steps, ${whole(lineage.epochs)} epoch${lineage.epochs === 1 ? "" : "s"}, seed ${lineage.seed}` : "";
  const figures = Object.entries(metrics).map(([name, value]) => element("div", {}, `${name} ${value}`));
  const digest = (text) => element("code", {}, text);
  const known = facts([
    ["Snapshot", lineage.volume && [lineage.volume, lineage.snapshot].filter(Boolean).join("@")],
    ["Topic", lineage.topic],
    ["Mixture", lineage.mixture ? element("div", {}, lineage.mixture.map(({ dataset, weight }) =>
      element("div", {}, `${dataset}=${weight}`))) : ""],
    ["Selected by", lineage.selection],
    ["Records", landed.length ? element("div", {}, landed) : ""],
    ["Training", trained],
    ["Figures", figures.length ? element("div", {}, figures) : ""],
    ["Trained by", lineage.code_version && `millrace ${lineage.code_version}`],
    ["Configuration", lineage.config_sha256 && digest(lineage.config_sha256)],
    ["Bundled", created_at],
    ["Files", files.length ? element("div", {}, files.map((file) =>
      element("div", {}, `${file.path}, ${whole(file.bytes)} bytes, SHA-256 `, digest(file.sha256)))) : ""],
  ]);
  return card("Lineage", known, lineage.volume || lineage.topic || lineage.mixture || !files.length ? ""
    : element("p", { class: "quiet" }, "The bundle does not say which data it was trained on."));
}

// ---- Statistics

async function count() {
  let told;
  try {
    told = (await call("v2/models/stats")).model_stats;
  } catch {
    return; // The state of the server says so.
  }
  const at = performance.now();
  const rates = new Map();
  for (const now of told) {
    const key = JSON.stringify([now.name, now.version]);
    const looks = state.looks.get(key) ?? [];
    const last = looks.at(-1);
    const requests = now.inference_stats.success.count;
    // Fewer than before: the version was loaded anew.
    const anew = last && requests < last.now.inference_stats.success.count;
    const kept = anew ? [] : looks;
    const before = kept.at(-1);
    const rate = before ? ((requests - before.now.inference_stats.success.count) * 1000) / Math.max(at - before.at, 1) : 0;
    state.looks.set(key, [...kept, { at, now, rate, before: before?.now }].slice(-LOOKS));
    rates.set(now.name, (rates.get(now.name) ?? 0) + rate);
  }
  for (const place of document.querySelectorAll("[data-rate]")) {
    const rate = rates.get(place.dataset.rate) ?? 0;
    place.textContent = rate > 0 ? `${short(rate)}/s` : "";
  }
  showStatistics();
}

function showStatistics() {
  const live = byId("live");
  const entry = chosen();
  const looks = state.looks.get(JSON.stringify([entry?.name, entry?.version]));
  if (!live || !looks) return;
  const { now, before, rate } = looks.at(-1);
  const lately = before && now.inference_stats.success.count > before.inference_stats.success.count;
  // Means over the last look where there was one with requests, else since the version was loaded.
  const since = (pick) => pick(now) - (lately ? pick(before) : 0);
  const requests = since((all) => all.inference_stats.success.count);
  const mean = (step) => (requests > 0 ? since((all) => all.inference_stats[step].ns) / requests : 0);
  const runs = since((all) => all.execution_count);
  const rows = since((all) => all.inference_count);
  const figure = (name, value, unit = "") => element("div", {}, element("dt", {}, name),
    element("dd", {}, value, " ", element("span", { class: "unit" }, unit)));
  const none = ["–", ""];
  const figures = element("dl", { class: "figures" },
    figure("Requests", short(rate), "/s"),
    figure("Mean time", ...(requests > 0 ? time(mean("success")) : none)),
    figure("Rows of a run", ...(runs > 0 ? [short(rows / runs), ""] : none)),
    figure("Answered", whole(now.inference_stats.success.count)),
    figure("Refused or failed", whole(now.inference_stats.fail.count)));
  const title = element("h3", {}, "Now");
  live.replaceChildren(title, figures, rateFigure(looks), ...(requests > 0 ? [stepsFigure(mean, lately)] : []), ...sizesTable(now));
}

function rateFigure(looks) {
  const top = Math.max(...looks.map((look) => look.rate), 1e-9);
  const points = looks.map((look, at) => `${LOOKS - looks.length + at},${(20 - (look.rate / top) * 18).toFixed(2)}`);
  const first = LOOKS - looks.length;
  return element("figure", {},
    element("figcaption", {}, `Requests a second over ${(LOOKS * STATISTICS_MS) / 60000} minutes, at most ${short(top < 1e-6 ? 0 : top)}`),
    element("svg", { class: "spark", viewBox: `0 0 ${LOOKS - 1} 21`, preserveAspectRatio: "none", "aria-hidden": "true" },
      element("polygon", { points: `${first},21 ${points.join(" ")} ${LOOKS - 1},21` }),
      element("polyline", { points: points.join(" ") })));
}

function stepsFigure(mean, lately) {
  const steps = [["waiting", "queue"], ["making values", "compute_input"], ["running", "compute_infer"], ["taking results", "compute_output"]]
    .map(([name, step], at) => ({ name, nanos: mean(step), class: `step${at + 1}` }));
  const told = steps.reduce((sum, step) => sum + step.nanos, 0);
  steps.push({ name: "reading and checking", nanos: Math.max(mean("success") - told, 0), class: "step5" });
  const total = Math.max(told, mean("success"), 1);
  let from = 0;
  const bars = steps.map((step) => {
    const part = (step.nanos / total) * 100;
    const bar = element("rect", { class: step.class, x: `${from}%`, width: `${part}%`, height: "100%" });
    from += part;
    return bar;
  });
  return element("figure", {},
    element("figcaption", {}, `Where a request's time goes, ${lately ? "just now" : "since it was loaded"}`),
    element("svg", { class: "steps", "aria-hidden": "true" }, bars),
    element("ul", { class: "legend" }, steps.map((step) => element("li", {},
      element("svg", { "aria-hidden": "true" }, element("rect", { class: step.class, width: "100%", height: "100%", rx: "2" })),
      `${step.name} ${time(step.nanos).join(" ")}`))));
}

function sizesTable(now) {
  const sizes = now.batch_stats;
  if (!sizes.length) return [];
  const top = Math.max(...sizes.map((size) => size.compute_infer.count));
  const rows = [...sizes].sort((a, b) => b.compute_infer.count - a.compute_infer.count).slice(0, 8)
    .sort((a, b) => a.batch_size - b.batch_size)
    .map((size) => [whole(size.batch_size), whole(size.compute_infer.count),
      time(size.compute_infer.ns / size.compute_infer.count).join(" "),
      element("svg", { class: "bar", "aria-hidden": "true" }, element("rect", { width: `${(size.compute_infer.count / top) * 100}%`, height: "100%", rx: "2" }))]);
  return [table("Runs by their rows, since it was loaded", ["Rows", "Runs", "Time of one", ""], rows)];
}

// ---- Beginning

// Calls again and again, each time after the one before has ended, and not while nobody looks.
function every(milliseconds, work) {
  const again = async () => {
    if (!document.hidden) await work();
    setTimeout(again, milliseconds);
  };
  again();
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = byId("token").value;
  state.shown = "";
  look();
});
window.addEventListener("hashchange", showDetail);
every(INDEX_MS, look);
every(STATISTICS_MS, count);
