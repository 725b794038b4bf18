/**
 * The wall: every head as a thumbnail, a layer per row; sorted, heads flow in the order of their numbers.
 *
 * A list to screen readers, one tab stop: choosing follows the arrows. Elements are made once per text and only put
 * in another place afterwards.
 */

import { css, inkOn, labelColour, mixed, parsed, weightColour } from "../shared/colours.ts";
import { byId, el } from "../shared/elements.ts";
import { isDark, onTheme } from "../shared/theme.ts";
import type { HeadData } from "./page_data.ts";
import type { App, Changed } from "./store.ts";
import { fitted, Thumbnails } from "./thumbnails.ts";
import { wallControls } from "./wall_controls.ts";
import { asked, bounds, labelOf, type Measure, measures, named, shortLabel, shown } from "./wall_measures.ts";

const SMALLEST = 46; // dots of a thumbnail in its row
const LARGEST = 112;
const FLOWING = 76; // where heads are sorted
const MANY = 200; // heads, from which on they are smaller
const NAMES = 64; // room for names of layers
const NARROW = 520; // below that names stand above
const DRAWN: Changed = new Set([
  "colour",
  "sort",
  "order",
  "label",
  "search",
  "source",
  "text",
  "off",
  "sources",
]);

interface Tile {
  head: HeadData;
  element: HTMLElement;
  map: HTMLElement;
  number: HTMLElement; // in place of the map
  name: HTMLElement;
  value: HTMLElement;
}

/** Where a tile stands: arrows go along these. */
interface Spot {
  tile: Tile;
  column: number;
}

export function wallPanel(app: App, drawn: () => void): void {
  new Wall(app, drawn).start();
}

class Wall {
  private readonly list = el("div", { role: "listbox", class: "wall", "aria-labelledby": "wall-title" });
  private readonly none = el("p", { class: "none", hidden: true });
  private readonly bar = el("div", { class: "chosen-bar" });
  private readonly controls: (offered: Measure[], there: number) => void;
  private readonly thumbnails: Thumbnails;
  private tiles = new Map<string, Tile>();
  private lines: Spot[][] = [];
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
    this.app.on((changed) => this.changed(changed));
    onTheme(() => {
      this.thumbnails.again();
      this.draw();
    });
    this.list.addEventListener("click", (event) => {
      const tile = this.tileAt(event.target);
      if (tile === null) return;
      this.choose(tile);
      tile.element.focus({ preventScroll: true });
    });
    this.list.addEventListener("keydown", (event) => this.pressed(event));
    this.make();
    new ResizeObserver(() => {
      if (this.width !== this.list.clientWidth) this.draw();
    }).observe(this.list);
    this.draw();
  }

  private changed(changed: Changed): void {
    if (["source", "text", "sources"].some((name) => changed.has(name as "text"))) this.make();
    if ([...DRAWN].some((name) => changed.has(name))) this.draw();
    else if (changed.has("layer") || changed.has("head")) this.mark();
  }

  /** A tile for every head of the text that is looked at. */
  private make(): void {
    this.thumbnails.clear();
    const focused = this.list.contains(document.activeElement);
    this.tiles = new Map();
    for (const head of this.app.reading.heads) {
      const call = this.app.reading.calls[head.layer];
      const map = el("span", { class: "map" });
      if (call !== null) map.dataset.tall = String(Math.min(Math.max(call.queries / call.keys, 0.25), 1.5));
      const number = el("span", { class: "tint" });
      const name = el("span", { class: "name" });
      const value = el("span", { class: "value" });
      const label = el("span", { class: "label", "data-text": shortLabel(head.label) });
      const roles = this.app.source.roles(head.layer, head.head) ?? [];
      const told = roles.map((role) => `${role.name} ${role.share.toFixed(2)}: ${role.sentence}`).join("\n");
      const dot = roles.length > 0 ? el("span", { class: "role", title: told }) : null;
      const element = el(
        "div",
        { role: "option", class: "tile", tabindex: -1, "data-head": named(head.layer, head.head) },
        el("span", { class: "room" }, map, number),
        dot,
        el("span", { class: "caption" }, el("span", { class: "who" }, name, value), label),
      );
      this.tiles.set(named(head.layer, head.head), { head, element, map, number, name, value });
      this.thumbnails.add(map, async () => (await call?.cells(head.head)) ?? null);
    }
    if (this.tiles.size === 0) this.thumbnails.nothing();
    this.list.replaceChildren();
    if (focused) requestAnimationFrame(() => this.chosen()?.element.focus({ preventScroll: true }));
  }

  private draw(): void {
    const { app } = this;
    const offered = measures(app);
    const { heads, by, flowing } = asked(app, offered);
    this.width = this.list.clientWidth;
    this.controls(offered, heads.length);
    const tiles = heads.map((head) => this.tiles.get(named(head.layer, head.head))!);
    this.lines = flowing ? this.flow(tiles) : this.rows(tiles);
    const off = new Set(app.state.off.split(","));
    const tinted = this.tints(offered);
    this.list.classList.toggle("tinted", tinted !== null);
    this.list.classList.toggle("labelled", app.state.colour === "label");
    this.list.classList.toggle("flowing", flowing);
    for (const tile of tiles)
      this.dress(tile, flowing, by, tinted, off.has(named(tile.head.layer, tile.head.head)));
    this.none.hidden = heads.length > 0;
    if (heads.length === 0) this.empty();
    this.mark();
  }

  /** What stands on a tile. */
  private dress(tile: Tile, flowing: boolean, by: Measure | null, tinted: Tint | null, off: boolean): void {
    const { head, element } = tile;
    const layer = this.app.source.layers[head.layer];
    const label = labelOf(this.app, head);
    tile.name.dataset.text = flowing ? named(head.layer, head.head) : String(head.head);
    const value = by === null ? head.score : by.value(head);
    tile.value.dataset.text = flowing && value !== null ? shown(value, by?.digits) : "";
    element.style.setProperty("--label", labelColour(label));
    element.classList.toggle("off", off);
    const roles = (this.app.source.roles(head.layer, head.head) ?? []).map((role) => role.name);
    const said = [`${layer.name} head ${head.head}, ${head.label}`];
    if (head.score !== null && head.label !== "mixed") said[0] += ` ${head.score.toFixed(2)}`;
    if (by !== null) said.push(`${by.title} ${shown(value, by.digits)}`);
    if (tinted !== null) said.push(...tinted(tile));
    if (roles.length > 0) said.push(`role ${roles.join(", ")}`);
    if (off) said.push("switched off");
    element.setAttribute("aria-label", said.join(", "));
    element.title = `${said.join("\n")}${label ? `\n${label.sentence}` : ""}`;
  }

  /** What tints a tile and says so in words; null: maps are shown. */
  private tints(offered: Measure[]): Tint | null {
    const { colour } = this.app.state;
    const dark = isDark();
    if (colour === "label")
      return ({ head, number }) => {
        const own = labelOf(this.app, head);
        const back = mixed(
          parsed(dark ? "#1c1f26" : "#ffffff"),
          parsed(own?.colour ?? "#777777"),
          dark ? 0.55 : 0.2,
        );
        number.dataset.text = shortLabel(head.label);
        number.style.background = css(back);
        number.style.color = inkOn(back);
        return [];
      };
    const by = offered.find((measure) => measure.name === colour);
    if (by === undefined) return null;
    const [least, most] = bounds(this.app, by);
    return ({ head, number }) => {
      const value = by.value(head);
      const part = value === null ? Number.NaN : (value - least) / (most - least || 1);
      const back = weightColour(part * part); // even steps: the scale below the menu is even
      number.dataset.text = shown(value, by.digits);
      number.style.background = css(back);
      number.style.color = inkOn(back);
      return [`${by.title} ${shown(value, by.digits)}`];
    };
  }

  /** A row per layer, each head in its place whatever else is shown. */
  private rows(tiles: Tile[]): Spot[][] {
    const heads = new Map<number, HeadData[]>();
    for (const head of this.app.reading.heads)
      heads.set(head.layer, [...(heads.get(head.layer) ?? []), head]);
    const widest = Math.max(1, ...[...heads.values()].map((each) => each.length));
    const narrow = this.width < NARROW;
    const columns = this.fit(this.width - (narrow ? 0 : NAMES), widest, SMALLEST);
    this.list.classList.toggle("narrow", narrow);
    const lines: Spot[][] = [];
    const rows: HTMLElement[] = [];
    for (const [number, all] of heads) {
      const shownHere = tiles.filter((tile) => tile.head.layer === number);
      if (shownHere.length === 0) continue;
      const layer = this.app.source.layers[number];
      const cross = layer.kind === "cross" ? el("span", { class: "kind" }, "cross") : null;
      const name = el(
        "span",
        { class: "layer-name", "aria-hidden": "true", title: layer.path },
        layer.name,
        cross,
      );
      const row = el("div", { class: "heads" }, ...shownHere.map((tile) => tile.element));
      for (const tile of shownHere) {
        const at = all.indexOf(tile.head);
        tile.element.style.gridColumn = String((at % columns) + 1);
        tile.element.style.gridRow = String(Math.floor(at / columns) + 1);
        const spot = { tile, column: at % columns };
        const last = lines.at(-1);
        const same = last?.[0].tile.head.layer === number && last[0].tile.element.style.gridRow;
        if (last !== undefined && same === tile.element.style.gridRow) last.push(spot);
        else lines.push([spot]);
      }
      rows.push(el("div", { role: "group", class: "layer", "aria-label": layer.name }, name, row));
    }
    this.list.replaceChildren(...rows);
    return lines;
  }

  private flow(tiles: Tile[]): Spot[][] {
    const aim = this.tiles.size > MANY ? SMALLEST + 10 : FLOWING;
    const columns = this.fit(this.width, Math.max(1, Math.floor((this.width + 6) / (aim + 6))), aim);
    for (const { element } of tiles) element.style.gridColumn = element.style.gridRow = "";
    this.list.classList.remove("narrow");
    this.list.replaceChildren(el("div", { class: "heads" }, ...tiles.map((tile) => tile.element)));
    const lines: Spot[][] = [];
    tiles.forEach((tile, at) => {
      if (at % columns === 0) lines.push([]);
      lines.at(-1)?.push({ tile, column: at % columns });
    });
    return lines;
  }

  /** How many stand beside each other; tiles become as large as that lets them. */
  private fit(room: number, wanted: number, smallest: number): number {
    const gap = room / wanted < 62 ? 4 : 7;
    const most = Math.max(1, Math.floor((room + gap) / (smallest + gap)));
    const columns = Math.ceil(wanted / Math.ceil(wanted / most));
    const widest = Math.max(20, Math.min(LARGEST, Math.floor((room + gap) / columns) - gap));
    const inside = this.whole(widest - 2); // a frame around each map
    const side = inside + 2;
    const { style, classList } = this.list;
    style.setProperty("--columns", String(columns));
    style.setProperty("--gap", `${gap}px`);
    style.setProperty("--side", `${side}px`);
    classList.toggle("small", side < 66);
    classList.toggle("few", columns * (side + 2 * gap) < room); // not strewn over all of the room
    for (const { map, element } of this.tiles.values())
      element.style.setProperty("--tall", `${inside * Number(map.dataset.tall ?? 1) + 2}px`);
    if (this.thumbnails.side !== inside) {
      this.thumbnails.side = inside;
      this.thumbnails.again();
    }
    return columns;
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
    const go = el("button", { type: "button" }, "See it ↓");
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

type Tint = (tile: Tile) => string[];
