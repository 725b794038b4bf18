"""What `help`, `inspect.signature` and the API pages display: the signature that users call."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import operator
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import griffe
import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[1]


def public_callables() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield every function, class and method that users reach from `headwise.__all__`, with its name."""
    for name in hw.__all__:
        value = getattr(hw, name)
        if not inspect.ismodule(value):
            yield from with_methods(f"hw.{name}", value)
            continue
        for inner in getattr(value, "__all__", None) or vars(value):
            part = getattr(value, inner)
            if callable(part) and (getattr(part, "__module__", None) or "").startswith("headwise"):
                yield from with_methods(f"hw.{name}.{inner}", part)


def with_methods(name: str, value: Callable[..., object]) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield a callable and, of a class, its public methods."""
    if not (inspect.isclass(value) and issubclass(value, BaseException)):  # those have Python's own signature
        yield name, value
    if inspect.isclass(value):
        for method in vars(value):
            if not method.startswith("_") and inspect.isroutine(getattr(value, method)):
                yield f"{name}.{method}", getattr(value, method)


CALLABLES = dict(public_callables())


def test_there_are_callables_to_compare() -> None:
    assert {"hw.attention", "hw.why", "hw.MultiHeadAttention.forward", "hw.parallel.attention"} <= set(
        CALLABLES
    )
    assert len(CALLABLES) > 80


@pytest.mark.parametrize("name", CALLABLES)
def test_a_signature_shows_no_hint_and_no_stand_in(name: str) -> None:
    signature = inspect.signature(CALLABLES[name])
    assert all(parameter.default is not ... for parameter in signature.parameters.values())
    assert "wrong" not in signature.parameters
    assert "Ellipsis" not in str(signature) and "REQUIRED" not in str(signature)


def test_required_arguments_are_required_in_what_is_displayed() -> None:
    required = [
        name
        for name, parameter in inspect.signature(hw.attention).parameters.items()
        if parameter.default is parameter.empty
    ]
    assert required == ["q", "k", "v"]
    forward = inspect.signature(hw.MultiHeadAttention(8, 2).forward)  # bound
    assert next(iter(forward.parameters.values())).default is inspect.Parameter.empty
    help_text = inspect.cleandoc(str(inspect.signature(hw.MultiHeadAttention.forward)))
    assert help_text.startswith("(self, query: 'Tensor', key: 'Tensor | None' = None")


def test_the_hints_for_names_of_other_libraries_are_still_there() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match="attn_mask must not be given to attention"):
        hw.attention(q, q, q, attn_mask=None)
    with pytest.raises(TypeError, match="q must be given: got no value"):
        hw.attention()


def test_a_displayed_signature_is_the_whole_change_to_a_function() -> None:
    assert pickle.loads(pickle.dumps(hw.attention)) is hw.attention
    assert not hasattr(hw.attention, "__wrapped__")  # no call more than before


@pytest.mark.slow
def test_the_api_pages_show_the_same_parameters() -> None:
    extension = _docstrings_extension()
    package = griffe.load(
        "headwise", search_paths=[ROOT / "src"], extensions=griffe.load_extensions(extension.Docstrings)
    )
    for module, path in (
        ("functional", "attention"),
        ("functional", "why"),
        ("nn.multihead", "MultiHeadAttention.forward"),
        ("nn.multihead", "MultiHeadAttention.head_outputs"),
        ("models.transformer", "Transformer.forward"),
        ("parallel.sharded_map", "attention"),
    ):
        value = operator.attrgetter(path)(importlib.import_module(f"headwise.{module}"))
        parameters = inspect.signature(value).parameters
        page = package[f"{module}.{path}"].parameters
        assert [parameter.name for parameter in page] == list(parameters), path
        required = {name for name, p in parameters.items() if p.default is p.empty}
        assert {parameter.name for parameter in page if parameter.required} == required, path


def _docstrings_extension() -> ModuleType:
    """Return docs/docstrings.py as a module."""
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docstrings"] = module
    spec.loader.exec_module(module)
    return module
