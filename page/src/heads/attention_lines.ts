/** Attention as lines: queries on the left, keys on the right, a line as dark as its weight. */

import { css, parsed } from "../shared/colours.ts";
import { el, svg } from "../shared/elements.ts";
import { isDark, styled } from "../shared/theme.ts";
import { counted, type Hand, type Picture, ranked, type Scene, type Spot, short } from "./head_scene.ts";
import { clipped, framed, label } from "./picture_export.ts";
import { largest } from "./sources.ts";

const LINE = 22; // CSS pixels from token to token
const MOST_LINES = 2000;

interface Strand {
  query: number;
  key: number;
  weight: number;
}

export function attentionLines(scene: Scene, hand: Hand, room: number): Picture {
  const { cells, call } = scene;
  const width = Math.max(300, Math.min(room - 6, 620));
  const side = Math.min(150, width * 0.32); // where the tokens end and lines begin
  const height = Math.max(call.queries, call.keys) * LINE + 8;
  const middle = (at: number) => at * LINE + LINE / 2 + 4;
  const all = largest(cells, MOST_LINES);
  let pinned: number | null = null;
  let spot: Spot | null = null;

  const fit = Math.floor((side - 12) / 7.6); // letters
  const name = (tokens: string[] | null, at: number) => clipped(tokens?.[at] ?? String(at), fit);
  const left = Array.from({ length: call.queries }, (_, q) =>
    label(side - 8, middle(q) + 4, name(call.queryTokens, q), { anchor: "end", size: 13 }),
  );
  const right = Array.from({ length: call.keys }, (_, k) =>
    label(width - side + 8, middle(k) + 4, name(call.keyTokens, k), { size: 13 }),
  );
  const backs = svg("g");
  const strands = svg("g", { fill: "none", "stroke-width": 2 });
  const picture = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    backs,
    strands,
    svg("g", null, ...left),
    svg("g", null, ...right),
  );
  const note = el("p", { class: "quiet" });
  const frame = el(
    "div",
    {
      class: "lines",
      tabindex: "0",
      role: "application",
      "aria-label":
        "Lines from queries on the left to keys on the right. Up and down select a token, Escape clears the selection.",
    },
    picture,
  );
  const element = el("div", null, frame, note);

  const chosen = (): Strand[] => {
    const row = spot?.row ?? (spot?.column == null ? pinned : null);
    if (row !== null)
      return ranked(cells, row).map(({ column, weight }) => ({ query: row, key: column, weight }));
    const column = spot?.column ?? null;
    if (column === null) return all;
    return Array.from({ length: cells.rows }, (_, query) => ({
      query,
      key: column,
      weight: cells.values[query * cells.columns + column],
    })).filter(({ weight }) => weight > 0);
  };

  const draw = () => {
    const accent = styled("--accent");
    const ink = styled("--ink");
    const own = (at: number) => (scene.most > 0 ? Math.min(1, at / scene.most) : 0);
    const drawn = chosen();
    const focus = drawn !== all;
    const bend = (width - 2 * side) * 0.4;
    const paths = drawn
      .filter(({ weight }) => weight > 0)
      .map(({ query, key, weight }) => {
        const [from, to] = [middle(query), middle(key)];
        const d = `M${side} ${from}C${side + bend} ${from} ${width - side - bend} ${to} ${width - side} ${to}`;
        return svg("path", { d, stroke: accent, "stroke-opacity": own(weight).toFixed(4) });
      });
    strands.replaceChildren(...paths);
    const column = spot?.column ?? null;
    const row = spot?.row ?? (column === null ? pinned : null);
    const boxes: SVGElement[] = [];
    const box = (x: number, at: number, strength: number) =>
      boxes.push(
        svg("rect", {
          x, y: at * LINE + 4, width: side - 2, height: LINE - 2, rx: 4, fill: css(parsed(accent)),
          "fill-opacity": (strength * 0.45).toFixed(4),
        }), // biome-ignore format: attributes
      );
    if (focus) {
      for (const { query, key, weight } of drawn) {
        if (row !== null) box(width - side + 2, key, own(weight));
        else box(0, query, own(weight));
        if (own(weight) < 0.01) continue;
        const [x, at, anchor] =
          row !== null ? [width - 4, key, "end" as const] : [4, query, "start" as const];
        boxes.push(label(x, middle(at) + 4, short(weight), { size: 11, anchor }));
      }
      if (row !== null) box(0, row, 0.8);
      else if (column !== null) box(width - side + 2, column, 0.8);
    }
    backs.replaceChildren(...boxes);
    for (const [i, text] of left.entries()) {
      text.setAttribute("fill", ink);
      text.setAttribute("font-weight", i === row ? "700" : "400");
    }
    for (const [i, text] of right.entries()) {
      text.setAttribute("fill", ink);
      text.setAttribute("font-weight", i === column ? "700" : "400");
    }
    const cut = !focus && all.length === MOST_LINES;
    note.textContent = cut
      ? `Only the ${counted(MOST_LINES)} largest weights are drawn; select a token to see all of its lines.`
      : focus
        ? "Only the lines of the selected token are drawn. Escape shows all lines."
        : `${isDark() ? "Brighter" : "Darker"} lines have larger weights. Point at a token to see only its lines; click to select it.`;
  };

  const under = (event: MouseEvent): Spot => {
    const frameBox = picture.getBoundingClientRect();
    const at = Math.floor((event.clientY - frameBox.top - 4) / LINE);
    const x = event.clientX - frameBox.left;
    const query = x < side && at >= 0 && at < call.queries ? at : null;
    const key = x > width - side && at >= 0 && at < call.keys ? at : null;
    return { row: query, column: key, cells };
  };
  frame.addEventListener("pointermove", (event) => {
    const now = under(event);
    const same = now.row === (spot?.row ?? null) && now.column === (spot?.column ?? null);
    if (!same) hand.point(now.row === null && now.column === null ? null : now);
  });
  frame.addEventListener("pointerleave", () => hand.point(null));
  frame.addEventListener("click", (event) => {
    const { row } = under(event);
    if (row !== null) hand.pin(row);
  });
  draw();
  return {
    element,
    paint: draw,
    mark(nowPinned, nowSpot) {
      pinned = nowPinned;
      spot = nowSpot;
      draw();
    },
    drawn() {
      const body = svg("g");
      for (const part of picture.cloneNode(true).childNodes) body.append(part.cloneNode(true));
      return framed(
        scene,
        body,
        width,
        height,
        `queries left, keys right; ${isDark() ? "brighter" : "darker"} lines have larger weights`,
        null,
      );
    },
  };
}
