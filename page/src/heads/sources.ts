/**
 * Where maps come from: what was watched beforehand, a model that runs in this page, or a model that Python runs for it.
 * Panels know only these.
 *
 * Whatever a panel asks for twice is unpacked once: the last KEPT maps stay.
 */

import { type Cells, type Region, unpacked, weights } from "./packed.ts";
import type {
  CallData,
  HeadData,
  ImageData,
  LayerData,
  PageData,
  ReadingData,
  RoleData,
  SourceData,
} from "./page_data.ts";

const KEPT = 160; // maps that stay unpacked

export interface Pair {
  query: number;
  key: number;
  weight: number;
}

/** One layer on one text. */
export interface Call {
  queries: number;
  keys: number;
  exact: boolean; // a cell per query and key
  queryTokens: string[] | null;
  keyTokens: string[] | null;
  leftOut: number;
  steps: number[] | null;
  /** Weights of a head; pooled: the share of a query's weight. Null: this head was not chosen. */
  cells(head: number): Promise<Cells | null>;
  /** Weights times the norm of what is written, 1: the layer's largest norm. Null: not measured. */
  written(head: number): Promise<Cells | null>;
  /** More cells than `cells` has. Null: there are none. */
  finer(head: number): Promise<Cells | null>;
  /** Weights of a part of a pooled map, exact where they are few enough. Null: there are none, or it was aborted. */
  region(head: number, region: Region, signal: AbortSignal): Promise<Cells | null>;
  /** The largest weights, largest first; of a pooled map as they were measured. Null: not measured. */
  pairs(head: number, most: number): Promise<Pair[] | null>;
  /** What a head says before W_O, [T, D]. Null: not collected. */
  output(head: number): Promise<Cells | null>;
  /** Jensen-Shannon divergence between heads, [H][H]. Null: not measured. */
  distances(): Promise<number[][] | null>;
  cosines(): Promise<number[][] | null>;
  hasWritten: boolean;
  hasOutput: boolean;
  hasRegions: boolean;
  hasFiner(head: number): boolean;
}

export interface Reading {
  name: string;
  text: string | null;
  heads: HeadData[];
  calls: (Call | null)[]; // per layer
  image: ImageData | null;
}

export interface Source {
  title: string;
  layers: LayerData[];
  readings: Reading[];
  alive: boolean; // it was read while the page is open
  /** The source is no longer shown: what it still waits for is dropped. */
  close?(): void;
  /** The roles a head was found for. Null: nobody asked. */
  roles(layer: number, head: number): RoleData[] | null;
}

/** The largest weights of a map, largest first. */
export function largest(cells: Cells, most: number): Pair[] {
  const best: Pair[] = [];
  let least = 0;
  for (let at = 0; at < cells.values.length; at++) {
    const weight = cells.values[at];
    if (!(weight > least)) continue;
    const pair = { query: Math.floor(at / cells.columns), key: at % cells.columns, weight };
    let place = best.length;
    while (place > 0 && best[place - 1].weight < weight) place--;
    best.splice(place, 0, pair);
    if (best.length > most) best.pop();
    if (best.length === most) least = best[most - 1].weight;
  }
  return best;
}

/** Every value of a map times a number per key. */
export function scaled(cells: Cells, factors: Float32Array, offset: number, most: number): Cells {
  const values = new Float32Array(cells.values.length);
  for (let at = 0; at < values.length; at++) {
    values[at] = (cells.values[at] * factors[offset + (at % cells.columns)]) / (most || 1);
  }
  return { rows: cells.rows, columns: cells.columns, values };
}

const HALF = new Float32Array(65536);
for (let bits = 0; bits < 65536; bits++) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const size =
    exponent === 0
      ? fraction * 2 ** -24
      : exponent === 31
        ? fraction
          ? Number.NaN
          : Infinity
        : (1 + fraction / 1024) * 2 ** (exponent - 15);
  HALF[bits] = bits & 0x8000 ? -size : size;
}

/** float16 as float32. */
export function halves(bytes: Uint8Array<ArrayBuffer>): Float32Array {
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => HALF[bits]);
}

class Kept {
  private readonly held = new Map<string, Promise<Cells>>();

  get(name: string, make: () => Promise<Cells>): Promise<Cells> {
    const known = this.held.get(name) ?? this.made(name, make);
    this.held.delete(name);
    this.held.set(name, known);
    for (const oldest of this.held.keys()) {
      if (this.held.size <= KEPT) break;
      this.held.delete(oldest);
    }
    return known;
  }

  private made(name: string, make: () => Promise<Cells>): Promise<Cells> {
    const cells = make();
    cells.catch(() => this.held.get(name) === cells && this.held.delete(name)); // a failure is tried again
    return cells;
  }
}

export const kept = new Kept();

class FileCall implements Call {
  readonly queries: number;
  readonly keys: number;
  readonly exact: boolean;
  readonly queryTokens: string[] | null;
  readonly keyTokens: string[] | null;
  readonly leftOut: number;
  readonly steps: number[] | null;
  readonly hasWritten: boolean;
  readonly hasOutput: boolean;
  readonly hasRegions = false;

  constructor(
    private readonly data: CallData,
    private readonly name: string,
    texts: string[][],
  ) {
    this.queries = data.queries;
    this.keys = data.keys;
    this.exact = data.rows === data.queries && data.columns === data.keys;
    this.queryTokens = data.query_tokens === null ? null : texts[data.query_tokens];
    this.keyTokens = data.key_tokens === null ? null : texts[data.key_tokens];
    this.leftOut = data.left_out;
    this.steps = data.steps;
    this.hasWritten = data.norms !== null || data.written !== null;
    this.hasOutput = data.outputs !== null;
  }

  hasFiner(head: number): boolean {
    return String(head) in this.data.finer;
  }

  async cells(head: number): Promise<Cells | null> {
    const blob = this.data.maps[head];
    if (blob === null) return null;
    const { rows, columns } = this.data;
    return kept.get(`${this.name}.${head}`, async () => weights(await unpacked(blob), rows, columns));
  }

  async written(head: number): Promise<Cells | null> {
    const { norms, written, written_most, rows, columns } = this.data;
    const pooled = written?.[head];
    if (pooled)
      return kept.get(`${this.name}.${head}w`, async () => weights(await unpacked(pooled), rows, columns));
    const cells = norms === null ? null : await this.cells(head);
    if (norms === null || cells === null) return null;
    const numbers = new Float32Array((await unpacked(norms)).buffer);
    return scaled(cells, numbers, head * this.keys, written_most ?? 1);
  }

  async finer(head: number): Promise<Cells | null> {
    const held = this.data.finer[String(head)];
    if (held === undefined) return null;
    return kept.get(`${this.name}.${head}f`, async () =>
      weights(await unpacked(held.map), held.rows, held.columns),
    );
  }

  async region(): Promise<null> {
    return null;
  }

  async pairs(head: number, most: number): Promise<Pair[] | null> {
    const measured = this.data.pairs[String(head)];
    if (measured !== undefined)
      return measured.slice(0, most).map(([query, key, weight]) => ({ query, key, weight }));
    const cells = this.exact ? await this.cells(head) : null;
    return cells === null ? null : largest(cells, most);
  }

  async output(head: number): Promise<Cells | null> {
    const held = this.data.outputs;
    if (held === null) return null;
    const all = halves(await unpacked(held.data));
    const size = this.queries * held.width;
    return { rows: this.queries, columns: held.width, values: all.subarray(head * size, (head + 1) * size) };
  }

  async distances(): Promise<number[][] | null> {
    return this.data.distances;
  }

  async cosines(): Promise<number[][] | null> {
    return this.data.cosines;
  }
}

/** What was watched beforehand. */
export class FileSource implements Source {
  readonly title: string;
  readonly layers: LayerData[];
  readonly readings: Reading[];
  readonly alive = false;

  constructor(
    private readonly data: SourceData,
    number: number,
    texts: string[][],
  ) {
    this.title = data.title;
    this.layers = data.layers;
    this.readings = data.readings.map((reading: ReadingData, r) => ({
      name: reading.name,
      text: reading.text,
      heads: reading.heads,
      image: reading.image,
      calls: reading.calls.map((call, l) => call && new FileCall(call, `${number}.${r}.${l}`, texts)),
    }));
  }

  roles(layer: number, head: number): RoleData[] | null {
    return this.data.roles && (this.data.roles[`${layer}.${head}`] ?? []);
  }
}

export function fileSources(data: PageData): Source[] {
  return data.sources.map((source, number) => new FileSource(source, number, data.texts));
}
