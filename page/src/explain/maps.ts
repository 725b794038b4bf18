/** Heat maps: small results as tables with numbers, large results and operands as pictures. */

import { el } from "../shared/elements.ts";
import { cellAfter } from "../shared/keys.ts";
import { styled } from "../shared/theme.ts";
import type { FieldMap } from "./explain_data.ts";
import { brief, exact, headWidth, type Matrix, margin, parts, place, range } from "./numbers.ts";

const READABLE = 640; // cells; beyond that a map is a picture
const WIDEST = 40; // columns

/** A map on the page. */
export interface DrawnMap {
  element: HTMLElement;
  /** Outline a cell; a picture without a row or a column: a whole column or row; without both: nothing. */
  mark(row?: number, col?: number, focus?: boolean): void;
  /** Draw it anew, in the colours of now. */
  again(): void;
  /** Whether it is larger than its room: then people scroll in it. */
  overflows: boolean;
}

/** Called with the cell that was clicked or walked to. */
export type Choose = (row: number, col: number, focus: boolean) => void;

/** Dots a picture may take: a cell's side, and all of it. */
export interface Room {
  least: number;
  most: number;
  width: number;
  height: number;
}

export const isReadable = (m: Matrix): boolean => m.rows * m.cols <= READABLE && m.cols <= WIDEST;

/** The largest finite size in some matrices, for one scale of colours. */
export function extent(matrices: Matrix[]): number {
  let most = 0;
  for (const m of matrices) {
    for (let r = 0; r < m.rows; r++) {
      for (let c = 0; c < m.cols; c++) {
        const size = Math.abs(m.at(r, c));
        if (Number.isFinite(size) && size > most) most = size;
      }
    }
  }
  return most || 1;
}

/** What colours numbers of a map: its ink stays readable in light and dark, so colours never become full. */
function shader(colour: FieldMap["colour"], most: number): (x: number) => string | null {
  const [share, negative, positive] = ["--share", "--negative", "--positive"].map(styled);
  return (x) => {
    if (!Number.isFinite(x)) return null;
    if (colour === "mask") return x ? `rgb(${share} / 0.55)` : null;
    const strength = Math.min(1, Math.abs(x) / most);
    const hue = colour === "share" ? share : x < 0 ? negative : positive;
    return `rgb(${hue} / ${(0.04 + 0.66 * strength).toFixed(3)})`;
  };
}

const isHeadEdge = (map: FieldMap, i: number): boolean =>
  map.columns === "width" && i > 0 && i % headWidth(map.field) === 0;

/** A table of numbers. `other`: the map beside it, to outline what differs. */
export function grid(
  map: FieldMap,
  m: Matrix,
  other: Matrix | null,
  most: number,
  name: string,
  choose: Choose | null,
): DrawnMap {
  const kind = `map ${m.cols > 14 ? "tight" : ""}`;
  const table = el("table", { class: kind, role: "grid", "aria-label": name, "data-field": map.field });
  const summed = map.field === "p"; // each query's weights add up to 1, or should
  const cells: HTMLElement[][] = [];
  const body = el("tbody");
  for (const r of range(m.rows)) {
    const title = place(map.rows, r, map.field);
    const row = el("tr", null, el("th", { scope: "row", title }, margin(map.rows, r)));
    cells.push(range(m.cols).map((c) => gridCell(map, m, other, r, c)));
    row.append(...cells[r]);
    const total = range(m.cols).reduce((sum, c) => sum + m.at(r, c), 0);
    if (summed) row.append(el("td", { class: "aside" }, brief(total)));
    body.append(row);
  }
  table.append(el("thead", null, gridHead(map, m, summed)), body);
  const cellOf = (event: Event): [number, number] | null => {
    const cell = (event.target as Element).closest<HTMLElement>("td[data-row]");
    return cell && [Number(cell.dataset.row), Number(cell.dataset.column)];
  };
  table.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) choose?.(...cell, true);
  });
  table.addEventListener("keydown", (event) => {
    const cell = cellOf(event);
    const next = cell && cellAfter(event, cell, [m.rows, m.cols]);
    if (next) choose?.(...next, true);
  });
  let chosen: HTMLElement | null = null;
  const again = () => {
    const shade = shader(map.colour, most);
    for (const [r, row] of cells.entries()) {
      for (const [c, cell] of row.entries()) cell.style.backgroundColor = shade(m.at(r, c)) ?? "";
    }
  };
  again();
  cells[0][0].tabIndex = 0;
  return {
    element: el("div", { class: "scroll" }, table),
    mark(r, c, focus) {
      if (chosen) {
        chosen.removeAttribute("aria-selected");
        chosen.tabIndex = -1;
      }
      chosen = r === undefined || c === undefined ? null : (cells[r]?.[c] ?? null);
      if (!chosen) return;
      cells[0][0].tabIndex = -1;
      chosen.tabIndex = 0;
      chosen.setAttribute("aria-selected", "true");
      if (focus) chosen.focus({ preventScroll: false });
    },
    again,
    overflows: false,
  };
}

function gridHead(map: FieldMap, m: Matrix, summed: boolean): HTMLElement {
  const head = el("tr", null, el("td", { class: "corner" }));
  for (const c of range(m.cols)) {
    const edge = isHeadEdge(map, c) ? "edge" : null;
    const title = place(map.columns, c, map.field);
    head.append(el("th", { scope: "col", class: edge, title }, margin(map.columns, c)));
  }
  if (summed) head.append(el("th", { scope: "col", class: "aside" }, "Σ row"));
  return head;
}

function gridCell(map: FieldMap, m: Matrix, other: Matrix | null, r: number, c: number): HTMLElement {
  const x = m.at(r, c);
  const off = other !== null && parts(map.field, x, other.at(r, c));
  const kinds = [off && "off", !Number.isFinite(x) && "hidden", isHeadEdge(map, c) && "edge"].filter(Boolean);
  const where = `${place(map.rows, r, map.field)}, ${place(map.columns, c, map.field)}`;
  const attributes = {
    role: "gridcell",
    tabindex: "-1",
    "data-row": r,
    "data-column": c,
    title: exact(x),
    "aria-label": `${where}: ${brief(x)}${off ? ", differs" : ""}`,
    class: kinds.join(" ") || null,
  };
  return el("td", attributes, map.colour === "mask" ? (x ? "see" : "hide") : brief(x));
}

/** A picture of a matrix. */
export function picture(
  map: FieldMap,
  m: Matrix,
  other: Matrix | null,
  most: number,
  name: string,
  choose: Choose | null,
  room: Room,
): DrawnMap {
  const fitting = Math.min(room.most, Math.floor(room.width / m.cols), Math.floor(room.height / m.rows));
  const size = Math.max(room.least, fitting);
  const canvas = el("canvas", {
    role: "img",
    "aria-label": name,
    "data-field": map.field,
    class: choose ? "large" : "small",
    tabindex: choose ? "0" : null,
  });
  const dense = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.ceil(m.cols * size * dense);
  canvas.height = Math.ceil(m.rows * size * dense);
  canvas.style.width = `${m.cols * size}px`;
  canvas.style.height = `${m.rows * size}px`;
  let marked: { row?: number; col?: number } = {};
  const draw = () => {
    const ink = canvas.getContext("2d");
    if (ink === null) return;
    ink.setTransform(dense, 0, 0, dense, 0, 0);
    paintMap(ink, map, m, other, most, size);
    outline(ink, m, size, marked.row, marked.col);
  };
  const spot = (event: MouseEvent): [number, number] | null => {
    const box = canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top) / size);
    const c = Math.floor((event.clientX - box.left) / size);
    return r >= 0 && c >= 0 && r < m.rows && c < m.cols ? [r, c] : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const at = spot(event);
    canvas.title = at
      ? `${place(map.rows, at[0], map.field)}, ${place(map.columns, at[1], map.field)}: ${exact(m.at(...at))}`
      : "";
  });
  if (choose) {
    canvas.addEventListener("click", (event) => {
      const at = spot(event);
      if (at) choose(...at, true);
    });
    canvas.addEventListener("keydown", (event) => {
      const next = cellAfter(event, [marked.row ?? 0, marked.col ?? 0], [m.rows, m.cols]);
      if (next) choose(...next, true);
    });
  }
  draw();
  return {
    element: el("div", { class: "scroll" }, canvas),
    mark(row, col, focus) {
      marked = { row, col };
      draw();
      if (focus) canvas.focus({ preventScroll: true });
    },
    again: draw,
    overflows: fitting < room.least,
  };
}

function paintMap(
  ink: CanvasRenderingContext2D,
  map: FieldMap,
  m: Matrix,
  other: Matrix | null,
  most: number,
  size: number,
): void {
  const shade = shader(map.colour, most);
  const [surface, hatch, wrong, line] = ["--surface", "--hatch", "--wrong", "--ink"].map(styled);
  const side = size > 5 ? size - 1 : size;
  ink.fillStyle = surface;
  ink.fillRect(0, 0, m.cols * size, m.rows * size);
  ink.strokeStyle = wrong;
  for (let r = 0; r < m.rows; r++) {
    for (let c = 0; c < m.cols; c++) {
      const x = m.at(r, c);
      ink.fillStyle = shade(x) ?? hatch;
      ink.fillRect(c * size, r * size, side, side);
      if (other && parts(map.field, x, other.at(r, c)))
        ink.strokeRect(c * size + 0.5, r * size + 0.5, size - 2, size - 2);
    }
  }
  if (map.columns !== "width") return;
  ink.fillStyle = line;
  const step = headWidth(map.field);
  for (let c = step; c < m.cols; c += step) ink.fillRect(c * size - 1, 0, 1, m.rows * size);
}

function outline(ink: CanvasRenderingContext2D, m: Matrix, size: number, row?: number, col?: number): void {
  if (row === undefined && col === undefined) return;
  const [x, w] = col === undefined ? [0, m.cols * size] : [col * size, size];
  const [y, h] = row === undefined ? [0, m.rows * size] : [row * size, size];
  ink.strokeStyle = styled("--chosen");
  ink.lineWidth = 2;
  ink.strokeRect(x + 1, y + 1, Math.max(2, w - 3), Math.max(2, h - 3));
  ink.lineWidth = 1;
}
