/**
 * The connection to the Python process: one ask, one answer, by HTTP or by messages to the window around this frame.
 *
 * An ask that reaches nobody is sent again as soon as somebody answers; until then the connection is "lost", and a
 * short ask looks for the process every second.
 */

import type { Ask, ErrorReply, Replies } from "./protocol.ts";

const RETRY_MS = 1000;
const PROBE_MS = 5000; // a probe that takes longer has failed
const STUCK_MS = 60_000; // a notebook that has not answered a read until then may have lost it
const AT_ONCE = 4; // asks for maps and the like: browsers open six connections, and a read must not wait for one

export interface Answer<Header> {
  header: Header;
  data: Uint8Array<ArrayBuffer> | null; // zlib-compressed
}

export type ConnectionState = "open" | "lost";

/** An error that the process answered with. */
export class AskError extends Error {
  constructor(
    readonly kind: ErrorReply["kind"],
    message: string,
  ) {
    super(message);
    this.name = "AskError";
  }
}

/** There was no answer at all. */
class NoAnswer extends Error {}

interface Transport {
  send(ask: Ask, signal?: AbortSignal): Promise<Answer<unknown>>;
}

const KINDS: ErrorReply["kind"][] = ["refused", "superseded", "gone", "token", "failed", "busy"];

function askError(reply: unknown, otherwise: string): AskError {
  const { error, kind } = (reply ?? {}) as Partial<ErrorReply>;
  if (typeof error !== "string") return new AskError("failed", otherwise);
  return new AskError(kind !== undefined && KINDS.includes(kind) ? kind : "failed", error);
}

/** POST ask, beside the page; the token stands in the page's own address. */
class HttpTransport implements Transport {
  private readonly address = new URL("ask", document.baseURI);
  private readonly token: string;

  constructor() {
    const token = new URLSearchParams(location.search).get("token") ?? "";
    this.token = /^[\x21-\x7e]*$/.test(token) ? token : ""; // what no header can hold is no token
  }

  async send(ask: Ask, signal?: AbortSignal): Promise<Answer<unknown>> {
    let status: number;
    let bytes: ArrayBuffer;
    try {
      const response = await fetch(this.address, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Headwise-Token": this.token },
        body: JSON.stringify(ask),
        cache: "no-store",
        signal,
      });
      status = response.status;
      bytes = await response.arrayBuffer();
    } catch (error) {
      signal?.throwIfAborted();
      throw new NoAnswer(String(error));
    }
    if (status !== 200) throw askError(parsed(new Uint8Array(bytes)), `The server answered with ${status}.`);
    const length = bytes.byteLength < 4 ? -1 : new DataView(bytes).getUint32(0, true);
    const header =
      length < 0 || 4 + length > bytes.byteLength ? null : parsed(new Uint8Array(bytes, 4, length));
    if (header === null) throw new AskError("failed", "The answer of the server cannot be read.");
    const data = new Uint8Array(bytes, 4 + length);
    return { header, data: data.length > 0 ? data : null };
  }
}

/** JSON in UTF-8; null: it is none. */
function parsed(bytes: Uint8Array<ArrayBuffer>): unknown {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return null;
  }
}

interface Posted {
  ask: Ask;
  resolve(answer: Answer<unknown>): void;
  reject(error: unknown): void;
}

/**
 * Messages to the window that this frame is in: a notebook's widget, which asks Python.
 *
 * A kernel answers in order and ends what it began. So one read of a slot is under way; of those that are asked for
 * meanwhile, only the newest is sent.
 */
class ParentTransport implements Transport {
  private readonly waiting = new Map<number, Posted>();
  private readonly reading = new Map<number, number>(); // by slot: the read that is under way
  private readonly next = new Map<number, number>(); // by slot: the read that is sent after it
  private last = 0;

  constructor(private readonly channel: string) {
    window.addEventListener("message", (event) => this.receive(event));
  }

  send(ask: Ask, signal?: AbortSignal): Promise<Answer<unknown>> {
    this.last++;
    const id = this.last;
    return new Promise((resolve, reject) => {
      const abort = () => {
        this.waiting.delete(id); // what was not sent never is
        reject(signal?.reason);
      };
      const end = () => signal?.removeEventListener("abort", abort);
      this.waiting.set(id, {
        ask,
        resolve: (answer) => {
          end();
          resolve(answer);
        },
        reject: (error) => {
          end();
          reject(error);
        },
      });
      signal?.addEventListener("abort", abort, { once: true });
      if (ask.ask === "read" && this.reading.has(ask.slot)) this.postpone(id, ask.slot);
      else this.post(id, ask);
    });
  }

  select(layer: number, head: number): void {
    window.parent.postMessage({ headwise: this.channel, selected: [layer, head] }, "*");
  }

  private post(id: number, ask: Ask): void {
    if (ask.ask === "read") {
      this.reading.set(ask.slot, id);
      setTimeout(() => this.ended(id), STUCK_MS);
    }
    window.parent.postMessage({ headwise: this.channel, id, ask }, "*");
  }

  private postpone(id: number, slot: number): void {
    const older = this.next.get(slot) ?? 0;
    this.next.set(slot, id);
    const dropped = this.waiting.get(older);
    this.waiting.delete(older);
    dropped?.reject(new AskError("superseded", "A newer text was asked for."));
  }

  /** A read is no longer under way, whether or not somebody still waits for it. */
  private ended(id: number): void {
    for (const [slot, running] of this.reading) {
      if (running !== id) continue;
      this.reading.delete(slot);
      const next = this.next.get(slot) ?? 0;
      this.next.delete(slot);
      const posted = this.waiting.get(next);
      if (posted !== undefined) this.post(next, posted.ask);
    }
  }

  private receive(event: MessageEvent): void {
    const message = event.data as Record<string, unknown> | null;
    if (event.source !== window.parent || typeof message !== "object" || message === null) return;
    if (message.headwise !== this.channel || !("header" in message || "error" in message)) return;
    this.ended(message.id as number);
    const waiting = this.waiting.get(message.id as number);
    if (waiting === undefined) return;
    this.waiting.delete(message.id as number);
    if (message.error) waiting.reject(askError(message.error, "The notebook answered with an error."));
    else {
      const data = message.data instanceof ArrayBuffer ? new Uint8Array(message.data) : null;
      waiting.resolve({ header: message.header, data });
    }
  }
}

/** A time, or less where the signal ends it. */
export function pause(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) reject(signal.reason);
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}

export class Connection {
  readonly client = crypto.getRandomValues(new Uint32Array(4)).join("-");
  private readonly transport: Transport;
  private readonly parent: ParentTransport | null;
  private readonly listeners: ((state: ConnectionState) => void)[] = [];
  private readonly queue: (() => void)[] = [];
  private running = 0;
  private regained: Promise<void> | null = null; // resolves when there is an answer again

  constructor(transport: "http" | "parent", channel: string) {
    this.parent = transport === "parent" ? new ParentTransport(channel) : null;
    this.transport = this.parent ?? new HttpTransport();
  }

  /** Called when the connection is lost, and when it is open again. */
  on(listener: (state: ConnectionState) => void): void {
    this.listeners.push(listener);
  }

  /** The answer; `AskError`: the process answered with an error; the signal's reason: it was aborted. */
  async ask<A extends Ask>(ask: A, signal?: AbortSignal): Promise<Answer<Replies[A["ask"]]>> {
    const limited = ask.ask !== "read" && ask.ask !== "progress";
    if (limited) await this.turn();
    try {
      return (await this.sent(ask, signal)) as Answer<Replies[A["ask"]]>;
    } finally {
      if (limited) this.next();
    }
  }

  /** Tell the notebook which head is looked at. */
  select(layer: number, head: number): void {
    this.parent?.select(layer, head);
  }

  private async sent(ask: Ask, signal?: AbortSignal): Promise<Answer<unknown>> {
    for (;;) {
      signal?.throwIfAborted();
      try {
        return await this.transport.send(ask, signal);
      } catch (error) {
        if (!(error instanceof NoAnswer)) throw error;
        this.regained ??= this.regain();
        await until(this.regained, signal);
      }
    }
  }

  private async regain(): Promise<void> {
    this.notify("lost");
    for (let answered = false; !answered; ) {
      await pause(RETRY_MS);
      try {
        const signal = AbortSignal.timeout(PROBE_MS);
        await this.transport.send({ ask: "progress", client: this.client }, signal);
        answered = true;
      } catch (error) {
        answered = error instanceof AskError; // an error is an answer, too
      }
    }
    this.regained = null;
    this.notify("open");
  }

  private notify(state: ConnectionState): void {
    for (const listener of this.listeners) listener(state);
  }

  private async turn(): Promise<void> {
    if (this.running >= AT_ONCE) await new Promise<void>((go) => this.queue.push(go));
    else this.running++;
  }

  private next(): void {
    const go = this.queue.shift();
    if (go === undefined) this.running--;
    else go();
  }
}

/** What comes first: the promise, or the end of the signal. */
function until(promise: Promise<void>, signal?: AbortSignal): Promise<void> {
  if (signal === undefined) return promise;
  return new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    void promise.then(resolve, reject);
  });
}
