/** The model that Python runs: texts are sent to it, and what is shown of them is fetched from it. */

import type { Factors } from "../head_factors.ts";
import { counted } from "../head_scene.ts";
import {
  type Engine,
  type EngineListener,
  type EngineResult,
  type Input,
  type ModelReading,
  ReadError,
} from "../live_engine.ts";
import type { LayerData, ServedData } from "../page_data.ts";
import { type Answer, AskError, Connection, pause } from "./connection.ts";
import type { ChangesReply, Prediction, ReadReply } from "./protocol.ts";
import { ServedSource, type SourceOwner, type TextAsk } from "./served_source.ts";

const LATE_MS = 1000; // until progress is shown
const POLL_MS = 500;
const SILENT_MS = 5000; // until a missing answer is mentioned
const RENEWED_MS = 1000; // a reading that is gone sooner is not read again
const LOST =
  "There is no connection to the model: headwise serve does not answer. Trying again every second.";

/** The text of a box as it was read last. */
interface Slot {
  source: ServedSource;
  time: number; // when it was read; -Infinity: before the page was there
  renewal: Promise<ServedSource | null> | null;
}

export class ServedEngine implements Engine, SourceOwner {
  readonly connection: Connection;
  readonly title: string;
  readonly layers: LayerData[];
  readonly input: "text" | "image";
  readonly predicts: string;
  readonly mask: string | null;
  readonly example: string;
  readonly place = "in Python";
  readonly blocks = false;
  readonly event = "headwise-served";
  readonly shown: ServedSource;
  private readonly slots: [Slot, Slot | null];
  private current = true; // whether the process still has what the slots have read
  private listener: EngineListener | null = null;
  private running: AbortController | null = null;
  private last = 0; // number of a read

  constructor(data: ServedData) {
    this.connection = new Connection(data.transport, data.channel);
    this.title = data.title;
    this.layers = data.layers;
    this.input = data.input;
    this.predicts = data.predicts;
    this.mask = data.mask_token;
    this.example = data.first.text;
    const input = { text: this.example, typed: this.example, appended: [], image: null };
    this.shown = this.source(this.readAsk(input, new Map(), 0), { header: data.first, data: null });
    this.slots = [slotOf(this.shown, -Infinity), null];
  }

  listen(listener: EngineListener): void {
    this.listener = listener;
    this.connection.on((state) => {
      if (state === "lost") {
        this.current = false;
        listener.trouble(LOST);
      } else listener.again();
    });
  }

  joined(typed: string, appended: readonly Prediction[]): string {
    return typed + appended.map(({ text }) => text).join("");
  }

  async read([first, second]: [Input, Input | null], factors: Factors): Promise<EngineResult | null> {
    this.running?.abort();
    const running = new AbortController();
    const { signal } = running;
    this.running = running;
    const end = this.watchProgress();
    try {
      const readBoth = async () => {
        const source = await this.slotRead(0, first, factors, signal);
        const other = second === null ? null : await this.slotRead(1, second, factors, signal);
        this.current = true;
        return { source, other, compared: other && (await this.compared(source, other, signal)) };
      };
      const { source, other, compared } = await readBoth().catch((error) => {
        if (!isGone(error)) throw error;
        this.current = false;
        return readBoth();
      });
      const { tokens, predictions, milliseconds } = source.reply;
      return {
        readings: [this.reading(source, first), other && second && this.reading(other, second)],
        changes: compared?.flip ?? null,
        incomparable: compared && compared.flip === null ? compared.reason || "different" : null,
        detail: { tokens, predictions, factors: Object.fromEntries(factors), milliseconds },
      };
    } catch (error) {
      if (signal.aborted || (error instanceof AskError && error.kind === "superseded")) return null;
      throw new ReadError(message(error));
    } finally {
      end();
      if (this.running === running) this.running = null;
    }
  }

  renewed(source: ServedSource): Promise<ServedSource | null> {
    const slot = this.slots.find((each) => each?.source === source);
    if (!slot || this.running !== null) return Promise.resolve(null); // another text takes its place
    slot.renewal ??= this.renew(slot).finally(() => {
      slot.renewal = null;
    });
    return slot.renewal;
  }

  failed(error: unknown, source: ServedSource): void {
    const aborted = error instanceof DOMException && error.name === "AbortError";
    const superseded = error instanceof AskError && error.kind === "superseded";
    const replaced = this.running !== null || !this.slots.some((slot) => slot?.source === source);
    if (aborted || superseded || (isGone(error) && replaced)) return;
    if (isGone(error)) this.current = false;
    this.listener?.trouble(message(error));
  }

  /** The same text again, in place of a reading that the process no longer has. */
  private async renew(slot: Slot): Promise<ServedSource | null> {
    if (performance.now() - slot.time < RENEWED_MS) return null;
    const lost = slot.source;
    this.last++;
    const ask = { ...lost.ask, number: this.last, maps: lost.shown };
    const answer = await this.connection.ask(ask).catch((error) => {
      this.current = false;
      throw error;
    });
    const number = this.slots.indexOf(slot);
    if (number < 0) return null;
    const source = this.source(lost.ask, answer);
    this.slots[number] = slotOf(source);
    this.listener?.replaced(lost, source);
    return source;
  }

  private async slotRead(
    slot: 0 | 1,
    input: Input,
    factors: Factors,
    signal: AbortSignal,
  ): Promise<ServedSource> {
    const ask = this.readAsk(input, factors, slot);
    const before = this.slots[slot]?.source;
    const same = before !== undefined && JSON.stringify(before.ask) === JSON.stringify(ask);
    if (this.current && same) return before;
    this.last++;
    const maps = before?.shown ?? []; // what is looked at now: with the reply, it needs no request of its own
    const source = this.source(ask, await this.connection.ask({ ...ask, number: this.last, maps }, signal));
    this.slots[slot] = slotOf(source);
    if (same) this.listener?.replaced(before, source);
    return source;
  }

  private async compared(
    { reply: first }: ServedSource,
    { reply: second }: ServedSource,
    signal: AbortSignal,
  ): Promise<ChangesReply> {
    const readings: [string, string] = [first.reading, second.reading];
    return (await this.connection.ask({ ask: "changes", readings }, signal)).header;
  }

  private readAsk(input: Input, factors: Factors, slot: 0 | 1): TextAsk {
    const image = this.input === "image";
    return {
      ask: "read",
      client: this.connection.client,
      text: image ? this.example : input.typed,
      appended: input.appended.map(({ id }) => id),
      image: image ? input.image : null,
      factors: Object.fromEntries(factors),
      slot,
    };
  }

  private source(ask: TextAsk, { header, data }: Answer<ReadReply>): ServedSource {
    const title = ask.slot === 0 ? this.title : `${this.title}, second text`;
    return new ServedSource(title, this.layers, ask, header, data, this);
  }

  private reading(source: ServedSource, input: Input): ModelReading {
    const { text, tokens, all_tokens, prompt, predictions, before, note, problem, milliseconds } =
      source.reply;
    const names = source.readings[0].calls.find((call) => call !== null)?.keyTokens ?? [];
    const appended = input.appended.length > 0;
    const whole = appended && text.startsWith(input.typed) && text.length > input.typed.length;
    const time = `${counted(Math.ceil(milliseconds))} ms`;
    const sentence =
      all_tokens > tokens
        ? `The first ${counted(tokens)} of ${counted(all_tokens)} tokens were read. This took ${time}.`
        : `${counted(tokens)} tokens, read in ${time}`;
    return {
      source,
      text: whole ? text : input.text,
      written: appended ? names.slice(prompt) : [],
      predictions,
      before,
      problem: problem ?? "",
      note: note === "" ? sentence : `${sentence.replace(/\.?$/, ".")} ${note}`,
    };
  }

  /** Ask how far a read is, once it takes long; what is returned ends that. */
  private watchProgress(): () => void {
    const ended = new AbortController();
    const { signal } = ended;
    const show = (text: string) => {
      if (!signal.aborted) this.listener?.progress(text);
    };
    const watch = async () => {
      for (await pause(LATE_MS, signal); !signal.aborted; await pause(POLL_MS, signal)) {
        const silent = setTimeout(() => show("Reading: no answer yet"), SILENT_MS);
        try {
          const ask = { ask: "progress", client: this.connection.client } as const;
          const { done, of } = (await this.connection.ask(ask, signal)).header;
          if (of === 0) show("Reading");
          else show(done < of ? `Reading: layer ${counted(done)} of ${counted(of)}` : "Measuring the heads");
        } finally {
          clearTimeout(silent);
        }
      }
    };
    void watch().catch(() => {}); // ended, or nobody knows
    return () => {
      show("");
      ended.abort();
    };
  }
}

function slotOf(source: ServedSource, time = performance.now()): Slot {
  return { source, time, renewal: null };
}

const isGone = (error: unknown) => error instanceof AskError && error.kind === "gone";

function message(error: unknown): string {
  if (!(error instanceof AskError)) return "The answer of the server cannot be read.";
  if (error.kind === "token")
    return "The token of this page is not valid. Open the page at the address that headwise serve printed.";
  if (isGone(error)) return "The server no longer has this text. Type it again, or reload the page.";
  return error.message;
}
