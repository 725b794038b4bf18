"""What a learner has done, in one small file of the folder they work in; written whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import ArgumentError
from ..whole_files import whole_file

__all__ = ["FILE", "Done", "Progress", "read_progress"]

FILE = "progress.json"
VERSION = 1


@dataclass
class Done:
    """Of one exercise, by its file's name."""

    tries: int = 0
    hints: int = 0  # the last one shown
    solved: bool = False
    mistake: str = ""  # of the last try: hints are counted for each


@dataclass
class Progress:
    """Of one folder."""

    folder: Path
    exercises: dict[str, Done] = field(default_factory=dict)
    questions: dict[str, bool] = field(default_factory=dict)  # asked -> known when last asked
    current: str = ""  # the exercise last begun, by its file's name

    def of(self, file_name: str) -> Done:
        """What was done of an exercise; made on first use."""
        return self.exercises.setdefault(file_name, Done())

    def solved(self, file_name: str) -> bool:
        return file_name in self.exercises and self.exercises[file_name].solved

    def save(self) -> None:
        """Write it; a process killed meanwhile leaves what was there before."""
        told = {
            "version": VERSION,
            "current": self.current,
            "exercises": {name: asdict(done) for name, done in sorted(self.exercises.items())},
            "questions": self.questions,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / FILE, "folder") as half:
            half.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_progress(folder: Path) -> Progress:
    """What was done in this folder; nothing where there is none yet.

    Raises:
        ArgumentError: the file is not one of ours, or of a later headwise.
    """
    place = folder / FILE
    try:
        told = json.loads(place.read_text("utf-8"))
        if told["version"] > VERSION:
            raise ArgumentError(
                f"progress must be of version {VERSION}: {place} has {told['version']}; update headwise"
            )
        exercises = {str(name): Done(**done) for name, done in told["exercises"].items()}
        questions = {str(asked): bool(known) for asked, known in told["questions"].items()}
        current = str(told["current"])
    except FileNotFoundError:
        return Progress(folder)
    except NotADirectoryError as error:
        raise ArgumentError(
            f"folder must be a folder: {folder} is none; name another with --folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"progress must be readable: {place}: {error}; move the file away to begin anew"
        ) from error
    return Progress(folder, exercises, questions, current)
