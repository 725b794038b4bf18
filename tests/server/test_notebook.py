"""`headwise.live`: the page of a model in a notebook, with and without anywidget, and in a JupyterLab."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from page_requests import check_origin
from served_models import TEXT, live, llama

import headwise as hw
from browser import Browser, Page
from headwise.server import notebook_view
from headwise.server.live_model import LiveModel
from headwise.server.notebook_view import INSTALL, LivePage

SHIFT = 8
CAT = "the cat sat on the mat"
CELLS = (
    f'import headwise as hw; view = hw.live(text="{CAT}"); view',
    "print(view.selected, len(view.heads.all()))",
)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where anywidget is not installed."""
    monkeypatch.setitem(sys.modules, "anywidget", None)


class Widget:
    """Keeps what is sent to the page."""

    def __init__(self) -> None:
        self.messages: list[tuple[dict[str, Any], list[bytes]]] = []

    def send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        json.dumps(content, allow_nan=False)
        self.messages.append((content, buffers or []))


def answered(model: LiveModel, content: Any) -> tuple[dict[str, Any], list[bytes]]:
    widget = Widget()
    notebook_view.answer(model, widget, content)
    (message,) = widget.messages
    return message


def read(text: str = TEXT, number: int = 1, **fields: Any) -> dict[str, Any]:
    ask = {"ask": "read", "client": "notebook", "number": number, "slot": 0, "text": text}
    return {"id": f"x.{number}", "ask": ask | fields}


@pytest.mark.usefixtures("bare")
def test_without_anywidget_the_page_is_static_and_says_what_to_install() -> None:
    page = hw.live(text="the <cat> sat")
    assert page.widget is None
    shown = page._repr_mimebundle_()
    content = shown["text/html"]
    assert "For a live page, install anywidget: pip install &quot;headwise[notebook]&quot;" in content
    assert 'sandbox="allow-scripts allow-downloads"' in content and "the <cat> sat" not in content
    assert shown["text/plain"] == f"LivePage('mini', 56 heads). {INSTALL}"
    strongest = page.selected
    assert strongest in {(layer, head) for layer in range(8) for head in range(7)}
    assert len(page.heads.all()) == 56


def test_the_widget_holds_the_page_and_the_head_that_was_clicked() -> None:
    pytest.importorskip("anywidget")
    page = hw.live(text=CAT)
    layer, head = page.selected
    assert 0 <= layer < 8 and 0 <= head < 7
    state = page.widget.get_state()
    assert state["height"] == 900 and '"transport":"parent"' in state["_page"]
    assert state["_channel"] in state["_page"] and "connect-src" not in state["_page"]
    page.widget.set_state({"_selected": [6, 5]})
    assert page.selected == (6, 5)
    shown = page._repr_mimebundle_()
    data = shown[0] if isinstance(shown, tuple) else shown
    assert "application/vnd.jupyter.widget-view+json" in data
    assert repr(page) == "LivePage('mini', 56 heads)"


def test_a_message_of_the_page_is_answered_through_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget")
    page, widget = hw.live(text=CAT), Widget()
    monkeypatch.setattr(page.widget, "send", widget.send)
    page.widget._handle_custom_msg(read(), [])
    ((content, buffers),) = widget.messages
    assert content["id"] == "x.1" and content["header"]["text"] == TEXT and buffers == []
    assert page.heads.tokens is not None and len(page.heads.tokens[0]) == content["header"]["tokens"]


def test_requests_get_replies_and_bad_ones_errors() -> None:
    model = live("llama")
    content, buffers = answered(model, read())
    header = content["header"]
    assert header["tokens"] == len(TEXT) and buffers == []
    ask = {"ask": "maps", "reading": header["reading"], "heads": [[1, 2], [0, 5]], "measure": "weights"}
    content, buffers = answered(model, {"id": "x.2", "ask": ask})
    assert [(m["rows"], m["columns"]) for m in content["header"]["maps"]] == [(37, 37)] * 2
    assert content["id"] == "x.2" and len(buffers) == 1
    content, _ = answered(model, {"id": "x.3", "ask": {"ask": "progress", "client": "notebook"}})
    assert content["header"] == {"done": 0, "of": 0}
    for request, kind, words in (
        (ask | {"reading": "unknown"}, "gone", "no longer kept"),
        (ask | {"heads": [[9, 0]]}, "refused", "layer must be one of 3: got 9"),
        (ask | {"heads": [["1", 0]]}, "refused", "got [['1', 0]]"),
        ({"ask": "erase"}, "refused", "got 'erase'"),
        (None, "refused", "request must be an object: got NoneType"),
        (read(text="")["ask"], "refused", "text must hold"),
    ):
        content, buffers = answered(model, {"id": "x.4", "ask": request})
        assert content["id"] == "x.4" and buffers == []
        assert content["error"]["kind"] == kind and words in content["error"]["error"]
    for message in (None, 3, [], "ask"):
        content, _ = answered(model, message)
        assert content["id"] is None and content["error"]["kind"] == "refused"


def test_a_failing_model_is_an_error_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LiveModel(*llama())
    monkeypatch.setattr(model.model, "forward", lambda **_: 1 / 0)
    content, _ = answered(model, read())
    error = {"error": "the model failed: ZeroDivisionError: division by zero", "kind": "failed"}
    assert content["error"] == error
    monkeypatch.undo()
    assert answered(model, read(number=2))[0]["header"]["text"] == TEXT


@pytest.mark.usefixtures("bare")
def test_wrong_arguments_are_refused_with_their_value() -> None:
    tiny = llama()
    for arguments, words in (
        ({"model": tiny.model}, "tokenizer must be given with a model: got None with a LlamaForCausalLM"),
        (
            {"model": "mini", "tokenizer": tiny.tokenizer},
            "for a model by name: got a .* with 'mini'",
        ),
        ({"model": tiny.model, "tokenizer": 3}, "tokenizer must be a tokenizer.*got int"),
        ({"model": "no_such_module:load"}, "there is no 'no_such_module'"),
        ({"max_tokens": 1}, "max_tokens must be at least 2: got 1"),
        ({"memory": "much"}, "'much'"),
        ({"text": ""}, "text must hold"),
    ):
        with pytest.raises(hw.errors.ArgumentError, match=words):
            hw.live(**arguments)  # type: ignore[arg-type]
    with pytest.raises(hw.errors.ArgumentError, match="model must be in eval mode: LlamaForCausalLM"):
        hw.live(tiny.model.train(), tiny.tokenizer)


@pytest.mark.usefixtures("bare")
def test_a_model_has_the_name_of_its_class_or_its_title() -> None:
    tiny = llama()
    assert repr(hw.live(tiny.model, tiny.tokenizer)) == "LivePage('LlamaForCausalLM', 18 heads)"
    page = hw.live(tiny.model, tiny.tokenizer, title="<b>mine</b>", text=CAT)
    assert isinstance(page, LivePage) and repr(page) == "LivePage('<b>mine</b>', 18 heads)"
    assert "<b>mine" not in page._repr_mimebundle_()["text/html"]


@contextmanager
def jupyter_lab(folder: Path, notebooks: Path) -> Iterator[str]:
    """A JupyterLab of its own, without news, updates or extensions of the user; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "config"
    config.mkdir()
    (config / "jupyter_lab_config.py").write_text(
        "c.LabApp.news_url = None\n"
        "c.LabApp.check_for_updates_class = 'jupyterlab.handlers.announcements.NeverCheckForUpdate'\n"
        "c.LabApp.extension_manager = 'readonly'\n"
    )
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    places = {
        "JUPYTER_CONFIG_DIR": config,
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "JUPYTER_DATA_DIR": folder / "data",
        "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
        "IPYTHONDIR": folder / "ipython",
        "HOME": folder,
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=letmein12",
        f"--ServerApp.root_dir={notebooks}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment | {name: str(place) for name, place in places.items()},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + 60
        while True:
            try:
                direct.open(f"{address}/api/status?token=letmein12", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()  # it ends its kernels
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_cell(page: Page, number: int) -> None:
    """Run a cell with the keyboard."""
    cell = f".jp-Notebook .jp-CodeCell[data-windowed-list-index='{number}']"
    element = f"document.querySelector({json.dumps(cell)})"
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": SHIFT}
    end = time.monotonic() + 60
    while page.evaluate(f"{element}.querySelector('.jp-InputPrompt').textContent").startswith("[ ]"):
        assert time.monotonic() < end, "the cell does not run"
        page.click(f"{cell} .cm-content")  # while JupyterLab lays itself out, the focus moves elsewhere
        time.sleep(0.5)
        if page.evaluate(f"{element}.contains(document.activeElement)"):
            for kind in ("rawKeyDown", "keyUp"):
                page.ask("Input.dispatchKeyEvent", type=kind, **key)
            time.sleep(1.5)


def frame_in(browser: Browser, page: Page) -> Page:
    """The frame of a page, once the browser has a process for it."""
    end = time.monotonic() + 20
    while not any(each["type"] == "iframe" for each in browser.ask("Target.getTargets")["targetInfos"]):
        assert time.monotonic() < end, "no frame"
        time.sleep(0.05)
    return browser.inside(page)


@pytest.mark.slow
def test_a_jupyterlab_shows_the_page_and_python_has_the_clicked_head(
    running_browser: Browser, tmp_path: Path
) -> None:
    for name in ("jupyterlab", "anywidget", "ipykernel"):
        pytest.importorskip(name)
    nbformat = pytest.importorskip("nbformat")
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, notebooks / "x.ipynb")
    with jupyter_lab(tmp_path, notebooks) as address:
        page = running_browser.open(f"{address}/lab/tree/x.ipynb?token=letmein12")
        try:
            page.ask("Page.bringToFront")
            page.wait("document.querySelector('.jp-Notebook .jp-CodeCell .cm-content')", 60)
            page.wait(
                "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'", 60
            )
            page.wait("document.querySelector('.jp-Notebook').contains(document.activeElement)", 60)
            time.sleep(1)
            run_cell(page, 0)
            page.wait("document.querySelector('iframe[title=headwise]')", 60)
            frame = frame_in(running_browser, page)
            frame.ask("Runtime.enable")
            frame.wait("document.documentElement?.dataset.ready === 'true'", 60)
            frame.evaluate(
                "window.heard = []; document.addEventListener('headwise-served',"
                " ({detail: {source, ...rest}}) => heard.push(rest))"
            )
            frame.evaluate(
                "(() => { const box = document.querySelector('#alive-text'); box.focus(); box.select(); })()"
            )
            frame.ask("Input.insertText", text=TEXT)
            event = frame.wait(f"heard.at(-1)?.text === {TEXT!r} && heard.at(-1)", 60)
            expected = live("mini").answer(notebook_view.request_of(read()["ask"])).header
            assert [row["id"] for row in event["predictions"]] == [
                row["id"] for row in expected["predictions"]
            ]
            frame.evaluate("document.querySelector('[data-head=\"5.3\"]').click()")
            frame.wait("document.querySelector('#one-head').dataset.drawn?.endsWith('.5.3')")
            assert frame.complaints == []
            run_cell(page, 1)
            page.wait("document.body.textContent.includes('(5, 3) 56')", 60)
            check_origin(page)
        finally:
            page.close()
