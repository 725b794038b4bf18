/** Two texts that differ in a word or two: the heads whose weights changed, and where. */

import { el } from "../shared/elements.ts";
import { barList } from "./bar_list.ts";
import { aligned, difference, placeDivergence } from "./head_geometry.ts";
import { changeOf, fixed, headName, headOf, labelOf } from "./number_texts.ts";
import type { Cells } from "./packed.ts";
import type { FlipData, Place } from "./page_data.ts";
import { type Axis, type PairedMap, pairedMaps } from "./paired_maps.ts";
import type { Call, Reading } from "./sources.ts";
import type { App } from "./store.ts";
import { latest, type OpenView, type View } from "./view_kinds.ts";

const AROUND = 14; // tokens shown on each side of what differs

export const flipView: View = {
  id: "flip",
  title: "Compare texts",
  there: (app) => app.data.flips.length > 0,
  open,
};

const SENTENCE =
  "The change of a head is the Jensen-Shannon divergence between its weights on the two texts, averaged over tokens: " +
  "0 = the same weights, log 2 = 0.69 nats = no key in common. In the map of the difference, orange means that the weight is larger with the second text, blue that it is smaller.";

function open(app: App): OpenView {
  const which = el("select", { id: "flip-which" });
  const offered = el("label", { class: "view-field", for: "flip-which" }, "Texts ", which);
  const texts = el("div", { class: "flip-texts" });
  const list = barList("Heads by change, largest first", (layer, head) => {
    const { source, text } = app.state;
    const flip = chosenFlip();
    const inside = [flip.before, flip.after].some(([s, t]) => s === source && t === text);
    const [own, reading] = flip.before;
    app.set({ layer, head, ...(inside ? {} : { source: own, text: reading }) });
  });
  const title = el("h3", { class: "flip-title" });
  const note = el("p", { class: "quiet" });
  let sayRow: (row: number) => string = () => "";
  const maps = pairedMaps((row) => sayRow(row));
  const right = el("div", { class: "beside-list" }, title, note, maps.element);
  const element = el(
    "div",
    null,
    offered,
    texts,
    el("p", { class: "quiet" }, SENTENCE),
    el("div", { class: "list-and-picture" }, list.element, right),
  );
  let number = 0;
  const chosenFlip = () => app.data.flips[Math.min(number, app.data.flips.length - 1)];
  which.addEventListener("change", () => {
    number = Number(which.value);
    drawList();
    void drawHead();
  });

  function drawList(): void {
    const flip = chosenFlip();
    const reading = readingOf(app, flip.before);
    texts.replaceChildren(
      ...(["before", "after"] as const).map((side, at) => textOf(app, flip, side, flip.words[at])),
    );
    const most = Math.max(...flip.heads.map((head) => head.distance ?? 0), 1e-9);
    list.show(
      flip.heads.map((head) => ({
        layer: head.layer,
        head: head.head,
        share: (head.distance ?? 0) / most,
        number: fixed(head.distance, 3),
        note: head.token,
        label: labelOf(app.data, headOf(reading, head.layer, head.head)?.label),
      })),
      "change in nats, and the token whose weights changed most",
    );
  }

  const turn = latest();
  async function drawHead(): Promise<void> {
    const flip = chosenFlip();
    const moved =
      flip.heads.find((head) => head.layer === app.state.layer && head.head === app.state.head) ??
      flip.heads[0];
    if (moved === undefined) return;
    list.choose(moved.layer, moved.head);
    const source = app.sources[flip.before[0]];
    const [before, after] = [flip.before, flip.after].map(
      (at) => readingOf(app, at)?.calls[moved.layer] ?? null,
    );
    const here = turn();
    const [first, second] = await Promise.all([before, after].map((call) => call?.cells(moved.head) ?? null));
    if (!here()) return;
    title.textContent = `${capital(headName(source, moved.layer, moved.head))}: ${changeOf(flip.words)}`;
    note.textContent =
      moved.distance === null
        ? "For this head, the two texts have no query that can be compared."
        : `Mean change ${fixed(moved.distance, 3)} nats; largest change ${fixed(moved.largest, 3)} nats, at “${moved.token}”. ` +
          "Each head has its own colour scale for the difference.";
    const places = flip.layers[moved.layer];
    const together = before && after && first && second && onOneLine(before, after, first, second, places);
    maps.element.hidden = !together;
    if (!together) {
      note.textContent +=
        " The maps of this head are not in this page, or are pooled differently, so they cannot be compared.";
      return;
    }
    const { shown, rows, columns } = together;
    const most =
      places?.queries.findIndex((place) => place.before === moved.places?.[0] && place.before !== null) ?? -1;
    sayRow = (row) => {
      if (!places || !together.exact) return "";
      if (row === most) return `change ${fixed(moved.largest, 3)} nats`; // as measured; the page's weights are rounded
      const apart = placeDivergence(shown[0].cells, shown[1].cells, row, places.keys);
      return Number.isNaN(apart)
        ? "this token is in only one of the two texts, so it has no change"
        : `change ${fixed(apart, 3)} nats`;
    };
    maps.show(shown, rows, columns, together.exact ? Math.max(most, 0) : 0);
  }

  return {
    element,
    draw(changed) {
      if (changed === null || changed.has("sources")) {
        offered.hidden = app.data.flips.length < 2;
        which.replaceChildren(
          ...app.data.flips.map((flip, at) => el("option", { value: at }, changeOf(flip.words))),
        );
        which.value = String(Math.min(number, app.data.flips.length - 1));
        drawList();
        return drawHead();
      }
      return changed.has("layer") || changed.has("head") ? drawHead() : undefined;
    },
  };
}

const capital = (text: string) => text.charAt(0).toUpperCase() + text.slice(1);

function readingOf(app: App, [source, text]: [number, number]): Reading | undefined {
  return app.sources[source]?.readings[text];
}

interface Together {
  shown: PairedMap[];
  rows: Axis;
  columns: Axis;
  exact: boolean; // a row per word
}

function onOneLine(
  before: Call,
  after: Call,
  first: Cells,
  second: Cells,
  places: FlipData["layers"][number],
): Together | null {
  if (before.exact && after.exact && places) {
    const { queries, keys } = places;
    const sides = [aligned(first, queries, keys, "before"), aligned(second, queries, keys, "after")];
    const missing = (line: Place[], side: "before" | "after") =>
      new Set(line.flatMap((place, at) => (place[side] === null ? [at] : [])));
    const [mine, theirs] = (["before", "after"] as const).map((side) => ({
      absentRows: missing(queries, side),
      absentColumns: missing(keys, side),
    }));
    const both = {
      absentRows: new Set([...mine.absentRows, ...theirs.absentRows]),
      absentColumns: new Set([...mine.absentColumns, ...theirs.absentColumns]),
    };
    const isAbsent = (at: number) =>
      both.absentRows.has(Math.floor(at / keys.length)) || both.absentColumns.has(at % keys.length);
    const axis = (line: Place[]) => ({
      names: line.map((place) => place.name),
      positions: line.length,
      changed: line.map((place) => place.changed),
    });
    return {
      shown: [
        { title: "first text", cells: sides[0], ...mine },
        { title: "second text", cells: sides[1], ...theirs },
        { title: "difference", cells: difference(sides[0], sides[1], isAbsent), signed: true, ...both },
      ],
      rows: axis(queries),
      columns: axis(keys),
      exact: true,
    };
  }
  if (first.rows !== second.rows || first.columns !== second.columns) return null;
  if (before.queries !== after.queries || before.keys !== after.keys) return null;
  return {
    shown: [
      { title: "first text", cells: first },
      { title: "second text", cells: second },
      { title: "difference", cells: difference(first, second), signed: true },
    ],
    rows: { names: null, positions: before.queries },
    columns: { names: null, positions: before.keys },
    exact: false,
  };
}

/** One of the texts, what differs marked; of a long one what stands around that. */
function textOf(app: App, flip: FlipData, side: "before" | "after", words: string): HTMLElement {
  const reading = readingOf(app, flip[side]);
  const layer = flip.layers.findIndex((one) => one !== null);
  const tokens = reading?.calls[layer]?.queryTokens;
  const said = el(
    "p",
    { class: "flip-text" },
    el("span", { class: "quiet" }, side === "before" ? "First text: " : "Second text: "),
  );
  const line = flip.layers[layer]?.queries;
  if (!tokens || !line) {
    said.append(reading?.text ?? words);
    return said;
  }
  const whole = line.length <= 4 * AROUND;
  const pieces = (whole && reading?.text && written(reading.text, tokens)) || null;
  const near = new Uint8Array(line.length);
  line.forEach((place, at) => {
    if (place.changed) near.fill(1, Math.max(0, at - AROUND), at + AROUND + 1);
  });
  let skipped = false;
  line.forEach((place, at) => {
    const position = place[side];
    if (position === null) return;
    if (!whole && !near[at]) {
      if (!skipped) said.append("… ");
      skipped = true;
      return;
    }
    skipped = false;
    const [space, word] = pieces ? pieces[position] : ["", tokens[position]];
    const last = said.lastChild;
    if (place.changed && space === "" && last instanceof HTMLElement && last.tagName === "MARK")
      last.append(word);
    else
      said.append(
        ...[space, place.changed ? el("mark", null, word) : word, pieces ? "" : " "].filter(Boolean),
      );
  });
  return said;
}

/** The text as it was written, [space, piece] per token; null: its tokens are not pieces of it in order. */
function written(text: string, tokens: string[]): [string, string][] | null {
  const [small, pieces] = [text.toLowerCase(), [] as [string, string][]];
  let at = 0;
  for (const token of tokens) {
    const piece = token.replace(/^##/, "").toLowerCase();
    const from = small.indexOf(piece, at);
    if (from < 0 || text.slice(at, from).trim() !== "")
      pieces.push(["", ""]); // such as [CLS]
    else {
      pieces.push([text.slice(at, from), text.slice(from, from + piece.length)]);
      at = from + piece.length;
    }
  }
  return text.slice(at).trim() === "" && small.length === text.length ? pieces : null;
}
