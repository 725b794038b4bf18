"""The course: every lesson runs, every solution is right, every repair has its fault."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

import headwise as hw
from headwise.course.exercises import PLANTS, Plant, exercise_of, file_text, repair_of
from headwise.course.lesson import HINTS, Lesson, deck, hint_title, lesson, lessons, read_lesson
from headwise.course.rendering import FIRST_CELL, Shown, notebook, page_note, plain_formulas, run_lesson
from headwise.course.study import (
    FILE,
    FOLDER,
    Study,
    course_folder,
    default_folder,
    read_progress,
    static_problem,
)
from headwise.errors import INSTALLATION, ArgumentError
from headwise.examiner.marking.template import Template
from headwise.examiner.source.unwritten import unwritten
from headwise.examiner.steps import FAULTS

pytest.importorskip("matplotlib")
every_lesson = pytest.mark.parametrize("chosen", lessons(), ids=lambda chosen: chosen.name)
WITH_EXERCISE = [entry for entry in lessons() if entry.has_exercise]
every_exercise = pytest.mark.parametrize("chosen", WITH_EXERCISE, ids=lambda chosen: chosen.name)
KEYS = set(FAULTS)


@every_lesson
def test_a_lesson_has_one_idea_and_two_questions(chosen: Lesson) -> None:
    kinds = [cell.kind for cell in chosen.cells]
    assert kinds.count("exercise") == kinds.count("solution") == chosen.has_exercise
    assert kinds.count("question") == 2
    assert 5 <= chosen.minutes <= 10 and chosen.idea[0].islower() and not chosen.idea.endswith(".")
    assert set(chosen.repairs) <= KEYS
    assert kinds[0] == "markdown"
    assert all(cell.about.endswith("?") for cell in chosen.cells if cell.kind == "question")


@every_exercise
def test_an_exercise_has_a_part_to_write_and_a_solution(chosen: Lesson) -> None:
    exercise = exercise_of(chosen)
    names = {node.name for node in ast.walk(ast.parse(exercise.solution)) if hasattr(node, "name")}
    assert exercise.name in names
    assert unwritten(exercise.start) and not unwritten(exercise.solution)


@every_exercise
def test_an_exercise_has_three_hints_which_do_not_contain_its_solution(chosen: Lesson) -> None:
    kinds = [cell.kind for cell in chosen.cells if cell.kind != "slide"]
    at = kinds.index("exercise") + 1
    assert kinds[at : at + 4] == ["hint", "hint", "hint", "solution"] and kinds.count("hint") == 3
    assert [cell.about for cell in chosen.cells if cell.kind == "hint"] == [*HINTS]
    exercise = exercise_of(chosen)
    assert exercise.hints == chosen.hints and all(exercise.hints)
    assert "$" in exercise.hints[1] and "$" not in exercise.hints[2]  # the formula; names and shapes
    start = {line.strip() for line in exercise.start.splitlines()}
    for line in map(str.strip, exercise.solution.splitlines()):
        code = line.partition("  #")[0]
        if line not in start and len(code) > 25:
            assert not any(code in hint for hint in exercise.hints), (chosen.name, code)


def test_lessons_are_counted_without_a_gap_and_no_two_exercises_are_the_same() -> None:
    numbers = [entry.number for entry in lessons()]
    assert numbers == list(range(18)) and all(lesson(number).number == number for number in numbers)
    assert [entry.number for entry in WITH_EXERCISE] == list(range(1, 18))
    assert len({exercise_of(entry).solution for entry in WITH_EXERCISE}) == 17


def test_code_of_an_answer_is_shown_with_the_answer() -> None:
    """It was between the exercise and the question, and gave the answer away."""
    chosen = lesson(4)
    codes = [chosen.code_of(index) for index, cell in enumerate(chosen.cells) if cell.kind == "question"]
    assert chosen.codes_of_questions == set(codes) and None not in codes
    questions = deck(lesson=4)
    assert sum(bool(question.code) for question in questions) == 2
    for entry in lessons():
        sources = ["".join(cell["source"]) for cell in json.loads(notebook(entry))["cells"]]
        for question in deck(lesson=entry.number):
            if question.code:
                place = next(i for i, source in enumerate(sources) if question.text in source)
                assert sources[place + 1] == f"# @title Code of the answer\n{question.code}"
    assert not lesson(0).codes_of_questions  # it has no exercise
    for entry in (lesson(5), lesson(13)):  # code below Markdown belongs to that text
        assert [entry.cells[index - 1].kind for index in entry.codes_of_questions] != ["markdown"]


def test_a_page_of_a_lesson_folds_the_code_of_an_answer() -> None:
    pytest.importorskip("mkdocs")
    pages = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "course_pages.py"))
    chosen = lesson(4)
    shown = {index: Shown(f"output {index}\n") for index in range(len(chosen.cells))}
    page = pages["as_page"](chosen, shown)
    for code in chosen.codes_of_questions:
        assert f"\n    output {code}\n" in page and f"\noutput {code}\n" not in page


@every_exercise
def test_a_file_of_an_exercise_ends_with_code_that_tries_it(
    chosen: Lesson, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hints said "print", but `check` shows no prints, and the file had no inputs."""
    exercise = exercise_of(chosen)
    text = file_text(exercise, chosen.title, "headwise learn check")
    assert text.endswith(f"\n\n{exercise.trial}") and exercise.trial.startswith(
        'if __name__ == "__main__":\n'
    )
    assert [part.name for part in unwritten(text)] == [part.name for part in unwritten(exercise.start)]
    exec(compile(text, "exercise", "exec"), {"__name__": "exercise"})
    assert capsys.readouterr().out == ""
    exec(compile(f"{exercise.solution}\n{exercise.trial}", "exercise", "exec"), {"__name__": "__main__"})
    for line in capsys.readouterr().out.splitlines():
        shape = re.fullmatch(r"[\w ]+: (\(.*\).*) expected: (\(.*)", line)
        assert shape is None or shape[1] == shape[2]


def test_a_lesson_that_is_run_says_what_its_cells_print_and_draw() -> None:
    """All of them run in their notebooks below, and for the site."""
    first, second, third, *_ = run_lesson(lesson(3)).values()
    assert "rows sum to" in first.printed and "music lover: hour" in second.printed
    assert third.pictures[0].startswith(b"\x89PNG")


@pytest.mark.slow
@every_exercise
def test_its_start_is_not_judged_and_its_solution_is_right(
    chosen: Lesson, tmp_path: Path, one_template: Template
) -> None:
    exercise = exercise_of(chosen)
    file = tmp_path / chosen.file_name
    file.write_text(file_text(exercise, chosen.title, "headwise learn check"), "utf-8")
    begun = hw.check_file(file, exercise.name, template=one_template)
    assert begun.verdict == "not judged" and "still to be written" in begun.summary
    file.write_text(f"{exercise.solution}\n\n{exercise.trial}", "utf-8")
    solved = hw.check_file(file, exercise.name, template=one_template)
    assert solved.ok, str(solved)


@pytest.mark.thinned(0, slow=4)
@pytest.mark.parametrize("fault", PLANTS)
def test_a_repair_has_the_fault_it_says(fault: str, tmp_path: Path, one_template: Template) -> None:
    exercise = repair_of(fault)
    file = tmp_path / "repair.py"
    file.write_text(exercise.start, "utf-8")
    assert [each.key for each in hw.check_file(file, exercise.name, template=one_template).faults] == [fault]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", {plant.code: plant for plant in PLANTS.values()}.values(), ids=lambda plant: plant.name
)
def test_what_faults_are_planted_in_is_right(code: Plant, tmp_path: Path, one_template: Template) -> None:
    file = tmp_path / "right.py"
    file.write_text(code.code, "utf-8")
    assert hw.check_file(file, code.name, template=one_template).ok


def test_plants_are_faults_of_the_library_and_change_something() -> None:
    assert set(PLANTS) <= KEYS and len(PLANTS) >= 50
    for fault in PLANTS:
        exercise = repair_of(fault)
        assert exercise.start != exercise.solution
    with pytest.raises(ArgumentError, match="fault must be one of the repairs: got 'no such'"):
        repair_of("no such")


# Notebooks


@every_lesson
def test_a_notebook_holds_the_lesson_and_its_check(chosen: Lesson) -> None:
    content = json.loads(notebook(chosen))
    assert content["nbformat"] == 4 and len({cell["id"] for cell in content["cells"]}) == len(
        content["cells"]
    )
    sources = ["".join(cell["source"]) for cell in content["cells"]]
    assert sources[1] == FIRST_CELL
    if chosen.has_exercise:
        assert f"import headwise as hw\n\nhw.check({exercise_of(chosen).name})" in sources
    for name, hint in zip(HINTS, chosen.hints, strict=False):
        assert f"<details><summary>{hint_title(name)}</summary>\n\n{hint}\n\n</details>" in sources


def test_the_first_cell_says_how_to_install_headwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran `pip install "headwise[cli,viz]"`, which fails until headwise is published."""
    code, _, magic = FIRST_CELL.rpartition("\n")
    assert magic == "%matplotlib inline" and "%pip" not in code
    exec(code, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(code, {})
    assert str(caught.value).strip() == INSTALLATION


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_notebooks_run(tmp_path: Path) -> None:
    """One after another in one kernel, which forgets all names in between."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    books = [nbformat.reads(notebook(entry), as_version=4) for entry in lessons()]
    whole = nbformat.v4.new_notebook()
    for book in books:
        nbformat.validate(book)
        whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *book.cells]
    nbclient.NotebookClient(
        whole, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    for entry, book in zip(lessons(), books, strict=True):
        outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
        assert any("image/png" in output.get("data", {}) for output in outputs), book.cells[0].source
        begun = any("still to be written" in str(output.get("data", {})) for output in outputs)
        assert begun == entry.has_exercise


# What is read


HEAD = '"""A title.\n\nidea: one\nminutes: 5\nlevel: junior\n"""\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD.replace("minutes: 5\n", ""), "lesson 01_a.py must have a line 'minutes'"),
        (HEAD.replace("junior", "expert"), "got 'expert'"),
        (HEAD + "# %% [html]\n", "got '# %% \\[html\\]'"),
        (HEAD + "# %% [markdown]\nbare\n", "got 'bare'"),
        (HEAD + "# %% hint: idea\nbare\n", "got 'bare'"),
        (
            HEAD + "# %% hint: idea\n# a\n# %% hint: trick\n# b\n",
            "must have the hints idea, .*: got \\['idea', 'tr",
        ),
    ],
)
def test_a_lesson_that_cannot_be_read_says_where(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        read_lesson("01_a.py", text)


def test_a_lesson_without_an_exercise_says_so() -> None:
    with pytest.raises(ArgumentError, match="lesson must have an exercise: lesson 1 has none"):
        exercise_of(read_lesson("01_a.py", HEAD))


def test_what_is_still_to_be_written_is_found() -> None:
    source = (
        "def a():\n    '''Do it.'''\n    raise NotImplementedError\n\nclass B:\n    def c(self): ...\n"
        "    def d(self):\n        pass\n    def e(self):\n        return 1\n"
    )
    assert [(part.name, part.line, part.task) for part in unwritten(source)] == [
        ("a", 3, "Do it."), ("B.c", 6, ""), ("B.d", 8, ""),
    ]  # fmt: skip
    assert unwritten("def (") == []


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"$\text{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right) V$", "softmax(QKᵀ / √d_k) V"),
        (r"$$x_{i} = 4 d^2 / \sqrt d$$", "x_i = 4 d^2 / √d"),
        (r"$e^{x_s} / \sum_{i=1}^{d} x_i$", "e^(x_s) / Σ_(i=1)^d x_i"),
        (r"$x \leftarrow 7{,}077, \qquad \partial y$", "x ← 7,077, ∂ y"),
        ("costs 5 $ and 6 $", "costs 5 $ and 6 $"),
        ("`$x$`", "`$x$`"),
        (r"$x \in \mathbb{R}^{d}, \int x$", r"x ∈ ℝ^d, \int x"),  # an unknown command is left as it is
    ],
)
def test_formulas_can_be_read_in_a_terminal(text: str, plain: str) -> None:
    assert plain_formulas(text) == plain


def test_no_text_of_the_course_has_an_unknown_tex_command_or_an_unread_formula() -> None:
    """`qquad` and `arrow` were left in lessons 7, 9 and 10, and a formula over two lines in a question."""
    texts = [text for question in deck() for text in (question.text, question.answer)]
    for entry in lessons():
        texts += [entry.title, entry.idea]
        for cell in entry.cells:
            texts += [cell.about] + ([cell.text] if cell.kind in ("markdown", "hint", "question") else [])
    for text in texts:
        plain = re.sub(r"```.*?```|`[^`\n]*`", "", plain_formulas(text), flags=re.DOTALL).replace("\\*", "")
        assert not re.search(r"\\|\$|{,", plain), text


def test_a_live_page_is_named_in_notebooks() -> None:
    """On the site it is shown."""
    cell = next(cell for cell in lesson(0).cells if cell.kind == "page")
    text, _, view = cell.about.partition("#")
    note = page_note(cell)
    assert f'headwise look "{text}" --html heads.html' in note and f"heads.html#{view}" in note
    assert note in [cell["source"][0] for cell in json.loads(notebook(lesson(0)))["cells"]]
    assert text in lesson(0).cells[1].text


# What an exercise asks


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def scores(q, k):\n    return q", "asks for scaled_scores, but the file has scores"),
        ("def scaled_scores(q, k):\n    s = q @ k.mT", "returns nothing"),
        ("x = 1", "no class or function"),
        ("def scaled_scores(q, k):\n    return q", None),
        ("def (", None),
        ("def scaled_scores(q, k):\n    return q @ k.mT, k", "returns a tuple"),
        ("def scaled_scores(q, k):\n    def f():\n        return q, k\n    return f()[0]", None),
    ],
)
def test_some_problems_are_found_without_running_the_code(source: str, words: str | None) -> None:
    problem = static_problem(source, exercise_of(lesson(1)))
    assert problem is None if words is None else problem is not None and words in problem


def test_a_forbidden_function_is_found() -> None:
    exercise = exercise_of(lesson(2))
    problem = static_problem("def softmax(x, dim=-1):\n    return x.softmax(dim)", exercise)
    assert problem == "This exercise must be solved without softmax."
    assert static_problem(exercise.solution, exercise) is None


RIGHT_BUT_DIFFERENT = {
    "no transpose": (
        4, "def split_heads(x, num_heads):\n    return x.unflatten(-1, (num_heads, -1))", "[B, T, H, D]"
    ),
    "a softmax too many": (
        1, "def scaled_scores(q, k):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)", "softmax"
    ),
    "one sequence only": (
        1, "def scaled_scores(q, k):\n    return q @ k.T / q.shape[-1] ** 0.5", "one sequence"
    ),
    "weights, too": (
        3,
        "def attend(q, k, v):\n    w = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1)\n"
        "    both = w @ v, w\n    return both",
        "a tuple, the output and the weights",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT_BUT_DIFFERENT)
def test_right_in_another_way_is_not_solved(name: str, tmp_path: Path, one_template: Template) -> None:
    number, source, words = RIGHT_BUT_DIFFERENT[name]
    study = Study(tmp_path)
    task = study.task(str(number))
    study.start(task)
    task.path.write_text(f"import torch\n\n{source}\n", "utf-8")
    outcome = study.check(task, one_template)
    assert not outcome.ok and len(outcome.differences) == 1 and words in str(outcome.differences[0])
    task.path.write_text(task.exercise.solution, "utf-8")
    assert study.check(task, one_template).ok and study.progress.solved(task.key)


# The learner's folder


def test_nothing_a_learner_wrote_is_overwritten(tmp_path: Path) -> None:
    study = Study(tmp_path)
    task = study.task("3")
    assert study.start(task)
    task.path.write_text("# mine", "utf-8")
    assert not study.start(task)
    assert task.path.read_text("utf-8") == "# mine"
    moved_to = study.reset(task)
    assert moved_to is not None and moved_to.read_text("utf-8") == "# mine"
    assert "raise NotImplementedError" in task.path.read_text("utf-8")
    again = study.reset(task)
    assert again is not None and again != moved_to
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_progress_is_found_again(tmp_path: Path) -> None:
    study = Study(tmp_path)
    task = study.task("3")
    study.start(task)
    study.progress.of(task.key).solved = True
    study.progress.questions["Why?"] = True
    study.progress.save()
    again = Study(tmp_path)
    assert again.progress.solved(task.key) and again.progress.questions == {"Why?": True}
    assert again.task().key == task.key
    for following in (again.after(task), again.following()):
        assert following is not None and following.which == "4"


OLD = {
    "version": 1,
    "current": "03_one_head.py",
    "exercises": {"03_one_head.py": {"tries": 4, "hints": 2, "solved": False, "mistake": "no scale"}},
    "questions": {"Why?": True},
}


def test_progress_of_an_older_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps(OLD), "utf-8")
    study = Study(tmp_path)
    task = study.task()
    assert (study.progress.of(task.key).tries, study.progress.of(task.key).written) == (4, 0)
    assert study.written_hint(task) == ["idea"]
    assert json.loads((tmp_path / FILE).read_text("utf-8"))["version"] == 2
    assert Study(tmp_path).progress.of(task.key).written == 1


def test_hints_of_a_lesson_are_counted_and_repeated_after_the_last(tmp_path: Path) -> None:
    study = Study(tmp_path)
    task = study.task("3")
    assert study.is_unwritten(task)
    assert [study.written_hint(task) for _ in range(5)] == [
        ["idea"],
        ["formula"],
        ["code"],
        [*HINTS],
        [*HINTS],
    ]
    study.start(task)
    assert study.is_unwritten(task) and Study(tmp_path).written_hint(task) == [*HINTS]
    task.path.write_text(task.exercise.solution, "utf-8")
    assert not study.is_unwritten(task)
    study.reset(task)
    assert study.written_hint(task) == ["idea"]


def test_the_exercise_to_continue_with(tmp_path: Path) -> None:
    """The current exercise, then the next unsolved one of a lesson; a repair leads back to the lessons."""
    study = Study(tmp_path)

    def following() -> str:
        task = study.following()
        return "" if task is None else task.which

    assert study.current() is None and following() == "1"
    for which, expected in (("3", "4"), ("repair 7", "1"), ("17", "1"), ("1", "2")):
        task = study.task(which)
        study.start(task)
        assert study.current() == task and following() == task.which
        study.progress.of(task.key).solved = True
        assert study.current() is None and following() == expected
    for entry in WITH_EXERCISE:
        study.progress.of(entry.file_name).solved = True
    assert following() == "" and study.next_lesson() is None
    study.progress.current = "99_of_another_version.py"
    assert study.current() is None


def test_a_course_is_used_from_inside_and_from_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started inside headwise-course, the next exercise went to headwise-course/headwise-course."""
    monkeypatch.delenv("HEADWISE_COURSE", raising=False)
    inside = tmp_path / FOLDER
    deep = inside / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert course_folder() == Path(FOLDER)  # no file of progress yet
    Study(Path()).start(Study(Path()).task("3"))
    for place, folder in (
        (tmp_path, FOLDER), (inside, "."), (deep.parents[2], ".."), (deep.parent, "../../.."), (deep, FOLDER),
    ):  # fmt: skip
        monkeypatch.chdir(place)
        assert course_folder() == default_folder() == Path(folder)
    monkeypatch.setenv("HEADWISE_COURSE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("content", "is_course"),
    [
        (OLD, True),
        ({**OLD, "version": 2, "course": "headwise"}, True),
        ({**OLD, "version": 2}, False),
        ({**OLD, "user": 1}, False),
        ({**OLD, "exercises": {"squats": {"tries": 3}}}, False),
        ({**OLD, "version": "1"}, False),
        ([1, 2], False),
        ({"version": 9}, False),
    ],
)
def test_a_file_of_progress_of_another_program_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, is_course: bool
) -> None:
    (tmp_path / FILE).write_text(json.dumps(content), "utf-8")
    monkeypatch.chdir(tmp_path)
    assert course_folder() == Path("." if is_course else FOLDER)


def test_a_damaged_file_of_progress_starts_no_second_course_inside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_text("{", "utf-8")
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / FILE).write_text("{", "utf-8")
    for place, folder in ((tmp_path, FOLDER), (tmp_path / FOLDER, ".")):
        monkeypatch.chdir(place)
        assert course_folder() == Path(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "progress must be readable"), ('{"version": 9}', "progress must be of version 1 to 2: .* has 9"),
     ('{"version": 1, "exercises": {"a": {"no": 1}}, "questions": {}}', "progress must be readable")],
)  # fmt: skip
def test_a_file_of_progress_that_is_none_of_ours_is_left_alone(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / FILE).write_text(text, "utf-8")
    with pytest.raises(ArgumentError, match=words):
        read_progress(tmp_path)
    assert (tmp_path / FILE).read_text("utf-8") == text


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (None, "no exercise was started yet"),
        ("x", "got 'x'"),
        ("99", "lesson must be 0 to 17: got 99"),
        ("0", "lesson must have an exercise: lesson 0 has none; try headwise learn read 0"),
        ("repair 0", "repair must be 1 to"),
    ],
)
def test_an_unknown_exercise_is_refused(tmp_path: Path, which: str | None, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Study(tmp_path).task(which)


def test_a_path_names_an_exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Study(Path(FOLDER))
    for path in (f"{FOLDER}/03_one_head.py", f"./{FOLDER}/03_one_head.py", "03_one_head.py"):
        assert study.task(path) == study.task("3")
    assert study.task(f"{FOLDER}/repair_07.py") == study.task("repair 7")
    with pytest.raises(
        ArgumentError, match=r"file must be in the folder of the course: other/03_one_head\.py"
    ):
        study.task("other/03_one_head.py")


def test_a_file_with_missing_parts_does_not_count_as_a_try(tmp_path: Path) -> None:
    study = Study(tmp_path)
    task = study.task("2")
    study.start(task)
    assert study.check(task).unwritten and study.progress.of(task.key).tries == 0
    task.path.write_text("def softmax(x, dim=-1):\n    return x.softmax(dim)\n", "utf-8")
    assert study.check(task).problem and study.progress.of(task.key).tries == 1


def test_an_exercise_has_to_be_begun_and_a_folder_written_to(tmp_path: Path) -> None:
    study = Study(tmp_path / "new")
    for which, start in (("1", "start 1"), ("repair 7", "repair 7")):
        words = rf"new/.*\.py does not exist; run headwise learn {start} --folder .*new"
        with pytest.raises(ArgumentError, match=f"exercise must be started: .*{words}"):
            study.check(study.task(which))
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(ArgumentError, match=r"folder must be a folder: .*file is a file"):
        Study(tmp_path / "file")
    blocked = Study(Path("/proc/nothing here"))
    with pytest.raises(ArgumentError, match="folder must be writable"):
        blocked.start(blocked.task("1"))
