/**
 * Two texts through one model: which tokens are partners, and which heads look elsewhere. As Python has it in
 * `heads/text_changes.py`; longest runs first, as difflib finds them.
 */

import type { Place } from "../page_data.ts";
import type { Changes } from "../served/protocol.ts";
import type { Read } from "./live_source.ts";
import { surprise } from "./statistics.ts";

interface Run {
  a: number;
  b: number;
  size: number;
}

/** The longest run of like tokens, the first of equals; size 0: none. */
function longest(a: number[], b: number[], [alo, ahi, blo, bhi]: number[]): Run {
  let best: Run = { a: alo, b: blo, size: 0 };
  let lengths = new Map<number, number>();
  for (let i = alo; i < ahi; i++) {
    const next = new Map<number, number>();
    for (let j = blo; j < bhi; j++) {
      if (a[i] !== b[j]) continue;
      const size = (lengths.get(j - 1) ?? 0) + 1;
      next.set(j, size);
      if (size > best.size) best = { a: i - size + 1, b: j - size + 1, size };
    }
    lengths = next;
  }
  return best;
}

/** Runs that both have, in order; the last, of size 0, is where both end. */
function runs(a: number[], b: number[]): Run[] {
  const found: Run[] = [];
  const open = [[0, a.length, 0, b.length]];
  for (let span = open.pop(); span !== undefined; span = open.pop()) {
    const run = longest(a, b, span);
    if (run.size === 0) continue;
    found.push(run);
    const [alo, ahi, blo, bhi] = span;
    if (alo < run.a && blo < run.b) open.push([alo, run.a, blo, run.b]);
    if (run.a + run.size < ahi && run.b + run.size < bhi)
      open.push([run.a + run.size, ahi, run.b + run.size, bhi]);
  }
  found.sort((x, y) => x.a - y.a || x.b - y.b);
  const joined: Run[] = [];
  for (const run of found) {
    const last = joined[joined.length - 1];
    if (last !== undefined && last.a + last.size === run.a && last.b + last.size === run.b)
      last.size += run.size;
    else joined.push({ ...run });
  }
  return [...joined, { a: a.length, b: b.length, size: 0 }];
}

/** Whether difflib is given the texts the other way round: it minds which comes first, partners must not. */
function swapped(a: number[], b: number[]): boolean {
  if (a.length !== b.length) return a.length > b.length;
  const at = a.findIndex((id, place) => id !== b[place]);
  return at >= 0 && String(a[at]) > String(b[at]);
}

/** Both texts as one line. Null: no token in common but special ones. */
export function align(before: Read, after: Read, special: ReadonlySet<number>): Place[] | null {
  const turned = swapped(before.ids, after.ids);
  const [first, second] = turned ? [after.ids, before.ids] : [before.ids, after.ids];
  const places: Place[] = [];
  let shared = 0;
  const put = (a: number | null, b: number | null) => {
    const mine = a === null ? "" : before.names[a];
    const theirs = b === null ? "" : after.names[b];
    const changed = a === null || b === null || before.ids[a] !== after.ids[b];
    const name = changed && mine && theirs ? `${mine}/${theirs}` : mine || theirs;
    places.push({ before: a, after: b, name, changed });
  };
  const span = (a0: number, a1: number, b0: number, b1: number) => {
    if (a1 - a0 === b1 - b0) for (let at = 0; at < a1 - a0; at++) put(a0 + at, b0 + at);
    else {
      for (let at = a0; at < a1; at++) put(at, null);
      for (let at = b0; at < b1; at++) put(null, at);
    }
  };
  let i = 0;
  let j = 0;
  for (const { a, b, size } of runs(first, second)) {
    for (const [a0, a1, b0, b1] of [[i, a, j, b], [a, a + size, b, b + size]]) // biome-ignore format: what differs, what is alike
      turned ? span(b0, b1, a0, a1) : span(a0, a1, b0, b1);
    for (let at = a; at < a + size; at++) if (!special.has(first[at])) shared++;
    i = a + size;
    j = b + size;
  }
  return shared > 0 ? places : null;
}

/** What only one of the texts says: runs of tokens, the same change once. */
function words(places: Place[], before: Read, after: Read): [string, string] {
  const found = new Map<string, [string, string]>();
  for (let at = 0; at < places.length; at++) {
    if (!places[at].changed) continue;
    const start = at;
    while (places[at + 1]?.changed) at++;
    const run = places.slice(start, at + 1);
    const said = (names: (string | null)[]) => names.join(" ").split(/\s+/).filter(Boolean).join(" ");
    const mine = said(run.map((place) => (place.before === null ? "" : before.names[place.before])));
    const theirs = said(run.map((place) => (place.after === null ? "" : after.names[place.after])));
    found.set(JSON.stringify([mine, theirs]), [mine, theirs]);
  }
  const side = (which: 0 | 1) =>
    [...found.values()]
      .map((run) => run[which])
      .filter(Boolean)
      .join(", ");
  return [side(0), side(1)];
}

/** How far every head moved. Null: the texts have nothing in common. */
export function changes(
  before: Read,
  after: Read,
  special: ReadonlySet<number>,
  heads: number,
): Changes | null {
  const places = align(before, after, special);
  if (places === null) return null;
  const shared = places.filter((place) => place.before !== null && place.after !== null);
  const first = places.findIndex((place) => place.changed);
  // a model that looks back has nothing new before the first difference
  const since = first > 0 && first < shared.length ? first : 0;
  const moved: Changes["heads"] = [];
  for (let layer = 0; layer < before.rows.length; layer++) {
    for (let head = 0; head < heads; head++) {
      const apart = shared
        .slice(since)
        .map((place) => divergence(before, after, layer, head, heads, place, places));
      const most = apart.reduce((best, value, at) => (value > apart[best] ? at : best), 0);
      const place = shared[since + most];
      moved.push({
        layer,
        head,
        distance: apart.reduce((sum, value) => sum + value, 0) / apart.length,
        largest: apart[most],
        token: place.name,
        places: [place.before!, place.after!],
      });
    }
  }
  moved.sort((a, b) => b.distance! - a.distance!);
  return {
    words: words(places, before, after),
    layers: before.rows.map(() => ({ queries: places, keys: places })),
    heads: moved,
  };
}

/** The Jensen-Shannon divergence of one query's two rows: keys with a partner, and one bin for all others. */
function divergence(
  before: Read,
  after: Read,
  layer: number,
  head: number,
  heads: number,
  query: Place,
  places: Place[],
): number {
  const bins = [
    { read: before, side: "before" as const },
    { read: after, side: "after" as const },
  ].map(({ read, side }) => {
    const at = query[side]!;
    const all = read.rows[layer][at].weights;
    const own = all.subarray((head * all.length) / heads, ((head + 1) * all.length) / heads);
    const shares: number[] = [];
    let elsewhere = 0;
    let total = 0;
    for (const place of places) {
      const key = place[side];
      const weight = key === null || key > at ? 0 : own[key];
      total += weight;
      if (place.before !== null && place.after !== null) shares.push(weight);
      else elsewhere += weight;
    }
    return [...shares, elsewhere].map((share) => share / total);
  });
  let apart = 0;
  bins[0].forEach((p, at) => {
    const q = bins[1][at];
    apart += surprise((p + q) / 2) - (surprise(p) + surprise(q)) / 2;
  });
  return Math.min(Math.log(2), Math.max(0, apart));
}
