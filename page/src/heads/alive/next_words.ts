/** The tokens that may come next, from a model's logits. */

import type { Prediction } from "../served/protocol.ts";
import type { Tokenizer } from "./tokenizer.ts";

const TOP = 10;

/** Probabilities of all tokens. */
export function softmax(logits: Float32Array): Float64Array {
  let most = -Infinity;
  for (const logit of logits) if (logit > most) most = logit;
  const shares = Float64Array.from(logits, (logit) => Math.exp(logit - most));
  let total = 0;
  for (const share of shares) total += share;
  return shares.map((share) => share / total);
}

function likeliest(shares: Float64Array, most: number): { id: number; share: number }[] {
  const best: { id: number; share: number }[] = [];
  for (let id = 0; id < shares.length; id++) {
    const share = shares[id];
    if (best.length === most && share <= best[most - 1].share) continue;
    let place = best.length;
    while (place > 0 && best[place - 1].share < share) place--;
    best.splice(place, 0, { id, share });
    if (best.length > most) best.pop();
  }
  return best;
}

/** A next token as a reader knows it: what goes on with the last word begins with dots. */
function nextName(tokenizer: Tokenizer, id: number, text: string): string {
  const said = tokenizer.decode([id]);
  if (/^[\n\r]+$/.test(said)) return "↵";
  const goesOn = /^[\p{L}\p{N}]/u.test(said) && /[\p{L}\p{N}]$/u.test(text);
  return (goesOn ? "…" : "") + tokenizer.shown(id).replace(/\n/g, "↵");
}

/** The most probable tokens after a text; `before`: the shares with all heads unchanged, where they are not. */
export function predictions(
  shares: Float64Array,
  before: Float64Array | null,
  tokenizer: Tokenizer,
  text: string,
  most = TOP,
): Prediction[] {
  return likeliest(shares, most).map(({ id, share }) => ({
    id,
    name: nextName(tokenizer, id, text),
    text: tokenizer.decode([id]),
    share,
    before: before === null ? null : before[id],
  }));
}
