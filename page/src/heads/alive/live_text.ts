/** One text box's model: what is typed is read, with and without heads; the newest wins. */

import type { Factors } from "../head_factors.ts";
import { Forward } from "./forward.ts";
import type { Read } from "./live_source.ts";
import { softmax } from "./next_words.ts";
import type { Tokenizer } from "./tokenizer.ts";
import type { Weights } from "./weights.ts";

const BUSY = 12; // milliseconds of work after which the page may answer

/** What a model said to a text. */
export interface Said {
  read: Read;
  logits: Float32Array; // after the last token
  now: Float64Array; // probabilities of what comes next
  whole: Float64Array | null; // the same with all heads unchanged; null: they are
  milliseconds: number;
}

export class LiveText {
  private readonly whole: Forward; // all heads unchanged
  private readonly changed: Forward;
  private turn = 0;

  constructor(
    readonly weights: Weights,
    readonly tokenizer: Tokenizer,
  ) {
    this.whole = new Forward(weights);
    this.changed = new Forward(weights);
  }

  /** Null: something newer was asked meanwhile. `prompt` tokens were typed, the others written by the model. */
  async read(text: string, ids: number[], prompt: number, factors: Factors): Promise<Said | null> {
    this.turn++;
    const mine = this.turn;
    const began = performance.now();
    let since = began;
    const pause = async () => {
      if (performance.now() - since > BUSY) {
        await new Promise((go) => setTimeout(go));
        since = performance.now();
      }
      return mine === this.turn;
    };
    const tokens = ids.map((id) => this.tokenizer.token(id));
    if (!(await this.whole.read(tokens, new Map(), pause))) return null;
    if (factors.size > 0 && !(await this.changed.read(tokens, factors, pause))) return null;
    const used = factors.size > 0 ? this.changed : this.whole;
    const logits = used.logits();
    return {
      read: {
        text,
        ids,
        prompt,
        names: ids.map((id) => this.tokenizer.shown(id)),
        rows: used.rows.map((rows) => rows.slice()),
      },
      logits,
      now: softmax(logits),
      whole: factors.size > 0 ? softmax(this.whole.logits()) : null,
      milliseconds: performance.now() - began,
    };
  }
}
