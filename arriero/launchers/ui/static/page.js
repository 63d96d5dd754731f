// The frame: which view is open, the run as it goes on, keys, light and dark.

import { failed, make } from "./dom.js";
import { lineage } from "./lineage.js";
import { rollouts } from "./rollouts.js";
import { compare, curves, overview, timeline } from "./views.js";

const VIEWS = { overview, curves, timeline, rollouts, lineage, compare };
const view = document.getElementById("view");
const tabs = document.getElementById("tabs");
let live = () => {};
let now = null;
let opened = 0;

function where() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [name in VIEWS ? name : "overview", new URLSearchParams(query)];
}

async function open() {
  const [name, query] = where();
  const mine = ++opened;
  const place = make("div");
  live = () => {};
  document.body.dataset.view = name;
  for (const tab of tabs.children) {
    if (tab.textContent === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  view.replaceChildren(place);
  failed(null);
  try {
    const made = await VIEWS[name](place, query);
    if (mine !== opened) return;
    live = made;
    live(now);
  } catch (error) {
    if (mine === opened) failed(error);
  }
}

function heard(event) {
  now = JSON.parse(event.data);
  const warned = document.getElementById("warned");
  const head = document.getElementById("head");
  if (now) {
    document.getElementById("run").textContent = now.run;
    document.title = `${now.run} · arriero`;
  }
  head.textContent = now ? `${now.state}, step ${now.step}` : "no replica has been heard of yet";
  warned.textContent = now && now.warned.length ? `warned: ${now.warned.join(", ")}` : "";
  live(now);
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  try { localStorage.setItem("arriero-dark", dark ? "1" : ""); } catch { /* storage may be forbidden */ }
}

function begun() {
  try {
    const kept = localStorage.getItem("arriero-dark");
    if (kept !== null) return kept === "1";
  } catch { /* storage may be forbidden */ }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function keys() {
  const list = document.getElementById("keylist");
  list.hidden = !list.hidden;
  document.getElementById("keys").setAttribute("aria-expanded", String(!list.hidden));
}

const turn = () => theme(!document.documentElement.classList.contains("dark"));

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.matches("a, button")) return;
  const names = Object.keys(VIEWS);
  const action = live.keys?.[event.key]
    ?? (names[event.key - 1] ? () => { location.hash = `#${names[event.key - 1]}`; } : { d: turn, "?": keys }[event.key]);
  if (!action) return;
  event.preventDefault();
  action();
});

theme(begun());
document.getElementById("theme").addEventListener("click", turn);
document.getElementById("keys").addEventListener("click", keys);
tabs.append(...Object.keys(VIEWS).map((name) => make("a", { href: `#${name}` }, name)));
addEventListener("hashchange", open);
const events = new EventSource("events");
events.addEventListener("message", heard);
events.addEventListener("error", () => { document.getElementById("head").textContent = "the page's server doesn't answer"; });
open();
