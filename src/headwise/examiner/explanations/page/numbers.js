// The data: tensors by name, expected and yours, and how numbers and places are written.

const data = JSON.parse(document.getElementById("data").textContent);
const { T, S, H, D, Dv, B } = data.sizes;
const KINDS = { f8: Float64Array, f4: Float32Array, u1: Uint8Array };
const kept = { expected: new Map(), yours: new Map() };

/** A tensor as {shape, data}, or null where nobody knows it. */
function tensor(side, name) {
  const held = data[side][name];
  if (held === undefined) return null;
  if (held.same !== undefined) return tensor(side, held.same);
  if (!kept[side].has(name)) {
    const text = atob(held.base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    kept[side].set(name, { shape: held.shape, data: new KINDS[held.kind](bytes.buffer) });
  }
  return kept[side].get(name);
}

/** One matrix of a tensor: [B, H, rows, cols] at sample and head, [B, rows, cols] at sample, [rows, cols]. */
function matrix(side, name, sample, head, query) {
  if (name === "weighted") return weighted(side, sample, head, query);
  const held = tensor(side, name);
  if (held === null) return null;
  const shape = held.shape;
  const rows = shape.length > 1 ? shape[shape.length - 2] : 1;
  const cols = shape[shape.length - 1];
  let start = 0;
  if (shape.length === 4) {
    start = (Math.min(sample, shape[0] - 1) * shape[1] + Math.min(head, shape[1] - 1)) * rows * cols;
  } else if (shape.length === 3) {
    start = Math.min(sample, shape[0] - 1) * rows * cols;
  }
  return { rows, cols, shape, at: (r, c) => held.data[start + r * cols + c] };
}

/** For one query: every value times the query's weight for its key, [S, D]. */
function weighted(side, sample, head, query) {
  const p = matrix(side, "p", sample, head) ?? (side === "yours" ? null : undefined);
  const v = matrix(side, "v", sample, head);
  if (!p || !v || p.cols !== v.rows || query >= p.rows) return null;
  return { rows: v.rows, cols: v.cols, shape: [v.rows, v.cols], at: (r, c) => p.at(query, r) * v.at(r, c) };
}

/** Yours where it is known, else the expected one: what the next step of yours was made from. */
function operand(side, name, at) {
  return (side === "yours" && matrix("yours", name, at.sample, at.head, at.query))
    || matrix("expected", name, at.sample, at.head, at.query);
}

const sameNumber = (a, b) => a === b || (Number.isNaN(a) && Number.isNaN(b));

/** Whether two numbers of a field count as different. */
function parts(field, a, b) {
  if (sameNumber(a, b)) return false;
  const allowed = field === "weighted" ? 1e-7 : data.allowed[field] ?? 0;
  return !(Math.abs(a - b) <= allowed);
}

const sameShape = (a, b) => a.shape.length === b.shape.length && a.shape.every((n, i) => n === b.shape[i]);

// Writing numbers

const special = (x) => (Number.isNaN(x) ? "NaN" : x === Infinity ? "∞" : x === -Infinity ? "−∞" : null);
const minus = (text) => text.replace("-", "−");

/** In a cell: three digits at most. */
function brief(x) {
  const size = Math.abs(x);
  if (special(x)) return special(x);
  if (size >= 1e4) return minus(x.toExponential(0));
  const text = x.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  return minus(/^-0\.?0*$/.test(text) ? text.slice(1) : text);
}

/** In a sum: six digits. */
function longer(x) {
  if (special(x)) return special(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(x.toExponential(4));
  return minus(x.toFixed(size >= 1000 ? 3 : size >= 10 ? 5 : 6));
}

/** All digits, as Python reads them. */
const exact = (x) => (Number.isNaN(x) ? "nan" : x === Infinity ? "inf" : x === -Infinity ? "-inf" : String(x));

// Writing places

/** Channels a head has in this field, where heads lie side by side. */
const headWidth = (field) => (["projected_v", "w_v", "joined", "w_o"].includes(field) ? Dv : D);

/** A row or column in words: query 2 “sat”. */
function place(kind, i, field) {
  const words = kind === "query" || kind === "key" ? data.labels[kind] : null;
  if (kind === "query" || kind === "key") return words ? `${kind} ${i} “${visible(words[i])}”` : `${kind} ${i}`;
  if (kind === "width") return `channel ${i} (head ${Math.floor(i / headWidth(field))})`;
  return `${kind} ${i}`;
}

/** The same in the margin of a map. */
function margin(kind, i) {
  const words = kind === "query" || kind === "key" ? data.labels[kind] : null;
  return words ? visible(words[i]) : String(i);
}

/** Control characters, line breaks and the marks that turn writing round, made visible. */
function visible(text) {
  return text.replace(/[\n\r]/g, "↵").replace(/\t/g, "⇥")
    .replace(/[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]/gu, "\ufffd");
}

/** An element: el("p", {class: "x"}, "text", child). Text is text, never markup. */
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
