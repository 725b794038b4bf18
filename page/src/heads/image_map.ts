/** Attention over an image: the weights of the selected patch are drawn over the picture. */

import { el, svg } from "../shared/elements.ts";
import { styled } from "../shared/theme.ts";
import {
  type Hand,
  largestOf,
  named,
  type Picture,
  ranked,
  type Scene,
  type Spot,
  short,
} from "./head_scene.ts";
import type { Cells } from "./packed.ts";
import type { ImageData } from "./page_data.ts";
import { framed } from "./picture_export.ts";

const LAID = [255, 106, 0]; // is seen on images, dark and light

/** The patches that a query looks at, as cells of the image; what stands before them is left out. */
function overlay(scene: Scene, image: ImageData, query: number): Cells {
  const { rows, columns, first } = image;
  const start = query * scene.cells.columns + first;
  return { rows, columns, values: scene.cells.values.slice(start, start + rows * columns) };
}

/** Weights over an image: the weaker, the more of the image is seen. */
function lay(canvas: HTMLCanvasElement, over: Cells, most: number): void {
  canvas.width = over.columns;
  canvas.height = over.rows;
  const brush = canvas.getContext("2d");
  if (brush === null) return;
  const image = brush.createImageData(over.columns, over.rows);
  for (const [at, weight] of over.values.entries()) {
    const strength = Number.isNaN(weight) ? 0 : 0.86 * Math.sqrt(weight / (most || 1));
    image.data.set([...LAID, Math.round(255 * strength)], 4 * at);
  }
  brush.putImageData(image, 0, 0);
}

export function imageMap(scene: Scene, image: ImageData, hand: Hand, room: number): Picture {
  const { rows, columns, first, src } = image;
  const { cells, call } = scene;
  const patch = Math.max(12, Math.floor(Math.min(room - 8, 460) / columns));
  const [width, height] = [patch * columns, patch * rows];
  const shot = el("img", { src, alt: "The input image, divided into patches", draggable: "false" });
  const canvas = el("canvas", { class: "over" });
  const own = el("div", { class: "patch own", hidden: true });
  const seen = el("div", { class: "patch", hidden: true });
  const grid = el("div", { class: "patches" });
  const field = el("div", { class: "image-field" }, shot, canvas, grid, seen, own);
  for (const made of [shot, canvas, grid, field]) {
    made.style.width = `${width}px`;
    made.style.height = `${height}px`;
  }
  grid.style.backgroundSize = `${patch}px ${patch}px`;
  for (const mark of [own, seen]) {
    mark.style.width = `${patch}px`;
    mark.style.height = `${patch}px`;
  }
  const others = [...Array(call.queries).keys()].filter((q) => q < first || q >= first + rows * columns);
  const buttons = others.slice(0, 8).map((query) => {
    const name = call.queryTokens?.[query] ?? `position ${query}`;
    const button = el("button", { type: "button", "aria-pressed": "false" }, name);
    button.addEventListener("click", () => hand.pin(query));
    return button;
  });
  const beside =
    buttons.length === 0
      ? null
      : el("p", { class: "others" }, el("span", null, "Tokens outside the image: "), ...buttons);
  const frame = el(
    "div",
    {
      class: "image-map",
      tabindex: "0",
      role: "application",
      "aria-label": "The image in patches. Arrow keys select a patch, Escape clears the selection.",
    },
    field,
  );
  const note = el("p", { class: "quiet" });
  const element = el("div", null, beside, frame, note);
  let query: number | null = null;

  const patchAt = (event: MouseEvent): number | null => {
    const box = field.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / patch);
    const column = Math.floor((event.clientX - box.left) / patch);
    const inside = row >= 0 && row < rows && column >= 0 && column < columns;
    const at = first + row * columns + column;
    return inside && at < call.keys ? at : null;
  };
  let pinnedNow: number | null = null;
  const pointed = (event: MouseEvent): Spot | null => {
    const at = patchAt(event);
    if (at === null) return null;
    return pinnedNow === null ? { row: at, column: null, cells } : { row: pinnedNow, column: at, cells };
  };
  frame.addEventListener("pointermove", (event) => hand.point(pointed(event)));
  frame.addEventListener("pointerleave", () => hand.point(null));
  frame.addEventListener("click", (event) => {
    const at = patchAt(event);
    if (at !== null && at < call.queries) hand.pin(at);
  });

  const locate = (mark: HTMLElement, position: number | null) => {
    const at = position === null ? -1 : position - first;
    mark.hidden = at < 0 || at >= rows * columns;
    if (mark.hidden) return;
    mark.style.left = `${(at % columns) * patch}px`;
    mark.style.top = `${Math.floor(at / columns) * patch}px`;
  };
  const draw = () => {
    canvas.hidden = query === null;
    if (query === null) {
      note.textContent =
        "Point at a patch to see which patches it attends to; a click or the arrow keys select it.";
      return;
    }
    const over = overlay(scene, image, query);
    const most = largestOf(over.values);
    lay(canvas, over, most);
    const before = ranked(cells, query).filter(
      ({ column }) => column < first || column >= first + rows * columns,
    );
    const rest = before.reduce((sum, { weight }) => sum + weight, 0);
    const outside = before.length === 0 ? "" : ` Weight on tokens outside the image: ${short(rest)}.`;
    note.textContent = `Weights of ${named(call.queryTokens, query)}. Strongest colour: ${short(most)}.${outside}`;
  };
  const mark = (pinned: number | null, spot: Spot | null) => {
    pinnedNow = pinned;
    query = pinned ?? spot?.row ?? null;
    draw();
    locate(own, query);
    locate(seen, spot?.column ?? null);
    for (const [i, button] of buttons.entries()) {
      button.setAttribute("aria-pressed", String(others[i] === query));
    }
  };
  draw();
  return {
    element,
    mark,
    paint: draw,
    drawn() {
      const size = { width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" };
      const body = svg("g", null, svg("image", { ...size, href: src }));
      let most = 1;
      if (query !== null) {
        most = largestOf(overlay(scene, image, query).values);
        body.append(svg("image", { ...size, href: canvas.toDataURL("image/png") }));
        const at = query - first;
        if (at >= 0 && at < rows * columns) {
          const [x, y] = [(at % columns) * patch, Math.floor(at / columns) * patch];
          const edge = { x, y, width: patch, height: patch, fill: "none", "stroke-width": 3 };
          body.append(svg("rect", { ...edge, stroke: styled("--accent") }));
        }
      }
      body.append(svg("rect", { width, height, fill: "none", stroke: styled("--line") }));
      const name = query === null ? "" : named(call.queryTokens, query);
      const whose = name ? `weights of ${name}; strongest colour: ${short(most)}` : "no patch selected";
      return framed(scene, body, width, height, whose, null);
    },
  };
}
