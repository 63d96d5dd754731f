// The views that show numbers and pictures of the run as a whole.

import { draw, failed, get, make, number, share, table } from "./dom.js";

const SELDOM_MS = 5000;

export async function overview(place) {
  const graph = make("div", { class: "picture graph", id: "graph" });
  const nodes = make("div", { id: "nodes" });
  const edges = make("div", { id: "edges" });
  const about = make("div", { id: "about" });
  place.append(graph, nodes, edges, about);
  const live = (now) => {
    draw(graph, "pictures/graph");
    if (!now) return;
    const told = now.nodes.map((n) => [
      n.name, n.does, share(n.idle), number(n.records_per_s, 3), number(n.tokens_per_s, 3),
      n.heard_s === null ? "" : `${Math.round(n.heard_s)} s ago`,
    ]);
    nodes.replaceChildren(table(["node", "does", "idle", "records/s", "tokens/s", "heartbeat"], told));
    const stand = now.edges.map((e) => [
      e.name, `${e.messages} of ${e.capacity}`, e.waiting, e.leased,
      make("meter", { min: 0, max: 1, value: e.fill, title: share(e.fill) }), e.flow === "full" ? "full" : "",
    ]);
    edges.replaceChildren(table(["edge", "messages", "waiting", "leased", "fill", ""], stand));
  };
  get("api/run").then(({ sections }) => {  // the first question to a large record takes a while
    for (const [name, rows] of Object.entries(sections)) {
      about.append(make("h2", {}, name));
      about.append(rows.length ? table([], rows) : make("p", { class: "note" }, "nothing"));
    }
  }, failed);
  return live;
}

export async function curves(place) {
  const filter = make("input", { type: "search", placeholder: "another measure", "aria-label": "measures" });
  const charts = make("div", { class: "charts picture", id: "curves" });
  const spread = make("div", { class: "charts picture", id: "distributions" });
  place.append(filter, charts, make("h2", {}, "Trained rollouts"), spread);
  let drawn = 0;
  const redraw = async () => {
    const known = await get("api/measures");
    const wanted = filter.value.trim().toLowerCase();
    const tags = wanted ? known.all.filter((t) => t.toLowerCase().includes(wanted)).slice(0, 24) : Object.keys(known.usual);
    await fill(charts, tags, (tag) => ["pictures/curve", { measure: tag }]);
    await fill(spread, Object.keys(known.distributions), (name) => ["pictures/distribution", { name }]);
    drawn = Date.now();
  };
  filter.addEventListener("input", redraw);
  await redraw();
  return () => { if (Date.now() - drawn > SELDOM_MS) redraw(); };
}

// One holder per name, kept where it is there already: what is looked at doesn't jump.
async function fill(place, names, where) {
  const kept = new Map([...place.children].map((holder) => [holder.dataset.name, holder]));
  const holders = names.map((name) => kept.get(name) ?? make("div", { "data-name": name }));
  place.replaceChildren(...holders);
  await Promise.all(holders.map((holder, k) => draw(holder, ...where(names[k]))));
}

export async function timeline(place) {
  const picture = make("div", { class: "picture wide", id: "timeline" });
  const note = make("p", { class: "note" });
  place.append(picture, note);
  let drawn = 0;
  const redraw = async () => {
    drawn = Date.now();
    if (!(await draw(picture, "pictures/timeline"))) note.textContent = "nothing yet";
  };
  note.textContent = (await get("api/run")).timeline;
  await redraw();
  return () => { if (Date.now() - drawn > SELDOM_MS) redraw(); };
}

export async function compare(place, query) {
  const names = await get("api/runs");
  if (!names.length) {
    place.append(make("p", { class: "note" }, "no other run lies beside this one"));
    return () => {};
  }
  const chosen = query.get("with") ?? "";
  const options = ["", ...names].map((n) => make("option", { value: n, selected: n === chosen }, n));
  const choice = make("select", { id: "other", "aria-label": "the other run" }, options);
  choice.addEventListener("change", () => { location.hash = `#compare?${new URLSearchParams({ with: choice.value })}`; });
  place.append(make("label", {}, "with "), choice);
  if (!chosen) return () => {};
  const found = await get("api/compare", { with: chosen });
  const charts = make("div", { class: "charts picture" });
  place.append(charts);
  await fill(charts, found.curves, (measure) => ["pictures/compare", { with: chosen, measure }]);
  const told = found.step === null ? `no difference in the ${found.both} steps that both have made`
    : `the first step at which they differ is ${found.step}, of ${found.both}`;
  place.append(make("h2", {}, told));
  const words = (v) => (v === null ? "" : typeof v === "string" ? v : JSON.stringify(v));
  const rows = (pairs) => pairs.map(([key, first, second]) => [key, words(first), words(second)]);
  place.append(table(["measure", "this run", chosen], rows(found.measures)));
  place.append(make("h2", {}, "Made of"), table(["key", "this run", chosen], rows(found.differences)));
  return () => {};
}
