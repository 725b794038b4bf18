/** What stands around a picture of a head: switches, the steps of a generation, the scale, ways to take it away. */

import { weightGradient } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { counted, type Scene, short, shown } from "./head_scene.ts";
import { save } from "./picture_export.ts";
import type { App } from "./store.ts";

const STEP_MS = 600; // from step to step, while it plays

/** A row of buttons of which one is pressed. */
export function choice(
  name: string,
  now: string,
  options: [string, string][],
  set: (value: string) => void,
): HTMLElement {
  const buttons = options.map(([value, words]) => {
    const pressed = String(value === now);
    const made = el("button", { type: "button", "aria-pressed": pressed, "data-value": value }, words);
    made.addEventListener("click", () => set(value));
    return made;
  });
  return el("span", { class: "choice", role: "group", "aria-label": name }, ...buttons);
}

/** Generation, step by step; nothing plays unless it is asked to, and never where motion is unwanted. */
export function stepSlider(app: App): { element: HTMLElement; draw(): void } {
  const slider = el("input", { type: "range", min: 0, id: "step", step: 1 });
  const play = el("button", { type: "button", class: "play" }, "▶ play");
  const line = el("output", { for: "step" });
  const element = el("div", { class: "steps" }, el("label", { for: "step" }, "Step"), slider, line, play);
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let timer = 0;
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ play";
  };
  const go = (step: number) => app.set({ step: step >= Number(slider.max) ? null : step });
  slider.addEventListener("input", () => {
    stop();
    go(Number(slider.value));
  });
  play.addEventListener("click", () => {
    if (timer !== 0) {
      stop();
      return;
    }
    const last = Number(slider.max);
    if (Number(slider.value) >= last) go(0);
    play.textContent = "◼ stop";
    timer = window.setInterval(() => {
      const next = Number(slider.value) + 1;
      go(next);
      if (next >= last) stop();
    }, STEP_MS);
  });
  const draw = () => {
    const held = app.call?.exact ? app.call.steps : null;
    element.hidden = held === null || held.length < 2;
    if (held === null || element.hidden) {
      stop();
      return;
    }
    const now = Math.min(app.state.step ?? held.length - 1, held.length - 1);
    slider.max = String(held.length - 1);
    slider.value = String(now);
    play.hidden = still.matches;
    const token = app.call?.queryTokens?.[held[now] - 1];
    const said = now === 0 ? "the prompt, " : token === undefined ? "" : `“${shown(token)}”, `;
    const words = `${now} of ${held.length - 1}: ${said}${counted(held[now])} tokens`;
    line.textContent = words;
    slider.setAttribute("aria-valuetext", words);
  };
  return { element, draw };
}

/** The scale of weights: colours by the square root, and what is hidden. */
export function weightLegend(scene: Scene): HTMLElement[] {
  const bar = el("div", { class: "scale" });
  bar.style.backgroundImage = weightGradient();
  const ticks = [0, 0.05, 0.25, 0.5, 1].map((part) => {
    const tick = el("span", null, scene.most === 1 ? String(part) : short(part * scene.most));
    tick.style.left = `${Math.sqrt(part) * 100}%`;
    return tick;
  });
  const box = el("div", { class: "scale-box" }, bar, el("div", { class: "scale-ticks" }, ...ticks));
  const hides = scene.cells.values.some(Number.isNaN);
  const swatch = el(
    "span",
    { class: "quiet" },
    el("span", { class: "hidden-swatch" }),
    scene.prompt === null ? " masked" : " masked, or not generated yet",
  );
  const parts = hides ? [box, swatch] : [box];
  const end = el("span", { class: "quiet" }, el("span", { class: "prompt-swatch" }), " end of the prompt");
  return scene.prompt === null ? parts : [...parts, end];
}

/** The picture as a file, the view as a link. */
export function takeButtons(file: string, drawn: () => SVGSVGElement | null): HTMLElement[] {
  const said = el("span", { class: "quiet", role: "status" });
  const field = el("input", {
    class: "link",
    readonly: true,
    hidden: true,
    "aria-label": "Link to this view",
  });
  const buttons = (["svg", "png"] as const).map((kind) => {
    const name = `${file}.${kind}`;
    const button = el("button", { type: "button", class: `take-${kind}`, title: name }, kind.toUpperCase());
    button.addEventListener("click", () => {
      const picture = drawn();
      if (picture === null) return;
      const done = save(picture, file, kind).then(() => name);
      void done.catch(String).then((words) => {
        said.textContent = words;
      });
    });
    return button;
  });
  // inside a notebook the page has no address that could be opened again
  const copy = el(
    "button",
    { type: "button", class: "copy-link", hidden: location.protocol === "about:" },
    "Copy link",
  );
  copy.addEventListener("click", () => {
    const byHand = () => {
      field.hidden = false;
      field.value = location.href;
      field.focus();
      field.select();
      said.textContent = "Copy the link from this field.";
    };
    if (!navigator.clipboard) {
      byHand();
      return;
    }
    void navigator.clipboard.writeText(location.href).then(() => {
      said.textContent = "Link copied.";
    }, byHand);
  });
  return [el("span", { class: "quiet" }, "Save this picture: "), ...buttons, copy, field, said];
}
