/** One step: its heading, its words, and its maps. */

import { dress, el } from "../shared/elements.ts";
import {
  type Axis,
  data,
  type FieldMap,
  type Flow,
  type Side,
  type Status,
  type Step,
} from "./explain_data.ts";
import { type Choose, type DrawnMap, extent, grid, isReadable, picture, type Room } from "./maps.ts";
import {
  type At,
  expectedMatrix,
  firstDifference,
  type Matrix,
  matrix,
  range,
  sameShape,
} from "./numbers.ts";

const { H } = data.sizes;

const STATUS: Record<Status, string | null> = {
  same: "Your numbers equal the expected numbers here.",
  first: "Your numbers first differ here: every step before is correct.",
  after: "Your numbers differ here because of an earlier step.",
  unseen: null,
};
const AXES: Record<Axis, string> = {
  query: "queries",
  key: "keys",
  channel: "channels",
  width: "channels of all heads",
  feature: "features",
};
const GOES_IN: Room = { least: 3, most: 15, width: 220, height: 150 };
const COMES_OUT: Room = { least: 4, most: 22, width: 760, height: 520 };
const SMALL: Room = { least: 3, most: 12, width: 150, height: 120 };

/** A map of the step, and what it is there for. */
export interface StepMap extends DrawnMap {
  map: FieldMap;
  role: "operand" | "result" | "different shape" | "thumbnail";
  head: number | null; // of an operand, where every head has one
}

/** What a reader can do; a step without is a picture to print. */
export interface Actions {
  choose(map: FieldMap, row: number, col: number, focus: boolean, from: StepMap | null): void;
  goToHead(head: number): void;
}

/** A step as it is drawn: its elements, and its maps. */
export class DrawnStep {
  readonly maps: StepMap[] = [];
  readonly element = document.createDocumentFragment();

  constructor(
    index: number,
    private readonly at: At,
    private readonly actions: Actions | null,
  ) {
    const step = data.steps[index];
    this.element.append(
      el("h2", { id: actions ? "step-title" : null }, `${index}. ${step.title}`),
      el("p", { class: "formula" }, step.formula),
      el("p", { class: "words" }, step.words),
      listed("shapes", "Shapes", step.shapes),
    );
    if (step.key === "mask" && data.masks) {
      const words = data.masks[at.sample].words;
      this.element.append(listed("mask-words", "The mask of this sample in words", words));
    }
    const status = STATUS[step.status];
    if (status !== null) {
      const off = step.status === "same" && step.error !== null && Number(step.error) > 0;
      const error = off ? ` The largest difference is ${step.error}.` : "";
      this.element.append(el("p", { class: `status ${step.status}` }, status + error));
    }
    for (const flow of step.flows) this.element.append(this.flow(step, flow));
    if (step.key === "heads" && H > 1) this.element.append(this.allHeads());
  }

  /** What goes in on the left, what comes out on the right. */
  private flow(step: Step, flow: Flow): HTMLElement {
    const row = el("div", { class: "flow" });
    const inputs = el("div", { class: "operands" });
    for (const one of flow.operands) {
      const heads = step.key === "concat" ? range(H) : [null];
      for (const head of heads) inputs.append(...this.operand(one, head));
    }
    if (inputs.childNodes.length)
      row.append(inputs, el("div", { class: "arrow", "aria-hidden": "true" }, "→"));
    row.append(this.results(step, flow.result));
    return row;
  }

  private operand(map: FieldMap, head: number | null): HTMLElement[] {
    const m = matrix("expected", map.field, { ...this.at, head: head ?? this.at.head });
    if (!m) return [];
    const title = head === null ? map.name : `head ${head}`;
    const name = `${title}, ${m.rows} by ${m.cols}, input`;
    const made = picture(map, m, null, extent([m]), name, null, GOES_IN);
    this.maps.push({ ...made, map, role: "operand", head });
    if (made.overflows) dress(made.element, { role: "group", "aria-label": name, tabindex: 0 });
    const caption = el("figcaption", null, el("b", null, title), ` ${m.rows}×${m.cols}`);
    return [el("figure", { class: "operand" }, caption, made.element)];
  }

  /** The expected map, and yours beside it where it differs. */
  private results(step: Step, map: FieldMap): HTMLElement {
    const made = el("div", { class: "results" });
    const wanted = expectedMatrix(map.field, this.at);
    const own = matrix("yours", map.field, this.at);
    const parted = step.status === "first" || step.status === "after";
    if (own && !sameShape(own, wanted)) {
      const shapes = [own, wanted].map((m) => `[${m.shape.join(", ")}]`);
      made.append(
        this.result(map, wanted, null, extent([wanted]), "expected", "expected"),
        this.result(map, own, null, extent([own]), "yours", "yours"),
        el(
          "p",
          { class: "status first" },
          `Your result has a different shape: ${shapes.join(" instead of ")}.`,
        ),
      );
    } else if (own && parted && firstDifference(map.field, wanted, own)) {
      const most = extent([wanted, own]);
      made.append(
        this.result(map, wanted, own, most, "expected", "expected"),
        this.result(map, own, wanted, most, "yours", "yours"),
      );
    } else {
      made.append(this.result(map, wanted, null, extent([wanted]), null, "expected"));
      if (own && parted)
        made.append(el("p", { class: "quiet" }, `${map.name}: no difference in this head and sample.`));
    }
    return made;
  }

  private result(
    map: FieldMap,
    m: Matrix,
    other: Matrix | null,
    most: number,
    side: Side | null,
    whose: Side,
  ): HTMLElement {
    const { actions } = this;
    const another = whose === "yours" && other === null;
    const name = `${map.name}${side ? `, ${side}` : ""}: rows are ${AXES[map.rows]}, columns are ${AXES[map.columns]}`;
    const pick: Choose | null =
      actions && !another ? (r, c, focus) => actions.choose(map, r, c, focus, kept) : null;
    const walked = `${name}; ${m.rows} by ${m.cols}, the arrow keys move between cells`;
    const made = isReadable(m)
      ? grid(map, m, other, most, name, pick)
      : picture(map, m, other, most, walked, pick, COMES_OUT);
    const kept: StepMap = { ...made, map, role: another ? "different shape" : "result", head: null };
    this.maps.push(kept);
    const caption = el(
      "figcaption",
      null,
      el("b", null, map.name),
      side && el("span", { class: `side ${side}` }, side),
      el("span", { class: "axes" }, `${AXES[map.rows]} ↓ ${AXES[map.columns]} →`),
    );
    return el("figure", { class: `result ${side ?? ""}`, "data-side": whose }, caption, made.element);
  }

  /** Each head's output, small; a click goes to that head. */
  private allHeads(): HTMLElement {
    const map: FieldMap = {
      field: "heads",
      name: "head output",
      rows: "query",
      columns: "channel",
      colour: "signed",
    };
    const every = range(H).map((head) => expectedMatrix("heads", { ...this.at, head }));
    const most = extent(every);
    const row = el("div", { class: "operands all-heads" });
    for (const [head, m] of every.entries()) {
      const made = picture(map, m, null, most, `output of head ${head}`, null, SMALL);
      this.maps.push({ ...made, map, role: "thumbnail", head });
      const kind = head === this.at.head ? "operand current" : "operand";
      const go = el("button", { type: "button", class: kind, "aria-label": `Show head ${head}` });
      go.append(el("span", null, `head ${head}`), made.element);
      go.addEventListener("click", () => this.actions?.goToHead(head));
      row.append(go);
    }
    return el("div", null, el("h3", null, "All heads"), row);
  }
}

function listed(kind: string, name: string, words: string[]): HTMLElement {
  return el("ul", { class: kind, "aria-label": name }, ...words.map((one) => el("li", null, one)));
}
