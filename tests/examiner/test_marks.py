"""What a class is told: points by a rubric, a file for each student, how much of two files is the same."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from test_check_sandbox import GOOD

from headwise.errors import ArgumentError
from headwise.examiner.evidence import Problem
from headwise.examiner.marking import similarity
from headwise.examiner.marking.feedback import CLASS, for_class, for_student, markdown, write_feedback
from headwise.examiner.marking.requirements import KEY
from headwise.examiner.marking.rubric import BESIDE, STEPS, Mark, Rubric, read_rubric, step_of
from headwise.examiner.marking.similarity import SimilarFile, alike, in_words, tokens_of
from headwise.examiner.marking.submissions import facts_in_words, json_line, missing_in_words, write_csv
from headwise.examiner.report import Named, Report
from headwise.examiner.report_formats import as_json
from headwise.examiner.steps import FAULTS
from planted.right import RIGHT

# A rubric

RUBRIC = """
full = 12
floor = 1.5
fault = 9
unnamed = 8
crash = 7

[faults]
"scale by d_model" = 2
"not as the task says" = 1

[steps]
scale = 4
hide = 3
beside = 0.5
"""


@pytest.fixture
def rubric(tmp_path: Path) -> Rubric:
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    return read_rubric(tmp_path / "rubric.toml")


def wrong(*keys: str, path: str = "class/ben.py") -> Report:
    named = [
        Named(key, "t", "f", "r", ("one", "two", "three"), "w", "x = 1", line=7, text="y") for key in keys
    ]
    return Report("Mine", ok=False, summary="wrong", path=path, faults=named)


def test_points_are_taken_away_by_fault_then_by_step_then_for_any_other(rubric: Rubric) -> None:
    points = {
        ("scale by d_model",): 10, ("no scale",): 8, (KEY,): 11, ("causal shows the next",): 9,
        ("scale by d_model", "causal shows the next"): 7, ("no scale", "no scale"): 8,
        ("no scale", "causal shows the next", "softmax twice"): 1.5, ("softmax twice",): 3,
        ("dropout in eval",): 11.5,
    }  # fmt: skip
    for keys, expected in points.items():
        assert all(key in FAULTS or key == KEY for key in keys), keys
        assert rubric.mark(wrong(*keys)).points == expected, keys
    assert rubric.mark(wrong("scale by d_model", KEY)).lost == [("scale by d_model", 2), (KEY, 1)]


def test_code_without_a_named_fault_has_points_too(rubric: Rubric) -> None:
    assert rubric.mark(Report("A", ok=True, summary="")) == Mark(12, 12)
    assert rubric.mark(wrong()) == Mark(4, 12, [("its output is wrong", 8)])
    crash = wrong()
    crash.problems = [Problem("call", "RuntimeError", "shapes", 3)]
    assert rubric.mark(crash).points == 5
    unjudged = Report("A", ok=False, summary="", judged=False)
    assert rubric.mark(unjudged) == Mark(None, 12) and str(rubric.mark(unjudged)) == "? of 12"
    assert str(rubric.mark(wrong("scale by d_model"))) == "10 of 12"
    assert Rubric().mark(wrong("no scale")) == Mark(0, 10, [("no scale", 10)])


def test_every_fault_has_a_step_to_give_points_for() -> None:
    assert {step_of(key) for key in FAULTS} <= set(STEPS)
    assert step_of("no scale") == "scale" and step_of(KEY) == step_of("dropout in eval") == BESIDE
    assert step_of("own softmax overflows") == "softmax" and step_of("not split") == "split"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ful = 3", r"^rubric must have known entries only: got ful \(r.toml, line 1\); did you"),
        ("full = 3\nfloor = -1", r"must have points of 0 or more: got floor = -1 \(r.toml, line 2\); write"),
        ("full = true", r"must have points of 0 or more: got full = True"),
        ("full = nan", r"must have points of 0 or more: got full = nan"),
        ("full = 'ten'", r"must have points of 0 or more: got full = 'ten' \(r.toml, line 1\)"),
        ("full = 3\nfloor = 4", r"floor of at most full: got floor = 4, full = 3 \(r.toml, line 2\)"),
        ("\nsteps = 3", r"must have a table steps: got steps = 3 \(r.toml, line 2\); write \[steps\]"),
        ("[faults]\n'no scal' = 3", r"must name a fault: got 'no scal' \(r.toml, line 2\); did you mean "),
        ("[steps]\n\nscael = 3", r"must name a step: got 'scael' \(r.toml, line 3\); did you mean 'scale'"),
        ("[steps]\nscale = []", r"must have points of 0 or more: got scale = \[\] \(r.toml, line 2\)"),
        ("faults.'a b' = 1", r"must name a fault: got 'a b' \(r.toml\)"),
        ("full = ", r"^rubric must be TOML: .*Invalid value.*; write lines as full = 10"),
    ],
)  # fmt: skip
def test_what_is_no_rubric_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ArgumentError, match=words):
        read_rubric(tmp_path / "r.toml")


def test_a_rubric_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"rubric must be a readable file: .*absent\.toml: No such"):
        read_rubric(tmp_path / "absent.toml")
    (tmp_path / "r.toml").write_bytes(b"full = '\xff'")
    with pytest.raises(ArgumentError, match=r"rubric must be in UTF-8: .*r\.toml: invalid start byte"):
        read_rubric(tmp_path / "r.toml")


# Feedback


def test_what_a_student_wrote_is_text_in_markdown() -> None:
    cases = {
        "*a* _b_ `c` [d](e) ![f](g)": r"\*a\* \_b\_ \`c\` \[d\](e) \!\[f\](g)",
        "<script>x</script> &amp;": "&lt;script&gt;x&lt;/script&gt; &amp;amp;",
        "see https://a.b or www.a.b, @me": "see https&#58;//a.b or www&#46;a.b, &#64;me",
        "# head": r"\# head", "- item": r"\- item", "12. item": r"12\. item", "a | b": r"a \| b",
        "one\n\n# two": r"one \# two", "$x$ ~~y~~": r"\$x\$ \~\~y\~\~",
        "\x1b[2J": "\N{REPLACEMENT CHARACTER}\\[2J",
    }  # fmt: skip
    for text, expected in cases.items():
        assert markdown(text) == expected, text


def test_a_student_is_told_the_points_and_the_report_and_nothing_of_others(rubric: Rubric) -> None:
    report = wrong("scale by d_model")
    report.faults[0].text = "x = '```' # </pre>"
    report.facts = ["identical to anna.py"]
    text = for_student(report, "ben.py", rubric.mark(report))
    assert text.startswith("# ben.py: wrong\n\n**Points:** 10 of 12\n- lost 2: scale by d\\_model\n")
    assert (
        "````python\nx = '```' # </pre>\n````" in text and "ben.py:7:" in text and "```\nx = 1\n```" in text
    )
    assert "anna" not in text and "class/" not in text


def test_a_hint_lets_no_more_through_in_a_file_than_on_a_terminal(rubric: Rubric) -> None:
    report = wrong("scale by d_model")
    text = for_student(report, "ben.py", rubric.mark(report), hint=2)
    assert "**Hint 1** one" in text and "**Hint 2** two" in text and "three" not in text
    assert "d\\_model" not in text and "x = 1" not in text and "**Points:** 10 of 12" in text
    report = Report("A", ok=False, summary="no such package", path="a.py", judged=False)
    text = for_student(report, "a.py", rubric.mark(report), hint=1)
    assert "open, of 12. The file could not be judged: a person will mark it." in text


def test_the_class_has_a_table_and_what_files_have_in_common(rubric: Rubric) -> None:
    reports = [wrong("scale by d_model"), Report("A", ok=True, summary="", path="class/a|b.py")]
    reports += [Report("C", ok=False, summary="class/c.py is odd", path="class/c.py", judged=False)]
    reports[1].facts = ["90% of its tokens are in ben.py, apart from names"]
    reports[0].missing_protections = reports[1].missing_protections = ["Landlock: not offered"]
    text = for_class(reports, [rubric.mark(each) for each in reports])
    assert "- 3 files: 1 right, 1 wrong, 1 not judged\n- 1 of 3 scale by d\\_model" in text
    assert "| ben.py | Mine | wrong | 10 of 12 | scale by d\\_model | 7 |" in text
    assert (
        "| a\\|b.py | A | right | 12 of 12 |  |  |" in text
        and "| C | not judged | ? of 12 | c.py is odd |" in text
    )
    assert "Points: 11 of 12 on average; 2 files were judged." in text
    assert "- a\\|b.py: 90% of its tokens" in text and "- Landlock: not offered" in text
    assert missing_in_words(reports) == ["Landlock: not offered"]
    assert facts_in_words(reports) == ["a|b.py: 90% of its tokens are in ben.py, apart from names"]
    assert "points" not in for_class(reports).lower()


def test_each_file_is_written_whole_and_at_its_place(tmp_path: Path) -> None:
    long = "x" * 240 + ".py"
    paths = ["class/anna/mha.py", "class/ben/mha.py", f"class/{long}", f"class/{long}2"]
    reports = [wrong(path=path) for path in paths]
    top = tmp_path / "new" / "feedback"
    written = write_feedback(top, reports)
    assert [str(each.relative_to(top)) for each in written] == [
        "anna/mha.py.md", "ben/mha.py.md", f"{long[:200]}.md", f"{long[:200]}-2.md", CLASS,
    ]  # fmt: skip
    assert sorted(written) == sorted(each for each in top.rglob("*") if each.is_file())
    before = {each: each.read_text("utf-8") for each in written}
    assert write_feedback(top, reports) == written and all(
        each.read_text("utf-8") == before[each] for each in written
    )
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"feedback must be a writable folder: .*file"):
        write_feedback(tmp_path / "file", reports)


# Tables and JSON


def test_csv_and_json_hold_points_and_facts(rubric: Rubric) -> None:
    reports = [wrong("scale by d_model"), Report("C", ok=False, summary="", path="c.py", judged=False)]
    reports[0].facts = ["identical to anna.py"]
    marks = [rubric.mark(each) for each in reports]
    written = io.StringIO()
    write_csv(reports, written, marks)
    rows = list(csv.DictReader(io.StringIO(written.getvalue())))
    assert [(row["points"], row["full"], row["facts"]) for row in rows] == [
        ("10", "12", "identical to anna.py"), ("", "12", ""),
    ]  # fmt: skip
    facts = [json.loads(json_line(report, mark=mark)) for report, mark in zip(reports, marks, strict=True)]
    assert [(each["points"], each["full"]) for each in facts] == [(10, 12), (None, 12)]
    assert facts[0]["lost"] == [["scale by d_model", 2]] and facts[0]["facts"] == ["identical to anna.py"]


def test_json_with_a_hint_holds_what_the_hint_lets_through(rubric: Rubric) -> None:
    report = wrong("scale by d_model")
    line = json_line(report, 2, rubric.mark(report))
    facts = json.loads(line)
    assert facts["hints"] == [["one", "two"]] and facts["hint"] == 2 and facts["points"] == 10
    assert (facts["verdict"], facts["exit_code"], facts["schema"]) == ("wrong", 1, 1)
    assert "Hint 2  two" in facts["text"]
    assert not re.search("three|d_model|x = 1", line)
    right = json.loads(as_json(Report("A", ok=True, summary="it is right"), hint=1))
    assert right["summary"] == "it is right" and right["faults"] == []


# What files have in common


def test_names_comments_and_layout_are_left_aside() -> None:
    other = re.sub(r"\bq_proj\b", "first", GOOD).replace("self.num_heads", "self.h")
    other = other.replace("self.h = num_heads", "self.h = num_heads  # how many")
    other = other.replace("super().__init__()\n", 'super().__init__()\n\n        """Text."""\n')
    assert tokens_of(other) == tokens_of(GOOD) and "softmax" in tokens_of(GOOD)
    assert "q_proj" not in tokens_of(GOOD) and "first" not in tokens_of(other)
    assert tokens_of("def f(:\n  x = 'a") == ["def", "x", "(", ":", "x", "=", "'", "x"]


def test_copies_and_renamed_files_are_found_and_told_as_numbers() -> None:
    renamed = GOOD.replace("q_proj", "first").replace("num_heads", "h")
    longer = renamed + "\n\ndef more(x):\n    return [y * y for y in x if y > 0 and y not in (1, 2, 3)]\n"
    sources = [GOOD, GOOD, renamed, longer, "x = 1", "x = 1"]
    groups = alike(sources)
    assert [(each.other, each.share, each.same_text) for each in groups[0]][:2] == [
        (1, 1.0, True),
        (2, 1.0, False),
    ]
    assert groups[3][0].share < 1.0 and groups[4] == groups[5] == []  # too short to say anything
    names = [f"{number}.py" for number in range(6)]
    assert in_words(groups[0], names)[:2] == [
        "identical to 1.py", "100% of its tokens are in 2.py, apart from names",
    ]  # fmt: skip
    many = [SimilarFile(number, 0.999, False) for number in range(5)]
    assert in_words(many, names)[0].startswith("99% of its tokens")
    assert in_words(many, names)[-1] == "similar to 2 more files"


def test_the_share_counts_tokens_that_lie_in_no_equal_run() -> None:
    first = GOOD.splitlines()
    middle = len(first) // 2
    for places in ((), (0,), (middle,), (len(first),), (0, middle)):
        lines = list(first)
        for at in reversed(places):
            lines.insert(at, "del nothing[0]" if at == 0 else "    " * 2 + "pass")
        mine, theirs = tokens_of("\n".join(lines)), tokens_of("\n".join(first))
        runs = {tuple(theirs[at : at + similarity.RUN]) for at in range(len(theirs) - similarity.RUN + 1)}
        covered = set()
        for at in range(len(mine) - similarity.RUN + 1):
            if tuple(mine[at : at + similarity.RUN]) in runs:
                covered |= {*range(at, at + similarity.RUN)}
        (group,) = alike(["\n".join(lines), "\n".join(first)])[0]
        assert group.share == pytest.approx(len(covered) / len(mine)), places
        assert (group.share == 1) == (not places)


def test_solutions_written_apart_are_not_alike() -> None:
    """Modules in the styles that learners use, none of them written from another."""
    text = Path(__file__).parents[1].joinpath("planted", "right.py").read_text("utf-8")
    classes = re.findall(r"(?m)^class \w+\(nn\.Module\):\n(?:(?:    .*)?\n)+", text)
    sources = [each for each in classes if len(tokens_of(each)) >= similarity.FEWEST]
    assert len(sources) >= 8 and len(RIGHT) >= 8
    close = [(len(each), number) for number, each in enumerate(alike(sources)) if each]
    assert len(close) <= len(sources) // 5, close
