/** What a model predicts, as bars; of tokens each is a button. */

import { el } from "../shared/elements.ts";
import type { Prediction } from "./served/protocol.ts";

const percent = (share: number) => `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`;

/** How a probability changed, in points of percent: "+3.1", "−0.4". */
export function change(now: number, then: number): string {
  const points = 100 * (now - then);
  const size = Math.abs(points).toFixed(Math.abs(points) < 9.95 ? 2 : 1);
  return Number(size) === 0 ? "±0" : `${points > 0 ? "+" : "−"}${size}`;
}

export interface PredictionChoice {
  hint: string; // "press to append"
  choose(prediction: Prediction): void;
}

/** The items of a list; `unchanged`: "with all heads on", for shares as they were before. */
export function predictionList(
  predictions: readonly Prediction[],
  unchanged: string,
  choice: PredictionChoice | null,
): HTMLElement[] {
  const widest = predictions[0]?.share || 1;
  return predictions.map((prediction) => {
    const { id, name, share, before } = prediction;
    const bar = el("span", { class: "alive-bar", "aria-hidden": "true" });
    bar.style.width = `${(100 * share) / widest}%`;
    const moved = before === null ? "" : change(share, before);
    const points = before === null ? "" : ` points, ${percent(before)} ${unchanged}`;
    const parts = [
      el("span", { class: "alive-word" }, name),
      el("span", { class: "heard" }, ", "),
      el("span", { class: "alive-share" }, percent(share)),
      before === null ? null : el("span", { class: "heard" }, ", "),
      before === null ? null : el("span", { class: share >= before ? "alive-up" : "alive-down" }, moved),
      el("span", { class: "heard" }, choice === null ? points : `${points}; ${choice.hint}`),
      bar,
    ];
    if (choice === null)
      return el("li", null, el("div", { class: "alive-class", "data-token": id }, ...parts));
    const button = el("button", { type: "button", "data-token": id }, ...parts);
    button.addEventListener("click", () => choice.choose(prediction));
    return el("li", null, button);
  });
}

/** “the” 12.3%, “a” 8.04%. */
export function sentence(predictions: readonly Prediction[]): string {
  return predictions.map(({ name, share }) => `“${name}” ${percent(share)}`).join(", ");
}
