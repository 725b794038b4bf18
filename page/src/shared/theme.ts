/** Light and dark: as the system says, until the reader's button says otherwise. */

const listeners: (() => void)[] = [];
const system = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function isDark(): boolean {
  return (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
}

/** Call this whenever colours change: what is painted on a canvas has to be painted again. */
export function onTheme(paint: () => void): void {
  listeners.push(paint);
}

/** A colour or a number of the style, as it is now. */
export function styled(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The button that switches. */
export function themeButton(button: HTMLElement): void {
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    for (const paint of listeners) paint();
  });
  system.addEventListener("change", () => {
    for (const paint of listeners) paint();
  });
}
