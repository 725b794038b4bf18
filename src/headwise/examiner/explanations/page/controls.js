// The page itself: which step, head, sample and cell is shown, and what changes them.

const byId = (id) => document.getElementById(id);
const shown = { step: data.first ?? 0, head: data.head, sample: data.sample, query: Math.min(2, T - 1), row: null, column: null, field: null };
let drawn = []; // the maps on the page: {map, role, side, head, mark, again}

const STATUS = {
  same: "Yours equals the expected numbers here.",
  first: "Here yours parts from the expected numbers: everything before is right.",
  after: "Yours differs here, too, because of an earlier step.",
  unseen: null,
};

function at() {
  return { sample: shown.sample, head: shown.head, query: shown.query };
}

/** One step's heading, words and maps; `choose` null makes it a picture to print. */
function stepSection(index, choose) {
  const step = data.steps[index];
  const made = document.createDocumentFragment();
  made.append(
    el("h2", { id: choose ? "step-title" : null }, `${index}. ${step.title}`),
    el("p", { class: "formula" }, step.formula),
    el("p", { class: "words" }, step.words),
    el("ul", { class: "shapes", "aria-label": "Shapes" }, ...step.shapes.map((one) => el("li", null, one))),
  );
  if (step.key === "mask" && data.masks) {
    made.append(el("ul", { class: "mask-words", "aria-label": "The mask of this sample in words" },
      ...data.masks[shown.sample].words.map((one) => el("li", null, one))));
  }
  if (STATUS[step.status]) {
    const error = step.status === "same" && step.error !== null && Number(step.error) > 0 ? ` The largest difference is ${step.error}.` : "";
    made.append(el("p", { class: `status ${step.status}` }, STATUS[step.status] + error));
  }
  for (const flow of step.flows) made.append(flowSection(step, flow, choose));
  if (step.key === "heads" && H > 1) made.append(allHeads(choose));
  return made;
}

/** What goes in on the left, what comes out on the right. */
function flowSection(step, flow, choose) {
  const map = flow.result;
  const row = el("div", { class: "flow" });
  const inputs = el("div", { class: "operands" });
  for (const one of flow.operands) {
    const heads = step.key === "concat" ? [...Array(H).keys()] : [null];
    for (const head of heads) {
      const held = operandMap(one, head);
      if (held) inputs.append(held);
    }
  }
  if (inputs.childNodes.length) row.append(inputs, el("div", { class: "arrow", "aria-hidden": "true" }, "→"));
  row.append(resultMaps(step, map, choose));
  return row;
}

function operandMap(map, head) {
  const m = matrix("expected", map.field, shown.sample, head ?? shown.head, shown.query);
  if (!m) return null;
  const title = head === null ? map.name : `head ${head}`;
  const made = picture(map, m, null, extent([m]), `${title}, ${m.rows} by ${m.cols}, what goes in`, null, { least: 3, most: 15, width: 220, height: 150 });
  drawn.push({ ...made, map, role: "operand", head });
  return el("figure", { class: "operand" }, el("figcaption", null, el("b", null, title), ` ${m.rows}×${m.cols}`), made.element);
}

/** The expected map, and yours beside it where it differs. */
function resultMaps(step, map, choose) {
  const wanted = matrix("expected", map.field, shown.sample, shown.head, shown.query);
  const own = matrix("yours", map.field, shown.sample, shown.head, shown.query);
  const alike = own && sameShape(own, wanted);
  const anywhere = own && (!alike || ["first", "after"].includes(step.status)) && differsAnywhere(map, wanted, own, alike);
  const most = extent(anywhere && alike ? [wanted, own] : [wanted]);
  const made = el("div", { class: "results" });
  made.append(oneMap(map, wanted, anywhere && alike ? own : null, most, anywhere ? "expected" : null, "expected", choose));
  if (anywhere) {
    made.append(oneMap(map, own, alike ? wanted : null, alike ? most : extent([own]), "yours", "yours", alike ? choose : null));
    if (!alike) {
      made.append(el("p", { class: "status first" }, `Yours has another shape: [${own.shape.join(", ")}] instead of [${wanted.shape.join(", ")}].`));
    }
  } else if (own && ["first", "after"].includes(step.status)) {
    made.append(el("p", { class: "quiet" }, `${map.name}: no difference in this head and sample.`));
  }
  return made;
}

function differsAnywhere(map, wanted, own, alike) {
  if (!alike) return true;
  for (let r = 0; r < wanted.rows; r++) {
    for (let c = 0; c < wanted.cols; c++) if (parts(map.field, wanted.at(r, c), own.at(r, c))) return true;
  }
  return false;
}

function oneMap(map, m, other, most, side, whose, choose) {
  const name = `${map.name}${side ? `, ${side}` : ""}: rows are ${axis(map.rows)}, columns are ${axis(map.columns)}`;
  const pick = choose ? (r, c, focus) => choose(map, r, c, focus, made) : null;
  const readable = m.rows * m.cols <= READABLE && m.cols <= WIDEST;
  const made = readable ? grid(map, m, other, most, name, pick ?? (() => {}))
    : picture(map, m, other, most, `${name}; ${m.rows} by ${m.cols}, move with the arrow keys`, pick, { least: 4, most: 22, width: 760, height: 520 });
  drawn.push({ map, role: other === null && whose === "yours" ? "another shape" : "result", mark: made.mark, again: made.again, made });
  const caption = el("figcaption", null, el("b", null, map.name), side ? el("span", { class: `side ${side}` }, side) : null,
    el("span", { class: "axes" }, `${axis(map.rows)} ↓ ${axis(map.columns)} →`));
  return el("figure", { class: `result ${side ?? ""}`, "data-side": whose }, caption, made.element);
}

const axis = (kind) => ({ query: "queries", key: "keys", channel: "channels", width: "channels of all heads", feature: "features" }[kind]);

/** Each head's output, small; a click goes to that head. */
function allHeads(choose) {
  const map = { field: "heads", name: "head output", rows: "query", columns: "channel", colour: "signed" };
  const every = [...Array(H).keys()].map((head) => matrix("expected", "heads", shown.sample, head));
  const most = extent(every);
  const row = el("div", { class: "operands all-heads" });
  every.forEach((m, head) => {
    const made = picture(map, m, null, most, `output of head ${head}`, null, { least: 3, most: 12, width: 150, height: 120 });
    drawn.push({ ...made, map, role: "thumbnail", mark() {} });
    const go = el("button", { type: "button", class: head === shown.head ? "operand current" : "operand", "aria-label": `Show head ${head}` },
      el("span", null, `head ${head}`), made.element);
    if (choose) go.addEventListener("click", () => show({ head }));
    row.append(go);
  });
  return el("div", null, el("h3", null, "All heads"), row);
}

/** Choose a cell: outline it, outline what it is made of, and tell the sum. */
function choose(map, r, c, focus, from) {
  const step = data.steps[shown.step];
  Object.assign(shown, { field: map.field, row: r, column: c });
  if (map.rows === "query") shown.query = r;
  const used = sources(map.field, r, c, at());
  for (const one of drawn) {
    if (one.role === "result") {
      const here = one.map.field === map.field;
      one.mark(here ? r : undefined, here ? c : undefined, here && focus && one.made === from);
    } else if (one.role === "operand") {
      const flows = step.flows.find((flow) => flow.result.field === map.field);
      const mine = flows.operands.some((operand) => operand.field === one.map.field);
      const source = mine ? used[one.map.field] : undefined;
      const wanted = source && (source.head === undefined || source.head === one.head);
      one.mark(wanted ? source.row : undefined, wanted ? source.col : undefined);
    }
  }
  drawPanel(byId("panel"), step, map, r, c, at());
}

/** Where to look first: where yours differs, else where the reader was looking. */
function firstCell(step) {
  for (const { result: map } of step.flows) {
    const wanted = matrix("expected", map.field, shown.sample, shown.head, shown.query);
    const own = matrix("yours", map.field, shown.sample, shown.head, shown.query);
    if (!own || !sameShape(own, wanted)) continue;
    for (let r = 0; r < wanted.rows; r++) {
      for (let c = 0; c < wanted.cols; c++) if (parts(map.field, wanted.at(r, c), own.at(r, c))) return [map, r, c];
    }
  }
  if (step.key === "mask" && data.masks) {
    const mask = matrix("expected", "mask", shown.sample);
    for (let c = mask.cols - 1; c >= 0; c--) if (!mask.at(shown.query, c)) return [step.flows[0].result, shown.query, c];
  }
  const flow = step.flows.find((one) => one.result.field === shown.field) ?? step.flows[0];
  const m = matrix("expected", flow.result.field, shown.sample, shown.head, shown.query);
  const row = flow.result.rows === "query" ? shown.query : shown.row ?? 0;
  return [flow.result, Math.min(row, m.rows - 1), Math.min(shown.column ?? 0, m.cols - 1)];
}

/** Show another step, head, sample or query. */
function show(change) {
  const sameStep = change.step === undefined || change.step === shown.step;
  Object.assign(shown, change);
  shown.step = Math.max(0, Math.min(data.steps.length - 1, shown.step));
  const step = data.steps[shown.step];
  drawn = [];
  byId("step").replaceChildren(stepSection(shown.step, choose));
  byId("slider").value = shown.step;
  byId("slider").setAttribute("aria-valuetext", `${shown.step}. ${step.title}`);
  byId("previous").disabled = shown.step === 0;
  byId("next").disabled = shown.step === data.steps.length - 1;
  [...byId("steps").children].forEach((item, i) => {
    if (i === shown.step) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  const heads = !["inputs", "project", "concat", "output"].includes(step.key);
  byId("heads").classList.toggle("idle", !heads);
  [...byId("heads").querySelectorAll("button")].forEach((button, head) => button.setAttribute("aria-checked", String(head === shown.head)));
  byId("sample").value = shown.sample;
  byId("query-choice").hidden = step.key !== "weigh";
  byId("query").value = shown.query;
  const kept = sameStep && shown.field !== null && step.flows.find((flow) => flow.result.field === shown.field);
  if (kept && shown.row !== null) choose(kept.result, shown.row, shown.column, false, null);
  else {
    const [map, r, c] = firstCell(step);
    choose(map, r, c, false, null);
  }
  pointArrows();
  try {
    history.replaceState(null, "", `#step=${step.key}&head=${shown.head}&sample=${shown.sample}`);
  } catch { /* a page inside a notebook has no address of its own */ }
}

/** What comes out stands beside what goes in, or below it where there is no room. */
function pointArrows() {
  for (const flow of document.querySelectorAll(".flow")) {
    const arrow = flow.querySelector(".arrow");
    if (arrow) arrow.textContent = flow.lastChild.offsetTop >= arrow.offsetTop + arrow.offsetHeight ? "↓" : "→";
  }
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const step = data.steps.findIndex((one) => one.key === asked.get("step"));
  const whole = (name, below) => (/^\d+$/.test(asked.get(name) ?? "") && Number(asked.get(name)) < below ? Number(asked.get(name)) : null);
  return { step: step < 0 ? shown.step : step, head: whole("head", H) ?? shown.head, sample: whole("sample", B) ?? shown.sample };
}

function header() {
  byId("name").textContent = `${visible(data.name)}, step by step`;
  const kind = data.itself ? `self-attention of ${T} tokens` : `attention of ${T} queries to ${S} keys`;
  byId("sizes").textContent = `${B} sample${B > 1 ? "s" : ""}: ${kind}; ${H} head${H > 1 ? "s" : ""} of ${D} channels, `
    + `${data.sizes.E} in all.   B=${B}  T=${T}  S=${S}  H=${H}  D=${D}  E=${data.sizes.E}`;
  const verdict = byId("verdict");
  verdict.className = data.first === null ? "right" : "wrong";
  verdict.append(el("p", null, data.verdict));
  for (const fault of data.faults) {
    verdict.append(el("p", { class: "fault" }, el("b", null, fault.title)),
      el("dl", null, el("dt", null, "yours"), el("dd", null, fault.formula), el("dt", null, "expected"), el("dd", null, fault.right)));
    if (fault.line !== null) verdict.append(el("p", null, `Line ${fault.line}: `, el("code", null, visible(fault.text.trim()))));
  }
  byId("notes").append(...data.notes.map((note) => el("li", null, note)));
}

function controls() {
  data.steps.forEach((step, i) => {
    const said = { same: ", equal", first: ", here yours parts", after: ", differs", unseen: "" }[step.status];
    const button = el("button", { type: "button", class: step.status, "aria-label": `Step ${i}: ${step.title}${said}` },
      el("span", { class: "count" }, String(i)), el("span", null, step.key));
    button.addEventListener("click", () => show({ step: i }));
    byId("steps").append(el("li", null, button));
  });
  byId("slider").max = data.steps.length - 1;
  byId("slider").addEventListener("input", (event) => show({ step: Number(event.target.value) }));
  byId("previous").addEventListener("click", () => show({ step: shown.step - 1 }));
  byId("next").addEventListener("click", () => show({ step: shown.step + 1 }));
  if (H > 1) byId("heads").append("Head ");
  for (let head = 0; H > 1 && head < H; head++) {
    const button = el("button", { type: "button", role: "radio", "aria-checked": "false", "aria-label": `Head ${head}` }, String(head));
    button.addEventListener("click", () => show({ head }));
    byId("heads").append(button);
  }
  for (let sample = 0; sample < B; sample++) byId("sample").append(el("option", { value: sample }, String(sample)));
  byId("sample-choice").hidden = B === 1;
  byId("sample").addEventListener("change", (event) => show({ sample: Number(event.target.value) }));
  for (let t = 0; t < T; t++) byId("query").append(el("option", { value: t }, data.labels.query ? `${t} ${margin("query", t)}` : String(t)));
  byId("query").addEventListener("change", (event) => show({ query: Number(event.target.value) }));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, canvas, td")) return;
    if (event.key === "ArrowRight") show({ step: shown.step + 1 });
    else if (event.key === "ArrowLeft") show({ step: shown.step - 1 });
  });
  byId("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    drawn.forEach((one) => one.again());
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((one) => one.again()));
  window.addEventListener("resize", pointArrows);
  window.addEventListener("hashchange", () => show(fromAddress()));
  window.addEventListener("beforeprint", () => {
    const before = drawn;
    byId("all").replaceChildren(...data.steps.map((_, i) => el("section", null, stepSection(i, null))));
    drawn = before;
  });
  window.addEventListener("afterprint", () => byId("all").replaceChildren());
}

header();
controls();
show(fromAddress());
