"""`headwise serve`: a model of any kind in a page, where every text is computed again."""

from __future__ import annotations

import gc
import secrets
import sys
import webbrowser
from typing import Annotated

import typer

from ..errors import ArgumentError, are_here, install_command
from .terminal import complete_devices, complete_models, option, progress_line, text_or_file, uncollected

MODEL = "mini|minilm|NAME|PATH|MODULE:FUNCTION"
OPEN = (
    "Every machine that can reach {host} can use the model if it knows the token in the address. The "
    "connection is not encrypted."
)


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar=MODEL,
            help="mini (built in), minilm (all-MiniLM-L6-v2), a name on the Hugging Face hub, a folder with "
            "a model, or MODULE:FUNCTION or FILE.py:FUNCTION, a function that returns (model, tokenizer).",
            autocompletion=complete_models,
        ),
    ] = "mini",
    text: Annotated[
        str | None,
        option(metavar="TEXT|FILE", help="The text that is read first. Default: an example."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. 0.0.0.0: other machines can open the page, too.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port; if it is in use, the next free one is taken.")
    ] = 8765,
    token: Annotated[
        str | None,
        option(
            envvar="HEADWISE_TOKEN",
            help="The token in the page's address, at least 8 letters or digits. Default: drawn at random.",
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    max_tokens: Annotated[int, typer.Option(min=2, help="Read at most this many tokens of a text.")] = 4096,
    memory: Annotated[
        str | None,
        option(
            metavar="SIZE", help='Memory for the last texts, e.g. "4 GiB". Default: half of what is free.'
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="The time limit of one text.")] = 60.0,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda.", show_default="cpu", autocompletion=complete_devices),
    ] = None,
) -> None:
    """Show a model in a page that recomputes every head while you type.

    Starts a web server on this machine and opens the page. On the page you can type, switch heads off or
    scale them, compare two texts, append predicted tokens, and zoom into the maps of long texts. The address
    of the page holds a token; without it nothing is answered. Ctrl-C ends the server.

    MODULE:FUNCTION runs your own code: the function takes no arguments and returns a torch.nn.Module and its
    tokenizer, or for images a function that turns a PIL image into the model's input.

    \b
    Examples:
      headwise serve
      headwise serve minilm --port 9000
      headwise serve ./my-model --device cuda --max-tokens 131072
      headwise serve my_model.py:load

    \b
    The first command prints
      mini: 8 layers, 56 heads
      Open http://127.0.0.1:8765/?token=... (Ctrl-C ends the server)

    Exit codes: 0: ended by Ctrl-C; 1: a package is missing; 2: wrong arguments, explained in one line.
    """
    are_here(("starlette", "uvicorn", "rich"), "headwise serve needs", install_command("cli", "serve"))
    if token is not None and not (len(token) >= 8 and token.isascii() and token.isalnum()):
        raise ArgumentError(
            f"token must be at least 8 letters or digits: got {len(token)} characters; leave it out to draw "
            "one"
        )
    with progress_line("Loading torch", at_once=True) as progress:
        with uncollected():
            import torch

            from .. import budget
            from ..server.live_model import LiveModel
            from ..server.model_inputs import load_model
            from ..server.web_app import address_of, application, bound_socket, serve_forever, web_server
        from ..show.texts import plain

        limit = None if memory is None else budget.parse(memory)
        if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(
                f"device must be available: got {device!r}, and torch finds no CUDA device; try cpu"
            )
        bound = bound_socket(host, port)
        example = None if text is None else text_or_file(text)
        progress.show(f"Loading {plain(model)}")
        loaded = load_model(model)
        module = loaded.model if device is None else loaded.model.to(device)
        progress.show("Reading the first text")
        live = LiveModel(
            module,
            loaded.tokenizer,
            loaded.title,
            example=example,
            max_tokens=max_tokens,
            memory=limit,
            seconds=seconds,
        )
        token = token or secrets.token_urlsafe(16)
        app = application(live, token, host)
        server = web_server(app)
    heads = len(live.first["heads"])
    typer.echo(f"{plain(live.title)}: {len(live.layers)} layers, {heads} heads")
    chosen = bound.getsockname()[1]
    if chosen != port:
        typer.echo(f"Port {port} is in use; port {chosen} was taken.")
    if host not in ("127.0.0.1", "::1", "localhost"):
        typer.echo(OPEN.format(host=host))
    address = address_of(bound, host, token)
    typer.echo(f"Open {address} (Ctrl-C ends the server)")
    sys.stdout.flush()
    if open_browser:
        webbrowser.open(address)
    gc.collect()
    gc.freeze()  # else the imported packages are searched every 20 keystrokes or so: 190 ms
    try:
        serve_forever(server, app, bound)
    finally:
        gc.unfreeze()
    typer.echo("Stopped.")
