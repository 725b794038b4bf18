/** The text, coloured by the attention that its tokens receive, or by what one token looks at. */

import { css, inkOn, weightColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import {
  cellOf,
  counted,
  figure,
  largestOf,
  named,
  received,
  type Scene,
  short,
  shown,
} from "./head_scene.ts";

const MOST_TOKENS = 2000;

/** The tokens to write: all, or so many around `middle`. */
function written(count: number, middle: number): [number, number] {
  const from = Math.max(0, Math.min(count - MOST_TOKENS, Math.round(middle - MOST_TOKENS / 2)));
  return [from, Math.min(count, from + MOST_TOKENS)];
}

function token(words: string, position: number): HTMLElement {
  return el("span", { "data-position": position }, shown(words));
}

/**
 * What every key receives. `pinned`: the query whose weights colour it; `around`: the keys that are looked at where the
 * text is long; a click on a token pins it.
 */
export function readText(
  scene: Scene,
  pinned: number | null,
  around: [number, number],
  pin: (query: number) => void,
): HTMLElement[] {
  const { call, cells, self } = scene;
  const parts: HTMLElement[] = [];
  const paragraph = (name: string, spans: HTMLElement[], clickable: boolean) => {
    const kind = clickable ? "read-text clickable" : "read-text";
    const made = el("div", { class: kind, "aria-label": name, role: "group", tabindex: "0" }); // it may scroll
    for (const span of spans) made.append(span, " ");
    if (clickable) {
      made.addEventListener("click", (event) => {
        const at = (event.target as HTMLElement).dataset.position;
        const query = Number(at) - (self ? scene.offset : 0);
        if (at !== undefined && query >= 0 && query < call.queries) pin(query);
      });
    }
    return made;
  };
  const meaning =
    pinned === null
      ? "weight that a token gets, averaged over the queries that may attend to it"
      : `weight that ${named(call.queryTokens, pinned)} gives to a token`;
  if (call.keyTokens === null)
    return [el("p", { class: "quiet" }, "This page does not have the tokens of this text.")];
  if (!self && call.queryTokens !== null) {
    const [from, to] = written(call.queryTokens.length, pinned ?? 0);
    const spans = call.queryTokens.slice(from, to).map((words, i) => token(words, from + i));
    for (const [i, span] of spans.entries()) span.classList.toggle("chosen", from + i === pinned);
    parts.push(
      el("p", { class: "quiet" }, "Queries (click one to select it):"),
      paragraph("queries", spans, true),
    );
  }
  const row = pinned === null ? -1 : cellOf(pinned, cells.rows, call.queries);
  const values =
    pinned === null
      ? received(cells, call.queries)
      : cells.values.subarray(row * cells.columns, (row + 1) * cells.columns);
  const most = largestOf(values);
  const middle = cells.columns === call.keys && pinned !== null ? pinned : (around[0] + around[1]) / 2;
  const [from, to] = written(call.keys, middle);
  const spans = call.keyTokens.slice(from, to).map((words, i) => {
    const position = from + i;
    const value = values[cellOf(position, cells.columns, call.keys)];
    const span = token(words, position);
    span.title = `${named(call.keyTokens, position)}: ${short(value)}`;
    if (self && pinned !== null && position === pinned + scene.offset) span.classList.add("chosen");
    if (Number.isNaN(value)) span.classList.add("unseen");
    else {
      const colour = weightColour(most > 0 ? value / most : 0);
      span.style.backgroundColor = css(colour);
      span.style.color = inkOn(colour);
    }
    return span;
  });
  const pooled = cells.columns === call.keys ? "" : ", per cell of the map";
  const limit =
    to - from < call.keys ? ` Tokens ${counted(from)}–${counted(to - 1)} of ${counted(call.keys)}.` : "";
  parts.push(
    el("p", { class: "quiet" }, `Colour: ${meaning}${pooled}. Strongest colour: `, figure(most), `.${limit}`),
    paragraph("keys", spans, self),
  );
  return parts;
}
