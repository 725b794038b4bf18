"""The live page: milliseconds from a keystroke to the redrawn page, and bytes per keystroke.

    python -m benchmarks.served                  mini and MiniLM-L6; results/served_<kind of CPU>.json
    python -m benchmarks.served --device cuda    a model of the size of Llama 1B, without a browser
    python -m benchmarks.served --show           what is stored, as a table

A browser types a letter at the end of a text of 16 and of 64 tokens, and takes the time until the last map of
the visible heads was painted. The server is a process of its own, as with `headwise serve`.
Without a browser, the reading and the maps of 16 heads are computed, and their bytes counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headwise.server.live_model import LiveModel
from headwise.server.model_inputs import load_model
from headwise.server.protocol import Maps, Read

from . import machine, readme, report

TOKEN = "benchmarks"
LENGTHS = {"cpu": (16, 64), "cuda": (512, 32768)}
KEYSTROKES, WARM = 25, 5
VISIBLE = 16  # heads, without a browser
WORDS = "the cat that i saw in the old house by the sea ran to a man with a red hat and then "
PATIENCE = 120.0  # seconds
LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072, "head_dim": 64,
}  # fmt: skip

MEASURE = """
(() => {
  const plain = window.fetch.bind(window);
  window.pending = 0;
  window.bytes = 0;
  window.fetch = async (...request) => {
    window.pending++;
    try {
      const response = await plain(...request);
      window.bytes += Number(response.headers.get("content-length") ?? 0);
      return response;
    } finally {
      window.pending--;
    }
  };
  let drawn = 0; // when the last map was painted
  new MutationObserver(() => { drawn = performance.now(); })
    .observe(document.body, { subtree: true, attributes: true, attributeFilter: ["data-drawn"] });
  window.typed = (text) => new Promise((done) => {
    const box = document.querySelector("#alive-text");
    const began = performance.now();
    const bytes = window.bytes;
    let served = false;
    document.addEventListener("headwise-served", () => { served = true; }, { once: true });
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
    let quiet = 0;
    const look = () => {
      quiet = served && window.pending === 0 && performance.now() - drawn > 40 ? quiet + 1 : 0;
      if (quiet < 5) requestAnimationFrame(look);
      else done([drawn - began, window.bytes - bytes]);
    };
    requestAnimationFrame(look);
  });
})()
"""

Report = dict[str, Any]


def text_of(tokenizer: Any, tokens: int) -> str:
    """Return a text of so many tokens, less one for the letters that are typed."""
    words = (WORDS * (tokens // 8 + 2)).split()
    count = next(
        n for n in range(1, len(words)) if len(tokenizer(" ".join(words[:n]))["input_ids"]) >= tokens
    )
    return " ".join(words[:count])


def in_a_browser(name: str, lengths: Sequence[int]) -> list[Report]:
    """Type into the page of a served model."""
    import subprocess

    browser = _browser()
    tokenizer = load_model(name).tokenizer
    command = [sys.executable, "-m", "headwise", "serve", name, "--no-open", "--token", TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    records = []
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("Open"))
        with browser.Browser() as running:
            page = running.open(address, size=(1440, 900))
            page.wait("document.documentElement.dataset.ready === 'true'", 60)
            page.evaluate(MEASURE)
            for tokens in lengths:
                text = text_of(tokenizer, tokens)
                pairs = []
                for number in range(WARM + KEYSTROKES):
                    pair = page.evaluate(f"typed({text + 'abcdefghij'[number % 10]!r})")
                    pairs += [pair] if number >= WARM else []
                times = [pair[0] for pair in pairs]
                records.append(
                    _record(name, tokens, times, statistics.median(pair[1] for pair in pairs), "browser")
                )
    finally:
        process.terminate()
        process.wait(30)
    return records


def without_a_browser(lengths: Sequence[int], device: str) -> list[Report]:
    """Read texts with a random model of the size of Llama 1B, and compute the maps of 16 heads."""
    import transformers

    class Letters:
        """A tokenizer of numbers: a word of the text is a token id."""

        all_special_ids: tuple[int, ...] = ()
        model_max_length = 131072

        def __call__(self, text: str, return_tensors: str | None = None, **options: Any) -> dict[str, Any]:
            ids = [int(word) for word in text.split()]
            return {"input_ids": ids if return_tensors is None else torch.tensor([ids])}

        def convert_ids_to_tokens(self, token: int) -> str:
            return str(token)

        def decode(self, tokens: list[int], **options: Any) -> str:
            return "".join(f" {token}" for token in tokens)

    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(torch.bfloat16).eval()
    live = LiveModel(model, Letters(), "Llama 1B", example="1 2 3", max_tokens=max(lengths))
    records = []
    for tokens in lengths:
        times, sizes = [], []
        for number in range(WARM + KEYSTROKES):
            text = " ".join(str((7 * at + number) % 9973) for at in range(tokens))
            began = time.perf_counter()
            reply = live.answer(Read("benchmark", number, text=text))
            size = len(reply.to_bytes())
            heads = tuple((0, head) for head in range(VISIBLE))
            size += len(live.answer(Maps(reply.header["reading"], heads)).to_bytes())
            if number >= WARM:
                times.append(1000 * (time.perf_counter() - began))
                sizes.append(size)
        records.append(_record("Llama 1B, random weights", tokens, times, statistics.median(sizes), "python"))
    return records


def _record(name: str, tokens: int, times: list[float], size: float, measurement: str) -> Report:
    quarters = statistics.quantiles(times, n=4)
    return {
        "name": name, "tokens": tokens, "measured": measurement, "keystrokes": len(times),
        "median_ms": statistics.median(times), "low_ms": quarters[0], "high_ms": quarters[2],
        "bytes": int(size),
    }  # fmt: skip


def _browser() -> Any:
    """Return the browser of the tests."""
    spec = importlib.util.spec_from_file_location("browser", machine.ROOT / "tests" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    device: str,
    *,
    lengths: Sequence[int] | None = None,
    out: Path | None = None,
    commit: str | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Measure on one device, and store the results if `out` is given."""
    lengths = LENGTHS[device] if lengths is None else lengths
    stored: Report = {
        "schema": report.SCHEMA,
        "device": device,
        "run": machine.describe(device, commit),
        "records": [],
    }
    if device == "cuda":
        stored["records"] += without_a_browser(lengths, device)
    else:
        for name in ("mini", "minilm"):
            stored["records"] += in_a_browser(name, lengths)
    say(table(stored))
    if out is not None:
        report.write(file_in(out, device), stored)
    return stored


def file_in(folder: Path, device: str) -> Path:
    """Return the file of results of this machine."""
    return folder / "served_cuda.json" if device == "cuda" else report.of_this_cpu("served", folder)


HEAD = (
    "| model | tokens | keystroke to redraw, median (quartiles) | bytes per keystroke |",
    "|---|---|---|---|",
)


def table(stored: Report) -> str:
    """Return the results of one machine as Markdown."""
    legend = readme.legend([{"run": stored["run"]}])
    return "\n".join(["### The live page", "", legend, "", *HEAD, *map(_row, stored["records"])])


def _row(record: Report) -> str:
    times = f"{record['median_ms']:.0f} ms ({record['low_ms']:.0f} to {record['high_ms']:.0f})"
    name = record["name"] + (", without a browser" if record["measured"] == "python" else "")
    return f"| {name} | {record['tokens']:,} | {times} | {record['bytes'] / 1000:.0f} kB |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu, with a browser"
    )
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of results")
    parser.add_argument("--commit", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--show", action="store_true", help="print what is stored")
    options = parser.parse_args(argv)
    if options.show:
        stored = report.load(file_in(options.out, options.device))
        print("No results are stored yet." if stored is None else table(stored))
        return 0
    run(options.device, out=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
