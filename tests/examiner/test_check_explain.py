"""`explain`: numbers, words, text and the page's data; the page itself is in test_check_explain_page.py."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import warnings
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
import planted
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.examiner import recipe
from headwise.examiner.evidence import Evidence, ProbeCall
from headwise.examiner.explanations import (
    Explanation,
    explain,
    explain_evidence,
    explain_file,
    explanation_builders,
    weights_of,
)
from headwise.examiner.explanations.page import page
from headwise.examiner.explanations.shown_steps import in_words
from headwise.examiner.recipe import ProbeInputs, State, Weights
from headwise.examiner.report import Named, Report
from planted import right

E, H = 12, 3
NASTY = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a&b\u2028\u2029",
    "\x1b[31m",
    '"',
    "ok",
]


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1])


def tensor_of(held: dict[str, Any], name: str) -> Tensor:
    entry = held[name]
    if "same" in entry:
        return tensor_of(held, entry["same"])
    raw = base64.b64decode(entry["base64"])
    code, size = {"f8": ("d", 8), "f4": ("f", 4), "u1": ("B", 1)}[entry["kind"]]
    numbers = struct.unpack(f"<{len(raw) // size}{code}", raw)
    return torch.tensor(numbers, dtype=torch.float64).reshape(entry["shape"])


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.double().nan_to_num(7.0), b.double().nan_to_num(7.0))


def evidence_of(wrong: dict[str, Any], *, mask: Tensor | None = None) -> tuple[Evidence, State]:
    """What an examination of a class with this fault would bring back."""
    torch.manual_seed(3)
    weights = Weights(*torch.randn(4, E, E).double().div(3), *torch.randn(4, E).double().div(3))
    inputs = ProbeInputs(*torch.randn(3, 3, 7, E).double(), mask)
    yours = recipe.run(inputs, weights, H, wrong)
    evidence = Evidence("Mine", "class", num_heads=H, embed_dim=E, weights=weights)
    evidence.calls = [ProbeCall("plain", inputs, yours.output)]
    return evidence, yours


def by_d_model(state: State) -> None:
    state.scaled = state.scores / E**0.5


MODULES = {
    "ours": lambda: hw.MultiHeadAttention(E, H),
    "ours without biases": lambda: hw.MultiHeadAttention(E, H, bias=False),
    "ours, heads of another width": lambda: hw.MultiHeadAttention(E, H, head_dim=5, value_dim=2),
    "ours, shared keys": lambda: hw.MultiHeadAttention(E, 4, num_kv_heads=2),
    "ours, causal, scaled": lambda: hw.MultiHeadAttention(E, H, causal=True, scale=0.3),
    "ours, window": lambda: hw.MultiHeadAttention(E, H, window=2, dtype=torch.float64),
    "torch's": lambda: nn.MultiheadAttention(E, H, batch_first=True),
    "torch's, sequence first": lambda: nn.MultiheadAttention(E, H, bias=False),
    "torch's, in training": lambda: nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True),
    "ours as torch's": lambda: hw.nn.MultiheadAttention(E, H, batch_first=True),
}


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", MODULES)
def test_the_steps_lead_to_the_modules_own_output(name: str, masked: bool, cross: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    dtype = next(module.parameters()).dtype
    x, memory = torch.randn(2, 5, E, dtype=dtype), torch.randn(2, 7, E, dtype=dtype)
    mask = torch.rand(2, 1, 5, 7 if cross else 5) > 0.4
    mask[..., 0] = True
    inputs = (x, memory, memory) if cross else (x, x, x)
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    training = module.training
    explanation = explain(module, *inputs, mask=mask if masked else None)
    assert explanation.first is None, explanation.verdict
    assert [step.status for step in explanation.steps if step.key in ("softmax", "output")] == [
        "same",
        "same",
    ]
    assert module.training is training and all(part.training is training for part in module.modules())
    assert "equal the expected numbers" in explanation.verdict


def test_weights_of_shared_heads_are_repeated_for_each() -> None:
    module = hw.MultiHeadAttention(E, 4, num_kv_heads=2)
    weights, heads = weights_of(module)
    assert heads == 4 and weights.k.shape == (E, E) and weights.k.dtype == torch.float64
    assert torch.equal(weights.k[:3], weights.k[3:6]) and torch.equal(
        weights.k[:3].float(), module.k_proj.weight[:3]
    )
    assert not torch.equal(weights.k[3:6], weights.k[6:9])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            hw.MultiHeadAttention(E, H, kdim=6, vdim=6),
            "vdim must equal the width of the queries: got 6 and 6 for 12",
        ),
        (nn.MultiheadAttention(E, H, kdim=6), "got 6 and 12 for 12"),
        (nn.MultiheadAttention(E, H, add_zero_attn=True), "add_zero_attn=True"),
        (hw.MultiHeadAttention(E, H, softcap=3.0), "must not use softcap"),
        (nn.Linear(E, E), "can judge: Linear: "),
    ],
)
def test_modules_that_cannot_be_explained_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises((ArgumentError, ShapeError), match=re.escape(message)):
        explain(module, torch.randn(1, 4, E))


def test_bad_arguments_are_refused() -> None:
    module, x = hw.MultiHeadAttention(E, H), torch.randn(2, 4, E)
    with pytest.raises(ShapeError, match=r"got \[2, 4, 11\]"):
        explain(module, x[..., :11])
    with pytest.raises(ArgumentError, match="value alone"):
        explain(module, x, value=x)
    with pytest.raises(ArgumentError, match="embed the tokens first"):
        explain(module, torch.zeros(2, 4, E).long())
    with pytest.raises(ShapeError, match="agree in batch"):
        explain(module, x, x[:1], x[:1])
    with pytest.raises(ArgumentError, match="batch must be from 0 to 1: got 2"):
        explain(module, x, batch=2)
    with pytest.raises(ShapeError, match="3 for 4 queries"):
        explain(module, x, tokens=["a", "b", "c"])
    with pytest.raises(ArgumentError, match="two lists of words: got 3 of str, int; "):
        explain(module, x, tokens=["a", 1, 2])
    with pytest.raises(MaskError, match="same for every head: it differs among 3 heads"):
        explain(module, x, mask=torch.rand(2, H, 4, 4) > 0.5)


def test_more_than_a_page_can_hold_is_refused_and_told_what_to_slice() -> None:
    with pytest.raises(
        ArgumentError, match=r"batch 8, 3 heads, 512 queries .* slice them first, query\[:1, :64\]"
    ):
        explain(hw.MultiHeadAttention(E, H), torch.randn(8, 512, E))


def test_a_query_that_sees_nothing_is_what_the_module_makes_of_it() -> None:
    mask = torch.ones(4, 4).tril(-1).bool()  # query 0 sees nothing
    x = torch.randn(1, 4, E)
    ours, torchs = hw.MultiHeadAttention(E, H), nn.MultiheadAttention(E, H, batch_first=True)
    assert explain(ours, x, mask=mask).first is None
    assert not explain(ours, x, mask=mask).fields["p"].isnan().any()
    theirs = explain(torchs, x, mask=mask)
    assert theirs.first is None and bool(theirs.fields["p"][:, :, 0].isnan().all())
    assert "Query 0 is left without a visible key." in theirs.masks[0].words


# A mask in words


def test_masks_are_told_in_words() -> None:
    causal = torch.ones(2, 5, 5).tril().bool()
    words = in_words(causal, 0)
    assert words.later == 0 and words.padding == () and "In all, 10 of 25 pairs are hidden." in words.words
    padded = causal.clone()
    padded[1, :, 3:] = False
    words = in_words(padded, 1)
    assert words.padding == (3, 4) and words.later == 0
    assert "Keys 3 and 4 are hidden from every query, like padding." in words.words
    longer = hw.Mask.causal().full(3, 5)[:, 0]
    assert in_words(longer, 0).later == 2
    only_padding = torch.ones(1, 3, 4, dtype=torch.bool)
    only_padding[..., 1:] = False
    assert in_words(only_padding, 0).later is None
    odd = torch.ones(1, 4, 4, dtype=torch.bool)
    odd[0, 2, 0] = False
    assert in_words(odd, 0).words[0] == "1 pair of query and key is hidden by the mask."
    assert in_words(None, 0).words == ("There is no mask: every query attends to every key.",)


# Expected beside yours


def test_the_first_step_that_parts_is_named() -> None:
    evidence, yours = evidence_of({"scale": by_d_model})
    explanation = explain_evidence(evidence, yours)
    assert explanation.first is not None and explanation.first.key == "scale"
    assert [step.status for step in explanation.steps] == ["same"] * 4 + ["first"] + ["after"] * 6
    assert explanation.first.error == pytest.approx(float((yours.scaled - yours.scores / 2).abs().max()))
    assert explanation.verdict == "Mine differs from the expected numbers at step 4, 'Scale: divide by √4'."
    assert any(note.startswith("Your code computes these steps") for note in explanation.notes)


def test_it_never_says_that_all_is_equal_where_check_says_it_is_wrong() -> None:
    evidence, yours = evidence_of({})
    report = Report("Mine", ok=False, summary="input modified: an input is changed in place")
    explanation = explain_evidence(evidence, yours, report=report)
    assert explanation.first is None and report.summary in explanation.verdict
    assert not explanation.verdict.startswith("Every step")
    report.ok = True
    assert explain_evidence(evidence, yours, report=report).verdict.startswith("Every step of Mine equals")


def test_it_opens_where_something_differs() -> None:
    def second_head_of_last_sample(state: State) -> None:
        state.p = torch.softmax(state.hidden, -1)
        state.p[2, 1] = 0.5

    evidence, yours = evidence_of({"softmax": second_head_of_last_sample})
    explanation = explain_evidence(evidence, yours)
    assert (explanation.first is explanation.steps[6], explanation.batch, explanation.head) == (True, 2, 1)


def test_without_a_diagnosis_only_the_output_is_compared() -> None:
    evidence, _ = evidence_of({"scale": by_d_model})
    explanation = explain_evidence(evidence)
    assert explanation.first is explanation.steps[-1]
    assert explanation.verdict.endswith("your numbers of the steps before are unknown.")
    assert any("your intermediate numbers are unknown" in note for note in explanation.notes)


def test_steps_of_another_shape_or_left_out_are_shown_as_they_are() -> None:
    def across(state: State) -> None:
        state.q, state.k, state.v = (x.unflatten(-1, (H, -1)) for x in state.projected)  # [B, T, H, D]

    def joined(state: State) -> None:
        state.joined = state.heads.flatten(2)

    evidence, yours = evidence_of({"split": across, "merge": joined})
    explanation = explain_evidence(evidence, yours)
    assert explanation.first is explanation.steps[2] and explanation.first.error == float("inf")
    assert "with the wrong shape [3, 7, 3, 4]" in explanation.text()
    assert json.loads(json.dumps(data_of(page(explanation))))["yours"]["q"]["shape"] == [3, 7, 3, 4]
    del yours.scaled
    assert explain_evidence(evidence, yours).steps[4].status == "unseen"


def test_evidence_without_weights_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must have weights and a call with an output"):
        explain_evidence(Evidence("Empty", "class"))


# The page's data


def test_the_numbers_on_the_page_are_the_tensors() -> None:
    module = hw.MultiHeadAttention(E, H)
    x = torch.randn(2, 5, E)
    explanation = explain(module, x, causal=True)
    held = data_of(page(explanation))
    for name, wanted in explanation.fields.items():
        assert same(tensor_of(held["expected"], name), wanted), name
    output, weights = module(x, mask=hw.Mask.causal())
    assert same(tensor_of(held["yours"], "output"), output.detach())
    assert same(tensor_of(held["yours"], "p"), weights.dense().detach())
    assert same(tensor_of(held["expected"], "w_q"), module.q_proj.weight.detach())
    assert same(tensor_of(held["expected"], "mask"), torch.ones(2, 5, 5).tril())
    assert bool((tensor_of(held["expected"], "hidden") == -torch.inf).any())
    assert held["expected"]["w_q"]["kind"] == "f4" and held["expected"]["key"] == {"same": "query"}
    assert held["masks"][0]["later"] == 0 and "True (or 1) means: may attend" in held["polarity"]


def test_the_pages_types_name_what_is_written() -> None:
    source = Path(__file__).resolve().parents[2] / "page" / "src" / "explain" / "explain_data.ts"
    declared = {
        name: set(re.findall(r"^  (\w+): ", body, re.MULTILINE))
        for name, body in re.findall(
            r"export interface (\w+) \{\n(.*?)^\}", source.read_text("utf-8"), re.M | re.S
        )
    }
    evidence, yours = evidence_of({"scale": by_d_model}, mask=torch.ones(3, 7, 7, dtype=torch.bool).tril())
    named = Named("k", "title", "a / b", "a / c", ("", "", ""), "", "", line=4, text="x = 1")
    held = data_of(page(explain_evidence(evidence, yours, faults=[named])))
    flow = held["steps"][3]["flows"][0]
    written = {
        "ExplainData": held, "Step": held["steps"][0], "Flow": flow, "FieldMap": flow["result"],
        "MaskWords": held["masks"][0], "Fault": held["faults"][0],
    }  # fmt: skip
    assert {name: set(fields) for name, fields in written.items()} == declared


def test_faults_are_told_on_the_page() -> None:
    evidence, yours = evidence_of({"scale": by_d_model})
    named = Named("k", "the <title>", "a / b", "a / c", ("", "", ""), "", "", line=4, text="x = '</script>'")
    text = page(explain_evidence(evidence, yours, faults=[named]))
    assert data_of(text)["faults"][0]["text"] == "x = '</script>'"
    assert text.count("</script>") == 2


def test_nothing_a_user_gives_is_markup() -> None:
    explanation = explain(hw.MultiHeadAttention(E, H), torch.randn(1, 6, E), tokens=NASTY)
    explanation.name = "<b>Evil</b>"
    text = page(explanation)
    assert (
        text.count("<script") == text.count("</script>") == 2 and "<img" not in text and "<b>Evil" not in text
    )
    assert "\u2028" not in text and "\u2029" not in text
    assert data_of(text)["labels"]["query"] == NASTY
    framed = explanation._repr_html_()
    assert framed.count("<") == 2 and data_of(unescape(framed))["labels"]["key"] == NASTY
    assert "\x1b" not in explanation.text()


def test_a_page_may_load_nothing() -> None:
    text = page(explain(hw.MultiHeadAttention(E, H), torch.randn(1, 4, E)))
    assert "default-src 'none'" in text and "unsafe" not in text
    assert re.search(r"(src|href|url)\s*[=(]\s*[\"']?\s*(https?:)?//", text) is None


def test_weights_too_many_for_a_page_are_left_out_with_a_note() -> None:
    module = hw.MultiHeadAttention(1280, 2)
    held = data_of(page(explain(module, torch.randn(1, 3, 1280))))
    assert "w_q" not in held["expected"] and any("too large for this page" in note for note in held["notes"])


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    explanation = explain(hw.MultiHeadAttention(E, H), torch.randn(1, 4, E))
    place = explanation.to_html(tmp_path / "page.html")
    assert place.read_text("utf-8") == page(explanation) and list(tmp_path.iterdir()) == [place]
    for wrong, message in (("page.txt", "must end in .html"), ("no/page.html", "existing folder")):
        with pytest.raises(ArgumentError, match=message):
            explanation.to_html(tmp_path / wrong)


# Text


def test_every_step_is_told_as_text() -> None:
    x = torch.randn(2, 4, E)
    explanation = explain(
        hw.MultiHeadAttention(E, H), x, causal=True, tokens="the cat [bold]sat down".split()
    )
    text = explanation.text()
    for number, step in enumerate(explanation.steps):
        assert f"\n{number}. {step.title}\n" in text
    assert "−∞" in text and "Causal: a query attends to" in text and " [bold]s…" in text
    weight = explanation.fields["p"][0, 0, 3, 1]
    assert f"{weight:.2f}" in text[text.index("6. Softmax") : text.index("7. Weigh")]
    assert str(explanation) == text and repr(explanation).startswith("Explanation(B=2, T=4, S=4, H=3: ")
    assert explanation.text(batch=1, head=2) != text
    with pytest.raises(IndexError, match="head must be from 0 to 2: got 3"):
        explanation.text(head=3)


def test_text_marks_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    evidence, yours = evidence_of({"scale": by_d_model})
    explanation = explain_evidence(evidence, yours)
    text = explanation.text()
    scaling = text[text.index("4. Scale") : text.index("5. Mask")]
    assert (
        "YOUR NUMBERS FIRST DIFFER HERE" in scaling
        and "scaled: expected [7, 7]" in scaling
        and "scaled: yours [7, 7]" in scaling
    )
    assert f"{yours.scaled[0, 0, 0, 0]:.2f}*" in scaling
    assert "*" not in text[text.index("3. Score") : text.index("4. Scale")]
    explanation.print()
    assert "YOUR NUMBERS FIRST DIFFER HERE" in capsys.readouterr().out


def test_long_sequences_are_cut_in_text() -> None:
    text = explain(hw.MultiHeadAttention(E, H), torch.randn(1, 20, E)).text()
    assert "… 8 more" in text


def test_an_explanation_can_be_made_of_states_alone() -> None:
    evidence, yours = evidence_of({})
    explanation = Explanation("Mine", yours, yours)
    assert explanation.verdict == "Every step of Mine equals the expected numbers, exactly."
    assert "no numbers of yours" in Explanation("Mine", yours).verdict


# The command

LEARNER = """
import math
from torch import nn


class Mine(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.h, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q, k, v, mask=None):
        q, k, v = (w(x).unflatten(-1, (self.h, self.d_k)).transpose(1, 2)
                   for w, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v)))
        scores = q @ k.transpose(-2, -1) / math.sqrt(SCALE)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def run_command(*arguments: str) -> str:
    import typer
    from typer.testing import CliRunner

    from headwise.cli.check_verb import explain as verb

    app = typer.Typer(add_completion=False)
    app.command()(verb)
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.mark.slow
def test_the_command_explains_a_file(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out.html"
    file.write_text(LEARNER.replace("SCALE", "self.d_model"))
    output = run_command(f"{file}:Mine", "--out", str(out), "--trust")
    assert "Mine differs from the expected numbers at step 4" in output and "Wrote" in output
    held = data_of(out.read_text("utf-8"))
    assert held["first"] == 4 and held["faults"][0]["line"] == 15 and "d_model" in held["faults"][0]["title"]


@pytest.mark.slow
def test_the_command_explains_a_right_file_in_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LEARNER.replace("SCALE", "self.d_k"))
    output = run_command(str(file), "--terminal", "--trust")
    assert "Every step of Mine equals the expected numbers" in output and "6. Softmax" in output


def test_the_command_refuses_what_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LEARNER.replace("SCALE", "self.d_k").replace("import math", ""))
    with pytest.raises(ArgumentError, match="undefined name: math"):
        run_command(str(file), "--out", str(tmp_path / "out.html"))
    with pytest.raises(ArgumentError, match="must end in"):
        run_command(str(file), "--out", "out.pdf")


# Classes of the user's own


def live(style: str, fault: str) -> torch.nn.Module:
    torch.manual_seed(4)
    single = next(p for p in planted.PLANTED if p.style == style and p.fault == fault)
    return single.make(24, 4)


@pytest.mark.parametrize("style", ["separate", "einsum"])
def test_a_module_of_ones_own_is_explained_in_its_own_numbers(style: str) -> None:
    module = live(style, "scale by d_model")
    query, memory = torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    explanation = explain(module, query, memory, memory)
    assert explanation.first is not None
    assert explanation.first.key == "scale"
    (output,) = [flow.result for flow in explanation.steps[-1].flows]
    assert output.field == "output"
    real = module(query, memory, memory)
    assert torch.allclose(explanation.yours["output"].float(), real, atol=1e-5)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    "style",
    [r for r in right.RIGHT if r.style != "lazy layers" and isinstance(r.make, type)],
    ids=lambda r: r.style,
)
def test_right_modules_of_any_style_agree_with_the_expected_numbers(style: right.Right) -> None:
    module = style.build()
    width = next(p.shape[-1] for p in module.parameters() if p.ndim > 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for E in dict.fromkeys((24, width)):
            with contextlib.suppress(ShapeError):
                assert explain(module, torch.randn(2, 5, E)).first is None
                return
    raise AssertionError("no width fits")


def test_a_module_whose_weights_wait_for_a_call_is_refused() -> None:
    style = next(r for r in right.RIGHT if r.style == "lazy layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ArgumentError, match="has lazy parameters"):
            explain(style.build(), torch.randn(1, 3, 24))


def test_a_module_that_is_no_attention_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"attention that headwise\.check can judge"):
        explain(torch.nn.Conv2d(1, 1, 1), torch.randn(1, 3, 24))


# Designs: a step of their own, by function and command alike

DESIGNS = """
import math
import torch
import torch.nn as nn


def future(scores):
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def turned(x):
    D, at = x.shape[-1], torch.arange(x.shape[-2])
    angle = at[:, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Plain(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.norm, self.table = nn.LayerNorm(d_model), nn.Parameter(torch.randn(num_heads, 127))

    def rotate(self, x):
        return x

    def place(self, scores):
        return scores / math.sqrt(self.d)

    def attend(self, x, memory):
        q, k, v = (w(y).unflatten(-1, (self.h, -1)).transpose(1, 2)
                   for w, y in ((self.W_q, x), (self.W_k, memory), (self.W_v, memory)))
        p = self.place(self.rotate(q) @ self.rotate(k).mT).softmax(-1)
        return self.W_o((p @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x, x)


class Rotary(Plain):
    def rotate(self, x):
        return turned(x)


class Alibi(Plain):
    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        slopes = 2.0 ** -(torch.arange(self.h) + 1.0)
        scores = scores / math.sqrt(self.d) + slopes[:, None, None] * (at - at[:, None])
        return scores.masked_fill(future(scores), -torch.inf)


class T5(Plain):
    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        return scores + self.table[:, at - at[:, None] + 63]


class Windowed(Plain):
    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        away = at - at[:, None]
        return (scores / math.sqrt(self.d)).masked_fill((away > 0) | (away < -2), -torch.inf)


class PreNorm(Plain):
    def forward(self, x):
        y = self.norm(x)
        return x + self.attend(y, y)


class PostNorm(Plain):
    def forward(self, x):
        return self.norm(x + self.attend(x, x))


class Cross(Plain):
    def forward(self, x, memory):
        return self.attend(x, memory)


class Grouped(Plain):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_k, self.W_v = (nn.Linear(d_model, d_model // 2) for _ in range(2))

    def forward(self, x):
        B, T, E = x.shape
        q = self.W_q(x).view(B, T, self.h, self.d).transpose(1, 2)
        k, v = (w(x).view(B, T, self.h // 2, self.d).transpose(1, 2).repeat_interleave(2, 1)
                for w in (self.W_k, self.W_v))
        p = (q @ k.mT / math.sqrt(self.d)).softmax(-1)
        return self.W_o((p @ v).transpose(1, 2).reshape(B, T, E))
"""
OWN_STEPS = {  # class -> the steps it has beside the usual ones
    "Plain": [], "Rotary": ["rotate"], "Alibi": ["bias"], "T5": ["bias"], "Windowed": ["window"],
    "PreNorm": ["norm", "residual"], "PostNorm": ["residual", "norm-after"], "Cross": [], "Grouped": [],
}  # fmt: skip
USUAL = "inputs project split score scale mask softmax weigh heads concat output".split()


def module_of(name: str) -> nn.Module:
    """One of `DESIGNS` with numbers that no constructor gives."""
    names: dict[str, Any] = {}
    exec(DESIGNS, names)
    torch.manual_seed(5)
    module = names[name](24, 4).double()
    for parameter in module.norm.parameters():
        nn.init.normal_(parameter)
    return module


def multiplied(explanation: Explanation) -> None:
    """Every step that is attention's own gives its result from the numbers that the page shows for it."""
    x, weights, H = explanation.fields, explanation.expected.weights, explanation.expected.num_heads
    first = {name: x.get(f"{name}@0", x[name]) for name in ("q", "k", "scaled", "joined", "output")}
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        whole = x[name] @ getattr(weights, letter).mT + getattr(weights, f"{letter}_bias")
        split = whole.unflatten(-1, (H, -1)).transpose(1, 2)
        torch.testing.assert_close(first.get(letter, x[letter]), split)
    torch.testing.assert_close(x["scores"], x["q"] @ x["k"].mT)
    torch.testing.assert_close(first["scaled"], x["scores"] * torch.tensor(explanation.scales)[:, None, None])
    if "bias@0" in x:
        torch.testing.assert_close(x["scaled"], x["scaled@0"] + x["bias@0"])
    torch.testing.assert_close(x["p"], x["hidden"].softmax(-1))
    torch.testing.assert_close(x["heads"], x["p"] @ x["v"])
    torch.testing.assert_close(first["joined"], x["heads"].transpose(1, 2).flatten(2))
    torch.testing.assert_close(first["output"], x["joined"] @ weights.o.mT + weights.o_bias)


@pytest.mark.thinned(keep=["Rotary", "PreNorm"])
@pytest.mark.parametrize("name", OWN_STEPS)
def test_a_design_is_a_step_of_its_own_and_the_steps_lead_to_the_output(name: str) -> None:
    module = module_of(name)
    inputs = [torch.randn(2, 23, 24).double()] + [torch.randn(2, 9, 24).double()] * (name == "Cross")
    explanation = explain(module, *inputs)
    keys = [step.key for step in explanation.steps]
    assert [key for key in keys if key not in USUAL] == OWN_STEPS[name]
    assert [key for key in keys if key in USUAL] == USUAL
    torch.testing.assert_close(explanation.fields["output"], module(*inputs))
    assert explanation.first is None and "equals the expected numbers" in explanation.verdict
    multiplied(explanation)
    only_moved = [step for step in explanation.steps if "Nothing is computed" in step.words]
    assert [step.key for step in only_moved] == ["split", "concat"]
    for flow in [flow for step in only_moved for flow in step.flows]:
        moved, was = (explanation.fields[name.field] for name in (flow.result, *flow.operands))
        assert torch.equal(moved.unique(), was.unique()), flow.result.field


@pytest.mark.thinned(0, slow=3)
@pytest.mark.parametrize("name", OWN_STEPS)
def test_the_command_shows_a_design_as_the_function_does(name: str, tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out.html"
    file.write_text(DESIGNS)
    explanation = explain_file(file, name, trust=True)
    assert [step.key for step in explanation.steps if step.key not in USUAL] == OWN_STEPS[name]
    assert explanation.first is None and explanation.checked is None
    multiplied(explanation)
    assert "equals the expected numbers" in run_command(f"{file}:{name}", "--out", str(out), "--trust")
    held = data_of(out.read_text("utf-8"))
    assert [step["key"] for step in held["steps"]] == [step.key for step in explanation.steps]
    for step in held["steps"]:
        assert {flow["result"]["field"] for flow in step["flows"]} - {"weighted"} <= held["expected"].keys()


def test_shared_keys_are_shown_as_wide_as_they_are() -> None:
    module = module_of("Grouped")
    x = torch.randn(2, 5, 24).double()
    for shared in (module, hw.MultiHeadAttention(24, 4, num_kv_heads=2, dtype=torch.float64)):
        explanation = explain(shared, x)
        assert explanation.key_heads == (0, 0, 1, 1) and explanation.fields["projected_k"].shape == (2, 5, 12)
        held = data_of(page(explanation))
        assert held["keyHeads"] == [0, 0, 1, 1] and held["expected"]["w_k"]["shape"] == [12, 24]
        split = next(step for step in explanation.steps if step.key == "split")
        assert "4 heads, which share 2 of keys and values" in split.title
        assert "K [B, S, Hk·D] = [2, 5, 12]" in "".join(split.shapes)
    assert same(tensor_of(held["expected"], "w_k"), shared.k_proj.weight.detach())
    torch.testing.assert_close(explain(module, x).fields["projected_k"], module.W_k(x))
    assert explain(module_of("Plain"), x).key_heads == (0, 1, 2, 3)


def test_a_fault_within_a_design_is_at_its_own_step(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(DESIGNS + FAULTY, names)
    torch.manual_seed(5)
    explanation = explain(names["Faulty"](24, 4), torch.randn(2, 9, 24))
    assert explanation.first is not None
    assert [step.key for step in explanation.steps if step.status == "first"] == ["scale"]
    assert [step.status for step in explanation.steps if step.key == "rotate"] == ["same"]


FAULTY = """

class Faulty(Rotary):
    def place(self, scores):
        return scores / math.sqrt(self.d * self.h)
"""


def test_a_scale_of_its_own_is_the_one_that_is_shown() -> None:
    explanation = explain(module_of("T5"), torch.randn(1, 4, 24).double())
    scale = next(step for step in explanation.steps if step.key == "scale")
    assert scale.title == "Scale: none" and "as in T5" in scale.words and explanation.scales == (1.0,) * 4


def test_inputs_of_two_widths_are_refused_before_anything_runs() -> None:
    with pytest.raises(ShapeError, match="must have one width to be explained: 24, 40"):
        explain(module_of("Cross"), torch.randn(1, 4, 24), torch.randn(1, 5, 40))


def test_a_design_whose_numbers_are_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation_builders, "measure_designs", lambda *_: None)
    with pytest.raises(ArgumentError, match=r"a rotation by position .* of Rotary .* for 6 queries and 6"):
        explain(module_of("Rotary"), torch.randn(1, 6, 24))


def test_a_window_wider_than_every_probe_is_shown() -> None:
    names: dict[str, Any] = {}
    exec(DESIGNS + WIDE, names)
    torch.manual_seed(5)
    module, x = names["Wide"](24, 4).double(), torch.randn(1, 50, 24).double()
    explanation = explain(module, x)
    assert "window" in {step.key for step in explanation.steps} and explanation.first is None
    torch.testing.assert_close(explanation.fields["output"], module(x))


WIDE = """

class Wide(Rotary):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.window = 20

    def place(self, scores):
        at = torch.arange(scores.shape[-1])
        away = at - at[:, None]
        return (scores / math.sqrt(self.d)).masked_fill(away.abs() > self.window, -torch.inf)
"""
