/**
 * What every picture of one head draws, and how it is said in words.
 *
 * A cell is one query and one key, or, pooled, a share of several: `covered` says which positions lie behind it, and
 * everything else is the same for both.
 */

import type { Child } from "../shared/elements.ts";
import { el } from "../shared/elements.ts";
import type { Cells, Region } from "./packed.ts";
import type { ImageData } from "./page_data.ts";
import type { Call } from "./sources.ts";

/** One head on one text, as it is asked for now. */
export interface Scene {
  title: string; // "Layer 2, head 3"
  caption: string; // whose head and which text
  call: Call;
  head: number;
  self: boolean; // queries and keys are one text
  offset: number; // of such a text: the position of the first query among the keys
  cells: Cells; // in the measure that is asked for; what was not yet generated is hidden
  most: number; // what the strongest colour stands for
  written: boolean; // weights times the norm of what is written
  prompt: number | null; // of how many tokens the prompt is, where text was generated
  image: ImageData | null;
}

/** A cell of a map; a row or a column alone where the other is null. */
export interface Spot {
  row: number | null;
  column: number | null;
  cells: Cells;
}

/** A picture of a scene that can be pointed at. */
export interface Picture {
  element: HTMLElement;
  mark(pinned: number | null, spot: Spot | null): void; // the pinned query, and what is pointed at
  paint(): void; // again, as when colours have changed
  drawn(): SVGSVGElement; // to take away
}

/** What a picture tells: what is pointed at, which query a click pins. */
export interface Hand {
  point(spot: Spot | null): void;
  pin(query: number | null): void;
}

const grouped = new Intl.NumberFormat("en");

/** 12,288: a position or a count. */
export const counted = (n: number): string => grouped.format(n);

/** A weight in two or three digits. */
export function short(weight: number): string {
  if (Number.isNaN(weight)) return "masked";
  const size = Math.abs(weight);
  if (size === 0) return "0";
  if (size < 0.001) return weight < 0 ? ">−0.001" : "<0.001";
  return weight.toFixed(size < 0.1 ? 3 : 2).replace("-", "−");
}

/** A number whose title is all that is known of it. */
export function figure(weight: number): HTMLElement {
  return el("b", { title: Number.isNaN(weight) ? "masked" : weight.toPrecision(5) }, short(weight));
}

/** The first and the last position that share cell `index` of `count`. */
export function covered(index: number, count: number, total: number): [number, number] {
  const from = Math.ceil((index * total) / count);
  return [from, Math.max(from, Math.ceil(((index + 1) * total) / count) - 1)];
}

/** The cell in which a position lies. */
export function cellOf(position: number, count: number, total: number): number {
  return Math.min(count - 1, Math.floor((position * count) / total));
}

/** A token as it is written on a page: spaces and line ends can be seen. */
export function shown(token: string): string {
  if (token === "") return "∅";
  return token
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/^ +$/, (spaces) => "␣".repeat(spaces.length));
}

/** `"sat" (5)`; without tokens, `position 5`. */
export function named(tokens: string[] | null, position: number): string {
  const token = tokens?.[position];
  return token === undefined ? `position ${counted(position)}` : `“${shown(token)}” (${counted(position)})`;
}

function range(plural: string, singular: string, [from, to]: [number, number]): string {
  return from === to ? `${singular} ${counted(from)}` : `${plural} ${counted(from)}–${counted(to)}`;
}

/** The tokens from one position to another, the middle left out where they are many. */
export function excerpt(tokens: string[] | null, [from, to]: [number, number], most = 16): string {
  if (tokens === null) return "";
  const words = (start: number, end: number) => tokens.slice(start, end).map(shown).join(" ");
  if (to - from < most) return words(from, to + 1);
  const half = Math.floor(most / 2);
  return `${words(from, from + half)} … ${words(to + 1 - half, to + 1)}`;
}

/** The positions that cells cover, [from, to): of a part of a map fewer than all. */
export function regionOf({ call }: Pick<Scene, "call">, cells: Cells): Region {
  return cells.region ?? { queries: [0, call.queries], keys: [0, call.keys] };
}

/** Whether a cell of these stands for one query and one key. */
export function isExact(scene: Scene, cells: Cells): boolean {
  const { queries, keys } = regionOf(scene, cells);
  return cells.rows === queries[1] - queries[0] && cells.columns === keys[1] - keys[0];
}

function coveredWithin(index: number, count: number, [from, to]: [number, number]): [number, number] {
  const [first, last] = covered(index, count, to - from);
  return [from + first, from + last];
}

export function rowRange(scene: Scene, cells: Cells, row: number): [number, number] {
  return coveredWithin(row, cells.rows, regionOf(scene, cells).queries);
}

export function columnRange(scene: Scene, cells: Cells, column: number): [number, number] {
  return coveredWithin(column, cells.columns, regionOf(scene, cells).keys);
}

function cellWithin(position: number, count: number, [from, to]: [number, number]): number | null {
  return position < from || position >= to ? null : cellOf(position - from, count, to - from);
}

/** The row in which a query lies. Null: these cells do not cover it. */
export function rowOf(scene: Scene, cells: Cells, query: number): number | null {
  return cellWithin(query, cells.rows, regionOf(scene, cells).queries);
}

/** The column in which a key lies. Null: these cells do not cover it. */
export function columnOf(scene: Scene, cells: Cells, key: number): number | null {
  return cellWithin(key, cells.columns, regionOf(scene, cells).keys);
}

/** A row, as a sentence names it. */
export function rowName(scene: Scene, cells: Cells, row: number): string {
  const [from, to] = rowRange(scene, cells, row);
  return from === to ? named(scene.call.queryTokens, from) : range("queries", "query", [from, to]);
}

export function columnName(scene: Scene, cells: Cells, column: number): string {
  const [from, to] = columnRange(scene, cells, column);
  return from === to ? named(scene.call.keyTokens, from) : range("keys", "key", [from, to]);
}

/** The columns of a row that can be seen, largest first. */
export function ranked(cells: Cells, row: number): { column: number; weight: number }[] {
  const columns: { column: number; weight: number }[] = [];
  for (let column = 0; column < cells.columns; column++) {
    const weight = cells.values[row * cells.columns + column];
    if (!Number.isNaN(weight)) columns.push({ column, weight });
  }
  return columns.sort((a, b) => b.weight - a.weight);
}

/** The largest weights of a row: `"sat" (5) attends to: "cat" 0.62, "the" 0.11 …`. */
export function rowSaid(scene: Scene, cells: Cells, row: number, most: number): Child[] {
  const best = ranked(cells, row);
  const [first, last] = rowRange(scene, cells, row);
  const isOne = first === last;
  const [from, to] = regionOf(scene, cells).keys;
  const partial = to - from < scene.call.keys;
  if (best.length === 0)
    return [`${rowName(scene, cells, row)}: ${partial ? "these keys are masked" : "not generated yet"}`];
  const does = scene.written
    ? isOne
      ? "receives most from"
      : "receive most from"
    : isOne
      ? "attends to"
      : "attend to";
  const among = partial ? `, among ${range("keys", "key", [from, to - 1])}` : ""; // larger weights may be elsewhere
  const parts: Child[] = [el("span", { class: "who" }, rowName(scene, cells, row)), ` ${does}${among}: `];
  for (const [i, { column, weight }] of best.slice(0, most).entries()) {
    const [from, to] = columnRange(scene, cells, column);
    const tokens = scene.call.keyTokens;
    const name = from === to && tokens ? `“${shown(tokens[from])}”` : columnName(scene, cells, column);
    parts.push(i > 0 ? ", " : "", `${name} `, figure(weight));
  }
  if (best.length > most) parts.push(" …");
  return parts;
}

/** What one cell says: `"sat" (5) → "cat" (2): 0.62`. */
export function cellSaid(scene: Scene, { row, column, cells }: Spot): Child[] {
  if (row === null || column === null) return [];
  const weight = cells.values[row * cells.columns + column];
  const pair = `${rowName(scene, cells, row)} → ${columnName(scene, cells, column)}: `;
  if (Number.isNaN(weight)) return [pair, el("b", null, "masked")];
  const of = isExact(scene, cells) || scene.written ? "" : " of their weight";
  return [pair, figure(weight), of];
}

/** The tokens behind a pooled cell, shortened. */
export function regionSaid(scene: Scene, { row, column, cells }: Spot): string {
  if (isExact(scene, cells) || row === null) return "";
  const queries = excerpt(scene.call.queryTokens, rowRange(scene, cells, row));
  if (column === null) return queries;
  const keys = excerpt(scene.call.keyTokens, columnRange(scene, cells, column));
  return queries || keys ? `“${queries}” → “${keys}”` : "";
}

/** Attention that a key receives: the mean over the queries that can see it; a row may stand for several. */
export function received(cells: Cells, queries: number): Float32Array {
  const sums = new Float32Array(cells.columns);
  const seen = new Float32Array(cells.columns);
  for (let row = 0; row < cells.rows; row++) {
    const [from, to] = covered(row, cells.rows, queries);
    for (let column = 0; column < cells.columns; column++) {
      const weight = cells.values[row * cells.columns + column];
      if (Number.isNaN(weight)) continue;
      sums[column] += weight * (to - from + 1);
      seen[column] += to - from + 1;
    }
  }
  return sums.map((sum, column) => (seen[column] === 0 ? Number.NaN : sum / seen[column]));
}

/** Rows from `count` on hidden: what was not yet generated. */
export function upTo(cells: Cells, count: number): Cells {
  if (count >= cells.rows) return cells;
  const values = cells.values.slice();
  values.fill(Number.NaN, count * cells.columns);
  return { ...cells, values };
}

/** The largest value that can be seen. */
export function largestOf(values: ArrayLike<number>): number {
  let most = 0;
  for (let at = 0; at < values.length; at++) if (values[at] > most) most = values[at];
  return most;
}
