"""What a learner gets to do: a file to write or to repair."""

from __future__ import annotations

from ..errors import ArgumentError
from .lesson import Exercise, Lesson
from .plants import repair_of

__all__ = ["exercise_of", "laid_out"]


def exercise_of(lesson: Lesson, fault: str | None = None) -> Exercise:
    """The lesson's exercise; with `fault`, one of repair.

    Raises:
        ArgumentError: the lesson has none.
    """
    if fault is not None:
        return repair_of(fault)
    asked = next((cell for cell in lesson.cells if cell.kind == "exercise"), None)
    if asked is None:
        raise ArgumentError(
            f"lesson must have an exercise: {lesson.number} has none; headwise learn repair gives one"
        )
    return Exercise(
        "write", asked.about, f"{asked.text}\n", f"{lesson.text_of('solution')}\n", "", lesson.without
    )


def laid_out(exercise: Exercise, title: str, command: str) -> str:
    """The file as it is laid into the learner's folder: what to do on top."""
    if exercise.kind == "write":
        task = f"Write {exercise.name}: put your lines where it says `raise NotImplementedError`."
    else:
        task = f"One thing in {exercise.name} is wrong. Find and repair it."
    return f"# {title}\n# {task}\n# Then: {command}\n\n{exercise.start}"
