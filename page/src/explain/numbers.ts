/** Tensors by name, expected and yours, and how numbers and places are written. */

import { visible } from "../shared/elements.ts";
import { type Axis, data, type Side } from "./explain_data.ts";

const { D, Dv } = data.sizes;

/** Which sample, head and query are looked at. */
export interface At {
  sample: number;
  head: number;
  query: number;
}

export interface Matrix {
  rows: number;
  cols: number;
  shape: number[]; // of the tensor it is from
  at(row: number, col: number): number;
}

interface Tensor {
  shape: number[];
  numbers: Float64Array | Float32Array | Uint8Array;
}

const KINDS = { f8: Float64Array, f4: Float32Array, u1: Uint8Array };
const kept: Record<Side, Map<string, Tensor>> = { expected: new Map(), yours: new Map() };

/** A tensor, or null where nobody knows it. */
function tensor(side: Side, name: string): Tensor | null {
  const held = data[side][name];
  if (held === undefined) return null;
  if ("same" in held) return tensor(side, held.same);
  const known = kept[side].get(name);
  if (known !== undefined) return known;
  const bytes = Uint8Array.from(atob(held.base64), (letter) => letter.charCodeAt(0));
  const made = { shape: held.shape, numbers: new KINDS[held.kind](bytes.buffer) };
  kept[side].set(name, made);
  return made;
}

/** One matrix of a tensor: [B, H, rows, cols] at sample and head, [B, rows, cols] at sample, [rows, cols]. */
export function matrix(side: Side, name: string, at: At): Matrix | null {
  if (name === "weighted") return weighted(side, at);
  const held = tensor(side, name);
  if (held === null) return null;
  const { shape, numbers } = held;
  const rows = shape.length > 1 ? shape[shape.length - 2] : 1;
  const cols = shape[shape.length - 1];
  let start = 0;
  if (shape.length === 4) {
    start = (Math.min(at.sample, shape[0] - 1) * shape[1] + Math.min(at.head, shape[1] - 1)) * rows * cols;
  } else if (shape.length === 3) {
    start = Math.min(at.sample, shape[0] - 1) * rows * cols;
  }
  return { rows, cols, shape, at: (r, c) => numbers[start + r * cols + c] };
}

/** The same of what every page holds. */
export function expectedMatrix(name: string, at: At): Matrix {
  const held = matrix("expected", name, at);
  if (held === null) throw new Error(`this page holds no ${name}`);
  return held;
}

/** For one query: every value times the query's weight for its key, [S, D]. */
function weighted(side: Side, at: At): Matrix | null {
  const p = matrix(side, "p", at);
  const v = matrix(side, "v", at);
  if (!p || !v || p.cols !== v.rows || at.query >= p.rows) return null;
  return {
    rows: v.rows,
    cols: v.cols,
    shape: [v.rows, v.cols],
    at: (r, c) => p.at(at.query, r) * v.at(r, c),
  };
}

/** Yours where it is known, else the expected one: what the next step of yours was made from. */
export function operand(side: Side, name: string, at: At): Matrix | null {
  return (side === "yours" ? matrix("yours", name, at) : null) ?? matrix("expected", name, at);
}

export const sameNumber = (a: number, b: number): boolean => a === b || (Number.isNaN(a) && Number.isNaN(b));

/** Whether two numbers of a field count as different. */
export function parts(field: string, a: number, b: number): boolean {
  if (sameNumber(a, b)) return false;
  const allowed = field === "weighted" ? 1e-7 : (data.allowed[field] ?? 0);
  return !(Math.abs(a - b) <= allowed);
}

/** The first cell, row by row, in which two matrices of one shape differ. */
export function firstDifference(field: string, a: Matrix, b: Matrix): [number, number] | null {
  for (let r = 0; r < a.rows; r++) {
    for (let c = 0; c < a.cols; c++) if (parts(field, a.at(r, c), b.at(r, c))) return [r, c];
  }
  return null;
}

export const sameShape = (a: Matrix, b: Matrix): boolean =>
  a.shape.length === b.shape.length && a.shape.every((n, i) => n === b.shape[i]);

export function range(n: number): number[] {
  return Array.from({ length: n }, (_, i) => i);
}

// Writing numbers

const special = (x: number): string | null =>
  Number.isNaN(x) ? "NaN" : x === Infinity ? "∞" : x === -Infinity ? "−∞" : null;
const minus = (text: string): string => text.replace("-", "−");

/** In a cell: three digits at most. */
export function brief(x: number): string {
  const word = special(x);
  if (word !== null) return word;
  const size = Math.abs(x);
  if (size >= 1e4) return minus(x.toExponential(0));
  const text = x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  return minus(/^-0\.?0*$/.test(text) ? text.slice(1) : text);
}

/** In a sum: six digits. */
export function longer(x: number): string {
  const word = special(x);
  if (word !== null) return word;
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(x.toExponential(4));
  return minus(x.toFixed(size >= 1000 ? 3 : size >= 10 ? 5 : 6));
}

/** All digits, as Python reads them. */
export const exact = (x: number): string =>
  Number.isNaN(x) ? "nan" : x === Infinity ? "inf" : x === -Infinity ? "-inf" : String(x);

// Writing places

/** Channels a head has in this field, where heads lie side by side. */
export const headWidth = (field: string): number =>
  ["projected_v", "w_v", "joined", "w_o"].includes(field.split("@")[0]) ? Dv : D;

const wordsOf = (kind: Axis): string[] | null =>
  kind === "query" || kind === "key" ? data.labels[kind] : null;

/** A row or column in words: query 2 “sat”. */
export function place(kind: Axis, i: number, field = ""): string {
  if (kind === "width") return `channel ${i} (head ${Math.floor(i / headWidth(field))})`;
  const words = wordsOf(kind);
  return words ? `${kind} ${i} “${visible(words[i])}”` : `${kind} ${i}`;
}

/** The same in the margin of a map. */
export function margin(kind: Axis, i: number): string {
  const words = wordsOf(kind);
  return words ? visible(words[i]) : String(i);
}
