/**
 * The numbers and labels of heads that look back, as Python has them: `engines/statistics.py`, `heads/measures.py`,
 * `heads/measures.py`, `heads/record.py`, `heads/layer.py`, `heads/head_distances.py`.
 *
 * A row of a causal head never changes once it is there, so its numbers are made with it; a head's number is
 * the mean over the queries that count.
 */

import type { HeadData, LabelData } from "../page_data.ts";
import type { Row } from "./forward.ts";

/** A token and what is known of it. */
export interface Token {
  id: number;
  special: boolean;
  punctuation: boolean;
}

const REACH = 8; // keys that far away are near
const SINK = 128; // keys whose weight is `streaming`: the first, and the most recent
const RECENT = 256;
const COMPARED = 256; // queries at most that heads are compared by
const ROUNDING = 1e-3; // two scores of the same keys are equal up to this

/** What is measured at each query; NaN: the query does not count. */
export const HEAD_NUMBERS = [
  "entropy", "effective_keys", "confidence", "distance", "first", "previous", "itself", "next", "local",
  "max_logit", "spread", "locality", "streaming", "induction", "duplicate_token", "special", "punctuation",
  "written_first", "written_special",
] as const; // biome-ignore format: a table
type Name = (typeof HEAD_NUMBERS)[number];
const AT = Object.fromEntries(HEAD_NUMBERS.map((name, at) => [name, at])) as Record<Name, number>;

/** The keys that a query of a token may look for; the same in every head. */
export interface Looked {
  induction: number[]; // what followed earlier copies of the token
  duplicate_token: number[];
  special: number[];
  punctuation: number[];
}

export function looked(tokens: readonly Token[], t: number): Looked {
  const keys: Looked = { induction: [], duplicate_token: [], special: [], punctuation: [] };
  for (let key = 0; key <= t; key++) {
    const token = tokens[key];
    if (key > 0 && tokens[key - 1].id === tokens[t].id) keys.induction.push(key);
    if (key < t && token.id === tokens[t].id) keys.duplicate_token.push(key);
    if (token.special) keys.special.push(key);
    if (token.punctuation) keys.punctuation.push(key);
  }
  return keys;
}

/** Numbers of query t of one head, into `to`; norms: of what each key writes, a number in `stride`. */
export function rowNumbers(
  to: Float64Array,
  weights: Float32Array,
  keys: Looked,
  known: { entropy: number; peak: number },
  norms: Float32Array,
  stride: number,
): void {
  const t = weights.length - 1;
  let distance = 0;
  let written = 0;
  let largest = 0;
  for (let key = 0, at = 0; key <= t; key++, at += stride) {
    const weight = weights[key];
    distance += weight * (t - key);
    written += weight * norms[at];
    if (weight > largest) largest = weight;
  }
  const between = (from: number, end: number) => {
    let sum = 0;
    for (let key = Math.max(0, from); key < end; key++) sum += weights[key];
    return sum;
  };
  const on = (some: number[]) => {
    let sum = 0;
    for (const key of some) sum += weights[key];
    return some.length > 0 ? sum : Number.NaN;
  };
  let special = 0;
  for (const key of keys.special) special += weights[key] * norms[key * stride];
  const where = (counts: boolean, value: number) => (counts ? value : Number.NaN);
  to[AT.entropy] = known.entropy;
  to[AT.effective_keys] = Math.exp(known.entropy);
  to[AT.confidence] = largest;
  to[AT.distance] = distance;
  to[AT.first] = weights[0];
  to[AT.previous] = where(t > 0, weights[t - 1]);
  to[AT.itself] = weights[t];
  to[AT.next] = 0; // of every query but the last
  to[AT.local] = between(t - REACH, t + 1);
  to[AT.max_logit] = known.peak;
  const streams = t >= SINK + RECENT;
  to[AT.streaming] = where(streams, streams ? between(0, SINK) + between(t - RECENT + 1, t + 1) : 0);
  to[AT.induction] = on(keys.induction);
  to[AT.duplicate_token] = on(keys.duplicate_token);
  to[AT.special] = on(keys.special);
  to[AT.punctuation] = on(keys.punctuation);
  to[AT.written_first] = where(written > 0, (weights[0] * norms[0]) / written);
  to[AT.written_special] = where(keys.special.length > 0 && written > 0, special / written);
}

/** One head's numbers and label, from the rows of its layer. */
export function headData(layer: number, head: number, rows: Row[], labels: LabelData[]): HeadData {
  const numbers: Record<string, number | null> = {};
  const counts: Record<string, number> = {};
  const evenly = { choice: 0, beyond: 0 }; // what a head has that weighs all it sees alike
  rows.forEach((_, t) => {
    evenly.choice += Math.log(t + 1) / rows.length;
    evenly.beyond += Math.max(0, t - REACH) / (t + 1) / rows.length;
  });
  for (const name of HEAD_NUMBERS) {
    if (name === "streaming" && rows.length <= SINK + RECENT) continue; // a text without others
    let total = 0;
    let count = 0;
    let largest = -Infinity;
    for (const row of rows) {
      const value = row.numbers[head * HEAD_NUMBERS.length + AT[name]];
      if (Number.isNaN(value)) continue;
      total += value;
      count++;
      if (value > largest) largest = value;
    }
    if (name === "next") count--; // the last query has no key after it
    counts[name] = count;
    numbers[name] = count > 0 ? (name === "max_logit" ? largest : total / count) : null;
  }
  const { entropy, local } = numbers;
  numbers.spread = evenly.choice > 0 ? (entropy ?? 0) / evenly.choice : null;
  numbers.locality = evenly.beyond > 0 ? 1 - (1 - (local ?? 0)) / evenly.beyond : null;
  return { layer, head, numbers, ...label(numbers, counts, labels) };
}

/** The label whose score is farthest above its threshold, as a share of the way to 1; general ones come last. */
export function label(
  numbers: Record<string, number | null>,
  counts: Record<string, number>,
  labels: LabelData[],
): { label: string; score: number | null } {
  let best: { special: boolean; above: number } | null = null;
  let earned = labels[labels.length - 1].name; // mixed
  let score: number | null = null;
  for (const entry of labels) {
    const value = numbers[entry.score];
    if (value === null || value === undefined || value < entry.threshold || !entry.score) continue;
    if (entry.queries > 1 && counts[entry.score] < entry.queries) continue;
    const above = (value - entry.threshold) / (1 - entry.threshold);
    const special = !entry.general;
    const better = best === null || (special === best.special ? above > best.above + ROUNDING : special);
    if (!better) continue;
    best = { special, above };
    earned = entry.name;
    score = value;
  }
  return { label: earned, score };
}

/** -x log x */
export function surprise(x: number): number {
  return x > 0 ? -x * Math.log(x) : 0;
}

/** How differently the heads of a layer look: the mean Jensen-Shannon divergence over queries, nats, [H][H]. */
export function jensenShannon(rows: Row[], heads: number): number[][] {
  const matrix = Array.from({ length: heads }, () => new Array<number>(heads).fill(0));
  const count = Math.min(COMPARED, rows.length);
  for (let step = 0; step < count; step++) {
    // the middles of as many equal stretches
    const t = count < rows.length ? Math.floor(((2 * step + 1) * rows.length) / (2 * count)) : step;
    const { weights } = rows[t];
    const width = t + 1;
    const entropy = Array.from({ length: heads }, (_, head) => {
      let sum = 0;
      for (let at = head * width; at < (head + 1) * width; at++) sum += surprise(weights[at]);
      return sum;
    });
    for (let a = 0; a < heads; a++) {
      for (let b = a + 1; b < heads; b++) {
        let between = 0;
        for (let key = 0; key < width; key++) {
          between += surprise((weights[a * width + key] + weights[b * width + key]) / 2);
        }
        matrix[a][b] += between - (entropy[a] + entropy[b]) / 2;
      }
    }
  }
  for (let a = 0; a < heads; a++) {
    for (let b = a + 1; b < heads; b++) {
      matrix[a][b] = Math.max(0, matrix[a][b] / count);
      matrix[b][a] = matrix[a][b];
    }
  }
  return matrix;
}

/** How alike two heads' outputs point: the mean over positions of their cosine, [H][H]. */
export function cosines(rows: Row[], heads: number): number[][] {
  const matrix = Array.from({ length: heads }, () => new Array<number>(heads).fill(0));
  for (const { said } of rows) {
    const D = said.length / heads;
    const dot = (a: number, b: number) => {
      let sum = 0;
      for (let d = 0; d < D; d++) sum += said[a * D + d] * said[b * D + d];
      return sum;
    };
    const lengths = Array.from({ length: heads }, (_, head) => Math.max(1e-12, Math.sqrt(dot(head, head))));
    for (let a = 0; a < heads; a++) {
      for (let b = a; b < heads; b++) {
        matrix[a][b] += dot(a, b) / (lengths[a] * lengths[b]) / rows.length;
        matrix[b][a] = matrix[a][b];
      }
    }
  }
  return matrix;
}
