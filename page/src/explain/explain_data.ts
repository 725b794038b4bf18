/**
 * What the page was given: `examiner/explanations/page.py` writes it.
 *
 * Letters: B samples, T queries, S keys, H heads, D channels of a head, Dv of its values, E features.
 */

import { byId } from "../shared/elements.ts";

export type Side = "expected" | "yours";
export type Axis = "query" | "key" | "channel" | "width" | "feature"; // width: the channels of all heads side by side
export type Status = "same" | "first" | "after" | "unseen"; // first: here yours parts; after: because of an earlier step

/** One heat map: a field, and what its rows and columns are. */
export interface FieldMap {
  field: string;
  name: string; // as it is written on the page
  rows: Axis;
  columns: Axis;
  colour: "signed" | "share" | "mask";
}

/** What goes in, and what comes out. */
export interface Flow {
  result: FieldMap;
  operands: FieldMap[];
}

export interface Step {
  key: string;
  title: string;
  formula: string;
  words: string;
  shapes: string[];
  status: Status;
  error: string | null; // the largest difference; null: yours is not known here
  flows: Flow[];
}

/** One sample's mask. */
export interface MaskWords {
  words: string[];
  later: number | null; // keys after query + later are hidden, because they come later
  padding: number[]; // keys hidden from every query
}

export interface Fault {
  title: string;
  formula: string;
  right: string;
  line: number | null;
  text: string;
}

/** A tensor's numbers, little-endian; or the name of another tensor, which is the same one. */
export type Held = { shape: number[]; kind: "f8" | "f4" | "u1"; base64: string } | { same: string };

export interface ExplainData {
  name: string;
  sizes: { B: number; T: number; S: number; H: number; D: number; Dv: number; E: number };
  itself: boolean; // self-attention
  scales: number[]; // a number a head
  keyHeads: number[]; // by head: which of the different heads of keys and values it uses
  labels: { query: string[] | null; key: string[] | null };
  polarity: string;
  masks: MaskWords[] | null;
  steps: Step[];
  first: number | null; // the step where yours parts
  sample: number;
  head: number;
  verdict: string;
  right: boolean; // nothing parts, and check found nothing either
  faults: Fault[];
  notes: string[];
  allowed: Record<string, number>; // by field: how much does not count as a difference
  expected: Record<string, Held>;
  yours: Record<string, Held>;
}

export const data = JSON.parse(byId("data").textContent) as ExplainData;
