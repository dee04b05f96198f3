"""Finding the decoder layers and telling what they return, on small modules; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from spec_vllm_compat.worker import layers as module  # noqa: E402
from spec_vllm_compat.worker.layers import (  # noqa: E402
    CaptureError,
    Meaning,
    Usage,
    find_decoder_layers,
    float16_factor,
    returned,
)

WIDTH = 32


class Norm(nn.Module):
    """As vLLM's: with a residual it adds, in place, and returns both."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        if residual is None:
            return x / x.norm(dim=-1, keepdim=True)
        residual.add_(x)
        x.copy_(residual / residual.norm(dim=-1, keepdim=True))
        return x, residual


class IgnoringNorm(nn.Module):
    """As Cohere's: takes a residual and hands it back."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        return x / x.norm(dim=-1, keepdim=True), residual


class Layer(nn.Module):
    """``(hidden, residual)`` whose sum is the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, residual: Any = None) -> Any:
        x, residual = (self.norm(x), x) if residual is None else self.norm(x, residual)
        return self.mlp(x), residual


class AddedLayer(Layer):
    """``(hidden, residual)`` where the first is the stream already."""

    def forward(self, x: Any, residual: Any = None) -> Any:
        residual = x
        x = x + self.mlp(self.norm(x))
        return x, residual


class Inner(nn.Module):
    def __init__(self, layer: type[nn.Module], norm: type[nn.Module], end: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.norm, self.end = norm(), end

    def forward(self, x: Any) -> Any:
        residual = None
        for layer in self.layers:
            x, residual, *_ = layer(x, residual)
        return {
            "both": lambda: self.norm(x, residual)[0],
            "keywords": lambda: self.norm(x=x, residual=residual)[0],
            "first": lambda: self.norm(x),
            "sum": lambda: self.norm(x + residual),
            "second": lambda: self.norm(residual),
            "returns the sum": lambda: x + residual,
            "returns the first": lambda: (x, None),
            "returns both": lambda: {"hidden_states": x, "residual": residual},
            "nothing": lambda: self.norm(x * 2),
        }[self.end]()


class Model(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.model, self.lm_head = Inner(*args), nn.Linear(WIDTH, 8)

    def forward(self, x: Any) -> Any:
        return self.model(x)


def meaning_of(layer: type[nn.Module], norm: type[nn.Module], end: str) -> Meaning:
    torch.manual_seed(0)
    model = Model(layer, norm, end)
    usage = Usage(model, "model.layers", model.model.layers, lambda: True)
    with torch.no_grad():
        model(torch.randn(5, WIDTH))
    meaning = usage.settled()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "hooks stay behind"
    return meaning


@pytest.mark.parametrize(
    ("layer", "norm", "end", "expected"),
    [
        (Layer, Norm, "both", Meaning.SUM),
        (Layer, Norm, "keywords", Meaning.SUM),
        (Layer, Norm, "sum", Meaning.SUM),
        (Layer, Norm, "returns the sum", Meaning.SUM),
        (AddedLayer, Norm, "first", Meaning.HIDDEN),
        (AddedLayer, IgnoringNorm, "both", Meaning.HIDDEN),
        (AddedLayer, IgnoringNorm, "keywords", Meaning.HIDDEN),
        (AddedLayer, Norm, "returns the first", Meaning.HIDDEN),
    ],
)
def test_what_the_model_does_tells_what_layers_return(
    layer: type[nn.Module], norm: type[nn.Module], end: str, expected: Meaning
) -> None:
    assert meaning_of(layer, norm, end) is expected


@pytest.mark.parametrize("end", ["nothing", "second", "returns both"])
def test_an_unknown_use_is_refused(end: str) -> None:
    with pytest.raises(CaptureError, match="no use of it that tells"):
        meaning_of(Layer, Norm, end)


def test_a_norm_that_does_something_else_with_the_residual_is_refused() -> None:
    class Subtracting(nn.Module):
        def forward(self, x: Any, residual: Any) -> Any:
            return x - residual, residual

    with pytest.raises(CaptureError, match="no use of it that tells"):
        meaning_of(Layer, Subtracting, "both")


def test_a_decoder_within_the_model_hands_both_on() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Any) -> Any:
            residual = None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return x, residual

    class Plamo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.norm = Decoder(), Norm()

        def forward(self, x: Any) -> Any:
            return self.norm(*self.decoder(x))[0]

    model = Plamo()
    usage = Usage(model, "decoder.layers", model.decoder.layers, lambda: True)
    with torch.no_grad():
        model(torch.randn(5, WIDTH))
    assert usage.settled() is Meaning.SUM


def test_the_look_at_the_norm_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Model(Layer, Norm, "both")
    x = torch.randn(5, WIDTH)
    with torch.no_grad():
        before = model(x.clone())
        Usage(model, "model.layers", model.model.layers, lambda: True)
        assert torch.equal(model(x.clone()), before)


def test_nothing_is_learnt_outside_of_a_step() -> None:
    model = Model(Layer, Norm, "both")
    usage = Usage(model, "model.layers", model.model.layers, lambda: False)
    with torch.no_grad():
        model(torch.randn(5, WIDTH))
    assert usage.meaning is None


A, B = torch.ones(5, WIDTH), torch.full((5, WIDTH), 2.0)


@pytest.mark.parametrize(
    ("output", "hidden", "residual"),
    [
        (A, A, None),
        ((A, None), A, None),
        ((A,), A, None),
        ((A, B), A, B),
        (A[None], A, None),
        ((A, B, (torch.ones(5, 3), torch.ones(5, 3))), A, B),  # Hunyuan: keys and values for the next layer
        ((A, torch.ones(5, 3)), A, None),  # router logits
    ],
)
def test_forms_of_output(output: Any, hidden: Any, residual: Any) -> None:
    got = returned(output, 5)
    assert torch.equal(got[0], hidden)
    assert (got[1] is None) if residual is None else torch.equal(got[1], residual)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (A[:3], r"a row for each of 5 tokens.*sequence parallelism"),
        ((A[:3], A[:3]), "a row for each of 5 tokens"),
        (torch.ones(4, 5, WIDTH), r"one residual stream.*\[4, 5, 32\]"),  # Gemma 3n: four streams
        ((A, B[:3]), "at most one residual like them"),
        ((A, B.double()), "at most one residual like them"),
        ((A, B, B), "at most one residual"),
        ((A, (B, None)), "at most one residual"),  # something that the next layer will add
        ({"hidden": A}, "found dict"),
        ((), "found "),
    ],
)
def test_other_forms_are_refused(output: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        returned(output, 5)


class Half(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def forward(self, x: Any) -> Any:
        if x.dtype == torch.float16:
            x = x / 2
        return x


def test_float16_is_scaled_back_or_refused() -> None:
    assert float16_factor(Half(routed_scaling_factor=2.5), torch.float16) == 2.5
    assert float16_factor(Half(routed_scaling_factor=2.5), torch.bfloat16) == 1
    assert float16_factor(Layer(), torch.float16) == 1
    with pytest.raises(CaptureError, match="code of its own for it"):
        float16_factor(Half(), torch.float16)


def lists(**counts: int) -> nn.Module:
    model = nn.Module()
    for name, count in counts.items():
        *parents, last = name.split("__")
        place = model
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = getattr(place, parent)
        place.add_module(last, nn.ModuleList(nn.Module() for _ in range(count)))
    return model


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"model__layers": 4}, "model.layers"),
        ({"language_model__model__layers": 4, "vision_tower__blocks": 3}, "language_model.model.layers"),
        ({"transformer__h": 4, "mtp__layers": 1}, "transformer.h"),
    ],
)
def test_layers_are_found_by_structure(counts: dict[str, int], expected: str) -> None:
    assert find_decoder_layers(lists(**counts), 4)[0] == expected


def test_lists_inside_of_layers_do_not_count() -> None:
    model = lists(model__layers=4)
    model.model.layers[0].add_module("experts", nn.ModuleList(nn.Module() for _ in range(4)))
    assert find_decoder_layers(model, 4)[0] == "model.layers"


def test_a_slice_of_the_same_layers_is_no_second_list():
    model = lists(model__layers=4)
    model.model.self_decoder = nn.Module()
    model.model.self_decoder.decoder_layers = model.model.layers[:4]
    assert find_decoder_layers(model, 4)[0] == "model.layers"


def test_a_vision_tower_of_the_same_depth() -> None:
    model = lists(language_model__model__layers=4, visual__blocks=4)
    with pytest.raises(CaptureError, match=r"language_model.model.layers.*visual.blocks"):
        find_decoder_layers(model, 4)
    model.get_language_model = lambda: model.language_model
    assert find_decoder_layers(model, 4)[0] == "language_model.model.layers"


def test_no_layers() -> None:
    with pytest.raises(CaptureError, match=r"one list of 5 decoder layers.*found none.*model.layers \(4\)"):
        find_decoder_layers(lists(model__layers=4), 5)


def small_capture(*model: Any, keep: bool = True) -> tuple[Any, nn.Module]:
    """A capture of layers 0 and 2 of a small model."""
    from spec_vllm_compat.worker.capture import Capture
    from spec_vllm_compat.worker.sink import Sink

    made = Model(*(model or (Layer, Norm, "both")))
    text = SimpleNamespace(num_hidden_layers=3)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.float32),
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=made), vllm_config=config)
    return Capture(worker, (0, 2), Sink(torch.device("cpu")), keep=keep), made


def test_the_first_step_and_the_next_ones_give_the_same_rows() -> None:
    """The residuals of the first step are added once the model has shown what they are."""
    for layer, norm, end in ((Layer, Norm, "both"), (AddedLayer, Norm, "first")):
        torch.manual_seed(0)
        capture, model = small_capture(layer, norm, end)
        capture._rows = 5
        x = torch.randn(5, WIDTH)
        taken = []
        for _ in range(2):
            with torch.inference_mode():
                model(x.clone())
            capture._settle_meaning()
            taken.append(capture._buffer[:, :5].clone())
        with torch.inference_mode():
            stream, want = (x.clone(), None), []
            for one in model.model.layers:
                stream = one(*stream)
                want.append(stream[0] + stream[1] if layer is Layer else stream[0].clone())
                stream = tuple(part.clone() for part in stream)
        assert torch.equal(taken[0], taken[1])
        assert torch.equal(taken[0], torch.stack([want[0], want[2]]))
        assert module.Meaning(capture.meaning) is (Meaning.SUM if layer is Layer else Meaning.HIDDEN)
        capture.remove()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((1.0, -2.0, 0.5), None),
        ((1.02, -2.01, 0.49), None),  # rounding
        ((0.3, -1.1, 0.9), "a rank's part of a sum"),  # what the other rank adds is missing
        ((1.0, -2.0), "a rank's part of a sum"),
        ((float("nan"), -2.0, 0.5), "a rank's part of a sum"),
    ],
)
def test_ranks_that_return_parts_of_a_sum_are_refused(other: tuple[float, ...], said: str | None) -> None:
    from spec_vllm_compat.driver.session import Session
    from spec_vllm_compat.errors import ExtractionError
    from spec_vllm_compat.protocol import Step

    session = Session()
    session.call = SimpleNamespace(take_in=lambda step: None, segment=None, layout=lambda: None)
    session.ask = lambda *args: [Step(samples=(1.0, -2.0, 0.5)), Step(samples=other)]
    if said is None:
        session.step(None, None)
        return
    with pytest.raises(ExtractionError, match=said):
        session.step(None, None)


def test_every_rank_samples_its_first_step() -> None:
    capture, model = small_capture(keep=False)
    capture._rows = 5
    with torch.inference_mode():
        model(torch.randn(5, WIDTH))
    capture._settle_meaning()
    assert len(capture._samples) == 2 * 8
    assert capture._collect(()).samples != ()
    with torch.inference_mode():
        model(torch.randn(5, WIDTH))
    assert capture._collect(()).samples == ()
