/**
 * The panel of a live model: type a text, and every head is recomputed; switch heads off or scale them to see the effect
 * on the predictions.
 *
 * What computes is an `Engine`: the model in this page, or one that Python runs. After each reading the document gets the
 * event of the engine, "headwise-alive" or "headwise-served", whose detail holds the text, the source and the flip that
 * panels were given, and what the engine adds: tests listen to it.
 */

import { byId, el } from "../shared/elements.ts";
import {
  FACTOR_STEP,
  type Factors,
  factorsText,
  hasScaled,
  LARGEST_FACTOR,
  parsedFactors,
} from "./head_factors.ts";
import type { Engine, EngineListener, EngineResult, Input, ModelReading } from "./live_engine.ts";
import { ReadError } from "./live_engine.ts";
import { predictionList, sentence } from "./prediction_list.ts";
import type { Incomparable, Prediction } from "./served/protocol.ts";
import type { Source } from "./sources.ts";
import type { App } from "./store.ts";
import { latest } from "./view_kinds.ts";

const LARGEST_IMAGE = 8 * 2 ** 20; // bytes
const NOTHING_PREDICTED = "This model predicts no tokens.";
const INCOMPARABLE: Record<Incomparable, string> = {
  same: "The texts are the same, so there is nothing to compare.",
  long: "Texts of more than 256 tokens are not compared token by token.",
  different: "The texts have no token in common and cannot be compared. Change only a few words.",
};

export function livePanel(app: App, engine: Engine): void {
  new LivePanel(app, engine);
}

class LivePanel implements EngineListener {
  private readonly box = el("textarea", { id: "alive-text", rows: 2, spellcheck: "false" });
  private readonly file = el("input", { id: "alive-image", type: "file", accept: "image/*" });
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
  private readonly note = el("p", { id: "alive-read", class: "quiet", role: "status" });
  private readonly running = el("p", { id: "alive-progress", class: "quiet", role: "status" });
  private readonly wrong = el("p", { id: "alive-wrong", role: "alert", hidden: true });
  private readonly written = el("p", { id: "alive-written", hidden: true });
  private readonly words = el("ol", { id: "alive-words" });
  private readonly before = el("p", { id: "alive-before", class: "quiet", hidden: true });
  private readonly hint = el("p", { id: "alive-hint", class: "quiet", hidden: true });
  private readonly none = el("p", { id: "alive-none", class: "quiet", hidden: true }, NOTHING_PREDICTED);
  private readonly toggle = el("button", { type: "button", id: "alive-toggle", "aria-keyshortcuts": "o" });
  private readonly factor = el("input", {
    id: "alive-factor",
    type: "range",
    min: 0,
    max: LARGEST_FACTOR,
    step: FACTOR_STEP,
  });
  private readonly factorValue = el("output", { id: "alive-factor-value", for: "alive-factor" });
  private readonly list = el("span", { id: "alive-off" });
  private readonly allOn = el("button", { type: "button", id: "alive-on" }, "Switch all heads on");
  private readonly numbers: [number | null, number | null]; // of the sources
  private typedText = "";
  private appended: Prediction[] = []; // behind what was typed
  private image: string | null = null;
  private began = false; // somebody typed or switched: what is read here is looked at
  private frame = 0;
  private timer = 0;
  private readonly turn = latest();

  constructor(
    private readonly app: App,
    private readonly engine: Engine,
  ) {
    const shown = engine.shown === null ? -1 : app.sources.indexOf(engine.shown);
    this.numbers = [shown < 0 ? null : shown, null];
    this.lay();
    this.box.value = app.state.typed || engine.example;
    this.other.value = app.state.against;
    this.take();
    this.listen();
    this.showFactors();
    const { typed, off, against } = app.state;
    if (against && engine.input === "text") this.open();
    this.began = Boolean(typed || off || against);
    engine.listen(this);
    whenDrawn(() => this.readSoon());
  }

  private lay(): void {
    const { engine } = this;
    const section = byId("alive");
    section.hidden = false;
    const image = engine.input === "image";
    if (image) section.setAttribute("aria-label", "Choose an image");
    this.compare.hidden = image;
    const input = image
      ? [
          el("label", { for: "alive-image" }, "Choose an image: every head is recomputed"),
          this.file,
          el("p", { class: "quiet" }, "A file of at most 8 MiB, such as PNG or JPEG."),
        ]
      : [el("label", { for: "alive-text" }, "Type a text: every head is recomputed"), this.box];
    section.append(
      el(
        "div",
        { class: "alive-texts" },
        ...input,
        this.note,
        this.running,
        this.wrong,
        this.written,
        this.compared,
        el(
          "div",
          { class: "alive-switches" },
          this.toggle,
          el(
            "span",
            { class: "alive-factor" },
            el("label", { for: "alive-factor" }, "Output of this head ×"),
            this.factor,
            this.factorValue,
          ),
          this.list,
          this.allOn,
          this.compare,
        ),
      ),
      el("div", { class: "alive-next" }, ...this.predictionParts()),
    );
  }

  private predictionParts(): HTMLElement[] {
    const { predicts, mask, title, place, layers } = this.engine;
    const heads = new Set(layers.map((layer) => layer.num_heads));
    const size = heads.size === 1 ? ` with ${[...heads][0]} heads each` : "";
    const computed = `computed ${place} by ${title} (${layers.length} layers${size})`;
    if (predicts === "") {
      this.none.hidden = false;
      return [this.none];
    }
    const [name, label, about] =
      predicts === "next token"
        ? [
            "Next token",
            "Likely next tokens; select one to append it",
            `Probabilities of the next token, ${computed}. Click a token to append it.`,
          ]
        : predicts === "masked token"
          ? [
              "Masked token",
              `Likely tokens in place of ${mask}; select one to put it there`,
              `Probabilities of the token at the first ${mask}, ${computed}. Click a token to put it there.`,
            ]
          : ["Class", "Likely classes", `Probabilities of the classes, ${computed}.`];
    this.words.setAttribute("aria-label", label);
    return [
      el("h2", { class: "alive-title" }, name),
      this.words,
      this.none,
      this.hint,
      this.before,
      el("p", { class: "quiet" }, about),
    ];
  }

  private listen(): void {
    this.box.addEventListener("input", () => {
      this.take();
      this.begin();
    });
    this.file.addEventListener("change", () => void this.takeImage());
    this.other.addEventListener("input", () => this.begin());
    this.compare.addEventListener("click", () => {
      this.open();
      if (!this.other.value) this.other.value = this.box.value;
      this.other.focus();
      this.begin();
    });
    this.toggle.addEventListener("click", () => this.flick(this.app.state.layer, this.app.state.head));
    this.factor.addEventListener("input", () =>
      this.scale(this.app.state.layer, this.app.state.head, Number(this.factor.value)),
    );
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
        this.box.value = typed || this.engine.example;
        this.take();
        this.begin();
      }
      if (changed.has("against") && against !== this.other.value && this.engine.input === "text") {
        this.other.value = against;
        this.open(against !== "");
        this.begin();
      }
      if (changed.has("off")) this.begin();
      if (["off", "layer", "head", "source", "text", "sources"].some((name) => changed.has(name as "off")))
        this.showFactors();
    });
  }

  progress(message: string): void {
    this.running.textContent = message;
  }

  trouble(message: string): void {
    this.complain(message);
  }

  replaced(lost: Source, source: Source): void {
    const number = this.app.sources.indexOf(lost);
    if (number < 0) return;
    this.app.replace(number, source);
    lost.close?.();
  }

  again(): void {
    this.begin();
  }

  private open(on = true): void {
    this.compared.hidden = !on;
    this.compare.hidden = on;
  }

  /** What the address says of the text. */
  private typed(): string {
    return this.box.value === this.engine.example ? "" : this.box.value;
  }

  private get factors(): Map<string, number> {
    return parsedFactors(this.app.state.off, this.engine.layers);
  }

  /** Of another model that stands beside it, a head may be looked at that this one has not. */
  private has(layer: number, head: number): boolean {
    return head < (this.engine.layers[layer]?.num_heads ?? 0);
  }

  private flick(layer: number, head: number): void {
    this.scale(layer, head, this.factors.get(`${layer}.${head}`) === 0 ? 1 : 0);
  }

  private scale(layer: number, head: number, factor: number): void {
    if (!this.has(layer, head)) return;
    const factors = this.factors;
    if (factor === 1) factors.delete(`${layer}.${head}`);
    else factors.set(`${layer}.${head}`, factor);
    this.app.set({ off: factorsText(factors) });
  }

  /** What stands in the box is what was typed. */
  private take(): void {
    this.appended = [];
    this.typedText = this.box.value;
  }

  private async takeImage(): Promise<void> {
    const file = this.file.files?.[0];
    if (file === undefined) return;
    if (file.size > LARGEST_IMAGE) {
      const size = (file.size / 2 ** 20).toFixed(1);
      this.complain(`The image file has ${size} MiB, but at most 8 MiB can be read. Choose a smaller one.`);
      return;
    }
    const image = await base64(file);
    if (file !== this.file.files?.[0]) return; // another was chosen meanwhile
    this.image = image;
    this.begin();
  }

  private begin(): void {
    this.began = true;
    this.readSoon();
  }

  /** At once, or where reading blocks the page, after the frame that shows what was typed. */
  private readSoon(): void {
    if (!this.engine.blocks) {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => void this.read());
      return;
    }
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => setTimeout(() => void this.read()));
  }

  private append(prediction: Prediction): void {
    this.appended.push(prediction);
    this.box.value = this.engine.joined(this.typedText, this.appended);
    this.begin();
  }

  /** A prediction in place of the first mask token. */
  private fill({ name, text }: Prediction): void {
    const mask = this.engine.mask ?? "";
    const at = mask === "" ? -1 : this.box.value.indexOf(mask);
    if (at < 0) return;
    const start = this.box.value.slice(0, at);
    const word = text || name;
    const continues = name.length > 1 && name.startsWith("…"); // the word before it
    const left = continues ? start.trimEnd() : start;
    const spaced = continues || left === "" || /\s$/.test(left) ? word.trimStart() : word;
    this.box.value = left + spaced + this.box.value.slice(at + mask.length);
    this.take();
    this.begin();
  }

  private inputs(): [Input, Input | null] {
    const { typedText, appended, image } = this;
    const first = { text: this.box.value, typed: typedText, appended: [...appended], image };
    const other = this.compared.hidden ? "" : this.other.value;
    return [first, other === "" ? null : { text: other, typed: other, appended: [], image: null }];
  }

  private async read(): Promise<void> {
    const here = this.turn();
    const { factors } = this;
    const inputs = this.inputs();
    let result: EngineResult | null;
    try {
      result = await this.engine.read(inputs, factors);
    } catch (error) {
      if (!(error instanceof ReadError)) throw error;
      if (here()) this.complain(error.message);
      return;
    }
    if (result === null || !here()) return;
    const [reading] = result.readings;
    if (this.box.value === inputs[0].text && reading.text !== this.box.value) this.box.value = reading.text; // several tokens may be one letter
    this.complain("");
    this.show(reading, factors);
    if (this.began) this.hand(result);
    const [own] = this.numbers;
    const detail = {
      text: reading.text,
      ...result.detail,
      source: own === null ? null : this.app.sources[own],
      flip: result.readings[1] === null ? null : (this.app.data.flips[0] ?? null),
    };
    document.dispatchEvent(new CustomEvent(this.engine.event, { detail }));
  }

  /** Hand over what was read to the other panels. */
  private hand({ readings: [reading, other], changes, incomparable }: EngineResult): void {
    const { app } = this;
    const first = this.numbers[0] === null;
    const lost = this.numbers.map((number) => (number === null ? null : app.sources[number]));
    const own = this.put(0, reading);
    const { flips } = app.data;
    const known = flips.findIndex((each) => each.before[0] === own);
    if (known >= 0) flips.splice(known, 1);
    if (other !== null) {
      const theirs = this.put(1, other);
      if (changes !== null) flips.unshift({ before: [own, 0], after: [theirs, 0], ...changes });
      else this.complain(INCOMPARABLE[incomparable ?? "different"], false);
    }
    app.replace(own, app.sources[own]); // all of it is there now
    for (const source of lost) if (source !== null && !app.sources.includes(source)) source.close?.();
    const looked = app.state.source;
    const change = { typed: this.typed(), against: this.compared.hidden ? "" : this.other.value };
    const mine = first || looked !== this.numbers[1];
    app.set(mine ? { ...change, source: own, text: 0 } : change);
  }

  private put(slot: 0 | 1, { source }: ModelReading): number {
    const number = this.numbers[slot] ?? this.app.add(source);
    this.numbers[slot] = number;
    this.app.sources[number] = source;
    return number;
  }

  private complain(message: string, old = true): void {
    if (this.wrong.textContent !== message) this.wrong.textContent = message;
    this.wrong.hidden = !message;
    this.words.classList.toggle("alive-old", old && Boolean(message));
  }

  private show({ note, predictions, before, problem, written }: ModelReading, factors: Factors): void {
    const { predicts, mask } = this.engine;
    this.note.textContent = note;
    const choice =
      predicts === "next token"
        ? { hint: "press to append", choose: (prediction: Prediction) => this.append(prediction) }
        : predicts === "masked token"
          ? {
              hint: `press to put it in place of ${mask}`,
              choose: (prediction: Prediction) => this.fill(prediction),
            }
          : null;
    const focused = this.words.contains(document.activeElement);
    const unchanged = hasScaled(factors) ? "all heads unchanged" : "all heads on";
    this.words.replaceChildren(...predictionList(predictions, `with ${unchanged}`, choice));
    this.words.hidden = predictions.length === 0;
    if (focused) (this.words.querySelector("button") ?? this.box).focus();
    this.before.hidden = before === null || before.length === 0;
    this.before.textContent = before === null ? "" : `With ${unchanged}: ${sentence(before)}.`;
    this.none.textContent = problem || NOTHING_PREDICTED;
    this.none.hidden = predictions.length > 0 || (problem === "" && predicts !== "");
    this.hint.hidden = predicts !== "masked token" || predictions.length > 0 || problem !== "";
    if (!this.hint.hidden)
      this.hint.textContent = `The text has no ${mask}. Write ${mask} in place of a word to see what the model predicts there.`;
    this.written.hidden = written.length === 0;
    this.written.replaceChildren(
      "Written by the model: ",
      ...written.flatMap((word) => [el("mark", null, word), " "]),
    );
  }

  private showFactors(): void {
    // the text stands in the box: it need not be quoted as well
    const said = this.box.value.replace(/\s+/g, " ").trim();
    byId("what").classList.toggle(
      "alive-said",
      (this.app.reading.text ?? "").replace(/\s+/g, " ").trim() === said,
    );
    const { layer, head } = this.app.state;
    const factors = this.factors;
    const factor = factors.get(`${layer}.${head}`) ?? 1;
    this.toggle.textContent = `Switch layer ${layer}, head ${head} ${factor === 0 ? "on again" : "off"}`;
    this.toggle.disabled = this.factor.disabled = !this.has(layer, head);
    if (this.toggle.disabled)
      this.toggle.textContent = `${this.engine.title} has no layer ${layer}, head ${head} to switch off`;
    this.factor.value = String(factor);
    this.factorValue.textContent = factor.toFixed(1);
    this.allOn.hidden = factors.size === 0;
    const entries = [...factors];
    const off = entries
      .filter(([, factor]) => factor === 0)
      .map(([name]) => this.reset(name, name, "switch it on"));
    const scaled = entries
      .filter(([, factor]) => factor !== 0)
      .map(([name, factor]) => this.reset(name, `${name} × ${factor.toFixed(1)}`, "back to × 1.0"));
    this.list.replaceChildren(
      ...(off.length > 0 ? ["Switched off: ", ...off] : []),
      ...(scaled.length > 0 ? ["Scaled: ", ...scaled] : []),
    );
  }

  /** A button that sets a head's factor back to 1. */
  private reset(name: string, title: string, effect: string): HTMLElement {
    const button = el(
      "button",
      { type: "button" },
      `${title} ✕`,
      el("span", { class: "heard" }, ` ${effect}`),
    );
    const [layer, head] = name.split(".").map(Number);
    button.addEventListener("click", () => this.scale(layer, head, 1));
    return button;
  }
}

/** A file's bytes in base64. */
async function base64(file: Blob): Promise<string> {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let letters = "";
  for (let at = 0; at < bytes.length; at += 32768)
    letters += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(letters);
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
