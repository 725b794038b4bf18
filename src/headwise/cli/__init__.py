"""The command line: `headwise <verb>`, a file per verb or per kind of them.

A mistake of the user is one line on stderr and exit code 2. Ctrl-C is 130; a missing package is 1, and so is
a problem that `headwise doctor` finds; `headwise check` and `headwise survey` have more exit codes for their
results. Nothing here imports torch: each verb imports what it needs.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from contextlib import suppress
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    import typer

__all__ = ["application", "main", "program"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count
UNPRINTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # of standard output
TELLS_OF_LEAKS = {"transformers", "triton"}  # triton reports every object that is left at exit as a leak
EPILOG = """\b
Examples:
  headwise look "The cat that I saw yesterday ran away"
  headwise check mha.py
  headwise learn
  headwise presets llama3-8b

headwise VERB --help tells more. headwise --install-completion lets Tab complete verbs, options and names.
"""


def application() -> typer.Typer:
    """Return the typer application, made on demand so that importing this needs no typer."""
    from ..errors import needed

    with needed("typer", "the headwise command needs typer"):
        import typer
    from .check_verb import check, explain
    from .serve_verb import serve
    from .teach_verbs import learn
    from .verbs import doctor, look, presets, start, survey

    verbs = (
        look,
        check,
        explain,
        survey,
        serve,
        presets,
        doctor,
    )
    app = typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},  # verbs inherit it
    )
    app.callback(invoke_without_command=True, epilog=EPILOG)(start)
    for verb in verbs:
        app.command()(verb)
    app.add_typer(learn)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `arguments` instead of the process's own."""
    return _code(arguments, lambda: False)


def program() -> int:
    """Run the command line of this process and return its exit code; Ctrl-C is handled until then.

    A program that has more to do calls `main`.
    """
    try:
        from . import terminal

        interruption = Interruption()
        terminal.ends_with_it = True
        code = _code(None, lambda: interruption.pressed)
        _let_go()
        if TELLS_OF_LEAKS.isdisjoint(sys.modules):
            gc.freeze()  # Python would search all of it for garbage, half a second, and then end
        else:
            gc.unfreeze()
        interruption.is_over = True
        return code
    except KeyboardInterrupt:
        return INTERRUPTED


def _let_go() -> None:
    """Flush the streams; drop what cannot be written, or Python would fail again at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _code(arguments: Sequence[str] | None, interrupted: Callable[[], bool]) -> int:
    try:
        return _answer(arguments, interrupted)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:  # how completion ends
        if isinstance(ended.__context__, BrokenPipeError):  # typer ends so if the pipe is closed
            return 0
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        if interrupted():  # libraries make other errors of a Ctrl-C
            return INTERRUPTED
        if not isinstance(error, OSError) or error.errno not in UNPRINTED or error.filename is not None:
            raise
        from .terminal import say

        say(f"standard output must be writable: {error.strerror}; redirect it")
        return 2


def _answer(arguments: Sequence[str] | None, interrupted: Callable[[], bool]) -> int:
    from ..errors import HeadwiseError, PackageMissing, VersionUnsupported
    from ..show.texts import plain

    try:
        code = application()(args=arguments, prog_name="headwise", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (PackageMissing, VersionUnsupported) as error:
        mistake, code = str(error), 1
    except HeadwiseError as error:
        mistake, code = str(error), 2
    except Exception as error:
        import typer

        if _is_from_torch(error):
            reason = str(error).strip().partition("\n")[0]
            mistake, code = f"torch must load: {reason}; install it again, see https://pytorch.org", 1
        elif isinstance(error, typer.Abort):  # how some versions pass on Ctrl-C
            return INTERRUPTED
        elif hasattr(error, "format_message"):  # an error of typer: the command line is wrong
            hint = _hint(sys.argv[1:] if arguments is None else arguments, getattr(error, "ctx", None))
            mistake, code = f"{error.format_message().rstrip('.')}; {hint}", 2
        else:
            raise
    if interrupted():
        return INTERRUPTED
    from .terminal import say

    say(plain(mistake))
    return code


def _is_from_torch(error: Exception) -> bool:
    """Return True if torch is missing or does not load."""
    if sys.modules.get("torch") is not None or not isinstance(error, (ImportError, OSError)):
        return False
    step = error.__traceback__
    while step is not None and step.tb_frame.f_globals.get("__name__") != "torch":
        step = step.tb_next
    return step is not None or getattr(error, "name", None) == "torch"


def _hint(arguments: Sequence[str], context: typer.Context | None) -> str:
    """Return advice on a wrong command line."""
    first = next(iter(arguments), "")
    if context is not None and context.parent is not None:  # the verb is known
        dashed = next((text for text in arguments if text.startswith("-") and " " in text), None)
        if dashed is not None and "--" not in arguments:
            return f"write a text that begins with a dash after --: headwise {first} -- {dashed!r}"
        return f"see {context.command_path} --help"
    verb = "check" if ".py" in first else "look" if " " in first else None  # the missing verb
    return "see headwise --help" if verb is None else f"begin with a verb: headwise {verb} {first!r}"


# Ctrl-C in the command line of the process: it ends with 130 at any moment and prints nothing.
#
# Python raises KeyboardInterrupt wherever it is. In the middle of an import, extensions turn it into an
# ImportError, swallow it, or have it printed as "Exception ignored in". There is nothing to clean up then, so
# the process just ends. Everywhere else it is raised as usual, so that half-written files are removed and the
# terminal is restored. Other signals that end a process do so after half-written files are removed.


AGAIN = 1.0  # seconds to clean up: another Ctrl-C within them is ignored
ENDED_BY = "SIGTERM", "SIGHUP"  # as timeout, a job queue and a closed window do
CURSOR = b"\x1b[?25h"  # shows the cursor again


class Interruption:
    """Handles Ctrl-C for the rest of the process, where Python's own handler was set."""

    def __init__(self) -> None:
        self.pressed_at: float | None = None
        self.is_over = False  # all is done, Python itself is about to end
        for name in ENDED_BY:
            number = getattr(signal, name, None)  # not every system has them
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, tidy_and_end)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background, or nohup
            signal.signal(signal.SIGINT, self._hear)
            self._usual = sys.unraisablehook
            sys.unraisablehook = self._unraisable

    @property
    def pressed(self) -> bool:
        """Return True if the user pressed Ctrl-C."""
        return self.pressed_at is not None

    def _hear(self, _: int, frame: FrameType | None) -> None:
        if self.is_over or may_just_end(frame):
            end()
        now = monotonic()
        if self.pressed_at is None or now - self.pressed_at > AGAIN:
            self.pressed_at = now
            raise KeyboardInterrupt

    def _unraisable(self, failed: sys.UnraisableHookArgs) -> None:
        """Raise SIGINT again if a KeyboardInterrupt was raised where nobody could catch it."""
        if issubclass(failed.exc_type, KeyboardInterrupt):
            self.pressed_at = None
            signal.raise_signal(signal.SIGINT)
        elif not self.pressed:
            self._usual(failed)


def may_just_end(frame: FrameType | None) -> bool:
    """Return True in the middle of an import, if no file is half written."""
    files = sys.modules.get("headwise.whole_files")
    if files is not None and files.half_written:
        return False
    importing = False
    while frame is not None:
        file = frame.f_code.co_filename
        importing = importing or file.startswith("<frozen importlib")
        if "matplotlib" in file:  # has a lock in its cache of fonts, which it waits for the next time
            return False
        frame = frame.f_back
    return importing


def tidy_and_end(number: int, _: FrameType | None) -> None:
    """Remove half-written files, then end the process as the signal does by default."""
    files = sys.modules.get("headwise.whole_files")
    for half in tuple(files.half_written) if files is not None else ():
        with suppress(OSError):
            os.unlink(half)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def end() -> None:
    try:
        if sys.stderr.isatty():
            hidden = "rich.live" in sys.modules
            os.write(sys.stderr.fileno(), b"\n" + (CURSOR if hidden else b""))  # the prompt goes under the ^C
        sys.stdout.flush()
    finally:
        os._exit(INTERRUPTED)
