// The rollout browser: filters and pages are the server's, one page of rows is held here.

import { failed, get, link, make, number, table } from "./dom.js";

const COLUMNS = ["step", "reward", "outcome", "tokens", "stale", "finish", "row", "prompt", "response"];
const COUNT = 50;
const CHOICES = {
  order: ["newest", "oldest", "best", "worst", "longest", "stalest"],
  outcome: ["", "ok", "wrong", "error", "timeout"],
  finish: ["", "stop", "length"],
  split: ["", "train", "eval"],
};
const FIELDS = { text: "search", step: "number", row: "number", least: "number", most: "number" };
const LABELS = { text: "search (/)", least: "reward from", most: "to" };

export async function rollouts(place, query) {
  const fields = {};
  const labels = Object.entries(FIELDS).map(([name, type]) => {
    const value = query.get(name) ?? "";
    fields[name] = make("input", { type, value, name, step: name.endsWith("st") ? "any" : undefined });
    return make("label", {}, LABELS[name] ?? name, fields[name]);
  });
  for (const [name, values] of Object.entries(CHOICES)) {
    const options = values.map((v) => make("option", { value: v, selected: v === query.get(name) }, v || "any"));
    fields[name] = make("select", { name }, options);
    labels.push(make("label", {}, name, fields[name]));
  }
  const form = make("form", { class: "filters", id: "filters", role: "search" }, labels);
  const told = make("p", { class: "note", id: "told", role: "status" });
  const list = make("div", { id: "list" });
  const back = make("button", { type: "button", id: "back" }, "previous (p)");
  const on = make("button", { type: "button", id: "on" }, "next (n)");
  const detail = make("section", { id: "detail", "aria-live": "polite" });
  const again = make("button", { type: "button", id: "again", hidden: true });
  place.append(form, told, again, list, make("p", {}, back, " ", on), detail);

  const begins = [0];  // of this page and those before it
  let page = { lines: [], total: 0, searched: 0, after: null };
  let selected = -1;
  let asking = 0;

  async function load() {
    const mine = ++asking;
    const asked = Object.fromEntries(Object.entries(fields).map(([k, f]) => [k, f.value]).filter(([, v]) => v));
    told.textContent = "looking";
    page = { ...page, after: null };
    try {
      const lines = [];
      let found = { after: begins.at(-1) };
      do {  // a search that takes long comes in pieces
        found = await get("api/rollouts", { ...asked, start: found.after, count: COUNT - lines.length });
        if (mine !== asking) return;  // something else has been asked for since
        lines.push(...found.lines);
        page = { ...found, lines };
        show();
      } while (asked.text && found.after !== null && lines.length < COUNT);
      failed(null);
    } catch (error) {
      if (mine === asking) { told.textContent = ""; failed(error); }
    }
  }

  function show() {
    const from = begins.at(-1);
    const searched = fields.text.value ? `, searched to ${page.searched}` : "";
    told.textContent = page.total ? `${page.lines.length} shown from ${from + 1} of ${page.total}${searched}` : "none";
    back.disabled = begins.length === 1;
    on.disabled = page.after === null;
    const rows = page.lines.map((r) => [
      r.step ?? "", number(r.reward), r.outcome, r.sampled, r.staleness ?? "", r.finish, r.row, r.prompt, r.response,
    ]);
    const made = table(COLUMNS, rows, { class: "list" });
    made.querySelectorAll("th").forEach((th, k) => { if (k > 6) th.className = "wide"; });
    made.querySelectorAll("tbody tr").forEach((row, k) => {
      row.tabIndex = 0;
      row.addEventListener("click", () => open(k));
    });
    list.replaceChildren(made);
    selected = -1;
  }

  function select(k) {
    const rows = [...list.querySelectorAll("tbody tr")];
    selected = Math.max(0, Math.min(k, rows.length - 1));
    rows.forEach((row, n) => row.setAttribute("aria-selected", n === selected));
    rows[selected]?.focus();
    rows[selected]?.scrollIntoView({ block: "nearest" });
  }

  async function open(k) {
    select(k);
    if (page.lines[selected]) await shown(page.lines[selected].id);
  }

  async function shown(id) {
    try {
      const close = make("button", { type: "button" }, "close (Esc)");
      close.addEventListener("click", () => detail.replaceChildren());
      detail.replaceChildren(close, ...one(await get("api/rollout", { id })));
      detail.scrollTop = 0;
      failed(null);
    } catch (error) {
      failed(error);
    }
  }

  function turn(forward) {
    if (forward ? page.after === null : begins.length === 1) return;
    if (forward) begins.push(page.after); else begins.pop();
    load();
  }

  function anew() {
    begins.splice(0, begins.length, 0);
    load();
  }

  back.addEventListener("click", () => turn(false));
  on.addEventListener("click", () => turn(true));
  form.addEventListener("change", anew);
  form.addEventListener("submit", (event) => { event.preventDefault(); anew(); });
  await load();
  if (query.get("id")) await shown(query.get("id"));

  let seen = null;  // the step at which the list was made
  const live = (now) => {
    if (!now) return;
    seen ??= now.step;
    again.hidden = now.step === seen;
    again.textContent = `the run has gone on to step ${now.step}: look again (r)`;
    if (!page.total && now.step !== seen) look();
  };
  const look = () => { seen = null; again.hidden = true; anew(); };
  again.addEventListener("click", look);
  live.keys = {
    r: look,
    j: () => select(selected + 1), k: () => select(selected - 1), Enter: () => open(selected),
    n: () => turn(true), p: () => turn(false), Escape: () => detail.replaceChildren(),
    "/": () => fields.text.focus(),
  };
  return live;
}

function one(found) {
  const { line, texts } = found;
  const facts = [
    ["id", line.id], ["reward", number(line.reward)], ["before shaping", number(line.raw)],
    ["of turns", found.turns.map((reward, k) => `${k + 1}: ${number(reward)}`).join(", ")],
    ["outcome", line.outcome], ["said of it", texts?.detail ?? ""], ["tokens sampled", line.sampled],
    ["finish", line.finish], ["versions", line.oldest === line.newest ? line.newest : `${line.oldest} to ${line.newest}`],
    ["staleness", line.staleness ?? ""], ["temperature", number(found.temperature)], ["seed", found.seed],
    ["reward version", found.reward_version], ["recorded in", found.recorded],
    ["trained in", found.steps.map((step) => [link(`step ${step}`, "lineage", { step }), " "]).flat()],
    ["prompt", link(found.prompt_id, "lineage", { prompt: found.prompt_id })],
    ["group", found.others.map(([id, reward]) => [link(number(reward) || "?", "rollouts", { id }), " "]).flat()],
    ["lineage", link("what became of it", "lineage", { rollout: line.id })],
  ].filter(([, value]) => value !== "" && value.length !== 0);
  const parts = [make("h2", {}, `Rollout ${line.id}`), table([], facts)];
  if (texts) {
    parts.push(make("h2", {}, "Prompt"), make("pre", { id: "prompt" }, texts.prompt));
    if (texts.answer) parts.push(make("p", { class: "note" }, `answer: ${texts.answer}`));
    parts.push(make("h2", {}, "Tokens"), make("pre", { id: "tokens" }, found.tokens.map(token)));
    if (found.left_out) parts.push(make("p", { class: "note" }, `${found.left_out} more tokens`));
    parts.push(make("h2", {}, "Response"), make("pre", { id: "response" }, texts.response));
  } else {
    parts.push(make("p", { class: "note" }, "its texts and tokens are redacted"));
  }
  return parts;
}

function token(t) {
  if (t.logprob === null) return make("span", { class: "unsampled", title: "not sampled" }, t.text);
  const advantage = t.advantage === null ? "" : `, advantage ${number(t.advantage, 3)}`;
  const title = `log-prob ${number(t.logprob, 3)}, version ${t.version}${advantage}`;
  return make("span", { class: t.kind, title }, t.text);
}
