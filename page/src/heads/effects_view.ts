/** The effect of switching off each head, measured before the page was written. */

import { el } from "../shared/elements.ts";
import { barList } from "./bar_list.ts";
import { fixed, headName, headOf, labelOf } from "./number_texts.ts";
import type { EffectsData } from "./page_data.ts";
import type { App } from "./store.ts";
import type { OpenView, View } from "./view_kinds.ts";

export const effectsView: View = {
  id: "effects",
  title: "Effect of each head",
  there: (app) => app.data.effects !== null && app.data.effects.heads.length > 0,
  open,
};

function open(app: App): OpenView {
  const data = app.data.effects as EffectsData;
  const list = barList("Heads by effect, largest first", (layer, head) =>
    app.set({ layer, head, source: 0 }),
  );
  const title = el("h3");
  const said = el("p");
  const words = el("div", { class: "effect-words" });
  const element = el(
    "div",
    null,
    el("p", null, data.sentence),
    el(
      "div",
      { class: "list-and-picture" },
      list.element,
      el("div", { class: "beside-list" }, title, said, words),
    ),
  );

  function drawList(): void {
    const size = (head: EffectsData["heads"][number]) => Math.abs(head.effect ?? -1);
    const heads = [...data.heads].sort((a, b) => size(b) - size(a));
    const most = Math.max(...heads.map((head) => Math.abs(head.effect ?? 0)), 1e-12);
    const reading = app.sources[0].readings[0];
    list.show(
      heads.map((head) => {
        const label = labelOf(app.data, headOf(reading, head.layer, head.head)?.label);
        return {
          layer: head.layer,
          head: head.head,
          share: Math.abs(head.effect ?? 0) / most,
          number: fixed(head.effect, 4),
          note: label?.name ?? "",
          label,
        };
      }),
      `${data.of}${data.unit ? `, ${data.unit}` : ""}`,
    );
  }

  function drawHead(): void {
    const chosen = data.heads.find((one) => one.layer === app.state.layer && one.head === app.state.head);
    list.choose(app.state.layer, app.state.head);
    title.textContent = `Without ${headName(app.sources[0], app.state.layer, app.state.head)}`;
    words.hidden = !chosen?.after || !data.before;
    if (chosen === undefined || chosen.effect === null) {
      said.textContent = "The effect of this head was not measured.";
      return;
    }
    said.textContent = `Effect on the ${data.of}: ${fixed(chosen.effect, 4)}${data.unit ? ` ${data.unit}` : ""}.`;
    if (!chosen.after || !data.before) return;
    const most = Math.max(...data.before.map(([, p]) => p), ...chosen.after.map(([, p]) => p), 1e-9);
    const before = new Map<string, number | null>(data.before);
    for (const list of [data.before, chosen.after]) {
      const names = list.map(([word]) => word);
      for (const [at, word] of names.entries()) {
        if (names.indexOf(word) !== at && before.has(word)) before.set(word, null);
      }
    }
    words.replaceChildren(
      wordBars("All heads on", data.before, most, null),
      wordBars("This head off", chosen.after, most, before),
    );
  }

  return {
    element,
    draw(changed) {
      if (changed === null || changed.has("sources")) drawList();
      if (changed === null || changed.has("layer") || changed.has("head") || changed.has("sources"))
        drawHead();
    },
  };
}

/** Words with bars; before: what the probabilities were; null: several tokens are written alike. */
function wordBars(
  title: string,
  list: [string, number][],
  most: number,
  before: Map<string, number | null> | null,
): HTMLElement {
  const body = el("tbody");
  for (const [word, share] of list) {
    const fill = el("span", { class: "bar-fill" });
    fill.style.width = `${Math.max((share / most) * 100, 0.5)}%`;
    const was = before?.get(word);
    const arrow =
      was === undefined || was === null ? "" : share > was * 1.005 ? "▲" : share < was * 0.995 ? "▼" : "";
    body.append(
      el(
        "tr",
        null,
        el("th", { scope: "row" }, word),
        el("td", { class: "word-bar" }, el("span", { class: "bar-room", "aria-hidden": "true" }, fill)),
        el(
          "td",
          null,
          fixed(share, 4),
          before === null ? null : el("span", { class: "word-arrow" }, before.has(word) ? arrow : "new"),
        ),
      ),
    );
  }
  return el(
    "table",
    { class: "word-bars" },
    el("caption", null, title),
    el(
      "thead",
      { class: "heard" },
      el(
        "tr",
        null,
        ...["word", "", "probability"].map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))),
      ),
    ),
    body,
  );
}
