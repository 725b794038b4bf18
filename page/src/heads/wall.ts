/**
 * The wall: every head as a thumbnail, a layer per row; sorted, heads flow in the order of their numbers.
 *
 * A list to screen readers, one tab stop: choosing follows the arrows. Tiles stay where their order does, and what was
 * drawn stays until there is something else to draw.
 */

import { labelColour } from "../shared/colours.ts";
import { byId, el } from "../shared/elements.ts";
import { onTheme } from "../shared/theme.ts";
import { parsedFactors } from "./head_factors.ts";
import type { App, Changed } from "./store.ts";
import { fitted, type Line, Thumbnails } from "./thumbnails.ts";
import { wallControls } from "./wall_controls.ts";
import { asked, labelOf, type Measure, measures, named } from "./wall_measures.ts";
import { dressed, newTile, renew, type Tile, tintOf } from "./wall_tiles.ts";

const SMALLEST = 46; // dots of a thumbnail in its row
const LARGEST = 112;
const FLOWING = 76; // where heads are sorted
const MANY = 200; // heads, from which on they are smaller
const NAMES = 64; // room for names of layers
const NARROW = 520; // below that names stand above
const FRAME = 1; // around each map
const CAPTION = 28; // below it, about
const READ: Changed = new Set(["source", "text", "sources"]);
const DRAWN: Changed = new Set([...READ, "colour", "sort", "order", "label", "search", "off"]);

/** Where a tile stands: arrows go along these. */
interface Spot {
  tile: Tile;
  column: number;
}

/** Sizes of now, in CSS dots. */
interface Sizes {
  columns: number;
  gap: number;
  side: number;
}

export function wallPanel(app: App, drawn: () => void): void {
  new Wall(app, drawn).start();
}

/** What shares a number, in order. */
function grouped<T>(all: T[], by: (one: T, at: number) => number): Map<number, T[]> {
  const groups = new Map<number, T[]>();
  all.forEach((one, at) => {
    const number = by(one, at);
    const group = groups.get(number);
    if (group === undefined) groups.set(number, [one]);
    else group.push(one);
  });
  return groups;
}

const any = (some: Changed, of: Changed) => [...some].some((name) => of.has(name));

class Wall {
  private readonly list = el("div", { role: "listbox", class: "wall", "aria-labelledby": "wall-title" });
  private readonly none = el("p", { class: "none", hidden: true });
  private readonly bar = el("div", { class: "chosen-bar" });
  private readonly controls: (offered: Measure[], matching: number) => void;
  private readonly thumbnails: Thumbnails;
  private tiles = new Map<string, Tile>();
  private lines: Spot[][] = [];
  private canvases = new Map<string, HTMLCanvasElement>(); // by the heads that are drawn on them
  private laidOut = "";
  private width = 0;

  constructor(
    private readonly app: App,
    drawn: () => void,
  ) {
    this.thumbnails = new Thumbnails(drawn);
    const head = el("div", { class: "wall-controls" });
    this.controls = wallControls(app, head);
    byId("wall").append(head, this.list, this.none, this.bar);
  }

  start(): void {
    this.app.on((changed) => {
      if (any(changed, READ)) this.renew();
      if (any(changed, DRAWN)) this.draw();
      else if (changed.has("layer") || changed.has("head")) this.mark();
      if (any(changed, READ)) this.thumbnails.again();
    });
    onTheme(() => {
      this.draw();
      this.thumbnails.again();
    });
    this.list.addEventListener("click", (event) => {
      const tile = this.tileAt(event.target);
      if (tile === null) return;
      this.choose(tile);
      tile.element.focus({ preventScroll: true });
    });
    this.list.addEventListener("keydown", (event) => this.pressed(event));
    new ResizeObserver(() => {
      if (this.width !== this.list.clientWidth) this.draw();
    }).observe(this.list);
    this.renew();
    this.draw();
  }

  /** A tile for every head of the text that is looked at; those that are there stay. */
  private renew(): void {
    const before = this.tiles;
    this.tiles = new Map();
    for (const head of this.app.reading.heads) {
      const name = named(head.layer, head.head);
      const known = before.get(name);
      if (known !== undefined) renew(this.app, known, head);
      this.tiles.set(name, known ?? newTile(this.app, head));
    }
  }

  private draw(): void {
    const { app } = this;
    const offered = measures(app);
    const { heads, by, flowing } = asked(app, offered);
    this.controls(offered, heads.length);
    this.width = this.list.clientWidth;
    const tiles = heads.map((head) => this.tiles.get(named(head.layer, head.head))!);
    const tint = tintOf(app, offered);
    this.list.classList.toggle("tinted", tint !== null);
    this.list.classList.toggle("labelled", app.state.colour === "label");
    this.list.classList.toggle("flowing", flowing);
    const factors = parsedFactors(app.state.off, app.source.layers);
    for (const tile of tiles) dressed(app, tile, { flowing, by, tint, factors });
    const names = app.source.layers.map((layer) => layer.name);
    const order = tiles.map(({ head, tall }) => [head.layer, head.head, tall]);
    const wanted = JSON.stringify([
      flowing,
      tint !== null,
      this.width,
      this.tiles.size,
      names,
      order,
      this.whole(50),
    ]);
    if (wanted !== this.laidOut) this.layOut(tiles, flowing, tint !== null);
    this.laidOut = wanted;
    this.none.hidden = heads.length > 0;
    if (heads.length === 0) this.empty();
    this.mark();
  }

  private layOut(tiles: Tile[], flowing: boolean, tinted: boolean): void {
    const drawn: Line[] = [];
    this.lines = [];
    const made = flowing ? this.flow(tiles, drawn) : this.rows(tiles, drawn);
    this.canvases = new Map(drawn.map(({ element, canvas }) => [element.dataset.heads ?? "", canvas]));
    const focused = this.list.contains(document.activeElement)
      ? (document.activeElement as HTMLElement)
      : null;
    this.list.replaceChildren(...made);
    focused?.focus({ preventScroll: true });
    this.thumbnails.show(tinted ? [] : drawn);
  }

  /** A row per layer, each head in its place whatever else is shown. */
  private rows(tiles: Tile[], drawn: Line[]): HTMLElement[] {
    const heads = grouped(this.app.reading.heads, (head) => head.layer);
    const widest = Math.max(1, ...[...heads.values()].map((each) => each.length));
    const narrow = this.width < NARROW;
    const sizes = this.fit(this.width - (narrow ? 0 : NAMES), widest, SMALLEST);
    this.list.classList.toggle("narrow", narrow);
    const there = grouped(tiles, (tile) => tile.head.layer);
    return [...there].map(([number, shown]) => {
      const layer = this.app.source.layers[number];
      const all = heads.get(number) ?? [];
      const place = new Map(all.map((head, at) => [head.head, at]));
      const at = (tile: Tile) => place.get(tile.head.head) ?? 0;
      const lines = [...grouped(shown, (tile) => Math.floor(at(tile) / sizes.columns)).values()];
      const rows = lines.map((line) =>
        this.line(
          line.map((tile) => ({ tile, column: at(tile) % sizes.columns })),
          sizes,
          drawn,
        ),
      );
      const cross = layer.kind === "cross" ? el("span", { class: "kind" }, "cross") : null;
      const name = el(
        "span",
        { class: "layer-name", "aria-hidden": "true", title: layer.path },
        layer.name,
        cross,
      );
      const group = { role: "group", class: "layer", "aria-label": layer.name };
      return el("div", group, name, el("div", { class: "wall-lines" }, ...rows));
    });
  }

  private flow(tiles: Tile[], drawn: Line[]): HTMLElement[] {
    const aim = this.tiles.size > MANY ? SMALLEST + 10 : FLOWING;
    const sizes = this.fit(this.width, Math.max(1, Math.floor((this.width + 6) / (aim + 6))), aim);
    this.list.classList.remove("narrow");
    const spots = tiles.map((tile, at) => ({ tile, column: at % sizes.columns }));
    const lines = grouped(spots, (_, at) => Math.floor(at / sizes.columns));
    return [
      el("div", { class: "wall-lines" }, ...[...lines.values()].map((line) => this.line(line, sizes, drawn))),
    ];
  }

  /** Tiles beside each other, with the canvas that their maps are drawn on. */
  private line(spots: Spot[], { columns, gap, side }: Sizes, drawn: Line[]): HTMLElement {
    const inside = side - 2 * FRAME;
    const heads = spots.map(({ tile, column }) => `${tile.element.dataset.head}@${column}`).join(" ");
    const canvas = this.canvases.get(heads) ?? el("canvas", { width: 0, height: 0, "aria-hidden": "true" });
    const element = el(
      "div",
      { class: "wall-line", "data-heads": heads },
      canvas,
      ...spots.map(({ tile }) => tile.element),
    );
    const lacking = this.app.source.alive ? "This map could not be loaded." : "This map is not in this page.";
    const thumbnails = spots.map(({ tile, column }) => {
      const height = inside * tile.tall;
      tile.element.style.gridColumn = String(column + 1);
      tile.element.style.setProperty("--tall", `${height + 2 * FRAME}px`);
      const load = async () => (await this.app.reading.calls[tile.head.layer]?.cells(tile.head.head)) ?? null;
      const left = column * (side + gap) + FRAME;
      const size = { left, top: FRAME, width: inside, height, apart: gap + 2 * FRAME };
      return { element: tile.map, load, lacking, ...size };
    });
    const width = columns * (side + gap) - gap;
    const height = Math.max(...thumbnails.map((each) => each.height)) + 2 * FRAME;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    element.style.containIntrinsicHeight = `auto ${height + CAPTION}px`; // what is far away need not be laid out
    drawn.push({ element, canvas, width, height, thumbnails });
    this.lines.push(spots);
    return element;
  }

  /** How many stand beside each other; tiles become as large as that lets them. */
  private fit(room: number, wanted: number, smallest: number): Sizes {
    const least = room / wanted < 62 ? 4 : 7;
    const most = Math.max(1, Math.floor((room + least) / (smallest + least)));
    const columns = Math.ceil(wanted / Math.ceil(wanted / most));
    const widest = Math.max(20, Math.min(LARGEST, Math.floor((room + least) / columns) - least));
    const side = this.whole(widest - 2 * FRAME) + 2 * FRAME;
    const spread = Math.floor((room - columns * side) / Math.max(1, columns - 1));
    const gap = Math.max(least, Math.min(spread, 2 * least));
    const { style, classList } = this.list;
    style.setProperty("--columns", String(columns));
    style.setProperty("--gap", `${gap}px`);
    style.setProperty("--side", `${side}px`);
    classList.toggle("small", side < 66);
    return { columns, gap, side };
  }

  /** As wide as whole dots for each cell make it, where a map shows all tokens. */
  private whole(room: number): number {
    const ratio = window.devicePixelRatio || 1;
    const call = this.app.reading.calls.find((each) => each !== null);
    return call?.exact ? fitted(call.keys, Math.round(room * ratio)) / ratio : room;
  }

  private empty(): void {
    const { state } = this.app;
    const asked = [
      state.label && `label “${state.label}”`,
      state.search.trim() && `“${state.search.trim()}”`,
    ];
    const all = el("button", { type: "button" }, "Show all heads");
    all.addEventListener("click", () => this.app.set({ label: "", search: "" }));
    this.none.replaceChildren(`No head matches ${asked.filter(Boolean).join(" and ")}. `, all);
  }

  private chosen(): Tile | undefined {
    return this.tiles.get(named(this.app.state.layer, this.app.state.head));
  }

  /** Which one is chosen, here and in the bar that small screens have. */
  private mark(): void {
    const chosen = this.chosen();
    const spots = this.lines.flat();
    const stop = spots.find(({ tile }) => tile === chosen)?.tile ?? spots[0]?.tile;
    for (const tile of this.tiles.values()) {
      tile.element.setAttribute("aria-selected", String(tile === chosen));
      tile.element.tabIndex = tile === stop ? 0 : -1;
    }
    this.bar.hidden = chosen === undefined;
    if (chosen === undefined) return;
    const { head } = chosen;
    const go = el("button", { type: "button" }, "Go to this head ↓");
    go.addEventListener("click", () => {
      byId("one-head").scrollIntoView();
      byId("one-head").focus({ preventScroll: true });
    });
    const label = el("span", { class: "label" }, head.label);
    label.style.color = labelColour(labelOf(this.app, head));
    const name = `${this.app.source.layers[head.layer].name} · head ${head.head}`;
    this.bar.replaceChildren(el("span", null, name, " ", label), go);
  }

  private tileAt(target: EventTarget | null): Tile | null {
    const element = target instanceof Element ? target.closest<HTMLElement>(".tile") : null;
    return this.tiles.get(element?.dataset.head ?? "") ?? null;
  }

  private choose({ head }: Tile): void {
    this.app.set({ layer: head.layer, head: head.head });
  }

  private pressed(event: KeyboardEvent): void {
    const tile = this.tileAt(event.target);
    if (tile === null || event.altKey || event.metaKey) return;
    const all = this.lines.flat();
    const at = all.findIndex((spot) => spot.tile === tile);
    const line = this.lines.findIndex((spots) => spots.includes(all[at]));
    const { column } = all[at];
    const beside = (spots: Spot[] | undefined) =>
      spots?.reduce((best, spot) =>
        Math.abs(spot.column - column) < Math.abs(best.column - column) ? spot : best,
      );
    const [first, last] = event.ctrlKey
      ? [all[0], all.at(-1)]
      : [this.lines[line][0], this.lines[line].at(-1)];
    const targets: Record<string, Spot | undefined> = {
      ArrowLeft: all[at - 1],
      ArrowRight: all[at + 1],
      ArrowUp: beside(this.lines[line - 1]),
      ArrowDown: beside(this.lines[line + 1]),
      Home: first,
      End: last,
      Enter: all[at],
      " ": all[at],
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    const to = targets[event.key]?.tile;
    if (to === undefined) return;
    this.choose(to);
    to.element.focus();
  }
}
