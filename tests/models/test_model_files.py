"""A model of ours in a folder is read back as it was, to the last field and weight, or the error names what
differs; and what was read does all that a model does."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import headwise as hw
from headwise.errors import ArgumentError, PackageMissing
from headwise.models import Transformer, TransformerConfig
from headwise.models.model_files import config_of, is_ours, plain_config
from headwise.models.pretrained import load
from headwise.nn import Buckets, Linear, Llama3, Ntk, QKNorm, Rope, Yarn
from headwise.whole_files import whole_file
from trained import a_small_decoder, a_tokenizer, a_vocabulary, an_own_folder

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return an_own_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# Configs

numbers = st.floats(0.01, 97.0)
ROPES = st.builds(
    Rope,
    base=st.floats(1.5, 1e6),
    dims=st.sampled_from([None, 2, 4]),
    interleaved=st.booleans(),
    scaling=st.one_of(
        st.none(),
        st.builds(Linear, st.floats(1.0, 7.0)),
        st.builds(Ntk, st.floats(1.0, 7.0)),
        st.builds(Llama3, st.floats(1.0, 7.0), low=st.floats(0.5, 1.5), original_length=st.integers(2, 97)),
        st.builds(Yarn, st.floats(1.1, 7.0), st.integers(2, 97), attention_factor=st.none() | numbers),
    ),
)
WINDOWS = st.lists(
    st.none() | st.integers(1, 7) | st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=3
)
SIZES = {name: st.just(size) for name, size in (("vocab_size", 11), ("d_model", 18), ("num_heads", 3))}
SIZES["num_layers"] = st.integers(1, 2)
OPTIONS = {
    "kind": st.sampled_from(["decoder", "encoder", "encoder-decoder"]),
    "d_ff": st.integers(1, 13),
    "max_length": st.just(41),
    "token_types": st.integers(0, 2),
    "embedding_scale": numbers,
    "embedding_norm": st.booleans(),
    "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
    "gated": st.booleans(),
    "norm": st.sampled_from(["layer", "rms"]),
    "norm_eps": st.floats(1e-9, 1e-3),
    "norm_first": st.booleans(),
    "final_norm": st.none() | st.booleans(),
    "output": st.sampled_from(["tied", "own", None]),
    "bias": st.booleans(),
    "qkv_bias": st.none() | st.booleans(),
    "out_bias": st.none() | st.booleans(),
    "dropout": st.floats(0, 0.9),
    "embedding_dropout": st.none() | st.floats(0, 0.9),
    "attention_dropout": st.none() | st.floats(0, 0.9),
    "num_kv_heads": st.sampled_from([None, 1, 3]),
    "head_dim": st.sampled_from([None, 4, 8]),
    "scale": st.none() | numbers,
    "softcap": st.none() | numbers,
    "sinks": st.booleans(),
    "rope": st.none() | ROPES,
    "qk_norm": st.sampled_from([None, "rms", QKNorm("layer", eps=0.0, whole=True)]),
    "gate": st.sampled_from([None, "head", "channel"]),
    "windows": WINDOWS.map(tuple),
    "one of": st.sampled_from(
        [
            {"positions": "learned", "max_length": 41},
            {"positions": "sinusoidal"},
            {"alibi": True},
            {"relative_bias": Buckets(8, 31, both_ways=False)},
        ]
    ),
}
CONFIGS = st.fixed_dictionaries(SIZES, optional=OPTIONS)


@settings(max_examples=60, deadline=None)
@given(CONFIGS)
def test_every_config_comes_back_from_json_as_it_was(options: dict[str, Any]) -> None:
    config = TransformerConfig(**(options | options.pop("one of", {})))
    again = config_of(json.loads(json.dumps(plain_config(config), allow_nan=False)))
    assert again == config and repr(again) == repr(config)


def test_every_field_of_a_config_is_drawn() -> None:
    """A field that is new is drawn here, too, and so is held to come back."""
    drawn = {*SIZES, *OPTIONS, "positions", "alibi", "relative_bias"} - {"one of"}
    assert drawn == {field.name for field in fields(TransformerConfig)}


def test_a_config_that_json_cannot_hold_is_refused() -> None:
    class Own:
        magnitude = 1.0

        def frequencies(self, base: float, dims: int) -> torch.Tensor:
            return torch.ones(dims // 2)

    for options, messages in (
        ({"rope": Rope(scaling=Own())}, r"config.rope.scaling is <.*Own"),
        ({"norm_eps": float("nan")}, "config.norm_eps is nan"),
    ):
        config = TransformerConfig(11, 18, 3, 1, **options)
        with pytest.raises(
            ArgumentError,
            match=rf"config must hold only numbers, strings and settings .*: {messages}",
        ):
            plain_config(config)


# Models

KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"rope": None, "positions": "learned", "output": "own", "gated": True, "bias": False},
    "relative": {"rope": None, "relative_bias": Buckets(8, 31), "sinks": True, "qk_norm": QKNorm(whole=True)},
    "encoder": {"kind": "encoder", "token_types": 2, "norm_first": False, "embedding_norm": True},
    "both": {"kind": "encoder-decoder", "num_kv_heads": 1, "norm": "rms", "gate": "channel"},
}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_model_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = a_small_decoder(**KINDS[name])
    model.save(tmp_path / "saved")
    again, _, title = load(tmp_path / "saved")
    assert isinstance(again, Transformer) and title == "saved"
    assert again.config == model.config and not again.training
    ids = [torch.randint(283, (2, 7))] * (2 if name == "both" else 1)
    assert torch.equal(again(*ids), model(*ids))
    assert all(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("own", ["float32", "bfloat16", "float64"])
def test_weights_stored_in_halves_come_back_in_the_models_own_dtype(own: str, tmp_path: Path) -> None:
    dtype = getattr(torch, own)
    model = a_small_decoder().to(dtype)
    model.save(tmp_path / "half", dtype=torch.float16)
    model.save(tmp_path / "whole")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < sizes[1] or own == "bfloat16"
    half, whole = (load(tmp_path / name).model.state_dict() for name in ("half", "whole"))
    for name, weight in model.state_dict().items():
        assert torch.equal(whole[name], weight) and half[name].dtype == dtype
        assert torch.equal(half[name], weight.half().to(dtype))


def test_a_folder_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    files = sorted(path.name for path in folder.iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"]
    message = json.loads((folder / "config.json").read_text())
    assert (message["format"], message["version"], message["title"], message["dtype"]) == (
        "headwise",
        1,
        None,
        "float32",
    )
    assert is_ours(folder) and not is_ours(tmp_path)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "embedding.tokens.weight" in names and "output.weight" not in names  # a tied one is stored once
    an_own_folder(tmp_path / "titled", title="A name", dtype=torch.bfloat16)
    assert load(tmp_path / "titled").title == "A name"
    assert json.loads((tmp_path / "titled" / "config.json").read_text())["stored"] == "bfloat16"


def test_saving_again_writes_over_what_was_there(copy: Path) -> None:
    other = a_small_decoder(num_layers=1)
    other.save(str(copy), a_vocabulary())
    assert load(copy).model.config.num_layers == 1
    assert len(list(copy.iterdir())) == 3


def test_what_goes_wrong_leaves_the_folder_as_it_was(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    written = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "tokenizer" in self.name:
            raise OSError(28, "No space left on device")
        return written(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ArgumentError, match=r"folder must be writable: .*No space left on device"):
        a_small_decoder(num_layers=1).save(copy, a_vocabulary())
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_what_cannot_be_saved_is_refused(tmp_path: Path, copy: Path) -> None:
    class Mine(Transformer):
        pass

    model = a_small_decoder()
    pruned = a_small_decoder()
    hw.prune(pruned, [(0, 1)])
    tied = a_small_decoder(output="own")
    assert tied.output is not None
    tied.output.weight = tied.embedding.tokens.weight
    wide = a_small_decoder()
    with torch.no_grad():
        wide.embedding.tokens.weight[0, 0] = 1e6
    mixed = a_small_decoder()
    mixed.embedding.half()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "bert"}')
    small = a_small_decoder(vocab_size=281)
    unreadable = a_small_decoder(norm_first=1)
    half, new = {"dtype": torch.float16}, tmp_path / "new"
    cases: list[tuple[Transformer, Any, dict[str, Any], str]] = [
        (pruned, new, {}, r"'decoder.layers.0.attention.q_proj.weight' is \[12, 18\], not \[18, 18\]"),
        (tied, new, {}, "as its .*: 'output.weight' is 'embedding.tokens.weight', not 'output.weight'"),
        (Mine(model.config), new, {}, "a plain Transformer: got the subclass Mine"),
        (wide, new, half, r"'embedding.tokens.weight' has 1e\+06, above the largest float16, 6.55e\+04"),
        (mixed, new, {}, "one dtype of .*: got float16 and float32; "),
        (model, new, {"dtype": torch.int8}, "dtype must be one of .*: got torch.int8"),
        (model, new, {"title": 3}, "title must be a string: got int"),
        (unreadable, new, {}, "config.norm_first must be bool: got 1"),
        (model, 5, {}, "folder must be a path: got 5"),
        (model, "a\0b", {}, "folder must be a path: got 'a"),
        (model, tmp_path / "no" / "new", {}, "inside an existing folder: there is no '.*no'; "),
        (model, copy / "config.json", {}, r"writable: '.*config.json' cannot be created \(File exists"),
        (model, tmp_path / "theirs", {}, "written by Transformer.save: '.*theirs' has another config.json"),
        (model, copy, {}, "tokenizer must be given if .* contains one: '.*copy' has a tokenizer.json"),
        (model, new, {"tokenizer": str}, "of the library tokenizers: got type; "),
        (small, new, {"tokenizer": a_vocabulary()}, "283 entries for a vocabulary of 281"),
    ]  # fmt: skip
    for case, place, options, message in cases:
        with pytest.raises(ArgumentError, match=message):
            case.save(place, **options)
    assert not new.exists()


def test_a_tokenizer_of_transformers_is_written_where_it_is_built_on_the_library(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = a_tokenizer()
    a_small_decoder().save(tmp_path / "saved", theirs)
    ours = load(tmp_path / "saved").tokenizer
    assert ours("the cat")["input_ids"] == theirs("the cat")["input_ids"]
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)


# What is damaged, or of another model


def changed(place: Path, *keys: str, to: object = None) -> None:
    """config.json with one value changed, or gone."""
    message = json.loads((place / "config.json").read_text())
    inner = message
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    if to is None:
        del inner[keys[-1]]
    (place / "config.json").write_text(json.dumps(message))


def reweighted(place: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(place / "model.safetensors")
    change(state)
    save_file(state, place / "model.safetensors")


NORM = "decoder.norm.weight"
SPOILED: dict[str, tuple[Any, str]] = {
    "unknown field": (lambda at: changed(at, "config", "colour", to=1), r"that headwise knows: got 'colour'"),
    "missing field": (lambda at: changed(at, "config", "rope"), "all its fields: 'rope' is missing"),
    "unknown field of rope": (lambda at: changed(at, "config", "rope", "x", to=1), "config.rope .*: got 'x'"),
    "unknown scaling": (
        lambda at: changed(at, "config", "rope", "scaling", to={"name": "Dynamic"}),
        "config.rope.scaling must be one of Linear, Ntk, Llama3, Yarn: got 'Dynamic'",
    ),
    "wrong value": (lambda at: changed(at, "config", "num_heads", to=5), r"a valid config: .* 18 .* 5"),
    "no config": (lambda at: changed(at, "config", to=[]), "config must be a JSON object: got list"),
    "version": (lambda at: changed(at, "version", to=2), r"version 1: '.*' is \['headwise', 2\]; update"),
    "header": (lambda at: changed(at, "extra", to=2), "config.json must contain only fields .*: got 'extra'"),
    "dtype": (lambda at: changed(at, "dtype", to="int8"), "dtype must be one of .*: config.json has 'int8'"),
    "title": (lambda at: changed(at, "title", to=5), "title must be a string: config.json has 5"),
    "cut config": (
        lambda at: (at / "config.json").write_text((at / "config.json").read_text()[:99]),
        "a readable config.json: .*copy' has none",
    ),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "model.safetensors in '.*' is not"),
    "cut weights": (
        lambda at: (at / "model.safetensors").write_bytes((at / "model.safetensors").read_bytes()[:-1]),
        "readable weights: model.safetensors in '.*' is not",
    ),
    "weight missing": (lambda at: reweighted(at, lambda state: state.pop(NORM)), f"{NORM!r} is absent, not"),
    "weight left over": (
        lambda at: reweighted(at, lambda state: state.update(more=torch.ones(3))),
        r"'more' is \[3\], not absent",
    ),
    "other shape": (
        lambda at: reweighted(at, lambda state: state.update({NORM: torch.ones(5)})),
        rf"{NORM!r} is \[5\], not \[18\]",
    ),
    "other dtype": (
        lambda at: reweighted(at, lambda state: state.update({NORM: state[NORM].half()})),
        f"{NORM!r} is float16, not float32",
    ),
    "word for a number": (lambda at: changed(at, "config", "norm_eps", to="x"), "must be float: got 'x'"),
    "no number": (
        lambda at: changed(at, "config", "scale", to=float("nan")),
        r"config.scale must be float \| None: got nan",
    ),
    "yes or no": (lambda at: changed(at, "config", "norm_first", to=1), "norm_first must be bool: got 1"),
    "no rope": (lambda at: changed(at, "config", "rope", to=5), "config.rope must be .*Rope.*: got 5"),
    "rope's base": (lambda at: changed(at, "config", "rope", "base", to="9"), "base must be float: got '9'"),
    "too wide for torch": (
        lambda at: changed(at, "config", "d_ff", to=2**70),
        r"valid config: .* has none \(empty\(\): .*overflow|Overflow",
    ),
    "negative count": (lambda at: changed(at, "config", "token_types", to=-3), r"has none \(.*dimension -3"),
    "layers without end": (
        lambda at: changed(at, "config", "num_layers", to=10**9),
        "tensors for num_layers = 1000000000",
    ),
    "list for a dtype": (lambda at: changed(at, "dtype", to=["x"]), r"config.json has \['x'\]"),
    "brackets without end": (
        lambda at: (at / "config.json").write_text('{"format": "headwise", "a": ' + "[" * 100_000),
        "a readable config.json: .* has none .*recursion",
    ),
    "cut tokenizer": (lambda at: (at / "tokenizer.json").write_text("{"), "tokenizer.json' cannot be read"),
    "other tokenizer": (
        lambda at: (changed(at, "config", "vocab_size", to=7), cut_embedding(at)),
        "283 entries for a vocabulary of 7; ",
    ),
}  # fmt: skip


def cut_embedding(place: Path) -> None:
    name = "embedding.tokens.weight"
    reweighted(place, lambda state: state.update({name: state[name][:7].clone()}))


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder_is_refused_by_what_is_wrong(name: str, copy: Path) -> None:
    spoil, message = SPOILED[name]
    spoil(copy)
    with pytest.raises(ArgumentError, match=message):
        load(copy)


def test_a_folder_in_a_files_place_leaves_all_as_it_was(copy: Path) -> None:
    """Files take their names one after another: none may, where the last cannot."""
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").mkdir()
    before = (copy / "config.json").read_bytes(), (copy / "tokenizer.json").read_bytes()
    with pytest.raises(ArgumentError, match=r"contain a folder named model.safetensors: got '.*'"):
        a_small_decoder().save(copy, a_tokenizer(), title="another")
    assert ((copy / "config.json").read_bytes(), (copy / "tokenizer.json").read_bytes()) == before


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    halves = []

    def write(after: Any = None) -> None:
        with whole_file(tmp_path / "file") as half:
            half.write_text("whole")
            halves.append(half)
            if after is not None:
                thread = Thread(target=after)
                thread.start()
                thread.join()

    write(write)
    assert len(set(halves)) == 2
    assert [each.read_text() for each in tmp_path.iterdir()] == ["whole"]


def test_a_model_of_ours_is_none_of_transformers(folder: Path) -> None:
    with pytest.raises(
        ArgumentError, match="ours must not be False for a model of headwise: got False for 'small'"
    ):
        load(folder, ours=False)
    assert isinstance(load(folder, ours=True).model, Transformer)


def test_without_a_tokenizer_the_model_loads_and_the_rest_says_why(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        tokenizer = load(copy).tokenizer
        with pytest.raises(
            PackageMissing, match=r'needs tokenizers; install with: pip install "headwise\[cli\]"'
        ):
            tokenizer("the cat")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(
        ArgumentError, match="tokenizer must be in the model's folder: 'copy' was saved without"
    ):
        load(copy).tokenizer("the cat")


def test_without_safetensors_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageMissing, match="weights in files need safetensors; install with: pip install"):
        load(folder)
    with pytest.raises(PackageMissing, match="saving a model needs safetensors; install with: pip install"):
        a_small_decoder().save(tmp_path / "new")
