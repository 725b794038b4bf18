/**
 * How far apart heads are: two maps on one line of places, their divergence, a layer's heads as points.
 *
 * JS(p || q) = H((p + q) / 2) - (H(p) + H(q)) / 2 in nats: 0, the same; log 2, no key in common.
 */

import type { Cells } from "./packed.ts";
import type { Place } from "./page_data.ts";

const WHOLE = 0.98; // a row with less than this left the rest to a learned sink; more is rounding
export const MOST = Math.log(2);

export type Side = "before" | "after";

/** A text's map on the line of both texts; NaN where it has no such token, or the key was hidden. */
export function aligned(cells: Cells, queries: Place[], keys: Place[], side: Side): Cells {
  const values = new Float32Array(queries.length * keys.length).fill(Number.NaN);
  queries.forEach((query, row) => {
    const from = query[side];
    if (from === null) return;
    keys.forEach((key, column) => {
      const to = key[side];
      if (to !== null) values[row * keys.length + column] = cells.values[from * cells.columns + to];
    });
  });
  return { rows: queries.length, columns: keys.length, values };
}

/** The second minus the first; a key that one of them hides has no weight there, one that both hide is hidden. */
export function difference(first: Cells, second: Cells, absent?: (at: number) => boolean): Cells {
  const values = new Float32Array(first.values.length);
  for (let at = 0; at < values.length; at++) {
    const [mine, theirs] = [first.values[at], second.values[at]];
    const hidden = (Number.isNaN(mine) && Number.isNaN(theirs)) || absent?.(at);
    values[at] = hidden ? Number.NaN : (theirs || 0) - (mine || 0);
  }
  return { rows: first.rows, columns: first.columns, values };
}

/** Twice the part of the entropy of a sum that one key has. */
const part = (x: number) => (x > 0 ? -x * Math.log(x) : 0);

/** The divergence of two rows of weights; NaN where one of them has none. */
export function rowDivergence(first: ArrayLike<number>, second: ArrayLike<number>): number {
  const sum = (row: ArrayLike<number>) => {
    let all = 0;
    for (let at = 0; at < row.length; at++) all += row[at] || 0;
    return all;
  };
  const [mine, theirs] = [sum(first), sum(second)];
  if (!(mine > 0 && theirs > 0)) return Number.NaN;
  const [scale, other] = [mine < WHOLE ? 1 : 1 / mine, theirs < WHOLE ? 1 : 1 / theirs];
  let apart = 0;
  const add = (p: number, q: number) => {
    apart += part((p + q) / 2) - (part(p) + part(q)) / 2;
  };
  for (let at = 0; at < first.length; at++) add((first[at] || 0) * scale, (second[at] || 0) * other);
  add(mine < WHOLE ? 1 - mine : 0, theirs < WHOLE ? 1 - theirs : 0);
  return Math.max(apart, 0);
}

/** The mean of it over the rows of two maps of one shape that both have weights; NaN: there is none. */
export function divergence(first: Cells, second: Cells): number {
  let [all, count] = [0, 0];
  for (let row = 0; row < first.rows; row++) {
    const [from, to] = [row * first.columns, (row + 1) * first.columns];
    const apart = rowDivergence(first.values.subarray(from, to), second.values.subarray(from, to));
    if (!Number.isNaN(apart)) [all, count] = [all + apart, count + 1];
  }
  return count ? all / count : Number.NaN;
}

/** The divergence of one row of two aligned maps: keys without a partner are one key, "elsewhere". */
export function placeDivergence(first: Cells, second: Cells, row: number, keys: Place[]): number {
  const shared = keys.map((key) => key.before !== null && key.after !== null);
  const joined = (cells: Cells) => {
    const weights: number[] = [];
    let elsewhere = 0;
    keys.forEach((_, column) => {
      const weight = cells.values[row * cells.columns + column] || 0;
      if (shared[column]) weights.push(weight);
      else elsewhere += weight;
    });
    return [...weights, elsewhere];
  };
  return rowDivergence(joined(first), joined(second));
}

/** Of a layer's matrix, pairs of two different heads that were measured. */
export function pairsOf(matrix: (number | null)[][]): { first: number; second: number; value: number }[] {
  return matrix.flatMap((row, first) =>
    row.flatMap((value, second) =>
      second > first && value !== null && !Number.isNaN(value) ? [{ first, second, value }] : [],
    ),
  );
}

/** Values and vectors of a symmetric matrix, largest value first: rotations until nothing is left beside it (Jacobi). */
export function eigen(matrix: number[][]): { values: number[]; vectors: number[][] } {
  const count = matrix.length;
  const a = matrix.map((row) => [...row]);
  const v = a.map((_, i) => a.map((_, j) => Number(i === j)));
  const size = Math.hypot(...a.flat());
  for (let sweep = 0; sweep < 60; sweep++) {
    let beside = 0;
    for (let p = 0; p < count; p++) for (let q = p + 1; q < count; q++) beside += a[p][q] ** 2;
    if (Math.sqrt(beside) <= 1e-14 * size) break;
    for (let p = 0; p < count; p++) {
      for (let q = p + 1; q < count; q++) {
        if (a[p][q] === 0) continue;
        const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
        const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.hypot(theta, 1));
        const c = 1 / Math.hypot(t, 1);
        const s = t * c;
        for (let k = 0; k < count; k++)
          [a[k][p], a[k][q]] = [c * a[k][p] - s * a[k][q], s * a[k][p] + c * a[k][q]];
        for (let k = 0; k < count; k++)
          [a[p][k], a[q][k]] = [c * a[p][k] - s * a[q][k], s * a[p][k] + c * a[q][k]];
        for (let k = 0; k < count; k++)
          [v[k][p], v[k][q]] = [c * v[k][p] - s * v[k][q], s * v[k][p] + c * v[k][q]];
      }
    }
  }
  const order = a.map((_, i) => i).sort((i, j) => a[j][j] - a[i][i]);
  return { values: order.map((i) => a[i][i]), vectors: order.map((i) => v.map((row) => row[i])) };
}

/**
 * Heads as points about as far apart as the roots of their divergences are: classical multidimensional scaling, as
 * `headwise.heads.layout` does it. In each axis the point farthest out is on the positive side.
 */
export function layout(divergences: number[][]): [number, number][] {
  const count = divergences.length;
  const mean = (numbers: number[]) => numbers.reduce((all, one) => all + one, 0) / count;
  const means = divergences.map(mean);
  const middle = mean(means);
  const centred = divergences.map((row, i) => row.map((d, j) => -(d - means[i] - means[j] + middle) / 2));
  const { values, vectors } = eigen(centred);
  const axes = [0, 1].map((axis) => {
    if (axis >= count) return new Array<number>(count).fill(0);
    const along = vectors[axis].map((x) => x * Math.sqrt(Math.max(values[axis], 0)));
    const far = Math.max(...along.map(Math.abs)) * (1 - 1e-9);
    const sign = along[along.findIndex((x) => Math.abs(x) >= far)] < 0 ? -1 : 1;
    return along.map((x) => x * sign);
  });
  return divergences.map((_, i) => [axes[0][i], axes[1][i]]);
}
