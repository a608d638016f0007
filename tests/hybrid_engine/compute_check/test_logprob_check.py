"""`generate_config.check_compute` with fakes of both engines: schedule, tokens and errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hybrid_engine.compute_check.attention import LENGTH, Attention, grouped
from hybrid_engine.compute_check.config_reads import Read, Reads
from hybrid_engine.compute_check.fingerprint import Fingerprint
from hybrid_engine.compute_check.gap import LONGEST, NUM_ROWS, ROUNDING, Gap, tokens_within
from hybrid_engine.compute_check.logprob_check import ConfigModel, Description, LogprobCheck
from hybrid_engine.compute_check.probes import ProbeAnswer, ProbeLimits, attributes_set
from hybrid_engine.compute_check.routes import LayerRoutes
from hybrid_engine.errors import ComputationError, ConfigError, GenerationError, StateError
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.serving.comparison import ServerComparison, ServerDescription
from hybrid_engine.switch.states import State
from tests.harness.errors import refused, violated
from tests.hybrid_engine.switch.fakes import (
    FORWARD,
    IDLE,
    INFER,
    TRAIN,
    FakeInference,
    FakeTraining,
    Rig,
)


def log_probs_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities that both fakes compute; they range over 3 nats."""
    return -3.0 - (tokens[:, 1:] % 7).float()


Layers = Mapping[int, Attention]


class Readable:
    """Mixin of a fake whose layers and reads of config.json are known."""

    limits: ProbeLimits
    layers: Mapping[int, Attention] = {0: Attention(0.5), 1: Attention(0.5)}
    reads: Mapping[str, Read] = {}
    num_routed = 0

    def answer(self, tokens: torch.Tensor, offset: float = 0.0) -> ProbeAnswer:
        """Return an answer with the routes of `num_routed` layers."""
        scores = torch.eye(tokens.numel())
        routes = [LayerRoutes(scores.topk(1).indices, scores)] * self.num_routed
        return ProbeAnswer(log_probs_of(tokens) + offset, torch.float32, routes)

    def probe_limits(self) -> ProbeLimits:
        return self.limits

    def attention(self, positions: Sequence[int] = ()) -> Layers:
        return self.layers

    def config_reads(self) -> Reads:
        return self.reads


class ProbedTraining(Readable, FakeTraining):
    """A trainer with a forward pass.

    offset: added to the log-probabilities.
    is_resident: True if the parameters were resident during the last probe.
    """

    limits = ProbeLimits(max_length=21, multiple=4, vocab_size=50)  # allows 20 tokens
    offset = 0.0
    is_resident = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.model = torch.nn.Module()
        self.model.p = 0.25
        self.fingerprint = Fingerprint([self.model])

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        self.script.reach("trainer computes")
        self.guard(["param"])
        torch.rand(3)  # a forward pass with dropout would advance the generator
        self.is_resident = bool(self.param.any())
        return self.answer(tokens, self.offset)

    def computed_settings(self) -> HfConfig:
        return {"rms_norm_eps": 1e-5, "hidden_size": 8, "glu_linear_offset": 1.0}


class ProbedInference(Readable, FakeInference):
    """An engine that computes log-probabilities."""

    limits = ProbeLimits(max_length=63, vocab_size=40)

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        self.script.reach("vLLM computes")
        self.probed_tokens = tokens
        return self.answer(tokens)

    def computed_settings(self) -> HfConfig:
        return {"rms_norm_eps": 1e-6, "hidden_size": 8, "vocab_size": 40}


class ProbedRig(Rig):
    """A rank with two sides that can be probed."""

    training: ProbedTraining
    inference: ProbedInference

    def __init__(
        self,
        limits: ProbeLimits = ProbedTraining.limits,
        layers: Layers = ProbedTraining.layers,
        served: Layers = ProbedTraining.layers,
        reads: tuple[Reads, Reads] = ({}, {}),
        is_elastic: bool = False,
        **settings: object,
    ) -> None:
        super().__init__(build=False, **settings)
        self.training = ProbedTraining(
            self.script, self.job.rank, self.job.world_size, elastic=is_elastic
        )
        self.training.limits = limits
        self.training.layers = layers
        self.inference = ProbedInference(self.script, self.job.rank)
        self.inference.layers = served
        self.training.reads, self.inference.reads = reads
        self.offloader = type(self.offloader)(self.script, self.training)
        self.build()

    def num_probed(self) -> int:
        """Return how often both sides were probed since the last call; asserts equal counts."""
        calls = self.script.take()
        assert calls.count("trainer computes") == calls.count("vLLM computes")
        return calls.count("vLLM computes")


@pytest.fixture
def probed(job: None) -> ProbedRig:
    return ProbedRig()


@pytest.mark.parametrize(
    ("when", "expected"),
    [("first", [1, 0, 0]), ("always", [1, 1, 1]), ("exact", [1, 1, 1]), ("off", [0, 0, 0])],
)
def test_the_check_runs_when_it_is_due(job: None, when: str, expected: list[int]) -> None:
    rig = ProbedRig(check_compute=when)
    counts = []
    has_seconds = []
    for before in (TRAIN, FORWARD, IDLE):
        rig.manager.enter(before)
        report = rig.manager.enter(INFER)
        counts.append(rig.num_probed())
        has_seconds.append("compute" in report.seconds_by_phase)
        rig.assert_is(INFER)
    assert counts == expected
    assert has_seconds == [bool(count) for count in expected]


@pytest.mark.parametrize(
    ("when", "refusal", "expected"),
    [
        ("first", "", [1, 0, 1, 0, 0]),
        ("always", "", [1, 1, 1, 1, 1]),
        ("off", "", [0, 0, 0, 0, 0]),
        ("first", "it is split", [0, 0, "function-may-differ", 0, 0]),
    ],
)
def test_a_changed_function_is_compared_again(
    job: None, monkeypatch: pytest.MonkeyPatch, when: str, refusal: str, expected: list[object]
) -> None:
    """The model changes before the third switch, and is restored if it cannot be compared.

    It is walked only if a difference would have an effect.
    """
    rig = ProbedRig(limits=replace(ProbedTraining.limits, refusal=refusal), check_compute=when)
    walk = Mock(wraps=rig.training.fingerprint.differences)
    monkeypatch.setattr(rig.training.fingerprint, "differences", walk)
    counts: list[object] = []
    for switch in range(5):
        rig.manager.enter(TRAIN)
        if switch == 2:
            rig.training.model.p = 0.5
        try:
            rig.manager.enter(INFER)
            counts.append(rig.num_probed())
        except ComputationError as error:
            counts.append(error.code)
            rig.assert_is(TRAIN)
            rig.training.model.p = 0.25
    assert counts == expected
    assert walk.called == (when == "first")


def test_attributes_are_restored_if_one_cannot_be_set() -> None:
    """`p` of the last owner has no setter."""
    module = torch.nn.Module()
    module.p = 0.25
    without = torch.nn.Module()
    fixed = type("Fixed", (), {"p": property(lambda self: 0.5)})()
    with pytest.raises(AttributeError), attributes_set([module, without, fixed], p=1.0):
        pass
    assert (module.p, hasattr(without, "p")) == (0.25, False)


@pytest.mark.parametrize("between", [[INFER], [IDLE, INFER], [INFER, IDLE, INFER]], ids=len)
@pytest.mark.parametrize(
    ("refusal", "values", "expected"),
    [
        ("", [0.0, 0.0, 0.3, 0.5], [1, 0, 1, 0]),
        ("", [0.002, 0.003, 0.3, 0.3], [1, 0, 1, 0]),  # too small to be noticed at first
        ("splits sequences", [0.0, 0.0, 0.3, 0.5], [0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
def test_a_bias_that_has_grown_is_compared_again(
    job: None,
    kind: str,
    refusal: str,
    values: list[float],
    expected: list[int],
    between: list[State],
) -> None:
    """vLLM may ignore the bias. Its growth is accepted where nothing can be compared.

    The bias leaves the device with the parameters, and is not read there.
    """
    rig = ProbedRig(limits=replace(ProbedTraining.limits, refusal=refusal), is_elastic=True)
    bias = rig.training.param[:3]
    bias.zero_()
    if kind == "buffer":
        rig.training.model.register_buffer("bias", bias)
    else:
        rig.training.model.bias = torch.nn.Parameter(bias, requires_grad=kind == "trained")
    rig.training.fingerprint.renew()
    counts = []
    for value in values:
        rig.manager.enter(TRAIN)
        bias[1] = value
        for state in between:
            rig.manager.enter(state)
        counts.append(rig.num_probed())
    assert counts == ([expected[0], 0, 0, 0] if kind == "trained" else expected)


@pytest.mark.parametrize("num_routed", [(1, 0), (0, 1), (1, 1), (0, 0)])
def test_experts_that_one_side_alone_returns_are_logged_once(
    job: None, caplog: pytest.LogCaptureFixture, num_routed: tuple[int, int]
) -> None:
    rig = ProbedRig(check_compute="always")
    rig.training.num_routed, rig.inference.num_routed = num_routed
    for state in (INFER, TRAIN, INFER):
        rig.manager.enter(state)
    assert caplog.text.count("a side does not return them") == (num_routed[0] != num_routed[1])


def test_the_trainer_computes_first_and_vllm_last(probed: ProbedRig) -> None:
    probed.manager.enter(INFER)
    calls = probed.script.take()
    assert calls[0] == "trainer computes"
    assert calls[-4:] == ["wake", "reset", "vLLM computes", "reset"]  # clears the probe's tokens


@pytest.mark.parametrize("is_left", [False, True])
def test_an_interrupt_while_the_trainer_computes_leaves_it_guarded(
    job: None, is_left: bool
) -> None:
    """True for `is_left` also covers an interrupt before the switch clears the flag."""
    rig = ProbedRig(check_compute="always")
    rig.script.arm("trainer computes", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.manager.enter(INFER)
    rig.manager._check.is_probing = is_left
    with pytest.raises(StateError):
        rig.training.guard(KINDS)
    rig.manager.enter(IDLE)
    with pytest.raises(StateError):
        rig.training.guard(["param"])
    rig.manager.enter(INFER)
    assert rig.training.is_resident


def test_random_generators_are_not_advanced(probed: ProbedRig) -> None:
    before = torch.get_rng_state()
    probed.manager.enter(INFER)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_suit_both_sides_and_are_deterministic(probed: ProbedRig) -> None:
    probed.manager.enter(INFER)
    tokens = probed.inference.probed_tokens
    assert tokens.shape == (NUM_ROWS, 20)
    assert tokens.max() < 40
    _, again = tokens_within([probed.training.limits, probed.inference.limits])
    assert again is not None
    assert torch.equal(tokens, again)
    _, longest = tokens_within([ProbeLimits(), ProbeLimits()])
    assert longest is not None
    assert longest.shape == (NUM_ROWS, LENGTH)


LAYERS = {0: Attention(0.5, window=20), 1: Attention(0.5, window=20, softcap=30.0)}
WINDOW = "in layers 0 to 1, the sliding window is 20 tokens for the trainer and none for vLLM"
CAP = "in layer 1, the cap of attention scores is 30 for the trainer and none for vLLM"


def test_layers_that_differ_beyond_the_probe_are_refused_at_set_up(job: None) -> None:
    for limits, differences in (
        (ProbedTraining.limits, [WINDOW, CAP]),  # a probe of 20 tokens does not leave the window
        (ProbeLimits("the trainer splits sequences"), [CAP]),
    ):
        layers = LAYERS if differences[0] == WINDOW else {1: Attention(0.5, softcap=30.0)}
        with refused(ComputationError, "attention-differs", *differences, "Make the model"):
            ProbedRig(limits, layers)
    ProbedRig(layers={0: Attention(0.5, window=22), 1: Attention(0.5)})  # masks none of 21 tokens
    ProbedRig(layers=LAYERS, check_compute="off")


def test_layers_that_differ_within_the_probe_are_causes(job: None) -> None:
    """A run that agrees is not overruled; if it does not, the error names them."""
    limits = ProbeLimits(max_length=200)
    rig = ProbedRig(limits, {0: LAYERS[1]}, {0: Attention(0.5, window=20)})
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig = ProbedRig(limits, {0: LAYERS[1]}, {0: Attention(0.5, window=20)})
    rig.training.offset = 0.5
    with refused(ComputationError, "log-probabilities-differ", CAP.replace("layer 1", "layer 0")):
        rig.manager.enter(INFER)


READ = Read("Attention.forward in a.module", "8.0", is_usual=False, is_number=True)


@pytest.mark.parametrize(
    ("key", "read", "is_refused"),
    [
        ("clip_qkv", READ, True),
        ("clip_qkv", replace(READ, is_usual=True), False),
        ("vision_config.clip_qkv", READ, True),
        ("score_func", replace(READ, value="'sigmoid'", is_number=False), False),
        ("num_experts", READ, False),
        ("attention_dropout", READ, False),
        ("sliding_window", READ, False),
        ("rope_parameters.factor", READ, False),
        ("rope_parameters.llama_4_scaling_beta", READ, False),  # there is no original length
    ],
)
@pytest.mark.parametrize(
    ("side", "code"), [(0, "read-by-trainer-alone"), (1, "read-by-vllm-alone")]
)
def test_limits_that_one_side_alone_reads_are_refused(
    job: None, key: str, read: Read, is_refused: bool, side: int, code: str
) -> None:
    alone = {key: read}
    reads = (alone, {}) if side == 0 else ({}, alone)
    ProbedRig(reads=(alone, alone))
    if not is_refused:
        ProbedRig(reads=reads)
        return
    with violated(ConfigError, (key, code)):
        ProbedRig(reads=reads)


class UnreadableLayers(ProbedTraining):
    attention = None  # type: ignore[assignment]


def test_unreadable_layers_do_not_prevent_the_check(
    probed: ProbedRig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = UnreadableLayers(probed.script, 0, 1, elastic=False)
    computation = LogprobCheck(trainer, probed.inference, probed.job, "first")
    assert computation.is_due
    assert "the attention of layers 0 to 1 is not compared" in caplog.text


class Reference:
    """transformers' class of the config, which answers instead of engines that cannot."""

    limits = ProbeLimits()
    probe_limits = ProbedInference.probe_limits
    computed_settings = ProbedInference.computed_settings

    def probe(self, tokens: torch.Tensor) -> ProbeAnswer:
        return ProbeAnswer(log_probs_of(tokens), torch.float32)


def test_servers_that_join_later_are_compared_with_the_trainer(probed: ProbedRig) -> None:
    """The comparison with transformers' class, and causes of differences, end with the servers
    before.
    """
    source = ConfigModel(Reference, is_needed=True)  # type: ignore[arg-type]
    comparison = ServerComparison(probed.training, probed.job, "first", source)
    scaled = grouped({0: Attention(2.0)})
    for refusal, layers, causes in (("quantised", (), 0), ("", scaled, 1), ("", (), 0)):
        worker = Description(ProbeLimits(refusal, max_length=63), layers)
        comparison.join([ServerDescription(workers=[worker], settings={})])
        assert comparison.is_due
        assert comparison.asks_engines is not bool(refusal)
        assert len(comparison._causes) == causes


@pytest.mark.parametrize(
    ("windows", "most", "length"),
    [
        ([100], None, LENGTH + 100),
        ([100, 16], None, LENGTH + 100),
        ([100, 4096], None, LENGTH + 100),
        ([4096], None, LENGTH),
        ([LONGEST], None, LENGTH),
        ([100], 127, LENGTH),
        ([50], 127, LENGTH + 50),
    ],
)
def test_tokens_reach_beyond_windows_within_limits(
    windows: list[int], most: int | None, length: int
) -> None:
    _, tokens = tokens_within([ProbeLimits(max_length=most)], windows)
    assert tokens is not None
    assert tokens.shape == (NUM_ROWS, length)


def test_a_difference_at_the_end_of_long_sequences_is_an_error() -> None:
    gap = answers(0.0, torch.float32)
    long = Gap(
        torch.arange(3 * LENGTH)[None],
        ProbeAnswer(gap.trained.log_probs.repeat(1, 5)[:, : 3 * LENGTH - 1], torch.float32),
        ProbeAnswer(gap.trained.log_probs.repeat(1, 5)[:, : 3 * LENGTH - 1].clone(), torch.float32),
    )
    assert long.is_rounding
    long.served.log_probs[0, -LENGTH:] += 1.0
    assert not long.is_rounding


def test_a_difference_fails_the_switch_and_names_numbers_and_settings(probed: ProbedRig) -> None:
    probed.training.offset = 0.5
    for _ in range(2):  # a failed check runs again
        with pytest.raises(ComputationError) as caught:
            probed.manager.enter(INFER)
        probed.assert_is(TRAIN)
    text = str(caught.value)
    assert "38 tokens are 0.5 nats apart (quantile 0.999)" in text
    at = probed.inference.probed_tokens[0, 1].item()
    assert f"token {at} at position 1 of sequence 0, {-2.5 - at % 7:.4f} by the trainer" in text
    assert f"and {-3 - at % 7:.4f} by vLLM" in text
    assert "rms_norm_eps is 1e-05 for the trainer and 1e-06 for vLLM" in text
    assert "the trainer has glu_linear_offset 1.0" in text
    assert "hidden_size" not in text
    probed.training.offset = 0.0
    probed.enter(INFER)


def test_exact_allows_no_difference(job: None) -> None:
    rounded = ProbedRig()
    rounded.training.offset = 1e-6
    rounded.manager.enter(INFER)
    rig = ProbedRig(check_compute="exact")
    rig.manager.enter(INFER)
    rig.manager.enter(TRAIN)
    rig.training.offset = 1e-6
    with refused(ComputationError, "log-probabilities-unequal", "38 of 38", "nats", "for CPUs"):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    with refused(ComputationError, "cannot-compare", "splits sequences"):
        ProbedRig(limits=ProbeLimits("the trainer splits sequences"), check_compute="exact")


@pytest.mark.parametrize("call", ["trainer computes", "vLLM computes"])
def test_a_side_that_fails_fails_the_switch(probed: ProbedRig, call: str) -> None:
    probed.script.arm(call, GenerationError("NaN"))
    with pytest.raises(GenerationError):
        probed.manager.enter(INFER)
    probed.assert_is(TRAIN)
    probed.script.take()
    probed.manager.enter(INFER)
    assert probed.num_probed() == 1


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"refusal": "the trainer splits sequences"}, "the trainer splits sequences"),
        ({"max_length": 3}, "at most 3 tokens"),
        ({"multiple": 128}, "a multiple of 128"),
    ],
)
def test_an_impossible_check_is_logged_once(
    job: None, caplog: pytest.LogCaptureFixture, limits: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        rig = ProbedRig(limits=replace(ProbedTraining.limits, **limits))
        for state in (INFER, TRAIN, INFER):
            rig.manager.enter(state)
    assert rig.num_probed() == 0
    (line,) = [
        record.getMessage() for record in caplog.records if "is not compared" in record.getMessage()
    ]
    assert reason in line


def answers(gap: float, dtype: torch.dtype, spread: float = 1.0) -> Gap:
    """Return two answers that differ by `gap` at every token."""
    tokens = torch.arange(40)[None]
    values = torch.linspace(-1, 1, 39)[None]
    values *= spread / values.std()
    return Gap(tokens, ProbeAnswer(values, torch.float32), ProbeAnswer(values + gap, dtype))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_tolerance_depends_on_the_coarser_dtype_and_the_spread(dtype: torch.dtype) -> None:
    rounding = ROUNDING[dtype]
    least = rounding.least_spread
    assert answers(0.99 * rounding.share, dtype).is_rounding
    assert not answers(1.01 * rounding.share, dtype).is_rounding
    assert answers(2.9 * rounding.share, dtype, spread=3.0).is_rounding
    assert answers(0.99 * least * rounding.share, dtype, spread=0.0).is_rounding
    assert not answers(float("nan"), dtype).is_rounding


def test_in_float32_one_token_may_differ() -> None:
    """Another router moves many tokens, and none of them by rounding."""
    gap = answers(0.0, torch.float32)
    gap.served.log_probs[0, 5] += 2.0
    assert gap.is_rounding
    gap.served.log_probs[0, 7] += 0.002
    assert not gap.is_rounding


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_one_nan_is_not_rounding(dtype: torch.dtype) -> None:
    gap = answers(0.0, dtype)
    gap.served.log_probs[0, 5] = torch.nan
    assert not gap.is_rounding


def test_expert_routing_flips_count_as_rounding() -> None:
    gap = answers(0.0, torch.bfloat16)
    gap.served.log_probs[0, ::3] += 2.0
    assert gap.is_rounding
    gap.served.log_probs[0, 1::3] += 2.0
    assert not gap.is_rounding
