// The panel: one cell, expected beside yours, and the sum behind it.

/** Draw the chosen cell of a field into the panel. */
function drawPanel(panel, step, map, r, c, at) {
  const expected = matrix("expected", map.field, at.sample, at.head, at.query);
  const own = matrix("yours", map.field, at.sample, at.head, at.query);
  const there = (m) => m && r < m.rows && c < m.cols;
  const comparable = own && sameShape(own, expected);
  const wanted = there(expected) ? expected.at(r, c) : null;
  const found = there(own) && comparable ? own.at(r, c) : null;
  const differs = wanted !== null && found !== null && parts(map.field, wanted, found);
  const where = map.rows === "query" && map.field !== "query" && H > 1 && !["output", "joined"].includes(map.field)
    && map.columns !== "width" ? `head ${at.head}, ` : "";
  byId("said").textContent = `${map.name}, ${place(map.rows, r, map.field)}, ${place(map.columns, c, map.field)}: `
    + (wanted === null ? "" : brief(wanted)) + (differs ? `, yours ${brief(found)}` : "");
  const children = [
    el("h3", null, `${map.name}[${r}, ${c}]`),
    el("p", { class: "where" }, `${where}${place(map.rows, r, map.field)}, ${place(map.columns, c, map.field)}`
      + (map.field === "weighted" ? `, for ${place("query", at.query)}` : "")),
    numbersOf(wanted, found, differs),
  ];
  if (wanted === null) {
    panel.replaceChildren(...children, el("p", null, "The expected map has no such cell."));
    return;
  }
  const right = sumBehind(map.field, r, c, at, "expected");
  children.push(sumOf(right, wanted, `${differs ? "Expected: " : ""}${right.kind === "words" ? "where it comes from" : "the sum behind it"}`));
  if (differs) children.push(...yoursBehind(map, r, c, at, right, found));
  panel.replaceChildren(...children);
  panel.querySelectorAll("tr.chosen").forEach((row) => {
    const box = row.closest(".scroll");
    box.scrollTop = Math.max(0, row.offsetTop - box.offsetTop - box.clientHeight / 2);
  });
}

/** The number itself, all digits; two where they differ. */
function numbersOf(wanted, found, differs) {
  const line = (name, x, id, wrong) => el("div", { class: wrong ? "number wrong" : "number" },
    el("dt", null, name), el("dd", { id, "data-value": exact(x) }, exact(x)));
  const list = el("dl", { class: "numbers" });
  if (wanted !== null) list.append(line("expected", wanted, "expected-number", false));
  if (found !== null) {
    list.append(line("yours", found, "your-number", differs));
    if (!differs && !sameNumber(wanted, found)) list.append(el("p", { class: "quiet" }, "Equal, up to rounding."));
    if (differs && Number.isFinite(wanted - found)) {
      list.append(el("p", { class: "quiet" }, `Yours is ${found > wanted ? "larger" : "smaller"} by ${longer(Math.abs(found - wanted))}.`));
    }
  }
  return list;
}

/** Yours: whether this step went wrong, or only what came into it. */
function yoursBehind(map, r, c, at, right, found) {
  const theirs = sumBehind(map.field, r, c, at, "yours");
  if (theirs.total === null) return [el("p", { class: "said wrong" }, "Yours was not made this way.")];
  if (!parts(map.field, theirs.total, found)) {
    return [
      ...(theirs.kind === "words" && theirs.words === right.words ? [] : [sumOf(theirs, found, "Yours: the same sum on your numbers")]),
      el("p", { class: "said" }, "This step is right. What came into it already differed: go back to the step marked red."),
    ];
  }
  const same = sameNumber(theirs.total, right.total) || Math.abs(theirs.total - right.total) <= 1e-9;
  const lead = same ? "From the very same numbers, yours is" : `On your numbers this sum would give ${longer(theirs.total)}; yours is`;
  const said = `${lead} ${longer(found)}: ${same ? "this step itself is different." : "this step is different, too."}`;
  const taken = takenFrom(map.field, found, at);
  return [el("p", { class: "said wrong" }, said), taken && el("p", { class: "said" }, taken)].filter(Boolean);
}

/** Where steps only move numbers, each can be found again: the place yours was taken from, in words. */
function takenFrom(field, x, at) {
  const places = [];
  const look = (m, words) => {
    for (let r = 0; m && r < m.rows; r++) for (let c = 0; c < m.cols; c++) if (m.at(r, c) === x) places.push(words(r, c));
  };
  if (WHOLE[field]) {
    look(operand("yours", WHOLE[field], at), (r, c) => `${place(field === "q" ? "query" : "key", r)}, channel ${c} of ${field.toUpperCase()}`);
  } else if (field === "joined") {
    for (let head = 0; head < H; head++) {
      look(operand("yours", "heads", { ...at, head }), (r, c) => `${place("query", r)}, channel ${c} of head ${head}'s output`);
    }
  }
  return places.length === 1 ? `Yours was taken from ${places[0]}.` : null;
}

/** A sum as a table, or in words. */
function sumOf(sum, value, title) {
  const made = el("section", { class: "sum" }, el("h4", null, title[0].toUpperCase() + title.slice(1)));
  if (sum.kind === "words") {
    made.append(el("p", null, sum.words + (sum.shown ? ` = ${longer(sum.total)}` : "")));
    return made;
  }
  made.append(el("div", { class: "scroll terms" }, sum.kind === "softmax" ? softmaxTable(sum) : productTable(sum)));
  if (sum.kind === "softmax") {
    const one = sum.terms.find((term) => term.chosen);
    made.append(el("p", { class: "total" }, `${longer(one.power)} ÷ ${longer(sum.sum)} = ${longer(sum.total)}`));
  } else {
    made.append(el("p", { class: "total" }, `${sum.terms.length > 1 || sum.bias !== null ? "total" : "product"} = ${longer(sum.total)}`));
  }
  return made;
}

function productTable(sum) {
  const [index, a, b] = sum.names;
  const most = Math.max(...sum.terms.map((term) => Math.abs(term.product)).filter(Number.isFinite), 1e-300);
  const body = el("tbody");
  for (const term of sum.terms) {
    body.append(el("tr", null, el("th", { scope: "row" }, term.label), number(term.a), el("td", { class: "sign" }, "×"), number(term.b),
      el("td", { class: "sign" }, "="), number(term.product, most)));
  }
  if (sum.bias !== null) {
    body.append(el("tr", { class: "bias" }, el("th", { scope: "row" }, "bias"), el("td"), el("td"), el("td"), el("td", { class: "sign" }, "+"), number(sum.bias, most)));
  }
  return el("table", { class: "terms" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, index), el("th", { scope: "col" }, a),
    el("td"), el("th", { scope: "col" }, b), el("td"), el("th", { scope: "col" }, "product"))), body);
}

function softmaxTable(sum) {
  const power = sum.shift ? `exp(x − ${longer(sum.shift)})` : "exp(x)";
  const body = el("tbody");
  for (const term of sum.terms) {
    body.append(el("tr", { class: term.chosen ? "chosen" : null }, el("th", { scope: "row" }, term.label), number(term.a), number(term.power),
      number(term.share, 1, "--share")));
  }
  body.append(el("tr", { class: "bias" }, el("th", { scope: "row" }, "sum"), el("td"), number(sum.sum), number(1)));
  return el("table", { class: "terms" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "key"), el("th", { scope: "col" }, "x = hidden"),
    el("th", { scope: "col" }, power), el("th", { scope: "col" }, "÷ sum"))), body);
}

/** A number in a table, with a bar behind it where `most` says how long one may be. */
function number(x, most, hue) {
  const cell = el("td", { title: exact(x) }, longer(x));
  if (most && Number.isFinite(x)) {
    const share = Math.round(100 * Math.min(1, Math.abs(x) / most));
    const colour = `rgb(${paint(hue ?? (x < 0 ? "--negative" : "--positive"))} / 0.28)`;
    cell.style.background = `linear-gradient(to left, ${colour} ${share}%, transparent ${share}%)`;
  }
  return cell;
}
