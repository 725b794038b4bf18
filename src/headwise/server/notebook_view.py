"""`headwise.live`: the page of a model as a notebook widget, computed by the notebook's own process.

The widget holds the page in a sandboxed frame. Requests of the page go through the widget to `LiveModel`, and
replies back; `selected` is the head that the page shows. Without anywidget the page is a static one.
"""

from __future__ import annotations

import html
import json
import secrets
from typing import TYPE_CHECKING, Any

from torch import nn

from .. import budget
from ..errors import REMEDIES, ArgumentError
from ..heads.collection import Heads
from ..models.pretrained import MINI
from ..show.heads_page import heads_page, start_data
from ..show.offline_pages import framed
from ..show.texts import plain
from .live_model import SECONDS, LiveModel
from .model_inputs import load_model
from .protocol import Refusal, request_of
from .web_app import page_of_model

if TYPE_CHECKING:
    import os

HEIGHT, LEAST_HEIGHT = 900, 200  # of the frame, in pixels
INSTALL = f"For a live page, install anywidget: {REMEDIES['anywidget']}, and restart the kernel."

# The front end of the widget: it carries messages between the frame and Python, and computes nothing.
SCRIPT = """
function render({ model, el }) {
  const channel = model.get("_channel");
  const prefix = Math.random().toString(36).slice(2) + ".";
  const frame = document.createElement("iframe");
  frame.title = "headwise";
  frame.setAttribute("sandbox", "allow-scripts allow-downloads");
  frame.style.cssText = "width: 100%; border: 1px solid #8886; border-radius: 8px";
  frame.style.height = model.get("height") + "px";
  frame.srcdoc = model.get("_page");
  const fromPage = ({ source, data }) => {
    if (source !== frame.contentWindow || data?.headwise !== channel) return;
    if (Array.isArray(data.selected)) {
      model.set("_selected", data.selected);
      model.save_changes();
    } else if (data.ask) model.send({ id: prefix + data.id, ask: data.ask });
  };
  const fromPython = (reply, buffers) => {
    if (!String(reply.id).startsWith(prefix)) return; // the answer to another view of this widget
    const view = buffers?.[0];
    const data = view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : null;
    const id = Number(String(reply.id).slice(prefix.length));
    const message = { headwise: channel, id, data };
    if (reply.error) message.error = reply.error;
    else message.header = reply.header;
    frame.contentWindow?.postMessage(message, "*");
  };
  window.addEventListener("message", fromPage);
  model.on("msg:custom", fromPython);
  el.append(frame);
  return () => {
    window.removeEventListener("message", fromPage);
    model.off("msg:custom", fromPython);
  };
}
export default { render };
"""


def live(
    model: nn.Module | str | os.PathLike[str] = MINI,
    tokenizer: Any = None,
    text: str | None = None,
    *,
    title: str | None = None,
    max_tokens: int = 4096,
    memory: int | str | None = None,
    seconds: float = SECONDS,
    height: int = HEIGHT,
) -> LivePage:
    """Show a model in a notebook: type a text, and every head is computed again.

        view = hw.live(model, tokenizer)
        view                    # shows the page
        view.selected           # (layer, head) that was clicked
        view.heads.table()      # the heads on the last text

    The page is that of `headwise serve`. With anywidget (the extra `notebook`) it is a widget that asks the
    kernel, which answers while no cell runs. Without anywidget the page shows the first text only, and says
    what to install.

    Args:
        model: any model that `headwise.watch` can watch, in eval mode; or what `headwise serve` takes:
            "mini", "minilm", a folder, a name on the Hugging Face hub, "module:function".
        tokenizer: the model's tokenizer; for a model of images, a function that turns a PIL image into the
            model's input, such as an image processor of transformers. Leave it out where `model` is a name.
        text: what is read first.
        title: what the page calls the model. Default: the name of its class.
        max_tokens: longer texts are cut.
        memory: the memory for the last texts, in bytes or as "2 GiB". Default: half of what is free.
        seconds: the time limit of one text.
        height: of the page, in pixels.

    Returns:
        A page that a notebook shows. `selected` is the head that the page shows, `heads` are the
        `headwise.Heads` of the last text.

    Raises:
        ArgumentError: a model in training mode; a model without its tokenizer, or a name with one; a text
            that the model cannot read.
        AttentionBypassed: no attention of the model can be intercepted.

    Example:
        >>> import headwise as hw
        >>> view = hw.live(text="the cat sat on the mat")
        >>> len(view.heads.all())
        56
    """
    if not isinstance(height, int) or height < LEAST_HEIGHT:
        raise ArgumentError(
            f"height must be at least {LEAST_HEIGHT} pixels: got {height!r}; {HEIGHT} is usual"
        )
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ArgumentError(
                f"tokenizer must be given with a model: got None with a {type(model).__name__}; pass the "
                "model's own tokenizer"
            )
        name = type(model).__name__ if title is None else title
    else:
        if tokenizer is not None:
            raise ArgumentError(
                f"tokenizer must be left out for a model by name: got a {type(tokenizer).__name__} with "
                f"{str(model)!r}; it is loaded with the model"
            )
        loaded = load_model(str(model))
        model, tokenizer = loaded.model, loaded.tokenizer
        name = loaded.title if title is None else title
    limit = None if memory is None else budget.parse(memory)
    live_model = LiveModel(
        model, tokenizer, name, example=text, max_tokens=max_tokens, memory=limit, seconds=seconds
    )
    return LivePage(live_model, height)


class LivePage:
    """A page of a model in a notebook; see `headwise.live`."""

    def __init__(self, live_model: LiveModel, height: int) -> None:
        self._live, self._height = live_model, height
        start = start_data([[live_model.first_reading]], [])
        self._first_selected = start["layer"], start["head"]
        self._widget = _widget(live_model, height, self._first_selected)

    @property
    def selected(self) -> tuple[int, int]:
        """Return (layer, head) of the head that the page shows; layers are counted from 0."""
        if self._widget is None:
            return self._first_selected
        layer, head = self._widget._selected
        return int(layer), int(head)

    @property
    def heads(self) -> Heads:
        """Return the heads of the text that was read last."""
        return self._live.last_heads

    @property
    def widget(self) -> Any:
        """Return the anywidget of the page, to put it into other widgets; None without anywidget."""
        return self._widget

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Show the widget, or the static page if anywidget is not installed."""
        if self._widget is not None:
            return self._widget._repr_mimebundle_(**options)
        page = heads_page(self._live.first_heads, text=self._live.first["text"] or None)
        note = f"<p>{html.escape(INSTALL)}</p>"
        return {
            "text/html": note + framed(page, "headwise heads", height=self._height, scripts=True),
            "text/plain": f"{self!r}. {INSTALL}",
        }

    def __repr__(self) -> str:
        heads = len(self.heads.all())
        return f"LivePage({plain(self._live.title, 120)!r}, {heads} heads)"


def _widget(live_model: LiveModel, height: int, selected: tuple[int, int]) -> Any:
    """Return the widget of a page, or None if anywidget is not installed."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError:
        return None

    channel = secrets.token_hex(8)

    class LiveWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
        _esm = SCRIPT
        _page = traitlets.Unicode().tag(sync=True)
        _channel = traitlets.Unicode().tag(sync=True)
        _selected: Any = traitlets.List().tag(sync=True)
        height = traitlets.Int().tag(sync=True)

    widget = LiveWidget(
        _page=page_of_model(live_model, "parent", channel),
        _channel=channel,
        _selected=list(selected),
        height=height,
    )
    widget.on_msg(lambda _, content, buffers: answer(live_model, widget, content))
    return widget


def answer(live_model: LiveModel, widget: Any, content: Any) -> None:
    """Answer a message of the page: {"id": ..., "ask": ...}.

    The page gets a reply to every message: an error where the answer failed or the kernel was interrupted.
    """
    number = content.get("id") if isinstance(content, dict) else None
    try:
        request = request_of(content.get("ask") if isinstance(content, dict) else content)
        reply = live_model.arrive(request) or live_model.answer(request)
        header = json.loads(json.dumps(reply.header, allow_nan=False))
        packed = reply.packed
    except Refusal as refusal:
        widget.send({"id": number, "error": refusal.reply})
    except ArgumentError as error:
        widget.send({"id": number, "error": {"error": str(error), "kind": "refused"}})
    except BaseException as error:
        reason = str(error).strip().partition("\n")[0]
        text = f"the page failed: {type(error).__name__}{f': {reason:.500}' if reason else ''}"
        widget.send({"id": number, "error": {"error": text, "kind": "failed"}})
        if not isinstance(error, Exception):  # such as an interrupt of the kernel
            raise
    else:
        widget.send({"id": number, "header": header}, [] if packed is None else [packed])
