"""The film of multi-head attention, with captions, chapters and a transcript, made by code.

    python -m studies.film                           all files into docs/, and the transcript into docs/learn/
    python -m studies.film --out DIR --seconds 110   elsewhere; longer or shorter, every scene in proportion
    python -m studies.film --texts                   no film: captions, chapters and transcript
    python -m studies.film --stills DIR              no film: pictures of every scene

It is silent; its text is in the picture and in film.vtt. The opening is what mini computes on the text of
lesson 0 (`film_opening`), the second part is worked out by `film_example`, the third is what
`headwise.models.specialisation()` holds; no number in a caption is written by hand. matplotlib draws the
frames, in several processes, and ffmpeg encodes them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from headwise.errors import ArgumentError, HeadwiseError, PackageMissing
from headwise.whole_files import whole_file

from . import film_attention as attention
from . import film_opening as opening
from . import film_training as training
from .film_stage import FAINT, HEIGHT, INK, PALE, PAPER, SCALE, WIDTH, Stage, width_of

ROOT = Path(__file__).resolve().parents[1]
SHORTEST, LONGEST = 90, 150  # seconds of the film
RATE, SLOW = 15, 3  # frames a second, of the film and of the GIF
SMALL = 640  # dots across of the GIF
PAGE = Path("learn") / "film.md"  # in docs
TRANSCRIPT = Path("learn") / "film_transcript.md"
START, END = "<!-- chapters -->", "<!-- end chapters -->"
OPENING, STEPS, TRAINING = range(3)  # the parts of the film
BAND = 478  # where captions begin
LETTERS = 86  # in a line of a caption
FADE = 0.3  # seconds
LATER = "#aab0bb"  # chapters to come
CHAPTERS = ("words", "project", "split", "scores", "softmax", "mix", "concatenate", "project")
TITLES = (  # of the same chapters, in the player and on the page
    "Words as numbers", "Project: queries, keys, values", "Split into heads", "Attend: scores", "Softmax",
    "Mix the values", "Concatenate the heads", "Project back",
)  # fmt: skip
PARTS = ("1  Why a word needs the others", "2  Split, attend, concatenate, project", "3  Heads in training")


@dataclass(frozen=True)
class Scene:
    """A scene of the film, with one caption.

    Attributes:
        seconds: how long it is.
        shows: the picture in words, for the transcript.
        draw: puts it on a stage at a time from 0 to 1.
        part: index in `PARTS`; None: a card without a heading.
        chapter: of the part of steps, its place in `CHAPTERS`.
        fades: whether it comes out of the paper at its beginning, and goes at its end.
    """

    name: str
    seconds: float
    caption: str
    shows: str
    draw: Callable[[Stage, float], None]
    part: int | None = STEPS
    chapter: int | None = None
    fades: tuple[bool, bool] = (False, False)


TABLE = (
    Scene("question", 6, "Read this text. Which word comes next?",
          "Two sentences in large letters, with a blank for the next word.",
          opening.question, OPENING, None, (True, True)),
    Scene("predictions", 8, "mini, a small language model, predicts “letter” with {probability}. With “news” "
          "in place of “letter”, it predicts “news”.",
          "The text with “letter” and the same text with “news”. Below each, bars: mini's three most "
          "probable next words.",
          opening.predictions, OPENING, None, (True, True)),
    Scene("alone", 5.5, "From “the” alone it cannot know: no word gets more than {alone_probability}.",
          "Three very short bars.", opening.alone, OPENING, None, (True, True)),
    Scene("look back", 8, "So the last “the” has to look back. Attention does this: one head of mini puts "
          "{weight} on “letter”.",
          "The words in a row. Arcs lead from the last “the” to earlier words; the thicker, the larger the "
          "weight.",
          opening.look_back, OPENING, None, (True, True)),
    Scene("query, key, value", 9, "A query is what a word looks for, a key is how a word is recognised, a "
          "value is what it passes on.",
          "Three cards: the query of the last “the”, the key of “letter”, the value of “letter”. The query "
          "is compared with the key; the weight decides how much of the value is passed on.",
          opening.three_lists, OPENING, None, (True, True)),
    Scene("switched off", 6, "The head matters: with it switched off, “letter” falls from {probability} to "
          "{without}.",
          "Two bars: the probability of “letter” with all heads, and without this head.",
          opening.switched_off, OPENING, None, (True, True)),
    Scene("title", 4, "How is this computed? Now every step, in the numbers of one small example.",
          "The title, and the weights of two heads as two grids of colours.",
          attention.title, None, fades=(True, True)),
    Scene("words", 5, "Five words. Each is 8 numbers: four say what the word is, four say where it stands.",
          "A grid of 5 rows and 8 columns: X. Blue is negative, orange is positive.",
          attention.words, STEPS, 0, (True, False)),
    Scene("project", 6, "Project: a row of X times a column of W_q, summed up, is one number of a query.",
          "X times W_q is Q. The sum behind one number is written out.",
          attention.project, STEPS, 1),
    Scene("three projections", 4, "The same with W_k and W_v: queries, keys and values.",
          "From X, three arrows lead through three matrices to Q, K and V.",
          attention.three_projections, STEPS, 1),
    Scene("split", 5, "Split: head 1 gets the first 4 columns, head 2 the last 4. Nothing is computed.",
          "The columns of Q, K and V move into two boxes, one for each head.",
          attention.split, STEPS, 2),
    Scene("scores", 6, "Attend, each head alone: every query times every key, divided by √d_k = √4 = 2.",
          "For each head, a grid of 5 by 5 scores is filled cell by cell.",
          attention.scores, STEPS, 3),
    Scene("softmax", 5, "Softmax: each row of scores becomes shares that sum to 1.",
          "Row by row, scores turn into weights; beside each row its sum, 1.00.",
          attention.softmax, STEPS, 4),
    Scene("read", 5, "Head 1 looks at the word before. Head 2 looks from verb to noun, from noun to verb.",
          "In both grids of weights the largest weight of each row is outlined.",
          attention.read, STEPS, 4),
    Scene("mix", 6, "Mix: each word takes a little of every word's values, in these shares.",
          "Weights times values is a new vector for each word, in each head.",
          attention.mix, STEPS, 5),
    Scene("concatenate", 4, "Concatenate: the heads side by side, 8 numbers a word again.",
          "The results of both heads move next to each other.",
          attention.concatenate, STEPS, 6),
    Scene("project back", 5, "Project: W_o mixes what the heads found. 5 × 8 came in, 5 × 8 goes out.",
          "The joined results times W_o is the output.",
          attention.project_back, STEPS, 7, (False, True)),
    Scene("by hand", 4, "This is the whole computation. But who says what a head looks for?",
          "Text: these weights were set by hand; in training, heads become what lowers the loss.",
          attention.by_hand, None, fades=(True, True)),
    Scene("mini", 4, "mini again: {layers} layers of {heads} heads. A dot is a head.",
          "A dot for each head. The dots move to their places: to the left, heads that look at few tokens; "
          "to the top, heads that look at near ones. On the right, three curves start.",
          training.appear, TRAINING, fades=(True, False)),
    Scene("broad", 5, "At first all are broad: every token nearly alike. Then many begin to look nearer.",
          "All dots are at the lower right. Then they spread upwards and to the left.",
          training.along(0, 6), TRAINING),
    Scene("previous token", 5.5,
          "Punctuation and near tokens come first; at step {before_step} head {before_head} has "
          "{before_score} on the token before.",
          "Dots turn coloured as heads get labels. The curve of the weight on the token before rises.",
          training.along(6, 9), TRAINING),
    Scene("induction", 6,
          "At step {repeat_step} comes induction: head {repeat_head}, the head that finds “letter”, looks at "
          "what followed before.",
          "The curve of induction rises steeply; green dots appear at the lower left.",
          training.along(9, 11), TRAINING),
    Scene("settling", 5,
          "Then the loss falls on, but few labels change: {kept} of {all} heads end as at step "
          "{repeat_step}.",
          "The dots move little.",
          training.along(11, 15), TRAINING),
    Scene("outcome", 5.5,
          "Step {last_step}, loss {last_loss}: {labelled} of {all} heads have earned a label, {unlabelled} "
          "have none.",
          "The dots move to their rows: the heads of each layer, coloured by label.",
          training.outcome, TRAINING),
)  # fmt: skip


def scenes(seconds: float | None = None) -> tuple[Scene, ...]:
    """Return the scenes of the film in order, with the numbers filled into their captions.

    Args:
        seconds: how long it is to be, each scene in proportion; by default what the table says.

    Raises:
        ArgumentError: shorter or longer than people would follow.
    """
    usual = sum(scene.seconds for scene in TABLE)
    wanted = usual if seconds is None else seconds
    if not SHORTEST <= wanted <= LONGEST:
        raise ArgumentError(
            f"seconds must be {SHORTEST} to {LONGEST}: got {wanted:g}; leave it out for {usual:g}"
        )
    facts = {**training.facts(), **opening.facts()}
    return tuple(
        replace(scene, seconds=scene.seconds * wanted / usual, caption=scene.caption.format(**facts))
        for scene in TABLE
    )


# Captions, chapters, transcript


def captions(film: Sequence[Scene]) -> str:
    """Return the captions as WebVTT."""
    cues = [
        f"{_clock(start)} --> {_clock(start + scene.seconds)}\n{scene.caption}\n"
        for start, scene in zip(starts(film), film, strict=True)
    ]
    return "\n".join(["WEBVTT\n", *cues])


def starts(film: Sequence[Scene]) -> list[float]:
    """Return the second at which each scene begins."""
    return [sum(scene.seconds for scene in film[:number]) for number in range(len(film))]


def chapters(film: Sequence[Scene]) -> list[tuple[str, float, float]]:
    """Return the title, start and end of every chapter: the parts, and the steps of the second part."""
    marks: list[tuple[str, float]] = []
    for start, scene in zip(starts(film), film, strict=True):
        if scene.part is None:
            continue
        title = PARTS[scene.part].partition("  ")[2]
        if scene.chapter is not None:
            title = TITLES[scene.chapter]
        if title not in [name for name, _ in marks]:
            marks.append((title, start))
    ends = [start for _, start in marks[1:]] + [sum(scene.seconds for scene in film)]
    return [(title, start, end) for (title, start), end in zip(marks, ends, strict=True)]


def chapters_vtt(film: Sequence[Scene]) -> str:
    """Return the chapters as WebVTT, for a player's track."""
    cues = [f"{_clock(start)} --> {_clock(end)}\n{title}\n" for title, start, end in chapters(film)]
    return "\n".join(["WEBVTT\n", *cues])


def _chapters_metadata(film: Sequence[Scene]) -> str:
    """Return the chapters as ffmpeg's metadata."""
    blocks = [
        f"[CHAPTER]\nTIMEBASE=1/1000\nSTART={round(1000 * start)}\nEND={round(1000 * end)}\ntitle={title}\n"
        for title, start, end in chapters(film)
    ]
    return ";FFMETADATA1\n" + "".join(blocks)


def chapter_list(film: Sequence[Scene]) -> str:
    """Return the chapters as a Markdown list, each with a link to its time."""
    lines = [
        f"- [{int(start) // 60}:{int(start) % 60:02}](../film.webm#t={start:g}) {title}"
        for title, start, _ in chapters(film)
    ]
    return "\n".join(lines) + "\n"


def transcript(film: Sequence[Scene]) -> str:
    """Return the page of the transcript: the caption and the picture of every scene, with its time."""
    total = sum(scene.seconds for scene in film)
    length = f"{int(total) // 60}:{int(total) % 60:02}"
    lines = [
        "# Transcript of the film\n",
        f"What [the film](film.md) shows, scene by scene. It is silent and takes {length} minutes. Each "
        "scene has its caption, and below it a description of the picture.\n",
    ]
    part: int | None = None
    for start, scene in zip(starts(film), film, strict=True):
        if scene.part is not None and scene.part != part:
            part = scene.part
            lines.append(f"## {PARTS[part].replace('  ', '. ')}\n")
        lines.append(f"**{int(start) // 60}:{int(start) % 60:02}** {scene.caption}\n\n*{scene.shows}*\n")
    return "\n".join(lines)


def with_chapters(page: str, film: Sequence[Scene]) -> str:
    """Return the film's page with the current chapters between its two markers.

    Raises:
        ArgumentError: a marker is missing.
    """
    before, mark, rest = page.partition(START)
    _, last, after = rest.partition(END)
    if not mark or not last:
        raise ArgumentError(f"page must contain the lines {START} and {END}: one is missing; add both")
    return f"{before}{START}\n\n{chapter_list(film)}\n{END}{after}"


def _clock(seconds: float) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}.{whole % 1000:03}"


# Frames


def frame(scene: Scene, t: float, progress: float = 0) -> numpy.ndarray[Any, Any]:
    """Return one frame of a scene, uint8 [1080, 1920, 4]: red, green, blue, and 255.

    Args:
        t: 0 to 1.
        progress: of the whole film, 0 to 1.
    """
    stage = Stage()
    scene.draw(stage, t)
    faded = _faded(scene, t)
    if faded < 1:
        stage.box(0, 0, WIDTH, BAND, PAPER, 1 - faded)
    _heading(stage, scene)
    stage.box(0, BAND, WIDTH, HEIGHT - BAND, INK)
    lines = _balanced(scene.caption)
    for number, line in enumerate(lines):
        stage.text(WIDTH / 2, BAND + 29 + 25 * (number - (len(lines) - 1) / 2), line, 20, "#ffffff")
    stage.box(0, HEIGHT - 3, WIDTH * progress, 3, "#fd9467")
    return stage.dots()


def _balanced(caption: str) -> list[str]:
    """Return the lines of a caption: as few as possible, of about the same length."""
    count = len(textwrap.wrap(caption, LETTERS))
    width = next(w for w in range(1, LETTERS + 1) if len(textwrap.wrap(caption, w)) <= count)
    return textwrap.wrap(caption, width)


def _faded(scene: Scene, t: float) -> float:
    """Return the opacity of a scene at a time; 1 is fully visible."""
    come = min(t * scene.seconds / FADE, 1.0) if scene.fades[0] else 1.0
    go = min((1 - t) * scene.seconds / FADE, 1.0) if scene.fades[1] else 1.0
    return min(come, go)


def _heading(stage: Stage, scene: Scene) -> None:
    """Draw the name of the part and its chapters, the current one in bold."""
    if scene.part is None:
        return
    stage.text(24, 30, PARTS[scene.part], 17, INK, at="left", bold=True)
    stage.line([(24, 52), (WIDTH - 24, 52)], PALE, 1)
    if scene.chapter is None:
        checkpoints = (
            f"mini, measured at {len(training.life().steps)} checkpoints; straight lines between them"
        )
        words = checkpoints if scene.part == TRAINING else "computed by mini, a small language model"
        stage.text(WIDTH - 24, 30, words, 15, FAINT, at="right")
        return
    widths = [width_of(name, 13, True) + 18 for name in CHAPTERS]
    right = WIDTH - 24 - sum(widths)
    for number, (name, width) in enumerate(zip(CHAPTERS, widths, strict=True)):
        current = number == scene.chapter
        stage.text(
            right + width / 2,
            30,
            name,
            13,
            INK if current else (LATER, FAINT)[number < scene.chapter],
            bold=current,
        )
        if current:
            stage.line([(right + 8, 52), (right + width - 8, 52)], "#e95561", 3)
        right += width


def frames(film: Sequence[Scene], seconds: float | None = None) -> Iterator[bytes]:
    """Yield all frames as bytes that ffmpeg reads, drawn by as many processes as there are processors.

    Args:
        seconds: the length that `scenes` had for this film.
    """
    count = round(sum(scene.seconds for scene in film) * RATE)
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count() or 1, _begin, (seconds,)) as pool:
        yield from pool.imap(_frame_bytes, range(count), chunksize=4)


_film: tuple[Scene, ...] = ()  # of a process that draws


def _begin(seconds: float | None) -> None:
    global _film
    torch.set_num_threads(1)
    _film = scenes(seconds)


def _frame_bytes(number: int) -> bytes:
    total, times, now = sum(scene.seconds for scene in _film), starts(_film), number / RATE
    at = max(place for place, start in enumerate(times) if start <= now + 1e-9)
    return frame(_film[at], min((now - times[at]) / _film[at].seconds, 1.0), now / total).tobytes()


# Files


def ffmpeg() -> str:
    """Return the path of the ffmpeg program.

    Raises:
        PackageMissing: neither on the path nor in Python's packages.
    """
    program = shutil.which("ffmpeg")
    if program is not None:
        return program
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ModuleNotFoundError as error:
        raise PackageMissing(
            "the film needs ffmpeg; install with: apt-get install ffmpeg, or pip install imageio-ffmpeg"
        ) from error
    return str(get_ffmpeg_exe())


SAME = (
    *"-map_metadata:g -1 -map_metadata:s:v -1".split(),
    "-fflags",
    "+bitexact",
    "-flags:v",
    "+bitexact",
)  # today as tomorrow
GIF = (
    f"fps={SLOW},scale={SMALL}:-2:flags=lanczos,split[a][b];[a]palettegen=max_colors=64[p];"
    "[b][p]paletteuse=dither=none:diff_mode=rectangle"
)
FORMATS = {  # name -> how ffmpeg makes it of all frames
    "film.webm": (*"-map 0:v -map_chapters 1 -c:v libvpx-vp9 -crf 32 -b:v 0 -g 150 -pix_fmt yuv420p".split(),
                  *"-deadline good -cpu-used 4 -row-mt 1 -tile-columns 2 -threads 2".split(),
                  *SAME, "-f", "webm"),
    "film.gif": ("-map_chapters", "-1", "-vf", GIF, "-loop", "0", *SAME, "-f", "gif"),
}  # fmt: skip


def write_texts(film: Sequence[Scene], out: Path) -> list[Path]:
    """Write the captions and the chapters, and the transcript where the film's page is.

    Raises:
        ArgumentError: no such folder.
    """
    if not out.is_dir():
        raise ArgumentError(f"out must be a folder: {str(out)!r} does not exist; create it")
    texts = {out / "film.vtt": captions(film), out / "film_chapters.vtt": chapters_vtt(film)}
    page = out / PAGE
    if page.is_file():
        texts |= {page: with_chapters(page.read_text("utf-8"), film), out / TRANSCRIPT: transcript(film)}
    for file, text in texts.items():
        with whole_file(file) as half:
            half.write_text(text, "utf-8")
    return list(texts)


def write(film: Sequence[Scene], out: Path, seconds: float | None = None) -> list[Path]:
    """Write all files of the film, each atomically, and the transcript where the film's page is.

    Args:
        seconds: the length that `scenes` had for this film.

    Raises:
        ArgumentError: no such folder; ffmpeg cannot make one of them.
        PackageMissing: no ffmpeg.
    """
    if not out.is_dir():
        raise ArgumentError(f"out must be a folder: {str(out)!r} does not exist; create it")
    program = ffmpeg()
    quiet = [program, "-hide_banner", "-loglevel", "error", "-y"]
    written = []
    with tempfile.TemporaryDirectory() as folder:
        whole, metadata = Path(folder) / "frames.mkv", Path(folder) / "chapters.txt"
        metadata.write_text(_chapters_metadata(film), "utf-8")
        size = f"{WIDTH * SCALE}x{HEIGHT * SCALE}"
        raw = ["-f", "rawvideo", "-pix_fmt", "rgba", "-s", size, "-r", str(RATE), "-i", "-"]
        _filmed([*quiet, *raw, *"-c:v ffv1 -level 3 -slices 4 -g 1".split(), str(whole)], film, seconds)
        for name, format_options in FORMATS.items():
            with whole_file(out / name) as half:
                done = subprocess.run(
                    [*quiet, "-i", str(whole), "-i", str(metadata), *format_options, str(half)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise ArgumentError(f"ffmpeg must make {name}: {done.stderr.strip()}; try another ffmpeg")
            written.append(out / name)
    return written + write_texts(film, out)


def _filmed(command: Sequence[str], film: Sequence[Scene], seconds: float | None) -> None:
    """Write the frames to ffmpeg one after another."""
    count = round(sum(scene.seconds for scene in film) * RATE)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            for number, picture in enumerate(frames(film, seconds), 1):
                process.stdin.write(picture)
                if number % 100 == 0 or number == count:
                    print(f"\r{number} of {count} frames", end="", file=sys.stderr, flush=True)
            process.stdin.close()
            process.stdin = None
        except BrokenPipeError:
            pass  # it says why below
        message = process.stderr.read().decode(errors="replace").strip()
    print(file=sys.stderr)
    if process.returncode:
        raise ArgumentError(f"ffmpeg must accept frames: {message}; try another ffmpeg")


def stills(film: Sequence[Scene], out: Path, times: Sequence[float] = (0.5, 0.97)) -> None:
    """Write frames of every scene as PNG."""
    from matplotlib.image import imsave

    out.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(film):
        for t in times:
            name = f"{number:02}_{scene.name.replace(' ', '_')}_{round(100 * t):03}.png"
            imsave(out / name, frame(scene, t, number / len(film)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m studies.film`: write the film or its stills."""
    parser = argparse.ArgumentParser(prog="python -m studies.film", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / "docs", help="the folder (docs)")
    parser.add_argument("--seconds", metavar="N", type=float, help=f"how long, {SHORTEST} to {LONGEST}")
    parser.add_argument("--texts", action="store_true", help="captions, chapters and transcript, no film")
    parser.add_argument("--stills", metavar="DIR", type=Path, help="pictures of every scene instead of films")
    options = parser.parse_args(arguments)
    try:
        film = scenes(options.seconds)
        if options.stills is not None:
            stills(film, options.stills)
            return 0
        files = write_texts(film, options.out) if options.texts else write(film, options.out, options.seconds)
        for file in files:
            print(f"Wrote {file}: {file.stat().st_size / 1000:,.0f} kB")
    except HeadwiseError as error:
        parser.exit(2, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
