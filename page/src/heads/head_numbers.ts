/** The label, roles and statistics of one head, each with a sentence; its largest weights. */

import { labelColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { counted, figure, named, type Scene, short, shown } from "./head_scene.ts";
import type { HeadData, RoleData } from "./page_data.ts";
import { largest, type Pair } from "./sources.ts";
import type { App } from "./store.ts";

const PAIRS = 12;

/** "Layer 2, head 3". */
export function headTitle(layer: string, head: number): string {
  return `${layer.charAt(0).toUpperCase()}${layer.slice(1)}, head ${head}`;
}

/** The chip and its sentence. */
export function labelLine(app: App, head: HeadData): HTMLElement {
  const label = app.data.labels.find((each) => each.name === head.label);
  const chip = el("span", { class: "label-chip" }, head.label.replaceAll("_", " "));
  if (head.score !== null) chip.append(" ", figure(head.score));
  chip.style.setProperty("--own", labelColour(label));
  return el("p", { class: "label-line" }, chip, label ? ` ${label.sentence}` : null);
}

/** A share in whole percents; 0% and 100% are only those that are exactly that. */
function percents(share: number): string {
  const whole = Math.round(100 * share);
  if (whole === 0 && share > 0) return "<1%";
  return whole === 100 && share < 1 ? ">99%" : `${whole}%`;
}

function interval({ low, high }: RoleData): string {
  if (low === null || high === null) return "";
  return ` (95% interval ${Math.round(100 * low)}–${Math.round(100 * high)}%)`;
}

/** Every role with its sentence, share, interval and the best rule that needs no model. */
export function rolesList(roles: RoleData[] | null): HTMLElement | null {
  if (roles === null || roles.length === 0) return null;
  const items = roles.map((role) =>
    el(
      "li",
      null,
      el("b", null, role.name),
      ` ${role.sentence} in `,
      el("b", { title: role.share.toPrecision(5) }, percents(role.share)),
      el(
        "span",
        { class: "quiet" },
        ` of ${counted(role.cases)} cases${interval(role)};` +
          ` the best simple rule, “${role.rule}”, is right in ${percents(role.rule_share)} of them` +
          `${role.rule === role.offset ? "" : `, and the best fixed offset, “${role.offset}”, in ${percents(role.offset_share)}`}.`,
      ),
    ),
  );
  return el("ul", { class: "roles", "aria-label": "Roles" }, ...items);
}

/** A number of a head, in the digits that its size deserves. */
function formatted(value: number | null, share: boolean): string {
  if (value === null) return "–";
  if (share) return short(value);
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2).replace("-", "−");
}

/** All numbers, compact; what each says, below in full. */
export function numbersList(app: App, head: HeadData): HTMLElement {
  const offered = app.data.statistics.filter(({ name }) => (head.numbers[name] ?? null) !== null);
  const pairs = offered.map(({ name, title, sentence, share }) =>
    el(
      "div",
      { title: `${sentence} (${head.numbers[name]})` },
      el("dt", null, title.replaceAll("_", " ")),
      el("dd", null, formatted(head.numbers[name], share)),
    ),
  );
  const sentences = offered.map(({ title, sentence }) =>
    el("li", null, el("b", null, title.replaceAll("_", " ")), `: ${sentence}`),
  );
  return el(
    "div",
    null,
    el("dl", { class: "head-numbers" }, ...pairs),
    el(
      "details",
      null,
      el("summary", null, "What these statistics mean"),
      el("ul", { class: "sentences" }, ...sentences),
    ),
  );
}

/** The strongest pairs; without the first token and itself, if that is asked for. */
async function strongest(scene: Scene, bare: boolean): Promise<Pair[] | null> {
  const { call, head, self, offset } = scene;
  const plain = ({ query, key }: { query: number; key: number }) =>
    key !== 0 && !(self && key === query + offset);
  if (!call.exact) {
    const all = await call.pairs(head, Number.POSITIVE_INFINITY);
    return all?.filter((pair) => !bare || plain(pair)).slice(0, PAIRS) ?? null;
  }
  if (!bare) return largest(scene.cells, PAIRS);
  const values = scene.cells.values.map((weight, at) =>
    plain({ query: Math.floor(at / scene.cells.columns), key: at % scene.cells.columns }) ? weight : 0,
  );
  return largest({ ...scene.cells, values }, PAIRS);
}

/** A list of them; choosing one pins its query. */
export async function pairsList(
  scene: Scene,
  bare: boolean,
  choose: (pair: Pair) => void,
): Promise<HTMLElement | null> {
  const pairs = await strongest(scene, bare);
  if (pairs === null) return null;
  if (pairs.length === 0) return el("p", { class: "quiet" }, "None.");
  const { queryTokens, keyTokens } = scene.call;
  const twice = (tokens: string[], at: number) =>
    tokens.indexOf(tokens[at]) !== tokens.lastIndexOf(tokens[at]);
  const word = (tokens: string[] | null, at: number) => {
    if (tokens === null) return counted(at);
    return twice(tokens, at) ? `${shown(tokens[at])} (${counted(at)})` : shown(tokens[at]);
  };
  const items = pairs.map((pair) => {
    const button = el("button", { type: "button" });
    button.append(`${word(queryTokens, pair.query)} → ${word(keyTokens, pair.key)} `, figure(pair.weight));
    button.title = `${named(queryTokens, pair.query)} → ${named(keyTokens, pair.key)}: ${pair.weight.toPrecision(5)}`;
    button.addEventListener("click", () => choose(pair));
    return el("li", null, button);
  });
  const list = el("ol", { class: "pairs" }, ...items);
  if (scene.call.exact || !scene.written) return list;
  return el("div", null, el("p", { class: "quiet" }, "Ordered by the weight alone, without ‖v W_O‖:"), list);
}
