/** The controls of the grid of heads: menus of colours and order, labels, search. */

import { css, labelColour, weightColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import type { HeadData } from "./page_data.ts";
import type { App } from "./store.ts";
import { bounds, type Measure, named, shown } from "./wall_measures.ts";

type Choice = { name: string; title: string; group: string };

/** A menu with its name in sight. */
function menu(id: string, title: string, chosen: (name: string) => void): [HTMLElement, HTMLSelectElement] {
  const select = el("select", { id });
  select.addEventListener("change", () => chosen(select.value));
  return [el("label", { class: "menu" }, el("span", null, title), select), select];
}

/** What a menu offers; groups as they come, what has none first. */
function offer(select: HTMLSelectElement, choices: Choice[], value: string): void {
  const groups = new Map<string, HTMLElement>();
  const children: HTMLElement[] = [];
  for (const { name, title, group } of choices) {
    const option = el("option", { value: name }, title);
    if (group === "") children.push(option);
    else if (groups.has(group)) groups.get(group)?.append(option);
    else groups.set(group, el("optgroup", { label: group }, option));
  }
  select.replaceChildren(...children, ...groups.values());
  select.value = value;
}

/** Fills `place`; what is returned draws it anew: numbers that are offered, heads that are shown. */
export function wallControls(app: App, place: HTMLElement): (offered: Measure[], matching: number) => void {
  const count = el("span", { class: "count", role: "status" });
  const [colours, colour] = menu("wall-colour", "Show", (name) => app.set({ colour: name }));
  const [sorts, sort] = menu("wall-sort", "Sort by", (name) => app.set({ sort: name }));
  const order = el("button", { type: "button", id: "wall-order" });
  order.addEventListener("click", () => app.set({ order: app.state.order === "most" ? "least" : "most" }));
  const search = el("input", {
    type: "search",
    id: "wall-search",
    autocomplete: "off",
    spellcheck: "false",
  });
  search.addEventListener("input", () => app.set({ search: search.value }));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") app.set({ search: "" });
  });
  document.addEventListener("keydown", (event) => {
    const within =
      event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key !== "/" || within || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    search.focus();
    search.select();
  });
  const chips = el("div", { class: "chips", role: "group", "aria-label": "Show only heads with this label" });
  const scale = el("div", { class: "wall-scale" });
  const note = el(
    "span",
    {
      class: "role-note",
      title:
        "The head attends from a word to a related word, for example from a verb to its object. It finds the related word in more cases than any simple rule, such as “always the previous word”.",
    },
    el("span", { class: "role" }),
    "has a role",
  );
  place.append(
    el("div", { class: "wall-head" }, el("h2", { id: "wall-title" }, "All heads"), count, note),
    el(
      "div",
      { class: "menus" },
      colours,
      sorts,
      order,
      el("label", { class: "menu find" }, el("span", null, "Search"), search),
    ),
    chips,
    scale,
  );

  return (offered, matching) => {
    const { state, reading } = app;
    const total = reading.heads.length;
    const text = `${matching.toLocaleString("en")} of ${total.toLocaleString("en")} head${total === 1 ? "" : "s"}`;
    if (count.textContent !== text) count.textContent = text;
    const label = { name: "label", title: "labels", group: "" };
    const all: Choice[] = offered;
    const available = (name: string, other: string) =>
      name === "label" || offered.some((measure) => measure.name === name) ? name : other;
    offer(
      colour,
      [{ name: "maps", title: "attention maps", group: "" }, label, ...all],
      available(state.colour, "maps"),
    );
    offer(
      sort,
      [{ name: "layer", title: "layers", group: "" }, { ...label, title: "label and score" }, ...all],
      available(state.sort, "layer"),
    );
    order.hidden = available(state.sort, "layer") === "layer";
    order.textContent = state.order === "most" ? "largest first ↓" : "smallest first ↑";
    if (search.value !== state.search) search.value = state.search;
    search.placeholder = suggested(app);
    drawChips(app, chips);
    drawScale(app, offered, scale);
    note.hidden = !reading.heads.some((head) => (app.source.roles(head.layer, head.head) ?? []).length > 0);
  };
}

/** What can be searched for, each of it found here: "2.1, layer 2, previous-token …". */
function suggested({ reading, source }: App): string {
  const rolesOf = (head: HeadData) => source.roles(head.layer, head.head) ?? [];
  const { heads } = reading;
  const example =
    heads.find((head) => rolesOf(head).length > 0) ??
    heads.find((head) => head.label !== "mixed") ??
    heads[0];
  if (example === undefined) return "";
  const word = rolesOf(example)[0]?.name.split(" > ")[0] ?? example.label;
  return `${named(example.layer, example.head)}, ${source.layers[example.layer].name}, ${word} …`;
}

function drawChips(app: App, place: HTMLElement): void {
  const { heads } = app.reading;
  const counts = new Map<string, number>();
  for (const head of heads) counts.set(head.label, (counts.get(head.label) ?? 0) + 1);
  const focused = place.contains(document.activeElement)
    ? document.activeElement?.getAttribute("data-label")
    : null;
  const chip = (name: string, title: string, count: number, colour: string | null, sentence: string) => {
    const dot = colour === null ? null : el("span", { class: "mark" });
    if (dot !== null && colour !== null) dot.style.background = colour;
    const pressed = String(app.state.label === name);
    const made = el(
      "button",
      { type: "button", class: "chip", "aria-pressed": pressed, "data-label": name, title: sentence || null },
      dot,
      title,
      el("span", { class: "many" }, count.toLocaleString("en")),
    );
    made.addEventListener("click", () => app.set({ label: app.state.label === name ? "" : name }));
    return made;
  };
  const present = app.data.labels.filter((label) => counts.has(label.name) || label.name === app.state.label);
  place.replaceChildren(
    chip("", "all", heads.length, null, ""),
    ...present.map((each) =>
      chip(each.name, each.name, counts.get(each.name) ?? 0, labelColour(each), each.sentence),
    ),
  );
  if (focused !== null)
    place.querySelector<HTMLElement>(`[data-label="${CSS.escape(focused ?? "")}"]`)?.focus();
}

function drawScale(app: App, offered: Measure[], place: HTMLElement): void {
  const by = offered.find((measure) => measure.name === app.state.colour);
  place.hidden = by === undefined;
  if (by === undefined) return;
  const [least, most] = bounds(app, by);
  const strip = el("span", { class: "strip", "aria-hidden": "true" });
  const stops = Array.from({ length: 9 }, (_, i) => css(weightColour((i / 8) ** 2)));
  strip.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  place.replaceChildren(
    el("span", { class: "ends" }, shown(least, by.digits)),
    strip,
    el("span", { class: "ends" }, shown(most, by.digits)),
    el("span", { class: "quiet" }, `${by.title}: ${by.sentence}`),
  );
}
