"""Every door of headwise, opened as a user would: a script for bare environments, which prints JSON.

    python public_doors.py '["attention", "headwise check"]'

Of each door: "works", or what was raised, or the exit code and what was said on the command line. It knows
nothing of what is installed; `test_extras.py` says what is to be expected where.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import headwise as hw

GOOD = """
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, query, key, value):
        return self.inner(query, key, value, need_weights=False)[0]
"""
FILES = {
    "good.py": GOOD,
    "lacking.py": GOOD.replace("import torch\n", "import torch\nimport a_library_nobody_has\n", 1).replace(
        "return self.inner(query,", "return self.inner(a_library_nobody_has.rearrange(query),"
    ),
}


def python_doors() -> dict[str, Callable[[], object]]:
    """Name -> what a user writes."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    mha = hw.MultiHeadAttention(8, 2)
    x = torch.randn(2, 5, 8)
    with hw.watch(mha) as heads:
        mha(x)
    monitor = hw.Monitor(mha)
    with monitor.step():
        mha(x)

    def train() -> torch.Tensor:
        return mha(x)[0].square().mean()

    def ablate() -> None:
        with hw.ablate(mha, [(0, 1)]):
            mha(x)

    def save_and_load() -> None:
        heads.save("heads.safetensors")
        hw.load_heads("heads.safetensors")

    def go_on() -> None:
        model, tokenizer, _ = hw.models.load()
        ids = tokenizer("The cat ran", return_tensors="pt")["input_ids"]
        with hw.watch(model, tokenizer=tokenizer) as actual:
            model(ids)
        assert actual.tokens and "transformers" not in sys.modules
        assert tokenizer.decode(model.generate(ids, 3)[0])

    return {
        "public names": lambda: [dir(getattr(hw, name)) for name in hw.__all__],
        "attention": lambda: hw.attention(q, k, v, causal=True)[1].statistics().entropy,
        "why": lambda: str(hw.why(q, k, v)),
        "module": lambda: mha(x)[1][0, 1].sum(),
        "backward": lambda: train().backward(),
        "adopt": lambda: hw.adopt(torch.nn.TransformerEncoderLayer(8, 2, 16)),
        "watch": lambda: [str(head) for head in heads.all()],
        "diversity": lambda: hw.diversity(heads),
        "ablate": ablate,
        "check": lambda: hw.check(hw.MultiHeadAttention)._repr_html_(),
        "check_file": lambda: str(hw.check_file("good.py")),
        "explain": lambda: hw.explain(mha, x).to_html("explain.html"),
        "explain as text": lambda: str(hw.explain(mha, x)),
        "assert_attention": lambda: hw.testing.assert_attention(hw.MultiHeadAttention),
        "map.plot": lambda: hw.attention(q, k, v)[1].plot(),
        "heads.plot": lambda: heads.plot(),
        "heads.table": lambda: str(heads.table()),
        "heads.save": save_and_load,
        "heads.to_pandas": lambda: heads.to_pandas(),
        "monitor.to_pandas": lambda: monitor.to_pandas(),
        "models.load": lambda: hw.models.load(),
        "models.load minilm": lambda: hw.models.load("minilm"),
        "mini, from text to text": go_on,
        "trainer_callback": lambda: hw.trainer_callback(),
        "load_pruned": lambda: hw.load_pruned(mha, "pruned"),
    }


COMMANDS = (
    "headwise",
    "headwise --version",
    "headwise --help",
    "headwise presets",
    "headwise presets --json",
    "headwise doctor",
    "headwise check good.py",
    "headwise check lacking.py",
    "headwise explain good.py",
    "headwise look",
    "headwise look --model ./pruned",
    "headwise look --model minilm",
)


def open_door(use: Callable[[], object]) -> str:
    """What came of it, in words."""
    try:
        use()
    except ImportError as error:
        ours = isinstance(error, hw.errors.HeadwiseError)
        return f"{type(error).__name__}{'' if ours else ' (not ours)'}: {error}"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
    return "works"


def run_verb(arguments: list[str]) -> str:
    """The exit code and, unless it is 0, what was said."""
    from headwise.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except BaseException as error:
            return f"traceback: {type(error).__name__}: {error}"
    return "works" if code == 0 else f"exit {code}: {err.getvalue()}{out.getvalue()}".strip()


def main() -> None:
    warnings.simplefilter("error")
    for name, text in FILES.items():
        Path(name).write_text(text, "utf-8")
    Path("pruned").mkdir()
    Path("pruned/config.json").write_text("{}", "utf-8")
    doors = python_doors() | {command: command.split()[1:] for command in COMMANDS}
    messages = {}
    for name in json.loads(sys.argv[1]):
        door = doors[name]
        messages[name] = run_verb(door) if isinstance(door, list) else open_door(door)
    json.dump(messages, sys.stdout)


if __name__ == "__main__":
    main()
