// What is made here is made of elements and text nodes alone: a string never becomes markup.

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function link(text, view, query) {
  return make("a", { href: `#${view}?${new URLSearchParams(query)}` }, text);
}

export function table(columns, rows, attributes = {}) {
  const head = columns.length ? [make("thead", {}, make("tr", {}, columns.map((c) => make("th", {}, c))))] : [];
  const body = rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell ?? ""))));
  return make("table", attributes, ...head, make("tbody", {}, body));
}

export async function get(path, query = {}) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// As a document, not as a string of markup: it is XML that the server has made and escaped.
export function draw(holder, path, query = {}) {
  return new Promise((done) => {
    const asked = new XMLHttpRequest();
    asked.open("GET", `${path}?${new URLSearchParams(query)}`);
    asked.responseType = "document";
    asked.onloadend = () => {
      const drawn = asked.status === 200 && asked.responseXML ? asked.responseXML.documentElement : null;
      holder.replaceChildren(...(drawn ? [document.importNode(drawn, true)] : []));
      done(drawn !== null);
    };
    asked.send();
  });
}

export function number(value, digits = 4) {
  return value === null || value === undefined ? "" : String(Number(Number(value).toPrecision(digits)));
}

export function share(value) {
  return value === null ? "" : `${Math.round(100 * value)}%`;
}

export function failed(error) {
  const place = document.getElementById("error");
  place.hidden = !error;
  place.textContent = error ? error.message : "";
}
