/**
 * Products of rows with matrices: by a kernel in WebAssembly, and where that is refused by the same in plain
 * TypeScript. Matrices lie in panels of eight columns, [N / 8, K, 8], so that both read them straight on.
 *
 * Letters: T rows, K channels that come in, N that go out.
 */

import kernel from "./matmul.wat";

const COLUMNS = 8; // of a panel
const PAGE = 65536; // bytes, as WebAssembly counts memory

/** A matrix in panels; columns that fill up the last panel are 0. */
export interface Matrix {
  width: number; // K
  columns: number; // N
  panels: number;
  values: Float32Array<ArrayBuffer>; // [panels, K, 8]; of the kernel a view of its memory
  address: number; // in the kernel's memory
}

export interface Products {
  kind: "WebAssembly" | "TypeScript";
  /** Keep a matrix [N, K], as torch's linear layers have it. */
  keep(weights: Float32Array, columns: number, width: number): Matrix;
  /** x [T, K] times a matrix, [T, N]; `from` is where in x the first row begins. */
  product(x: Float32Array, from: number, rows: number, matrix: Matrix): Float32Array<ArrayBuffer>;
}

/** The kernel with room for so many numbers of matrices, or what stands in for it. */
export function products(numbers: number): Products {
  try {
    return new KernelProducts(numbers);
  } catch {
    return new PlainProducts(); // refused by a policy, or a browser without vectors; the panel says which it is
  }
}

function fill(values: Float32Array, weights: Float32Array, columns: number, width: number): void {
  for (let column = 0; column < columns; column++) {
    let at = (column - (column % COLUMNS)) * width + (column % COLUMNS);
    const row = column * width;
    for (let k = 0; k < width; k++, at += COLUMNS) values[at] = weights[row + k];
  }
}

/** A row of a matrix as it was given: what a token is embedded as. */
export function rowOf(matrix: Matrix, row: number, to: Float32Array, at: number): void {
  let from = (row - (row % COLUMNS)) * matrix.width + (row % COLUMNS);
  for (let k = 0; k < matrix.width; k++, from += COLUMNS) to[at + k] = matrix.values[from];
}

interface Exports {
  memory: WebAssembly.Memory;
  product(x: number, rows: number, width: number, w: number, panels: number, y: number): void;
}

class KernelProducts implements Products {
  readonly kind = "WebAssembly";
  private readonly inside: Exports;
  private readonly room: number; // where rows are put, behind all matrices
  private free = 0;
  private readonly kept: Matrix[] = [];

  constructor(numbers: number) {
    const instance = new WebAssembly.Instance(new WebAssembly.Module(kernel));
    this.inside = instance.exports as unknown as Exports;
    this.room = 4 * numbers;
    this.reserve(this.room);
  }

  keep(weights: Float32Array, columns: number, width: number): Matrix {
    const panels = Math.ceil(columns / COLUMNS);
    const address = this.free;
    this.free += 4 * panels * width * COLUMNS;
    if (this.free > this.room) throw new Error("more matrices than there is room for");
    const matrix = { width, columns, panels, address, values: new Float32Array(0) };
    this.kept.push(matrix);
    this.look(matrix);
    fill(matrix.values, weights, columns, width);
    return matrix;
  }

  product(x: Float32Array, from: number, rows: number, matrix: Matrix): Float32Array<ArrayBuffer> {
    const { width, panels, columns } = matrix;
    const result = this.room + 4 * rows * width;
    const wide = panels * COLUMNS;
    this.reserve(result + 4 * rows * wide);
    const { memory, product } = this.inside;
    new Float32Array(memory.buffer, this.room, rows * width).set(x.subarray(from, from + rows * width));
    product(this.room, rows, width, matrix.address, panels, result);
    const y = new Float32Array(memory.buffer, result, rows * wide);
    return wide === columns ? y.slice() : narrowed(y, rows, wide, columns);
  }

  private reserve(bytes: number): void {
    const missing = bytes - this.inside.memory.buffer.byteLength;
    if (missing <= 0) return;
    this.inside.memory.grow(Math.ceil(missing / PAGE)); // which takes away what looks at it
    for (const matrix of this.kept) this.look(matrix);
  }

  private look(matrix: Matrix): void {
    const count = matrix.panels * matrix.width * COLUMNS;
    matrix.values = new Float32Array(this.inside.memory.buffer, matrix.address, count) as Matrix["values"];
  }
}

class PlainProducts implements Products {
  readonly kind = "TypeScript";

  keep(weights: Float32Array, columns: number, width: number): Matrix {
    const panels = Math.ceil(columns / COLUMNS);
    const values = new Float32Array(panels * width * COLUMNS);
    fill(values, weights, columns, width);
    return { width, columns, panels, values, address: 0 };
  }

  product(x: Float32Array, from: number, rows: number, matrix: Matrix): Float32Array<ArrayBuffer> {
    const { width, panels, values, columns } = matrix;
    const wide = panels * COLUMNS;
    const y = new Float32Array(rows * wide);
    for (let panel = 0; panel < panels; panel++) {
      const start = panel * width * COLUMNS;
      for (let row = 0; row < rows; row++) {
        let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0; // biome-ignore format: one for each column
        let at = start;
        const first = from + row * width;
        for (let k = first; k < first + width; k++, at += COLUMNS) {
          const s = x[k];
          a += s * values[at];
          b += s * values[at + 1];
          c += s * values[at + 2];
          d += s * values[at + 3];
          e += s * values[at + 4];
          f += s * values[at + 5];
          g += s * values[at + 6];
          h += s * values[at + 7];
        }
        y.set([a, b, c, d, e, f, g, h], row * wide + panel * COLUMNS);
      }
    }
    return wide === columns ? y : narrowed(y, rows, wide, columns);
  }
}

function narrowed(y: Float32Array, rows: number, wide: number, columns: number): Float32Array<ArrayBuffer> {
  const narrow = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    narrow.set(y.subarray(row * wide, row * wide + columns), row * columns);
  }
  return narrow;
}
