/**
 * A map of a long text: positions on both sides, a part of it as large as the frame.
 *
 * Zoom: buttons, + − 0, control and wheel, a frame drawn with the mouse, a double click. Finer cells are unpacked when
 * somebody looks closer.
 */

import { paintCells } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { cellOf, counted, excerpt, type Hand, type Picture, type Scene, type Spot } from "./head_scene.ts";
import { mapDrawing } from "./picture_export.ts";

const LEFT = 66; // CSS pixels for positions
const TOP = 22;
const CLOSEST = 6; // cells across, at least
const DRAGGED = 6; // pixels from which on a press is a frame

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
  const source = document.createElement("canvas");

  const repaint = () => paintCells(source, cells, { most: scene.most });

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

  const box = (mark: HTMLElement, row: number | null, column: number | null) => {
    mark.hidden = row === null;
    if (row === null) return;
    const place = (
      name: "top" | "left",
      length: "height" | "width",
      at: number,
      count: number,
      from: number,
      size: number,
    ) => {
      const start = Math.max(0, ((at / count - from) / size) * side);
      const end = Math.min(side, (((at + 1) / count - from) / size) * side);
      if (end <= 0 || start >= side) mark.hidden = true;
      mark.style[name] = `${start}px`;
      mark.style[length] = `${Math.max(2, end - start)}px`;
    };
    place("top", "height", row, cells.rows, view.y, view.height);
    if (column === null) {
      mark.style.left = "0";
      mark.style.width = `${side}px`;
    } else place("left", "width", column, cells.columns, view.x, view.width);
  };

  const marks = () => {
    box(rowMark, pinned === null ? null : cellOf(pinned, cells.rows, call.queries), null);
    box(cellMark, spot?.row ?? null, spot?.column ?? null);
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
    across.replaceChildren(...ticks(view.x, view.width, call.keys, false));
    down.replaceChildren(...ticks(view.y, view.height, call.queries, true));
    const last = (start: number, size: number, total: number): [number, number] => [
      Math.floor(start * total),
      Math.max(Math.floor(start * total), Math.ceil((start + size) * total) - 1),
    ];
    const queries = last(view.y, view.height, call.queries);
    const keys = last(view.x, view.width, call.keys);
    const finest = cells === scene.cells ? "" : " (the finest available)";
    seen.textContent =
      `Shown: queries ${counted(queries[0])}–${counted(queries[1])}, keys ${counted(keys[0])}–${counted(keys[1])}` +
      ` of ${counted(call.queries)} × ${counted(call.keys)}, in ${counted(rows)} × ${counted(columns)} cells${finest}.`;
    const queryWords = excerpt(call.queryTokens, queries, 10);
    const keyWords = excerpt(call.keyTokens, keys, 10);
    sample.textContent = queryWords || keyWords ? `Queries: “${queryWords}”; keys: “${keyWords}”` : "";
    closer.disabled = view.width <= least() * 1.01;
    farther.disabled = view.width >= 1 && view.height >= 1;
    everything.disabled = farther.disabled;
    marks();
    moved(keys);
  };

  const least = () => Math.min(1, CLOSEST / Math.min(cells.columns, cells.rows));

  const show = (wanted: Window) => {
    const size = (length: number) => Math.min(1, Math.max(least(), length));
    const width = size(wanted.width);
    const height = size(wanted.height);
    const inside = (at: number, length: number) => Math.min(1 - length, Math.max(0, at));
    view = { width, height, x: inside(wanted.x, width), y: inside(wanted.y, height) };
    if (width < 1) refine();
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
    const row = Math.min(cells.rows - 1, Math.floor((view.y + y * view.height) * cells.rows));
    const column = Math.min(cells.columns - 1, Math.floor((view.x + x * view.width) * cells.columns));
    return { row, column, cells };
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
    hand.pin(Math.ceil((at.row * call.queries) / cells.rows));
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
    const [top, left] = [
      part(view.y, view.height, cells.rows)[0],
      part(view.x, view.width, cells.columns)[0],
    ];
    const clamp = (at: number, count: number) => Math.min(count - 1, Math.max(0, at));
    const known = spot?.row != null && spot.column !== null && spot.cells === cells ? spot : null;
    const row = known ? clamp((known.row ?? 0) + dy, cells.rows) : top;
    const column = known ? clamp((known.column ?? 0) + dx, cells.columns) : left;
    const follow = (at: number, count: number, start: number, size: number) =>
      at / count < start ? at / count : (at + 1) / count > start + size ? (at + 1) / count - size : start;
    const x = follow(column, cells.columns, view.x, view.width);
    const y = follow(row, cells.rows, view.y, view.height);
    if (x !== view.x || y !== view.y) show({ ...view, x, y });
    hand.point({ row, column, cells });
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
        hand.pin(Math.ceil((spot.row * call.queries) / cells.rows));
      } else return false;
      return true;
    },
    mark(nowPinned, nowSpot) {
      pinned = nowPinned;
      spot = nowSpot?.cells === cells ? nowSpot : null;
      marks();
    },
    paint() {
      repaint();
      draw();
    },
    drawn: () =>
      mapDrawing(scene, cells, {
        rows: part(view.y, view.height, cells.rows),
        columns: part(view.x, view.width, cells.columns),
      }),
  };
}
