/** Numbers and names as the views say them. */

import type { HeadData, LabelData, PageData } from "./page_data.ts";
import type { Reading, Source } from "./sources.ts";

/** What differs between two texts. */
export function changeOf([before, after]: [string, string]): string {
  if (before && after) return `${before} → ${after}`;
  return before ? `“${before}” removed` : `“${after}” added`;
}

/** "0.1234"; "–" where there is no number. */
export function fixed(x: number | null | undefined, digits = 4): string {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const said = x.toFixed(digits);
  return Number(said) === 0 ? (0).toFixed(digits) : said.replace("-", "−");
}

/** "+0.1234", "−0.1234". */
export function signed(x: number | null | undefined, digits = 4): string {
  const said = fixed(x, digits);
  return /^[1-9]|[.].*[1-9]/.test(said) && !said.startsWith("−") ? `+${said}` : said;
}

/** 400,000,000 as "400 million". */
export function counted(n: number): string {
  for (const [size, name] of [
    [1e9, "billion"],
    [1e6, "million"],
  ] as const)
    if (n >= size) return `${Number((n / size).toPrecision(3))} ${name}`;
  return n.toLocaleString("en");
}

/** What a head is called in lists: "2.3", layer and head counted from 0. */
export const shortName = (layer: number, head: number) => `${layer}.${head}`;

export function labelOf(data: PageData, name: string | null | undefined): LabelData | undefined {
  return data.labels.find((label) => label.name === name);
}

export function headOf(reading: Reading | undefined, layer: number, head: number): HeadData | undefined {
  return reading?.heads.find((one) => one.layer === layer && one.head === head);
}

/** "layer 2, head 3". */
export const headName = (source: Source, layer: number, head: number) =>
  `${source.layers[layer]?.name ?? `layer ${layer}`}, head ${head}`;

/** What a text is called where several are offered. */
export function readingName(reading: Reading, number: number): string {
  const said = reading.text ?? "";
  const short = said.length > 40 ? `${said.slice(0, 39)}…` : said;
  return [reading.name, short].filter(Boolean).join(": ") || `text ${number + 1}`;
}
