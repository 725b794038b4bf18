/** The views below the wall, of two texts above it: a row of tabs, one panel open; nothing of a closed one is computed. */

import { byId, el } from "../shared/elements.ts";
import { onTheme } from "../shared/theme.ts";
import { compareView } from "./compare.ts";
import { corpusView } from "./corpus_view.ts";
import { diversityView } from "./diversity.ts";
import { effectsView } from "./effects_view.ts";
import { flipView } from "./flip.ts";
import { numbersView } from "./numbers_table.ts";
import type { App, Changed } from "./store.ts";
import { trainingView } from "./training.ts";
import type { OpenView, View } from "./view_kinds.ts";

const VIEWS = [corpusView, flipView, compareView, diversityView, trainingView, effectsView, numbersView];

export function viewsPanel(app: App): HTMLElement {
  const place = byId("more");
  const list = el("div", { role: "tablist", "aria-label": "More views", class: "tabs" });
  const room = el("div", { class: "views" });
  place.replaceChildren(list, room);
  if (app.data.start.comparison) document.querySelector("main")?.before(place);
  const made = new Map<string, OpenView>(); // those that were open once
  let open: View | null = null;
  let near = false; // whether the panel is, or soon comes, into sight
  let due: Changed | null | undefined; // what it has not drawn yet; undefined: nothing

  const there = () => VIEWS.filter((view) => view.there(app));
  const draw = (changed: Changed | null) => {
    if (open === null) return;
    if (!near) {
      due = due === undefined && changed !== null ? changed : null;
      return;
    }
    due = undefined;
    void panelOf(open).draw(changed);
  };
  const panelOf = (view: View): OpenView => {
    const known = made.get(view.id);
    if (known) return known;
    const opened = view.open(app);
    made.set(view.id, opened);
    byId(`panel-${view.id}`).replaceChildren(opened.element);
    return opened;
  };
  const mark = () => {
    for (const tab of list.children as HTMLCollectionOf<HTMLElement>) {
      const chosen = tab.dataset.tab === open?.id;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
    const tab = list.querySelector<HTMLElement>("[aria-selected=true]");
    if (
      tab &&
      (tab.offsetLeft < list.scrollLeft ||
        tab.offsetLeft + tab.offsetWidth > list.scrollLeft + list.clientWidth)
    )
      list.scrollLeft = tab.offsetLeft - 40;
    for (const panel of room.children as HTMLCollectionOf<HTMLElement>)
      panel.hidden = panel.id !== `panel-${open?.id}`;
  };
  const show = () => {
    const views = there();
    const wanted = views.find((view) => view.id === app.state.tab) ?? views[0] ?? null;
    if (wanted === open) return;
    if (open !== null) made.get(open.id)?.close?.();
    open = wanted;
    mark();
    draw(null);
  };
  /** The tabs anew, where what is there changed. */
  const build = () => {
    const views = there();
    const now = [...list.children].map((tab) => (tab as HTMLElement).dataset.tab).join();
    if (now === views.map((view) => view.id).join()) return;
    const kept = new Map([...room.children].map((panel) => [panel.id, panel]));
    list.replaceChildren(
      ...views.map((view) =>
        el(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${view.id}`,
            "data-tab": view.id,
            "aria-controls": `panel-${view.id}`,
          },
          view.title,
        ),
      ),
    );
    room.replaceChildren(
      ...views.map(
        (view) =>
          kept.get(`panel-${view.id}`) ??
          el("div", {
            role: "tabpanel",
            id: `panel-${view.id}`,
            "aria-labelledby": `tab-${view.id}`,
            tabindex: 0,
            hidden: true,
          }),
      ),
    );
    place.hidden = views.length === 0;
    if (open !== null && !views.includes(open)) open = null;
    mark();
  };

  list.addEventListener("click", (event) => {
    const tab = (event.target as Element).closest<HTMLElement>("[role=tab]");
    if (tab) app.set({ tab: tab.dataset.tab ?? "" });
  });
  list.addEventListener("keydown", (event) => {
    const tabs = [...list.children] as HTMLElement[];
    const at = tabs.findIndex((tab) => tab.dataset.tab === open?.id);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const tab = tabs[(to + tabs.length) % tabs.length];
    app.set({ tab: tab.dataset.tab ?? "" });
    tab.focus({ preventScroll: true });
  });
  app.on((changed) => {
    if (changed.has("sources")) build();
    const before = open;
    show();
    if (open === before) draw(changed);
  });
  onTheme(() => draw(null));
  new IntersectionObserver(
    (entries) => {
      near = entries[entries.length - 1].isIntersecting;
      if (near && due !== undefined) draw(due);
    },
    { rootMargin: "300px" },
  ).observe(place);
  build();
  show();
  return place;
}
