"""A class in one folder: nobody reads another's file, what is shared is shown, all are marked."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_check_sandbox import GOOD, protected

from headwise.errors import ArgumentError
from headwise.examiner.checks import check_file
from headwise.examiner.marking import submission_files as room
from headwise.examiner.marking.feedback import write_feedback
from headwise.examiner.marking.rubric import Rubric
from headwise.examiner.marking.submission_files import check_plain, imports_of, own_files
from headwise.examiner.marking.submissions import as_table, check_files, collected, facts_in_words, in_numbers
from headwise.examiner.marking.template import Template
from headwise.examiner.report import Report
from headwise.examiner.sandbox import run

WRONG = GOOD.replace(" / math.sqrt(q.shape[-1])", " / math.sqrt(query.shape[-1])")
SECRET = "def the_secret_word(: xyzzy\n"


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return [folder / name for name in files]


def reports_on(folder: Path, template: Template, seconds: float = 10.0) -> dict[str, Report]:
    """By the names of the files, as `headwise check FOLDER` has them."""
    reports = check_files(collected([folder]), seconds=seconds, template=template, folders=[folder])
    return {os.path.relpath(report.path or "", folder): report for report in reports}


# Which files a submission may read


def names(files: list[Path], folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in files)


def test_in_a_flat_folder_a_file_reads_itself_and_what_its_text_imports(tmp_path: Path) -> None:
    write(tmp_path, {
        "anna.py": "import parts.masks\nfrom splitting import split\n" + GOOD,
        "parts/__init__.py": "", "parts/masks.py": "from . import fills", "parts/fills.py": "",
        "parts/no.py": "",
        "splitting.py": "import math, torch, merging", "merging.py": "", "unused.py": "", "data.json": "{}",
        "math.py": "raise SystemExit", "torch.py": "raise SystemExit",  # nobody else's import means these
        "ben.py": GOOD,
    })  # fmt: skip
    anna, ben = tmp_path / "anna.py", tmp_path / "ben.py"
    files = own_files(collected([tmp_path]), [tmp_path])
    beside = ["merging.py", "parts/__init__.py", "parts/fills.py", "parts/masks.py", "splitting.py"]
    assert names(files[anna].files, tmp_path) == ["anna.py", *beside]
    assert files[anna].files[0] == anna and files[anna].folder is None
    assert names(files[anna].imported, tmp_path) == beside
    assert files[ben].files == [ben] and files[ben].top == tmp_path


def test_files_named_by_hand_are_as_those_of_a_flat_folder(tmp_path: Path) -> None:
    anna, ben = write(tmp_path, {"anna.py": GOOD, "ben.py": WRONG})
    files = own_files([anna, ben], [])
    assert [files[each].files for each in (anna, ben)] == [[anna], [ben]]


def test_a_folder_of_one_submission_is_its_own(tmp_path: Path) -> None:
    write(tmp_path, {"mha.py": GOOD, "plot.py": "x = 1", "data/sizes.json": "{}", ".hidden/x.py": ""})
    (tmp_path / "mha.py").write_text("import plot\n" + GOOD)
    (tmp_path / "link.json").symlink_to("/etc/hostname")
    files = own_files(collected([tmp_path]), [tmp_path])[tmp_path / "mha.py"]
    assert names(files.files, tmp_path) == ["data/sizes.json", "mha.py", "plot.py"]
    assert files.folder == tmp_path and not files.imported


def test_a_folder_for_each_student_is_theirs_but_for_other_attention_in_it(tmp_path: Path) -> None:
    write(tmp_path, {
        "anna/mha.py": GOOD, "anna/first_try.py": WRONG, "anna/helper.py": "", "anna/data.json": "{}",
        "ben/mha.py": GOOD, "ben/broken.py": "def f(:",
    })  # fmt: skip
    files = own_files(collected([tmp_path]), [tmp_path])
    assert names(files[tmp_path / "anna/mha.py"].files, tmp_path) == [
        "anna/data.json", "anna/helper.py", "anna/mha.py",
    ]  # fmt: skip
    assert names(files[tmp_path / "ben/mha.py"].files, tmp_path) == ["ben/mha.py"]
    (tmp_path / "anna/mha.py").write_text("import helper, first_try\n" + GOOD)
    anna = own_files(collected([tmp_path]), [tmp_path])[tmp_path / "anna/mha.py"]
    assert names(anna.imported, tmp_path) == ["anna/first_try.py"]  # told: it may be a classmate's after all


def test_a_package_of_a_student_does_not_open_the_folder_around_it(tmp_path: Path) -> None:
    """With an __init__.py and a relative import the folder above was read, with all students in it."""
    write(tmp_path, {
        "anna/__init__.py": "", "anna/mha.py": "from .parts import x\n" + GOOD, "anna/parts.py": "x = 1",
        "ben/mha.py": GOOD, "__init__.py": "",
    })  # fmt: skip
    for has_package_above in (True, False):
        if not has_package_above:
            (tmp_path / "__init__.py").unlink()
        files = own_files(collected([tmp_path]), [tmp_path])[tmp_path / "anna/mha.py"]
        assert all("ben" not in str(each.relative_to(tmp_path)) for each in files.files)
        assert {"mha.py", "parts.py", "__init__.py"} == {each.name for each in files.files}
        assert files.top == (tmp_path.parent if has_package_above else tmp_path)


def test_two_who_are_imported_by_a_third_do_not_read_each_other(tmp_path: Path) -> None:
    anna, ben, eve = write(tmp_path, {"anna.py": GOOD, "ben.py": GOOD, "eve.py": "import anna, ben\n" + GOOD})
    files = own_files([anna, ben, eve], [tmp_path])
    assert files[anna].files == [anna] and files[ben].files == [ben]
    assert files[eve].imported == [anna, ben]


def test_imports_are_read_and_no_link_is_followed(tmp_path: Path) -> None:
    anna, *_ = write(tmp_path / "in", {"anna.py": "import far\nfrom ..out import x\nfrom ...out import y\n"})
    (tmp_path / "out.py").touch()
    (tmp_path / "in" / "far.py").symlink_to(tmp_path / "out.py")
    assert imports_of(anna, tmp_path / "in") == set()
    anna.write_text("def f(:")
    assert imports_of(anna, tmp_path / "in") == set()


def test_only_so_much_is_copied_and_what_is_left_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, *_ = write(tmp_path / "in", {"mha.py": GOOD, "a.bin": "x" * 100, "b.bin": "y" * 100, "z/c.bin": ""})
    files = own_files([mha], [tmp_path / "in"])[mha]
    assert files.copied_to(tmp_path / "whole") == []
    assert names(list((tmp_path / "whole").rglob("*.*")), tmp_path / "whole") == [
        "a.bin", "b.bin", "mha.py", "z/c.bin",
    ]  # fmt: skip
    monkeypatch.setattr(room, "COPIED_BYTES", len(GOOD) + 150)
    (sentence,) = files.copied_to(tmp_path / "part")
    assert sentence.startswith("2 of the 4 files in its folder were left out")
    assert names(list((tmp_path / "part").rglob("*.*")), tmp_path / "part") == ["a.bin", "mha.py"]


def test_links_pipes_and_giants_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link.py").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "large.py").write_text("x" * 100)
    monkeypatch.setattr(room, "SUBMISSION_BYTES", 10)
    with pytest.raises(ArgumentError, match=r"file must not be a symbolic link: .*link\.py"):
        check_plain(tmp_path / "link.py")
    with pytest.raises(ArgumentError, match=r"file must be a regular file: .*pipe\.py is a pipe"):
        check_plain(tmp_path / "pipe.py")
    with pytest.raises(ArgumentError, match=r"file must be smaller than 0 MiB: .*large\.py has 100 bytes"):
        check_plain(tmp_path / "large.py")
    check_plain(tmp_path / "absent.py")  # whoever reads it says so


# Attacks on classmates

HEAD = "import glob, importlib, os, runpy, sys\nfrom pathlib import Path\nHERE = os.path.dirname(__file__)\n"
CLASS = "\nclass MultiHeadAttention({base}):\n    def forward(self, query, key, value):\n        {body}\n"
INHERITED = CLASS.format(base="Taken", body="return super().forward(query, key, value)")
ATTACKS: dict[str, str] = {
    "listed": HEAD + """
        for name in sorted(os.listdir(HERE)):
            if name == "anna.py":
                Taken = runpy.run_path(os.path.join(HERE, name))["MultiHeadAttention"]
        """ + INHERITED,
    "globbed": HEAD + """
        (path,) = glob.glob(os.path.join(HERE, "**", "ann*.py"), recursive=True)
        Taken = runpy.run_path(path)["MultiHeadAttention"]
        """ + INHERITED,
    "executed": HEAD + """
        space = {}
        exec((Path(__file__).parent / "anna.py").read_text(), space)
        Taken = space["MultiHeadAttention"]
        """ + INHERITED,
    "executed by its whole path": HEAD + """
        Taken = runpy.run_path("FOLDER/anna.py")["MultiHeadAttention"]
        """ + INHERITED,
    "imported by a name that is put together": HEAD + """
        sys.path.append("FOLDER")
        Taken = importlib.import_module("an" + "na").MultiHeadAttention
        """ + INHERITED,
    "searched for on the whole system": HEAD + """
        for here, _, files in os.walk("/tmp"):
            for name in files:
                if name == "anna.py":
                    Taken = runpy.run_path(os.path.join(here, name))["MultiHeadAttention"]
        """ + INHERITED,
}  # fmt: skip


def attack(name: str, folder: Path) -> str:
    head, _, rest = ATTACKS[name].partition("\n        ")
    body, _, tail = rest.partition("\nclass ")
    return f"{head}{textwrap.dedent('        ' + body)}\nclass {tail}".replace("FOLDER", str(folder))


@pytest.mark.slow
@protected
@pytest.mark.parametrize("without", [(), ("root",), ("namespaces",)], ids=["fence", "no root", "Landlock"])
def test_no_submission_takes_a_classmates(
    without: tuple[str, ...], tmp_path: Path, one_template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one flat folder a file listed the others, ran one that was right, and passed."""
    monkeypatch.setattr(run, "WITHOUT", without)
    files = {f"{name.replace(' ', '_')}.py": attack(name, tmp_path) for name in ATTACKS}
    write(tmp_path, {"anna.py": GOOD})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if not without:  # what each is worth where the folder is one person's
        alone = check_file(tmp_path / "listed.py", "MultiHeadAttention", template=one_template)
        assert alone.verdict == "right"
    reports = reports_on(tmp_path, one_template, seconds=20)
    assert reports["anna.py"].verdict == "right"
    assert [name for name in files if reports[name].ok] == []
    for name in ("executed.py", "executed_by_its_whole_path.py"):
        assert reports[name].verdict == "not judged", reports[name]  # it is no mistake of attention
    assert "it reads another file" in reports["executed.py"].summary


@pytest.mark.slow
@protected
def test_what_a_text_imports_works_and_is_told(tmp_path: Path, one_template: Template) -> None:
    write(tmp_path, {
        "anna.py": "from splitting import split\n" + GOOD, "splitting.py": "def split(x): return x",
        "ben.py": WRONG, "carla/mha.py": "from .sizes import x\n" + GOOD, "carla/__init__.py": "",
        "carla/sizes.py": "import json, pathlib\n"
        "x = json.loads((pathlib.Path(__file__).parent / 'sizes.json').read_text())\n",
        "carla/sizes.json": "{}",
    })  # fmt: skip
    reports = reports_on(tmp_path, one_template)
    assert reports["anna.py"].ok and reports["carla/mha.py"].ok, reports
    assert reports["anna.py"].facts[-1] == "it imports splitting.py from the same folder"
    assert reports["anna.py"].path == str(tmp_path / "anna.py")
    assert (reports["ben.py"].verdict, [fault.key for fault in reports["ben.py"].faults]) == (
        "wrong",
        ["scale by d_model"],
    )
    assert all("apart from names" in fact for fact in reports["carla/mha.py"].facts)


@pytest.mark.slow
@protected
def test_the_first_line_behind_a_link_reaches_no_report(tmp_path: Path, one_template: Template) -> None:
    """A syntax error quotes its line, and the line was another file's."""
    folder = tmp_path / "class"
    write(tmp_path, {"secret.txt": SECRET, "class/anna.py": GOOD, "elsewhere/x.py": SECRET})
    (folder / "link.py").symlink_to(tmp_path / "secret.txt")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "gone.py").symlink_to(tmp_path / "nowhere")
    write(folder, {"imports.py": "import link\n" + WRONG})
    reports = list(reports_on(folder, one_template).values())
    assert len(reports) == 5
    refused = [report for report in reports if "must not be a symbolic link" in report.summary]
    assert [(Path(report.path or "").name, report.verdict) for report in refused] == [
        ("gone.py", "not judged"), ("link.py", "not judged"), ("linked", "not judged"),
    ]  # fmt: skip
    for report in reports:
        assert "xyzzy" not in report.to_json() + str(report)
    for file in write_feedback(tmp_path / "feedback", reports):
        assert "xyzzy" not in file.read_text("utf-8")


# A class

MISTAKES: dict[str, Callable[[int], str]] = {
    "right": lambda number: (
        GOOD + f"\nNUMBER = {number}\n" + "def more(x):\n    return x + 1\n" * (number % 3)
    ),
    "wrong scale": lambda number: WRONG,
    "no scale": lambda number: GOOD.replace(" / math.sqrt(q.shape[-1])", ""),
    "copy": lambda number: GOOD,
    "renamed": lambda number: re.sub(r"\b(q|k|v|p)_proj\b", rf"layer_\g<1>{number}", GOOD),
    "loop": lambda number: f"while True:\n    pass\n{GOOD}",
    "sleep": lambda number: f"import time\ntime.sleep(1000)\n{GOOD}",
    "crash": lambda number: GOOD.replace("(p @ v)", "(p @ v.transpose(-2, -1))"),
    "syntax": lambda number: GOOD.replace("def forward(", "def forward(("),
    "link": lambda number: "",
}


def a_class(folder: Path, count: int) -> None:
    """So many submissions in a flat folder: copies, links, loops, crashes among them."""
    folder.mkdir()
    kinds = list(MISTAKES)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        path = folder / f"{number:03}_{kind.replace(' ', '_')}.py"
        if kind == "link":
            path.symlink_to(folder / "000_right.py")
        else:
            path.write_text(MISTAKES[kind](number))


RUBRIC = Rubric(full=10, floor=1, crash=6, steps={"scale": 3})


def marked(folder: Path, count: int, template: Template | None = None, seconds: float = 2.0) -> str:
    """A class from its files to its marks; how long it took, in words."""
    a_class(folder / "class", count)
    begun = time.monotonic()
    reports = list(check_files(
        collected([folder / "class"]), seconds=seconds, template=template, folders=[folder / "class"]
    ))  # fmt: skip
    marks = [RUBRIC.mark(each) for each in reports]
    write_feedback(folder / "feedback", reports, marks, hint=2)
    kinds = [MISTAKES, *[MISTAKES] * (count // len(MISTAKES))]
    expected = [kind for each in kinds for kind in each][:count]
    points = {"right": 10, "wrong scale": 7, "no scale": 7, "copy": 10, "renamed": 10, "crash": 4}
    for kind, report, mark in zip(expected, reports, marks, strict=True):
        if kind in points:
            assert mark.points == points[kind], (kind, report.summary)
        elif kind == "syntax":
            assert report.verdict == "wrong" and mark.points == 4
        else:
            assert (report.verdict, mark.points) != ("right", 10)
            assert "link" not in kind or "symbolic link" in report.summary
    copies = [report.facts for kind, report in zip(expected, reports, strict=True) if kind == "copy"]
    assert all("identical to" in facts[0] for facts in copies) or len(copies) < 2
    assert len(list((folder / "feedback").iterdir())) == count + 1
    assert as_table(reports, points=marks).row_count == count
    assert f"{count} files: " in in_numbers(reports)[0] and facts_in_words(reports)
    text = (folder / "feedback" / "class.md").read_text("utf-8")
    assert "scale by d\\_model" in text and "apart from names" in text
    return f"{count} submissions in {time.monotonic() - begun:.0f} s"


@pytest.mark.slow
@pytest.mark.timeout(300)
@protected
def test_a_class_is_marked_in_one_run(tmp_path: Path, one_template: Template) -> None:
    pytest.importorskip("rich")
    marked(tmp_path, 20, one_template)
