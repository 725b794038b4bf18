/** What is looked at, the one place that knows it; the address after # says the same and reopens the view. */

import type { PageData } from "./page_data.ts";
import type { Call, Reading, Source } from "./sources.ts";

export interface State {
  source: number;
  text: number; // which reading
  layer: number; // counts the source's layers from 0
  head: number;
  token: number | null; // the query that is pinned
  view: "map" | "lines" | "image";
  measure: "weights" | "written";
  colour: string; // of the wall: "maps", "label", a statistic's name, "role"
  sort: string; // "layer", "label", a statistic's name, "role", "moved" (flip), "effect"
  order: "most" | "least"; // which come first where heads are sorted by a number
  label: string; // "": all; else only heads with it
  search: string;
  tab: string; // the panel below: "words", "flip", "compare", "diversity", "training", "numbers"
  beside: string; // compare: "source.text.layer.head", "" for none
  step: number | null; // of generation; null: the last
  checkpoint: number | null; // of training; null: the last
  off: string; // heads that are switched off or scaled, "2.3,3.0x0.5": see head_factors.ts
  typed: string; // what a live model reads; "": the text it came with
  against: string; // the text that it is compared with, "" for none
}

const START: State = {
  source: 0, text: 0, layer: 0, head: 0, token: null, view: "map", measure: "weights", colour: "maps",
  sort: "layer", order: "most", label: "", search: "", tab: "", beside: "", step: null, checkpoint: null, off: "",
  typed: "", against: "",
}; // biome-ignore format: a table

const NUMBERS: (keyof State)[] = ["source", "text", "layer", "head", "token", "step", "checkpoint"];

export type Changed = ReadonlySet<keyof State | "sources">;
type Listener = (changed: Changed) => void;

export class App {
  readonly state: State;
  private readonly start: State; // what an address need not say
  private readonly listeners: Listener[] = [];
  private awaited: number | null = null; // an address's token, of a text that a live model has yet to read

  constructor(
    readonly data: PageData,
    readonly sources: Source[],
  ) {
    const view = sources[0]?.readings[0]?.image ? "image" : "map";
    const colour = data.corpus?.start ?? START.colour;
    this.start = { ...START, view, colour, layer: data.start.layer, head: data.start.head };
    this.state = { ...this.start };
    const asked = this.addressed(location.href);
    Object.assign(this.state, this.checked(asked));
    this.wait(asked);
    window.addEventListener("hashchange", ({ newURL }) => {
      const wanted = this.addressed(newURL); // the page itself may have written another one meanwhile
      this.set(wanted);
      this.wait(wanted);
    });
  }

  get source(): Source {
    return this.sources[this.state.source];
  }

  get reading(): Reading {
    return this.source.readings[this.state.text];
  }

  /** The chosen layer on the chosen text. */
  get call(): Call | null {
    return this.reading.calls[this.state.layer];
  }

  /** Told after every change of what is looked at, with what changed; panels draw themselves anew. */
  on(listener: Listener): void {
    this.listeners.push(listener);
  }

  set(change: Partial<State>): void {
    const late = change.source !== undefined && this.awaited !== null ? { token: this.awaited } : {};
    const wanted = this.checked({ ...this.state, ...late, ...change });
    if ("token" in change || wanted.token === this.awaited) this.awaited = null;
    const changed = new Set<keyof State>();
    for (const name of Object.keys(wanted) as (keyof State)[]) {
      if (this.state[name] !== wanted[name]) changed.add(name);
    }
    if (changed.size === 0) return;
    Object.assign(this.state, wanted);
    this.tell(changed);
  }

  /** Another source in place of one, as when a live model has read another text. */
  replace(number: number, source: Source): void {
    this.sources[number] = source;
    const before = { ...this.state };
    Object.assign(this.state, this.checked(this.state));
    const changed = new Set<keyof State | "sources">(["sources"]);
    for (const name of Object.keys(before) as (keyof State)[]) {
      if (this.state[name] !== before[name]) changed.add(name);
    }
    this.tell(changed);
  }

  /** One more source, as when a live model reads for the first time; its number. */
  add(source: Source): number {
    this.sources.push(source);
    this.tell(new Set(["sources"]));
    return this.sources.length - 1;
  }

  private wait({ typed, token }: State): void {
    this.awaited = typed !== "" && token !== this.state.token ? token : null;
  }

  private tell(changed: Changed): void {
    this.remember();
    for (const listener of this.listeners) listener(changed);
  }

  /** A state that is there: numbers inside what the page holds, whatever an address says. */
  private checked(wanted: State): State {
    const state = { ...wanted };
    const inside = (n: number, count: number) => (Number.isInteger(n) && n >= 0 && n < count ? n : 0);
    state.source = inside(state.source, this.sources.length);
    const source = this.sources[state.source];
    state.text = inside(state.text, source.readings.length);
    const reading = source.readings[state.text];
    state.layer = inside(state.layer, source.layers.length);
    const there = reading.heads.filter((head) => head.layer === state.layer);
    if (there.length === 0) state.layer = reading.heads[0]?.layer ?? 0;
    const heads = reading.heads.filter((head) => head.layer === state.layer);
    if (!heads.some((head) => head.head === state.head)) state.head = heads[0]?.head ?? 0;
    const queries = reading.calls[state.layer]?.queries ?? 0;
    if (state.token !== null && !(state.token >= 0 && state.token < queries)) state.token = null;
    if (!["map", "lines", "image"].includes(state.view)) state.view = "map";
    if (!["weights", "written"].includes(state.measure)) state.measure = "weights";
    if (!["most", "least"].includes(state.order)) state.order = "most";
    return state;
  }

  /** What an address leaves out is as at the start: a link shows the same, whatever was looked at before. */
  private addressed(address: string): State {
    const asked = new URLSearchParams(address.split("#").slice(1).join("#"));
    const state: Record<string, unknown> = { ...this.start };
    for (const [name, said] of asked) {
      if (!Object.hasOwn(START, name)) continue;
      if (!NUMBERS.includes(name as keyof State)) state[name] = said;
      else if (/^\d+$/.test(said)) state[name] = Number(said);
    }
    return state as unknown as State;
  }

  /** The address of this view; what is as at the start is left out, but for layer and head. */
  private remember(): void {
    const said = new URLSearchParams();
    for (const [name, value] of Object.entries(this.state)) {
      const always = name === "layer" || name === "head";
      if (value !== null && (always || value !== this.start[name as keyof State]))
        said.set(name, String(value));
    }
    try {
      history.replaceState(null, "", `#${said}`);
    } catch {
      // a page inside a notebook has no address of its own
    }
  }
}
