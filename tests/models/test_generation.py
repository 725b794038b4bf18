"""`generate` and `stream`: the tokens that transformers makes, greedy or drawn; prompts of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.models import Transformer, TransformerConfig
from headwise.models.generation import filtered
from headwise.nn import Rope

V, B, T, N = 97, 3, 7, 13
KINDS: dict[str, dict[str, Any]] = {
    "rope": {"rope": Rope(), "num_kv_heads": 2, "norm": "rms", "gated": True, "activation": "silu"},
    "learned": {"positions": "learned", "max_length": 23},
    "sinusoidal": {"positions": "sinusoidal"},
}
IDS = torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))
LENGTHS = [7, 3, 5]


def a_model(kind: str = "decoder", **options: Any) -> Transformer:
    """In float64: two tokens are never equally likely."""
    options = options or KINDS["learned"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        sizes = {"vocab_size": V, "d_model": 24, "num_heads": 4, "num_layers": 2}
        model = Transformer(TransformerConfig(kind=kind, dropout=0.5, **sizes, **options)).double()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        return model


@pytest.mark.thinned(99)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_greedy_tokens_are_those_of_reading_everything_anew(options: dict[str, Any]) -> None:
    model = a_model(**options)
    message = model.generate(IDS, N)
    model.eval()
    ids = IDS
    for _ in range(N):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(message, ids[:, T:])
    ragged = model.generate(IDS, N, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(ragged[row], model.generate(IDS[row : row + 1, :length], N)[0])


def _theirs(name: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": V, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=31,
            **sizes,
        )
    else:
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=4, n_positions=23, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4, generator=torch.Generator().manual_seed(weight.numel()))
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    theirs = _theirs(name)
    expected = theirs.generate(IDS, max_new_tokens=N, do_sample=False)[:, T:]
    model = hw.models.load(theirs)
    assert torch.equal(model.generate(IDS, N), expected)
    stop = int(expected[0, 4])
    expected = theirs.generate(IDS[:1], max_new_tokens=N, do_sample=False, eos_token_id=stop)[:, T:]
    assert torch.equal(model.generate(IDS[:1], N, stop=stop), expected)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}],
    ids=str,
)
def test_what_may_be_drawn_is_what_transformers_lets_be_drawn(options: dict[str, Any]) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(11, V, generator=torch.Generator().manual_seed(3))
    expected = logits
    if "temperature" in options:
        expected = TemperatureLogitsWarper(options["temperature"])(None, expected)
    if "top_k" in options:
        expected = TopKLogitsWarper(options["top_k"])(None, expected)
    if "top_p" in options:
        expected = TopPLogitsWarper(options["top_p"])(None, expected)
    assert torch.equal(filtered(logits, **options), expected)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """The first token of 20,000 copies of a prompt, against its probabilities: chi-squared of 5 tokens."""
    model, many = a_model(), 20_000
    options: dict[str, Any] = {"temperature": 2.0, "top_k": 5}
    logits = filtered(model.eval()(IDS[:1])[:, -1].detach(), **options)
    likely = logits.softmax(-1)[0]
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        drawn = hw.models.generation.chosen(
            logits.expand(many, -1), 1.0, generator=torch.Generator().manual_seed(4)
        )
        assert torch.equal(torch.get_rng_state(), before)
    counts = torch.bincount(drawn, minlength=V).double()
    assert counts[likely == 0].sum() == 0
    wanted = (likely * many)[likely > 0]
    assert ((counts[likely > 0] - wanted).square() / wanted).sum() < 18.5  # 1 in 1,000 of four degrees


def test_one_generator_gives_the_same_tokens_and_leaves_the_process_alone() -> None:
    model, before = a_model(), torch.get_rng_state()

    def tokens_of(seed: int) -> Tensor:
        return model.generate(IDS, N, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(tokens_of(5), tokens_of(5)) and not torch.equal(tokens_of(5), tokens_of(6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.generate(IDS, N, temperature=1.0, top_k=1), model.generate(IDS, N))


def test_a_stream_is_the_same_token_by_token_and_the_model_is_as_it_was() -> None:
    model = a_model().train()
    model.decoder.layers[1].eval()
    modes = [module.training for module in model.modules()]
    whole = model.generate(IDS, N)
    assert [module.training for module in model.modules()] == modes
    handled = []
    for token in model.stream(IDS, N):
        handled.append(token)
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled() and not token.is_inference()
    assert torch.equal(torch.stack(handled, 1), whole) and not whole.is_inference()
    stream = model.stream(IDS, N)
    next(stream)
    stream.close()
    assert [module.training for module in model.modules()] == modes
    model(torch.cat([IDS, whole], 1)[:, :20]).sum().backward()  # as in learning from what one said


def test_a_sequence_that_ended_repeats_its_last_token_until_all_have() -> None:
    model = a_model(**KINDS["rope"])
    free = model.generate(IDS, N)
    firsts = {int(free[0, 2]): 0, int(free[1, 5]): 1, int(free[2, 3]): 2}
    stops = list(firsts)
    ends = [int(torch.isin(row, torch.tensor(stops)).int().argmax()) for row in free]
    message = model.generate(IDS, N, stop=stops)
    assert message.shape[1] == max(ends) + 1 < N
    for row, end in enumerate(ends):
        assert torch.equal(message[row, : end + 1], free[row, : end + 1])
        assert (message[row, end:] == free[row, end]).all()
    assert torch.equal(torch.stack(list(model.stream(IDS, N, stop=stops)), 1), message)
    unsaid = next(token for token in range(V) if token not in free)
    assert torch.equal(model.generate(IDS, N, stop=unsaid), free)


def test_an_encoder_decoder_begins_with_its_start() -> None:
    model = a_model("encoder-decoder").eval()
    message = model.generate(IDS, N, start=0, lengths=LENGTHS)
    target = torch.zeros(B, 1, dtype=torch.long)
    for _ in range(N):
        logits = model(IDS, target, lengths=LENGTHS)
        target = torch.cat([target, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(message, target[:, 1:])


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.[a-z_]*. is deprecated:DeprecationWarning")
def test_a_compiled_step_says_the_same() -> None:
    model = a_model(**KINDS["rope"])
    message = model.generate(IDS, N, lengths=LENGTHS, compile=True)
    assert torch.equal(message, model.generate(IDS, N, lengths=LENGTHS))
    again, other = model.generate(IDS, N, lengths=LENGTHS, compile=True), IDS.flip(1)
    assert torch.equal(message, again)  # what was kept has forgotten the tokens before
    first = model.stream(other, N, lengths=LENGTHS, compile=True)
    begun = [next(first), next(first)]  # and is nobody else's meanwhile
    assert torch.equal(message, model.generate(IDS, N, lengths=LENGTHS, compile=True))
    rest = [*begun, *first]
    assert torch.equal(torch.stack(rest, 1), model.generate(other, N, lengths=LENGTHS))


def test_streams_that_overlap_leave_dropout_out_to_the_last() -> None:
    model = a_model(**KINDS["rope"]).train()
    model.decoder.layers[0].eval()  # by hand
    expected = model.generate(IDS, N)
    first, second = model.stream(IDS, 2), model.stream(IDS, N)
    message = [next(first), next(second)][1:]
    assert list(first) and not model.training
    message += list(second)
    assert torch.equal(torch.stack(message, 1), expected)
    assert model.training and not model.decoder.layers[0].training


def test_exactly_so_many_are_drawn_from_and_all_of_them_for_a_share_of_one() -> None:
    assert filtered(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), 1.0, 1).isfinite().sum() == 1
    many = torch.randn(1, 100_003, generator=torch.Generator().manual_seed(0)) * 3
    assert filtered(many, 1.0, None, 1.0).isfinite().all()
    saved = filtered(many, 1.0, None, 0.9999).isfinite()
    assert many.double().softmax(-1)[saved].sum() >= 0.9999


def test_what_makes_no_sense_is_refused() -> None:
    model = a_model()

    def refused(message: str, error: type[Exception], *args: Any, **options: Any) -> None:
        for method in (model.generate, model.stream):
            with pytest.raises(error, match=message):
                method(*args, **options)

    refused("max_new_tokens must be a whole number, at least 1: got 0", ArgumentError, IDS, 0)
    refused("stop must be a token id or several: got 'a'", ArgumentError, IDS, 3, stop="a")
    refused(r"stop must be a token id or several: got \[2.7\]", ArgumentError, IDS, 3, stop=[2.7])
    refused(
        "ids must be in the vocabulary: got 1000 for a vocabulary of",
        ArgumentError,
        IDS + 1000 - IDS.max(),
        3,
    )
    with pytest.raises(MaskError, match="at least 1 to use the last tokens: got 0"):
        model.generate(IDS, 3, lengths=[0, *LENGTHS[1:]])
    refused(r"the model's max_length: 7 \+ 18 - 1 > 23; use at most 17", ShapeError, IDS, 18)
    refused(r"ids must be a tensor \[B, T\]: got \[7\]", ShapeError, IDS[0], 3)
    refused("temperature must be 0 or more: got -1", ArgumentError, IDS, 3, temperature=-1)
    refused("top_k must be given with a temperature above 0: got top_k=5", ArgumentError, IDS, 3, top_k=5)
    refused("top_k must be a whole number, at least 1: got 0", ArgumentError, IDS, 3, temperature=1, top_k=0)
    refused("top_p must be above 0 and at most 1: got 1.5", ArgumentError, IDS, 3, temperature=1, top_p=1.5)
    refused("in the vocabulary: got 97 of 97", ArgumentError, IDS, 3, stop=[3, V])
    refused("and no other model: got 0 for decoder", ArgumentError, IDS, 3, start=0)
    refused("unexpected keyword argument 'eos'", TypeError, IDS, 3, eos=3)
    assert model.generate(IDS, 17).shape == (B, 17)
    model = a_model("encoder-decoder")
    refused("and no other model: got None for encoder-decoder", ArgumentError, IDS, 3)
    refused(r"1 \+ 24 - 1 > 23; use at most 23", ShapeError, IDS, 24, start=0)
    model = a_model("encoder")
    refused("have an output layer to generate: got kind='encoder'", ArgumentError, IDS, 3)
