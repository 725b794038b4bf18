/** Elements of a page, and texts as they can be shown. */

export type Child = Node | string | null | undefined;
type Attributes = Record<string, string | number | boolean | null | undefined>;

/** An element with attributes (null, undefined and false are left out; true is empty) and children. */
export function el<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes?: Attributes | null,
  ...children: Child[]
): HTMLElementTagNameMap[Tag] {
  const made = document.createElement(tag);
  dress(made, attributes, ...children);
  return made;
}

/** The same for pictures made of lines. */
export function svg<Tag extends keyof SVGElementTagNameMap>(
  tag: Tag,
  attributes?: Attributes | null,
  ...children: Child[]
): SVGElementTagNameMap[Tag] {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  dress(made, attributes, ...children);
  return made;
}

/** Attributes and children for an element that is there. */
export function dress(made: Element, attributes?: Attributes | null, ...children: Child[]): void {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child): child is Node | string => child !== null && child !== undefined));
}

/** The element with this id, which the template has. */
export function byId<Kind extends HTMLElement = HTMLElement>(id: string): Kind {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no #${id} in this page`);
  return found as Kind;
}

/** Control characters, line breaks and the marks that turn writing round, made visible. */
export function visible(text: string): string {
  return text
    .replace(/[\n\r]/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]/gu, "\ufffd");
}
