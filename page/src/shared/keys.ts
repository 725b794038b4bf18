/** Arrow keys inside what has rows and columns. */

const STEPS: Record<string, [number, number]> = {
  ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0],
}; // biome-ignore format: a table

/** Whether a key is part of a shortcut of the browser or the system, which pages leave alone. */
export function isShortcut(event: KeyboardEvent): boolean {
  return event.altKey || event.ctrlKey || event.metaKey;
}

/**
 * Where a key leads from a cell, inside `rows` and `columns`; Enter and space stay. The event goes no further.
 * Null: another key, which is left alone.
 */
export function cellAfter(
  event: KeyboardEvent,
  [row, column]: readonly [number, number],
  [rows, columns]: readonly [number, number],
): [number, number] | null {
  const step = STEPS[event.key];
  if (step === undefined || isShortcut(event)) return null;
  event.preventDefault();
  event.stopPropagation();
  const inside = (at: number, count: number) => Math.max(0, Math.min(count - 1, at));
  return [inside(row + step[0], rows), inside(column + step[1], columns)];
}
