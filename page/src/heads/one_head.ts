/** One head, large: its map, lines or image, weights in words, its statistics, and the text in its colours. */

import { byId, el } from "../shared/elements.ts";
import { onTheme } from "../shared/theme.ts";
import { attentionLines } from "./attention_lines.ts";
import { headTitle, labelLine, numbersList, pairsList, rolesList } from "./head_numbers.ts";
import {
  cellOf,
  cellSaid,
  counted,
  type Hand,
  largestOf,
  type Picture,
  regionSaid,
  rowOf,
  rowSaid,
  type Scene,
  type Spot,
  shown,
  upTo,
} from "./head_scene.ts";
import { choice, stepSlider, takeButtons, weightLegend } from "./head_tools.ts";
import { heatMap, outputMap } from "./heat_map.ts";
import { imageMap } from "./image_map.ts";
import { fileName } from "./picture_export.ts";
import { readText } from "./read_text.ts";
import { rowTable } from "./row_table.ts";
import type { App, State } from "./store.ts";
import { type Zoomed, zoomedMap } from "./zoomed_map.ts";

const NOT_LOADED = "The attention map of this head could not be loaded.";
const NOT_HERE = "The attention map of this head is not in this page.";
const SIDE = 320; // tokens up to which a map keeps a cell per pair in sight
const REDRAWN: (keyof State | "sources")[] = [
  "source", "text", "layer", "head", "view", "measure", "step", "sources",
]; // biome-ignore format: a list
const WRITTEN =
  "The attention weight multiplied by ‖v W_O‖. The product is the norm of what the key adds to the output. Values are divided by the largest ‖v W_O‖ of the layer. A key can get a large weight and still add almost nothing (Kobayashi et al., 2020).";

export function oneHeadPanel(app: App): HTMLElement {
  const panel = byId("one-head");
  const title = el("h2", { id: "head-title" });
  const before = el("button", { type: "button", class: "previous-head" }, "← previous");
  const after = el("button", { type: "button", class: "next-head" }, "next →");
  const label = el("div");
  const roles = el("div");
  const tools = el("div", { class: "tools" });
  const steps = stepSlider(app);
  const explained = el("p", { class: "quiet" });
  const rowLine = el("p", { class: "row-line" });
  const cellLine = el("p", { class: "cell-line" });
  const reading = el(
    "div",
    { class: "reading", "aria-label": "Weights under the pointer", role: "group" },
    rowLine,
    cellLine,
  );
  const stage = el("div", { class: "stage" });
  const legend = el("div", { class: "weight-legend" });
  const take = el("div", { class: "take" });
  const text = el("div", { class: "text" });
  const textPart = el("div", null, el("h3", null, "Attention received by each token"), text);
  const numbers = el("div");
  const pairs = el("div");
  const bare = el("input", { type: "checkbox", id: "bare-pairs" });
  const table = el("div");
  const tableDetails = el("details", { class: "row-details" }, el("summary", null, "Row as a table"), table);
  const output = el("div");
  const outputDetails = el(
    "details",
    { class: "output" },
    el("summary", null, "Output of this head before W_O"),
    output,
  );
  panel.replaceChildren(
    el("div", { class: "head-top" }, title, el("div", { class: "walk" }, before, after)),
    label, roles, tools, steps.element, explained, reading, stage, legend, tableDetails, take,
    textPart,
    el("h3", null, "Largest weights (query → key)"),
    el("p", { class: "option" }, bare, " ", el("label", { for: "bare-pairs" }, "leave out the first token and the query's own token")),
    pairs, outputDetails,
    el("h3", null, "Statistics"), numbers,
  ); // biome-ignore format: from top to bottom

  let scene: Scene | null = null;
  let picture: Picture | null = null;
  let zoomed: Zoomed | null = null;
  let spot: Spot | null = null;
  let around: [number, number] = [0, 0];
  let drawing = 0; // counts draws, so that a late answer finds out that it is late

  const hand: Hand = {
    point(next) {
      spot = next;
      picture?.mark(app.state.token, spot);
      say();
    },
    pin(query) {
      app.set({ token: query === app.state.token ? null : query });
    },
  };

  /** Describe the cell under the pointer, or else the selected row; the height is fixed, so that nothing moves. */
  const say = () => {
    if (scene === null) return;
    const { cells, call } = scene;
    const pinned = app.state.token;
    const known = spot?.cells ?? cells;
    const row = spot?.row ?? (pinned === null ? null : rowOf(scene, known, pinned));
    const column = spot?.column ?? null;
    const rowWords =
      row === null
        ? [
            scene.call.exact
              ? "Point at a row to read its weights, or select one with the arrow keys."
              : "Point at a cell to read it, or use the arrow keys.",
          ]
        : rowSaid(scene, known, row, call.exact ? 6 : 3);
    rowLine.replaceChildren(...rowWords.filter((child) => child != null));
    if (row === null || column === null) cellLine.replaceChildren();
    else {
      const here: Spot = { row, column, cells: known };
      const tokens = regionSaid(scene, here);
      const words = cellSaid(scene, here).filter((child) => child != null);
      cellLine.replaceChildren(...words, tokens ? el("span", { class: "quiet" }, ` ${tokens}`) : "");
    }
  };

  const rowShown = (): number => {
    if (scene === null) return 0;
    const { cells, call } = scene;
    if (app.state.token !== null) return cellOf(app.state.token, cells.rows, call.queries);
    const steps = call.steps;
    return (
      (steps === null
        ? cells.rows
        : Math.min(cells.rows, steps[app.state.step ?? steps.length - 1] ?? cells.rows)) - 1
    );
  };

  const drawTable = () => {
    if (scene !== null && tableDetails.open) table.replaceChildren(rowTable(scene, rowShown()));
  };
  tableDetails.addEventListener("toggle", drawTable);

  const drawText = () => {
    if (scene !== null) text.replaceChildren(...readText(scene, app.state.token, around, hand.pin));
  };

  const drawPairs = async () => {
    const now = scene;
    if (now === null) return;
    const made = await pairsList(now, bare.checked, (pair) => {
      app.set({ token: pair.query });
      if (now.call.exact) hand.point({ row: pair.query, column: pair.key, cells: now.cells });
    });
    if (now === scene)
      pairs.replaceChildren(
        made ?? el("p", { class: "quiet" }, "The largest weights of this head are not in this page."),
      );
  };
  bare.addEventListener("change", () => void drawPairs());

  const drawOutput = async () => {
    const now = scene;
    if (now === null || !outputDetails.open) return;
    const all = await now.call.output(now.head);
    if (now !== scene || all === null) return;
    output.replaceChildren(...outputMap(all, now.call.queryTokens, stage.clientWidth));
  };
  outputDetails.addEventListener("toggle", () => void drawOutput());

  const view = (): State["view"] => {
    const { view } = app.state;
    if (view === "image") return app.reading.image !== null && app.call?.exact ? "image" : "map";
    return view === "lines" && !app.call?.exact ? "map" : view;
  };
  const measure = () => (app.call?.hasWritten ? app.state.measure : "weights");

  const drawTools = () => {
    const held = document.activeElement;
    const focused = held instanceof HTMLElement && tools.contains(held) ? held.dataset.value : undefined;
    const call = app.call;
    const views: [string, string][] = [["map", "map"]];
    if (call?.exact) views.push(["lines", "lines"]);
    if (call?.exact && app.reading.image !== null) views.unshift(["image", "image"]);
    const parts: HTMLElement[] = [];
    if (views.length > 1) {
      parts.push(choice("View", view(), views, (value) => app.set({ view: value as State["view"] })));
    }
    if (call?.hasWritten) {
      const measures: [string, string][] = [["weights", "weights"], ["written", "weights × ‖v W_O‖"]]; // biome-ignore format: pairs
      parts.push(
        choice("Measure", measure(), measures, (value) => app.set({ measure: value as State["measure"] })),
      );
    }
    if (zoomed !== null) parts.push(zoomed.buttons);
    tools.replaceChildren(...parts);
    if (focused !== undefined) tools.querySelector<HTMLElement>(`[data-value="${focused}"]`)?.focus();
  };

  /** Everything that the chosen head changes; maps come a moment later. */
  const draw = async () => {
    const mine = ++drawing;
    const { state, call, source, reading: read } = app;
    const data = read.heads.find((each) => each.layer === state.layer && each.head === state.head);
    const layer = source.layers[state.layer];
    const focused = stage.contains(document.activeElement);
    title.textContent = headTitle(layer.name, state.head);
    const at = data ? read.heads.indexOf(data) : -1;
    before.disabled = at <= 0;
    after.disabled = at < 0 || at >= read.heads.length - 1;
    label.replaceChildren(data ? labelLine(app, data) : "");
    roles.replaceChildren(rolesList(source.roles(state.layer, state.head)) ?? "");
    numbers.replaceChildren(data ? numbersList(app, data) : "");
    const written = measure() === "written";
    const plain = call === null ? null : await (written ? call.written(state.head) : call.cells(state.head));
    if (mine !== drawing) return;
    spot = null;
    picture = zoomed = scene = null;
    outputDetails.hidden = !call?.hasOutput;
    if (call === null || plain === null) {
      stage.replaceChildren(el("p", { class: "quiet" }, call && source.alive ? NOT_LOADED : NOT_HERE));
      for (const part of [tools, explained, text, pairs, table, legend, take]) part.replaceChildren();
      steps.element.hidden = true;
      rowLine.textContent = cellLine.textContent = "";
      return;
    }
    const revealed = call.steps && call.exact && state.step !== null ? call.steps[state.step] : undefined;
    const cells = revealed === undefined ? plain : upTo(plain, revealed);
    const known = read.name ? `${source.title}, ${read.name}` : source.title;
    const words = read.image ? "" : (read.text ?? call.keyTokens?.slice(0, 40).map(shown).join(" ") ?? "");
    const caption = words ? `${known}: “${words.length > 90 ? `${words.slice(0, 89)}…` : words}”` : known;
    const self = layer.kind === "self";
    scene = {
      title: title.textContent, caption, call, head: state.head, self,
      offset: self ? Math.max(0, call.keys - call.queries) : 0,
      cells, written, most: written ? largestOf(plain.values) || 1 : 1,
      prompt: call.exact && call.steps ? call.steps[0] : null, image: read.image,
    }; // biome-ignore format: a scene
    const room = stage.clientWidth || panel.clientWidth || 600;
    around = [0, call.keys - 1];
    const large = !call.exact || Math.max(call.queries, call.keys) > SIDE;
    if (view() === "image" && read.image !== null) picture = imageMap(scene, read.image, hand, room);
    else if (view() === "lines") picture = attentionLines(scene, hand, room);
    else if (!large) picture = heatMap(scene, hand, room);
    else {
      let late = 0; // a text of thousands of tokens is not written anew at every move
      picture = zoomed = zoomedMap(scene, hand, room, (keys) => {
        around = keys;
        clearTimeout(late);
        late = window.setTimeout(drawText, 150);
      });
    }
    stage.replaceChildren(picture.element);
    reading.classList.toggle("long", !call.exact);
    textPart.hidden = read.image !== null; // the image is the text
    const notes = [
      written ? WRITTEN : "",
      call.leftOut > 0 ? `${counted(call.leftOut)} padded positions are not shown.` : "",
      written && zoomed !== null && (call.hasFiner(state.head) || call.hasRegions)
        ? "Finer cells are available for the weights only, not for weights × ‖v W_O‖."
        : "",
    ];
    explained.textContent = notes.filter((note) => note !== "").join(" ");
    explained.hidden = explained.textContent === "";
    drawTools();
    steps.draw();
    legend.hidden = view() !== "map";
    legend.replaceChildren(...weightLegend(scene));
    take.replaceChildren(...takeButtons(fileName(source.title, scene.title), () => picture?.drawn() ?? null));
    drawText();
    drawTable();
    void drawPairs();
    void drawOutput();
    picture.mark(state.token, null);
    say();
    if (focused) stage.querySelector<HTMLElement>("[tabindex]")?.focus({ preventScroll: true });
    panel.dataset.drawn = `${state.source}.${state.text}.${state.layer}.${state.head}`;
  };

  const walk = (by: number) => {
    const { heads } = app.reading;
    const at = heads.findIndex((each) => each.layer === app.state.layer && each.head === app.state.head);
    const next = heads[at + by];
    if (next) app.set({ layer: next.layer, head: next.head });
  };
  before.addEventListener("click", () => walk(-1));
  after.addEventListener("click", () => walk(1));

  stage.addEventListener("keydown", (event) => {
    if (scene === null || !(event.target as HTMLElement).matches("[role=application]")) return;
    if (keyed(event)) event.preventDefault();
  });

  /** The keyboard on a picture; whether it was for it. */
  const keyed = (event: KeyboardEvent): boolean => {
    if (scene === null) return false;
    if (event.key === "Escape") {
      hand.point(null);
      app.set({ token: null });
      return true;
    }
    if (zoomed !== null) return zoomed.key(event);
    const { queries, keys } = scene.call;
    const now = app.state.token;
    const clamp = (at: number, count: number) => Math.min(count - 1, Math.max(0, at));
    if (event.key === "Home") app.set({ token: 0 });
    else if (event.key === "End") app.set({ token: queries - 1 });
    else if (!event.key.startsWith("Arrow")) return false;
    else if (now === null) app.set({ token: scene.image && view() === "image" ? scene.image.first : 0 });
    else if (view() === "image" && scene.image !== null) {
      const { columns, rows, first } = scene.image;
      const by = { ArrowUp: -columns, ArrowDown: columns, ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
      const next = now < first ? first : now + by;
      if (next >= first && next < Math.min(queries, first + rows * columns)) app.set({ token: next });
    } else if (event.key === "ArrowUp") app.set({ token: clamp(now - 1, queries) });
    else if (event.key === "ArrowDown") app.set({ token: clamp(now + 1, queries) });
    else {
      const column = clamp((spot?.column ?? -1) + (event.key === "ArrowLeft" ? -1 : 1), keys);
      hand.point({ row: now, column, cells: scene.cells });
    }
    return true;
  };

  /** Another token is pinned: what depends on it, and a word for those who hear the page. */
  const drawToken = () => {
    if (scene === null || picture === null) return;
    const row = rowShown();
    if (spot !== null && app.state.token !== null && spot.column !== null && scene.call.exact) {
      spot = { row: app.state.token, column: spot.column, cells: scene.cells };
    } else spot = null;
    picture.mark(app.state.token, spot);
    const element = stage.querySelector(".row-mark.pinned:not([hidden])");
    if (stage.contains(document.activeElement))
      element?.scrollIntoView({ block: "nearest", inline: "nearest" });
    say();
    drawText();
    drawTable();
    if (app.state.token === null) return;
    const words = el("span", null, ...rowSaid(scene, scene.cells, row, 3));
    byId("said").textContent = words.textContent;
  };

  app.on((changed) => {
    if (REDRAWN.some((name) => changed.has(name))) void draw();
    else if (changed.has("token")) drawToken();
  });
  onTheme(() => void draw());
  let width = 0;
  new ResizeObserver(() => {
    const now = panel.clientWidth;
    if (now === width) return;
    if (width !== 0) void draw();
    width = now;
  }).observe(panel);
  void draw();
  return panel;
}
