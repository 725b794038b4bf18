/**
 * Colours of weights, of differences and of labels, in light and dark.
 *
 * A weight is shown by its square root: 0.01 can be seen beside 1. Light goes from paper to dark ink, as the pictures
 * of headwise do; dark from the page to light. What is hidden is grey, never a colour of the scale.
 */

import { isDark, styled } from "./theme.ts";

export type Colour = [number, number, number];

/** What is painted: `Cells` of packed.ts, or anything alike; NaN is hidden. */
export interface Painted {
  rows: number;
  columns: number;
  values: Float32Array;
}

export interface PaintOptions {
  signed?: boolean; // from -most to most
  most?: number; // what the strongest colour stands for; 1 unless told
}

const LIGHT = ["#fffdfa", "#fecf92", "#fd9467", "#e95561", "#ab337c", "#6b1d81", "#2a115c"];
const DARK = ["#16161f", "#3a1f55", "#6f2a7d", "#b13a76", "#ea6660", "#fdaf70", "#fff6dc"];
const SIGNED_LIGHT = ["#8f4300", "#e07a18", "#f6c896", "#fffdfa", "#a5c4f5", "#2f6ee0", "#123f9c"];
const SIGNED_DARK = ["#ffd9ae", "#e28028", "#70431d", "#16161f", "#213f78", "#4a86ff", "#cfe0ff"];
const ENTRIES = 256;

/** "#2f5bd0" as numbers up to 255. */
export function parsed(colour: string): Colour {
  const number = Number.parseInt(colour.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** Numbers up to 255 as CSS has them. */
export function css([red, green, blue]: Colour): string {
  return `rgb(${red} ${green} ${blue})`;
}

/** `part` of the way from one colour to another. */
export function mixed(from: Colour, to: Colour, part: number): Colour {
  return [0, 1, 2].map((i) => Math.round(from[i] + (to[i] - from[i]) * part)) as Colour;
}

function table(stops: string[]): Colour[] {
  const anchors = stops.map(parsed);
  return Array.from({ length: ENTRIES }, (_, entry) => {
    const at = (entry / (ENTRIES - 1)) * (anchors.length - 1);
    const below = Math.min(Math.floor(at), anchors.length - 2);
    return mixed(anchors[below], anchors[below + 1], at - below);
  });
}

/** As canvases hold them, a number per dot: bytes red, green, blue, opaque. */
function dots(colours: Colour[]): Uint32Array {
  return new Uint32Array(Uint8Array.from(colours.flatMap((colour) => [...colour, 255])).buffer);
}

function themed(stops: string[]): { colours: Colour[]; dots: Uint32Array } {
  const colours = table(stops);
  return { colours, dots: dots(colours) };
}

const TABLES = {
  light: { weights: themed(LIGHT), signed: themed(SIGNED_LIGHT) },
  dark: { weights: themed(DARK), signed: themed(SIGNED_DARK) },
};

const tables = () => (isDark() ? TABLES.dark : TABLES.light);

function entry(share: number): number {
  return Math.round(Math.sqrt(Math.min(Math.max(share, 0), 1)) * (ENTRIES - 1));
}

/** -1: the first entry, 0: the middle, 1: the last. */
function signedEntry(share: number): number {
  const size = Math.sqrt(Math.min(Math.abs(share), 1));
  return Math.round(((share < 0 ? -size : size) + 1) * 0.5 * (ENTRIES - 1));
}

/** What stands for "hidden": under a mask, or not measured. */
export function hiddenColour(): Colour {
  return parsed(styled("--hatch"));
}

/** The colour of a weight from 0 to 1, in the theme of now; NaN: hidden. */
export function weightColour(weight: number): Colour {
  return Number.isNaN(weight) ? hiddenColour() : tables().weights.colours[entry(weight)];
}

/** The colour of a difference from -1 to 1: orange is less, blue is more; NaN: hidden. */
export function signedColour(difference: number): Colour {
  return Number.isNaN(difference) ? hiddenColour() : tables().signed.colours[signedEntry(difference)];
}

/** A dot per cell, row after row. */
function painted(cells: Painted, { signed = false, most = 1 }: PaintOptions): Uint32Array<ArrayBuffer> {
  const held = signed ? tables().signed.dots : tables().weights.dots;
  const [hidden] = dots([hiddenColour()]);
  const scale = 1 / (most || 1);
  const made = new Uint32Array(cells.rows * cells.columns);
  for (let at = 0; at < made.length; at++) {
    const value = cells.values[at] * scale;
    made[at] = Number.isNaN(value) ? hidden : held[signed ? signedEntry(value) : entry(value)];
  }
  return made;
}

/** Draws a dot per cell; CSS makes them larger (`image-rendering: pixelated`). */
export function paintCells(canvas: HTMLCanvasElement, cells: Painted, options: PaintOptions = {}): void {
  const { rows, columns } = cells;
  const image = new ImageData(new Uint8ClampedArray(painted(cells, options).buffer), columns, rows);
  canvas.width = columns;
  canvas.height = rows;
  canvas.getContext("2d")?.putImageData(image, 0, 0);
}

/** The same as a file (BMP): a browser gives every canvas a layer of its own, which hundreds of them make slow. */
export function cellsPicture(cells: Painted, options: PaintOptions = {}): Blob {
  const { rows, columns } = cells;
  const HEADER = 66;
  const header = new DataView(new ArrayBuffer(HEADER));
  const whole = (at: number, value: number) => header.setInt32(at, value, true);
  header.setUint16(0, 0x424d); // "BM"
  whole(2, HEADER + 4 * rows * columns);
  whole(10, HEADER); // where dots begin
  whole(14, 40);
  whole(18, columns);
  whole(22, -rows); // from the top down
  header.setUint16(26, 1, true);
  header.setUint16(28, 32, true); // bits of a dot
  whole(30, 3); // colours lie where the next three say
  whole(34, 4 * rows * columns);
  whole(54, 0xff);
  whole(58, 0xff00);
  whole(62, 0xff0000);
  return new Blob([header, painted(cells, options)], { type: "image/bmp" });
}

/** A gradient from 0 to 1 along a scale whose ticks are weights by their square root. */
export function weightGradient(direction = "to right"): string {
  const stops = Array.from({ length: 9 }, (_, i) => css(weightColour((i / 8) ** 2)));
  return `linear-gradient(${direction}, ${stops.join(", ")})`;
}

/** The same for differences from -1 to 1. */
export function signedGradient(direction = "to right"): string {
  const stops = Array.from({ length: 17 }, (_, i) => {
    const size = (i - 8) / 8;
    return css(signedColour(Math.sign(size) * size * size));
  });
  return `linear-gradient(${direction}, ${stops.join(", ")})`;
}

/** Relative luminance, as WCAG has it. */
function luminance(colour: Colour): number {
  const [red, green, blue] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/** From 1 to 21; letters need 4.5. */
export function contrast(one: Colour, other: Colour): number {
  const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

/** Black or white letters, whichever reads better on a colour: one of them always has 4.5. */
export function inkOn(back: Colour): string {
  return contrast(back, [0, 0, 0]) >= contrast(back, [255, 255, 255]) ? "#000000" : "#ffffff";
}

const readable = new Map<string, string>();

/** A label's colour for letters and dots: its own, moved to black or white until it reads on the page. */
export function labelColour(label: { colour: string } | null | undefined, dark = isDark()): string {
  const own = label?.colour ?? "#777777";
  const name = `${own} ${dark}`;
  let known = readable.get(name);
  if (known === undefined) {
    const back: Colour = dark ? [42, 46, 55] : [240, 240, 242]; // the darkest paper and the lightest slate it stands on
    const end: Colour = dark ? [255, 255, 255] : [0, 0, 0];
    let colour = parsed(own);
    for (let part = 0; contrast(colour, back) < 4.5 && part <= 1; part += 0.04)
      colour = mixed(parsed(own), end, part);
    known = css(colour);
    readable.set(name, known);
  }
  return known;
}
