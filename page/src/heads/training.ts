/** Heads at checkpoints of their training: a slider, a wall of one number, and its curve. */

import { labelColour, weightColour, weightGradient } from "../shared/colours.ts";
import { el, svg } from "../shared/elements.ts";
import { counted, fixed, labelOf, shortName } from "./number_texts.ts";
import type { TrainingData } from "./page_data.ts";
import { tinted } from "./paired_maps.ts";
import type { App } from "./store.ts";
import type { OpenView, View } from "./view_kinds.ts";

const BEAT = 450; // milliseconds per checkpoint while it plays
const HIGH = 250;
const LOW = 110;
const LEFT = 46;

export const trainingView: View = {
  id: "training",
  title: "During training",
  there: (app) => app.data.training !== null && app.data.training.steps.length > 0,
  open,
};

function open(app: App): OpenView {
  const data = app.data.training as TrainingData;
  const last = data.steps.length - 1;
  const names = Object.keys(data.statistics);
  const statistic = el("select", { id: "training-statistic" });
  for (const name of names) {
    const known = app.data.statistics.find((one) => one.name === name);
    statistic.append(el("option", { value: name }, known?.title ?? name.replaceAll("_", " ")));
  }
  statistic.value =
    ["induction_stripe", "induction", "previous_token"].find((name) => names.includes(name)) ?? names[0];
  const slider = el("input", { type: "range", id: "training-step", min: 0, max: last, step: 1 });
  const play = el("button", { type: "button", id: "training-play" }, "Play");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const said = el("p", { id: "training-said", "aria-live": "polite" });
  const about = el("p", { class: "quiet" });
  const grid = el("div", { class: "training-grid", role: "group", "aria-label": "Heads at this checkpoint" });
  const key = el("p", { class: "pm-key quiet" });
  const chosen = el("p", { id: "training-head" });
  const charts = el("div", { class: "training-charts" });
  const element = el(
    "div",
    null,
    el(
      "div",
      { class: "view-controls" },
      el("label", { class: "view-field", for: "training-statistic" }, "Statistic ", statistic),
      el("label", { class: "view-field wide", for: "training-step" }, "Checkpoint ", slider),
      play,
    ),
    said,
    about,
    el("div", { class: "training" }, el("div", { class: "training-wall" }, grid, key, chosen), charts),
  );

  const checkpoint = () => Math.min(app.state.checkpoint ?? last, last);
  const values = () => data.statistics[statistic.value];
  let wide = 640;
  let timer: number | null = null;
  const stop = () => {
    if (timer !== null) clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    play.textContent = "Stop";
    if (checkpoint() === last) app.set({ checkpoint: 0 });
    timer = window.setInterval(() => {
      const next = checkpoint() + 1;
      app.set({ checkpoint: next >= last ? null : next });
      if (next >= last) stop();
    }, BEAT);
  });
  slider.addEventListener("input", () => {
    stop();
    const at = Number(slider.value);
    app.set({ checkpoint: at === last ? null : at });
  });
  statistic.addEventListener("change", () => {
    drawCharts();
    drawWall();
  });
  const choose = (name: string | undefined) => {
    const [layer, head] = (name ?? "").split(".").map(Number);
    if (name !== undefined) app.set({ layer, head });
  };
  element.addEventListener("click", (event) => {
    const one = (event.target as Element).closest<HTMLElement | SVGElement>("[data-head]");
    if (one) choose(one.dataset.head);
  });

  function build(): void {
    const [layers, heads] = [values()[0].length, Math.max(...values()[0].map((row) => row.length))];
    grid.classList.toggle("few", layers <= 6);
    grid.style.gridTemplateColumns = `auto repeat(${heads}, minmax(0, 1fr))`;
    const cells: HTMLElement[] = [el("span", { class: "quiet" })];
    for (let head = 0; head < heads; head++)
      cells.push(el("span", { class: "quiet", "aria-hidden": "true" }, String(head)));
    for (let layer = 0; layer < layers; layer++) {
      cells.push(el("span", { class: "quiet", "aria-hidden": "true" }, `layer ${layer}`));
      for (let head = 0; head < heads; head++)
        cells.push(el("button", { type: "button", "data-head": shortName(layer, head) }));
    }
    grid.replaceChildren(...cells);
  }

  function drawWall(): void {
    const at = checkpoint();
    slider.value = String(at);
    const text = `step ${data.steps[at].toLocaleString("en")}, ${counted(data.tokens[at])} training tokens`;
    slider.setAttribute("aria-valuetext", text);
    const [kind, all] = lossesOf(data);
    const loss = all[at];
    said.textContent = `${data.title}, ${text}${loss === null ? "" : `; ${kind} loss ${fixed(loss, 3)} nats per token`}`;
    const known = app.data.statistics.find((one) => one.name === statistic.value);
    about.textContent = known?.sentence ?? "";
    const [low, high] = ends(values(), known?.share ?? false);
    const strip = el("span", { class: "pm-scale", "aria-hidden": "true" });
    strip.style.backgroundImage = weightGradient();
    key.replaceChildren(fixed(low, 2), strip, fixed(high, 2));
    for (const button of grid.querySelectorAll("button")) {
      const [layer, head] = (button.dataset.head ?? "").split(".").map(Number);
      const value = values()[at][layer]?.[head] ?? null;
      const label = data.labels[at]?.[layer]?.[head] ?? null;
      tinted(button, weightColour(value === null ? Number.NaN : (value - low) / (high - low || 1)));
      button.replaceChildren(
        el("i", { class: "heard" }, `Layer ${layer}, head ${head}: `),
        el("span", null, fixed(value, 2)),
        el("small", null, label ?? ""),
      );
      if (layer === app.state.layer && head === app.state.head) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    for (const line of charts.querySelectorAll(".now")) {
      line.setAttribute("x1", across(at, last, wide).toFixed(1));
      line.setAttribute("x2", across(at, last, wide).toFixed(1));
    }
    const dot = charts.querySelector(".now-dot");
    const { layer, head } = app.state;
    const label = data.labels[at]?.[layer]?.[head];
    const value = values()[at][app.state.layer]?.[app.state.head] ?? null;
    chosen.textContent =
      `Head ${shortName(layer, head)}: ${fixed(value, 3)}` +
      (label ? `; ${label}: ${labelOf(app.data, label)?.sentence ?? ""}.` : "; no label.");
    dot?.setAttribute("visibility", value === null ? "hidden" : "visible");
    dot?.setAttribute("cx", across(at, last, wide).toFixed(1));
    dot?.setAttribute("cy", up(value ?? 0, low, high, HIGH).toFixed(1));
  }

  function drawCharts(): void {
    wide = Math.min(Math.max(charts.clientWidth, 320), 640); // letters stay as large on a phone
    const title = statistic.selectedOptions[0]?.textContent ?? "";
    charts.replaceChildren(
      el(
        "h4",
        null,
        `${title}: one line per head (thick: head ${shortName(app.state.layer, app.state.head)})`,
      ),
      curves(app, data, values(), statistic.value, wide),
      el("h4", null, `${lossesOf(data)[0] === "training" ? "Training" : "Validation"} loss, nats per token`),
      lossCurve(data, wide),
      el("p", { class: "quiet" }, "Checkpoints are drawn at equal distances; labels are training steps."),
    );
  }

  build();
  return {
    element,
    draw(changed) {
      play.hidden = still.matches;
      if (still.matches) stop();
      const minded = ["layer", "head"] as const;
      if (changed === null || minded.some((name) => changed.has(name))) drawCharts();
      if (changed === null || [...minded, "checkpoint" as const].some((name) => changed.has(name)))
        drawWall();
    },
    close: stop,
  };
}

/** From the smallest to the largest over all of training; a share from 0 to 1 at least begins at 0. */
function ends(values: (number | null)[][][], share: boolean): [number, number] {
  const all = values.flat(2).filter((x): x is number => x !== null);
  const low = Math.min(...all);
  const high = Math.max(...all);
  return [
    share || (low >= 0 && low < high / 4) ? Math.min(0, low) : low,
    share ? Math.max(high, Math.min(1, high * 1.1)) : high,
  ];
}

const across = (at: number, last: number, wide: number) =>
  LEFT + (at / Math.max(last, 1)) * (wide - LEFT - 14);
const up = (x: number, low: number, high: number, tall: number) =>
  tall - 24 - ((x - low) / (high - low || 1)) * (tall - 36);

function path(series: (number | null)[], low: number, high: number, tall: number, wide: number): string {
  let drawn = "";
  let pen = "M";
  series.forEach((x, at) => {
    if (x === null) pen = "M";
    else {
      drawn += `${pen}${across(at, series.length - 1, wide).toFixed(1)} ${up(x, low, high, tall).toFixed(1)}`;
      pen = "L";
    }
  });
  return drawn;
}

function frame(
  data: TrainingData,
  [low, high]: [number, number],
  tall: number,
  wide: number,
  about: string,
): SVGSVGElement {
  const last = data.steps.length - 1;
  const made = svg("svg", {
    viewBox: `0 0 ${wide} ${tall}`,
    class: "curve",
    role: "img",
    "aria-label": about,
  });
  for (const x of [low, (low + high) / 2, high]) {
    const y = up(x, low, high, tall);
    made.append(
      svg("line", { x1: LEFT, x2: wide - 14, y1: y, y2: y, class: "rule" }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, fixed(x, 2)),
    );
  }
  const every = Math.ceil((last + 1) / (wide > 460 ? 7 : 5));
  for (let at = last; at >= 0; at -= every)
    made.append(
      svg(
        "text",
        { x: across(at, last, wide), y: tall - 5, "text-anchor": at === last ? "end" : "middle" },
        String(data.steps[at]),
      ),
    );
  made.append(svg("line", { class: "now", x1: 0, x2: 0, y1: 10, y2: tall - 22 }));
  return made;
}

function curves(
  app: App,
  data: TrainingData,
  values: (number | null)[][][],
  name: string,
  wide: number,
): SVGSVGElement {
  const share = app.data.statistics.find((one) => one.name === name)?.share ?? false;
  const [low, high] = ends(values, share);
  const { layer, head } = app.state;
  const made = frame(data, [low, high], HIGH, wide, `${name} of every head over training`);
  const series = (l: number, h: number) => values.map((checkpoint) => checkpoint[l]?.[h] ?? null);
  values[0].forEach((row, l) => {
    row.forEach((_, h) => {
      if (l === layer && h === head) return;
      const d = path(series(l, h), low, high, HIGH, wide);
      made.append(
        svg(
          "g",
          { "data-head": shortName(l, h), class: "thin" },
          svg("title", null, `layer ${l}, head ${h}`),
          svg("path", { d, class: "grip" }),
          svg("path", { d }),
        ),
      );
    });
  });
  const label = labelOf(app.data, data.labels[data.labels.length - 1]?.[layer]?.[head]);
  const strong = svg("path", { d: path(series(layer, head), low, high, HIGH, wide), class: "strong" });
  const dot = svg("circle", { class: "now-dot", r: 5 });
  if (label) {
    strong.style.stroke = labelColour(label);
    dot.style.fill = labelColour(label);
  }
  made.append(strong, dot);
  return made;
}

/** The losses of validation; those of training where validation was measured at few checkpoints or none. */
function lossesOf(data: TrainingData): ["validation" | "training", (number | null)[]] {
  const known = (losses: (number | null)[]) => losses.filter((x) => x !== null).length;
  return known(data.validation) < known(data.losses)
    ? ["training", data.losses]
    : ["validation", data.validation];
}

function lossCurve(data: TrainingData, wide: number): SVGSVGElement {
  const [kind, losses] = lossesOf(data);
  const all = losses.filter((x): x is number => x !== null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const name = kind === "training" ? "Training" : "Validation";
  const made = frame(data, [low, high], LOW, wide, `${name} loss over training`);
  made.append(svg("path", { d: path(losses, low, high, LOW, wide), class: "strong" }));
  return made;
}
