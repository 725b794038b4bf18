// The window of the speaker: notes, the next slide, the time. It is filled by this page, so it opens from disk.

import type { RevealApi } from "reveal.js";

const PREVIEW = 0.36; // of a slide's size
const ADVANCE = ["ArrowRight", "ArrowDown", "PageDown", " ", "n"];
const BACK = ["ArrowLeft", "ArrowUp", "PageUp", "p"];

export class NotesWindow {
  private shown: Window | null = null;
  private started = 0;

  constructor(private readonly deck: RevealApi) {
    for (const event of ["slidechanged", "fragmentshown", "fragmenthidden"])
      deck.on(event, () => this.draw());
    addEventListener("beforeunload", () => this.shown?.close());
  }

  open(): void {
    if (this.shown !== null && !this.shown.closed) {
      this.shown.focus();
      return;
    }
    const shown = window.open("", "", "popup,width=1100,height=760");
    if (shown === null) {
      this.deck.configure({ showNotes: !this.deck.getConfig().showNotes }); // no window allowed: below the slide
      return;
    }
    this.shown = shown;
    this.started = Date.now();
    const { document } = shown;
    document.title = `Notes: ${window.document.title}`;
    document.documentElement.lang = "en";
    document.head.append(document.importNode(window.document.querySelector("style")!, true));
    document.body.className = "speaker";
    document.body.innerHTML = `<header><span id="number"></span><h1 id="title"></h1><span id="time"></span></header>
      <main id="notes" tabindex="0"></main>
      <aside><h2>Now</h2><div class="preview" id="now"></div><h2>Next</h2><div class="preview" id="next"></div>
      <p>Arrow keys and space change the slide, here and there. The clock starts when this window opens; click it to
      start again.</p></aside>`;
    document.addEventListener("keydown", (event) => {
      if (ADVANCE.includes(event.key)) this.deck.next();
      else if (BACK.includes(event.key)) this.deck.prev();
      else return;
      event.preventDefault();
    });
    const time = document.getElementById("time")!;
    time.addEventListener("click", () => {
      this.started = Date.now();
      this.tick();
    });
    const clock = setInterval(() => (shown.closed ? clearInterval(clock) : this.tick()), 500);
    this.draw();
    this.tick();
  }

  private tick(): void {
    const seconds = Math.floor((Date.now() - this.started) / 1000);
    const two = (count: number) => String(count).padStart(2, "0");
    this.part("time").textContent = `${two(Math.floor(seconds / 60))}:${two(seconds % 60)}`;
  }

  private part(id: string): HTMLElement {
    return this.shown!.document.getElementById(id)!;
  }

  private draw(): void {
    if (this.shown === null || this.shown.closed) return;
    const slides = this.deck.getSlides() as HTMLElement[];
    const index = slides.indexOf(this.deck.getCurrentSlide() as HTMLElement);
    const slide = slides[index];
    this.part("number").textContent = `${index + 1} of ${slides.length}`;
    this.part("title").textContent = slide.querySelector("h1, h2")?.textContent ?? "";
    const notes = this.part("notes");
    notes.replaceChildren(...copies(this.shown.document, slide.querySelector(".notes")));
    notes.scrollTop = 0;
    preview(this.part("now"), slide, true);
    preview(this.part("next"), slides[index + 1], false);
  }
}

function copies(document: Document, from: Element | null): Node[] {
  return [...(from?.childNodes ?? [])].map((child) => document.importNode(child, true));
}

/** A small picture of a slide; fragments of a slide to come are hidden, as they will be. */
function preview(into: HTMLElement, slide: HTMLElement | undefined, current: boolean): void {
  into.replaceChildren();
  const content = slide?.querySelector(".slide");
  if (content === null || content === undefined) {
    into.textContent = "The end.";
    return;
  }
  const small = into.ownerDocument.importNode(content, true) as HTMLElement;
  for (const frame of small.querySelectorAll("iframe")) frame.replaceWith("[The live page]");
  if (current) for (const fragment of small.querySelectorAll(".fragment")) fragment.classList.add("visible");
  small.style.transform = `scale(${PREVIEW})`;
  into.append(small);
}
