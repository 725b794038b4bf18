"""The page of heads: bytes, seconds to write, seconds to the first picture, the longest frame of scrolling.

    python -m benchmarks.pages                   every page; results/pages_<kind of CPU>.json
    python -m benchmarks.pages --show            what is stored, as a table

docs/benchmarks.md shows what is stored: `python -m benchmarks --readme`.

144 heads (12 layers of 12) over 64, 128 and 256 tokens, beside BertViz's model view of the same weights,
where it is installed; and 1,024 heads over 131,072 tokens: 128 x 128 cells of each, 512 x 512 of eight.
Weights are random, as uneven as those of MiniLM-L6, and no cell is like the next: trained heads take a
little less. A browser, where there is one, opens each page from disk with the network off. BertViz's page
fetches its script from elsewhere and shows nothing then: it is weighed alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.heads.record import Record, reduce

from . import machine, readme, report

LENGTHS = (64, 128, 256)
LAYERS, HEADS, WIDTH = 12, 12, 384  # of MiniLM-L12
SPREAD = 2.05  # entropy over 256 tokens: 3.7 nats, as of MiniLM-L6's heads on README
LONG, LONG_LAYERS, LONG_HEADS = 131072, 32, 32
CELLS, FINER, ZOOMED = 128, 512, 8
STATISTICS = ("entropy", "effective_keys", "confidence", "distance", "first", "previous", "itself", "next")
MISSING = "bertviz is not installed: pip install bertviz"
NO_BROWSER = "no browser: install chromium, or name one in HEADWISE_BROWSER"
FRAMES = 120
PATIENCE = 60.0  # seconds for a first picture

SCROLL = """
new Promise((done) => {
  const box = document.scrollingElement;
  const far = box.scrollHeight - box.clientHeight;
  const deltas = [];
  let before = performance.now(), frame = 0;
  const next = (now) => {
    deltas.push(now - before);
    before = now;
    if (frame > FRAMES) return done(deltas.slice(1));
    box.scrollTop = far * frame++ / FRAMES;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})
""".replace("FRAMES", str(FRAMES))
FIRST = "performance.getEntriesByName('first-picture')[0]?.startTime ?? null"

Report = dict[str, Any]


# What is on the pages


class Layers(torch.nn.Module):
    """Layers that read different random vectors, since deep random models make all tokens alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(hw.MultiHeadAttention(WIDTH, HEADS) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> None:
        """[layers, B, T, E]"""
        for layer, own in zip(self.layers, x, strict=True):
            layer(own)


def watched(length: int) -> tuple[hw.Heads, list[Tensor], list[str]]:
    """Return 144 heads over T tokens, their weights [1, H, T, T] per layer, and names of the tokens."""
    torch.manual_seed(0)
    model = Layers().eval()
    x = torch.randn(LAYERS, 1, length, WIDTH) * SPREAD
    with torch.no_grad(), hw.watch(model, keep=True, diversity=True) as heads:
        model(x)
    weights = [layer.map.dense().detach() for layer in heads.values()]
    return heads, weights, [f"word{at * 7 % 97}" for at in range(length)]


class _LongMap:
    """Stands in for the map of a layer over a long text, for the heads that a page zooms into."""

    def __init__(self, length: int, finer: Tensor, queries: Tensor | None = None) -> None:
        self.shape = (1, finer.shape[1], length, length)
        self._finer, self._queries = finer, torch.arange(length) if queries is None else queries
        self.mask = hw.Mask.causal()
        self.real_keys = torch.ones(1, length, dtype=torch.bool)
        self.positions = torch.arange(length)

    def detach(self) -> _LongMap:
        return self

    def select(
        self, *, batch: int = 0, heads: Sequence[int] | None = None, queries: Tensor | None = None
    ) -> _LongMap:
        return self if heads is None else _LongMap(self.shape[2], self._finer[:, list(heads)], queries)

    def pooled(self, cells: tuple[int, int]) -> Tensor:
        return self._finer * (self.shape[2] // cells[0])

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        share = self.shape[2] // self._finer.shape[2]  # tokens in a cell
        values, keys = self._finer[:, :, self._queries // share].topk(count, -1)
        return values, keys * share


def long_heads(
    length: int = LONG, layers: int = LONG_LAYERS, heads: int = LONG_HEADS, cells: int = CELLS
) -> hw.Heads:
    """Return artificial heads over a long text: a cell has the values of a token of a short text."""
    torch.manual_seed(0)
    made = hw.Heads()
    share = length // cells
    for number in range(layers):
        q, k = torch.randn(2, 1, heads, cells, 16) * SPREAD
        _, weights = hw.attention(q, k, k, causal=True)
        short = reduce(weights, names=STATISTICS, pooled=cells, between=("attention",), forward=1)
        large = {name: value * share for name, value in short.large.items()}
        record: Record = replace(short, shape=(1, heads, length, length), large=large)
        record._has_patterns = True
        made.add(f"layers.{number}.attention", record)
    made.tokens = [[f"word{at % 9973}" for at in range(length)]]
    made.title = f"{layers * heads:,} heads over {length:,} tokens"
    return made


def zoomed(heads: hw.Heads, length: int, count: int = ZOOMED, cells: int = FINER) -> list[tuple[Any, int]]:
    """Let a page zoom into the first head of some layers, and return these heads."""
    chosen = []
    for path in heads.paths[:: max(1, len(heads) // count)][:count]:
        q, k = torch.randn(2, 1, 1, cells, 16) * SPREAD
        _, weights = hw.attention(q, k, k, causal=True)
        call = heads[path].calls[0]
        long_map: Any = _LongMap(length, weights.dense().expand(1, call.shape[1], cells, cells))
        call.map = long_map
        chosen.append((path, 0))
    return chosen


# BertViz


@contextmanager
def _notebook() -> Iterator[None]:
    """Provide IPython, which BertViz imports, or a stand-in."""
    if importlib.util.find_spec("IPython") is not None:
        yield
        return

    class Shown:
        def __init__(self, data: str) -> None:
            self.data = data

    outer, inner = ModuleType("IPython"), ModuleType("IPython.display")
    for name in ("HTML", "Javascript", "display"):
        setattr(inner, name, Shown)
    sys.modules |= {"IPython": outer, "IPython.display": inner}
    try:
        yield
    finally:
        del sys.modules["IPython"], sys.modules["IPython.display"]


def bertviz(weights: list[Tensor], tokens: list[str], out: Path) -> Report:
    """Write BertViz's model view of the same weights to a file."""
    if importlib.util.find_spec("bertviz") is None:
        return {"missing": MISSING}
    with _notebook():
        from bertviz import model_view

        started = time.perf_counter()
        view = model_view(attention=weights, tokens=tokens, html_action="return")
        out.write_text(view.data, "utf-8")
        seconds = time.perf_counter() - started
    return {"bytes": out.stat().st_size, "seconds": seconds}


# Measuring


def _browser() -> ModuleType | None:
    """Return the browser of the tests, or None if there is none."""
    spec = importlib.util.spec_from_file_location("browser", machine.ROOT / "tests" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module if module.chromium_path() is not None else None


def opened(path: Path, browser: ModuleType | None) -> Report:
    """Return the seconds to the first picture, and the longest frame while the wall is scrolled."""
    if browser is None:
        return {"missing": "not opened"}
    with browser.Browser() as running:
        page = running.open(path, size=(1440, 900))
        end, first = time.monotonic() + PATIENCE, None
        while first is None and time.monotonic() < end:
            first = page.evaluate(FIRST)
        if first is None:
            return {"missing": f"no first picture within {PATIENCE:g} s: {page.complaints[:1]}"}
        deltas = page.evaluate(SCROLL)
        heap = page.evaluate("performance.memory?.usedJSHeapSize ?? null")
        return {
            "first_picture_s": first / 1000,
            "longest_frame_ms": max(deltas),
            "median_frame_ms": sorted(deltas)[len(deltas) // 2],
            "heap_bytes": heap,
            "complaints": page.complaints,
        }


def measured(
    name: str, write: Callable[[Path], object], folder: Path, browser: ModuleType | None, **facts: Any
) -> Report:
    """One page: written, weighed, opened."""
    path = folder / f"{name}.html"
    started = time.perf_counter()
    write(path)
    seconds = time.perf_counter() - started
    return {
        "name": name, **facts, "bytes": path.stat().st_size, "seconds": seconds,
        "browser": opened(path, browser),
    }  # fmt: skip


def run(
    lengths: Sequence[int] = LENGTHS,
    *,
    long: int | None = LONG,
    out: Path | None = None,
    commit: str | None = None,
    in_browser: bool = True,
    say: Callable[[str], None] = print,
) -> Report:
    """Make and measure the pages; what came of it, stored after each of them if `out` is given."""
    stored: Report = {
        "schema": report.SCHEMA,
        "device": "cpu",
        "run": machine.describe("cpu", commit),
        "records": [],
    }
    browser = _browser() if in_browser else None

    def keep(record: Report) -> None:
        stored["records"].append(record)
        say(_row(record))
        if out is not None:
            report.write(file_in(out), stored)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for length in lengths:
            heads, weights, tokens = watched(length)
            record = measured(
                f"heads{LAYERS * HEADS}_L{length}",
                lambda path, heads=heads, tokens=tokens: heads.to_html(
                    path, query_tokens=tokens, key_tokens=tokens
                ),
                folder, browser, heads=LAYERS * HEADS, tokens=length, cells=length,
            )  # fmt: skip
            record["bertviz"] = bertviz(weights, tokens, folder / "bertviz.html")
            (folder / "bertviz.html").unlink(missing_ok=True)
            keep(record)
        if long is not None:
            heads = long_heads(long)
            finer = zoomed(heads, long)
            keep(
                measured(
                    f"heads{LONG_LAYERS * LONG_HEADS}_L{long}",
                    lambda path: heads.to_html(path, finer=finer),
                    folder, browser, heads=LONG_LAYERS * LONG_HEADS, tokens=long, cells=CELLS,
                )
            )  # fmt: skip
    return stored


# What is stored


def file_in(folder: Path) -> Path:
    """Return the file of results of this kind of CPU."""
    return report.of_this_cpu("pages", folder)


HEAD = (
    "| | bytes | written in | first picture | longest frame | BertViz: bytes | written in |",
    "|---|---|---|---|---|---|---|",
)


def table(stored: Report) -> str:
    """Return the pages of one machine as Markdown."""
    legend = readme.legend([{"run": stored["run"]}])
    return "\n".join(["### The page of heads", "", legend, "", *HEAD, *map(_row, stored["records"])])


def _row(record: Report) -> str:
    own, other = record["browser"], record.get("bertviz", {})
    missing = "–"
    cells = [
        f"{record['heads']:,} heads, {record['tokens']:,} tokens"
        + (f", {record['cells']} × {record['cells']} cells" if record["cells"] != record["tokens"] else ""),
        _size(record["bytes"]),
        f"{record['seconds']:.1f} s",
        f"{own['first_picture_s']:.1f} s" if "first_picture_s" in own else missing,
        f"{own['longest_frame_ms']:.0f} ms" if "longest_frame_ms" in own else missing,
        _size(other["bytes"]) if "bytes" in other else missing,
        f"{other['seconds']:.1f} s" if "seconds" in other else missing,
    ]
    return f"| {' | '.join(cells)} |"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def arguments() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, default=report.RESULTS, help="folder of results")
    parser.add_argument("--longest", metavar="TOKENS", type=int, default=LONG, help=f"longest text ({LONG})")
    parser.add_argument("--commit", metavar="HASH", help="the commit, if there is no git")
    parser.add_argument("--show", action="store_true", help="show stored results")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0: done; 2: wrong arguments; 130: Ctrl-C."""
    parser = arguments()
    options = parser.parse_args(argv)
    if options.show:
        stored = report.load(file_in(options.out))
        if stored is None:
            parser.error(
                f"--show needs results of this kind of CPU: {options.out} has none; run without --show"
            )
        print(table(stored))
        return 0
    lengths = [length for length in LENGTHS if length <= options.longest]
    if not lengths:
        parser.error(f"--longest must be at least {LENGTHS[0]}: got {options.longest}")
    if importlib.util.find_spec("bertviz") is None:
        print(MISSING, file=sys.stderr)
    if _browser() is None:
        print(NO_BROWSER, file=sys.stderr)
    try:
        run(lengths, long=LONG if options.longest >= LONG else None, out=options.out, commit=options.commit)
    except KeyboardInterrupt:
        print("stopped; pages that were done are stored", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
