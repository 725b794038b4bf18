/** What a live model read, as panels know it. */

import type { Cells } from "../packed.ts";
import type { HeadData, LabelData, LayerData, RoleData } from "../page_data.ts";
import { type Call, largest, type Pair, type Reading, type Source, scaled } from "../sources.ts";
import type { Row } from "./forward.ts";
import { cosines, headData, jensenShannon } from "./statistics.ts";

/** One text as a model read it. Rows are never written to again. */
export interface Read {
  text: string;
  ids: number[];
  names: string[]; // of its tokens
  rows: Row[][]; // per layer
  prompt: number; // tokens that were typed; the others the model wrote
}

/** Asked once, kept then. */
function once<Answer>(make: (head: number) => Answer): (head: number) => Answer {
  const known = new Map<number, Answer>();
  return (head) => {
    const answer = known.get(head) ?? make(head);
    known.set(head, answer);
    return answer;
  };
}

class LiveCall implements Call {
  readonly queries: number;
  readonly keys: number;
  readonly exact = true;
  readonly queryTokens: string[];
  readonly keyTokens: string[];
  readonly leftOut = 0;
  readonly steps: number[] | null;
  readonly hasWritten = true;
  readonly hasOutput = true;
  readonly hasRegions = false;
  private readonly map = once((head) => this.square(head));

  constructor(
    private readonly read: Read,
    private readonly layer: number,
    private readonly heads: number,
  ) {
    const count = read.ids.length;
    this.queries = this.keys = count;
    this.queryTokens = this.keyTokens = read.names;
    const written = count - read.prompt;
    this.steps = written > 0 ? Array.from({ length: written + 1 }, (_, step) => read.prompt + step) : null;
  }

  private get rows(): Row[] {
    return this.read.rows[this.layer];
  }

  private square(head: number): Cells {
    const T = this.queries;
    const values = new Float32Array(T * T).fill(Number.NaN);
    this.rows.forEach((row, t) => {
      values.set(row.weights.subarray(head * (t + 1), (head + 1) * (t + 1)), t * T);
    });
    return { rows: T, columns: T, values };
  }

  async cells(head: number): Promise<Cells> {
    return this.map(head);
  }

  async written(head: number): Promise<Cells> {
    const most = Math.max(...this.rows.map((row) => Math.max(...row.norms)));
    return scaled(
      this.map(head),
      Float32Array.from(this.rows, (row) => row.norms[head]),
      0,
      most,
    );
  }

  async finer(): Promise<null> {
    return null;
  }

  async region(): Promise<null> {
    return null;
  }

  async pairs(head: number, most: number): Promise<Pair[]> {
    return largest(this.map(head), most);
  }

  async output(head: number): Promise<Cells> {
    const D = this.rows[0].said.length / this.heads;
    const values = new Float32Array(this.queries * D);
    this.rows.forEach((row, t) => {
      values.set(row.said.subarray(head * D, (head + 1) * D), t * D);
    });
    return { rows: this.queries, columns: D, values };
  }

  async distances(): Promise<number[][]> {
    return jensenShannon(this.rows, this.heads);
  }

  async cosines(): Promise<number[][]> {
    return cosines(this.rows, this.heads);
  }

  hasFiner(): boolean {
    return false;
  }
}

export class LiveSource implements Source {
  readonly readings: Reading[];
  readonly alive = true;

  constructor(
    readonly title: string,
    readonly layers: LayerData[],
    labels: LabelData[],
    readonly read: Read,
    private readonly found: (layer: number, head: number) => RoleData[] | null,
  ) {
    const heads: HeadData[] = layers.flatMap((layer, number) =>
      Array.from({ length: layer.num_heads }, (_, head) => headData(number, head, read.rows[number], labels)),
    );
    const calls = layers.map((layer, number) => new LiveCall(read, number, layer.num_heads));
    this.readings = [{ name: "", text: read.text, heads, calls, image: null }];
  }

  roles(layer: number, head: number): RoleData[] | null {
    return this.found(layer, head);
  }
}
