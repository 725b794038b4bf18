/** A model's weights, unpacked: matrices where products are made, norms as they are. */

import { unpacked } from "../packed.ts";
import type { AliveConfig, AliveData } from "../page_data.ts";
import { halves } from "../sources.ts";
import { type Matrix, type Products, products } from "./products.ts";

export interface LayerWeights {
  attentionNorm: Float32Array;
  query: Matrix;
  key: Matrix;
  value: Matrix;
  out: Matrix;
  grams: Float64Array; // [H, D, D]: W_O of a head times itself, so that v G v is the square of what v writes
  feedNorm: Float32Array;
  up: Matrix;
  down: Matrix;
}

export interface Weights {
  config: AliveConfig;
  products: Products;
  embedding: Matrix; // [V, E], the output's, too
  layers: LayerWeights[];
  norm: Float32Array;
}

/** float16 whose low bytes all come before the high ones, which zlib makes smaller, as float32. */
function joined(bytes: Uint8Array): Float32Array {
  const count = bytes.length / 2;
  const paired = new Uint8Array(bytes.length);
  for (let at = 0; at < count; at++) {
    paired[2 * at] = bytes[at];
    paired[2 * at + 1] = bytes[count + at];
  }
  return halves(paired);
}

/** Everything, a tensor at a time, so that the page answers in between. */
export async function unpackedWeights(data: AliveData): Promise<Weights> {
  const { config, tensors } = data;
  const { d_model: E, d_ff: F, vocab_size: V } = config;
  const numbers = config.num_layers * (4 * E * E + 2 * E * F) + 8 * Math.ceil(V / 8) * E;
  const made = products(numbers);
  const vector = async (name: string) => joined(await unpacked(tensors[name].data));
  const matrix = async (name: string) => {
    const [columns, width] = tensors[name].shape;
    return made.keep(await vector(name), columns, width);
  };
  const layers: LayerWeights[] = [];
  const H = config.num_heads;
  for (let layer = 0; layer < config.num_layers; layer++) {
    const own = `layers.${layer}.`;
    const out = await vector(`${own}out`);
    layers.push({
      attentionNorm: await vector(`${own}attention_norm`),
      query: await matrix(`${own}query`),
      key: await matrix(`${own}key`),
      value: await matrix(`${own}value`),
      out: made.keep(out, E, E),
      grams: grams(out, E, H),
      feedNorm: await vector(`${own}feed_forward_norm`),
      up: await matrix(`${own}up`),
      down: await matrix(`${own}down`),
    });
  }
  return { config, products: made, embedding: await matrix("embedding"), layers, norm: await vector("norm") };
}

/** Of W_O [E, H D], as torch has it. */
function grams(out: Float32Array, E: number, H: number): Float64Array {
  const D = E / H;
  const all = new Float64Array(H * D * D);
  for (let e = 0; e < E; e++) {
    for (let head = 0; head < H; head++) {
      const row = out.subarray(e * E + head * D, e * E + (head + 1) * D);
      let at = head * D * D;
      for (let a = 0; a < D; a++) for (let b = 0; b < D; b++) all[at++] += row[a] * row[b];
    }
  }
  return all;
}
