/** The head of the page: the model, the text, how to read a map; and the layout of the grid of heads beside one head. */

import { weightGradient } from "../shared/colours.ts";
import { byId, el } from "../shared/elements.ts";
import { isDark, onTheme } from "../shared/theme.ts";
import type { Reading } from "./sources.ts";
import type { App } from "./store.ts";

const LONG = 320; // letters of a text, beyond which it is shortened
const TICKS = [0, 0.05, 0.25, 0.5, 1];
const MARGIN = 14; // between a panel that stays and the window's edge

export function overviewPanel(app: App): void {
  byId("heading").textContent = app.data.heading;
  const choices = el("div", { class: "choices" });
  const quote = el("blockquote", { dir: "auto", lang: "" });
  const more = el("button", { type: "button", class: "plain", hidden: true });
  const sizes = el("p", { class: "sizes" });
  const guide = el("div", { class: "how" });
  byId("heading").after(el("div", { class: "beside-heading" }, sizes, choices));
  byId("what").append(quote, more, guide);

  let whole = false;
  const draw = () => {
    chooser(app, choices);
    const text = (app.reading.text ?? "").replace(/\s+/g, " ").trim();
    const long = text.length > LONG;
    quote.hidden = text === "";
    quote.textContent = long && !whole ? `${cut(text)} …` : text;
    more.hidden = !long;
    more.setAttribute("aria-expanded", String(whole));
    more.textContent = whole
      ? "Show less"
      : `Show the whole text (${text.length.toLocaleString("en")} characters)`;
    sizes.textContent = sized(app.reading);
    explained(guide);
  };
  more.addEventListener("click", () => {
    whole = !whole;
    draw();
  });
  app.on((changed) => {
    if (changed.has("source") || changed.has("text")) whole = false;
    if (changed.has("source") || changed.has("text") || changed.has("sources")) draw();
  });
  onTheme(() => explained(guide));
  draw();
  footer(app);
  skip();
  sideBySide();
}

/** Up to the end of a word. */
function cut(text: string): string {
  const short = text.slice(0, LONG);
  const end = short.lastIndexOf(" ");
  return end > LONG / 2 ? short.slice(0, end) : short;
}

/** Menus, where there is something to choose. */
function chooser(app: App, place: HTMLElement): void {
  const menu = (id: string, title: string, names: string[], at: number, chosen: (n: number) => void) => {
    if (names.length < 2) return null;
    const options = names.map((name, n) => el("option", { value: n, selected: n === at }, name));
    const select = el("select", { id }, ...options);
    select.addEventListener("change", () => chosen(Number(select.value)));
    return el("label", { class: "menu" }, el("span", null, title), select);
  };
  const focused = document.activeElement?.id;
  const models = app.sources.map((source) => source.title);
  const single = new Set(models).size === 1; // one model on several texts: these tell them apart
  const sources = app.sources.map((source, n) => {
    const text = source.readings[0]?.text ?? source.readings[0]?.name ?? "";
    const short = text.length > 64 ? `${text.slice(0, 64)} …` : text;
    if (single) return short || `${source.title} ${n + 1}`;
    return models.indexOf(source.title) === models.lastIndexOf(source.title)
      ? source.title
      : `${source.title}: ${short}`;
  });
  const readings = app.source.readings.map((reading, n) => reading.name || `text ${n + 1}`);
  const title = single && readings.length < 2 ? "Text" : "Model";
  const made = [
    menu("choose-source", title, sources, app.state.source, (n) => app.set({ source: n })),
    menu("choose-text", "Text", readings, app.state.text, (n) => app.set({ text: n })),
  ].filter((each) => each !== null);
  place.replaceChildren(...made);
  place.hidden = made.length === 0;
  if (focused && place.querySelector(`#${CSS.escape(focused)}`)) byId(focused).focus();
}

const counted = (n: number, noun: string) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** "4 layers × 8 heads, 17 tokens". */
export function sized(reading: Reading): string {
  const perLayer = new Map<number, number>();
  for (const head of reading.heads) perLayer.set(head.layer, (perLayer.get(head.layer) ?? 0) + 1);
  const counts = new Set(perLayer.values());
  const [each] = counts;
  const parts = [
    counts.size === 1
      ? `${counted(perLayer.size, "layer")} × ${counted(each, "head")}`
      : `${counted(perLayer.size, "layer")}, ${counted(reading.heads.length, "head")}`,
  ];
  const calls = reading.calls.filter((call) => call !== null);
  const square = calls.every((call) => call.queries === call.keys && call.keys === calls[0].keys);
  if (calls.length > 0 && square) parts.push(counted(calls[0].keys, "token"));
  else if (calls.length > 0) {
    const lengths = new Set(
      calls.map((call) => `${call.queries.toLocaleString("en")} × ${call.keys.toLocaleString("en")}`),
    );
    parts.push(`queries × keys: ${[...lengths].join(", ")}`);
  }
  if (calls.some((call) => !call.exact)) parts.push("each cell covers several tokens");
  const out = Math.max(0, ...calls.map((call) => call.leftOut));
  if (out > 0) parts.push(`${counted(out, "padded position")} not shown`);
  return parts.join(", ");
}

/** How to read a map, and its colours. */
function explained(place: HTMLElement): void {
  const strip = el("span", { class: "strip" });
  strip.style.background = weightGradient();
  const ticks = TICKS.map((tick) => {
    const mark = el("span", { class: "tick" }, String(tick));
    mark.style.left = `${Math.sqrt(tick) * 100}%`;
    return mark;
  });
  const about =
    "Colour scale of attention weights from 0 to 1; the colour is proportional to the square root of the weight";
  const scale = el(
    "div",
    { class: "weights", role: "img", "aria-label": about, title: about },
    strip,
    ...ticks,
  );
  const hidden = el("span", { class: "hidden-key" }, el("span", { class: "swatch" }), "masked");
  place.replaceChildren(
    el(
      "p",
      null,
      `Each square is one head. Rows are tokens that attend (queries), columns the tokens they attend to (keys). ${isDark() ? "Brighter" : "Darker"} means a larger weight.`,
    ),
    el("div", { class: "shades" }, scale, hidden),
  );
}

function footer(app: App): void {
  const key = (...names: string[]) => names.flatMap((name) => [el("kbd", null, name), " "]);
  byId("footer").replaceChildren(
    el(
      "p",
      { class: "keys" },
      ...key("←", "→", "↑", "↓"),
      "previous or next head  ·  ",
      ...key("Home", "End"),
      "first or last head of the row  ·  ",
      ...key("/"),
      "search heads  ·  ",
      ...key("Tab"),
      "next section",
    ),
    el(
      "p",
      null,
      `headwise ${app.data.version}. ${
        app.data.served
          ? "This page sends what is typed to the Python process that runs the model, and to nobody else."
          : "This page is a single file: it works offline and sends no data."
      }`,
    ),
  );
}

/** The address is the view: a link inside the page moves the focus and leaves it alone. */
function skip(): void {
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    byId("one-head").scrollIntoView();
    byId("one-head").focus({ preventScroll: true });
  });
}

/** Beside each other, the shorter one stays in sight while the longer one scrolls; what is too tall scrolls inside. */
function sideBySide(): void {
  const [wall, head] = [byId("wall"), byId("one-head")];
  const place = () => {
    const window_ = window.innerHeight - 2 * MARGIN;
    const inner = head.scrollHeight;
    head.classList.toggle("inside", inner > window_ && wall.offsetHeight > inner);
    wall.style.top = `${Math.min(MARGIN, window_ + MARGIN - wall.offsetHeight)}px`;
  };
  const watcher = new ResizeObserver(place);
  watcher.observe(wall);
  watcher.observe(head);
  window.addEventListener("resize", place);
}
