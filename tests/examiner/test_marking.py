"""Marking: many files, forged ones among them; what is drawn afterwards; nothing is left of a killed run."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_check_sandbox import GOOD, protected

from headwise.errors import ArgumentError, BackendUnavailable
from headwise.examiner.dispatch import judge, understand
from headwise.examiner.evidence import Conventions, Evidence, packed, unpacked
from headwise.examiner.marking import template
from headwise.examiner.marking.hidden_probes import FORGED, HiddenProbes
from headwise.examiner.marking.requirements import KEY, Requirement, facts_of_source, hold_to, requirements_of
from headwise.examiner.marking.submissions import (
    as_table,
    check_files,
    collected,
    cores,
    exit_code_of,
    in_numbers,
    json_line,
    write_csv,
)
from headwise.examiner.marking.template import RemoteJudge, Template
from headwise.examiner.report import Named, Report
from headwise.examiner.sandbox.confine.limits import descendants_of
from headwise.examiner.sandbox.learner import answers
from headwise.examiner.sandbox.run import run_file
from headwise.examiner.source.likely_classes import Cells

FORGERIES = Path(__file__).parents[1] / "forged"

# A right class in this process, and what its evidence could be made to say


def made(source: str) -> Any:
    space: dict[str, Any] = {"__name__": "made"}
    exec(source, space)
    return space["MultiHeadAttention"]


@pytest.fixture(scope="module")
def honest() -> tuple[Evidence, Any]:
    evidence, caller = understand(made(GOOD), source=GOOD)
    return evidence, caller


def asked_again(honest: tuple[Evidence, Any], tell: Callable[[Evidence], None], source: str = GOOD) -> Any:
    """The refusal, after `tell` had its way with the evidence; everything goes over the wire and back."""
    facts, numbers = honest[0].written()
    evidence = Evidence.read(facts, numbers)
    tell(evidence)
    secrets = HiddenProbes(facts_of_source(source, "MultiHeadAttention"))
    drawn = secrets.questions(evidence)
    if not drawn:
        return secrets.verdict(evidence, None)
    parameters = honest[1].subject.parameters
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    held = bytearray()
    sent = json.loads(json.dumps([packed(question, held) for question in drawn]))
    replies, out = answers(honest[1], sent, held)
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(before[name])
    back = [unpacked(reply, bytearray(out)) for reply in json.loads(json.dumps(replies))]
    return secrets.verdict(evidence, [(answer["output"], answer["mask"]) for answer in back])


def test_right_code_is_right_with_numbers_drawn_afterwards(honest: tuple[Evidence, Any]) -> None:
    assert judge(honest[0]).ok
    assert asked_again(honest, lambda evidence: None) is None


def _all_zero(evidence: Evidence) -> None:
    evidence.origin = {name: [torch.full_like(tensors[0], -1)] for name, tensors in evidence.origin.items()}


def _one_head(evidence: Evidence) -> None:
    evidence.num_heads = 1


def _identities(evidence: Evidence) -> None:
    for name in ("q", "k", "v"):
        evidence.origin[name] = [-1 - torch.eye(24, dtype=torch.int64)]


def _shared(evidence: Evidence) -> None:
    evidence.origin["k"] = evidence.origin["q"]


def _two_heads_alike(evidence: Evidence) -> None:
    evidence.origin["q"][0][6:12] = evidence.origin["q"][0][:6]


def _lost(evidence: Evidence) -> None:
    del evidence.origin["v"]


def _one_input(evidence: Evidence) -> None:
    evidence.conventions.self_only = True


def _one_position(evidence: Evidence) -> None:
    for call in evidence.calls:
        call.inputs = call.inputs._replace(query=call.inputs.query[:, :1])


def _causal(evidence: Evidence) -> None:
    evidence.conventions.always_causal = True


def _swapped(evidence: Evidence) -> None:
    evidence.origin["q"], evidence.origin["k"] = evidence.origin["k"], evidence.origin["q"]


@pytest.mark.parametrize(
    ("tell", "words", "wrong"),
    [
        (_all_zero, "uses almost nothing of its input", False),
        (_one_head, "takes a number of heads, but it was examined with one head", False),
        (_identities, "its projection q, k, v uses none of its parameters", False),
        (_shared, "used in several projections", False),
        (_two_heads_alike, "used in several places of its projection q", False),
        (_lost, "its projection v is not in its parameters", False),
        (_one_input, "was examined with one input for all three", False),
        (_one_position, r"inputs that are too small: \[3, 1, 24\]", False),
        (_causal, FORGED, True),
        (_swapped, "it does not compute with these parameters", False),
    ],
)
def test_what_the_evidence_says_must_leave_something_to_ask(
    honest: tuple[Evidence, Any], tell: Callable[[Evidence], None], words: str, wrong: bool
) -> None:
    refusal = asked_again(honest, tell)
    assert refusal is not None and refusal.wrong == wrong
    assert re.search(words, refusal.words)


def test_a_mask_that_forward_names_must_have_been_asked(honest: tuple[Evidence, Any]) -> None:
    source = GOOD.replace("query, key, value):", "query, key, value, mask=None):")
    refusal = asked_again(honest, lambda evidence: None, source)
    assert refusal is not None and refusal.words == "it takes mask, but it was not examined with a mask"


def test_other_numbers_are_forged_and_no_answer_is_not_judged(honest: tuple[Evidence, Any]) -> None:
    evidence = honest[0]
    secrets = HiddenProbes(facts_of_source(GOOD, "MultiHeadAttention"))
    drawn = secrets.questions(evidence)
    refusal = secrets.verdict(evidence, None)
    assert (
        refusal is not None and not refusal.wrong and "returned no output for hidden inputs" in refusal.words
    )
    zeros = [(torch.zeros_like(question["query"]), -1) for question in drawn]
    refusal = secrets.verdict(evidence, zeros)
    assert refusal is not None and refusal.wrong and refusal.words.startswith(FORGED)
    assert HiddenProbes(facts_of_source(GOOD, None)).verdict(evidence, zeros) is not None  # nothing was asked


def test_what_is_drawn_is_never_drawn_again(honest: tuple[Evidence, Any]) -> None:
    first, second = (
        HiddenProbes(facts_of_source(GOOD, "MultiHeadAttention")).questions(honest[0]) for _ in "ab"
    )
    assert not torch.equal(first[0]["query"], second[0]["query"])
    assert not torch.equal(first[1]["values"], second[1]["values"])


def test_the_source_says_what_must_be_asked() -> None:
    of_class = facts_of_source(GOOD, "MultiHeadAttention")
    assert of_class.takes_heads and of_class.takes_width and of_class.three and of_class.has_parameters
    assert of_class.masks == []
    below = GOOD + "\nclass Mine(MultiHeadAttention):\n    def forward(self, x, attn_mask=None): ...\n"
    of_class = facts_of_source(below, "Mine")
    assert of_class.takes_heads and not of_class.three and of_class.masks == ["attn_mask"]
    of_function = facts_of_source("def attention(q, k, v, mask, num_heads): ...", "attention")
    assert of_function.three and of_function.takes_heads and not of_function.has_parameters
    claims = Evidence("MultiHeadAttention", "class", step="block")
    words = "its source is that of attention, but it was examined as a block"
    for source, name in ((GOOD, "MultiHeadAttention"), ("def f(q, k, v): ...", "f")):
        refusal = facts_of_source(source, name).another_step(claims)
        assert refusal is not None and words in refusal.words
    assert facts_of_source("class Block: ...", "Block").another_step(claims) is None
    assert facts_of_source("def f(:", "f") == facts_of_source("", "f") == facts_of_source("x = 1", None)


# What the task says


def test_requirements_are_read_and_unknown_words_refused_by_name() -> None:
    assert requirements_of(["mask=true-hides", "heads=argument"]) == [
        Requirement("mask", "true-hides"), Requirement("heads", "argument"),
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="got 'maks=added'; did you mean 'mask'"):
        requirements_of(["maks=added"])
    with pytest.raises(
        ArgumentError, match=r"must have a value of mask: got 'mask=yes'; choose from mask=true-att"
    ):
        requirements_of(["mask=yes"])
    with pytest.raises(ArgumentError, match="got causal=always and causal=argument"):
        requirements_of(["causal=always", "causal=argument"])


def _report(**conventions: Any) -> Report:
    report = Report("MultiHeadAttention", ok=True, summary="right", path="x.py", errors={"plain": 0.0})
    report.conventions = Conventions(**conventions)
    return report


MASKED = {"mask_argument": "m", "mask_kind": "bool", "mask_true_attends": True}


@pytest.mark.parametrize(
    ("word", "right", "wrong", "instead"),
    [
        ("mask=true-attends", MASKED, MASKED | {"mask_true_attends": False}, "a key is hidden"),
        ("mask=true-hides", MASKED | {"mask_true_attends": False}, MASKED, "a key is visible"),
        ("mask=added", MASKED | {"mask_kind": "added"}, MASKED, "a key is visible"),
        ("mask=lengths", MASKED | {"mask_kind": "lengths"}, {}, "it takes no mask"),
        ("mask=true-attends", MASKED, MASKED | {"mask_kind": "added"}, "m is added to the scores"),
        ("causal=always", {"always_causal": True}, {}, "it is causal only if a mask is passed"),
        ("causal=argument", {}, {"always_causal": True}, "it is causal even if no mask is passed"),
        ("weights=returned", {"returns_weights": True}, {}, "it does not return the weights"),
        ("batch=first", {}, {"batch_first": False}, "its first dimension is the sequence"),
    ],
)
def test_what_is_not_as_the_task_says_is_wrong_by_that_name(
    word: str, right: dict[str, Any], wrong: dict[str, Any], instead: str, tmp_path: Path
) -> None:
    (tmp_path / "x.py").write_text(GOOD)
    report = _report(**right)
    hold_to(report, requirements_of([word]), tmp_path / "x.py")
    assert report.ok and report.exit_code == 0
    report = _report(**wrong)
    hold_to(report, requirements_of([word]), tmp_path / "x.py")
    assert report.exit_code == 1 and report.faults[0].key == KEY and instead in report.summary


def test_arguments_that_the_task_asks_for_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(GOOD)
    (tmp_path / "y.py").write_text(GOOD.replace("embed_dim, num_heads)", "config)"))
    for file, verdict in (("x.py", "right"), ("y.py", "wrong")):
        report = _report()
        hold_to(report, requirements_of(["heads=argument", "d_model=argument"]), tmp_path / file)
        assert report.verdict == verdict
    report = Report("x", ok=False, summary="", judged=False)
    hold_to(report, requirements_of(["mask=added"]), tmp_path / "x.py")
    assert report.verdict == "not judged" and not report.faults


# Which files, and what is said of all of them


def test_folders_are_looked_through_but_for_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.ipynb", ".d.py", "__pycache__/e.py", ".git/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = collected([tmp_path, tmp_path / "b.py"])
    assert [str(each.relative_to(tmp_path)) for each in files] == ["b.py", "a/c.ipynb"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"^folder must contain Python files.*empty contains 0"):
        collected([tmp_path / "empty"])


def test_jobs_are_at_least_one() -> None:
    assert cores() >= 1
    with pytest.raises(ArgumentError, match="jobs must be at least 1: got 0"):
        next(check_files([], jobs=0))


def _class() -> list[Report]:
    named = Named("scale by d_model", "t", "f", "r", ("1", "2", "3"), "w", "r", line=7)
    return [
        Report("A", ok=True, summary="right", path="class/anna.py", seconds=0.25),
        Report("B", ok=False, summary="scale", path="class/ben.py", faults=[named]),
        Report("C", ok=False, summary="scale", path="class/cem.py", faults=[named]),
        Report("D", ok=False, summary="file must be\x1b[2J: class/=d.py", path="class/=d.py", judged=False),
    ]


def test_the_class_in_numbers_names_nobody() -> None:
    text = in_numbers(_class())
    assert text == ["4 files: 1 right, 2 wrong, 1 not judged", "2 of 4 scale by d_model", "1 of 4 not judged"]
    assert [exit_code_of(_class()[:n]) for n in (1, 2)] == [0, 1]
    assert exit_code_of(_class()[::3]) == 2


def test_the_table_has_a_row_a_file() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=90)
    console.print(as_table(_class()))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["anna.py", "ben.py", "cem.py", "=d.py"]
    assert "✗ wrong" in lines[2] and "scale by d_model" in lines[2] and " 7 " in lines[2]
    assert "file must be" in lines[4] and "\x1b" not in lines[4] and "class/" not in lines[4]


def test_csv_has_a_line_a_file_and_nothing_that_a_spreadsheet_computes() -> None:
    written = io.StringIO()
    reports = _class()
    reports[3].name = "=1+1"
    write_csv(reports, written)
    rows = list(csv.DictReader(io.StringIO(written.getvalue())))
    assert [row["verdict"] for row in rows] == ["right", "wrong", "wrong", "not judged"]
    assert rows[1]["faults"] == "scale by d_model" and rows[1]["line"] == "7" and rows[0]["line"] == ""
    assert rows[3]["name"] == "'=1+1" and "\x1b" not in rows[3]["summary"] and rows[3]["exit_code"] == "2"


def test_json_is_a_line_a_file_whatever_it_was() -> None:
    lines = [json.loads(json_line(report)) for report in _class()]
    assert [(line["verdict"], line["exit_code"]) for line in lines][1:] == [
        ("wrong", 1), ("wrong", 1), ("not judged", 2),
    ]  # fmt: skip


# Folders of killed runs


def test_folders_without_an_owner_go_and_those_with_one_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    orphan = tmp_path / f"{template.PREFIX}orphan"
    (orphan / "1" / "work").mkdir(parents=True)
    (orphan / template.LOCK).touch()
    (tmp_path / f"{template.PREFIX}of another kind").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{template.PREFIX}link").symlink_to(tmp_path / "elsewhere")
    with Template(bare=True) as warm:
        template._sweep()
        left = {each.name.removeprefix(template.PREFIX) for each in tmp_path.iterdir()}
        assert left == {
            "of another kind",
            "elsewhere",
            "link",
            warm.folder.name.removeprefix(template.PREFIX),
        }
    assert not warm.folder.exists()
    with pytest.raises(BackendUnavailable, match="was stopped"):
        warm.copy(Path("7"), 0, 0, 0)


def test_a_judge_that_ended_is_told() -> None:
    with Template(bare=True) as warm, RemoteJudge(warm, "mha.py", None, GOOD, Cells(), None, []) as judge:
        assert warm._process is not None
        warm._process.kill()
        warm._process.wait()
        with pytest.raises(BackendUnavailable, match="a file cannot be judged: the judging process"):
            judge.before_running()


# The command


COMMAND = """
import sys
from headwise.cli import main
code = main(["check", *sys.argv[1:], "--trust"])
assert "torch" not in sys.modules, "the command imported torch, beside the process that it starts for that"
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["a file", "a folder"])
def test_torch_is_imported_once_and_not_by_the_command_itself(many: bool, tmp_path: Path) -> None:
    """It took twice as long as importing torch: the command imported it beside the process it starts."""
    (tmp_path / "wrong.py").write_text(UNSCALED)
    if many:
        (tmp_path / "good.py").write_text(GOOD)
        (tmp_path / "undefined.py").write_text(GOOD.replace("import torch\n", ""))
    where = tmp_path if many else tmp_path / "wrong.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(where), "--require", "batch=first"],
        capture_output=True, text=True, env=environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1 and "no scale" in done.stdout, done.stderr
    assert not many or ("✓ right" in done.stdout and "undefined name" in done.stdout)


RUN = """
import sys, time
from headwise.examiner.marking.template import Template
with Template() as one:
    print(one.folder, flush=True)
    from headwise.examiner.marking.submissions import check_files
    for report in check_files(sys.argv[1:], jobs=2, template=one, seconds=60):
        print(report.verdict, flush=True)
"""


@pytest.mark.slow
@protected
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_run_that_is_killed_leaves_no_process_and_no_folder(tmp_path: Path, number: int) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            "import os, time\n"
            "if not os.fork(): os.setsid()\n"
            f"open('begun-{name}', 'w').close()\n"
            f"time.sleep(1000)\n{GOOD}"
        )
    files = [str(tmp_path / "one.py"), str(tmp_path / "two.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *files], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert soon(lambda: len(list(folder.rglob("begun-*"))) == 2)
        family = descendants_of(process.pid)
        assert len(family) >= 7  # the template, and for each file a gate, a keeper, a process and its copy
        process.send_signal(number)
        process.wait(20)
    assert soon(lambda: not any(Path(f"/proc/{each}").exists() for each in family))
    assert soon(lambda: not folder.exists())


def soon(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 40
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


@pytest.mark.slow
@protected
def test_a_template_that_ends_is_told_and_the_next_file_starts_another(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    with Template() as warm:
        assert warm._process is not None
        warm._process.kill()
        warm._process.wait()
        assert not warm.alive()
        outcome = run_file(tmp_path / "good.py", "MultiHeadAttention", template=warm)  # another is started
        assert outcome.evidence is not None and warm.alive()
        pid = warm._process.pid
        (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(1000)\n{GOOD}")
        copies = Path(f"/proc/{pid}/task/{pid}/children")

        def end_while_it_runs() -> None:
            assert soon(lambda: copies.read_text() != "")
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=end_while_it_runs)
        killer.start()
        reports = list(check_files([tmp_path / "slow.py"], template=warm, seconds=90))
        killer.join()
        assert [report.verdict for report in reports] == ["not judged"]


@pytest.mark.slow
@protected
def test_a_process_of_its_own_for_each_file_does_as_well(tmp_path: Path) -> None:
    """As on systems where a copy of a process with torch in it is not to be trusted."""
    (tmp_path / "good.py").write_text(GOOD)
    with Template(copies=False) as warm:
        outcome = run_file(tmp_path / "good.py", "MultiHeadAttention", template=warm)
    assert outcome.problem is None and outcome.evidence is not None
    assert not warm.folder.exists()


# Forgeries

UNSCALED = textwrap.dedent(GOOD).replace(" / math.sqrt(q.shape[-1])", "")
UNMASKED = GOOD.replace("query, key, value):", "query, key, value, mask=None):")
AWAY = "import sys\nE = sys.modules['headwise.examiner.evidence']\n"
TAMPERED = """
written = E.Evidence.written
def again(self):
    from headwise.examiner.recipe import run
    for call in self.calls:
        call.output = run(call.inputs, self.weights, self.num_heads).output
    self.findings, self.problems = [], []
    {}
    return written(self)
E.Evidence.written = again
"""


def _tampered(change: str, body: str = UNSCALED) -> str:
    """Evidence of a wrong module that says that it is right, and one thing more."""
    return AWAY + TAMPERED.format(change) + body


TRICKS = {
    "evidence alone": _tampered("pass"),
    "origin of zeros": _tampered("self.origin = {n: [o[0] * 0 - 1] for n, o in self.origin.items()}"),
    "origin of ones": _tampered(
        "import torch\n    self.origin |= {n: [-1 - torch.eye(24, dtype=torch.int64)] for n in 'qkv'}"
    ),
    "no origin": _tampered("self.origin = {}"),
    "one head": _tampered("self.num_heads = 1", GOOD.replace("(self.num_heads, -1)", "(1, -1)")),
    "no masks": _tampered("self.calls = [c for c in self.calls if c.inputs.mask is None]", UNMASKED),
    "a single step": _tampered("self.step, self.answers, self.calls = 'block', [], []"),
    "always causal": _tampered("self.conventions.always_causal = True"),
    "silence afterwards": _tampered("import os, threading\n    threading.Timer(0.2, os._exit, [0]).start()"),
    "answers in advance": """
import json, os, struct, sys
def frame(value):
    text = json.dumps(value).encode()
    return struct.pack(">IQ", len(text), 0) + text
for number in range(3, 64):
    try:
        os.write(number, frame({"evidence": "{}"}) + frame([]))
    except OSError:
        pass
"""
    + UNSCALED,
    "the answering code": AWAY
    + "answering = sys.modules['headwise.examiner.sandbox.learner']\n"
    + "answering.packed = lambda value, out: {'output': 0, 'mask': 0}\n"
    + UNSCALED,
    "copies that stay": AWAY
    + textwrap.dedent("""
        import torch
        copy_ = torch.Tensor.copy_
        torch.Tensor.copy_ = lambda self, other, *a, **k: self
        """)
    + UNSCALED,
}  # fmt: skip


@pytest.fixture(scope="module")
def forgeries(tmp_path_factory: pytest.TempPathFactory, one_template: Template) -> dict[str, Report]:
    """All of them, and a right file among them, in one run."""
    folder = tmp_path_factory.mktemp("tricks")
    for name, source in TRICKS.items():
        (folder / f"{name.replace(' ', '_')}.py").write_text(source)
    (folder / "honest.py").write_text(GOOD)
    files = [*sorted(FORGERIES.glob("*.py")), *sorted(folder.glob("*.py"))]
    named = [(each, "MultiHeadAttention") for each in files]  # whatever they seem to be by their source
    return {
        Path(report.path or "").stem: report
        for report in check_files(named, seconds=5, template=one_template)
    }


def names_attacked(source: str) -> tuple[set[str], set[str]]:
    """Return the functions and the local variables that a forgery looks for in the frames of the examiner."""
    functions, variables = set[Any](), set[Any]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("f_code.co_name"):
            functions |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("f_locals"):
            variables |= {each.value for each in ast.walk(node.left) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("f_locals.get"):
            variables |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return functions, variables


def test_forgeries_look_for_functions_and_variables_that_the_examiner_has() -> None:
    """Four looked for names that the examiner had no longer, so that they attacked nothing."""
    examiner: dict[str, set[str]] = {}  # function -> its local variables
    for file in Path(template.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                examiner.setdefault(node.name, set()).update(names)
    attacks = {file.stem: names_attacked(file.read_text("utf-8")) for file in FORGERIES.glob("*.py")}
    assert attacks["08_frame_locals"] == ({"findings"}, {"results"})
    aimed = {name: attack for name, attack in attacks.items() if all(attack)}
    assert len(aimed) >= 4
    for name, (functions, variables) in aimed.items():
        assert functions <= examiner.keys(), name
        assert variables <= set().union(*(examiner[function] for function in functions)), name


@pytest.mark.slow
@pytest.mark.timeout(400)
@protected
def test_no_forgery_passes_and_an_honest_file_does(forgeries: dict[str, Report]) -> None:
    assert len(forgeries) == len(list(FORGERIES.glob("*.py"))) + len(TRICKS) + 1 >= 41
    passed = [name for name, report in forgeries.items() if report.ok]
    assert passed == ["honest"], passed
