/** Heads as a list of bars, largest first; one is chosen. */

import { labelColour } from "../shared/colours.ts";
import { el } from "../shared/elements.ts";
import { shortName } from "./number_texts.ts";
import type { LabelData } from "./page_data.ts";

const FIRST = 16; // heads shown until all are asked for

export interface Bar {
  layer: number;
  head: number;
  share: number; // of the longest bar
  number: string;
  note: string;
  label: LabelData | undefined;
}

export interface BarList {
  element: HTMLElement;
  show(bars: Bar[], meaning: string): void;
  choose(layer: number, head: number): void;
}

export function barList(title: string, chosen: (layer: number, head: number) => void): BarList {
  const caption = el("p", { class: "quiet" });
  const list = el("ol", { class: "bars", "aria-label": "Heads; arrow up and down go from one to the next" });
  const all = el("button", { type: "button", class: "bars-all" });
  const element = el("div", { class: "bar-list" }, el("h3", null, title), caption, list, all);
  let bars: Bar[] = [];
  let count = FIRST;
  let now = "";

  /** The list is one stop of the Tab key: a model has hundreds of heads. */
  const stopAt = (stop: HTMLElement | null) => {
    for (const button of list.querySelectorAll("button")) button.tabIndex = button === stop ? 0 : -1;
  };
  const mark = () => {
    for (const button of list.querySelectorAll("button")) {
      if (button.dataset.head === now) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    stopAt(list.querySelector<HTMLElement>("[aria-current]") ?? list.querySelector("button"));
    const row = list.querySelector<HTMLElement>("[aria-current]");
    if (!row) return;
    const [from, to] = [row.offsetTop - list.offsetTop, row.offsetTop - list.offsetTop + row.offsetHeight];
    if (from < list.scrollTop || to > list.scrollTop + list.clientHeight)
      list.scrollTop = from - list.clientHeight / 2;
  };
  const draw = () => {
    list.replaceChildren(...bars.slice(0, count).map((bar) => el("li", null, row(bar))));
    all.hidden = bars.length <= count;
    all.textContent = `Show all ${bars.length} heads`;
    mark();
  };
  all.addEventListener("click", () => {
    const next = count;
    count = bars.length;
    draw();
    list.querySelectorAll("button")[next]?.focus();
  });
  list.addEventListener("keydown", (event) => {
    const buttons = [...list.querySelectorAll("button")];
    const at = buttons.indexOf(event.target as HTMLButtonElement);
    const places: Record<string, number> = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      Home: 0,
      End: buttons.length - 1,
    };
    const next = at < 0 ? undefined : buttons[places[event.key]];
    if (!next) return;
    event.preventDefault();
    stopAt(next);
    next.focus();
  });
  list.addEventListener("click", (event) => {
    const button = (event.target as Element).closest("button");
    const [layer, head] = (button?.dataset.head ?? "").split(".").map(Number);
    if (button !== null) chosen(layer, head);
  });
  return {
    element,
    show(wanted, meaning) {
      bars = wanted;
      caption.textContent = meaning;
      draw();
    },
    choose(layer, head) {
      now = shortName(layer, head);
      if (
        count < bars.length &&
        !bars.slice(0, count).some((bar) => shortName(bar.layer, bar.head) === now)
      ) {
        const at = bars.findIndex((bar) => shortName(bar.layer, bar.head) === now);
        if (at >= 0) count = Math.max(count, at + 1);
        draw();
      } else mark();
    },
  };
}

function row(bar: Bar): HTMLElement {
  const fill = el("span", { class: "bar-fill" });
  fill.style.width = `${Math.max(bar.share * 100, 0.5)}%`;
  const dot = el("span", { class: "view-dot", "aria-hidden": "true" });
  dot.style.backgroundColor = labelColour(bar.label);
  return el(
    "button",
    { type: "button", "data-head": shortName(bar.layer, bar.head) },
    el("span", { class: "bar-name" }, dot, shortName(bar.layer, bar.head)),
    el("span", { class: "bar-room", "aria-hidden": "true" }, fill),
    el("span", { class: "bar-number" }, bar.number),
    el("span", { class: "bar-note" }, bar.note),
    el("span", { class: "heard" }, bar.label ? `, ${bar.label.name}` : ""),
  );
}
