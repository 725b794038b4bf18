/** The chosen row as a table: for readers who hear the page, and for everybody who wants the numbers. */

import { el } from "../shared/elements.ts";
import { columnRange, counted, figure, ranked, rowName, type Scene, shown } from "./head_scene.ts";

const MOST_ROWS = 256;

/** Key, position and weight of everything that a row can see, largest first. */
export function rowTable(scene: Scene, row: number): HTMLElement {
  const { cells, call } = scene;
  const best = ranked(cells, row);
  const pooled = cells.columns !== call.keys;
  const hidden = cells.columns - best.length;
  const body = best.slice(0, MOST_ROWS).map(({ column, weight }) => {
    const [from, to] = columnRange(scene, cells, column);
    const token = call.keyTokens?.[from];
    const place = from === to ? counted(from) : `${counted(from)}–${counted(to)}`;
    const name = token === undefined ? "" : from === to ? shown(token) : `${shown(token)} …`;
    return el(
      "tr",
      null,
      el("th", { scope: "row" }, name || place),
      el("td", null, place),
      el("td", null, figure(weight)),
    );
  });
  const measure = scene.written ? "weight × norm" : pooled ? "share of the weight" : "weight";
  const heads = ["key", pooled ? "positions" : "position", measure];
  const notes = [
    best.length > MOST_ROWS ? `The ${MOST_ROWS} largest of ${counted(best.length)}.` : "",
    hidden > 0 ? `${counted(hidden)} masked.` : "",
  ].filter((note) => note !== "");
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Row as a table" },
    el(
      "table",
      { class: "row-table" },
      el("caption", null, `${rowName(scene, cells, row)}, largest first. ${notes.join(" ")}`.trim()),
      el("thead", null, el("tr", null, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", null, ...body),
    ),
  );
}
