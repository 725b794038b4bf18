/**
 * What the page was given, "headwise page 1": `show/heads_page.py` writes it, and says the same in Python.
 *
 * Numbers that are not finite are null. Letters: T queries, S keys, H heads, D channels of a head.
 */

import { PROTOCOL, type ReadReply } from "./served/protocol.ts";

/** Where a packed array lies in the text of #blobs: [from, to) in letters of base64; zlib inside. */
export type Blob = [number, number];

export interface PageData {
  format: "headwise page 1";
  version: string; // of headwise
  heading: string;
  start: StartData;
  sources: SourceData[]; // the first is what was asked for, the others stand beside it
  texts: string[][]; // lists of tokens as readers know them, each once; elsewhere told by number
  labels: LabelData[]; // all there are, in the order in which they are asked, "mixed" last
  statistics: StatisticData[]; // every number that some head has, in the order in which they are offered
  flips: FlipData[];
  effects: EffectsData | null;
  corpus: CorpusData | null;
  training: TrainingData | null;
  alive: AliveData | null;
  served: ServedData | null; // a Python process answers this page
}

/** What the page opens on, unless its address says otherwise. */
export interface StartData {
  layer: number;
  head: number;
  comparison: boolean; // of two texts: it stands above the wall
}

/** One model and what it read: one `Heads`. */
export interface SourceData {
  title: string;
  layers: LayerData[];
  roles: Record<string, RoleData[]> | null; // by "layer.head", both counted from 0; null: nobody asked
  readings: ReadingData[];
}

export interface LayerData {
  name: string; // "layer 0", or a module's path
  path: string;
  kind: "self" | "cross";
  num_heads: number;
}

export interface RoleData {
  name: string; // of the relation, "pronoun > antecedent"
  share: number;
  low: number | null; // of the 95% interval; null: of a head that was found beside the best, not measured
  high: number | null;
  cases: number;
  rule: string; // the best of those that need no model; it may use classes of words
  rule_share: number;
  offset: string; // the best fixed offset
  offset_share: number;
  sentence: string;
}

/** One text: one sequence of a batch, padding left out. */
export interface ReadingData {
  name: string; // "text 1"; with one reading, ""
  text: string | null;
  heads: HeadData[]; // of every layer, in order; those that were not chosen are left out
  calls: (CallData | null)[]; // per layer
  image: ImageData | null;
}

export interface HeadData {
  layer: number; // counts layers from 0
  head: number;
  label: string; // a name of `labels`
  score: number | null;
  numbers: Record<string, number | null>;
}

export interface CallData {
  queries: number; // T
  keys: number; // S
  rows: number; // of a map; where they are fewer than T, queries share a row: row = floor(query * rows / T)
  columns: number;
  query_tokens: number | null; // which of `texts`
  key_tokens: number | null;
  left_out: number; // padded positions
  steps: number[] | null; // generation: how many queries there were after the prompt and after each step
  maps: (Blob | null)[]; // per head: levels of weights, see packed.ts; a pooled cell is the share of a query's weight
  norms: Blob | null; // float32 [H, S]: what a head writes per key, ||v W_O||; weights times that is "written"
  written: (Blob | null)[] | null; // pooled maps of weight times norm, as shares of `written_most`
  written_most: number | null; // the layer's largest norm
  finer: Record<string, { rows: number; columns: number; map: Blob }>; // by head: more cells, to zoom into
  pairs: Record<string, [number, number, number][]>; // by head: query, key, weight; where maps are pooled
  outputs: { width: number; data: Blob } | null; // float16 [H, T, D]: each head before W_O
  distances: number[][] | null; // Jensen-Shannon divergence between the layer's heads, nats
  cosines: number[][] | null; // of their outputs, where it was measured
}

export interface ImageData {
  src: string; // data:image/png;base64,...
  rows: number; // of patches
  columns: number;
  first: number; // the position of the first patch: 1 after [CLS]
}

export interface LabelData {
  name: string;
  colour: string; // on light; dark is mixed from it
  score: string; // the number that earns it; "" for mixed
  threshold: number;
  queries: number; // of how many queries at least it must be the mean
  general: boolean;
  sentence: string; // "attends to the token just before the current one"
}

export interface StatisticData {
  name: string; // "entropy", a key of `numbers`
  title: string; // "entropy (nats)"
  sentence: string; // what it says, plainly
  share: boolean; // from 0 to 1
}

/** Two readings of one model: which heads moved. */
export interface FlipData {
  before: [number, number]; // source, reading
  after: [number, number];
  words: [string, string]; // what only one of the texts says: "he", "she"
  layers: ({ queries: Place[]; keys: Place[] } | null)[]; // which positions are partners, as one line
  heads: {
    layer: number;
    head: number;
    distance: number | null;
    largest: number | null;
    token: string;
    places: [number, number] | null;
  }[];
}

export interface Place {
  before: number | null; // a position in the first text; null: it has none
  after: number | null;
  name: string; // "the", "he/she"
  changed: boolean;
}

/** What switching off one head does, measured before the page was written. */
export interface EffectsData {
  of: string; // "next token", "output": what was measured
  sentence: string;
  before: [string, number][] | null; // words and probabilities, largest first
  heads: { layer: number; head: number; effect: number | null; after: [string, number][] | null }[];
  unit: string; // of `effect`
}

/** What heads do over many documents, of which the first text is the typical one. */
export interface CorpusData {
  sentence: string;
  start: string; // the measure that the wall shows first
  measures: CorpusMeasureData[];
  heads: CorpusHeadData[];
}

export interface CorpusMeasureData {
  name: string; // "corpus:dependence"
  title: string;
  group: string; // of the menu
  sentence: string;
  share: boolean;
  values: [number, number, number | null][]; // layer, head, number
}

export interface CorpusHeadData {
  layer: number;
  head: number;
  sentence: string; // "stable: previous-token in 0.98 of 2,000 documents"
  labels: [string, number][]; // and the share of documents
  numbers: CorpusNumberData[];
  movers: MoverData[]; // documents
  places: MoverData[];
}

export interface CorpusNumberData {
  title: string;
  mean: number | null;
  spread: number | null;
  quantiles: (number | null)[]; // 5%, median, 95%
  dependence: number | null;
}

export interface MoverData {
  document: string;
  said: string; // "entropy 0.12, 4.1 standard deviations below this head's mean over documents (0.50)"
  place: string; // "from 'because' (16) to 'mat' (9)", "" for none
}

/** Heads at checkpoints of their training. */
export interface TrainingData {
  title: string;
  steps: number[];
  tokens: number[];
  losses: (number | null)[]; // of training; null before the first step
  validation: (number | null)[]; // null where it was not measured
  statistics: Record<string, (number | null)[][][]>; // [checkpoint][layer][head]
  labels: (string | null)[][][];
}

/** A model that the page runs itself. */
export interface AliveData {
  title: string;
  config: AliveConfig;
  tensors: Record<string, { shape: number[]; data: Blob }>; // float16, all low bytes before all high ones
  tokenizer: {
    tokens: string[];
    merges: string[];
    pattern: string;
    start: number;
    special: number[];
    punctuation: number[];
  };
  example: string; // the text that it reads first
}

export interface AliveConfig {
  vocab_size: number;
  d_model: number;
  num_heads: number;
  num_layers: number;
  d_ff: number;
  max_length: number;
  norm_eps: number;
  rope_base: number;
  rope_dims: number;
}

/** A model that Python runs for this page. */
export interface ServedData {
  protocol: "headwise serve 1";
  transport: "http" | "parent"; // "parent": by messages to the window around this frame, as in a notebook
  channel: string; // of these messages; "" for http
  title: string;
  input: "text" | "image";
  predicts: string; // "next token", "masked token", "class"; "": nothing
  layers: LayerData[];
  max_tokens: number; // longer texts are cut; 0 for images
  mask_token: string | null; // "[MASK]", of a masked language model
  first: ReadReply; // the example, already read
}

export function readData(): PageData {
  const held = document.getElementById("data")?.textContent ?? "";
  const data = JSON.parse(held) as PageData;
  if (data.format !== "headwise page 1") throw new Error(`this page cannot read ${data.format}`);
  const protocol = data.served?.protocol ?? PROTOCOL;
  if (protocol !== PROTOCOL) throw new Error(`this page cannot speak ${protocol}`);
  return data;
}
