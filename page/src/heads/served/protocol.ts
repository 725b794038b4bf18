/**
 * The messages between this page and the Python process that runs its model, "headwise serve 1".
 *
 * `src/headwise/server/protocol.py` has the same in Python. Positions count from 0; an end is one past the last.
 */

import type { FlipData, HeadData, ImageData } from "../page_data.ts";

export const PROTOCOL = "headwise serve 1";

/** A token or a class that a model predicts. */
export interface Prediction {
  id: number;
  name: string; // as a reader knows it: "…ing" continues the last word, "↵" is a line end
  text: string; // what it appends to the text
  share: number;
  before: number | null; // the same with all heads unchanged; null: they are, or nobody measured it
}

/** How two texts changed every head: `FlipData` without the numbers of its sources. */
export type Changes = Omit<FlipData, "before" | "after">;

export interface ReadAsk {
  ask: "read";
  client: string; // random, a page's own; a newer number of it cancels older reads of the slot
  number: number; // counts up from 1
  text: string;
  appended: number[]; // ids of the predictions that were appended
  image: string | null; // base64 of an image file; null: the example
  factors: Record<string, number>; // "layer.head" -> factor of that head's output; 0: switched off; 1 is left out
  slot: 0 | 1; // 1: the second text, with which the first is compared
  maps: [number, number][]; // layer and head of the maps that come with the reply
}

/** Levels of the maps follow, one map behind the other. */
export interface ReadReply {
  reading: string; // an id for the requests below
  text: string;
  tokens: number;
  prompt: number; // tokens that were typed; the others were appended
  all_tokens: number; // of the whole text; more than `tokens` where it was cut
  heads: HeadData[];
  calls: (ServedCallData | null)[]; // per layer
  image: ImageData | null;
  texts: string[][];
  predictions: Prediction[]; // at most 10, largest first
  before: Prediction[] | null; // the 3 most probable with all heads unchanged; null: they are
  note: string; // what was not measured, "" for nothing
  problem: string; // why nothing is predicted, "" for nothing
  maps: (MapSize & { layer: number; head: number })[]; // of those that were asked for, the ones that there are
  milliseconds: number;
}

export interface ServedCallData {
  queries: number;
  keys: number;
  rows: number; // of a map; fewer than `queries` where queries share a row
  columns: number;
  query_tokens: number | null; // which of `texts`
  key_tokens: number | null;
  left_out: number;
  steps: number[] | null;
  has_written: boolean;
  has_output: boolean;
  has_regions: boolean; // maps are pooled, and parts of them can be asked for in more detail
}

export interface MapsAsk {
  ask: "maps";
  reading: string;
  heads: [number, number][]; // layer and head
  measure: "weights" | "written";
}

export interface MapSize {
  rows: number;
  columns: number;
  bytes: number;
}

/** Levels of all maps follow, one map behind the other, in the order of the request. */
export interface MapsReply {
  maps: MapSize[];
}

export interface RegionAsk {
  ask: "region";
  reading: string;
  layer: number;
  head: number;
  queries: [number, number]; // [from, to)
  keys: [number, number];
}

export interface OutputAsk {
  ask: "output";
  reading: string;
  layer: number;
  head: number;
}

/** An array follows: levels of weights (packed.ts), of an output float16; zlib-compressed. */
export interface ArrayReply {
  rows: number;
  columns: number;
}

export interface DistancesAsk {
  ask: "distances";
  reading: string;
  layer: number;
}

export interface DistancesReply {
  distances: number[][] | null;
  cosines: number[][] | null;
}

export interface PairsAsk {
  ask: "pairs";
  reading: string;
  layer: number;
  head: number;
  most: number;
}

export interface PairsReply {
  pairs: [number, number, number][]; // query, key, weight; largest first
}

/** Why two texts are not compared: they are equal, too long, or have too little in common. */
export type Incomparable = "same" | "long" | "different";

export interface ChangesAsk {
  ask: "changes";
  readings: [string, string];
}

export interface ChangesReply {
  flip: Changes | null;
  reason: Incomparable | ""; // why there is none
}

export interface ProgressAsk {
  ask: "progress";
  client: string;
}

export interface ProgressReply {
  done: number; // layers of the read that runs
  of: number;
}

export type Ask =
  | ReadAsk
  | MapsAsk
  | RegionAsk
  | OutputAsk
  | DistancesAsk
  | PairsAsk
  | ChangesAsk
  | ProgressAsk;

/** The header of the reply to each ask. */
export interface Replies {
  read: ReadReply;
  maps: MapsReply;
  region: ArrayReply;
  output: ArrayReply;
  distances: DistancesReply;
  pairs: PairsReply;
  changes: ChangesReply;
  progress: ProgressReply;
}

export interface ErrorReply {
  error: string;
  kind: "refused" | "superseded" | "gone" | "token" | "failed" | "busy";
}
