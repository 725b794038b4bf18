/** The panel: one cell, expected and yours, and how it is computed. */

import { byId, el } from "../shared/elements.ts";
import { styled } from "../shared/theme.ts";
import { data, type FieldMap } from "./explain_data.ts";
import {
  type At, brief, exact, longer, type Matrix, matrix, operand, parts, place, sameNumber, sameShape,
} from "./numbers.ts"; // biome-ignore format: a list
import { isOfDesign, type Products, type Softmax, type Sum, sumBehind, WHOLE } from "./sums.ts";

const { H } = data.sizes;

/** Draw the chosen cell of a field into the panel. */
export function drawPanel(panel: HTMLElement, map: FieldMap, r: number, c: number, at: At): void {
  const { field } = map;
  const expected = matrix("expected", field, at);
  const own = matrix("yours", field, at);
  const number = (m: Matrix | null) => (m && r < m.rows && c < m.cols ? m.at(r, c) : null);
  const wanted = number(expected);
  const found = own && expected && sameShape(own, expected) ? number(own) : null;
  const differs = wanted !== null && found !== null && parts(field, wanted, found);
  const spot = `${place(map.rows, r, field)}, ${place(map.columns, c, field)}`;
  const ofAHead =
    map.rows === "query" &&
    map.columns !== "width" &&
    !["query", "output", "joined"].includes(field.split("@")[0]) &&
    H > 1;
  const whose = field === "weighted" ? `, for ${place("query", at.query)}` : "";
  const said = wanted === null ? "" : brief(wanted);
  byId("said").textContent = `${map.name}, ${spot}: ${said}${differs ? `, yours ${brief(found)}` : ""}`;
  panel.replaceChildren(
    el("h3", null, `${map.name}[${r}, ${c}]`),
    el("p", { class: "where" }, `${ofAHead ? `head ${at.head}, ` : ""}${spot}${whose}`),
    numbersOf(wanted, found, differs),
  );
  if (wanted === null) {
    panel.append(el("p", null, "The expected result has a smaller shape, without this cell."));
    return;
  }
  const right = sumBehind(field, r, c, at, "expected");
  const title = right.kind === "words" ? "where this number comes from" : "how this number is computed";
  panel.append(sumOf(right, `${differs ? "Expected: " : ""}${title}`));
  if (differs) panel.append(...yoursBehind(field, r, c, at, right, found));
  for (const row of panel.querySelectorAll<HTMLElement>("tr.chosen")) {
    const box = row.closest<HTMLElement>(".scroll");
    if (box) box.scrollTop = Math.max(0, row.offsetTop - box.offsetTop - box.clientHeight / 2);
  }
}

/** The number with all digits; both numbers where they differ. */
function numbersOf(wanted: number | null, found: number | null, differs: boolean): HTMLElement {
  const line = (name: string, x: number, id: string, wrong: boolean) =>
    el(
      "div",
      { class: wrong ? "number wrong" : "number" },
      el("dt", null, name),
      el("dd", { id, "data-value": exact(x) }, exact(x)),
    );
  const list = el("dl", { class: "numbers" });
  if (wanted !== null) list.append(line("expected", wanted, "expected-number", false));
  if (found === null) return list;
  list.append(line("yours", found, "your-number", differs));
  if (wanted === null) return list;
  const box = el("div", null, list);
  if (!differs && !sameNumber(wanted, found))
    box.append(el("p", { class: "quiet" }, "Equal up to rounding."));
  if (differs && Number.isFinite(wanted - found)) {
    const how = found > wanted ? "larger" : "smaller";
    box.append(el("p", { class: "quiet" }, `Your number is ${how} by ${longer(Math.abs(found - wanted))}.`));
  }
  return box;
}

/** Say whether this step of the user's code is wrong, or only its input. */
function yoursBehind(field: string, r: number, c: number, at: At, right: Sum, found: number): HTMLElement[] {
  const theirs = sumBehind(field, r, c, at, "yours");
  if (theirs.total === null && isOfDesign(field)) return [];
  if (theirs.total === null)
    return [
      el(
        "p",
        { class: "said wrong" },
        "With the shapes in your code, this number cannot be computed by this formula.",
      ),
    ];
  if (!parts(field, theirs.total, found)) {
    const words =
      "Your code computes this step correctly, but its input was already wrong. The first wrong step is marked red.";
    const same = theirs.kind === "words" && right.kind === "words" && theirs.words === right.words;
    const again = same ? [] : [sumOf(theirs, "The same sum with your numbers")];
    return [...again, el("p", { class: "said" }, words)];
  }
  const same =
    right.total !== null &&
    (sameNumber(theirs.total, right.total) || Math.abs(theirs.total - right.total) <= 1e-9);
  const lead = same
    ? "The inputs of this step are correct, but your result is"
    : `With your inputs this sum is ${longer(theirs.total)}, but your result is`;
  const end = same ? "the mistake is in this step." : "this step also differs.";
  const said = [el("p", { class: "said wrong" }, `${lead} ${longer(found)}: ${end}`)];
  const source = takenFrom(field, found, at);
  if (source !== null) said.push(el("p", { class: "said" }, source));
  return said;
}

/** For steps that only move numbers: the place that your number comes from, in words. */
function takenFrom(field: string, x: number, at: At): string | null {
  const places: string[] = [];
  const look = (m: Matrix | null, words: (r: number, c: number) => string) => {
    for (let r = 0; m && r < m.rows; r++) {
      for (let c = 0; c < m.cols; c++) if (m.at(r, c) === x) places.push(words(r, c));
    }
  };
  const name = field.split("@")[0];
  if (name in WHOLE) {
    const rows = name === "q" ? "query" : "key";
    look(
      operand("yours", WHOLE[name], at),
      (r, c) => `${place(rows, r)}, channel ${c} of ${name.toUpperCase()}`,
    );
  } else if (name === "joined") {
    for (let head = 0; head < H; head++) {
      look(
        operand("yours", "heads", { ...at, head }),
        (r, c) => `${place("query", r)}, channel ${c} of head ${head}'s output`,
      );
    }
  }
  return places.length === 1 ? `Your number equals the number at ${places[0]}.` : null;
}

/** A sum as a table, or in words. */
function sumOf(sum: Sum, title: string): HTMLElement {
  const name = title[0].toUpperCase() + title.slice(1);
  const made = el("section", { class: "sum" }, el("h4", null, name));
  if (sum.kind === "words") {
    const total = sum.shown && sum.total !== null ? ` = ${longer(sum.total)}` : "";
    made.append(el("p", null, sum.words + total));
    return made;
  }
  const table = sum.kind === "softmax" ? softmaxTable(sum) : productTable(sum);
  const box = el("div", { class: "scroll terms", role: "group", "aria-label": name, tabindex: 0 }, table);
  made.append(box, el("p", { class: "total" }, totalOf(sum)));
  return made;
}

function totalOf(sum: Products | Softmax): string {
  if (sum.kind === "products") {
    const name = sum.terms.length > 1 || sum.bias !== null ? "total" : "product";
    return `${name} = ${longer(sum.total)}`;
  }
  const one = sum.terms.find((term) => term.chosen);
  return `${one ? longer(one.power) : ""} ÷ ${longer(sum.sum)} = ${longer(sum.total)}`;
}

const rowName = (name: string) => el("th", { scope: "row" }, name);
const columnName = (name: string) => el("th", { scope: "col" }, name);
const sign = (text: string) => el("td", { class: "sign" }, text);

function productTable(sum: Products): HTMLElement {
  const [index, a, b] = sum.names;
  const sizes = sum.terms.map((term) => Math.abs(term.product)).filter(Number.isFinite);
  const most = Math.max(...sizes, 1e-300);
  const body = el("tbody");
  for (const term of sum.terms) {
    const product = cell(term.product, most);
    body.append(
      el("tr", null, rowName(term.label), cell(term.a), sign("×"), cell(term.b), sign("="), product),
    );
  }
  if (sum.bias !== null) {
    const empty = [el("td"), el("td"), el("td")];
    body.append(el("tr", { class: "bias" }, rowName("bias"), ...empty, sign("+"), cell(sum.bias, most)));
  }
  const head = [columnName(index), columnName(a), el("td"), columnName(b), el("td"), columnName("product")];
  return el("table", { class: "terms" }, el("thead", null, el("tr", null, ...head)), body);
}

function softmaxTable(sum: Softmax): HTMLElement {
  const power = sum.shift ? `exp(x − ${longer(sum.shift)})` : "exp(x)";
  const body = el("tbody");
  for (const term of sum.terms) {
    const share = cell(term.share, 1, "--share");
    const kind = { class: term.chosen ? "chosen" : null };
    body.append(el("tr", kind, rowName(term.label), cell(term.a), cell(term.power), share));
  }
  body.append(el("tr", { class: "bias" }, rowName("sum"), el("td"), cell(sum.sum), cell(1)));
  const head = ["key", "x = masked score", power, "÷ sum"].map(columnName);
  return el("table", { class: "terms" }, el("thead", null, el("tr", null, ...head)), body);
}

/** A number in a table, with a bar behind it where `most` says how long one may be. */
function cell(x: number, most = 0, hue?: string): HTMLElement {
  const made = el("td", { title: exact(x) }, longer(x));
  if (most && Number.isFinite(x)) {
    const share = Math.round(100 * Math.min(1, Math.abs(x) / most));
    const colour = `rgb(${styled(hue ?? (x < 0 ? "--negative" : "--positive"))} / 0.28)`;
    made.style.background = `linear-gradient(to left, ${colour} ${share}%, transparent ${share}%)`;
  }
  return made;
}
