/** The page of one call, step by step: which step, head, sample and cell is shown, and what changes them. */

import { byId, el, visible } from "../shared/elements.ts";
import { isShortcut } from "../shared/keys.ts";
import { onTheme, themeButton } from "../shared/theme.ts";
import { data, type FieldMap, type Step } from "./explain_data.ts";
import { type At, expectedMatrix, firstDifference, margin, matrix, range, sameShape } from "./numbers.ts";
import { drawPanel } from "./panel.ts";
import { DrawnStep, type StepMap } from "./steps.ts";
import { sources } from "./sums.ts";

const { T, S, H, D, B, E } = data.sizes;

interface Shown extends At {
  step: number;
  row: number | null;
  column: number | null;
  field: string | null;
}

const shown: Shown = {
  step: data.first ?? 0,
  head: data.head,
  sample: data.sample,
  query: Math.min(2, T - 1),
  row: null,
  column: null,
  field: null,
};
let drawn: StepMap[] = [];

const slider = byId<HTMLInputElement>("slider");
const previous = byId<HTMLButtonElement>("previous");
const next = byId<HTMLButtonElement>("next");
const samples = byId<HTMLSelectElement>("sample");
const queries = byId<HTMLSelectElement>("query");

function at(): At {
  return { sample: shown.sample, head: shown.head, query: shown.query };
}

/** Choose a cell: outline it and its operands, and show the sum. */
function choose(map: FieldMap, r: number, c: number, focus: boolean, from: StepMap | null): void {
  Object.assign(shown, { field: map.field, row: r, column: c });
  if (map.rows === "query") shown.query = r;
  const used = sources(map.field, r, c, at());
  const flow = data.steps[shown.step].flows.find((one) => one.result.field === map.field);
  for (const one of drawn) {
    if (one.role === "result") {
      if (one.map.field === map.field) one.mark(r, c, focus && one === from);
      else one.mark();
    } else if (one.role === "operand") {
      const mine = flow?.operands.some((operand) => operand.field === one.map.field);
      const part = mine ? used[one.map.field] : undefined;
      if (part && (part.head === undefined || part.head === one.head)) one.mark(part.row, part.col);
      else one.mark();
    }
  }
  drawPanel(byId("panel"), map, r, c, at());
}

/** The cell to show first: the first difference, else the cell shown before. */
function firstCell(step: Step): [FieldMap, number, number] {
  for (const { result: map } of step.flows) {
    const wanted = expectedMatrix(map.field, at());
    const own = matrix("yours", map.field, at());
    const cell = own && sameShape(own, wanted) ? firstDifference(map.field, wanted, own) : null;
    if (cell) return [map, ...cell];
  }
  if (step.key === "mask" && data.masks) {
    const mask = expectedMatrix("mask", at());
    for (let c = mask.cols - 1; c >= 0; c--) {
      if (!mask.at(shown.query, c)) return [step.flows[0].result, shown.query, c];
    }
  }
  const { result } = step.flows.find((flow) => flow.result.field === shown.field) ?? step.flows[0];
  const m = expectedMatrix(result.field, at());
  const row = result.rows === "query" ? shown.query : (shown.row ?? 0);
  return [result, Math.min(row, m.rows - 1), Math.min(shown.column ?? 0, m.cols - 1)];
}

/** Show another step, head, sample or query. */
function show(change: Partial<Shown>): void {
  const sameStep = change.step === undefined || change.step === shown.step;
  Object.assign(shown, change);
  shown.step = Math.max(0, Math.min(data.steps.length - 1, shown.step));
  const step = data.steps[shown.step];
  const made = new DrawnStep(shown.step, at(), { choose, goToHead: (head) => show({ head }) });
  drawn = made.maps;
  byId("step").replaceChildren(made.element);
  updateControls(step);
  const kept = sameStep ? step.flows.find((flow) => flow.result.field === shown.field) : undefined;
  if (kept && shown.row !== null && shown.column !== null)
    choose(kept.result, shown.row, shown.column, false, null);
  else choose(...firstCell(step), false, null);
  pointArrows();
  try {
    history.replaceState(null, "", `#step=${step.key}&head=${shown.head}&sample=${shown.sample}`);
  } catch {
    // a page inside a notebook has no address of its own
  }
}

/** Set the controls to what is shown. */
function updateControls(step: Step): void {
  slider.value = String(shown.step);
  slider.setAttribute("aria-valuetext", `${shown.step}. ${step.title}`);
  previous.disabled = shown.step === 0;
  next.disabled = shown.step === data.steps.length - 1;
  for (const [i, button] of byId("steps").querySelectorAll("button").entries()) {
    if (i === shown.step) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  }
  const ofHeads = (map: FieldMap) =>
    map.columns === "channel" || map.columns === "key" || map.columns === "query";
  byId("heads").classList.toggle("idle", !step.flows.some((flow) => ofHeads(flow.result)));
  for (const [head, button] of byId("heads").querySelectorAll("button").entries())
    button.setAttribute("aria-checked", String(head === shown.head));
  samples.value = String(shown.sample);
  queries.value = String(shown.query);
  byId("query-choice").hidden = step.key !== "weigh";
}

/** Point arrows to the result, which is beside its operands, or below them on narrow pages. */
function pointArrows(): void {
  for (const flow of document.querySelectorAll(".flow")) {
    const arrow = flow.querySelector<HTMLElement>(".arrow");
    const results = flow.querySelector<HTMLElement>(".results");
    if (arrow && results)
      arrow.textContent = results.offsetTop >= arrow.offsetTop + arrow.offsetHeight ? "↓" : "→";
  }
}

function fromAddress(): Partial<Shown> {
  const asked = new URLSearchParams(location.hash.slice(1));
  const step = data.steps.findIndex((one) => one.key === asked.get("step"));
  const whole = (name: string, below: number, otherwise: number) => {
    const said = asked.get(name) ?? "";
    return /^\d+$/.test(said) && Number(said) < below ? Number(said) : otherwise;
  };
  return {
    step: step < 0 ? shown.step : step,
    head: whole("head", H, shown.head),
    sample: whole("sample", B, shown.sample),
  };
}

function header(): void {
  const many = (n: number, name: string) => `${n} ${name}${n > 1 ? "s" : ""}`;
  const kind = data.itself ? `self-attention of ${T} tokens` : `attention of ${T} queries to ${S} keys`;
  const letters = `B=${B}  T=${T}  S=${S}  H=${H}  D=${D}  E=${E}`;
  byId("name").textContent = `${visible(data.name)}, step by step`;
  byId("sizes").textContent =
    `${many(B, "sample")}: ${kind}; ${many(H, "head")} of ${D} channels, ${E} in all.   ${letters}`;
  const verdict = byId("verdict");
  verdict.className = data.right ? "right" : "wrong";
  verdict.append(el("p", null, data.verdict));
  for (const fault of data.faults) {
    const yours = [el("dt", null, "yours"), el("dd", null, fault.formula)];
    const expected = [el("dt", null, "expected"), el("dd", null, fault.right)];
    verdict.append(
      el("p", { class: "fault" }, el("b", null, fault.title)),
      el("dl", null, ...yours, ...expected),
    );
    if (fault.line !== null) {
      const code = el("code", null, visible(fault.text.trim()));
      verdict.append(el("p", null, `Line ${fault.line}: `, code));
    }
  }
  byId("notes").append(...data.notes.map((note) => el("li", null, note)));
}

const STATUS = { same: ", equal", first: ", your numbers first differ here", after: ", differs", unseen: "" };

function controls(): void {
  for (const [i, step] of data.steps.entries()) {
    const name = `${i} ${step.key}: ${step.title}${STATUS[step.status]}`;
    const button = el("button", { type: "button", class: step.status, "aria-label": name });
    button.append(el("span", { class: "count" }, String(i)), " ", el("span", null, step.key));
    button.addEventListener("click", () => show({ step: i }));
    byId("steps").append(el("li", null, button));
  }
  slider.max = String(data.steps.length - 1);
  slider.addEventListener("input", () => show({ step: Number(slider.value) }));
  previous.addEventListener("click", () => show({ step: shown.step - 1 }));
  next.addEventListener("click", () => show({ step: shown.step + 1 }));
  if (H > 1) byId("heads").append("Head ");
  for (const head of H > 1 ? range(H) : []) {
    const state = { type: "button", role: "radio", "aria-checked": "false", "aria-label": `Head ${head}` };
    const button = el("button", state, String(head));
    button.addEventListener("click", () => show({ head }));
    byId("heads").append(button);
  }
  samples.append(...range(B).map((sample) => el("option", { value: sample }, String(sample))));
  samples.addEventListener("change", () => show({ sample: Number(samples.value) }));
  byId("sample-choice").hidden = B === 1;
  const named = (t: number) => (data.labels.query ? `${t} ${margin("query", t)}` : String(t));
  queries.append(...range(T).map((t) => el("option", { value: t }, named(t))));
  queries.addEventListener("change", () => show({ query: Number(queries.value) }));
}

function listen(): void {
  document.addEventListener("keydown", (event) => {
    if (isShortcut(event) || (event.target as Element).closest("input, select, canvas, td")) return;
    if (event.key === "ArrowRight") show({ step: shown.step + 1 });
    else if (event.key === "ArrowLeft") show({ step: shown.step - 1 });
  });
  themeButton(byId("theme"));
  onTheme(() => {
    for (const one of drawn) one.again();
  });
  window.addEventListener("resize", pointArrows);
  window.addEventListener("hashchange", () => show(fromAddress()));
  window.addEventListener("beforeprint", () => {
    const every = data.steps.map((_, i) => el("section", null, new DrawnStep(i, at(), null).element));
    byId("all").replaceChildren(...every);
  });
  window.addEventListener("afterprint", () => byId("all").replaceChildren());
}

header();
controls();
listen();
show(fromAddress());
