"""Parts shared by the verbs: the arguments FILE[:NAME] and TEXT|FILE|-, shell completion, a console, and a
line of progress. Nothing here imports torch, because a shell runs it at every Tab."""

from __future__ import annotations

import codecs
import difflib
import gc
import os
import re
import shlex
import shutil
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread, Timer
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import ArgumentError, needed

if TYPE_CHECKING:
    from rich.console import Console


def say(words: str) -> None:
    """Print a line on stderr, if it can be written."""
    if sys.stderr is not None:  # or print would take standard output for it
        with suppress(OSError, ValueError):
            print(f"headwise: {words}", file=sys.stderr)


def option(*names: str, **settings: Any) -> Any:
    """Return an option of typer whose help does not show the default."""
    import typer

    return typer.Option(*names, show_default=False, **settings)


def console_of(verb: str) -> Console:
    """Return a console of rich on standard output."""
    with needed("rich", f"headwise {verb} prints with rich"):
        from rich.console import Console
    return Console(highlight=False)


ends_with_it = False  # `program` sets it to True: the process ends with the command line


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside the context: loading and drawing make hardly any garbage.

    If the process ends with the command line, these objects are never collected.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            if ends_with_it:
                gc.freeze()
            gc.enable()


def file_and_name(argument: str) -> tuple[Path, str | None]:
    """Return the existing file and the name after the colon, or None if there is no name.

    An argument that exists is a file, even with colons in its name (C:/file.py); otherwise the last colon is
    the one before NAME.
    """
    if argument in ("-", ""):
        raise ArgumentError(
            f"FILE must be a file of Python source: got {argument!r}, and standard input is not read; "
            "save the code and name the file"
        )
    whole = _path(argument)
    if os.path.exists(whole):
        return _source(whole, argument), None
    front, _, name = argument.rpartition(":")
    file = _path(front)
    if not front or not os.path.exists(file):
        # whether the part before the colon is the file's name
        named = bool(front) and file.suffix in (".py", ".ipynb")
        raise _missing(file, front) if named else _missing(whole, argument)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentError(
            f"NAME must be a class or function in {front!r}: got {name!r}; try {front}:MyAttention"
        )
    return _source(file, front), name


def _path(argument: str) -> Path:
    return Path(os.path.expanduser(argument))


def _source(file: Path, argument: str) -> Path:
    if not file.is_file():
        raise ArgumentError(
            f"FILE must be a file of Python source: {argument!r} is a folder or a device; "
            "name a file of Python source"
        )
    return file


def _missing(file: Path, argument: str) -> ArgumentError:
    close = _close_to(file, "*.py")
    advice = f"did you mean {close!r}?" if close else "check the name"
    return ArgumentError(f"FILE must exist: there is no {argument!r}; {advice}")


def _close_to(file: Path, pattern: str) -> str | None:
    """Return the file beside it with the most similar name, if any."""
    names: list[str] = []
    with suppress(OSError, ValueError):
        names = [file_there.name for file_there in file.parent.glob(pattern)]
    close = difflib.get_close_matches(file.name, names, n=1)
    return str(file.with_name(close[0])) if close else None


MOST_BYTES = 1 << 20  # that are read of a file or of standard input
WAIT = 1.0  # seconds without standard input before a note is printed
STANDARD_INPUT = "-"
LIKE_A_PATH = re.compile(r"[./~]\S*/\S*|\S*\w\.[A-Za-z]\w{0,4}")  # ./notes, story.txt; not 3.5
LIKE_A_FILE = re.compile(r".{,200}\w\.[A-Za-z]\w{0,4}")  # my story.txt; a sentence may end like that, too
SPACELESS = re.compile(  # Thai, Burmese, Khmer, Chinese, Japanese: there a sentence has no spaces
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]"
)
QUOTES = "'`‘’“”„«»"  # not every shell treats them as quotes
BYTE_ORDERS = (  # the longest first
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
END = "Ctrl-Z and Enter" if sys.platform == "win32" else "Ctrl-D"


def texts_of(arguments: Sequence[str] | None, example: str) -> list[str]:
    """Return one text or two, from arguments, files or a pipe; the example if there is none.

    A pipe is read where no text is given. "-" is standard input in any case. Of files and of standard input
    the line break at the very end is not part of the text: `echo` and editors add it.
    """
    arguments = list(arguments or ())
    words = sum(map(_is_one_word, arguments))
    if len(arguments) > 2 or words == 2:
        raise _unquoted(arguments, words)
    if arguments.count(STANDARD_INPUT) > 1:
        raise ArgumentError("TEXT must be - at most once: got 2; write one of the texts as an argument")
    texts = [text_or_file(argument) for argument in arguments]
    if not arguments:
        piped = _standard_input() if _is_piped() else None
        texts = [example if piped is None else piped]
    for text in texts:
        if not text.strip():
            raise ArgumentError("text must hold at least one word: found 0; try a sentence")
    return texts


def _is_one_word(argument: str) -> bool:
    """Return True if it seems to be one word of an unquoted sentence."""
    return (
        argument != STANDARD_INPUT
        and bool(argument.strip())
        and not re.search(r"\s", argument)
        and not SPACELESS.search(argument)
        and not LIKE_A_PATH.fullmatch(argument)
        and not os.path.exists(os.path.expanduser(argument))
    )


def _unquoted(arguments: Sequence[str], words: int) -> ArgumentError:
    if words < 2:
        return ArgumentError(
            f'TEXT must be one text, or two to compare: got {len(arguments)}; try headwise look "a text" '
            '"another text"'
        )
    sentence = " ".join(arguments).strip(QUOTES)
    if len(sentence) > 60:
        sentence = f"{sentence[:59]}…"
    quoted = shlex.quote(sentence) if re.search(r'["$`!\\]', sentence) else f'"{sentence}"'
    hint = f"put quotes around them: headwise look {quoted}"
    if len(arguments) == 2:
        hint += '; two texts are compared as in headwise look "a text" "another text"'
    return ArgumentError(f"TEXT must be one argument: got {len(arguments)} words; {hint}")


def text_or_file(argument: str) -> str:
    """Return the text itself, the content of the file of that name, or for "-" that of standard input.

    Of more than `MOST_BYTES` the beginning is read, and stderr says so.
    """
    if argument == STANDARD_INPUT:
        return _standard_input() or ""
    file = _path(argument)
    if argument and os.path.islink(file) and not os.path.exists(file):
        raise ArgumentError(
            f"TEXT|FILE must be a sentence or a file that exists: {argument!r} is a broken link; correct it"
        )
    if not argument or not os.path.exists(file):
        close = _close_to(file, "*") if LIKE_A_FILE.fullmatch(argument) else None
        if close is None and not LIKE_A_PATH.fullmatch(argument):
            return argument
        advice = f"did you mean {close!r}?" if close else "check the name, or write a whole sentence"
        raise ArgumentError(
            f"TEXT|FILE must be a sentence or a file that exists: there is no {argument!r}; {advice}"
        )
    if not file.is_file():
        raise ArgumentError(
            f"TEXT|FILE must be a sentence or a file: {argument!r} is a folder or a device; name a file in it"
        )
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise ArgumentError(
            f"FILE must be readable: {argument!r}: {error.strerror}; check its permissions"
        ) from error
    return _decoded(data, "FILE", repr(argument))


def _decoded(data: bytes, argument: str, name: str) -> str:
    """Decode UTF-8, or the encoding of the byte order mark, without the line break at the end.

    Every line ends in a newline alone. Of more than `MOST_BYTES` only so many are decoded, up to the last
    whole character, and stderr says so.
    """
    is_cut = len(data) > MOST_BYTES
    if is_cut:
        data = data[:MOST_BYTES]
        most = f"{MOST_BYTES:,}"
        say(f"{argument} has more than {most} bytes: only the first {most} of {name} are read")
    encoding = next((encoding for mark, encoding in BYTE_ORDERS if data.startswith(mark)), "utf-8-sig")
    called = encoding.removesuffix("-sig").upper()
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data, final=not is_cut)
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"{argument} must be text in {called}: {name} has an invalid byte at {error.start}; save it as "
            "text in UTF-8"
        ) from error
    if "\0" in text:
        raise ArgumentError(
            f"{argument} must be text in {called}: {name} has a NUL at character {text.index(chr(0))}; save "
            "it as text in UTF-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _is_piped() -> bool:
    """Return True if standard input is a pipe, a file or a socket."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # something of Python's own in its place
        return not sys.stdin.isatty()
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _standard_input() -> str | None:
    """Return standard input as text, see `_decoded`, or None if there is none or it cannot be read.

    A note that it waits is printed at once on a terminal, otherwise after a second.
    """
    if sys.stdin is None or sys.stdin.closed:
        return None
    on_terminal = sys.stdin.isatty()
    waits = "type a text and end it with " if on_terminal else "reading standard input until it ends; "
    waits += f"{END} on a line of its own" if on_terminal else "Ctrl-C stops"
    timer = Timer(0.0 if on_terminal else WAIT, say, (waits,))
    timer.daemon = True
    timer.start()
    try:
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    except OSError:  # it cannot be read, as in a notebook
        return None
    finally:
        timer.cancel()
    return _decoded(data, "standard input", "the input")


MODELS = ("mini", "minilm")
CORPORA = (".txt", ".text", ".md", ".jsonl", ".ndjson", ".parquet")  # as `headwise.corpus.documents.ENDINGS`
# As `headwise.show.heads_tables.check_sort` knows them, which needs torch; a test compares the two.
SORTS = (
    "label", "layer", "head", "entropy", "effective_keys", "confidence", "distance", "first", "previous",
    "itself", "next", "local", "max_logit", "induction", "duplicate_token", "special", "punctuation",
    "spread", "locality", "streaming",
)  # fmt: skip


# Shells call these when Tab is pressed: each gets what was typed so far, and returns all that begin with it.


def complete_presets(typed: str) -> list[str]:
    from ..nn.presets import PRESETS

    return [name for name in PRESETS if name.startswith(typed)]


def complete_sorts(typed: str) -> list[str]:
    return [name for name in SORTS if name.startswith(typed)]


def complete_devices(typed: str) -> list[str]:
    return [name for name in ("cpu", "cuda") if name.startswith(typed)]


def complete_models(typed: str) -> list[str]:
    """Return completions of --model: names of built-in models, and folders."""
    own = [name for name in MODELS if name.startswith(typed)]
    for folder in complete_folders(typed):
        has_model = os.path.isfile(os.path.join(os.path.expanduser(folder), "config.json"))
        own.append(folder.rstrip("/") if has_model else folder)
    return own


def _completing(*endings: str) -> Callable[[str], list[str]]:
    """Return what completes folders, each with a slash, and files with these endings."""

    def complete(typed: str) -> list[str]:
        return _paths(typed, endings)

    return complete


complete_folders = _completing()
complete_python_files = _completing(".py", ".ipynb")
complete_pictures = _completing(".png", ".svg", ".pdf")
complete_pages = _completing(".html", ".htm", ".json")
complete_texts = _completing("")  # any file
complete_corpora = _completing(*CORPORA)


def _paths(typed: str, endings: tuple[str, ...]) -> list[str]:
    """Return folders, and files with these endings, that begin with the typed text."""
    folder, begun = os.path.split(typed)
    front = typed[: len(typed) - len(begun)]
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as items:
            entries = sorted((entry.name, entry.is_dir()) for entry in items if entry.name.startswith(begun))
    except OSError:
        return []
    return [
        f"{front}{name}{'/' if is_folder else ''}"
        for name, is_folder in entries
        if (is_folder or name.lower().endswith(endings)) and (begun or not name.startswith("."))
    ]


AFTER = 2.0  # seconds before the line appears
EVERY = 0.1  # seconds between two turns
TURNS = "|/-\\"  # in every encoding
BAR = 20  # characters


@contextmanager
def progress_line(words: str, *, at_once: bool = False) -> Iterator[ProgressLine]:
    """Show a line with the current work and the time so far on stderr, after 2 seconds or at once; clear it
    at the end.

    Nothing is shown if stderr is a file, a pipe or a terminal that cannot rewrite a line.
    """
    progress = ProgressLine(words, 0.0 if at_once else AFTER)
    watched = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if watched:
        progress.begin()
    try:
        yield progress
    finally:
        progress.end()


class ProgressLine:
    """A line on stderr: the current work, how much of it is done, and the time so far.

    It needs only Python, so that it can be shown while other packages are imported.
    """

    def __init__(self, words: str, after: float) -> None:
        self._now: tuple[str, int | None, Callable[[], int]] = (words, None, int)
        self._after, self._since = after, monotonic()
        self._file = sys.stderr
        self._turn = self._wide = 0  # cells that the line takes
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def show(self, words: str, total: int | None = None, done: Callable[[], int] = int) -> None:
        """Show the current work, the total if it is known, and how much `done` counts as done."""
        self._now = words, total, done
        if self._turn:
            self._draw()  # what comes next may leave the thread no time

    def count(self, done: int, total: int | None) -> None:
        self._now = self._now[0], total, lambda: done

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Clear the line while something is printed, and show it again below.

        If standard output is a pipe, the line is not shown again: a pager such as less may own the screen.
        """
        with self._lock:
            self._wipe()
            yield
            if sys.stdout is None or not sys.stdout.isatty():
                self._over.set()

    def begin(self) -> None:
        if not self._after:
            self._draw()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()  # it may be drawing at this moment
        self._wipe()

    def _wipe(self) -> None:
        if self._wide:
            self._write(f"\r{' ' * self._wide}\r")
            self._wide = 0

    def _run(self) -> None:
        pause = self._after or EVERY
        while not self._over.wait(pause):
            self._draw()
            pause = EVERY

    def _draw(self) -> None:
        with self._lock:
            if self._over.is_set():
                return
            words, total, done = self._now
            self._turn += 1
            seconds = int(monotonic() - self._since)
            bar = ""
            if total:
                now = min(done(), total)
                filled = BAR * now // total
                bar = f" [{'#' * filled}{'.' * (BAR - filled)}] {now} of {total}"
            line = f"{TURNS[self._turn % len(TURNS)]} {words}"
            end = f"{bar} {seconds // 60}:{seconds % 60:02}"
            line, wide = _cut(line, max(2, _columns(self._file) - 1 - len(end)))
            self._write(f"\r{line}{end}{' ' * max(0, self._wide - wide - len(end))}")
            self._wide = wide + len(end)

    def _write(self, line: str) -> None:
        encoding = self._file.encoding or "ascii"
        with suppress(OSError, ValueError):  # the terminal is closed
            self._file.write(line.encode(encoding, "replace").decode(encoding))
            self._file.flush()


def _columns(file: TextIO) -> int:
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def _cut(line: str, most: int) -> tuple[str, int]:
    """Cut a line to `most` cells, and return its width: a Chinese character takes two."""
    wide = 0
    for at, char in enumerate(line):
        cells = 2 if unicodedata.east_asian_width(char) in "WF" else 0 if unicodedata.combining(char) else 1
        if wide + cells > most:
            return line[:at], wide
        wide += cells
    return line, wide
