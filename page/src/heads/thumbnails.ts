/**
 * Thumbnails that are drawn when they come near what is seen, a few per frame, and released when they are far.
 *
 * Nothing else is unpacked: a wall of 1,024 heads costs what a screen of it costs. A line of heads shares a canvas, for
 * a browser gives every canvas a layer of its own, and hundreds of layers make scrolling slow.
 */

import { paintCells } from "../shared/colours.ts";
import type { Cells } from "./packed.ts";

const NEAR = "200px 0px"; // beyond the window: drawn before it is seen
const KEPT = 24; // lines that are drawn and not near; beyond that, what was left first is released
const BUDGET = 8; // milliseconds of a frame
const AT_ONCE = 96; // maps that are being unpacked, or fetched in one request
const WHOLE = 0.85; // dots are whole where that fills so much of the room

/** A map and where it is drawn, in CSS dots from the corner of its line. */
export interface Thumbnail {
  element: HTMLElement; // says whether it is drawn: data-drawn
  load: () => Promise<Cells | null>; // null: there is none, and its place stays empty
  lacking: string; // what is said in that place
  left: number;
  top: number;
  width: number;
  height: number;
  apart: number; // from its neighbours
}

/** Heads beside each other. */
export interface Line {
  element: HTMLElement;
  canvas: HTMLCanvasElement; // in its corner
  width: number;
  height: number;
  thumbnails: Thumbnail[];
}

interface Held extends Line {
  near: boolean;
  drawn: boolean; // in the colours and with the maps of now, or waiting to be
}

interface Task {
  line: Held;
  thumbnail: Thumbnail;
  version: number;
}

/** Fewer cells: a sum over keys, in the mean over queries, so that a column of one key keeps its weight. */
export function pooled(cells: Cells, mostRows: number, mostColumns: number): Cells {
  const rows = Math.min(cells.rows, mostRows);
  const columns = Math.min(cells.columns, mostColumns);
  if (rows === cells.rows && columns === cells.columns) return cells;
  const values = new Float32Array(rows * columns);
  const seen = new Uint32Array(rows * columns);
  const queries = new Uint32Array(rows);
  const column = Uint16Array.from({ length: cells.columns }, (_, at) =>
    Math.floor((at * columns) / cells.columns),
  );
  for (let r = 0; r < cells.rows; r++) {
    const row = Math.floor((r * rows) / cells.rows);
    queries[row]++;
    for (let c = 0; c < cells.columns; c++) {
      const value = cells.values[r * cells.columns + c];
      if (Number.isNaN(value)) continue;
      const at = row * columns + column[c];
      values[at] += value;
      seen[at]++;
    }
  }
  for (let at = 0; at < values.length; at++)
    values[at] = seen[at] === 0 ? Number.NaN : values[at] / queries[Math.floor(at / columns)];
  return { rows, columns, values };
}

/** How many dots wide `count` cells are in room for `room`: whole ones where that fills it. */
export function fitted(count: number, room: number): number {
  const whole = Math.floor(room / count) * count;
  return whole >= WHOLE * room ? whole : room;
}

/** What is drawn stays until something else is drawn over it: nothing flickers while somebody types. */
function resize(canvas: HTMLCanvasElement, width: number, height: number): void {
  if (canvas.width === width && canvas.height === height) return;
  const before = document.createElement("canvas");
  const known = canvas.width > 0 && canvas.height > 0;
  if (known) {
    before.width = canvas.width;
    before.height = canvas.height;
    before.getContext("2d")?.drawImage(canvas, 0, 0);
  }
  canvas.width = width;
  canvas.height = height;
  if (known) canvas.getContext("2d")?.drawImage(before, 0, 0, width, height);
}

export class Thumbnails {
  private readonly held = new Map<Element, Held>();
  private readonly behind = new Set<Held>(); // drawn and not near
  private readonly waiting: Task[] = [];
  private readonly loaded: (Task & { cells: Cells | null })[] = [];
  private readonly brush = document.createElement("canvas");
  private version = 0;
  private loading = 0;
  private scheduled = false;
  private timer = 0;
  private looked = false;
  private readonly observer = new IntersectionObserver((entries) => this.moved(entries), {
    rootMargin: NEAR,
  });

  /** `settled` is called once, when all that is seen at first is drawn. */
  constructor(private settled: (() => void) | null) {}

  /** From now on these lines are drawn whenever they are near, and no others; a canvas that stays is not emptied. */
  show(lines: Line[]): void {
    this.observer.disconnect();
    const kept = new Set(lines.map((line) => line.canvas));
    for (const line of this.held.values()) this.release(line, kept.has(line.canvas));
    this.held.clear();
    this.version++;
    this.waiting.length = 0;
    for (const line of lines) {
      this.held.set(line.element, { ...line, near: false, drawn: false });
      this.observer.observe(line.element);
    }
    if (lines.length > 0) return;
    this.looked = true; // nothing is to be drawn: what waits for the first picture need not wait
    this.schedule();
  }

  /** What is near is drawn anew: there are other maps, or other colours. What was there stays until then. */
  again(): void {
    this.version++;
    this.waiting.length = 0;
    for (const line of this.held.values()) {
      if (line.near) this.want(line);
      else if (line.drawn) this.release(line);
    }
  }

  private moved(entries: IntersectionObserverEntry[]): void {
    this.looked = true;
    for (const entry of entries) {
      const line = this.held.get(entry.target);
      if (line === undefined) continue;
      line.near = entry.isIntersecting;
      if (line.near) this.behind.delete(line);
      else if (line.drawn) this.behind.add(line);
      if (line.near && !line.drawn) this.want(line);
    }
    for (const oldest of this.behind) {
      if (this.behind.size <= KEPT) break;
      this.release(oldest);
    }
    this.schedule();
  }

  private want(line: Held): void {
    line.drawn = true;
    const { version } = this;
    for (const thumbnail of line.thumbnails) this.waiting.push({ line, thumbnail, version });
    this.schedule();
  }

  private release(line: Held, kept = false): void {
    this.behind.delete(line);
    line.drawn = false;
    if (!kept) line.canvas.width = line.canvas.height = 0;
    for (const { element } of line.thumbnails) {
      delete element.dataset.drawn;
      element.removeAttribute("title");
    }
  }

  private schedule(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => this.pump());
  }

  /** Before the next frame, as all that was asked for has come. */
  private pumpSoon(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.pump());
  }

  private pump(): void {
    this.scheduled = false;
    const end = performance.now() + BUDGET;
    const wanted = ({ line, version }: Task) => line.drawn && version === this.version;
    while (this.loaded.length > 0 && performance.now() < end) {
      const task = this.loaded.shift()!;
      if (wanted(task)) this.paint(task.line, task.thumbnail, task.cells);
    }
    while (this.waiting.length > 0 && this.loading < AT_ONCE && performance.now() < end) {
      const task = this.waiting.shift()!;
      if (!wanted(task)) continue;
      if (task.line.near) void this.start(task);
      else this.release(task.line); // it went by before it could be drawn
    }
    if (this.loaded.length > 0 || (this.waiting.length > 0 && this.loading < AT_ONCE)) this.schedule();
    const idle = this.loaded.length + this.waiting.length + this.loading === 0;
    if (idle && this.looked && this.settled !== null) {
      this.settled();
      this.settled = null;
    }
  }

  private async start(task: Task): Promise<void> {
    this.loading++;
    try {
      this.loaded.push({ ...task, cells: await task.thumbnail.load() });
    } catch (error) {
      const thumbnail = { ...task.thumbnail, lacking: "This map cannot be read." };
      this.loaded.push({ ...task, thumbnail, cells: null });
      reportError(error);
    } finally {
      this.loading--;
      if (this.loading === 0) this.pumpSoon();
      else this.schedule();
    }
  }

  private paint({ canvas, ...line }: Held, thumbnail: Thumbnail, cells: Cells | null): void {
    const ratio = window.devicePixelRatio || 1;
    const dots = (length: number) => Math.max(1, Math.round(length * ratio));
    resize(canvas, dots(line.width), dots(line.height));
    const [width, height] = [dots(thumbnail.width), dots(thumbnail.height)];
    const context = canvas.getContext("2d");
    if (context === null) return;
    context.imageSmoothingEnabled = false;
    const [left, top] = [Math.round(thumbnail.left * ratio), Math.round(thumbnail.top * ratio)];
    const half = Math.floor((thumbnail.apart * ratio) / 2);
    context.clearRect(left - half, 0, width + 2 * half, canvas.height); // what was here may have been larger
    const { element, lacking } = thumbnail;
    element.dataset.drawn = cells === null ? "empty" : "true";
    if (cells === null) {
      element.title = lacking;
      return;
    }
    element.removeAttribute("title");
    paintCells(this.brush, pooled(cells, height, width));
    context.drawImage(this.brush, left, top, width, height);
  }
}
