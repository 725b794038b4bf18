/**
 * The model that runs in this page: type a text to recompute every head; switch heads off to see the effect on the next token.
 *
 * Weights are unpacked when the first picture is there. What was measured beforehand stays a source of its own;
 * what is typed becomes one more. After each reading the document is told by an event "headwise-alive", whose detail
 * holds the text, ids, logits, the heads that are off, milliseconds, what computed the products, the source and the
 * flip that panels were given: tests listen to it.
 */

import { byId, el } from "../../shared/elements.ts";
import type { AliveData, LayerData } from "../page_data.ts";
import type { App } from "../store.ts";
import { LiveSource } from "./live_source.ts";
import { LiveText, offHeads, type Said } from "./live_text.ts";
import { likeliest, nextName, sentence, wordList } from "./next_words.ts";
import { flip } from "./text_changes.ts";
import { Tokenizer } from "./tokenizer.ts";
import { unpackedWeights, type Weights } from "./weights.ts";

export function alivePanel(app: App): void {
  if (app.data.alive !== null) new AlivePanel(app, app.data.alive);
}

class AlivePanel {
  private readonly tokenizer: Tokenizer;
  private readonly special: Set<number>;
  private readonly first: string; // the text that the page came with
  private readonly box = el("textarea", { id: "alive-text", rows: 2, spellcheck: "false" });
  private readonly other = el("textarea", { id: "alive-other", rows: 2, spellcheck: "false" });
  private readonly compared = el(
    "div",
    { class: "alive-compared", hidden: true },
    el("label", { for: "alive-other" }, "Second text: change a word or two"),
    this.other,
  );
  private readonly compare = el(
    "button",
    { type: "button", id: "alive-compare" },
    "Compare with a second text",
  );
  private readonly told = el("p", { id: "alive-read", class: "quiet", role: "status" });
  private readonly wrong = el("p", { id: "alive-wrong", role: "alert", hidden: true });
  private readonly written = el("p", { id: "alive-written", hidden: true });
  private readonly words = el("ol", {
    id: "alive-words",
    "aria-label": "Likely next tokens; select one to append it",
  });
  private readonly before = el("p", { id: "alive-before", class: "quiet", hidden: true });
  private readonly toggle = el("button", { type: "button", id: "alive-toggle", "aria-keyshortcuts": "o" });
  private readonly list = el("span", { id: "alive-off" });
  private readonly allOn = el("button", { type: "button", id: "alive-on" }, "Switch all heads on");
  private weights: Promise<Weights> | null = null;
  private texts: Promise<[LiveText, LiveText]> | null = null;
  private said: Said | null = null;
  private saidOther: Said | null = null;
  private numbers: [number | null, number | null] = [null, null]; // of the live sources
  private appended: number[] = []; // what the model wrote after what was typed
  private typedText = "";
  private typedIds: number[] = [];
  private began = false; // somebody typed or switched: the live source is looked at
  private frame = 0;

  constructor(
    private readonly app: App,
    private readonly data: AliveData,
  ) {
    this.tokenizer = new Tokenizer(data.tokenizer);
    this.special = new Set(data.tokenizer.special);
    this.first = data.example; // every letter of it: a reading's own text is on one line
    this.lay();
    this.box.value = app.state.typed || this.first;
    this.other.value = app.state.against;
    this.take();
    this.listen();
    this.showSwitches();
    const { typed, off, against } = app.state;
    if (against) this.open();
    this.began = Boolean(typed || off || against);
    whenDrawn(() => this.readSoon());
  }

  private lay(): void {
    const { num_layers, num_heads } = this.data.config;
    const section = byId("alive");
    section.hidden = false;
    section.append(
      el(
        "div",
        { class: "alive-texts" },
        el("label", { for: "alive-text" }, "Type a text: every head is recomputed"),
        this.box,
        this.told,
        this.wrong,
        this.written,
        this.compared,
        el("div", { class: "alive-switches" }, this.toggle, this.list, this.allOn, this.compare),
      ),
      el(
        "div",
        { class: "alive-next" },
        el("h2", { class: "alive-title" }, "Next token"),
        this.words,
        this.before,
        el(
          "p",
          { class: "quiet" },
          `Probabilities of the next token, computed in this page by ${this.data.title} (${num_layers} layers with ${num_heads} heads each). Click a token to append it.`,
        ),
      ),
    );
  }

  private listen(): void {
    this.box.addEventListener("input", () => {
      this.take();
      this.begin();
    });
    this.other.addEventListener("input", () => this.begin());
    this.compare.addEventListener("click", () => {
      this.open();
      if (!this.other.value) this.other.value = this.box.value;
      this.other.focus();
      this.begin();
    });
    this.toggle.addEventListener("click", () => this.flick(this.app.state.layer, this.app.state.head));
    this.allOn.addEventListener("click", () => this.app.set({ off: "" }));
    byId("wall").addEventListener("keydown", (event) => {
      const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
      if (event.key !== "o" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
      event.preventDefault();
      this.flick(this.app.state.layer, this.app.state.head);
    });
    this.app.on((changed) => {
      const { typed, against } = this.app.state;
      if (changed.has("typed") && typed !== this.typed()) {
        this.box.value = typed || this.first;
        this.take();
        this.begin();
      }
      if (changed.has("against") && against !== this.other.value) {
        this.other.value = against;
        this.open(against !== "");
        this.begin();
      }
      if (changed.has("off")) this.begin();
      if (["off", "layer", "head", "source", "text", "sources"].some((name) => changed.has(name as "off")))
        this.showSwitches();
    });
  }

  private open(on = true): void {
    this.compared.hidden = !on;
    this.compare.hidden = on;
  }

  /** What the address says of the text. */
  private typed(): string {
    return this.box.value === this.first ? "" : this.box.value;
  }

  private get off(): Set<string> {
    const { num_layers, num_heads } = this.data.config;
    return offHeads(this.app.state.off, num_layers, num_heads);
  }

  /** Of another model that stands beside it, a head may be looked at that this one has not. */
  private has(layer: number, head: number): boolean {
    return layer < this.data.config.num_layers && head < this.data.config.num_heads;
  }

  private flick(layer: number, head: number): void {
    if (!this.has(layer, head)) return;
    const off = this.off;
    const name = `${layer}.${head}`;
    if (!off.delete(name)) off.add(name);
    this.app.set({ off: [...off].join(",") });
  }

  /** What stands in the box is what was typed. */
  private take(): void {
    this.appended = [];
    this.typedText = this.box.value;
    this.typedIds = this.tokenizer.encode(this.typedText);
  }

  private begin(): void {
    this.began = true;
    this.readSoon();
  }

  /** Once in a frame, however much is typed in it. */
  private readSoon(): void {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => setTimeout(() => void this.read()));
  }

  private say(id: number): void {
    this.appended.push(id);
    this.box.value = this.typedText + this.tokenizer.decode(this.appended);
    this.begin();
  }

  private async read(): Promise<void> {
    const { max_length: most } = this.data.config;
    const ids = [...this.typedIds, ...this.appended];
    const others = this.compared.hidden || !this.other.value ? null : this.tokenizer.encode(this.other.value);
    const longest = Math.max(ids.length, others?.length ?? 0);
    this.complain(
      longest > most
        ? `The text has ${longest} tokens, but the model reads at most ${most}. Shorten the text.`
        : "",
    );
    if (longest > most) return;
    const text = this.box.value;
    this.weights ??= unpackedWeights(this.data);
    this.texts ??= this.weights.then((weights) => [
      new LiveText(weights, this.tokenizer),
      new LiveText(weights, this.tokenizer),
    ]);
    const [mine, theirs] = await this.texts;
    const said = await mine.read(text, ids, this.typedIds.length, this.off);
    if (said === null) return;
    const saidOther =
      others === null ? null : await theirs.read(this.other.value, others, others.length, this.off);
    if (others !== null && saidOther === null) return;
    this.said = said;
    this.saidOther = saidOther;
    this.show(said, mine.weights.products.kind);
    if (this.began) this.hand();
    const detail = {
      text,
      ids,
      logits: said.logits,
      off: [...said.off],
      milliseconds: said.milliseconds,
      kind: mine.weights.products.kind,
      source: this.numbers[0] === null ? null : this.app.sources[this.numbers[0]],
      flip: saidOther === null ? null : (this.app.data.flips[0] ?? null),
    };
    document.dispatchEvent(new CustomEvent("headwise-alive", { detail }));
  }

  /** Hand over what was read to the other panels. */
  private hand(): void {
    const { app, said, saidOther } = this;
    if (said === null) return;
    const first = this.numbers[0] === null;
    const own = this.put(0, said, "live");
    this.numbers[0] = own;
    const { flips } = app.data;
    const known = flips.findIndex((each) => each.before[0] === own);
    if (known >= 0) flips.splice(known, 1);
    if (saidOther !== null) {
      const theirs = this.put(1, saidOther, "live, second text");
      this.numbers[1] = theirs;
      const made = flip(said.read, saidOther.read, this.special, this.data.config.num_heads, [own, theirs]);
      if (made !== null) flips.unshift(made);
      else
        this.complain("The texts have no token in common and cannot be compared. Change only a few words.");
    }
    app.replace(own, app.sources[own]); // all of it is there now
    const looked = app.state.source;
    const change = { typed: this.typed(), against: this.compared.hidden ? "" : this.other.value };
    const mine = first || looked !== this.numbers[1];
    app.set(mine ? { ...change, source: own, text: 0 } : change);
  }

  private put(which: 0 | 1, said: Said, title: string): number {
    const { app, data } = this;
    const known = app.sources.find((source) => source.title === data.title && !source.alive);
    const { num_layers, num_heads } = data.config;
    const layers: LayerData[] =
      known?.layers.length === num_layers
        ? known.layers
        : Array.from({ length: num_layers }, (_, layer) => ({
            name: `layer ${layer}`,
            path: `decoder.layers.${layer}.attention`,
            kind: "self",
            num_heads,
          }));
    const roles = (layer: number, head: number) => known?.roles(layer, head) ?? null;
    const source = new LiveSource(`${data.title}, ${title}`, layers, app.data.labels, said.read, roles);
    const number = this.numbers[which];
    if (number === null) return app.add(source);
    app.sources[number] = source;
    return number;
  }

  private complain(what: string): void {
    this.wrong.textContent = what;
    this.wrong.hidden = !what;
    this.words.classList.toggle("alive-old", Boolean(what));
  }

  private show(said: Said, kind: string): void {
    const count = said.read.ids.length;
    const slower = kind === "WebAssembly" ? "" : " (slower, because this browser blocks WebAssembly)";
    this.told.textContent = `${count} of ${this.data.config.max_length} tokens, read in ${Math.ceil(said.milliseconds)} ms${slower}`;
    const name = (id: number) => nextName(this.tokenizer, id, said.read.text);
    const focused = this.words.contains(document.activeElement);
    this.words.replaceChildren(...wordList(said.now, said.whole, name, (id) => this.say(id)));
    if (focused) this.words.querySelector("button")?.focus();
    this.before.hidden = said.whole === null;
    this.before.textContent =
      said.whole === null ? "" : `With all heads on: ${sentence(likeliest(said.whole, 3), name)}.`;
    const wrote = said.read.names.slice(said.read.prompt);
    this.written.hidden = wrote.length === 0;
    this.written.replaceChildren(
      "Written by the model: ",
      ...wrote.flatMap((word) => [el("mark", null, word), " "]),
    );
  }

  private showSwitches(): void {
    // the text stands in the box: it need not be quoted as well
    const said = this.box.value.replace(/\s+/g, " ").trim();
    byId("what").classList.toggle(
      "alive-said",
      (this.app.reading.text ?? "").replace(/\s+/g, " ").trim() === said,
    );
    const { layer, head } = this.app.state;
    const off = this.off;
    const isOff = off.has(`${layer}.${head}`);
    this.toggle.textContent = `Switch layer ${layer}, head ${head} ${isOff ? "on again" : "off"}`;
    this.toggle.disabled = !this.has(layer, head);
    if (this.toggle.disabled)
      this.toggle.textContent = `${this.data.title} has no layer ${layer}, head ${head} to switch off`;
    this.allOn.hidden = off.size === 0;
    const buttons = [...off].map((name) => {
      const [l, h] = name.split(".").map(Number);
      const button = el(
        "button",
        { type: "button" },
        `${name} ✕`,
        el("span", { class: "heard" }, " switch it on"),
      );
      button.addEventListener("click", () => this.flick(l, h));
      return button;
    });
    this.list.replaceChildren(...(off.size > 0 ? ["Switched off: ", ...buttons] : []));
  }
}

/** When the first picture is there and the page has nothing else to do. */
function whenDrawn(go: () => void): void {
  const idle = () => {
    if (document.documentElement.dataset.ready !== "true") setTimeout(idle, 30);
    else if ("requestIdleCallback" in window) requestIdleCallback(go, { timeout: 1000 });
    else setTimeout(go, 60);
  };
  requestAnimationFrame(() => setTimeout(idle));
}
