/**
 * A map of cells with tokens on both sides: written out where they can be read, around the pointer where they are many.
 *
 * The plane scrolls inside its frame and keeps the tokens in sight.
 */

import { paintCells } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import {
  counted,
  type Hand,
  largestOf,
  named,
  type Picture,
  type Scene,
  type Spot,
  short,
  shown,
} from "./head_scene.ts";
import type { Cells } from "./packed.ts";
import { mapDrawing } from "./picture_export.ts";

const WRITTEN_OUT = 64; // tokens on a side
const LARGEST = 34; // CSS pixels of a cell
const READABLE = 11;
const SMALLEST = 2;
const NEAR = 4; // tokens before and after the pointer's
const LINE = 15; // pixels between them
const OUTPUT_ROWS = 1024;

export interface Sides {
  cells: Cells;
  most: number;
  signed: boolean;
  rows: string[] | null; // names
  columns: string[] | null;
  prompt: number | null;
  label: string;
}

/** How large cells are, and the room for tokens beside them. */
function measured(sides: Sides, room: number): { cell: number; left: number; top: number; all: boolean } {
  const { rows, columns } = sides.cells;
  const all = Math.max(sides.rows ? rows : 0, sides.columns ? columns : 0) <= WRITTEN_OUT;
  const longest = (names: string[] | null) =>
    Math.max(0, ...(names ?? []).slice(0, 4096).map((name) => [...shown(name)].length));
  const left = sides.rows === null ? 0 : all ? Math.min(112, 14 + longest(sides.rows) * 7.2) : 104;
  const top = sides.columns === null ? 0 : all ? Math.min(104, 12 + longest(sides.columns) * 7.2) : 104;
  const fit = Math.floor((room - left - 8) / columns);
  const least = all ? READABLE : SMALLEST;
  return { cell: Math.max(least, Math.min(LARGEST, fit)), left, top, all };
}

/** Cells with names beside them, weights or not. */
export function cellMap(sides: Sides, hand: Hand, room: number): Omit<Picture, "drawn"> {
  const { cells } = sides;
  const { cell, left, top, all } = measured(sides, room);
  const width = cells.columns * cell;
  const height = cells.rows * cell;
  const canvas = el("canvas", { class: "cells" });
  const rowMark = el("div", { class: "row-mark", hidden: true });
  const pinMark = el("div", { class: "row-mark pinned", hidden: true });
  const columnMark = el("div", { class: "column-mark", hidden: true });
  const field = el("div", { class: "cell-field" }, canvas, columnMark, rowMark, pinMark);
  const across = el("div", { class: "across", "aria-hidden": "true" });
  const down = el("div", { class: "down", "aria-hidden": "true" });
  const corner = el("div", { class: "corner" });
  const plane = el("div", { class: "plane" }, corner, across, down, field);
  const element = el(
    "div",
    { class: "map", tabindex: "0", role: "application", "aria-label": sides.label },
    plane,
  );
  plane.style.gridTemplateColumns = `${left}px ${width}px`;
  plane.style.gridTemplateRows = `${top}px ${height}px`;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  plane.style.setProperty("--letters", `${all ? Math.min(13, Math.max(9.5, cell * 0.92)) : 12}px`);

  const token = (name: string, at: number, size: number, vertical: boolean) => {
    const made = el("span", { title: name }, shown(name));
    made.style[vertical ? "left" : "top"] = `${at}px`;
    made.style[vertical ? "width" : "height"] = `${size}px`;
    made.style.lineHeight = `${size}px`;
    return made;
  };
  if (all) {
    across.append(...(sides.columns ?? []).map((name, i) => token(name, i * cell, cell, true)));
    down.append(...(sides.rows ?? []).map((name, i) => token(name, i * cell, cell, false)));
  }
  if (sides.prompt !== null && sides.prompt < cells.rows) {
    for (const [way, at] of [
      ["row", sides.prompt],
      ["column", sides.prompt],
    ] as const) {
      const line = el("div", { class: `prompt-end ${way}`, title: "end of the prompt" });
      line.style[way === "row" ? "top" : "left"] = `${at * cell}px`;
      field.append(line);
    }
  }

  /** Tokens around `middle`, as far apart as they must be to be read. */
  const around = (names: string[] | null, middle: number | null, room: number, vertical: boolean) => {
    if (names === null || middle === null) return [];
    const first = Math.max(0, middle - NEAR);
    const last = Math.min(names.length - 1, middle + NEAR);
    const start = (middle + 0.5) * cell - (middle - first + 0.5) * LINE;
    const shift = Math.min(Math.max(start, 0), Math.max(0, room - (last - first + 1) * LINE));
    return names.slice(first, last + 1).map((name, i) => {
      const made = token(name, shift + i * LINE, LINE, vertical);
      made.className = first + i === middle ? "now" : "";
      return made;
    });
  };

  const place = (mark: HTMLElement, way: "top" | "left", at: number | null) => {
    mark.hidden = at === null;
    if (at !== null) mark.style[way] = `${at * cell}px`;
  };
  for (const mark of [rowMark, pinMark]) mark.style.height = `${cell}px`;
  columnMark.style.width = `${cell}px`;

  const under = (event: PointerEvent | MouseEvent): Spot => {
    const box = field.getBoundingClientRect();
    const inside = (at: number, count: number) => (at >= 0 && at < count ? at : null);
    return {
      row: inside(Math.floor((event.clientY - box.top) / cell), cells.rows),
      column: inside(Math.floor((event.clientX - box.left) / cell), cells.columns),
      cells,
    };
  };
  element.addEventListener("pointermove", (event) => hand.point(under(event)));
  element.addEventListener("pointerleave", () => hand.point(null));
  element.addEventListener("click", (event) => {
    const spot = under(event);
    if (spot.row === null) return;
    hand.pin(spot.row);
    hand.point(spot);
  });

  const paint = () => paintCells(canvas, cells, { most: sides.most, signed: sides.signed });
  const mark = (pinned: number | null, spot: Spot | null) => {
    const row = spot?.row ?? null;
    const column = spot?.column ?? null;
    place(pinMark, "top", pinned);
    place(rowMark, "top", row === pinned ? null : row);
    place(columnMark, "left", column);
    if (all) {
      for (const [names, chosen] of [
        [down, [pinned, row]],
        [across, [column]],
      ] as const) {
        for (const [i, name] of [...names.children].entries())
          name.classList.toggle("now", chosen.includes(i));
      }
    } else {
      down.replaceChildren(...around(sides.rows, row ?? pinned, height, false));
      across.replaceChildren(...around(sides.columns, column, width, true));
    }
  };
  paint();
  return { element, mark, paint };
}

/** The chosen head's map. */
export function heatMap(scene: Scene, hand: Hand, room: number): Picture {
  const sides: Sides = {
    cells: scene.cells,
    most: scene.most,
    signed: false,
    rows: scene.call.queryTokens,
    columns: scene.call.keyTokens,
    prompt: scene.prompt,
    label:
      "Attention map, queries in rows, keys in columns. Arrow keys select a token and a key, Escape clears the selection.",
  };
  const made = cellMap(sides, hand, room);
  return { ...made, drawn: () => mapDrawing(scene, scene.cells, null) };
}

/** The output of a head before W_O, tokens in rows and channels in columns, with a line for the value under the pointer. */
export function outputMap(all: Cells, tokens: string[] | null, room: number): HTMLElement[] {
  const rows = Math.min(all.rows, OUTPUT_ROWS);
  const cells = { rows, columns: all.columns, values: all.values.subarray(0, rows * all.columns) };
  const most = largestOf(cells.values.map(Math.abs));
  const line = el("p", { class: "quiet output-line" }, "Point at a cell to read its value.");
  const sides: Sides = {
    cells,
    most,
    signed: true,
    rows: tokens?.slice(0, rows) ?? null,
    columns: null,
    prompt: null,
    label: "Output of the head before W_O, tokens in rows, channels in columns",
  };
  const hand: Hand = {
    pin: () => {},
    point(at) {
      map.mark(null, at);
      if (at === null || at.row === null || at.column === null) return;
      const value = cells.values[at.row * cells.columns + at.column].toPrecision(3).replace("-", "−");
      line.textContent = `${named(tokens, at.row)}, channel ${at.column}: ${value}`;
    },
  };
  const map = cellMap(sides, hand, room);
  const cut =
    rows < all.rows ? ` Only the first ${counted(rows)} of ${counted(all.rows)} tokens are shown.` : "";
  const scale = `Rows are tokens, columns channels. Blue is below 0, orange above; strongest colour: ±${short(most)}.${cut}`;
  return [el("p", { class: "quiet" }, scale), line, map.element];
}
