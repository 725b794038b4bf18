/** The chosen head beside a second one: of this layer, another text, another model. */

import { el } from "../shared/elements.ts";
import { difference, divergence, MOST, rowDivergence } from "./head_geometry.ts";
import { fixed, headName, headOf, readingName, signed } from "./number_texts.ts";
import type { Cells } from "./packed.ts";
import type { HeadData } from "./page_data.ts";
import { type Axis, pairedMaps } from "./paired_maps.ts";
import type { Call, Source } from "./sources.ts";
import type { App } from "./store.ts";
import { latest, type OpenView, type View } from "./view_kinds.ts";

interface Spot {
  source: number;
  text: number;
  layer: number;
  head: number;
}

const FIELDS = ["source", "text", "layer", "head"] as const;

export const compareView: View = {
  id: "compare",
  title: "Compare two heads",
  there: (app) =>
    app.sources.reduce(
      (all, source) => all + source.readings.reduce((sum, reading) => sum + reading.heads.length, 0),
      0,
    ) > 1,
  open,
};

/** What `state.beside` says; where that is not there, the likeliest: the same head elsewhere, or the next one here. */
function secondOf(app: App): Spot {
  const numbers = app.state.beside.split(".").map(Number);
  if (app.state.beside && numbers.length === 4) {
    const [source, text, layer, head] = numbers;
    if (headOf(app.sources[source]?.readings[text], layer, head)) return { source, text, layer, head };
  }
  const { source, text, layer, head } = app.state;
  const same = app.sources
    .flatMap((one, s) => one.readings.map((_, t) => ({ source: s, text: t, layer, head })))
    .filter((spot) => spot.source !== source || spot.text !== text)
    .filter((spot) => !isCopy(app, app.sources[spot.source], spot.text))
    .find((spot) => headOf(app.sources[spot.source].readings[spot.text], layer, head));
  if (same) return same;
  const { heads } = app.reading;
  const at = heads.findIndex((one) => one.layer === layer && one.head === head);
  const next = heads[(at + 1) % heads.length];
  return { source, text, layer: next.layer, head: next.head };
}

/** What a live model read, and what was measured of the same text: they are alike while all heads are on. */
function isCopy(app: App, source: Source, text: number): boolean {
  return (
    source.alive !== app.source.alive &&
    source.readings[text].text === app.reading.text &&
    app.state.off === ""
  );
}

function open(app: App): OpenView {
  const selects = Object.fromEntries(
    FIELDS.map((name) => [name, el("select", { id: `beside-${name}` })]),
  ) as Record<(typeof FIELDS)[number], HTMLSelectElement>;
  const titles = { source: "Model", text: "Text", layer: "Layer", head: "Head" };
  const fields = Object.fromEntries(
    FIELDS.map((name) => [
      name,
      el("label", { class: "view-field", for: `beside-${name}` }, `${titles[name]} `, selects[name]),
    ]),
  ) as Record<(typeof FIELDS)[number], HTMLLabelElement>;
  const pin = el("button", { type: "button", id: "beside-pin" }, "Use the selected head as the second head");
  const swap = el("button", { type: "button", id: "beside-swap" }, "Swap heads");
  const said = el("p", { class: "compare-said" });
  let sayRow: (row: number) => string = () => "";
  const together = pairedMaps((row) => sayRow(row));
  const apart = [pairedMaps(() => ""), pairedMaps(() => "")];
  const separate = el("div", { class: "apart", hidden: true }, ...apart.map((one) => one.element));
  const table = el("div", {
    class: "table-room",
    tabindex: 0,
    role: "region",
    "aria-label": "Statistics of both heads",
  });
  const element = el(
    "div",
    null,
    el(
      "fieldset",
      { class: "view-controls" },
      el("legend", null, "Second head"),
      ...FIELDS.map((name) => fields[name]),
      pin,
      swap,
    ),
    said,
    together.element,
    separate,
    table,
  );

  const put = (spot: Spot) => app.set({ beside: FIELDS.map((name) => spot[name]).join(".") });
  for (const name of FIELDS)
    selects[name].addEventListener("change", () =>
      put(nearest(app, { ...secondOf(app), [name]: Number(selects[name].value) })),
    );
  pin.addEventListener("click", () => put(app.state));
  swap.addEventListener("click", () => {
    const second = secondOf(app);
    const { source, text, layer, head } = app.state;
    app.set({ ...second, beside: [source, text, layer, head].join("."), token: null });
  });

  function drawSelects(spot: Spot): void {
    const source = app.sources[spot.source];
    const reading = source.readings[spot.text];
    const heads = reading.heads.filter((one) => one.layer === spot.layer);
    const layers = source.layers
      .map((_, at) => at)
      .filter((at) => reading.heads.some((one) => one.layer === at));
    const many = app.sources.filter((one, at) =>
      app.sources.some((two, b) => b !== at && two.title === one.title),
    );
    options(
      selects.source,
      app.sources.map((one, at) => {
        const own = one.readings.length === 1 ? readingName(one.readings[0], at) : "";
        return [at, many.includes(one) && own ? `${one.title}: ${own}` : one.title];
      }),
      spot.source,
    );
    options(
      selects.text,
      source.readings.map((one, at) => [at, readingName(one, at)]),
      spot.text,
    );
    options(
      selects.layer,
      layers.map((at) => [at, source.layers[at].name]),
      spot.layer,
    );
    options(
      selects.head,
      heads.map((one) => [one.head, `head ${one.head}: ${one.label}`]),
      spot.head,
    );
    fields.source.hidden = app.sources.length < 2;
    fields.text.hidden = source.readings.length < 2;
  }

  const turn = latest();
  async function draw(): Promise<void> {
    const second = secondOf(app);
    drawSelects(second);
    const spots: Spot[] = [app.state, second];
    const names = spotNames(app, spots);
    const calls = spots.map((spot) => app.sources[spot.source].readings[spot.text].calls[spot.layer]);
    const here = turn();
    const cells = await Promise.all(calls.map((call, at) => call?.cells(spots[at].head) ?? null));
    const measured = calls[0] === calls[1] ? await calls[0]?.distances() : null;
    if (!here()) return;
    const alike = sameShape(calls, cells);
    together.element.hidden = alike === null;
    separate.hidden = alike !== null || cells.every((one) => one === null);
    if (alike) {
      const [first, other] = alike;
      const known = measured?.[spots[0].head]?.[spots[1].head] ?? null;
      const number = known ?? divergence(first, other);
      const pooled = !calls[0]?.exact;
      const hidden = pooled && known === null;
      said.replaceChildren(
        "Difference: ",
        el("strong", { id: "compare-distance" }, `${fixed(number)} nats`),
        ` (Jensen-Shannon divergence of the weights, averaged over rows; 0 = the same weights, ${fixed(MOST, 2)} = no key in common` +
          `).${hidden ? " The maps are pooled; the divergence of the exact maps is larger." : ""}`,
      );
      const part = (one: Cells, row: number) =>
        one.values.subarray(row * one.columns, (row + 1) * one.columns);
      const nats = Array.from({ length: first.rows }, (_, row) =>
        rowDivergence(part(first, row), part(other, row)),
      );
      sayRow = (row) =>
        Number.isNaN(nats[row])
          ? "one of the two maps has no weights in this row"
          : `difference ${fixed(nats[row], 3)} nats`;
      const most = nats.reduce((best, x, row) => (x > (nats[best] || 0) ? row : best), 0);
      const [rows, columns] = (["queryTokens", "keyTokens"] as const).map((side) => axisOf(calls, side));
      together.show(
        [
          { title: names[0], cells: first },
          { title: names[1], cells: other },
          { title: "second − first", cells: difference(first, other), signed: true },
        ],
        rows,
        columns,
        app.state.token !== null && !pooled ? app.state.token : most,
      );
    } else {
      const sizes = cells.map((one, at) => one && `${calls[at]?.queries} × ${calls[at]?.keys}`);
      said.textContent = cells.some((one) => one === null)
        ? "The map of one of these heads is not in this page."
        : `The maps have different shapes, ${sizes[0]} and ${sizes[1]} tokens, so their difference cannot be shown.`;
      cells.forEach((one, at) => {
        apart[at].element.hidden = one === null;
        const call = calls[at];
        if (one === null || !call) return;
        const [rows, columns] = (["queryTokens", "keyTokens"] as const).map((side) =>
          axisOf([call, call], side),
        );
        apart[at].show([{ title: names[at], cells: one }], rows, columns, one.rows - 1);
      });
    }
    const heads = spots.map((spot) =>
      headOf(app.sources[spot.source].readings[spot.text], spot.layer, spot.head),
    );
    table.replaceChildren(numbersTable(app, heads, names));
  }

  return {
    element,
    draw(changed) {
      const minded = ["source", "text", "layer", "head", "beside", "sources", "token"] as const;
      return changed === null || minded.some((name) => changed.has(name)) ? draw() : undefined;
    },
  };
}

/** A spot that is there: what was chosen last stays, what does not fit it gives way. */
function nearest(app: App, spot: Spot): Spot {
  const source = app.sources[spot.source];
  const text = Math.min(spot.text, source.readings.length - 1);
  const { heads } = source.readings[text];
  const layer = heads.some((one) => one.layer === spot.layer) ? spot.layer : heads[0].layer;
  const there = heads.filter((one) => one.layer === layer);
  const head = there.some((one) => one.head === spot.head) ? spot.head : there[0].head;
  return { source: spot.source, text, layer, head };
}

function options(select: HTMLSelectElement, offered: [number, string][], chosen: number): void {
  select.replaceChildren(...offered.map(([value, title]) => el("option", { value }, title)));
  select.value = String(chosen);
}

/** What tells two heads apart: the model where it differs, the text where it differs. */
function spotNames(app: App, spots: Spot[]): string[] {
  const [first, second] = spots;
  return spots.map((spot, at) => {
    const source = app.sources[spot.source];
    const parts = [headName(source, spot.layer, spot.head)];
    if (app.sources[first.source].title !== app.sources[second.source].title) parts.unshift(source.title);
    else if (first.source !== second.source || first.text !== second.text)
      parts.push(["first text", "second text"][at]);
    return parts.join(", ");
  });
}

function sameShape(calls: (Call | null)[], cells: (Cells | null)[]): [Cells, Cells] | null {
  const [first, second] = cells;
  if (!first || !second) return null;
  const same =
    first.rows === second.rows &&
    first.columns === second.columns &&
    calls[0]?.queries === calls[1]?.queries &&
    calls[0]?.keys === calls[1]?.keys;
  return same ? [first, second] : null;
}

/** Both texts' tokens as names of places; pooled maps have none. */
function axisOf(calls: (Call | null)[], side: "queryTokens" | "keyTokens"): Axis {
  const [first, second] = calls;
  const positions = (side === "queryTokens" ? first?.queries : first?.keys) ?? 0;
  const [mine, theirs] = [first?.[side] ?? null, second?.[side] ?? null];
  if (!first?.exact || mine === null || theirs === null)
    return { names: first?.exact ? (mine ?? theirs) : null, positions };
  const changed = mine.map((name, at) => name !== theirs[at]);
  return {
    names: mine.map((name, at) => (changed[at] ? `${name}/${theirs[at]}` : name)),
    positions,
    changed,
  };
}

function numbersTable(app: App, heads: (HeadData | undefined)[], names: string[]): HTMLElement {
  const [first, second] = heads;
  const head = el(
    "tr",
    null,
    el("td"),
    ...[...names, "difference"].map((name) => el("th", { scope: "col" }, name)),
  );
  const body = el("tbody");
  const line = (name: string, cells: string[], about?: string) =>
    body.append(
      el(
        "tr",
        null,
        el("th", { scope: "row", title: about }, name),
        ...cells.map((cell) => el("td", null, cell)),
      ),
    );
  line("label", [first?.label ?? "–", second?.label ?? "–", first?.label === second?.label ? "same" : ""]);
  for (const one of app.data.statistics) {
    const [mine, theirs] = heads.map((each) => each?.numbers[one.name] ?? null);
    if (mine === null && theirs === null) continue;
    const apart = mine === null || theirs === null ? null : theirs - mine;
    line(one.title, [fixed(mine, 3), fixed(theirs, 3), signed(apart, 3)], one.sentence);
  }
  return el("table", { class: "plain" }, el("thead", null, head), body);
}
