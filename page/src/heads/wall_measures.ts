/** The numbers that heads can be coloured and sorted by, and the heads that match the search. */

import { changeOf } from "./number_texts.ts";
import type { HeadData, LabelData } from "./page_data.ts";
import type { App } from "./store.ts";

/** One number per head. */
export interface Measure {
  name: string; // as the state has it
  title: string;
  group: string; // of the menu
  sentence: string;
  share: boolean; // from 0 to 1
  digits: number; // behind the point
  value(head: HeadData): number | null;
}

/** "2.3", as everywhere: both counted from 0. */
export function named(layer: number, head: number): string {
  return `${layer}.${head}`;
}

export function labelOf(app: App, head: HeadData): LabelData | undefined {
  return app.data.labels.find((label) => label.name === head.label);
}

/** Words for the little room below a thumbnail. */
export function shortLabel(name: string): string {
  return name === "punctuation" ? "punct." : name.replace(/-token$/, "");
}

/** A number with as many digits behind the point as its like. */
export function shown(value: number | null, digits = 2): string {
  if (value === null) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Digits that tell numbers up to the largest apart. */
function digitsOf(heads: HeadData[], { share, value }: Pick<Measure, "share" | "value">): number {
  const most = Math.max(...heads.map((head) => Math.abs(value(head) ?? 0)));
  return share || most === 0 ? 2 : Math.min(Math.max(2 - Math.floor(Math.log10(most)), 0), 5);
}

type Bare = Omit<Measure, "digits">;

/** The numbers that are available for the current text. */
export function measures(app: App): Measure[] {
  const offered: Bare[] = [];
  const { heads } = app.reading;
  for (const { name, title, sentence, share } of app.data.statistics) {
    if (!heads.some((head) => typeof head.numbers[name] === "number")) continue;
    const value = (head: HeadData) => head.numbers[name] ?? null;
    offered.push({ name, title, group: "Statistics", sentence, share, value });
  }
  const all = [...corpusMeasures(app), ...offered, ...roleMeasures(app), ...changeMeasures(app)];
  return all.map((measure) => ({ ...measure, digits: digitsOf(heads, measure) }));
}

/** Numbers over many documents; they do not depend on the current text. */
function corpusMeasures(app: App): Bare[] {
  if (app.state.source !== 0) return [];
  return (app.data.corpus?.measures ?? []).map(({ name, title, group, sentence, share, values }) => {
    const byHead = new Map(values.map(([layer, head, value]) => [named(layer, head), value]));
    return {
      name,
      title,
      group,
      sentence,
      share,
      value: (head) => byHead.get(named(head.layer, head.head)) ?? null,
    };
  });
}

function roleMeasures(app: App): Bare[] {
  const { source } = app;
  const all = app.reading.heads.flatMap((head) => source.roles(head.layer, head.head) ?? []);
  const sentences = new Map(all.map((role) => [role.name, role.sentence]));
  if (sentences.size === 0) return [];
  const group = "Roles";
  const share = true;
  const best: Bare = {
    name: "role",
    title: "best role",
    group,
    share,
    sentence:
      "share of cases in which the head attends to the related word, for the head's best role; from 0 to 1",
    value: (head) => source.roles(head.layer, head.head)?.[0]?.share ?? null,
  };
  const single = [...sentences].map(([name, sentence]): Bare => {
    const value = (head: HeadData) =>
      source.roles(head.layer, head.head)?.find((role) => role.name === name)?.share ?? null;
    return {
      name: `role:${name}`,
      title: name,
      group,
      share,
      sentence: `share of cases in which the head ${sentence}; from 0 to 1`,
      value,
    };
  });
  return [best, ...single];
}

function changeMeasures(app: App): Bare[] {
  const { source, text } = app.state;
  const group = "Changes";
  const measured: Bare[] = [];
  const flip = app.data.flips.find((each) =>
    [each.before, each.after].some((place) => place[0] === source && place[1] === text),
  );
  if (flip !== undefined) {
    const changes = new Map(flip.heads.map((head) => [named(head.layer, head.head), head.distance]));
    measured.push({
      name: "moved",
      title: `change (${changeOf(flip.words)})`,
      group,
      sentence:
        "Jensen-Shannon divergence between the weights on the two texts, in nats; 0 = the same, 0.69 = no key in common",
      share: false,
      value: (head) => changes.get(named(head.layer, head.head)) ?? null,
    });
  }
  const { effects } = app.data;
  if (effects !== null && source === 0 && text === 0) {
    const byHead = new Map(effects.heads.map((head) => [named(head.layer, head.head), head.effect]));
    measured.push({
      name: "effect",
      title: effects.unit ? `effect (${effects.unit})` : "effect",
      group,
      sentence: effects.sentence,
      share: false,
      value: (head) => byHead.get(named(head.layer, head.head)) ?? null,
    });
  }
  return measured;
}

/** From where to where the colours of a number go. */
export function bounds(app: App, by: Measure): [number, number] {
  const values = app.reading.heads.map((head) => by.value(head)).filter((value) => value !== null);
  return [by.share ? 0 : Math.min(...values), Math.max(...values)];
}

/** Heads that match what is searched for: "2.3", "2.", a layer's name, a label, a role, words of their sentences. */
function matches(app: App, head: HeadData, asked: string): boolean {
  if (/^\d+\.\d*$/.test(asked)) {
    const name = named(head.layer, head.head);
    return asked.endsWith(".") ? name.startsWith(asked) : name === asked;
  }
  const layer = app.source.layers[head.layer];
  const label = labelOf(app, head);
  const texts = [
    layer.name,
    layer.path,
    head.label,
    label?.sentence ?? "",
    `${layer.name} head ${head.head}`,
  ];
  if (layer.kind === "cross") texts.push("cross-attention");
  for (const role of app.source.roles(head.layer, head.head) ?? []) texts.push(role.name, role.sentence);
  return texts.some((text) => {
    const at = text.toLowerCase().indexOf(asked);
    return at >= 0 && !(/\d$/.test(asked) && /\d/.test(text[at + asked.length] ?? "")); // "layer 1" is not layer 10
  });
}

/** The heads that are asked for, in the order that is asked for, and the number that orders them. */
export function asked(
  app: App,
  offered: Measure[],
): { heads: HeadData[]; by: Measure | null; flowing: boolean } {
  const { label, sort, order } = app.state;
  const search = app.state.search.trim().toLowerCase();
  const heads = app.reading.heads.filter(
    (head) => (label === "" || head.label === label) && (search === "" || matches(app, head, search)),
  );
  const by = offered.find((measure) => measure.name === sort) ?? null;
  const sign = order === "least" ? -1 : 1;
  const most = (a: number | null, b: number | null) => {
    if (a === null || b === null) return Number(a === null) - Number(b === null); // what has no number comes last
    return sign * (b - a);
  };
  if (by !== null) heads.sort((a, b) => most(by.value(a), by.value(b)));
  else if (sort === "label") {
    const place = new Map(app.data.labels.map((each, at) => [each.name, at]));
    const at = (head: HeadData) => place.get(head.label) ?? place.size;
    heads.sort((a, b) => at(a) - at(b) || most(a.score, b.score));
  }
  return { heads, by, flowing: by !== null || sort === "label" };
}
