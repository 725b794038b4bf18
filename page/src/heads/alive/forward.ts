/**
 * The forward of a decoder, and all that is kept of it: what did not change is not computed again.
 *
 * Rows of positions are never written to once they are made, so that whoever looks at them may keep them.
 * Letters: T tokens, E d_model, H heads, D channels of a head.
 */

import type { Factors } from "../head_factors.ts";
import { type Attention, rowOf } from "./products.ts";
import { HEAD_NUMBERS, type Looked, looked, rowNumbers, type Token } from "./statistics.ts";
import type { LayerWeights, Weights } from "./weights.ts";

/** What one layer did at one position. */
export interface Row {
  weights: Float32Array; // [H, keys seen]
  said: Float32Array; // [E]: heads before W_O, one after another, times their factors
  norms: Float32Array; // [H]: ||v W_O|| of this position as a key
  numbers: Float64Array; // [H, HEAD_NUMBERS]
}

const AT_ONCE = 64; // positions that a layer computes before the page may answer
const STEP = 128; // of the table, in 1
const FAR = 8; // beyond, the normal distribution is 0 or 1
const DENSITY = new Float64Array(2 * FAR * STEP + 1);
const SHARE = new Float64Array(2 * FAR * STEP + 1);
{
  const density = (x: number) => Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI); // biome-ignore format: a formula
  for (let at = 0; at < DENSITY.length; at++) {
    const x = at / STEP - FAR;
    DENSITY[at] = density(x);
    if (at === 0) continue;
    SHARE[at] = SHARE[at - 1] + (DENSITY[at - 1] + 4 * density(x - 0.5 / STEP) + DENSITY[at]) / (6 * STEP);
  }
}

/** x times the share of a normal distribution below x: gelu, exact to 1e-8. */
export function gelu(x: number): number {
  if (x >= FAR) return x;
  if (x <= -FAR) return 0;
  const at = Math.round((x + FAR) * STEP);
  const near = at / STEP - FAR;
  const away = x - near;
  return x * (SHARE[at] + DENSITY[at] * away * (1 - (near * away) / 2));
}

/** One text through a model. */
export class Forward {
  readonly rows: Row[][]; // per layer and position
  private readonly streams: Float32Array[]; // what goes into each layer, and out of the last, [room, E]
  private readonly keys: Float32Array[];
  private readonly values: Float32Array[];
  private readonly done: number[]; // positions that each layer has computed
  private readonly norms: Float32Array[]; // [room, H]: ||v W_O|| of every key
  private tokens: Token[] = [];
  private looked: Looked[] = []; // per position
  private factors: Factors = new Map();
  private room = 0;
  private readonly angles: number[];
  private final: { at: number; logits: Float32Array } | null = null;

  constructor(readonly weights: Weights) {
    const { num_layers: layers, rope_base: base, rope_dims: dims } = weights.config;
    this.rows = Array.from({ length: layers }, () => []);
    this.streams = Array.from({ length: layers + 1 }, () => new Float32Array(0));
    this.keys = Array.from({ length: layers }, () => new Float32Array(0));
    this.values = Array.from({ length: layers }, () => new Float32Array(0));
    this.norms = Array.from({ length: layers }, () => new Float32Array(0));
    this.done = Array.from({ length: layers }, () => 0);
    this.angles = Array.from({ length: dims / 2 }, (_, at) => base ** ((-2 * at) / dims));
  }

  get length(): number {
    return this.tokens.length;
  }

  /**
   * Read tokens with some heads switched off or scaled: what stands before the first new token is kept, and so is what lies below
   * the first layer whose heads change. `pause` is waited for again and again; false: somebody else comes first.
   */
  async read(tokens: Token[], factors: Factors, pause: () => Promise<boolean>): Promise<boolean> {
    this.change(tokens, factors);
    for (let layer = 0; layer < this.done.length; layer++) {
      while (this.done[layer] < tokens.length) {
        this.run(layer, Math.min(tokens.length, this.done[layer] + AT_ONCE));
        if (!(await pause())) return false;
      }
    }
    return true;
  }

  /** The logits after a position, of everything that was read. */
  logits(at = this.tokens.length - 1): Float32Array {
    if (this.final?.at === at) return this.final.logits;
    const { config, products, norm, embedding } = this.weights;
    const E = config.d_model;
    const x = this.streams[config.num_layers];
    const logits = products.product(normed(x, at, 1, E, norm, config.norm_eps), 0, 1, embedding);
    this.final = { at, logits };
    return logits;
  }

  private change(tokens: Token[], factors: Factors): void {
    const { d_model: E, num_heads: H, num_layers: layers } = this.weights.config;
    let same = 0;
    while (same < tokens.length && tokens[same].id === this.tokens[same]?.id) same++;
    let lowest = layers;
    for (let layer = layers - 1; layer >= 0; layer--) {
      for (let head = 0; head < H; head++) {
        const name = `${layer}.${head}`;
        if (factors.get(name) !== this.factors.get(name)) lowest = layer;
      }
    }
    if (same < this.tokens.length || same < tokens.length || lowest < layers) this.final = null;
    for (let layer = 0; layer < layers; layer++) {
      this.done[layer] = layer >= lowest ? 0 : Math.min(this.done[layer], same);
      this.rows[layer].length = this.done[layer];
    }
    this.grow(tokens.length);
    for (let at = same; at < tokens.length; at++)
      rowOf(this.weights.embedding, tokens[at].id, this.streams[0], at * E);
    this.looked.length = same;
    for (let at = same; at < tokens.length; at++) this.looked.push(looked(tokens, at));
    this.tokens = tokens;
    this.factors = new Map(factors);
  }

  private grow(length: number): void {
    if (length <= this.room) return;
    const { d_model: E, num_heads: H } = this.weights.config;
    this.room = Math.max(length, 2 * this.room, 32);
    for (const held of [this.streams, this.keys, this.values, this.norms]) {
      for (let at = 0; at < held.length; at++) {
        const wider = new Float32Array(this.room * (held === this.norms ? H : E));
        wider.set(held[at]);
        held[at] = wider;
      }
    }
  }

  /** One layer for the positions that it has not computed, up to `end`. */
  private run(layer: number, end: number): void {
    const { config, layers, products } = this.weights;
    const { d_model: E, norm_eps: eps } = config;
    const own = layers[layer];
    const from = this.done[layer];
    const count = end - from;
    const x = this.streams[layer];
    const y = normed(x, from, count, E, own.attentionNorm, eps);
    const q = products.product(y, 0, count, own.query);
    const k = products.product(y, 0, count, own.key);
    const v = products.product(y, 0, count, own.value);
    this.turn(q, from, count);
    this.turn(k, from, count);
    this.keys[layer].set(k, from * E);
    this.values[layer].set(v, from * E);
    this.norms[layer].set(this.written(own, v, count), from * config.num_heads);
    const said = new Float32Array(count * E);
    const D = E / config.num_heads;
    const attention = products.attention(this.keys[layer], this.values[layer], from + count, E, D);
    for (let at = 0; at < count; at++) {
      attention.ask(q.subarray(at * E, (at + 1) * E));
      this.attend(layer, from + at, attention, said.subarray(at * E, (at + 1) * E));
    }
    const stream = this.streams[layer + 1];
    const attended = products.product(said, 0, count, own.out);
    for (let at = 0; at < count * E; at++) stream[from * E + at] = x[from * E + at] + attended[at];
    const wide = products.product(normed(stream, from, count, E, own.feedNorm, eps), 0, count, own.up);
    for (let at = 0; at < wide.length; at++) wide[at] = gelu(wide[at]);
    const fed = products.product(wide, 0, count, own.down);
    for (let at = 0; at < count * E; at++) stream[from * E + at] += fed[at];
    this.done[layer] = end;
  }

  /** Turn the first channels of each head by their position, channel i with channel i + dims / 2. */
  private turn(x: Float32Array, from: number, count: number): void {
    const { d_model: E, num_heads: H } = this.weights.config;
    const half = this.angles.length;
    for (let at = 0; at < count; at++) {
      for (let pair = 0; pair < half; pair++) {
        const angle = (from + at) * this.angles[pair];
        const cos = Math.cos(angle);
        const sin = Math.sin(angle);
        for (let head = 0; head < H; head++) {
          const here = at * E + (head * E) / H + pair;
          const a = x[here];
          const b = x[here + half];
          x[here] = a * cos - b * sin;
          x[here + half] = b * cos + a * sin;
        }
      }
    }
  }

  /** ||v W_O|| of every head, [count, H]. */
  private written(own: LayerWeights, v: Float32Array, count: number): Float32Array {
    const { d_model: E, num_heads: H } = this.weights.config;
    const D = E / H;
    const norms = new Float32Array(count * H);
    for (let at = 0; at < norms.length; at++) {
      const start = at * D; // rows of v are heads, one after another
      let gram = (at % H) * D * D;
      let square = 0;
      for (let a = 0; a < D; a++) {
        let sum = 0;
        for (let b = 0; b < D; b++) sum += own.grams[gram++] * v[start + b];
        square += sum * v[start + a];
      }
      norms[at] = Math.sqrt(Math.max(0, square));
    }
    return norms;
  }

  /** One query in every head of a layer: its row. */
  private attend(layer: number, t: number, attention: Attention, said: Float32Array): void {
    const { d_model: E, num_heads: H } = this.weights.config;
    const D = E / H;
    const norms = this.norms[layer];
    const row: Row = {
      weights: new Float32Array(H * (t + 1)),
      said,
      norms: norms.slice(t * H, (t + 1) * H),
      numbers: new Float64Array(H * HEAD_NUMBERS.length),
    };
    this.rows[layer].push(row);
    const scale = 1 / Math.sqrt(D);
    for (let head = 0; head < H; head++) {
      const scores = attention.scores(head, t + 1);
      let most = -Infinity;
      for (let key = 0; key <= t; key++) if (scores[key] > most) most = scores[key];
      let total = 0;
      let mean = 0; // of scores below the largest, weighted
      const weights = row.weights.subarray(head * (t + 1), (head + 1) * (t + 1));
      for (let key = 0; key <= t; key++) {
        const below = (scores[key] - most) * scale;
        const share = Math.exp(below);
        weights[key] = share;
        total += share;
        mean += share * below;
      }
      for (let key = 0; key <= t; key++) weights[key] /= total;
      const factor = this.factors.get(`${layer}.${head}`) ?? 1;
      if (factor !== 0) {
        const output = said.subarray(head * D, (head + 1) * D);
        attention.mix(head, weights, output);
        if (factor !== 1) for (let d = 0; d < D; d++) output[d] *= factor;
      }
      const numbers = row.numbers.subarray(head * HEAD_NUMBERS.length, (head + 1) * HEAD_NUMBERS.length);
      const known = { entropy: Math.log(total) - mean / total, peak: most * scale };
      rowNumbers(numbers, weights, this.looked[t], known, norms.subarray(head), H);
    }
  }
}

function normed(
  x: Float32Array,
  from: number,
  count: number,
  E: number,
  by: Float32Array,
  eps: number,
): Float32Array {
  const y = new Float32Array(count * E);
  for (let at = 0; at < count; at++) {
    const start = (from + at) * E;
    let squares = 0;
    for (let e = start; e < start + E; e++) squares += x[e] * x[e];
    const scale = 1 / Math.sqrt(squares / E + eps);
    for (let e = 0; e < E; e++) y[at * E + e] = x[start + e] * scale * by[e];
  }
  return y;
}
