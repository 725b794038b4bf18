/**
 * A map of a long text: positions on both sides, a part of it as large as the frame.
 *
 * Zoom: buttons, + − 0, control and wheel, a frame drawn with the mouse, a double click. Finer cells are unpacked when
 * somebody looks closer; of a map that Python serves, the part that is seen is fetched in full detail and drawn over it.
 */

import { paintCells } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import {
  columnOf,
  columnRange,
  counted,
  excerpt,
  type Hand,
  isExact,
  type Picture,
  regionOf,
  rowOf,
  rowRange,
  type Scene,
  type Spot,
} from "./head_scene.ts";
import type { Cells, Region } from "./packed.ts";
import { mapDrawing } from "./picture_export.ts";

const LEFT = 66; // CSS pixels for positions
const TOP = 22;
const CLOSEST = 6; // cells across, at least
const DRAGGED = 6; // pixels from which on a press is a frame
const SETTLED = 150; // milliseconds without another zoom, before a region is asked for

/** Shares of the map, from 0 to 1: what is seen of it. */
interface Window {
  x: number;
  y: number;
  width: number;
  height: number;
}

const WHOLE: Window = { x: 0, y: 0, width: 1, height: 1 };

export interface Zoomed extends Picture {
  key(event: KeyboardEvent): boolean; // whether it was for the map
  zoom(by: number): void;
  whole(): void;
  buttons: HTMLElement;
}

export function zoomedMap(
  scene: Scene,
  hand: Hand,
  room: number,
  moved: (keys: [number, number]) => void,
): Zoomed {
  const { call } = scene;
  const side = Math.max(220, Math.min(room - LEFT - 8, 560));
  const canvas = el("canvas", { class: "cells" });
  const cellMark = el("div", { class: "cell-mark", hidden: true });
  const rowMark = el("div", { class: "row-mark pinned", hidden: true });
  const band = el("div", { class: "band", hidden: true });
  const field = el("div", { class: "cell-field zoomed" }, canvas, rowMark, cellMark, band);
  const across = el("div", { class: "ticks across-ticks", "aria-hidden": "true" });
  const down = el("div", { class: "ticks down-ticks", "aria-hidden": "true" });
  const plane = el("div", { class: "plane" }, el("div", { class: "corner" }), across, down, field);
  plane.style.gridTemplateColumns = `${LEFT}px ${side}px`;
  plane.style.gridTemplateRows = `${TOP}px ${side}px`;
  for (const made of [field, canvas]) {
    made.style.width = `${side}px`;
    made.style.height = `${side}px`;
  }
  const element = el(
    "div",
    {
      class: "map",
      tabindex: "0",
      role: "application",
      "aria-label":
        "Attention map, queries in rows, keys in columns. Plus and minus zoom, 0 shows the whole map, arrow keys scroll, Shift and an arrow key move the selected cell.",
    },
    plane,
  );
  const seen = el("p", { class: "quiet region" });
  const sample = el("p", { class: "quiet region-tokens" });
  const closer = el("button", { type: "button", class: "zoom-in" }, "+ zoom in");
  const farther = el("button", { type: "button", class: "zoom-out" }, "− zoom out");
  const everything = el("button", { type: "button", class: "zoom-all" }, "0 whole map");
  const buttons = el(
    "span",
    { class: "zooms", role: "group", "aria-label": "Zoom" },
    closer,
    farther,
    everything,
  );
  const outer = el("div", null, element, seen, sample);

  let cells = scene.cells;
  let view = WHOLE;
  let spot: Spot | null = null;
  let pinned: number | null = null;
  let asked = false; // for finer cells
  let detail: Cells | null = null; // of a region, drawn over `cells`
  let timer = 0;
  let request: AbortController | null = null; // for a region
  const source = document.createElement("canvas");
  const detailSource = document.createElement("canvas");

  const repaint = () => {
    paintCells(source, cells, { most: scene.most });
    if (detail !== null) paintCells(detailSource, detail, { most: scene.most });
  };

  /** The positions that can be seen, [from, to). */
  const visible = (): Region => {
    const positions = (start: number, size: number, total: number): [number, number] => [
      Math.floor(start * total + 1e-9),
      Math.min(
        total,
        Math.max(Math.floor(start * total + 1e-9) + 1, Math.ceil((start + size) * total - 1e-9)),
      ),
    ];
    return {
      queries: positions(view.y, view.height, call.queries),
      keys: positions(view.x, view.width, call.keys),
    };
  };

  const inside = (inner: [number, number], outer: [number, number]) =>
    inner[0] >= outer[0] && inner[1] <= outer[1];

  /** Whether the cells of the region cover all that can be seen. */
  const coversView = (region: Region): boolean => {
    const { queries, keys } = visible();
    return inside(queries, region.queries) && inside(keys, region.keys);
  };

  /** The finest cells that are drawn at a position. */
  const finestAt = (query: number, key: number): Cells => {
    if (detail === null) return cells;
    return rowOf(scene, detail, query) === null || columnOf(scene, detail, key) === null ? cells : detail;
  };

  /** Ask for what can be seen in full detail, a moment after the last zoom; the newest wins. */
  const askRegion = () => {
    clearTimeout(timer);
    request?.abort();
    request = null;
    if (scene.written || !call.hasRegions) return;
    if (view.width >= 1 && view.height >= 1) {
      detail = null;
      return;
    }
    const region = visible();
    if (detail !== null && coversView(regionOf(scene, detail))) {
      const drawn = regionOf(scene, detail);
      const same = inside(drawn.queries, region.queries) && inside(drawn.keys, region.keys);
      if (same || isExact(scene, detail)) return;
    }
    timer = window.setTimeout(() => {
      if (!outer.isConnected) return;
      request = new AbortController();
      const { signal } = request;
      void call.region(scene.head, region, signal).then((found) => {
        if (found === null || signal.aborted || !outer.isConnected) return;
        detail = found;
        repaint();
        draw();
      });
    }, SETTLED);
  };

  const refine = () => {
    if (asked || scene.written || !call.hasFiner(scene.head)) return;
    asked = true;
    void call.finer(scene.head).then((finer) => {
      if (finer === null) return;
      cells = finer;
      spot = null;
      repaint();
      draw();
    });
  };

  /** The first and the last cell that can be seen, of `count`. */
  const part = (start: number, size: number, count: number): [number, number] => [
    Math.floor(start * count + 1e-9),
    Math.max(Math.floor(start * count + 1e-9) + 1, Math.ceil((start + size) * count - 1e-9)),
  ];

  const ticks = (start: number, size: number, total: number, vertical: boolean) => {
    const raw = (size * total) / 5;
    const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1)));
    const step = Math.max(1, power * ([1, 2, 5, 10].find((n) => n * power >= raw) ?? 10));
    const made: HTMLElement[] = [];
    for (let at = Math.ceil((start * total) / step) * step; at < (start + size) * total; at += step) {
      const tick = el("span", null, counted(at));
      tick.style[vertical ? "top" : "left"] = `${((at / total - start) / size) * side}px`;
      made.push(tick);
    }
    return made;
  };

  /** Where a cell lies on a side of the map, in shares of it. */
  const extent = (at: number, count: number, [from, to]: [number, number], total: number) =>
    [at, at + 1].map((edge) => (from + (edge * (to - from)) / count) / total);
  const rowExtent = (grid: Cells, row: number) =>
    extent(row, grid.rows, regionOf(scene, grid).queries, call.queries);
  const columnExtent = (grid: Cells, column: number) =>
    extent(column, grid.columns, regionOf(scene, grid).keys, call.keys);

  const box = (mark: HTMLElement, grid: Cells, row: number | null, column: number | null) => {
    mark.hidden = row === null;
    if (row === null) return;
    const place = (
      name: "top" | "left",
      length: "height" | "width",
      [first, last]: number[],
      from: number,
      size: number,
    ) => {
      const start = Math.max(0, ((first - from) / size) * side);
      const end = Math.min(side, ((last - from) / size) * side);
      if (end <= 0 || start >= side) mark.hidden = true;
      mark.style[name] = `${start}px`;
      mark.style[length] = `${Math.max(2, end - start)}px`;
    };
    place("top", "height", rowExtent(grid, row), view.y, view.height);
    if (column === null) {
      mark.style.left = "0";
      mark.style.width = `${side}px`;
    } else place("left", "width", columnExtent(grid, column), view.x, view.width);
  };

  const marks = () => {
    const row = pinned === null || detail === null ? null : rowOf(scene, detail, pinned);
    if (detail !== null && row !== null) box(rowMark, detail, row, null);
    else box(rowMark, cells, pinned === null ? null : rowOf(scene, cells, pinned), null);
    box(cellMark, spot?.cells ?? cells, spot?.row ?? null, spot?.column ?? null);
  };

  /** The region's cells in their place, as far as they can be seen. */
  const drawDetail = (brush: CanvasRenderingContext2D, dots: number) => {
    delete canvas.dataset.region;
    if (detail === null) return;
    const { queries, keys } = regionOf(scene, detail);
    const shownPart = (
      start: number,
      size: number,
      [from, to]: [number, number],
      total: number,
      count: number,
    ) => {
      const first = Math.max(start, from / total);
      const last = Math.min(start + size, to / total);
      const cell = (share: number) => ((share * total - from) / (to - from)) * count;
      return {
        from: cell(first),
        length: cell(last) - cell(first),
        to: ((first - start) / size) * dots,
        room: ((last - first) / size) * dots,
      };
    };
    const x = shownPart(view.x, view.width, keys, call.keys, detail.columns);
    const y = shownPart(view.y, view.height, queries, call.queries, detail.rows);
    if (x.length <= 0 || y.length <= 0) return;
    brush.drawImage(detailSource, x.from, y.from, x.length, y.length, x.to, y.to, x.room, y.room);
    canvas.dataset.region = `${queries.join("-")},${keys.join("-")}`;
  };

  const draw = () => {
    const dots = Math.round(side * Math.min(2, devicePixelRatio));
    canvas.width = dots;
    canvas.height = dots;
    const brush = canvas.getContext("2d");
    if (brush === null) return;
    brush.imageSmoothingEnabled = false;
    const { columns, rows } = cells;
    brush.drawImage(
      source,
      view.x * columns, view.y * rows, view.width * columns, view.height * rows,
      0, 0, dots, dots,
    ); // biome-ignore format: from and to
    drawDetail(brush, dots);
    across.replaceChildren(...ticks(view.x, view.width, call.keys, false));
    down.replaceChildren(...ticks(view.y, view.height, call.queries, true));
    const last = (start: number, size: number, total: number): [number, number] => [
      Math.floor(start * total),
      Math.max(Math.floor(start * total), Math.ceil((start + size) * total) - 1),
    ];
    const queries = last(view.y, view.height, call.queries);
    const keys = last(view.x, view.width, call.keys);
    const finest = cells === scene.cells ? "" : " (the finest available)";
    const covering = detail !== null && coversView(regionOf(scene, detail)) ? detail : null;
    const count = covering ?? cells;
    seen.textContent =
      `Shown: queries ${counted(queries[0])}–${counted(queries[1])}, keys ${counted(keys[0])}–${counted(keys[1])}` +
      ` of ${counted(call.queries)} × ${counted(call.keys)}, in ${counted(count.rows)} × ${counted(count.columns)} cells${finest}.`;
    const queryWords = excerpt(call.queryTokens, queries, 10);
    const keyWords = excerpt(call.keyTokens, keys, 10);
    sample.textContent = queryWords || keyWords ? `Queries: “${queryWords}”; keys: “${keyWords}”` : "";
    closer.disabled = view.width <= least() * 1.01;
    farther.disabled = view.width >= 1 && view.height >= 1;
    everything.disabled = farther.disabled;
    marks();
    moved(keys);
  };

  const least = () => {
    const regions = call.hasRegions && !scene.written;
    const count = regions ? Math.min(call.queries, call.keys) : Math.min(cells.columns, cells.rows);
    return Math.min(1, CLOSEST / count);
  };

  const show = (wanted: Window) => {
    const size = (length: number) => Math.min(1, Math.max(least(), length));
    const width = size(wanted.width);
    const height = size(wanted.height);
    const start = (at: number, length: number) => Math.min(1 - length, Math.max(0, at));
    view = { width, height, x: start(wanted.x, width), y: start(wanted.y, height) };
    if (width < 1) refine();
    askRegion();
    draw();
  };

  /** Closer or farther; what lies at the share `x`, `y` of the frame stays where it is. */
  const zoomAt = (by: number, x: number, y: number) => {
    const width = Math.min(1, Math.max(least(), view.width / by));
    const height = Math.min(1, Math.max(least(), view.height / by));
    show({ width, height, x: view.x + (view.width - width) * x, y: view.y + (view.height - height) * y });
  };

  const shares = (event: MouseEvent): [number, number] => {
    const edges = field.getBoundingClientRect();
    return [(event.clientX - edges.left) / side, (event.clientY - edges.top) / side];
  };
  const under = (event: MouseEvent): Spot | null => {
    const [x, y] = shares(event);
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
    const [down, right] = [view.y + y * view.height, view.x + x * view.width];
    const at = (share: number, total: number) => Math.min(total - 1, Math.floor(share * total));
    const finest = finestAt(at(down, call.queries), at(right, call.keys));
    const { queries, keys } = regionOf(scene, finest);
    const cell = (share: number, total: number, [from, to]: [number, number], count: number) =>
      Math.min(count - 1, Math.max(0, Math.floor(((share * total - from) / (to - from)) * count)));
    const row = cell(down, call.queries, queries, finest.rows);
    const column = cell(right, call.keys, keys, finest.columns);
    return { row, column, cells: finest };
  };

  let pressed: [number, number] | null = null;
  const framedBy = (event: MouseEvent) => {
    const [x, y] = shares(event).map((share) => Math.min(1, Math.max(0, share)));
    const [x0, y0] = pressed ?? [x, y];
    return { x: Math.min(x, x0), y: Math.min(y, y0), width: Math.abs(x - x0), height: Math.abs(y - y0) };
  };
  field.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const [x, y] = shares(event);
    pressed = [x, y];
    field.setPointerCapture(event.pointerId);
  });
  field.addEventListener("pointermove", (event) => {
    if (pressed !== null) {
      const drawn = framedBy(event);
      band.hidden = Math.max(drawn.width, drawn.height) * side < DRAGGED;
      band.style.left = `${drawn.x * side}px`;
      band.style.top = `${drawn.y * side}px`;
      band.style.width = `${drawn.width * side}px`;
      band.style.height = `${drawn.height * side}px`;
    }
    hand.point(under(event));
  });
  let dragged = false;
  field.addEventListener("pointerup", (event) => {
    const drawn = framedBy(event);
    dragged = pressed !== null && Math.max(drawn.width, drawn.height) * side >= DRAGGED;
    pressed = null;
    band.hidden = true;
    if (!dragged) return;
    const { x, y, width, height } = view;
    show({
      x: x + drawn.x * width,
      y: y + drawn.y * height,
      width: drawn.width * width,
      height: drawn.height * height,
    });
  });
  field.addEventListener("pointercancel", () => {
    pressed = null;
    band.hidden = true;
  });
  field.addEventListener("pointerleave", () => hand.point(null));
  field.addEventListener("click", (event) => {
    if (dragged) {
      dragged = false;
      return;
    }
    const at = under(event);
    if (at === null || at.row === null) return;
    hand.pin(rowRange(scene, at.cells, at.row)[0]);
    hand.point(at);
  });
  field.addEventListener("dblclick", (event) => zoomAt(2, ...shares(event)));
  element.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoomAt(2 ** (-event.deltaY / 240), ...shares(event));
    },
    { passive: false },
  );

  const zoom = (by: number) => zoomAt(by, 0.5, 0.5);
  const whole = () => show(WHOLE);
  closer.addEventListener("click", () => zoom(2));
  farther.addEventListener("click", () => zoom(0.5));
  everything.addEventListener("click", whole);

  /** The cell that is read, one step on; the view follows it. */
  const step = (dx: number, dy: number) => {
    const clamp = (at: number, count: number) => Math.min(count - 1, Math.max(0, at));
    /** The position beside a range, or its first. */
    const next = ([first, last]: [number, number], by: number, total: number) =>
      clamp(by > 0 ? last + 1 : by < 0 ? first - 1 : first, total);
    let grid = cells;
    let row = part(view.y, view.height, cells.rows)[0];
    let column = part(view.x, view.width, cells.columns)[0];
    const { queries, keys } = visible();
    let position: [number, number] | null =
      finestAt(queries[0], keys[0]) === cells ? null : [queries[0], keys[0]];
    if (spot !== null && spot.row !== null && spot.column !== null)
      position = [
        next(rowRange(scene, spot.cells, spot.row), dy, call.queries),
        next(columnRange(scene, spot.cells, spot.column), dx, call.keys),
      ];
    if (position !== null) {
      grid = finestAt(...position);
      row = rowOf(scene, grid, position[0]) ?? row;
      column = columnOf(scene, grid, position[1]) ?? column;
    }
    const follow = ([first, last]: number[], start: number, size: number) =>
      first < start - 1e-9 ? first : last > start + size + 1e-9 ? last - size : start;
    const x = follow(columnExtent(grid, column), view.x, view.width);
    const y = follow(rowExtent(grid, row), view.y, view.height);
    if (x !== view.x || y !== view.y) show({ ...view, x, y });
    hand.point({ row, column, cells: grid });
  };

  const ARROWS: Record<string, [number, number]> = {
    ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1],
  }; // biome-ignore format: a table

  repaint();
  draw();
  return {
    element: outer,
    buttons,
    zoom,
    whole,
    key(event) {
      if (event.key === "+" || event.key === "=") zoom(2);
      else if (event.key === "-") zoom(0.5);
      else if (event.key === "0") whole();
      else if (event.key in ARROWS) {
        const [dx, dy] = ARROWS[event.key];
        const still = view.width >= 1 && view.height >= 1;
        if (event.shiftKey || still) step(dx, dy);
        else show({ ...view, x: view.x + (dx * view.width) / 4, y: view.y + (dy * view.height) / 4 });
      } else if (event.key === "Enter" && spot?.row != null) {
        hand.pin(rowRange(scene, spot.cells, spot.row)[0]);
      } else return false;
      return true;
    },
    mark(nowPinned, nowSpot) {
      pinned = nowPinned;
      spot = nowSpot;
      marks();
    },
    paint() {
      repaint();
      draw();
    },
    drawn() {
      if (detail !== null && coversView(regionOf(scene, detail))) {
        const { queries, keys } = visible();
        return mapDrawing(scene, detail, {
          rows: [rowOf(scene, detail, queries[0])!, rowOf(scene, detail, queries[1] - 1)! + 1],
          columns: [columnOf(scene, detail, keys[0])!, columnOf(scene, detail, keys[1] - 1)! + 1],
        });
      }
      return mapDrawing(scene, cells, {
        rows: part(view.y, view.height, cells.rows),
        columns: part(view.x, view.width, cells.columns),
      });
    },
  };
}
