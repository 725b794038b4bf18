/** What a model in Python read, as panels know it: maps are fetched when a panel asks for them. */

import { type Cells, inflated, type Region, weights } from "../packed.ts";
import type { LayerData, RoleData } from "../page_data.ts";
import { type Call, halves, kept, largest, type Pair, type Reading, type Source } from "../sources.ts";
import { type Answer, AskError, type Connection } from "./connection.ts";
import type {
  ArrayReply,
  Ask,
  DistancesReply,
  MapSize,
  ReadAsk,
  ReadReply,
  Replies,
  ServedCallData,
} from "./protocol.ts";

const MOST_PAIRS = 256; // that are asked for
const MOST_MAPS = 256; // in one request

/** What a source needs of the engine that made it. */
export interface SourceOwner {
  connection: Connection;
  /** The same text read again, because the process no longer has it. Null: another text takes its place. */
  renewed(source: ServedSource): Promise<ServedSource | null>;
  failed(error: unknown, source: ServedSource): void;
}

class ServedCall implements Call {
  readonly queries: number;
  readonly keys: number;
  readonly exact: boolean;
  readonly queryTokens: string[] | null;
  readonly keyTokens: string[] | null;
  readonly leftOut: number;
  readonly steps: number[] | null;
  readonly hasWritten: boolean;
  readonly hasOutput: boolean;
  readonly hasRegions: boolean;
  private compared: Promise<DistancesReply | null> | null = null;

  constructor(
    private readonly source: ServedSource,
    private readonly layer: number,
    data: ServedCallData,
    texts: string[][],
  ) {
    this.queries = data.queries;
    this.keys = data.keys;
    this.exact = data.rows === data.queries && data.columns === data.keys;
    this.queryTokens = data.query_tokens === null ? null : texts[data.query_tokens];
    this.keyTokens = data.key_tokens === null ? null : texts[data.key_tokens];
    this.leftOut = data.left_out;
    this.steps = data.steps;
    this.hasWritten = data.has_written;
    this.hasOutput = data.has_output;
    this.hasRegions = data.has_regions && !this.exact;
  }

  cells(head: number): Promise<Cells | null> {
    return this.map(head, "weights");
  }

  async written(head: number): Promise<Cells | null> {
    return this.hasWritten ? this.map(head, "written") : null;
  }

  async finer(): Promise<null> {
    return null;
  }

  hasFiner(): boolean {
    return false;
  }

  region(head: number, region: Region, signal: AbortSignal): Promise<Cells | null> {
    const { layer } = this;
    return this.source.attempt(async () => {
      const make = (reading: string) => ({ ask: "region", reading, layer, head, ...region }) as const;
      const answer = await this.source.answer(make, signal);
      return { ...levels(answer.header, await bytesOf(answer)), region };
    });
  }

  async pairs(head: number, most: number): Promise<Pair[] | null> {
    if (this.exact) {
      const cells = await this.cells(head);
      return cells === null ? null : largest(cells, most);
    }
    const { layer } = this;
    return this.source.attempt(async () => {
      const make = (reading: string) =>
        ({ ask: "pairs", reading, layer, head, most: Math.min(most, MOST_PAIRS) }) as const;
      const { header } = await this.source.answer(make);
      return header.pairs.map(([query, key, weight]) => ({ query, key, weight }));
    });
  }

  async output(head: number): Promise<Cells | null> {
    if (!this.hasOutput) return null;
    const { layer } = this;
    return this.fetched(`output.${head}`, async () => {
      const answer = await this.source.answer(
        (reading) => ({ ask: "output", reading, layer, head }) as const,
      );
      const { rows, columns } = answer.header;
      return { rows, columns, values: halves(await bytesOf(answer)) };
    });
  }

  async distances(): Promise<number[][] | null> {
    return (await this.comparison())?.distances ?? null;
  }

  async cosines(): Promise<number[][] | null> {
    return (await this.comparison())?.cosines ?? null;
  }

  /** Both kinds of differences between heads, asked for once. */
  private comparison(): Promise<DistancesReply | null> {
    const { layer } = this;
    this.compared ??= this.source.attempt(async () => {
      const answer = await this.source.answer((reading) => ({ ask: "distances", reading, layer }) as const);
      return answer.header;
    });
    void this.compared.then((reply) => {
      if (reply === null) this.compared = null; // a failure is tried again
    });
    return this.compared;
  }

  private map(head: number, measure: Measure): Promise<Cells | null> {
    return this.fetched(`${measure}.${head}`, () => this.source.map(this.layer, head, measure));
  }

  private fetched(name: string, fetch: () => Promise<Cells>): Promise<Cells | null> {
    return this.source.attempt(() => kept.get(`served.${this.source.number}.${this.layer}.${name}`, fetch));
  }
}

async function bytesOf({ data }: Pick<Answer<unknown>, "data">): Promise<Uint8Array<ArrayBuffer>> {
  if (data === null) throw new Error("an answer without its array");
  return inflated(data);
}

const levels = ({ rows, columns }: ArrayReply, bytes: Uint8Array) => weights(bytes, rows, columns);

/** Maps that lie one behind the other. */
const mapsOf = (sizes: MapSize[]) => (array: Uint8Array) => {
  let end = 0;
  return sizes.map(({ rows, columns, bytes }) => {
    end += bytes;
    return weights(array.subarray(end - bytes, end), rows, columns);
  });
};

type Measure = "weights" | "written";

/** A text, without what is another for each read of it. */
export type TextAsk = Omit<ReadAsk, "number" | "maps">;

interface WaitingMap {
  layer: number;
  head: number;
  resolve(cells: Cells): void;
  reject(error: unknown): void;
}

let count = 0;

/** One text that was read, under the id that the process gave it. */
export class ServedSource implements Source {
  readonly readings: Reading[];
  readonly alive = true;
  readonly number = ++count; // ids of a process that is started again may be those of another text
  private readonly closing = new AbortController();
  private readonly waiting: Record<Measure, WaitingMap[]> = { weights: [], written: [] };
  private readonly arrived: Promise<Cells[]>; // maps that came with the reply
  private readonly asked = new Map<string, [number, number]>();

  constructor(
    readonly title: string,
    readonly layers: LayerData[],
    readonly ask: TextAsk,
    readonly reply: ReadReply,
    data: Answer<unknown>["data"],
    private readonly owner: SourceOwner,
  ) {
    const { text, heads, image, texts } = reply;
    const calls = reply.calls.map((call, layer) => call && new ServedCall(this, layer, call, texts));
    this.readings = [{ name: "", text, heads, image, calls }];
    this.arrived = data === null ? Promise.resolve([]) : bytesOf({ data }).then(mapsOf(reply.maps));
    void this.arrived.catch(() => {}); // who asks for a map hears of it
  }

  /** The heads whose maps of weights were asked for, the last ones last. */
  get shown(): [number, number][] {
    return [...this.asked.values()].slice(-MOST_MAPS);
  }

  roles(): RoleData[] | null {
    return null;
  }

  close(): void {
    this.closing.abort();
  }

  /** The map of a head. Maps that are asked for in one turn of the page travel in one request. */
  map(layer: number, head: number, measure: Measure): Promise<Cells> {
    if (measure === "weights") {
      this.asked.set(`${layer}.${head}`, [layer, head]);
      const at = this.reply.maps.findIndex((map) => map.layer === layer && map.head === head);
      if (at >= 0) return this.arrived.then((maps) => maps[at]);
    }
    return new Promise((resolve, reject) => {
      const waiting = this.waiting[measure];
      waiting.push({ layer, head, resolve, reject });
      if (waiting.length === 1) setTimeout(() => void this.fetchMaps(measure));
    });
  }

  private async fetchMaps(measure: Measure): Promise<void> {
    const batch = this.waiting[measure].splice(0, MOST_MAPS);
    if (this.waiting[measure].length > 0) setTimeout(() => void this.fetchMaps(measure));
    const heads = batch.map(({ layer, head }): [number, number] => [layer, head]);
    try {
      const answer = await this.answer((reading) => ({ ask: "maps", reading, heads, measure }) as const);
      const maps = mapsOf(answer.header.maps)(await bytesOf(answer));
      for (const [index, { resolve }] of batch.entries()) resolve(maps[index]);
    } catch (error) {
      for (const { reject } of batch) reject(error);
    }
  }

  /** The answer for this reading; where the process no longer has it, for the same text read again. */
  async answer<A extends Exclude<Ask, ReadAsk>>(
    make: (reading: string) => A,
    signal?: AbortSignal,
  ): Promise<Answer<Replies[A["ask"]]>> {
    const { connection } = this.owner;
    const closing = this.closing.signal;
    const either = signal === undefined ? closing : AbortSignal.any([closing, signal]);
    try {
      return await connection.ask(make(this.reply.reading), either);
    } catch (error) {
      if (!(error instanceof AskError) || error.kind !== "gone") throw error;
      const source = await this.owner.renewed(this);
      if (source === null || !source.isLike(this)) throw error;
      return connection.ask(make(source.reply.reading), signal);
    }
  }

  /** What was made; null where it failed, which the panel of the model says, or is no longer wanted. */
  async attempt<Made>(make: () => Promise<Made>): Promise<Made | null> {
    try {
      return await make();
    } catch (error) {
      if (!this.closing.signal.aborted) this.owner.failed(error, this);
      return null;
    }
  }

  /** Whether maps have the same shapes. */
  private isLike(other: ServedSource): boolean {
    const shapes = ({ reply }: ServedSource) =>
      reply.calls.map((call) => call && [call.queries, call.keys, call.rows, call.columns].join());
    return shapes(this).join(";") === shapes(other).join(";");
  }
}
