/** The words that may come next, as bars; each is a button that lets the model say it. */

import { el } from "../../shared/elements.ts";
import type { Tokenizer } from "./tokenizer.ts";

const TOP = 10;

export interface Likely {
  id: number;
  share: number;
}

/** Probabilities of all tokens. */
export function softmax(logits: Float32Array): Float64Array {
  let most = -Infinity;
  for (const logit of logits) if (logit > most) most = logit;
  const shares = Float64Array.from(logits, (logit) => Math.exp(logit - most));
  let total = 0;
  for (const share of shares) total += share;
  return shares.map((share) => share / total);
}

export function likeliest(shares: Float64Array, most = TOP): Likely[] {
  const best: Likely[] = [];
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
export function nextName(tokenizer: Tokenizer, id: number, text: string): string {
  const said = tokenizer.decode([id]);
  if (/^[\n\r]+$/.test(said)) return "↵";
  const goesOn = /^[\p{L}\p{N}]/u.test(said) && /[\p{L}\p{N}]$/u.test(text);
  return (goesOn ? "…" : "") + tokenizer.shown(id).replace(/\n/g, "↵");
}

const percent = (share: number) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`;

/** How a probability changed, in points of percent: "+3.1", "−0.4". */
export function change(now: number, then: number): string {
  const points = 100 * (now - then);
  const size = Math.abs(points).toFixed(Math.abs(points) < 9.95 ? 2 : 1);
  return Number(size) === 0 ? "±0" : `${points > 0 ? "+" : "−"}${size}`;
}

/** The list; `then` are the probabilities with all heads on, where some are off. */
export function wordList(
  now: Float64Array,
  then: Float64Array | null,
  name: (id: number) => string,
  say: (id: number) => void,
): HTMLElement[] {
  const words = likeliest(now);
  const widest = words[0].share;
  return words.map(({ id, share }) => {
    const bar = el("span", { class: "alive-bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * share) / widest}%`;
    const before = then === null ? null : then[id];
    const moved = before === null ? "" : change(share, before);
    const told = before === null ? "" : ` points, ${percent(before)} with all heads on`;
    const button = el(
      "button",
      { type: "button", "data-token": id },
      el("span", { class: "alive-word" }, name(id)),
      el("span", { class: "heard" }, ", "),
      el("span", { class: "alive-share" }, percent(share)),
      before === null ? null : el("span", { class: "heard" }, ", "),
      before === null ? null : el("span", { class: share >= before ? "alive-up" : "alive-down" }, moved),
      el("span", { class: "heard" }, `${told}; press to append`),
      bar,
    );
    button.addEventListener("click", () => say(id));
    return el("li", null, button);
  });
}

export function sentence(words: Likely[], name: (id: number) => string): string {
  return words.map(({ id, share }) => `“${name(id)}” ${percent(share)}`).join(", ");
}
