/** Every head in numbers: a table that sorts, and goes along as CSV. */

import { labelColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { fixed, labelOf, shortName } from "./number_texts.ts";
import type { HeadData } from "./page_data.ts";
import type { App } from "./store.ts";
import type { OpenView, View } from "./view_kinds.ts";

const CHUNK = 48; // rows at a time
const AHEAD = 500; // dots below what is in sight

export const numbersView: View = {
  id: "numbers",
  title: "All numbers",
  there: (app) => app.sources.some((source) => source.readings.some((reading) => reading.heads.length > 0)),
  open,
};

interface Column {
  name: string;
  title: string;
  about: string;
  value(head: HeadData): number | string | null;
  text(head: HeadData): string;
}

const wordy = (column: Column) => (["label", "roles"].includes(column.name) ? "word" : null);

function columnsOf(app: App): Column[] {
  const { heads } = app.reading;
  const roles = (head: HeadData) => app.source.roles(head.layer, head.head) ?? [];
  const columns: Column[] = [
    {
      name: "head",
      title: "head",
      about: "layer and head, both counted from 0",
      value: (head) => head.layer * 1e6 + head.head,
      text: (head) => shortName(head.layer, head.head),
    },
    {
      name: "label",
      title: "label",
      about: "what the head does; “mixed” if no score reaches the threshold of its label",
      value: (head) => head.label,
      text: (head) => head.label,
    },
    {
      name: "score",
      title: "score",
      about: "the score of the label, from 0 to 1",
      value: (head) => head.score,
      text: (head) => fixed(head.score, 3),
    },
  ];
  if (heads.some((head) => roles(head).length > 0))
    columns.push({
      name: "roles",
      title: "roles",
      about: "relations between words, and the share of cases in which the head attends to the related word",
      value: (head) => roles(head)[0]?.share ?? null,
      text: (head) =>
        roles(head)
          .map((role) => `${role.name} ${fixed(role.share, 2)}`)
          .join("; "),
    });
  for (const one of app.data.statistics) {
    if (heads.every((head) => (head.numbers[one.name] ?? null) === null)) continue;
    columns.push({
      name: one.name,
      title: one.title,
      about: one.sentence,
      value: (head) => head.numbers[one.name] ?? null,
      text: (head) => fixed(head.numbers[one.name], 3),
    });
  }
  return columns;
}

/** Numbers from the largest, names from A, what is missing last; equals stay in the order of the model. */
function sorted(heads: HeadData[], column: Column, falling: boolean): HeadData[] {
  const turn = falling ? -1 : 1;
  return [...heads].sort((one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    return turn * (typeof a === "string" ? a.localeCompare(String(b)) : a - Number(b));
  });
}

/** As spreadsheets read it; numbers unrounded. */
function csv(columns: Column[], heads: HeadData[]): string {
  const quoted = (x: string) => (/[",\n\r]/.test(x) ? `"${x.replaceAll('"', '""')}"` : x);
  const said = (column: Column, head: HeadData) => {
    const plain = ["head", "label", "roles"].includes(column.name);
    return plain ? column.text(head) : String(column.value(head) ?? "");
  };
  const lines = heads.map((head) => [
    head.layer,
    head.head,
    ...columns.slice(1).map((column) => quoted(said(column, head))),
  ]);
  return `${[["layer", "head", ...columns.slice(1).map((column) => quoted(column.name))], ...lines].map((line) => line.join(",")).join("\n")}\n`;
}

function open(app: App): OpenView {
  const copy = el("button", { type: "button", id: "csv-copy" }, "Copy as CSV");
  const save = el("button", { type: "button", id: "csv-save" }, "Download CSV");
  const done = el("span", { class: "quiet", role: "status" });
  const caption = el("caption", { class: "heard" });
  const top = el("tr");
  const body = el("tbody");
  const room = el(
    "div",
    { class: "numbers-room", tabindex: 0, role: "region", "aria-label": "Statistics of every head" },
    el("table", { class: "plain all-numbers" }, caption, el("thead", null, top), body),
  );
  const count = el("p", { class: "quiet" });
  const element = el("div", null, el("div", { class: "view-controls" }, copy, save, done), count, room);
  let columns: Column[] = [];
  let heads: HeadData[] = [];
  let by = "head";
  let falling = false;

  const mark = (row: HTMLElement) => {
    const chosen = row.dataset.head === shortName(app.state.layer, app.state.head);
    row.classList.toggle("chosen", chosen);
    const button = row.querySelector("button");
    if (chosen) button?.setAttribute("aria-current", "true");
    else button?.removeAttribute("aria-current");
  };
  /** Rows until there are some more than are in sight. */
  const fill = () => {
    let from = body.childElementCount;
    while (from < heads.length && room.scrollTop + room.clientHeight + AHEAD > body.offsetHeight) {
      for (const head of heads.slice(from, from + CHUNK)) {
        const row = rowOf(app, columns, head);
        mark(row);
        body.append(row);
      }
      from += CHUNK;
    }
  };
  room.addEventListener("scroll", fill, { passive: true });

  const order = () => {
    const column = columns.find((one) => one.name === by) ?? columns[0];
    heads = sorted(app.reading.heads, column, falling);
    for (const cell of top.children as HTMLCollectionOf<HTMLElement>) {
      if (cell.dataset.name === column.name)
        cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    body.replaceChildren();
    room.scrollTop = 0;
    fill();
  };
  const draw = () => {
    columns = columnsOf(app);
    if (!columns.some((column) => column.name === by)) [by, falling] = ["head", false];
    top.replaceChildren(
      ...columns.map((column) =>
        el(
          "th",
          { scope: "col", "data-name": column.name, title: column.about, class: wordy(column) },
          el("button", { type: "button" }, column.title),
        ),
      ),
    );
    caption.textContent = `${app.source.title}: statistics of every head`;
    count.textContent = `${app.reading.heads.length} heads. Click a heading to sort, a row to select its head.`;
    order();
  };
  top.addEventListener("click", (event) => {
    const name = (event.target as Element).closest<HTMLElement>("th")?.dataset.name;
    if (name === undefined) return;
    falling = name === by ? !falling : !["head", "label"].includes(name);
    by = name;
    order();
  });
  body.addEventListener("click", (event) => {
    const name = (event.target as Element).closest<HTMLElement>("tr")?.dataset.head;
    const [layer, head] = (name ?? "").split(".").map(Number);
    if (name !== undefined) app.set({ layer, head });
  });
  copy.addEventListener("click", async () => {
    const worked = await copied(csv(columns, heads));
    done.textContent = worked
      ? `${heads.length} heads copied.`
      : "This browser does not allow copying; use the download instead.";
  });
  save.addEventListener("click", () => {
    const address = URL.createObjectURL(new Blob([csv(columns, heads)], { type: "text/csv" }));
    el("a", { href: address, download: "heads.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
    done.textContent = `Saved heads.csv with ${heads.length} heads.`;
  });
  return {
    element,
    draw(changed) {
      if (changed === null || ["source", "text", "sources"].some((name) => changed.has(name as "source")))
        draw();
      else if (changed.has("layer") || changed.has("head"))
        for (const row of body.children as HTMLCollectionOf<HTMLElement>) mark(row);
    },
  };
}

function rowOf(app: App, columns: Column[], head: HeadData): HTMLElement {
  const name = shortName(head.layer, head.head);
  const row = el("tr", { "data-head": name });
  for (const column of columns) {
    if (column.name === "head") {
      row.append(
        el(
          "th",
          { scope: "row" },
          el("button", { type: "button", "aria-label": `Select head ${name}` }, name),
        ),
      );
      continue;
    }
    const cell = el("td", { class: wordy(column) }, column.text(head));
    if (column.name === "label") cell.style.color = labelColour(labelOf(app.data, head.label));
    row.append(cell);
  }
  return row;
}

/** Into the clipboard; the old way where a page from disk may not use the new one. */
async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el("textarea", { class: "heard", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const worked = document.execCommand("copy");
    field.remove();
    return worked;
  }
}
