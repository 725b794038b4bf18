/** How a cell is computed: its operands, and the result of the right formula. */

import { data, type Side } from "./explain_data.ts";
import { type At, longer, type Matrix, margin, matrix, operand, place, range } from "./numbers.ts";

const { D, Dv } = data.sizes;
const LETTER: Record<string, string> = { projected_q: "q", projected_k: "k", projected_v: "v" };
const INPUT: Record<string, string> = { projected_q: "query", projected_k: "key", projected_v: "value" };
export const WHOLE: Record<string, string> = { q: "projected_q", k: "projected_k", v: "projected_v" };

/** The channel of Q, K or V that a channel of this head is. */
const channelOf = (name: string, c: number, at: At): number =>
  (name === "q" ? at.head : data.keyHeads[at.head]) * (name === "v" ? Dv : D) + c;

export interface Product {
  label: string;
  a: number;
  b: number;
  product: number;
}

export interface Share {
  label: string;
  a: number;
  power: number;
  share: number;
  chosen: boolean;
}

/** Where a number comes from, in words; `total`: what that gives, null where it cannot be told. */
export interface Words {
  kind: "words";
  words: string;
  total: number | null;
  shown?: boolean; // the total stands behind the words
}

/** Products a·b added up, with a bias where there is one. */
export interface Products {
  kind: "products";
  terms: Product[];
  bias: number | null;
  total: number;
  names: [index: string, a: string, b: string];
}

/** exp(x) over the sum of the row's. */
export interface Softmax {
  kind: "softmax";
  terms: Share[];
  shift: number;
  sum: number;
  total: number;
}

export type Sum = Words | Products | Softmax;

function products(
  terms: [label: string, a: number, b: number][],
  bias: number | null,
  names: Products["names"],
): Products {
  const made = terms.map(([label, a, b]) => ({ label, a, b, product: a * b }));
  const total = made.reduce((sum, one) => sum + one.product, 0) + (bias ?? 0);
  return { kind: "products", terms: made, bias, total, names };
}

const inWords = (words: string, total: number | null = null): Words => ({ kind: "words", words, total });
const nothing = (): Words =>
  inWords("The shapes from earlier steps do not match the formula, so no sum can be shown.");

/** x[r] · W[c] + b[c], if the weights are on this page. */
function projection(
  x: Matrix | null,
  letter: string,
  r: number,
  c: number,
  at: At,
  names: Products["names"],
): Sum {
  const w = matrix("expected", `w_${letter}`, at);
  const b = matrix("expected", `b_${letter}`, at);
  if (!w || !b) return inWords("This page does not contain the weights, because they are too large.");
  if (x?.cols !== w.cols)
    return inWords("The shape of the input does not match the weights, so no sum can be shown.");
  return products(
    range(w.cols).map((i) => [String(i), x.at(r, i), w.at(c, i)]),
    b.at(0, c),
    names,
  );
}

/** Why a pair is hidden, in words; null where it is not. */
function hiddenBecause(at: At, t: number, s: number): string | null {
  const mask = matrix("expected", "mask", at);
  if (!mask || !data.masks || mask.at(t, s)) return null;
  const words = data.masks[at.sample];
  if (words.padding.includes(s)) return "the mask hides this key from every query, like padding";
  if (words.later !== null && s > t + words.later) return "the key comes later";
  return "the mask hides it";
}

/**
 * The field that a step of attention itself makes: "q" for "q@0", null for "q" where a design made it of "q@0".
 * A field that designs change has a number for each value it had before.
 */
function firstOf(field: string): string | null {
  const [name, stage] = field.split("@");
  return stage === undefined ? (`${name}@0` in data.expected ? null : name) : stage === "0" ? name : null;
}

/** The step that makes a field. */
const stepOf = (field: string) =>
  data.steps.find((step) => step.flows.some((flow) => flow.result.field === field));

/** Whether a design of the module makes this field, and not attention itself. */
export const isOfDesign = (field: string): boolean => field.startsWith("bias@") || firstOf(field) === null;

/** What a design makes: the sum of two fields, or words. */
function ofDesign(field: string, r: number, c: number, get: (name: string) => Matrix | null): Sum {
  const step = stepOf(field);
  const operands = step?.flows.find((flow) => flow.result.field === field)?.operands ?? [];
  if (operands.length < 2) return inWords(step?.words ?? "");
  const [a, b] = operands.map((one) => get(one.field));
  if (!fits(a, r, c) || !fits(b, r, c)) return nothing();
  const [x, y] = [a.at(r, c), b.at(r, c)];
  return { ...inWords(`${longer(x)} + ${longer(y)}`, x + y), shown: true };
}

const fits = (m: Matrix | null, row: number, col: number): m is Matrix =>
  m !== null && row < m.rows && col < m.cols;

/** What a field's cell is made of. */
export function sumBehind(field: string, r: number, c: number, at: At, side: Side): Sum {
  const get = (name: string, head = at.head) => operand(side, name, { ...at, head });
  if (isOfDesign(field)) return ofDesign(field, r, c, get);
  switch (firstOf(field)) {
    case "query":
    case "key":
    case "value":
      return inWords("This number is an input.");
    case "projected_q":
    case "projected_k":
    case "projected_v": {
      const names: Products["names"] = ["feature", `${INPUT[field]}[${r}, i]`, `W_${LETTER[field]}[${c}, i]`];
      return projection(get(INPUT[field]), LETTER[field], r, c, at, names);
    }
    case "q":
    case "k":
    case "v": {
      const name = field[0];
      const width = name === "v" ? Dv : D;
      const from = channelOf(name, c, at);
      const whole = get(WHOLE[name]);
      const own = name === "q" ? at.head : data.keyHeads[at.head];
      const used = own === at.head ? "" : `Head ${at.head} uses key/value head ${own}. `;
      const words =
        `${used}Head ${own} starts at channel ${own} × ${width} = ${own * width}; its channel ${c} is ` +
        `channel ${from} of ${name.toUpperCase()}, in the same row.`;
      return inWords(words, fits(whole, r, from) ? whole.at(r, from) : null);
    }
    case "scores": {
      const q = get("q");
      const k = get("k");
      if (!fits(q, r, 0) || !fits(k, c, 0) || q.cols !== k.cols) return nothing();
      return products(
        range(q.cols).map((d) => [String(d), q.at(r, d), k.at(c, d)]),
        null,
        ["channel", `q[${r}, d]`, `k[${c}, d]`],
      );
    }
    case "scaled": {
      const scores = get("scores");
      return fits(scores, r, c) ? scaledOf(scores.at(r, c), data.scales[at.head]) : nothing();
    }
    case "hidden": {
      const scaled = get("scaled");
      return fits(scaled, r, c) ? hiddenOf(scaled.at(r, c), r, c, at) : nothing();
    }
    case "p":
      return softmaxOf(get("hidden"), r, c);
    case "weighted": {
      const p = get("p");
      const v = get("v");
      if (!fits(p, at.query, r) || !fits(v, r, c)) return nothing();
      const names: Products["names"] = ["", `p[${at.query}, ${r}]`, `v[${r}, ${c}]`];
      return products([[`key ${r}`, p.at(at.query, r), v.at(r, c)]], null, names);
    }
    case "heads": {
      const p = get("p");
      const v = get("v");
      if (!fits(p, r, 0) || !fits(v, 0, c) || p.cols !== v.rows) return nothing();
      return products(
        range(v.rows).map((s) => [margin("key", s), p.at(r, s), v.at(s, c)]),
        null,
        ["key", `p[${r}, s]`, `v[s, ${c}]`],
      );
    }
    case "joined": {
      const head = Math.floor(c / Dv);
      const from = get("heads", head);
      const own = c - head * Dv;
      const words = `Channel ${c} = ${head} × ${Dv} + ${own}: it is channel ${own} of head ${head}'s output, in the same row.`;
      return inWords(words, fits(from, r, own) ? from.at(r, own) : null);
    }
    case "output":
      return projection(get("joined"), "o", r, c, at, ["channel", `concat[${r}, i]`, `W_o[${c}, i]`]);
  }
  return nothing();
}

function scaledOf(x: number, scale: number): Words {
  const usual = Math.abs(scale * Math.sqrt(D) - 1) < 1e-12;
  const words = usual
    ? `${longer(x)} ÷ √${D} = ${longer(x)} ÷ ${longer(Math.sqrt(D))}`
    : `${longer(x)} × ${longer(scale)}`;
  return { ...inWords(words, x * scale), shown: true };
}

function hiddenOf(x: number, r: number, c: number, at: At): Words {
  const reason = hiddenBecause(at, r, c);
  const query = place("query", r);
  const key = place("key", c);
  if (reason !== null) {
    const words = `${query} may not attend to ${key}: ${reason}. The mask is False here, so the score becomes −∞.`;
    return inWords(words, -Infinity);
  }
  return inWords(
    `${query} may attend to ${key}${data.masks ? ": the mask is True here" : ""}, so the score stays.`,
    x,
  );
}

/** The largest is taken off first only where exp would overflow. */
function softmaxOf(hidden: Matrix | null, r: number, c: number): Sum {
  if (!fits(hidden, r, c)) return nothing();
  const row = range(hidden.cols).map((s) => hidden.at(r, s));
  const largest = Math.max(...row.filter((x) => !Number.isNaN(x)));
  if (largest === -Infinity)
    return inWords(`${place("query", r)} may not attend to any key, so its weights are 0.`);
  const shift = Math.abs(largest) > 300 ? largest : 0;
  const powers = row.map((x) => Math.exp(x - shift));
  const sum = powers.reduce((a, b) => a + b, 0);
  const terms = row.map((x, s) => ({
    label: margin("key", s),
    a: x,
    power: powers[s],
    share: powers[s] / sum,
    chosen: s === c,
  }));
  return { kind: "softmax", terms, shift, sum, total: powers[c] / sum };
}

/** A row, a column or a cell of a map; of one head, where that is said. */
export interface Part {
  row?: number;
  col?: number;
  head?: number;
}

/** Which parts of the maps on the left a cell was made from, by field. */
export function sources(field: string, r: number, c: number, at: At): Record<string, Part> {
  if (isOfDesign(field)) {
    const flow = stepOf(field)?.flows.find((one) => one.result.field === field);
    const together = (flow?.operands.length ?? 0) > 1;
    return Object.fromEntries(
      (flow?.operands ?? []).map((one) => [one.field, together ? { row: r, col: c } : { row: r }]),
    );
  }
  switch (firstOf(field)) {
    case "projected_q":
    case "projected_k":
    case "projected_v":
      return { [INPUT[field]]: { row: r }, [`w_${LETTER[field]}`]: { row: c } };
    case "q":
    case "k":
    case "v":
      return { [WHOLE[field[0]]]: { row: r, col: channelOf(field[0], c, at) } };
    case "scores":
      return { q: { row: r }, k: { row: c } };
    case "scaled":
      return { scores: { row: r, col: c } };
    case "hidden":
      return { scaled: { row: r, col: c }, mask: { row: r, col: c } };
    case "p":
      return { hidden: { row: r } };
    case "weighted":
      return { p: { row: at.query, col: r }, v: { row: r, col: c } };
    case "heads":
      return { p: { row: r }, v: { col: c } };
    case "joined":
      return { heads: { row: r, col: c % Dv, head: Math.floor(c / Dv) } };
    case "output":
      return { joined: { row: r }, w_o: { row: c } };
  }
  return {};
}
