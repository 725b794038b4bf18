"""The command line: `headwise <verb>`, a file per verb or per kind of them.

Whatever a user gets wrong is one line on stderr and exit code 2; Ctrl-C is 130; a missing package is 1, and
so is a problem that `headwise doctor` finds; `headwise check` and `headwise survey` have codes of their own
for what they found. Nothing here loads torch: what a verb needs, it imports itself.
"""

from __future__ import annotations

import errno
import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import typer

__all__ = ["application", "main", "program"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count
UNPRINTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # of what has no name
TELLS_OF_LEAKS = {"transformers", "triton"}  # triton calls all a leak that is there when Python ends
EPILOG = """\b
Examples:
  headwise look "The cat that I saw yesterday ran away"
  headwise check mha.py
  headwise learn
  headwise presets llama3-8b

headwise VERB --help tells more. headwise --install-completion lets Tab complete verbs, options and names.
"""


def application() -> typer.Typer:
    """The typer application, made on demand so that importing this needs no typer.

    Raises:
        PackageMissing: typer is not installed.
    """
    from ..errors import needed

    with needed("typer", "the headwise command needs typer"):
        import typer
    from .check_verb import check, explain
    from .information_verbs import doctor, presets, start
    from .learn_verbs import learn
    from .look_verbs import look, survey

    verbs = (
        look,
        check,
        explain,
        survey,
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
    """The command line of this very process, which ends with it: Ctrl-C is heard until then.

    A program that has more to do calls `main`.
    """
    try:
        from . import terminal
        from .interruption import Interruption

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
    """What was not taken where it was printed: Python would try again when it ends, and fail again."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            import os

            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _code(arguments: Sequence[str] | None, interrupted: Callable[[], bool]) -> int:
    try:
        return _answer(arguments, interrupted)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as ended:  # how completion ends
        if isinstance(ended.__context__, BrokenPipeError):  # and how typer does where nobody reads on
            return 0
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:
        if interrupted():  # libraries make other errors of a Ctrl-C
            return INTERRUPTED
        if not isinstance(error, OSError) or error.errno not in UNPRINTED or error.filename is not None:
            raise
        from .terminal import say

        say(f"standard output must be writable: {error.strerror}; send it elsewhere")
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
            said = str(error).strip().partition("\n")[0]
            mistake, code = f"torch must load: {said}; install it anew, see https://pytorch.org", 1
        elif isinstance(error, typer.Abort):  # how some versions pass on Ctrl-C
            return INTERRUPTED
        elif hasattr(error, "format_message"):  # typer's way to say that the command line is wrong
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
    """Whether torch is missing, or there and broken: libraries of another system, half an installation."""
    if sys.modules.get("torch") is not None or not isinstance(error, (ImportError, OSError)):
        return False
    step = error.__traceback__
    while step is not None and step.tb_frame.f_globals.get("__name__") != "torch":
        step = step.tb_next
    return step is not None or getattr(error, "name", None) == "torch"


def _hint(arguments: Sequence[str], context: typer.Context | None) -> str:
    """What to do about a command line that is wrong."""
    first = next(iter(arguments), "")
    if context is not None and context.parent is not None:  # the verb is known
        dashed = next((text for text in arguments if text.startswith("-") and " " in text), None)
        if dashed is not None and "--" not in arguments:
            return f"a text that begins with a dash comes behind --: headwise {first} -- {dashed!r}"
        return f"see {context.command_path} --help"
    verb = "check" if ".py" in first else "look" if " " in first else None  # that it was given without
    return "see headwise --help" if verb is None else f"a verb comes first, as headwise {verb} {first!r}"
