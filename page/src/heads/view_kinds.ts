/** What a view below the wall is. */

import type { App, Changed } from "./store.ts";

export interface View {
  id: string; // as `state.tab` has it
  title: string;
  there(app: App): boolean; // whether there is anything to show
  open(app: App): OpenView;
}

export interface OpenView {
  element: HTMLElement;
  /** Called while it is the open one: with what changed, or null, when everything may have. */
  draw(changed: Changed | null): void | Promise<void>;
  /** Called when another is opened. */
  close?(): void;
}

/** Of several answers that are waited for, the last asked for counts: `const here = turn(); await …; if (!here()) return`. */
export function latest(): () => () => boolean {
  let number = 0;
  return () => {
    const mine = ++number;
    return () => mine === number;
  };
}
