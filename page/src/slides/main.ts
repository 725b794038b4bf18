// The slides of a lesson: reveal.js shows them, the window of notes is ours.

import Reveal from "reveal.js";
import { NotesWindow } from "./notes.ts";

const deck = new Reveal({
  width: 1280,
  height: 720,
  margin: 0,
  center: false,
  hash: true,
  transition: "none",
  slideNumber: "c/t",
  controlsTutorial: false,
  keyboard: { 83: () => notes.open() }, // s
});
const notes = new NotesWindow(deck);

/** A live page is large: it starts when its slide is shown. */
function start(slide: Element | undefined): void {
  for (const frame of slide?.querySelectorAll<HTMLIFrameElement>("iframe[data-page]") ?? []) {
    frame.srcdoc = frame.dataset.page!;
    frame.removeAttribute("data-page");
  }
}

deck.on("slidechanged", () => start(deck.getCurrentSlide()));
deck.initialize().then(() => start(deck.getCurrentSlide()));
