/** The selected head over many documents, and the documents where it deviates most. */

import { el } from "../shared/elements.ts";
import { fixed, headName } from "./number_texts.ts";
import type { CorpusData, CorpusHeadData, MoverData } from "./page_data.ts";
import type { App } from "./store.ts";
import type { OpenView, View } from "./view_kinds.ts";

export const corpusView: View = {
  id: "corpus",
  title: "Statistics over documents",
  there: (app) => Boolean(app.data.corpus), // pages of before have no such field
  open,
};

const COLUMNS = ["mean", "std. dev.", "5%", "median", "95%", "dependence on the text"];
const DEPENDENCE =
  "W / (W + B), where W is the variance of this statistic over documents (for this head) and B is the variance of the means of all heads. 0 = the same in every text.";

function open(app: App): OpenView {
  const data = app.data.corpus as CorpusData;
  const title = el("h3");
  const said = el("p");
  const room = el("div", { class: "corpus-parts" });
  const element = el(
    "div",
    { class: "corpus" },
    el("p", { class: "quiet" }, data.sentence),
    title,
    said,
    room,
  );

  function draw(): void {
    const { layer, head } = app.state;
    title.textContent = headName(app.sources[0], layer, head);
    const chosen = data.heads.find((one) => one.layer === layer && one.head === head);
    room.hidden = chosen === undefined;
    said.textContent = chosen?.sentence ?? "This head was not measured.";
    if (chosen === undefined) return;
    room.replaceChildren(
      el(
        "div",
        null,
        listed(
          "Documents with the largest deviation from the mean",
          chosen.movers,
          "No document deviates much from the mean.",
        ),
        listed(
          "Positions where the attention of this head differs most from its mean",
          chosen.places,
          "The texts are too short to compare positions.",
        ),
      ),
      numbers(chosen),
    );
  }

  return {
    element,
    draw(changed) {
      if (changed === null || ["layer", "head", "sources"].some((name) => changed.has(name as "layer")))
        draw();
    },
  };
}

function listed(title: string, movers: MoverData[], none: string): HTMLElement {
  const rows = movers.map(({ document, said, place }) =>
    el(
      "li",
      null,
      el("span", { class: "corpus-document" }, document),
      el("span", { class: "corpus-said" }, said),
      place ? el("span", { class: "quiet" }, place) : null,
    ),
  );
  const list =
    rows.length > 0 ? el("ol", { class: "corpus-list" }, ...rows) : el("p", { class: "quiet" }, none);
  return el("div", null, el("h4", null, title), list);
}

function numbers(head: CorpusHeadData): HTMLElement {
  const body = head.numbers.map(({ title, mean, spread, quantiles, dependence }) =>
    el(
      "tr",
      null,
      el("th", { scope: "row" }, title),
      ...[mean, spread, ...quantiles, dependence].map((value) => el("td", null, fixed(value, 2))),
    ),
  );
  const header = COLUMNS.map((name) =>
    el("th", { scope: "col", ...(name.startsWith("dependence") ? { title: DEPENDENCE } : {}) }, name),
  );
  const labels = head.labels.map(([name, share]) => `${name} ${fixed(share, 2)}`).join(", ");
  return el(
    "div",
    null,
    el("h4", null, "Statistics over documents"),
    el("p", { class: "quiet" }, `Share of documents in which the head has each label: ${labels}.`),
    el(
      "div",
      { class: "table-room", role: "region", "aria-label": "Statistics over documents", tabindex: 0 },
      el(
        "table",
        { class: "corpus-numbers" },
        el("thead", null, el("tr", null, el("td"), ...header)),
        el("tbody", null, ...body),
      ),
    ),
  );
}
