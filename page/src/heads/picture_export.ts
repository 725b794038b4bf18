/**
 * Pictures to take away: SVG with title, tokens, scale and caption; PNG is the same, drawn by the browser.
 *
 * Text goes through the document's own nodes, so that whatever a token says is text; letters that XML cannot hold are
 * replaced.
 */

import { css, paintCells, weightColour } from "../shared/colours.ts";
import { svg } from "../shared/elements.ts";
import { styled } from "../shared/theme.ts";
import { columnRange, counted, isExact, regionOf, rowRange, type Scene, short, shown } from "./head_scene.ts";
import type { Cells } from "./packed.ts";

const MOST_RECTANGLES = 4096;
const MOST_TOKENS = 64;
const MARGIN = 20;
const LETTERS = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const UNWRITABLE = /[\p{Cc}\p{Cs}\uFFFE\uFFFF]/gu; // no letters of XML

/** Words as XML can hold them. */
const writable = (words: string): string => words.replace(UNWRITABLE, "\uFFFD");

export interface Words {
  size?: number;
  bold?: boolean;
  anchor?: "start" | "middle" | "end";
  fill?: string;
  turn?: number; // degrees
}

/** A line of text in a picture. */
export function label(x: number, y: number, words: string, how: Words = {}): SVGTextElement {
  const { size = 12, bold = false, anchor = "start", fill = styled("--ink"), turn = 0 } = how;
  const weight = bold ? "600" : null;
  const turned = turn === 0 ? null : `rotate(${turn} ${x} ${y})`;
  return svg(
    "text",
    { x, y, fill, "font-size": size, "font-weight": weight, "text-anchor": anchor, transform: turned },
    writable(words),
  );
}

/** A token, shortened to what fits. */
export function clipped(token: string, most = 16): string {
  const letters = [...shown(token)];
  return letters.length <= most ? letters.join("") : `${letters.slice(0, most - 1).join("")}…`;
}

/** The scale of weights: colours by the square root, numbers below. */
function scale(x: number, y: number, most: number): SVGElement[] {
  const width = 200;
  const steps = 40;
  const parts: SVGElement[] = [];
  for (let i = 0; i < steps; i++) {
    const fill = css(weightColour(((i + 0.5) / steps) ** 2));
    parts.push(svg("rect", { x: x + (i * width) / steps, y, width: width / steps + 0.5, height: 10, fill }));
  }
  for (const part of [0, 0.05, 0.25, 0.5, 1]) {
    const at = x + Math.sqrt(part) * width;
    parts.push(
      label(at, y + 24, most === 1 ? String(part) : short(part * most), {
        size: 10.5,
        anchor: "middle",
        fill: styled("--quiet"),
      }),
    );
  }
  return parts;
}

/** A whole picture: title, caption, what is drawn, scale. */
export function framed(
  scene: Scene,
  body: SVGElement,
  width: number,
  height: number,
  below: string,
  most: number | null = scene.most,
): SVGSVGElement {
  const lines = [scene.caption, scene.written ? "weights × ‖v W_O‖" : "attention weights", below];
  const said = lines.filter((line) => line !== "");
  const wide = Math.max(width, 420) + 2 * MARGIN;
  const start = MARGIN + 30 + said.length * 17;
  const tall = start + height + (most === null ? 0 : 44) + MARGIN;
  const picture = svg("svg", {
    width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, "font-family": LETTERS, role: "img",
  }); // biome-ignore format: attributes
  picture.append(
    svg("title", null, writable(scene.title)),
    svg("rect", { width: wide, height: tall, fill: styled("--surface") }),
    label(MARGIN, MARGIN + 14, scene.title, { size: 18, bold: true }),
  );
  const room = Math.floor((wide - 2 * MARGIN) / 6);
  for (const [i, line] of said.entries())
    picture.append(label(MARGIN, MARGIN + 36 + i * 17, clipped(line, room), { fill: styled("--quiet") }));
  picture.append(svg("g", { transform: `translate(${MARGIN} ${start})` }, body));
  if (most !== null) picture.append(...scale(MARGIN + 6, start + height + 16, most));
  return picture;
}

/** Cells as rectangles; where they are many, as an image inside the picture. */
export function cellsDrawn(cells: Cells, most: number, cell: [number, number]): SVGElement {
  const [wide, tall] = cell;
  if (cells.values.length > MOST_RECTANGLES) {
    const canvas = document.createElement("canvas");
    paintCells(canvas, cells, { most });
    const size = { width: cells.columns * wide, height: cells.rows * tall };
    const href = canvas.toDataURL("image/png");
    return svg("image", { ...size, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });
  }
  const group = svg("g", { "shape-rendering": "crispEdges" });
  for (let row = 0; row < cells.rows; row++) {
    for (let column = 0; column < cells.columns; column++) {
      const fill = css(weightColour(cells.values[row * cells.columns + column] / (most || 1)));
      group.append(svg("rect", { x: column * wide, y: row * tall, width: wide, height: tall, fill }));
    }
  }
  return group;
}

/** Rows and columns of a map, from and to. */
export interface Part {
  rows: [number, number];
  columns: [number, number];
}

/** A map, or a part of one. */
export function mapDrawing(scene: Scene, cells: Cells, part: Part | null): SVGSVGElement {
  const { rows, columns } = part ?? { rows: [0, cells.rows], columns: [0, cells.columns] };
  const high = rows[1] - rows[0];
  const wide = columns[1] - columns[0];
  const values = new Float32Array(high * wide);
  for (let row = 0; row < high; row++) {
    const from = (rows[0] + row) * cells.columns + columns[0];
    values.set(cells.values.subarray(from, from + wide), row * wide);
  }
  const cut: Cells = { rows: high, columns: wide, values };
  const { queryTokens, keyTokens } = scene.call;
  const out = Math.max(high, wide) <= MOST_TOKENS && isExact(scene, cells);
  const size = out ? 18 : Math.max(1, Math.round(640 / Math.max(high, wide)));
  const left = out ? 112 : 76;
  const top = out ? 104 : 22;
  const group = svg(
    "g",
    { transform: `translate(${left} ${top})` },
    cellsDrawn(cut, scene.most, [size, size]),
  );
  if (out) {
    const { queries, keys } = regionOf(scene, cells);
    for (let row = 0; row < high; row++) {
      const query = queries[0] + rows[0] + row;
      const name = clipped(queryTokens?.[query] ?? String(query));
      group.append(label(-6, row * size + size * 0.72, name, { anchor: "end" }));
    }
    for (let column = 0; column < wide; column++) {
      const key = keys[0] + columns[0] + column;
      const name = clipped(keyTokens?.[key] ?? String(key));
      group.append(label(column * size + size * 0.72, -6, name, { turn: -90 }));
    }
  } else {
    for (let tick = 0; tick <= 4; tick++) {
      const query = counted(rowRange(scene, cells, rows[0] + Math.round((high * tick) / 4))[0]);
      const key = counted(columnRange(scene, cells, columns[0] + Math.round((wide * tick) / 4))[0]);
      const quiet = { size: 10.5, fill: styled("--quiet") };
      group.append(label(-6, (high * size * tick) / 4 + 4, query, { ...quiet, anchor: "end" }));
      group.append(label((wide * size * tick) / 4, -7, key, { ...quiet, anchor: "middle" }));
    }
  }
  const edge = { width: wide * size, height: high * size, fill: "none", stroke: styled("--line") };
  group.append(svg("rect", edge));
  const below = out
    ? "queries in rows, keys in columns"
    : "query positions in rows, key positions in columns";
  return framed(scene, group, left + wide * size + 4, top + high * size, below);
}

/** "mini_layer2_head3", from a model's title and a head's. */
export function fileName(title: string, head: string): string {
  const plain = (words: string) => words.replaceAll(/[^\p{L}\p{N}.-]+/gu, "_").replaceAll(/^_+|_+$/g, "");
  const place = head
    .toLowerCase()
    .replaceAll(",", "")
    .replaceAll(/(layer|head) (\d+)/g, "$1$2");
  return [plain(title).slice(0, 40), plain(place).slice(0, 80)].filter((words) => words !== "").join("_");
}

/** A picture as the text of a file. */
export function asText(picture: SVGSVGElement): string {
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(picture)}\n`;
}

function download(held: Blob, name: string): void {
  const address = URL.createObjectURL(held);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Saves a picture under a name with ".svg" or ".png". */
export async function save(picture: SVGSVGElement, name: string, kind: "svg" | "png"): Promise<void> {
  const drawn = new Blob([asText(picture)], { type: "image/svg+xml;charset=utf-8" });
  if (kind === "svg") {
    download(drawn, `${name}.svg`);
    return;
  }
  const address = URL.createObjectURL(drawn);
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    const sharp = 2; // dots of the file per unit of the picture
    canvas.width = picture.width.baseVal.value * sharp;
    canvas.height = picture.height.baseVal.value * sharp;
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    const held = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
    if (held === null) throw new Error("This browser cannot write the PNG; save the SVG instead.");
    download(held, `${name}.png`);
  } finally {
    URL.revokeObjectURL(address);
  }
}
