/** What the panel of a live model needs: a model that reads while the page is open, in the page or in Python. */

import type { Factors } from "./head_factors.ts";
import type { LayerData } from "./page_data.ts";
import type { Changes, Incomparable, Prediction } from "./served/protocol.ts";
import type { Source } from "./sources.ts";

/** What is to be read. */
export interface Input {
  text: string; // all that stands in the box
  typed: string; // without what was appended
  appended: readonly Prediction[];
  image: string | null; // base64 of a file; null: the example
}

/** One text as a model has read it. */
export interface ModelReading {
  source: Source;
  text: string; // with what was appended
  written: string[]; // names of the tokens that were appended
  predictions: Prediction[];
  before: Prediction[] | null; // the 3 most probable with all heads unchanged; null: they are
  problem: string; // why nothing is predicted, "" for nothing
  note: string; // how many tokens, how fast
}

export interface EngineResult {
  readings: [ModelReading, ModelReading | null];
  changes: Changes | null; // from the first text to the second; null: they are not compared, or there is only one
  incomparable: Incomparable | null; // why they are not compared
  detail: Record<string, unknown>; // of the event
}

/** A text that cannot be read; the message is for the reader. */
export class ReadError extends Error {}

/** What an engine reports besides the results that it is asked for. */
export interface EngineListener {
  progress(message: string): void; // "": nothing runs, or not for long
  trouble(message: string): void;
  /** A source that was read again, in place of the same that was lost. */
  replaced(lost: Source, source: Source): void;
  /** Whatever was read must be read again. */
  again(): void;
}

export interface Engine {
  title: string;
  layers: LayerData[];
  input: "text" | "image";
  predicts: string; // "next token", "masked token", "class"; "": nothing
  mask: string | null; // the token that stands for a word to predict
  example: string; // the text that the page came with
  place: string; // where the predictions are computed: "in this page"
  blocks: boolean; // whether the page stands still while it reads
  event: string; // its name, dispatched at the document after each reading
  shown: Source | null; // a source that is in the page from the start
  listen(listener: EngineListener): void;
  /** A typed text with predictions appended. */
  joined(typed: string, appended: readonly Prediction[]): string;
  /** Null: something newer was asked meanwhile. */
  read(inputs: [Input, Input | null], factors: Factors): Promise<EngineResult | null>;
}
