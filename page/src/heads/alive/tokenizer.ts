/**
 * Byte-level byte pair encoding: a text as the ids that Python's tokenizer gives it. Radford 2019; Sennrich 2016.
 *
 * A text is cut into words by a pattern; each word is bytes, each byte a letter of the vocabulary; the pair of
 * pieces that was merged first in training is merged first, until there is none.
 */

import type { AliveData } from "../page_data.ts";
import type { Token } from "./statistics.ts";

const SPACE = "␣";
const KEPT = 4096; // words whose pieces are remembered

/** The letters that stand for bytes: themselves where they can be seen, else those from 256 on, in order. */
const LETTERS: string[] = [];
{
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const seen = (byte > 32 && byte < 127) || (byte > 160 && byte < 256 && byte !== 173);
    LETTERS.push(String.fromCharCode(seen ? byte : next++));
  }
}
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));

export class Tokenizer {
  private readonly ids: Map<string, number>;
  private readonly ranks: Map<string, number>;
  private readonly pattern: RegExp;
  private readonly marks: RegExp | null; // special tokens that a text says in so many letters
  private readonly special: Set<number>;
  private readonly punctuation: Set<number>;
  private readonly words = new Map<string, number[]>();

  constructor(private readonly data: AliveData["tokenizer"]) {
    this.ids = new Map(data.tokens.map((token, id) => [token, id]));
    this.ranks = new Map(data.merges.map((pair, rank) => [pair, rank]));
    this.pattern = new RegExp(data.pattern, "gu");
    this.special = new Set(data.special);
    this.punctuation = new Set(data.punctuation);
    const escaped = data.special.map((id) => data.tokens[id].replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    this.marks = escaped.length > 0 ? new RegExp(`(${escaped.join("|")})`, "u") : null;
  }

  /** Ids of a text, the start in front. Halves of letters, which no text has, are read as U+FFFD. */
  encode(text: string): number[] {
    const ids = [this.data.start];
    const parts = this.marks === null ? [text] : text.split(this.marks);
    parts.forEach((part, at) => {
      if (at % 2 === 1) ids.push(this.ids.get(part)!);
      else for (const [word] of part.matchAll(this.pattern)) ids.push(...this.pieces(word));
    });
    return ids;
  }

  token(id: number): Token {
    return { id, special: this.special.has(id), punctuation: this.punctuation.has(id) };
  }

  /** The text of tokens; special ones are left out. */
  decode(ids: readonly number[]): string {
    const bytes = ids.flatMap((id) => (this.special.has(id) ? [] : this.bytes(id)));
    return new TextDecoder().decode(new Uint8Array(bytes));
  }

  /** A token as people read it: without the space before it; a space alone as ␣, part of a letter as <C3>. */
  shown(id: number): string {
    if (this.special.has(id)) return this.data.tokens[id];
    const said = new TextDecoder().decode(new Uint8Array(this.bytes(id)));
    const whole = said.includes("\ufffd") ? letterByLetter(this.bytes(id)) : said;
    return whole.replace(/^ +| +$/g, "") || SPACE;
  }

  private bytes(id: number): number[] {
    return Array.from(this.data.tokens[id], (letter) => BYTES.get(letter) ?? 63);
  }

  private pieces(word: string): number[] {
    const known = this.words.get(word);
    if (known !== undefined) return known;
    const parts = Array.from(new TextEncoder().encode(word), (byte) => LETTERS[byte]);
    while (parts.length > 1) {
      let best = Infinity;
      let place = -1;
      for (let at = 0; at + 1 < parts.length; at++) {
        const rank = this.ranks.get(`${parts[at]} ${parts[at + 1]}`) ?? Infinity;
        if (rank < best) {
          best = rank;
          place = at;
        }
      }
      if (place < 0) break;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
    const ids = parts.map((part) => this.ids.get(part)!);
    if (this.words.size >= KEPT) this.words.clear();
    this.words.set(word, ids);
    return ids;
  }
}

/** Whole letters as they are, bytes between them as <C3>. */
function letterByLetter(bytes: number[]): string {
  let shown = "";
  for (let at = 0; at < bytes.length; ) {
    const first = bytes[at];
    const length = first < 0x80 ? 1 : first < 0xc0 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    const letter = new TextDecoder().decode(new Uint8Array(bytes.slice(at, at + length)));
    const whole = length > 0 && at + length <= bytes.length && !letter.includes("\ufffd");
    shown += whole ? letter : `<${first.toString(16).toUpperCase().padStart(2, "0")}>`;
    at += whole ? length : 1;
  }
  return shown;
}
