/** The model that runs in this page. Weights are unpacked when the first text is read. */

import type { Factors } from "../head_factors.ts";
import { type Engine, type EngineResult, type Input, type ModelReading, ReadError } from "../live_engine.ts";
import type { AliveData, LabelData, LayerData } from "../page_data.ts";
import type { Prediction } from "../served/protocol.ts";
import type { Source } from "../sources.ts";
import { LiveSource } from "./live_source.ts";
import { LiveText, type Said } from "./live_text.ts";
import { predictions } from "./next_words.ts";
import { changes } from "./text_changes.ts";
import { Tokenizer } from "./tokenizer.ts";
import { unpackedWeights, type Weights } from "./weights.ts";

const BEFORE = 3; // of the most probable tokens with all heads unchanged

export class PageEngine implements Engine {
  readonly title: string;
  readonly layers: LayerData[];
  readonly input = "text";
  readonly predicts = "next token";
  readonly mask = null;
  readonly example: string;
  readonly place = "in this page";
  readonly blocks = true;
  readonly event = "headwise-alive";
  readonly shown = null;
  private readonly tokenizer: Tokenizer;
  private readonly special: Set<number>;
  private readonly measured: Source | undefined; // the same model, watched beforehand
  private weights: Promise<Weights> | null = null;
  private texts: Promise<[LiveText, LiveText]> | null = null;

  constructor(
    private readonly data: AliveData,
    private readonly labels: LabelData[],
    sources: readonly Source[],
  ) {
    const { num_layers, num_heads } = data.config;
    this.title = data.title;
    this.example = data.example; // every letter of it: a reading's own text is on one line
    this.tokenizer = new Tokenizer(data.tokenizer);
    this.special = new Set(data.tokenizer.special);
    this.measured = sources.find((source) => source.title === data.title && !source.alive);
    this.layers =
      this.measured?.layers.length === num_layers
        ? this.measured.layers
        : Array.from({ length: num_layers }, (_, layer) => ({
            name: `layer ${layer}`,
            path: `decoder.layers.${layer}.attention`,
            kind: "self",
            num_heads,
          }));
  }

  listen(): void {}

  joined(typed: string, appended: readonly Prediction[]): string {
    return typed + this.tokenizer.decode(appended.map(({ id }) => id));
  }

  async read([first, second]: [Input, Input | null], factors: Factors): Promise<EngineResult | null> {
    const { max_length: most, num_heads: H } = this.data.config;
    const typed = this.tokenizer.encode(first.typed);
    const ids = [...typed, ...first.appended.map(({ id }) => id)];
    const otherIds = second === null ? null : this.tokenizer.encode(second.text);
    const longest = Math.max(ids.length, otherIds?.length ?? 0);
    if (longest > most)
      throw new ReadError(
        `The text has ${longest} tokens, but the model reads at most ${most}. Shorten the text.`,
      );
    this.weights ??= unpackedWeights(this.data);
    this.texts ??= this.weights.then((weights) => [
      new LiveText(weights, this.tokenizer),
      new LiveText(weights, this.tokenizer),
    ]);
    const [mine, theirs] = await this.texts;
    const said = await mine.read(first.text, ids, typed.length, factors);
    if (said === null) return null;
    const { kind } = mine.weights.products;
    const off = [...factors].flatMap(([name, factor]) => (factor === 0 ? [name] : []));
    const { logits, milliseconds } = said;
    const detail = { ids, logits, off, factors: Object.fromEntries(factors), milliseconds, kind };
    const reading = this.reading(said, "live", kind);
    if (second === null || otherIds === null)
      return { readings: [reading, null], changes: null, incomparable: null, detail };
    const other = await theirs.read(second.text, otherIds, otherIds.length, factors);
    if (other === null) return null;
    const same = said.read.ids.join() === other.read.ids.join();
    const compared = same ? null : changes(said.read, other.read, this.special, H);
    return {
      readings: [reading, this.reading(other, "live, second text", kind)],
      changes: compared,
      incomparable: same ? "same" : compared === null ? "different" : null,
      detail,
    };
  }

  private reading({ read, now, whole, milliseconds }: Said, name: string, kind: string): ModelReading {
    const { measured, tokenizer } = this;
    const roles = (layer: number, head: number) => measured?.roles(layer, head) ?? null;
    const slower = kind === "WebAssembly" ? "" : " (slower, because this browser blocks WebAssembly)";
    return {
      source: new LiveSource(`${this.title}, ${name}`, this.layers, this.labels, read, roles),
      text: read.text,
      written: read.names.slice(read.prompt),
      predictions: predictions(now, whole, tokenizer, read.text),
      before: whole === null ? null : predictions(whole, null, tokenizer, read.text, BEFORE),
      problem: "",
      note: `${read.ids.length} of ${this.data.config.max_length} tokens, read in ${Math.ceil(milliseconds)} ms${slower}`,
    };
  }
}
