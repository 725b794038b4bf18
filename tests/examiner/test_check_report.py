"""Reports as text, in the terminal, in a notebook and as JSON: what must be said, and what must not."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from html.parser import HTMLParser
from importlib import import_module
from typing import Any

import pytest
from rich.console import Console

from headwise.errors import ArgumentError
from headwise.examiner.dispatch import judge
from headwise.examiner.evidence import Conventions, Evidence, Finding, Problem, Role
from headwise.examiner.report import Named, Report
from headwise.examiner.report_formats import as_html, as_json, as_text, print_to
from headwise.examiner.report_formats.sentences import fitting, harmless
from headwise.testing import assert_attention

HINTS = (
    "Look at the divisor.",
    "The paper divides by the root of one head's width.",
    "All heads are not one head.",
)
SCALE = Named(
    key="scale by d_model",
    title="scores are divided by sqrt(24), not sqrt(6)",
    formula="softmax(q k^T / sqrt(d_model)) v",
    right="softmax(q k^T / sqrt(d_k)) v",
    hints=HINTS,
    why="Weights that are too flat attend to everything a little.",
    repair="scores = q @ k.mT / self.head_dim ** 0.5",
    detail="your output equals it to 3e-16",
    line=41,
    text="        scores = q @ k.mT  / self.d_model ** 0.5",
)
MERGE = Named(
    key="merge without transpose",
    title="heads are mixed up when they are joined",
    formula="o.reshape(B, T, E)",
    right="o.transpose(1, 2).reshape(B, T, E)",
    hints=("Look at the reshape.", "Which axis comes first?", "Heads must stand beside channels."),
    why="Positions get the numbers of others.",
    repair="o = o.transpose(1, 2)\nreturn self.out(o.reshape(B, T, E))",
)


def right() -> Report:
    return Report(
        name="MyAttention",
        ok=True,
        summary="MyAttention computes what torch's class computes, to 4e-16",
        path="mha.py",
        findings=[
            Finding("input left unmodified", "right", "the same bits before and after"),
            Finding("bfloat16", "unknown", "its own code casts to float32"),
        ],
        equal=["q is scaled before the product"],
        not_judged=["masks: it takes none", "bfloat16: its own code casts to float32"],
        conventions=Conventions(words=["forward(x), batch first", "it returns the output alone"]),
        roles={"q": Role("W_q.weight", "names"), "o": Role("W_o", "gradients", transposed=True)},
        errors={"plain": 2.2e-16, "causal": 4.4e-16},
        protections=[
            "user namespace: no privileges",
            "Landlock 6: reads little",
            "limits: time, memory",
        ],
        seconds=1.34,
    )


def wrong(*faults: Named) -> Report:
    report = right()
    report.ok, report.faults = False, list(faults or [SCALE])
    report.summary = f"{report.faults[0].key}: {report.faults[0].title}"
    report.where_right = ["probe causal: right at position 0 alone of 7"]
    report.first_wrong = "the scaled scores"
    report.errors = {"plain": 0.41, "causal": math.nan}
    return report


def stopped() -> Report:
    meaning = "Line 20, `o.view(B, T, E)`: view needs numbers that lie one after another. Use reshape there."
    probes = ("plain", "self", "causal", "padding")
    return Report(
        name="MyAttention",
        ok=False,
        summary=meaning,
        path="mha.py",
        problems=[
            Problem("call", "RuntimeError", "view size is not compatible", 20, each) for each in probes
        ],
        explained=[meaning] * len(probes),
    )


def in_terminal(
    report: Report, hint: int | None = None, encoding: str = "utf-8", colour: bool = False
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    system = "standard" if colour else None
    print_to(Console(file=file, width=100, force_terminal=colour, color_system=system), report, hint)
    return raw.getvalue().decode(encoding)


class Words(HTMLParser):
    """What a browser would show of a page, and which tags it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words, self.tags, self.open = "", set[str](), list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data


def in_notebook(report: Report, hint: int | None = None) -> str:
    page = Words(as_html(report, hint))
    assert page.open == []
    return page.words


def as_plain(report: Report, hint: int | None = None) -> str:
    return as_text(report, hint, encoding="utf-8")


Rendering = Callable[..., str]
RENDERINGS = pytest.mark.parametrize("show", [as_plain, in_terminal, in_notebook])


def flat(text: str) -> str:
    return " ".join(text.split())


# What is said


@RENDERINGS
def test_a_right_one_is_short_and_happy(show: Rendering) -> None:
    text = flat(show(right()))
    assert text.startswith("✓ MyAttention computes what torch's class computes, to 4e-16. Well done!")
    for words in (
        "with torch.nn.MultiheadAttention on 2 test inputs, largest difference 4e-16",
        "plain, causal",
        "forward(x), batch first",
        "queries W_q.weight",
        "output W_o (stored as [in, out])",
        "identified by names and gradients",
        "the same bits before and after",
        "Differences that are not mistakes",
        "q is scaled before the product",
        "Could not be judged",
        "masks: it takes none",
        "in mha.py in 1.3 s, with restrictions: no privileges, "
        "no access to other files (Landlock 6), limited time and memory.",
    ):
        assert words in text
    assert "✗" not in text
    assert text.count("casts to float32") == 1  # the examination and the judge both say it
    assert len(as_plain(right()).splitlines()) <= 24


def test_what_ran_without_protections_says_so() -> None:
    report = right()
    report.protections = ["none: it ran in this process"]
    assert "in 1.3 s, without protections: it ran in this process." in flat(as_plain(report))
    report.protections, report.seconds = [], 0.0
    assert as_plain(report).endswith("Checked MyAttention in mha.py.")


@RENDERINGS
@pytest.mark.parametrize("hint", [1, 2, 3])
def test_a_right_one_needs_no_hint(show: Rendering, hint: int) -> None:
    assert show(right(), hint) == show(right())


@RENDERINGS
def test_a_wrong_one_begins_with_what_is_wrong(show: Rendering) -> None:
    text = show(wrong())
    first = next(line for line in text.splitlines() if line.strip())
    assert first.strip() == "✗ scale by d_model: scores are divided by sqrt(24), not sqrt(6)"
    assert text.count(SCALE.title) == 1
    for words in (SCALE.formula, SCALE.right, SCALE.why, SCALE.repair, SCALE.detail, "mha.py:41"):
        assert words in flat(text)
    assert re.search(r"→ 41 (│ )?scores = q @ k.mT  / self.d_model \*\* 0.5", text)  # as it was written
    for words in ("right at position 0 alone of 7", "the scaled scores", "plain 0.41", "causal NaN"):
        assert words in flat(text)
    for hint in HINTS:
        assert hint not in text
    assert "Well done" not in text


@RENDERINGS
@pytest.mark.parametrize("hint", [1, 2, 3])
def test_a_hint_gives_no_more_than_it_should(show: Rendering, hint: int) -> None:
    text = flat(show(wrong(), hint))
    assert text.startswith("✗ MyAttention does not yet compute the same as torch.nn.MultiheadAttention")
    for at, words in enumerate(HINTS, 1):
        assert (words in text) == (at <= hint)
    fault = SCALE
    for words in (fault.key, fault.title, fault.formula, fault.right, fault.detail, fault.why, fault.repair):
        assert words not in text
    assert "41" not in text and "d_model **" not in text
    assert ("position 0 alone" in text) == (hint >= 2)
    assert ("the scaled scores" in text) == (hint >= 3)
    assert f"hint {hint + 1}" not in text.lower()


def unjudged(message: str, kind: str = "guess", source: str = "", **facts: Any) -> Report:
    problem = Problem("call", kind, message)
    evidence = Evidence("Mine", "class", path="mha.py", source=source, problems=[problem])
    return judge(replace(evidence, **facts))


@RENDERINGS
def test_what_was_not_judged_is_neither_right_nor_wrong(show: Rendering) -> None:
    source = "class Mine:\n    def __init__(self, taps, mode, *, depth, p=0.1): ...\n"
    report = unjudged(
        "taps must be odd", source=source, built="Mine(taps=24, mode=24)", tried=["taps=24 raised ValueError"]
    )
    assert (report.verdict, report.exit_code, report.ok, report.judged) == ("not judged", 2, False, False)
    report.on_command_line = True
    words = " ".join(show(report).split())
    assert "Mine was not judged" in words and "taps must be odd" in words and "✗ Mine" not in words
    assert "Mine(taps=24, mode=24)" in words and "taps=24 raised ValueError" in words
    assert "headwise check mha.py:Mine --arg taps=VALUE --arg mode=VALUE --arg depth=VALUE" in words
    report.on_command_line = False
    words = " ".join(show(report).split())
    assert "arguments={'taps': ..., 'mode': ..., 'depth': ...}" in words and "--arg" not in words
    assert show(report, 1) == show(report)  # there is nothing to hint at


@pytest.mark.parametrize(
    ("problem", "judged"),
    [
        (Problem("call", "RuntimeError", "sizes", 3), True),  # at a line of theirs
        (Problem("call", "ValueError", "mine", 2), False),  # their own check did not like what we made up
        (Problem("build", "TypeError", "missing 1 required positional argument: 'taps'"), False),
        (Problem("call", "guess", "sizes", 3), False),
        (Problem("import", "ModuleNotFoundError", "No module named 'einops'", 1), False),
        (Problem("call", "AssertionError", "Torch not compiled with CUDA enabled", 3), False),
        (Problem("limits", "timeout", "it ran for more than 60 seconds"), True),
        (Problem("limits", "memory", "it ran out of memory"), False),
        (
            Problem("call", "shape", "it returned [3, 4, 7, 6], the output is [3, 7, width]", no_output=True),
            True,
        ),
        (Problem("call", "shape", "it returned a tensor [3, 5]; the output must be [3, 7, width]"), False),
    ],
    ids=lambda value: value.message[:24] if isinstance(value, Problem) else "",
)
def test_only_what_is_the_learners_own_doing_is_wrong(problem: Problem, judged: bool) -> None:
    source = "import einops\nraise ValueError('mine')\nx = y\n"
    report = judge(Evidence("Mine", "class", source=source, problems=[problem]))
    assert (report.judged, report.exit_code) == (judged, 1 if judged else 2)


@pytest.mark.parametrize(
    ("part", "verdict"), [("W_q.weight", "wrong"), ("query", "wrong"), ("aux", "unknown")]
)
def test_what_a_finding_is_about_is_a_field_and_not_its_sentence(part: str, verdict: str) -> None:
    detail = "no gradient reaches W_q.weight, the query, aux"
    finding = Finding("gradients", "wrong", detail, "gradients blocked", parts=[part])
    roles = {"q": Role("W_q.weight and 3 more", "names", path="W_q.weight")}
    report = judge(Evidence("Mine", "class", source="x = 1\n", roles=roles, findings=[finding]))
    assert report.findings[0].verdict == verdict


def test_what_to_pass_is_said_for_projections_and_packages() -> None:
    report = unjudged("the projections could not be found (a.w, b.w); pass roles=", "roles")
    assert "--role q=NAME --role k=NAME" in report.counsel_for_files[0]
    assert 'roles={"q": NAME' in report.counsel[0] and "roles=" not in report.summary
    report = unjudged("No module named 'einops'", "ModuleNotFoundError")
    assert report.counsel == ["install the missing package beside headwise: pip install einops"]


@RENDERINGS
def test_designs_and_what_cannot_be_told_apart_are_said_in_a_sentence_each(show: Rendering) -> None:
    report = right()
    report.designs = ["grouped heads, 2 of keys for 4 of queries", "a sliding window of 3; within it, right"]
    words = " ".join(show(report).split())
    assert "attention with grouped heads, 2 of keys for 4 of queries; a sliding window of 3." in words
    report = wrong()
    report.alike = ["scaled twice", "no scale and softmax twice"]
    words = " ".join(show(report).split())
    assert "would give the same output: scaled twice, no scale and softmax twice" in words


@RENDERINGS
def test_two_faults_are_both_told(show: Rendering) -> None:
    text = flat(show(wrong(SCALE, MERGE)))
    assert text.startswith("✗ 2 mistakes: scale by d_model, and merge without transpose")
    for fault in (SCALE, MERGE):
        assert text.count(fault.title) == 1 and flat(fault.repair) in text
    hinted = flat(show(wrong(SCALE, MERGE), 1))
    assert "2 mistakes to find" in hinted
    assert SCALE.hints[0] in hinted and MERGE.hints[0] in hinted
    assert SCALE.hints[1] not in hinted and MERGE.hints[1] not in hinted and MERGE.key not in hinted


def test_two_faults_of_one_name_are_told_by_their_titles() -> None:
    twice = [Named("undefined name", f"{name} is never defined", "", "", HINTS, "", "") for name in "FG"]
    assert as_plain(wrong(*twice)).startswith("✗ 2 mistakes: F is never defined, and G is never defined\n")


def test_a_repair_of_several_lines_keeps_its_lines() -> None:
    lines = as_plain(wrong(MERGE)).splitlines()
    at = next(index for index, line in enumerate(lines) if "Repair" in line)
    assert lines[at].split(maxsplit=1)[1] == "o = o.transpose(1, 2)"
    assert lines[at + 1].strip() == "return self.out(o.reshape(B, T, E))"
    assert lines[at].index("o = o") == lines[at + 1].index("return")


@RENDERINGS
def test_an_exception_is_told_once_and_explained(show: Rendering) -> None:
    text = flat(show(stopped()))
    assert text.startswith("✗ Line 20, `o.view(B, T, E)`: view needs numbers that lie one after another")
    assert text.count("RuntimeError at line 20 during the call") == 1
    assert "(test inputs: plain, self, causal and 1 more): view size is not compatible." in text
    assert text.count("Use reshape there.") == 1


@RENDERINGS
def test_hints_for_an_exception_climb_from_where_to_what_it_means(show: Rendering) -> None:
    first, two, three = (flat(show(stopped(), hint)) for hint in (1, 2, 3))
    assert first.startswith("✗ MyAttention raises an exception")
    assert "line 20" in first and "not compatible" not in first and "one after another" not in first
    assert "not compatible" in two and "one after another" not in two
    assert "one after another" in three and "Use reshape" not in three


def test_an_undefined_name_is_told_once() -> None:
    fault = Named("undefined name", "F is never defined", "", "", HINTS, "", "import F", line=3, text="F.x()")
    report = wrong(fault)
    report.problems = [Problem("import", "NameError", "name 'F' is not defined", 3)]
    report.explained = ["line 3 uses F"]
    text = as_plain(report)
    assert "import F" in text and "NameError" not in text and "Exceptions" not in text
    report.errors = {}
    assert "raises an exception" in as_plain(report, 1)


def test_what_is_wrong_beside_the_numbers() -> None:
    report = right()
    report.ok, report.summary = False, ""
    report.findings.append(Finding("state dict complete", "wrong", "W_q is in a plain list", line=7))
    text = as_plain(report)
    assert text.startswith("✗ MyAttention: state dict complete (line 7): W_q is in a plain list\n")
    first, two, three = (as_plain(report, hint) for hint in (1, 2, 3))
    assert "state dict" not in first and "hint 2" in first
    assert "state dict complete" in two and "plain list" not in two
    assert "plain list" in three
    fault = Named("list", "t", "", "", HINTS, "", "", detail="W_q is in a plain list")
    report.findings[-1].fault, report.faults = "list", [fault]
    assert as_plain(report).count("plain list") == 1


def test_what_has_no_name_has_no_hint() -> None:
    report = Report(
        "MyAttention", ok=False, summary="MyAttention computes something else", errors={"plain": math.inf}
    )
    assert as_plain(report).startswith("✗ MyAttention computes something else\n")
    assert "plain infinite" in as_plain(report)
    assert "there are no hints" in flat(as_plain(report, 1))


@RENDERINGS
def test_an_empty_report_can_be_shown(show: Rendering) -> None:
    assert "MyAttention" in show(Report("MyAttention", ok=True, summary=""))
    assert "MyAttention" in show(Report("MyAttention", ok=False, summary=""))
    assert "line 3" in as_plain(wrong(Named("k", "t", "", "", HINTS, "", "", line=3))).replace(
        "mha.py:3", "line 3"
    )


@RENDERINGS
@pytest.mark.parametrize("hint", [0, 4, -1])
def test_there_are_three_hints(show: Rendering, hint: int) -> None:
    with pytest.raises(ArgumentError, match=f"hint must be 1, 2, 3 or None: got {hint}; "):
        show(wrong(), hint)


# What learners write is data

HOSTILE = "[bold]x[/bold] <script>alert(1)</script> :smile: \x1b[31mred\x07 \u202eevil {0} %s $x$ &amp;"


def hostile(ok: bool) -> Report:
    fault = Named(
        *[HOSTILE] * 4, hints=(HOSTILE,) * 3, why=HOSTILE, repair=HOSTILE, detail=HOSTILE, text=HOSTILE
    )
    return Report(
        name=HOSTILE,
        ok=ok,
        summary=HOSTILE,
        path=HOSTILE,
        faults=[] if ok else [fault, fault],
        problems=[Problem("call", HOSTILE, HOSTILE, 3, HOSTILE)],
        explained=[HOSTILE],
        findings=[Finding(HOSTILE, verdict, HOSTILE) for verdict in ("right", "wrong", "unknown")],
        equal=[HOSTILE],
        not_judged=[HOSTILE],
        where_right=[HOSTILE],
        first_wrong=HOSTILE,
        conventions=Conventions(words=[HOSTILE]),
        roles={"q": Role(HOSTILE, HOSTILE)},
        errors={HOSTILE: 0.5},
        protections=[HOSTILE],
    )


@RENDERINGS
@pytest.mark.parametrize("hint", [None, 1, 3])
@pytest.mark.parametrize("ok", [True, False])
def test_hostile_text_is_shown_as_text(show: Rendering, ok: bool, hint: int | None) -> None:
    text = show(hostile(ok), hint)
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    for words in ("[bold]x[/bold]", "<script>alert(1)</script>", ":smile:", "�[31mred", "&amp;"):
        assert words in flat(text)


def test_colours_are_ours_alone() -> None:
    text = in_terminal(hostile(ok=False), colour=True)
    assert "\x1b[1;31m" in text and "\x1b[31mred" not in text and "\x07" not in text


def test_a_page_has_no_script_and_fetches_nothing() -> None:
    page = as_html(hostile(ok=False))
    assert Words(page).tags <= {"div", "style", "p", "span", "pre", "dl", "dt", "dd", "ul", "li"}
    assert "<script" not in page and "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme:dark" in page and 'data-jp-theme-light="false"' in page
    assert "mathjax_ignore" in page  # or $x$ would become a formula


def test_a_megabyte_of_prints_is_cut() -> None:
    report = wrong()
    report.explained = ["x" * 2**20, "line\n" * 10**5]
    report.problems = [Problem("limits", "output", "y" * 2**20)]
    assert len(as_plain(report)) < 10_000
    assert len(as_html(report)) < 20_000


def test_harmless_keeps_lines_and_shape() -> None:
    assert harmless("\n\tif x:\n\t\treturn  1\r\n") == "    if x:\n        return  1"
    assert harmless("\n".join("abc" * 100)).endswith("... and 280 more lines")


# Letters


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
@pytest.mark.parametrize("report", [right(), wrong(SCALE, MERGE), stopped(), hostile(ok=False)])
def test_any_terminal_can_print_it(report: Report, encoding: str) -> None:
    report.name = "Внимание"
    as_text(report, encoding=encoding).encode(encoding)
    in_terminal(report, encoding=encoding)


def test_marks_fall_back_to_ascii() -> None:
    text = as_text(wrong(), encoding="ascii")
    assert text.startswith("x scale by d_model: scores are divided by sqrt(24), not sqrt(6)\n")
    assert "> 41 | scores" in text
    assert as_text(right(), encoding="ascii").startswith("ok MyAttention")
    assert in_terminal(wrong(), encoding="ascii").startswith("x scale by d_model")
    assert fitting("√ × ы", "ascii") == "sqrt x \\u044b"
    assert fitting("✗", "no such encoding") == fitting("✗", None) == "x"


def test_text_is_in_the_letters_of_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    assert as_text(wrong()).startswith("x scale")
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which has none, and takes all
    assert as_text(wrong()).startswith("✗ scale")


def test_lines_fit_and_only_prose_is_wrapped() -> None:
    report = wrong()
    report.faults[0] = Named(
        **{**vars(SCALE), "why": "many words " * 50, "repair": "x = " + "y + " * 50 + "z"}
    )
    long = [line for line in as_plain(report).splitlines() if len(line) > 88]
    assert len(long) == 1 and "y + y" in long[0]


# JSON


def test_json_comes_back_as_it_was() -> None:
    report = wrong(SCALE, MERGE)
    back = json.loads(as_json(report))
    assert back.pop("schema") == 1
    assert (back.pop("verdict"), back.pop("exit_code")) == ("wrong", 1)
    assert list(back) == [each.name for each in fields(Report)]
    assert back["errors"] == {"plain": 0.41, "causal": "NaN"}
    assert back["faults"][0] == {**vars(SCALE), "hints": list(HINTS)}
    assert back["conventions"]["words"] == report.conventions.words
    role = {"parameter": "W_o", "how": "gradients", "transposed": True, "path": "W_o", "start": None}
    assert back["roles"]["o"] == role
    assert (back["ok"], back["name"], back["first_wrong"]) == (False, "MyAttention", "the scaled scores")


def test_json_has_no_numbers_that_json_lacks() -> None:
    report = wrong()
    report.errors = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5}

    def refuse(word: str) -> None:
        raise AssertionError(word)

    back = json.loads(as_json(report), parse_constant=refuse)
    assert back["errors"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5}


def test_json_holds_any_text() -> None:
    report = hostile(ok=False)
    report.name = "\ud800 日本\n"
    text = as_json(report)
    assert text.isascii() and json.loads(text)["name"] == report.name
    assert json.loads(text)["faults"][0]["title"] == HOSTILE
    assert "\n" not in as_json(report, indent=None)


# In tests


def test_assert_attention_passes_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def check(obj: object, **options: object) -> Report:
        calls.append((obj, options))
        return right()

    monkeypatch.setattr(import_module("headwise.examiner"), "check", check)
    assert_attention(dict, num_heads=2)
    assert calls == [(dict, {"roles": None, "d_model": None, "num_heads": 2})]
