/**
 * Packed arrays: base64 in the text of #blobs, zlib inside; only what is looked at is unpacked.
 *
 * A weight is one of LEVELS levels, within 1% or 1e-4: level 0 is hidden, 1 + n is n steps of 2e-4 up to 0.01, from there on
 * each level is 1.02 times the one before. Levels up to 254 are one byte; 255 stands for "255 and more", and
 * what is more follows behind all bytes, a byte for each 255 in order.
 */

import type { Blob } from "./page_data.ts";

export interface Cells {
  rows: number;
  columns: number;
  values: Float32Array; // NaN: hidden, as under a mask
  region?: Region; // the positions that the cells cover; left out: all of them
}

/** A part of a map, in positions: [from, to). */
export interface Region {
  queries: [number, number];
  keys: [number, number];
}

const STEP = 2e-4;
const EVEN = 50; // steps up to 0.01
const RATIO = 1.02;
export const LEVELS = 1 + EVEN + Math.ceil(Math.log(100) / Math.log(RATIO)) + 2;

/** What each level stands for. */
export const VALUES = Float32Array.from({ length: LEVELS }, (_, level) => {
  if (level === 0) return Number.NaN;
  if (level <= EVEN + 1) return (level - 1) * STEP;
  return Math.min(1, EVEN * STEP * RATIO ** (level - 1 - EVEN));
});

let text: string | null = null;

/** The bytes of a blob, as they were before packing. */
export async function unpacked([from, to]: Blob): Promise<Uint8Array<ArrayBuffer>> {
  text ??= document.getElementById("blobs")?.textContent ?? "";
  const letters = atob(text.slice(from, to));
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
  return inflated(packed);
}

/** The bytes inside a zlib stream. */
export async function inflated(packed: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer>> {
  const stream = new Response(packed).body!.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Levels as weights. */
export function weights(bytes: Uint8Array, rows: number, columns: number): Cells {
  const count = rows * columns;
  const values = new Float32Array(count);
  let more = count;
  for (let at = 0; at < count; at++) {
    const level = bytes[at];
    values[at] = VALUES[level === 255 ? 255 + bytes[more++] : level];
  }
  return { rows, columns, values };
}
