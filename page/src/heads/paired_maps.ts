/** Maps side by side on the same rows and columns: a row that is pointed at is read in all of them. */

import { css, inkOn, paintCells, signedGradient, weightGradient } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { styled } from "../shared/theme.ts";
import { fixed, signed } from "./number_texts.ts";
import type { Cells } from "./packed.ts";

export interface PairedMap {
  title: string;
  cells: Cells;
  signed?: boolean;
  absentRows?: Set<number>; // places that this text has not: hatched
  absentColumns?: Set<number>;
}

export interface Axis {
  names: string[] | null; // a token per place; null: not known, or places share cells
  positions: number; // where they are more than the cells, cells are told by the positions they hold
  changed?: boolean[]; // these names stand out
}

export interface PairedMaps {
  element: HTMLElement;
  show(maps: PairedMap[], rows: Axis, columns: Axis, row: number): void;
}

const NAMED = 34; // places at most that are named beside a map
const LETTERS = 11; // of a name beside a map
const KEYS = 8; // in the table of a row
const TALL = 460; // dots at most
const CELL = 26; // dots at most
const GAP = 18; // dots between two maps
const font = (size: number) =>
  `${size}px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif`;

interface Frame {
  left: number;
  top: number;
  width: number;
  height: number;
}

const cut = (name: string) => (name.length > LETTERS ? `${name.slice(0, LETTERS - 1)}…` : name);

function placeName(axis: Axis, at: number, cells: number): string {
  if (axis.names !== null) return axis.names[at];
  const first = Math.ceil((at * axis.positions) / cells);
  const last = Math.ceil(((at + 1) * axis.positions) / cells) - 1;
  return last > first ? `positions ${first}–${last}` : `position ${first}`;
}

/** said: what the distance of a row is, in words, under the name of the row. */
export function pairedMaps(said: (row: number) => string): PairedMaps {
  const figures = el("div", {
    class: "pm-figures",
    tabindex: 0,
    role: "group",
    "aria-label": "Maps. Arrow up and down select a row; the table below shows its weights.",
  });
  const table = el("div", { class: "pm-row", "aria-live": "polite" });
  const element = el("div", { class: "pm" }, figures, table);
  let shown: { maps: PairedMap[]; rows: Axis; columns: Axis } | null = null;
  let row = 0;
  let pinned = 0;
  let frames: Frame[] = [];

  const paint = () => {
    if (shown === null || element.clientWidth === 0) return;
    const { maps, rows, columns } = shown;
    const wide = element.clientWidth;
    const { cells } = maps[0];
    const pen = figures.querySelector("canvas")?.getContext("2d");
    const beside = wide >= 620 ? maps.length : 1;
    const rowNames = named(pen, rows, cells.rows);
    const columnNames = named(pen, columns, cells.columns);
    // beside each other the first has the names of all
    const fits = (wide - rowNames.room - beside * 6 - GAP * (beside - 1)) / beside / cells.columns;
    const wanted = Math.min(fits, CELL);
    const tall = Math.min(wanted, TALL / cells.rows);
    const whole = (dots: number) => (dots >= 1 ? Math.floor(dots) : dots);
    const down = whole(tall);
    const across = cells.rows <= 3 * cells.columns ? down : whole(wanted); // square, but for many rows of few keys
    const grid = { across, down, row, rows, columns, columnNames };
    frames = maps.map((map, at) => {
      const canvas = figures.children[at].querySelector("canvas") as HTMLCanvasElement;
      const own = at === 0 || beside === 1 ? rowNames : { names: null, room: 2 };
      (figures.children[at] as HTMLElement).style.setProperty("--indent", `${own.room}px`);
      return paintMap(canvas, map, { ...grid, rowNames: own });
    });
  };
  const read = () => {
    if (shown === null) return;
    table.replaceChildren(rowTable(shown.maps, shown.rows, shown.columns, row, said(row)));
  };
  const choose = (wanted: number) => {
    const last = (shown?.maps[0].cells.rows ?? 1) - 1;
    const next = Math.min(Math.max(wanted, 0), last);
    if (next === row) return;
    row = next;
    paint();
    read();
  };
  const rowAt = (event: MouseEvent): number | null => {
    const canvas = (event.target as Element).closest("canvas");
    const at = [...figures.children].findIndex((figure) => figure.contains(canvas));
    const frame = frames[at];
    if (canvas === null || frame === undefined || shown === null) return null;
    const y = event.clientY - canvas.getBoundingClientRect().top - frame.top;
    const wanted = Math.floor((y / frame.height) * shown.maps[at].cells.rows);
    return y >= 0 && wanted < shown.maps[at].cells.rows ? wanted : null;
  };
  figures.addEventListener("mousemove", (event) => {
    const at = rowAt(event);
    if (at !== null) choose(at);
  });
  figures.addEventListener("mouseleave", () => choose(pinned));
  figures.addEventListener("click", (event) => {
    const at = rowAt(event);
    if (at !== null) {
      pinned = at;
      choose(at);
    }
  });
  figures.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    choose(row + step);
    pinned = row;
  });
  new ResizeObserver(paint).observe(element);
  return {
    element,
    show(maps, rows, columns, first) {
      shown = { maps, rows, columns };
      row = Math.min(Math.max(first, 0), Math.max(maps[0].cells.rows - 1, 0));
      pinned = row;
      figures.replaceChildren(...maps.map(figure));
      figures.dataset.count = String(maps.length);
      paint();
      read();
    },
  };
}

function figure(map: PairedMap): HTMLElement {
  const scale = el("span", { class: "pm-scale", "aria-hidden": "true" });
  scale.style.backgroundImage = map.signed ? signedGradient() : weightGradient();
  const most = map.signed ? spread(map.cells) : 1;
  const ends = map.signed ? [signed(-most, 2), signed(most, 2)] : ["0", "1"];
  return el(
    "figure",
    { class: "pm-figure" },
    el("figcaption", null, map.title),
    el("canvas", {
      role: "img",
      "aria-label": `${map.title}, ${map.cells.rows} rows, ${map.cells.columns} columns`,
    }),
    el("div", { class: "pm-key quiet" }, ends[0], scale, ends[1]),
  );
}

/** The largest difference, so that a small one is seen; never nothing. */
function spread(cells: Cells): number {
  let most = 0;
  for (const value of cells.values) if (Math.abs(value) > most) most = Math.abs(value);
  return most || 1;
}

interface Names {
  names: string[] | null;
  room: number; // dots
}

interface Grid {
  across: number; // dots of a cell
  down: number;
  row: number; // the chosen one
  rows: Axis;
  columns: Axis;
  rowNames: Names;
  columnNames: Names;
}

function named(pen: CanvasRenderingContext2D | null | undefined, axis: Axis, count: number): Names {
  if (axis.names === null || count > NAMED || !pen) return { names: null, room: 2 };
  const names = axis.names.map(cut);
  pen.font = font(12);
  return { names, room: Math.ceil(Math.max(0, ...names.map((name) => pen.measureText(name).width))) + 8 };
}

function paintMap(canvas: HTMLCanvasElement, map: PairedMap, grid: Grid): Frame {
  const { cells } = map;
  const { across, down, row, rows, columns } = grid;
  const pen = canvas.getContext("2d") as CanvasRenderingContext2D;
  const left = grid.rowNames.room;
  const rowNames = down < 8 ? null : grid.rowNames.names;
  const columnNames = across < 8 ? null : grid.columnNames.names;
  const frame = { left, top: 3, width: across * cells.columns, height: down * cells.rows };
  const sharp = Math.max(1, window.devicePixelRatio || 1);
  const wide = Math.ceil(left + frame.width + 4);
  const high = Math.ceil(frame.height + 5 + (columnNames ? grid.columnNames.room : 0));
  canvas.width = wide * sharp;
  canvas.height = high * sharp;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${high}px`;
  pen.scale(sharp, sharp);
  const small = document.createElement("canvas");
  paintCells(small, cells, map.signed ? { signed: true, most: spread(cells) } : {});
  pen.imageSmoothingEnabled = across < 1;
  pen.drawImage(small, frame.left, frame.top, frame.width, frame.height);
  hatch(pen, frame, across, down, map);
  const [ink, quiet, after, chosen] = ["--ink", "--quiet", "--after", "--chosen"].map(styled);
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.font = font(Math.min(down + 1, 12));
  rowNames?.forEach((name, at) => {
    pen.fillStyle = rows.changed?.[at] ? after : at === row ? ink : quiet;
    pen.fillText(name, left - 5, frame.top + (at + 0.5) * down);
  });
  pen.font = font(Math.min(across + 1, 12));
  columnNames?.forEach((name, at) => {
    pen.save();
    pen.translate(frame.left + (at + 0.5) * across, frame.top + frame.height + 5);
    pen.rotate(-Math.PI / 2);
    pen.fillStyle = columns.changed?.[at] ? after : quiet;
    pen.fillText(name, 0, 0);
    pen.restore();
  });
  pen.strokeStyle = styled("--line");
  pen.lineWidth = 1;
  pen.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
  pen.strokeStyle = chosen;
  pen.lineWidth = 2;
  pen.strokeRect(frame.left - 1, frame.top + row * down - 1, frame.width + 2, Math.max(down, 1) + 2);
  return frame;
}

/** Places that a text has not: slanting lines over their rows and columns. */
function hatch(
  pen: CanvasRenderingContext2D,
  frame: Frame,
  across: number,
  down: number,
  map: PairedMap,
): void {
  const boxes = [
    ...[...(map.absentRows ?? [])].map((at) => [frame.left, frame.top + at * down, frame.width, down]),
    ...[...(map.absentColumns ?? [])].map((at) => [
      frame.left + at * across,
      frame.top,
      across,
      frame.height,
    ]),
  ];
  if (boxes.length === 0) return;
  pen.save();
  pen.beginPath();
  for (const [x, y, width, height] of boxes) pen.rect(x, y, width, height);
  pen.fillStyle = styled("--surface");
  pen.fill();
  pen.clip();
  pen.beginPath();
  for (let x = -frame.height; x < frame.width; x += 5) {
    pen.moveTo(frame.left + x, frame.top + frame.height);
    pen.lineTo(frame.left + x + frame.height, frame.top);
  }
  pen.strokeStyle = styled("--quiet");
  pen.lineWidth = 0.8;
  pen.stroke();
  pen.restore();
}

/** The keys of a row with the number of every map, those with the largest number first. */
function rowTable(maps: PairedMap[], rows: Axis, columns: Axis, row: number, said: string): HTMLElement {
  const count = maps[0].cells.columns;
  const value = (map: PairedMap, key: number) => map.cells.values[row * count + key];
  const size = (key: number) => Math.max(...maps.map((map) => Math.abs(value(map, key)) || 0));
  const sizes = Array.from({ length: count }, (_, key) => ({ key, size: size(key) }));
  const keys = sizes
    .filter((one) => one.size > 0)
    .sort((a, b) => b.size - a.size || a.key - b.key)
    .slice(0, KEYS);
  const cell = (map: PairedMap, key: number) => {
    const x = value(map, key);
    const absent = map.absentRows?.has(row) || map.absentColumns?.has(key);
    const made = el("td", null, absent ? "no such token" : (map.signed ? signed : fixed)(x));
    if (map.signed && x) made.className = x > 0 ? "pm-more" : "pm-less";
    return made;
  };
  const head = el("tr", null, el("th", { scope: "col" }, "key"));
  for (const map of maps) head.append(el("th", { scope: "col" }, map.title));
  const body = el("tbody");
  for (const { key } of keys)
    body.append(
      el(
        "tr",
        { "data-key": key },
        el("th", { scope: "row" }, placeName(columns, key, count)),
        ...maps.map((map) => cell(map, key)),
      ),
    );
  const name = el("strong", null, placeName(rows, row, maps[0].cells.rows));
  return el(
    "div",
    { "data-row": row },
    el("p", { class: "pm-said" }, "Row ", name, said ? `: ${said}` : ""),
    keys.length
      ? el("div", { class: "pm-table" }, el("table", { class: "plain" }, el("thead", null, head), body))
      : el("p", { class: "quiet" }, "This row has no weights."),
  );
}

/** A swatch with a number in it; of letters only plain black or white read on every colour. */
export function tinted(cell: HTMLElement, colour: [number, number, number]): void {
  cell.style.backgroundColor = css(colour);
  cell.style.color = inkOn(colour);
}
