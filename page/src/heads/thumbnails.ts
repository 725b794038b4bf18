/**
 * Thumbnails that are drawn when they come near what is seen, a few per frame, and released when they are far.
 *
 * Nothing else is unpacked: a wall of 1,024 heads costs what a screen of it costs.
 */

import { cellsPicture } from "../shared/colours.ts";
import type { Cells } from "./packed.ts";

const NEAR = "200px 0px"; // beyond the window: drawn before it is seen
const KEPT = 240; // that are drawn and not near; beyond that, what was left first is released
const BUDGET = 8; // milliseconds of a frame
const AT_ONCE = 12; // maps that are being unpacked
const WHOLE = 0.85; // dots are whole where that fills so much of the room

interface Thumbnail {
  element: HTMLElement;
  load: () => Promise<Cells | null>;
  near: boolean;
  state: "" | "waiting" | "loading" | "drawn";
  version: number;
  address: string; // of its picture
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

export class Thumbnails {
  side = 64; // of the room for a map, in CSS dots
  private readonly held = new Map<Element, Thumbnail>();
  private readonly waiting: Thumbnail[] = [];
  private readonly loaded: { thumbnail: Thumbnail; cells: Cells | null; version: number }[] = [];
  private loading = 0;
  private scheduled = false;
  private looked = false;
  private readonly behind = new Set<Thumbnail>(); // drawn and not near
  private readonly observer = new IntersectionObserver((entries) => this.moved(entries), {
    rootMargin: NEAR,
  });

  /** `settled` is called once, when all that is seen at first is drawn. */
  constructor(private settled: (() => void) | null) {}

  /** From now on this element shows these cells, whenever it is near. */
  add(element: HTMLElement, load: () => Promise<Cells | null>): void {
    this.held.set(element, { element, load, near: false, state: "", version: 0, address: "" });
    this.observer.observe(element);
  }

  /** None is held any more. */
  clear(): void {
    this.observer.disconnect();
    for (const thumbnail of this.held.values()) this.release(thumbnail);
    this.held.clear();
    this.waiting.length = 0;
  }

  /** What is drawn is drawn anew, in other colours or another size. */
  again(): void {
    for (const thumbnail of this.held.values()) {
      thumbnail.version++;
      if (thumbnail.near) this.want(thumbnail);
      else this.release(thumbnail);
    }
  }

  /** Nothing is to be drawn: what waits for the first picture need not wait. */
  nothing(): void {
    this.looked = true;
    this.schedule();
  }

  private moved(entries: IntersectionObserverEntry[]): void {
    this.looked = true;
    for (const entry of entries) {
      const thumbnail = this.held.get(entry.target);
      if (thumbnail === undefined) continue;
      thumbnail.near = entry.isIntersecting;
      if (thumbnail.near) this.behind.delete(thumbnail);
      else if (thumbnail.state === "drawn") this.behind.add(thumbnail);
      if (thumbnail.near && thumbnail.state === "") this.want(thumbnail);
    }
    for (const oldest of this.behind) {
      if (this.behind.size <= KEPT) break;
      this.release(oldest);
    }
    this.schedule();
  }

  private want(thumbnail: Thumbnail): void {
    if (thumbnail.state !== "waiting") this.waiting.push(thumbnail);
    thumbnail.state = "waiting";
    this.schedule();
  }

  private release(thumbnail: Thumbnail): void {
    this.behind.delete(thumbnail);
    if (thumbnail.state === "") return;
    thumbnail.version++;
    thumbnail.state = "";
    thumbnail.element.style.backgroundImage = "";
    URL.revokeObjectURL(thumbnail.address);
    thumbnail.address = "";
    delete thumbnail.element.dataset.drawn;
  }

  private schedule(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => this.pump());
  }

  private pump(): void {
    this.scheduled = false;
    const end = performance.now() + BUDGET;
    while (this.loaded.length > 0 && performance.now() < end) {
      const { thumbnail, cells, version } = this.loaded.shift()!;
      if (thumbnail.version === version) void this.paint(thumbnail, cells);
    }
    while (this.waiting.length > 0 && this.loading < AT_ONCE && performance.now() < end) {
      const thumbnail = this.waiting.shift()!;
      if (thumbnail.state !== "waiting") continue;
      if (thumbnail.near) void this.start(thumbnail);
      else this.release(thumbnail);
    }
    if (this.loaded.length > 0 || (this.waiting.length > 0 && this.loading < AT_ONCE)) this.schedule();
    const idle = this.loaded.length + this.waiting.length + this.loading === 0;
    if (idle && this.looked && this.settled !== null) {
      this.settled();
      this.settled = null;
    }
  }

  private async start(thumbnail: Thumbnail): Promise<void> {
    thumbnail.state = "loading";
    const { version } = thumbnail;
    this.loading++;
    try {
      this.loaded.push({ thumbnail, cells: await thumbnail.load(), version });
    } catch (error) {
      thumbnail.element.title = "this map cannot be read";
      reportError(error);
    } finally {
      this.loading--;
      this.schedule();
    }
  }

  private async paint(thumbnail: Thumbnail, cells: Cells | null): Promise<void> {
    const { element, version } = thumbnail;
    const ratio = window.devicePixelRatio || 1;
    const room = Math.max(1, Math.round(this.side * ratio));
    const tall = Math.max(1, Math.round(room * Number(element.dataset.tall ?? 1)));
    const nothing = { rows: 1, columns: 1, values: new Float32Array([Number.NaN]) };
    const small = cells === null ? nothing : pooled(cells, tall, room);
    const address = URL.createObjectURL(cellsPicture(small));
    const picture = new Image();
    picture.src = address;
    this.loading++;
    await picture.decode().catch(reportError); // shown when it is there, not before: nothing flickers
    this.loading--;
    this.schedule();
    if (thumbnail.version !== version) return URL.revokeObjectURL(address);
    URL.revokeObjectURL(thumbnail.address);
    thumbnail.address = address;
    thumbnail.state = "drawn";
    if (!thumbnail.near) this.behind.add(thumbnail);
    element.style.width = `${fitted(small.columns, room) / ratio}px`;
    element.style.height = `${fitted(small.rows, tall) / ratio}px`;
    element.style.backgroundImage = `url("${address}")`;
    element.dataset.drawn = "true";
  }
}
