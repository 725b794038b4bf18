"""The film of multi-head attention: docs/film.webm, docs/film.gif and docs/film.vtt, made by code.

    python -m studies.film                          all three, into docs/, and what is said into learn/film.md
    python -m studies.film --out DIR --seconds 75   elsewhere; longer or shorter, every scene in proportion
    python -m studies.film --stills DIR             no film: a picture of the end of every scene

It is silent; what is said stands in the picture and in film.vtt. The first part is worked out by
`film_example`, the second is what `headwise.models.specialisation()` holds; no number in a caption is written
by hand. matplotlib draws the frames, ffmpeg makes films of them.
"""

from __future__ import annotations

import argparse
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

from headwise.errors import ArgumentError, HeadwiseError, PackageMissing
from headwise.whole_files import whole_file

from . import film_attention as attention
from . import film_training as training
from .film_stage import FAINT, HEIGHT, INK, PALE, PAPER, WIDTH, Stage

ROOT = Path(__file__).resolve().parents[1]
SHORTEST, LONGEST = 60, 90  # seconds of the film
RATE, SLOW = 20, 5  # frames a second, of the film and of the GIF
SMALL = 640  # dots across of the GIF
PAGE = Path("learn") / "film.md"  # in docs
START, END = "<!-- captions -->", "<!-- end captions -->"
BAND = 478  # where captions begin
FADE = 0.3  # seconds
LATER = "#aab0bb"  # chapters to come
CHAPTERS = ("words", "project", "split", "scores", "softmax", "mix", "concatenate", "project")
PARTS = ("1  Split, attend, concatenate, project", "2  Heads in training")


@dataclass(frozen=True)
class Scene:
    """A scene of the film, with one caption.

    Attributes:
        seconds: how long it is.
        draw: puts it on a stage at a time from 0 to 1.
        part: 0 or 1; None: a card without a heading.
        chapter: of the first part, its place in `CHAPTERS`.
        fades: whether it comes out of the paper at its beginning, and goes at its end.
    """

    name: str
    seconds: float
    caption: str
    draw: Callable[[Stage, float], None]
    part: int | None = 0
    chapter: int | None = None
    fades: tuple[bool, bool] = (False, False)


TABLE = (
    Scene("title", 3, "Multi-head attention, in the numbers of one small example.", attention.title,
          None, fades=(False, True)),
    Scene("words", 5, "Five words. Each is 8 numbers: four say what the word is, four say where it stands.",
          attention.words, 0, 0, (True, False)),
    Scene("project", 6, "Project: a row of X times a column of W_q, summed up, is one number of a query.",
          attention.project, 0, 1),
    Scene("three projections", 4, "The same with W_k and W_v: queries, keys and values.",
          attention.three_projections, 0, 1),
    Scene("split", 5, "Split: head 1 gets the first 4 columns, head 2 the last 4. Nothing is computed.",
          attention.split, 0, 2),
    Scene("scores", 6, "Attend, each head alone: every query times every key, divided by √d_k = √4 = 2.",
          attention.scores, 0, 3),
    Scene("softmax", 5, "Softmax: each row of scores becomes shares that sum to 1.", attention.softmax, 0, 4),
    Scene("read", 5, "Head 1 looks at the word before. Head 2 looks from verb to noun, from noun to verb.",
          attention.read, 0, 4),
    Scene("mix", 6, "Mix: each word takes a little of every word's values, in these shares.",
          attention.mix, 0, 5),
    Scene("concatenate", 4, "Concatenate: the heads side by side, 8 numbers a word again.",
          attention.concatenate, 0, 6),
    Scene("project back", 5, "Project: W_o mixes what the heads found. 5 × 8 came in, 5 × 8 goes out.",
          attention.project_back, 0, 7, (False, True)),
    Scene("by hand", 4, "This is the whole computation. But who says what a head looks for?",
          attention.by_hand, None, fades=(True, True)),
    Scene("mini", 4, "mini, a small language model: {layers} layers of {heads} heads. A dot is a head.",
          training.appear, 1, fades=(True, False)),
    Scene("broad", 5, "At first all are broad: every token nearly alike. Then many begin to look nearer.",
          training.along(0, 6), 1),
    Scene("previous token", 5.5,
          "Punctuation and near tokens come first; at step {before_step} head {before_head} has "
          "{before_score} on the token before.",
          training.along(6, 9), 1),
    Scene("induction", 5.5,
          "At step {repeat_step} comes induction: head {repeat_head} looks at what followed this token last "
          "time.",
          training.along(9, 11), 1),
    Scene("settling", 5,
          "Then the loss falls on, but few labels change: {kept} of {all} heads end as at step "
          "{repeat_step}.",
          training.along(11, 15), 1),
    Scene("outcome", 5.5,
          "Step {last_step}, loss {last_loss}: {labelled} of {all} heads have earned a label, {unlabelled} "
          "have none.",
          training.outcome, 1),
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
    facts = training.facts()
    return tuple(
        replace(scene, seconds=scene.seconds * wanted / usual, caption=scene.caption.format(**facts))
        for scene in TABLE
    )


# Captions


def captions(film: Sequence[Scene]) -> str:
    """Return the captions as WebVTT."""
    cues, start = [], 0.0
    for scene in film:
        end = start + scene.seconds
        cues.append(f"{_clock(start)} --> {_clock(end)}\n{scene.caption}\n")
        start = end
    return "\n".join(["WEBVTT\n", *cues])


def transcript(film: Sequence[Scene]) -> str:
    """Return the captions as a Markdown list, each with the second at which it begins."""
    lines, start = [], 0.0
    for scene in film:
        lines.append(f"- {int(start) // 60}:{int(start) % 60:02} {scene.caption}")
        start += scene.seconds
    return "\n".join(lines) + "\n"


def with_transcript(page: str, film: Sequence[Scene]) -> str:
    """Return the film's page with the current transcript between its two markers.

    Raises:
        ArgumentError: the marks are not there.
    """
    before, mark, rest = page.partition(START)
    _, last, after = rest.partition(END)
    if not mark or not last:
        raise ArgumentError(f"page must contain the lines {START} and {END}: one is missing; add both")
    return f"{before}{START}\n\n{transcript(film)}\n{END}{after}"


def _clock(seconds: float) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}.{whole % 1000:03}"


# Frames


def frame(scene: Scene, t: float, progress: float = 0) -> numpy.ndarray[Any, Any]:
    """Return one frame of a scene, uint8 [540, 960, 3].

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
    lines = textwrap.wrap(scene.caption, 96)
    for number, line in enumerate(lines):
        stage.text(WIDTH / 2, BAND + 31 + 24 * (number - (len(lines) - 1) / 2), line, 18.5, "#ffffff")
    stage.box(0, HEIGHT - 3, WIDTH * progress, 3, "#fd9467")
    return stage.dots()


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
        words = f"mini, measured at {len(training.life().steps)} checkpoints; straight lines between them"
        stage.text(WIDTH - 24, 30, words, 13, FAINT, at="right")
        return
    widths = [len(name) * 7.4 + 20 for name in CHAPTERS]
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


def frames(film: Sequence[Scene]) -> Iterator[bytes]:
    """Yield all frames as bytes that ffmpeg reads."""
    total = sum(scene.seconds for scene in film)
    starts = [sum(scene.seconds for scene in film[:number]) for number in range(len(film))]
    for number in range(round(total * RATE)):
        now = number / RATE
        at = max(place for place, start in enumerate(starts) if start <= now + 1e-9)
        yield frame(film[at], min((now - starts[at]) / film[at].seconds, 1.0), now / total).tobytes()


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


SAME = ("-map_metadata", "-1", "-fflags", "+bitexact", "-flags:v", "+bitexact")  # today as tomorrow
GIF = (
    f"fps={SLOW},scale={SMALL}:-2:flags=lanczos,split[a][b];[a]palettegen=max_colors=96[p];"
    "[b][p]paletteuse=dither=none:diff_mode=rectangle"
)
FORMATS = {  # name -> how ffmpeg makes it of all frames
    "film.webm": (*"-c:v libvpx-vp9 -crf 30 -b:v 0 -g 200 -pix_fmt yuv420p".split(),
                  *"-deadline good -cpu-used 2 -threads 2".split(), *SAME, "-f", "webm"),
    "film.gif": ("-vf", GIF, "-loop", "0", *SAME, "-f", "gif"),
}  # fmt: skip


def write(film: Sequence[Scene], out: Path) -> list[Path]:
    """Write all files of the film, each atomically, and the transcript on its page if there is one.

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
        whole = Path(folder) / "frames.mkv"
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{WIDTH}x{HEIGHT}", "-r", str(RATE), "-i", "-"]
        _filmed([*quiet, *raw, "-c:v", "ffv1", str(whole)], film)
        for name, format_options in FORMATS.items():
            with whole_file(out / name) as half:
                done = subprocess.run(
                    [*quiet, "-i", str(whole), *format_options, str(half)],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise ArgumentError(f"ffmpeg must make {name}: {done.stderr.strip()}; try another ffmpeg")
            written.append(out / name)
    with whole_file(out / "film.vtt") as half:
        half.write_text(captions(film), "utf-8")
    written.append(out / "film.vtt")
    page = out / PAGE
    if page.is_file():
        text = with_transcript(page.read_text("utf-8"), film)
        with whole_file(page) as half:
            half.write_text(text, "utf-8")
        written.append(page)
    return written


def _filmed(command: Sequence[str], film: Sequence[Scene]) -> None:
    """Write the frames to ffmpeg one after another."""
    count = round(sum(scene.seconds for scene in film) * RATE)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            for number, picture in enumerate(frames(film), 1):
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
    parser.add_argument("--stills", metavar="DIR", type=Path, help="pictures of every scene instead of films")
    options = parser.parse_args(arguments)
    try:
        film = scenes(options.seconds)
        if options.stills is not None:
            stills(film, options.stills)
            return 0
        for file in write(film, options.out):
            print(f"Wrote {file}: {file.stat().st_size / 1000:,.0f} kB")
    except HeadwiseError as error:
        parser.exit(2, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
