// Lights up a node's edges and neighbours and shows its details; a click keeps them until the next.
"use strict";
const nodes = JSON.parse(document.getElementById("nodes").textContent);
const about = document.getElementById("about");
const hint = about.innerHTML;
let kept = null;

const all = (selector) => document.querySelectorAll(selector);
const row = (i) => document.getElementById("n" + i);

function add(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  about.append(made);
}

function list(title, lines) {
  if (!lines.length) return;
  add("h4", title);
  add("div", lines.join("\n"));
}

function clear() {
  for (const name of ["lit", "before", "after"])
    for (const e of all("." + name)) e.classList.remove(name);
  about.innerHTML = hint;
}

function show(i) {
  clear();
  const n = nodes[i];
  row(i).classList.add("lit");
  for (const e of all(`.edge[data-to="${i}"]`)) { e.classList.add("before"); row(e.dataset.from).classList.add("before"); }
  for (const e of all(`.edge[data-from="${i}"]`)) { e.classList.add("after"); row(e.dataset.to).classList.add("after"); }
  about.innerHTML = "";
  add("h3", `#${n.id} ${n.op}`);
  add("div", n.says);
  list("runs", [n.kernel ? `${n.where}: ${n.kernel}` : n.where]);
  if (n.reason) add("div", n.reason, "bad");
  list("takes", n.takes);
  list("attributes", n.attributes);
  list("gives", n.gives);
  list("state", n.states);
  list("waits for", n.waits);
}

for (const e of all(".row")) {
  const i = e.id.slice(1);
  e.addEventListener("mouseenter", () => { if (kept === null) show(i); });
  e.addEventListener("mouseleave", () => { if (kept === null) clear(); });
  e.addEventListener("focus", () => { kept = null; show(i); });
  e.addEventListener("click", () => { kept = kept === i ? null : i; show(i); });
}
document.addEventListener("keydown", (e) => { if (e.key === "Escape") { kept = null; clear(); } });
