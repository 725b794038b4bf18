/** One head on the wall: its thumbnail or its number, and what is said of it. */

import { css, inkOn, labelColour, mixed, parsed, weightColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { isDark } from "../shared/theme.ts";
import type { Factors } from "./head_factors.ts";
import type { HeadData } from "./page_data.ts";
import type { App } from "./store.ts";
import { bounds, labelOf, type Measure, named, shortLabel, shown } from "./wall_measures.ts";

/** Words are seen through CSS (data-text): what is said aloud is more than that. */
export interface Tile {
  head: HeadData;
  element: HTMLElement;
  map: HTMLElement; // where its line's canvas shows through
  number: HTMLElement; // in place of the map
  name: HTMLElement;
  value: HTMLElement;
  label: HTMLElement;
  role: HTMLElement;
  tall: number; // height of the map: widths
}

const FLATTEST = 0.25;
const TALLEST = 1.5;

export function newTile(app: App, head: HeadData): Tile {
  const [map, number, name, value, label, role] = ["thumb", "tint", "name", "value", "label", "role"].map(
    (kind) => el("span", { class: kind }),
  );
  const element = el(
    "div",
    { role: "option", class: "tile", tabindex: -1, "data-head": named(head.layer, head.head) },
    el("span", { class: "room" }, map, number),
    role,
    el("span", { class: "caption" }, el("span", { class: "who" }, name, value), label),
  );
  const tile = { head, element, map, number, name, value, label, role, tall: 1 };
  renew(app, tile, head);
  return tile;
}

/** The same head on another text. */
export function renew(app: App, tile: Tile, head: HeadData): void {
  tile.head = head;
  const call = app.reading.calls[head.layer];
  tile.tall = call === null ? 1 : Math.min(Math.max(call.queries / call.keys, FLATTEST), TALLEST);
  tile.label.dataset.text = shortLabel(head.label);
  const roles = app.source.roles(head.layer, head.head) ?? [];
  tile.role.hidden = roles.length === 0;
  tile.role.title = roles.map((role) => `${role.name} ${role.share.toFixed(2)}: ${role.sentence}`).join("\n");
}

/** How tiles are dressed now. */
export interface Dress {
  flowing: boolean;
  by: Measure | null; // what sorts them
  tint: Tint | null; // null: maps are shown
  factors: Factors; // of heads that are switched off or scaled
}

/** Colours a tile; returns what it says. */
export type Tint = (tile: Tile) => string[];

export function dressed(app: App, tile: Tile, { flowing, by, tint, factors }: Dress): void {
  const { head, element } = tile;
  const label = labelOf(app, head);
  const value = by === null ? head.score : by.value(head);
  const name = named(head.layer, head.head);
  tile.name.dataset.text = flowing ? name : String(head.head);
  tile.value.dataset.text = flowing && value !== null ? shown(value, by?.digits) : "";
  element.style.setProperty("--label", labelColour(label));
  const factor = factors.get(name) ?? 1;
  element.classList.toggle("off", factor === 0);
  const parts = [`${app.source.layers[head.layer].name} head ${head.head}, ${head.label}`];
  if (head.score !== null && head.label !== "mixed") parts[0] += ` ${head.score.toFixed(2)}`;
  if (by !== null) parts.push(`${by.title} ${shown(value, by.digits)}`);
  if (tint !== null) parts.push(...tint(tile));
  const roles = (app.source.roles(head.layer, head.head) ?? []).map((role) => role.name);
  if (roles.length > 0) parts.push(`role ${roles.join(", ")}`);
  if (factor === 0) parts.push("switched off");
  else if (factor !== 1) parts.push(`output × ${factor.toFixed(1)}`);
  element.setAttribute("aria-label", [...new Set(parts)].join(", "));
  element.title = [...new Set(parts), ...(label ? [label.sentence] : [])].join("\n");
}

/** What colours tiles; null: nothing, maps are shown. */
export function tintOf(app: App, offered: Measure[]): Tint | null {
  const { colour } = app.state;
  if (colour === "label") {
    const [paper, part] = isDark() ? [parsed("#1c1f26"), 0.55] : [parsed("#ffffff"), 0.2];
    return ({ head, number }) => {
      const back = mixed(paper, parsed(labelOf(app, head)?.colour ?? "#777777"), part);
      tinted(number, shortLabel(head.label), css(back), inkOn(back));
      return [];
    };
  }
  const by = offered.find((measure) => measure.name === colour);
  if (by === undefined) return null;
  const [least, most] = bounds(app, by);
  return ({ head, number }) => {
    const value = by.value(head);
    const part = value === null ? Number.NaN : (value - least) / (most - least || 1);
    const back = weightColour(part * part); // even steps: the scale below the menus is even
    tinted(number, shown(value, by.digits), css(back), inkOn(back));
    return [`${by.title} ${shown(value, by.digits)}`];
  };
}

function tinted(number: HTMLElement, text: string, back: string, ink: string): void {
  number.dataset.text = text;
  number.style.background = back;
  number.style.color = ink;
}
