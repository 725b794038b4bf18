// The sum behind a cell: what it was made from, and what the right formula makes of that.

const LETTER = { projected_q: "q", projected_k: "k", projected_v: "v" };
const INPUT = { projected_q: "query", projected_k: "key", projected_v: "value" };
const WHOLE = { q: "projected_q", k: "projected_k", v: "projected_v" };

/** Products a·b added up, with a bias where there is one. */
function products(terms, bias, names) {
  const made = terms.map(([label, a, b]) => ({ label, a, b, product: a * b }));
  const total = made.reduce((sum, one) => sum + one.product, 0) + (bias ?? 0);
  return { kind: "products", terms: made, bias: bias ?? null, total, names };
}

function range(n) {
  return Array.from({ length: n }, (_, i) => i);
}

/** x[r] · W[c] + b[c], if the weights are on this page. */
function projection(x, letter, r, c, names, label) {
  const w = matrix("expected", `w_${letter}`);
  const b = matrix("expected", `b_${letter}`);
  if (!w || !b) return { kind: "words", words: "The weights are too many for this page.", total: null };
  if (x.cols !== w.cols) return { kind: "words", words: "These shapes do not fit the weights.", total: null };
  return products(range(w.cols).map((i) => [label(i), x.at(r, i), w.at(c, i)]), b.at(0, c), names);
}

/** Why a pair is hidden, in words; null where it is not. */
function hiddenBecause(sample, t, s) {
  const mask = matrix("expected", "mask", sample);
  if (!mask || mask.at(t, s)) return null;
  const words = data.masks[sample];
  if (words.padding.includes(s)) return "the mask hides this key from every query, as padding is";
  if (words.later !== null && s > t + words.later) return "it comes later";
  return "the mask says so";
}

/** What a field's cell is made of. `at`: sample, head, query. Returns {kind, total, ...}; total: what it gives. */
function sumBehind(field, r, c, at, side) {
  const get = (name, head) => operand(side, name, head === undefined ? at : { ...at, head });
  const fits = (m, row, col) => m && row < m.rows && col < m.cols;
  switch (field) {
    case "query": case "key": case "value":
      return { kind: "words", words: "It is given: one number of the input.", total: null };
    case "projected_q": case "projected_k": case "projected_v":
      return projection(get(INPUT[field]), LETTER[field], r, c,
        ["feature", `${INPUT[field]}[${r}, i]`, `W_${LETTER[field]}[${c}, i]`], String);
    case "q": case "k": case "v": {
      const width = field === "v" ? Dv : D;
      const from = at.head * width + c;
      const whole = get(WHOLE[field]);
      const words = `Head ${at.head} begins at channel ${at.head} × ${width} = ${at.head * width}; its channel ${c} is `
        + `channel ${from} of ${field.toUpperCase()}, in the same row.`;
      return { kind: "words", words, total: fits(whole, r, from) ? whole.at(r, from) : null };
    }
    case "scores": {
      const q = get("q"), k = get("k");
      if (!fits(q, r, 0) || !fits(k, c, 0) || q.cols !== k.cols) return nothing();
      return products(range(q.cols).map((d) => [String(d), q.at(r, d), k.at(c, d)]), null,
        ["channel", `q[${r}, d]`, `k[${c}, d]`]);
    }
    case "scaled": {
      const scores = get("scores");
      if (!fits(scores, r, c)) return nothing();
      const x = scores.at(r, c);
      const usual = Math.abs(data.scale * Math.sqrt(D) - 1) < 1e-12;
      const words = usual ? `${longer(x)} ÷ √${D} = ${longer(x)} ÷ ${longer(Math.sqrt(D))}` : `${longer(x)} × ${longer(data.scale)}`;
      return { kind: "words", words, total: x * data.scale, shown: true };
    }
    case "hidden": {
      const scaled = get("scaled");
      if (!fits(scaled, r, c)) return nothing();
      const why = hiddenBecause(at.sample, r, c);
      const pair = [place("query", r), place("key", c)];
      return why
        ? { kind: "words", words: `${pair[0]} may not see ${pair[1]}: ${why}. The mask is False here, so the score becomes −∞.`, total: -Infinity }
        : { kind: "words", words: `${pair[0]} may see ${pair[1]}${data.masks ? ": the mask is True here" : ""}, so the score stays.`, total: scaled.at(r, c) };
    }
    case "p":
      return softmaxOf(get("hidden"), r, c);
    case "weighted": {
      const p = get("p"), v = get("v");
      if (!fits(p, at.query, r) || !fits(v, r, c)) return nothing();
      return products([[`key ${r}`, p.at(at.query, r), v.at(r, c)]], null, ["", `p[${at.query}, ${r}]`, `v[${r}, ${c}]`]);
    }
    case "heads": {
      const p = get("p"), v = get("v");
      if (!fits(p, r, 0) || !fits(v, 0, c) || p.cols !== v.rows) return nothing();
      return products(range(v.rows).map((s) => [margin("key", s), p.at(r, s), v.at(s, c)]), null,
        ["key", `p[${r}, s]`, `v[s, ${c}]`]);
    }
    case "joined": {
      const head = Math.floor(c / Dv);
      const from = get("heads", head);
      const words = `Channel ${c} = ${head} × ${Dv} + ${c - head * Dv}: it is channel ${c - head * Dv} of head ${head}'s output, in the same row.`;
      return { kind: "words", words, total: fits(from, r, c - head * Dv) ? from.at(r, c - head * Dv) : null };
    }
    case "output":
      return projection(get("joined"), "o", r, c, ["channel", `concat[${r}, i]`, `W_o[${c}, i]`], String);
  }
  return nothing();
}

function nothing() {
  return { kind: "words", words: "The shapes on the way do not fit the formula, so there is no sum to show.", total: null };
}

/** exp(x) over the sum of the row's; the largest is taken off first only where exp would overflow. */
function softmaxOf(hidden, r, c) {
  if (!hidden || r >= hidden.rows || c >= hidden.cols) return nothing();
  const row = range(hidden.cols).map((s) => hidden.at(r, s));
  const largest = Math.max(...row.filter((x) => !Number.isNaN(x)));
  if (largest === -Infinity) {
    return { kind: "words", words: `${place("query", r)} may see no key at all: there is nothing to share out.`, total: null };
  }
  const shift = Math.abs(largest) > 300 ? largest : 0;
  const powers = row.map((x) => Math.exp(x - shift));
  const sum = powers.reduce((a, b) => a + b, 0);
  const terms = row.map((x, s) => ({ label: margin("key", s), a: x, power: powers[s], share: powers[s] / sum, chosen: s === c }));
  return { kind: "softmax", terms, shift, sum, total: powers[c] / sum };
}

/** Which rows, columns or cells of the maps on the left a cell was made from: {field: {row, col, head}}. */
function sources(field, r, c, at) {
  switch (field) {
    case "projected_q": case "projected_k": case "projected_v":
      return { [INPUT[field]]: { row: r }, [`w_${LETTER[field]}`]: { row: c } };
    case "q": case "k": case "v":
      return { [WHOLE[field]]: { row: r, col: at.head * (field === "v" ? Dv : D) + c } };
    case "scores": return { q: { row: r }, k: { row: c } };
    case "scaled": return { scores: { row: r, col: c } };
    case "hidden": return { scaled: { row: r, col: c }, mask: { row: r, col: c } };
    case "p": return { hidden: { row: r } };
    case "weighted": return { p: { row: at.query, col: r }, v: { row: r, col: c } };
    case "heads": return { p: { row: r }, v: { col: c } };
    case "joined": return { heads: { row: r, col: c % Dv, head: Math.floor(c / Dv) } };
    case "output": return { joined: { row: r }, w_o: { row: c } };
  }
  return {};
}
