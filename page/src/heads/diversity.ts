/** How much the heads of one layer differ: every head against every head, and heads as points. */

import { labelColour, signedColour, weightColour, weightGradient } from "../shared/colours.ts";
import { el, svg } from "../shared/elements.ts";
import { layout, MOST, pairsOf } from "./head_geometry.ts";
import { fixed, headOf, labelOf } from "./number_texts.ts";
import { tinted } from "./paired_maps.ts";
import type { App } from "./store.ts";
import { latest, type OpenView, type View } from "./view_kinds.ts";

const SIZE = 400; // of the picture of points
const EDGE = 34;

export const diversityView: View = {
  id: "diversity",
  title: "Differences between heads",
  there: (app) =>
    app.sources.some((source) => source.alive) ||
    app.data.sources.some((source) =>
      source.readings.some((reading) =>
        reading.calls.some((call) => call?.distances && call.distances.length > 1),
      ),
    ),
  open,
};

function open(app: App): OpenView {
  const title = el("h3");
  const said = el("p", { class: "diversity-said" });
  const table = el("div", { class: "matrix-room" });
  const points = el("div", { class: "points-room" });
  const cosines = el("div", { class: "matrix-room" });
  const element = el("div", null, title, said, el("div", { class: "diversity" }, table, points, cosines));
  const choose = (head: number) => {
    if (headOf(app.reading, app.state.layer, head)) app.set({ head });
  };
  element.addEventListener("click", (event) => {
    const target = event.target as Element;
    const cell = target.closest<HTMLElement>("td[data-pair]");
    const one = target.closest<HTMLElement | SVGElement>("[data-head]");
    if (one) choose(Number(one.dataset.head));
    else if (cell) {
      const [row, column] = (cell.dataset.pair ?? "").split(".").map(Number);
      const { source, text, layer } = app.state;
      if (row !== column && headOf(app.reading, layer, row) && headOf(app.reading, layer, column))
        app.set({ head: row, beside: [source, text, layer, column].join("."), tab: "compare" });
    }
  });
  element.addEventListener("keydown", (event) => {
    const one = (event.target as Element).closest<SVGElement>("g[data-head]");
    if (one && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      choose(Number(one.dataset.head));
    }
  });
  const mark = () => {
    for (const one of element.querySelectorAll<HTMLElement | SVGElement>("[data-head]")) {
      const chosen = Number(one.dataset.head) === app.state.head;
      one.classList.toggle("chosen", chosen);
      if (chosen) one.setAttribute("aria-current", "true");
      else one.removeAttribute("aria-current");
    }
  };

  const turn = latest();
  async function draw(): Promise<void> {
    const here = turn();
    const { call, source } = app;
    const layer = source.layers[app.state.layer];
    const [distances, between] = await Promise.all([call?.distances() ?? null, call?.cosines() ?? null]);
    if (!here()) return;
    title.textContent = `Differences between the heads of ${layer.name}${app.sources.length > 1 ? `, ${source.title}` : ""}`;
    const pairs = distances === null ? [] : pairsOf(distances);
    for (const room of [table, points]) room.hidden = pairs.length === 0;
    cosines.hidden = between === null;
    if (distances === null || pairs.length === 0) {
      said.textContent =
        distances === null
          ? "The heads of this layer were not compared."
          : "This layer has only one head to show.";
    } else {
      said.textContent = inWords(pairs);
      table.replaceChildren(
        el("h4", null, "Attention weights: Jensen-Shannon divergence (nats)"),
        matrix(distances, (x) => weightColour(x / MOST), "Divergence of two heads"),
        scale(),
        el(
          "p",
          { class: "quiet" },
          "0 = the same weights, 0.69 = no key in common. Click a number to compare the two heads.",
        ),
      );
      points.replaceChildren(...pointsPicture(app, distances));
    }
    if (between !== null)
      cosines.replaceChildren(
        el("h4", null, "Outputs: cosine similarity"),
        matrix(between, signedColour, "Cosine of the outputs of two heads"),
        el(
          "p",
          { class: "quiet" },
          "1 (orange) = the same direction, 0 = orthogonal, −1 (blue) = the opposite direction.",
        ),
      );
    mark();
  }
  return {
    element,
    draw(changed) {
      const minded = ["source", "text", "layer", "sources"] as const;
      if (changed === null || minded.some((name) => changed.has(name))) return draw();
      if (changed.has("head")) mark();
      return undefined;
    },
  };
}

function inWords(pairs: { first: number; second: number; value: number }[]): string {
  const mean = pairs.reduce((all, pair) => all + pair.value, 0) / pairs.length;
  const ordered = [...pairs].sort((a, b) => a.value - b.value);
  const [near, far] = [ordered[0], ordered[ordered.length - 1]];
  const share = Math.round((mean / MOST) * 100);
  const name = (pair: typeof near) => `${pair.first} and ${pair.second} (${fixed(pair.value, 3)})`;
  const ends =
    pairs.length > 1 ? ` Most similar: heads ${name(near)}; least similar: heads ${name(far)}.` : "";
  return (
    `Mean Jensen-Shannon divergence between two heads of this layer: ${fixed(mean, 3)} nats, ${share}% of the ` +
    `largest possible (log 2 = 0.69).${ends}`
  );
}

function matrix(
  values: (number | null)[][],
  colour: (x: number) => [number, number, number],
  name: string,
): HTMLElement {
  const heads = values.map((_, head) => head);
  const digits = values.length <= 8 ? 3 : 2;
  const top = el("tr", null, el("td"), ...heads.map((head) => el("th", { scope: "col" }, String(head))));
  const body = el("tbody");
  for (const row of heads) {
    const cells = heads.map((column) => {
      const value = values[row][column];
      const cell = el("td", { "data-pair": `${row}.${column}` }, row === column ? "" : fixed(value, digits));
      cell.title = `heads ${row} and ${column}: ${fixed(value, 4)}`;
      if (row !== column) tinted(cell, colour(value ?? Number.NaN));
      return cell;
    });
    const button = el(
      "button",
      { type: "button", "data-head": row, "aria-label": `Select head ${row}` },
      String(row),
    );
    body.append(el("tr", null, el("th", { scope: "row" }, button), ...cells));
  }
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": name },
    el("table", { class: values.length > 12 ? "matrix dense" : "matrix" }, el("thead", null, top), body),
  );
}

function scale(): HTMLElement {
  const strip = el("span", { class: "pm-scale", "aria-hidden": "true" });
  strip.style.backgroundImage = weightGradient();
  return el("p", { class: "pm-key quiet" }, "0", strip, "0.69 nats");
}

interface Spot {
  head: number;
  x: number;
  y: number;
}

function pointsPicture(app: App, distances: (number | null)[][]): (HTMLElement | SVGSVGElement)[] {
  const measured = distances
    .map((_, head) => head)
    .filter((head) => distances[head].some((x, other) => other !== head && x !== null));
  const whole = measured.filter((head) => measured.every((other) => distances[head][other] !== null));
  const at = layout(whole.map((row) => whole.map((column) => distances[row][column] ?? 0)));
  const reach = Math.max(...at.flat().map(Math.abs), 1e-9);
  const zoom = (SIZE / 2 - EDGE) / reach;
  const tall = Math.max(...at.map(([, y]) => Math.abs(y))) * zoom + EDGE;
  const spots = at.map(([x, y], i) => ({ head: whole[i], x: SIZE / 2 + x * zoom, y: tall - y * zoom }));
  const picture = svg("svg", {
    viewBox: `0 0 ${SIZE} ${(2 * tall).toFixed(1)}`,
    class: "points",
    role: "group",
    "aria-label": "Heads placed by similarity",
    "data-zoom": zoom.toFixed(6),
  });
  picture.append(svg("path", { d: `M0 ${tall}H${SIZE}M${SIZE / 2} 0V${2 * tall}`, class: "axis" }));
  const places = letterPlaces(spots);
  spots.forEach((spot, i) => {
    const label = labelOf(app.data, headOf(app.reading, app.state.layer, spot.head)?.label);
    const dot = svg("circle", {
      cx: spot.x.toFixed(3),
      cy: spot.y.toFixed(3),
      r: 6,
      fill: labelColour(label),
    });
    const text = svg("text", { x: places[i].x, y: places[i].y, "text-anchor": "middle" }, String(spot.head));
    const about = `Head ${spot.head}${label ? `, ${label.name}` : ""}`;
    picture.append(
      svg(
        "g",
        { "data-head": spot.head, tabindex: 0, role: "button", "aria-label": about },
        svg("title", null, about),
        svg("circle", { cx: spot.x, cy: spot.y, r: 13, class: "halo" }),
        dot,
        text,
      ),
    );
  });
  const names = [...new Set(whole.map((head) => headOf(app.reading, app.state.layer, head)?.label ?? ""))];
  const legend = el("ul", { class: "label-legend" });
  for (const name of names.filter(Boolean)) {
    const dot = el("span", { class: "view-dot", "aria-hidden": "true" });
    dot.style.backgroundColor = labelColour(labelOf(app.data, name));
    legend.append(el("li", null, dot, name));
  }
  return [
    el("h4", null, "Heads placed by similarity"),
    picture,
    legend,
    el(
      "p",
      { class: "quiet" },
      "Distances approximate the square root of the Jensen–Shannon divergence (multidimensional scaling). Click a head to open it.",
    ),
  ];
}

/** Where each number stands: beside its point, away from the other points and numbers. */
function letterPlaces(spots: Spot[]): { x: number; y: number }[] {
  const taken = spots.map(({ x, y }) => ({ x, y }));
  return spots.map((spot) => {
    let best = { x: spot.x, y: spot.y - 12, room: -1 };
    for (let turn = 0; turn < 12; turn++) {
      const angle = -Math.PI / 2 + (turn * Math.PI) / 6;
      const [x, y] = [spot.x + 16 * Math.cos(angle), spot.y + 16 * Math.sin(angle)];
      const room = Math.min(
        ...taken.map((other) =>
          other.x === spot.x && other.y === spot.y ? 16 : Math.hypot(other.x - x, other.y - y),
        ),
      );
      if (room > best.room + 1e-6) best = { x, y, room };
    }
    taken.push({ x: best.x, y: best.y });
    return { x: Number(best.x.toFixed(1)), y: Number((best.y + 5).toFixed(1)) };
  });
}
