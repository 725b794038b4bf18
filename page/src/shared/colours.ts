/**
 * Colours of weights, of differences and of labels, in light and dark.
 *
 * The colour of a weight depends on its square root, so that 0.01 can be told from 0. In the light theme the stops are
 * those of `src/headwise/show/colour_maps.py` (a test compares them); in the dark theme they go from the page to light.
 * Differences are blue where there is less and orange where there is more. Hidden cells are grey, never a colour of the scale.
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
  most?: number; // what the strongest colour stands for; 1 by default
}

const WEIGHTS_LIGHT = ["#fffdfa", "#fecf92", "#fd9467", "#e95561", "#ab337c", "#6b1d81", "#2a115c"];
const WEIGHTS_DARK = ["#16161f", "#3a1f55", "#6f2a7d", "#b13a76", "#ea6660", "#fdaf70", "#fff6dc"];
const DIFFERENCES_LIGHT = ["#123f9c", "#2f6ee0", "#a5c4f5", "#fffdfa", "#f6c896", "#e07a18", "#8f4300"];
const DIFFERENCES_DARK = ["#cfe0ff", "#4a86ff", "#213f78", "#16161f", "#70431d", "#e28028", "#ffd9ae"];
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
  light: { weights: themed(WEIGHTS_LIGHT), signed: themed(DIFFERENCES_LIGHT) },
  dark: { weights: themed(WEIGHTS_DARK), signed: themed(DIFFERENCES_DARK) },
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

/** The colour of a difference from -1 to 1: blue is less, orange is more; NaN: hidden. */
export function signedColour(difference: number): Colour {
  return Number.isNaN(difference) ? hiddenColour() : tables().signed.colours[signedEntry(difference)];
}

/** A dot per cell, row after row. */
function painted(cells: Painted, { signed = false, most = 1 }: PaintOptions): Uint32Array<ArrayBuffer> {
  const table = signed ? tables().signed.dots : tables().weights.dots;
  const [hidden] = dots([hiddenColour()]);
  const scale = 1 / (most || 1);
  const made = new Uint32Array(cells.rows * cells.columns);
  for (let at = 0; at < made.length; at++) {
    const value = cells.values[at] * scale;
    made[at] = Number.isNaN(value) ? hidden : table[signed ? signedEntry(value) : entry(value)];
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
export function contrast(first: Colour, second: Colour): number {
  const [light, dark] = [luminance(first), luminance(second)].sort((a, b) => b - a);
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
  let text = readable.get(name);
  if (text === undefined) {
    const back: Colour = dark ? [42, 46, 55] : [240, 240, 242]; // the darkest paper and the lightest slate it stands on
    const end: Colour = dark ? [255, 255, 255] : [0, 0, 0];
    let colour = parsed(own);
    for (let part = 0; contrast(colour, back) < 4.5 && part <= 1; part += 0.04)
      colour = mixed(parsed(own), end, part);
    text = css(colour);
    readable.set(name, text);
  }
  return text;
}
