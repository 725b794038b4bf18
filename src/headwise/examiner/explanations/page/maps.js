// Heat maps: small ones as tables with numbers, large ones and what goes in as pictures.

const READABLE = 640; // cells; beyond that a map is a picture
const WIDEST = 40; // columns

function paint(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The largest finite size in some matrices, for one scale of colours. */
function extent(matrices) {
  let most = 0;
  for (const m of matrices) {
    for (let r = 0; r < m.rows; r++) {
      for (let c = 0; c < m.cols; c++) {
        const size = Math.abs(m.at(r, c));
        if (Number.isFinite(size) && size > most) most = size;
      }
    }
  }
  return most || 1;
}

/** A number's colour. Its ink stays readable in light and dark, so colours never become full. */
function shade(x, colour, most) {
  if (!Number.isFinite(x)) return null;
  if (colour === "mask") return x ? `rgb(${paint("--share")} / 0.55)` : null;
  const strength = Math.min(1, Math.abs(x) / most);
  const name = colour === "share" ? "--share" : x < 0 ? "--negative" : "--positive";
  return `rgb(${paint(name)} / ${(0.04 + 0.66 * strength).toFixed(3)})`;
}

const isHeadEdge = (map, i) => map.columns === "width" && i > 0 && i % headWidth(map.field) === 0;

/** A table of numbers; returns {element, mark(cell)}. `other`: the map beside it, to outline what differs. */
function grid(map, m, other, most, name, choose) {
  const table = el("table", { class: `map ${m.cols > 14 ? "tight" : ""}`, role: "grid", "aria-label": name, "data-field": map.field });
  const head = el("tr", null, el("td", { class: "corner" }));
  for (let c = 0; c < m.cols; c++) {
    head.append(el("th", { scope: "col", class: isHeadEdge(map, c) ? "edge" : null, title: place(map.columns, c, map.field) }, margin(map.columns, c)));
  }
  const summed = map.field === "p"; // each query's weights add up to 1, or should
  if (summed) head.append(el("th", { scope: "col", class: "aside" }, "Σ row"));
  table.append(el("thead", null, head));
  const body = el("tbody");
  const cells = [];
  for (let r = 0; r < m.rows; r++) {
    const row = el("tr", null, el("th", { scope: "row", title: place(map.rows, r, map.field) }, margin(map.rows, r)));
    cells.push([]);
    for (let c = 0; c < m.cols; c++) {
      const x = m.at(r, c);
      const off = other !== null && parts(map.field, x, other.at(r, c));
      const cell = el("td", {
        role: "gridcell", tabindex: "-1", "data-row": r, "data-column": c, title: exact(x),
        "aria-label": `${place(map.rows, r, map.field)}, ${place(map.columns, c, map.field)}: ${brief(x)}${off ? ", differs" : ""}`,
        class: [off ? "off" : "", Number.isFinite(x) ? "" : "hidden", isHeadEdge(map, c) ? "edge" : ""].join(" ").trim() || null,
      }, map.colour === "mask" ? (x ? "see" : "hide") : brief(x));
      cell.style.backgroundColor = shade(x, map.colour, most) ?? "";
      cells[r].push(cell);
      row.append(cell);
    }
    if (summed) row.append(el("td", { class: "aside" }, brief(range(m.cols).reduce((sum, c) => sum + m.at(r, c), 0))));
    body.append(row);
  }
  table.append(body);
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-row]");
    if (cell) choose(Number(cell.dataset.row), Number(cell.dataset.column), true);
  });
  table.addEventListener("keydown", (event) => {
    const cell = event.target.closest("td[data-row]");
    if (!cell) return;
    moved(event, Number(cell.dataset.row), Number(cell.dataset.column), m, (r, c) => choose(r, c, true));
  });
  let chosen = null;
  cells[0][0].tabIndex = 0;
  return {
    element: el("div", { class: "scroll" }, table),
    mark(r, c, focus) {
      if (chosen) {
        chosen.removeAttribute("aria-selected");
        chosen.tabIndex = -1;
      }
      chosen = cells[r]?.[c] ?? null;
      if (!chosen) return;
      cells[0][0].tabIndex = -1;
      chosen.tabIndex = 0;
      chosen.setAttribute("aria-selected", "true");
      if (focus) chosen.focus({ preventScroll: false });
    },
    again() {
      cells.forEach((row, r) => row.forEach((cell, c) => { cell.style.backgroundColor = shade(m.at(r, c), map.colour, most) ?? ""; }));
    },
  };
}

/** Arrow keys inside a map. */
function moved(event, r, c, m, choose) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0] }[event.key];
  if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  event.stopPropagation();
  choose(Math.max(0, Math.min(m.rows - 1, r + step[0])), Math.max(0, Math.min(m.cols - 1, c + step[1])));
}

/** A picture of a matrix; returns {element, mark({row, col})}. */
function picture(map, m, other, most, name, choose, room) {
  const size = Math.max(room.least, Math.min(room.most, Math.floor(room.width / m.cols), Math.floor(room.height / m.rows)));
  const canvas = el("canvas", { role: "img", "aria-label": name, "data-field": map.field, class: choose ? "large" : "small", tabindex: choose ? "0" : null });
  const dense = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.ceil(m.cols * size * dense);
  canvas.height = Math.ceil(m.rows * size * dense);
  canvas.style.width = `${m.cols * size}px`;
  canvas.style.height = `${m.rows * size}px`;
  const ink = canvas.getContext("2d");
  let marked = {};
  function draw() {
    ink.setTransform(dense, 0, 0, dense, 0, 0);
    ink.fillStyle = paint("--surface");
    ink.fillRect(0, 0, m.cols * size, m.rows * size);
    for (let r = 0; r < m.rows; r++) {
      for (let c = 0; c < m.cols; c++) {
        const colour = shade(m.at(r, c), map.colour, most);
        ink.fillStyle = colour ?? paint("--hatch");
        ink.fillRect(c * size, r * size, size > 5 ? size - 1 : size, size > 5 ? size - 1 : size);
        if (other && parts(map.field, m.at(r, c), other.at(r, c))) {
          ink.strokeStyle = paint("--wrong");
          ink.strokeRect(c * size + 0.5, r * size + 0.5, size - 2, size - 2);
        }
      }
    }
    if (map.columns === "width") {
      ink.fillStyle = paint("--ink");
      const step = headWidth(map.field);
      for (let c = step; c < m.cols; c += step) ink.fillRect(c * size - 1, 0, 1, m.rows * size);
    }
    const { row, col } = marked;
    if (row === undefined && col === undefined) return;
    ink.strokeStyle = paint("--chosen");
    ink.lineWidth = 2;
    const x = col === undefined ? 0 : col * size, y = row === undefined ? 0 : row * size;
    const w = col === undefined ? m.cols * size : size, h = row === undefined ? m.rows * size : size;
    ink.strokeRect(x + 1, y + 1, Math.max(2, w - 3), Math.max(2, h - 3));
    ink.lineWidth = 1;
  }
  const spot = (event) => {
    const box = canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top) / size), c = Math.floor((event.clientX - box.left) / size);
    return r >= 0 && c >= 0 && r < m.rows && c < m.cols ? [r, c] : null;
  };
  canvas.addEventListener("mousemove", (event) => {
    const at = spot(event);
    canvas.title = at ? `${place(map.rows, at[0], map.field)}, ${place(map.columns, at[1], map.field)}: ${exact(m.at(...at))}` : "";
  });
  if (choose) {
    canvas.addEventListener("click", (event) => {
      const at = spot(event);
      if (at) choose(...at, true);
    });
    canvas.addEventListener("keydown", (event) => moved(event, marked.row ?? 0, marked.col ?? 0, m, (r, c) => choose(r, c, true)));
  }
  draw();
  return {
    element: el("div", { class: "scroll" }, canvas),
    mark(r, c, focus) {
      marked = { row: r, col: c };
      draw();
      if (focus) canvas.focus({ preventScroll: true });
    },
    again: draw,
  };
}
