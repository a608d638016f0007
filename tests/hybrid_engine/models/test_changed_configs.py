"""Single changes of config.json: refused, or computed the same by vLLM and transformers.

For every file, the training model and vLLM's model must be one function. Each change is tried on
both sides like in a job:

    trainer    load_config, name table, transformers' model with random weights, its tensors
               against the table
    vLLM       check_settings, construction with recorded reads, the tensors its loader reads
               and fills, live layers
    tokens     log-probabilities of 200 tokens with the same weights, more than `check_compute`
               compares

vLLM's own model class computes without an engine; only attention is computed here, with the scale,
window and cap of each layer's implementation. A sample of the accepted changes is also tried in
real engines.

    make test-long PYTEST_ARGS="-s -k 'computed_differently and qwen3'"
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker
from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm import arguments, internals, isolation
from hybrid_engine.backends.vllm.cpu.cpu_worker import _on_rows
from hybrid_engine.backends.vllm.live_layers import live_attention, require_positions
from hybrid_engine.backends.vllm.positions import (
    _at_position,
    _forget_layers,
    _rotary_embeddings_kept,
)
from hybrid_engine.backends.vllm.process_state import process_settings_kept
from hybrid_engine.backends.vllm.weights.traced_model import trace_without_memory
from hybrid_engine.compute_check.attention import LENGTH, Attention, attention_differences, grouped
from hybrid_engine.compute_check.gap import Gap
from hybrid_engine.compute_check.probes import ProbeAnswer
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import ComputationError, HybridEngineError, PlanError
from hybrid_engine.models import table_for
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import torch_defaults
from tests.harness.launch import Ranks
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.config_changes import Change, changes_of, wide_config
from tests.zoo.families import FAMILIES, write_config
from tests.zoo.tiny_models import randomise

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NUM_TOKENS = 200
TOLERANCE = 1e-3  # nats; rounding of float32 makes differences below 1e-4
NUM_WITH_ENGINES = 2  # changes of each family that are tried in real engines
SAME = "same"
BOTH = "both changed"
ONE_SIDE = "one side"


@dataclass(frozen=True)
class Verdict:
    """Result of a change.

    Attributes:
        kind: SAME or BOTH if the two sides compute one function, ONE_SIDE if not, or the side
            that refused the change.
        text: the refusal, or the size of the difference.
    """

    change: Change
    kind: str
    text: str = ""


@dataclass
class Trial:
    """A change on its way through both sides.

    Attributes:
        refusal: side and error; None while the change is accepted.
        attention: of the trainer's layers.
        weights: canonical tensors.
        trained, served: log-probabilities [tokens - 1] by transformers and by vLLM.
    """

    change: Change
    refusal: Verdict | None = None
    config: HybridConfig | None = None
    attention: Mapping[int, Attention] = field(default_factory=dict)
    weights: Batch = field(default_factory=dict)
    trained: torch.Tensor = field(default_factory=lambda: torch.full((NUM_TOKENS - 1,), torch.nan))
    served: torch.Tensor = field(default_factory=lambda: torch.full((NUM_TOKENS - 1,), torch.nan))

    @contextlib.contextmanager
    def recording_errors(self, side: str) -> Iterator[None]:
        """Record any error as a refusal: an error is not a silent difference."""
        try:
            yield
        except Exception as error:
            kind = (
                f"refused by {side}" if isinstance(error, HybridEngineError) else f"fails in {side}"
            )
            self.refusal = Verdict(self.change, kind, f"{type(error).__name__}: {error}")

    def verdict(self, unchanged: torch.Tensor) -> Verdict:
        """Compare both sides; `unchanged` holds log-probabilities without any change."""
        if self.refusal is not None:
            return self.refusal
        if not _differ(self.trained, self.served):
            return Verdict(self.change, BOTH if _differ(self.trained, unchanged) else SAME)
        sides = {"trainer": self.trained, "vLLM": self.served}
        changed = [name for name, side in sides.items() if _differ(side, unchanged)]
        gap = (self.trained - self.served).abs()
        first = 1 + int((~(gap <= TOLERANCE)).nonzero()[0])
        answers = [ProbeAnswer(side[None, : LENGTH - 1], side.dtype) for side in sides.values()]
        probe = Gap(_tokens()[None, :LENGTH], *answers)
        seen = "not seen" if probe.is_rounding else "seen"
        text = (
            f"{gap.max():.3g} nats, from token {first} on, {seen} by the probe; "
            f"changed: {', '.join(changed)}"
        )
        return Verdict(self.change, ONE_SIDE, text)


def sweep(root: str, family: str) -> list[Verdict]:
    """Try the unchanged config, then all changes, on one rank."""
    dist.init_process_group("gloo")
    trials = [Trial({}), *map(Trial, changes_of(family))]
    with contextlib.closing(Job.join(60)) as job:
        for number, trial in enumerate(trials):
            with trial.recording_errors("trainer"):
                _train(trial, family, Path(root, str(number)))
        for trial in trials:
            if trial.refusal is None:
                with trial.recording_errors("vLLM"):
                    _serve(trial, job)
    return [trial.verdict(trials[0].trained) for trial in trials]


def gap_of_engines(root: str, family: str, change: Change) -> float | str:
    """Return the largest difference in nats between a worker and transformers, or the refusal."""
    from safetensors.torch import save_file

    trial = Trial(change)
    directory = Path(root)
    _train(trial, family, directory)
    save_file(
        {name: tensor.contiguous() for name, tensor in trial.weights.items()},
        directory / "model.safetensors",
    )
    try:
        with (
            ActorHybridWorker(_job_config(directory, random_weights=False)) as worker,
            worker.rollout_context(),
        ):
            (served,) = worker.inference.prompt_logprobs([_tokens().tolist()])
    except HybridEngineError as error:
        return str(error)
    return (trial.trained - served).abs().max().item()


def _job_config(directory: Path, *, random_weights: bool) -> HybridConfig:
    values = {
        **{"model": str(directory), "random_weights": random_weights},
        "actor_config": {
            "params_dtype": "float32",
            "seq_length": NUM_TOKENS,
            "micro_batch_size": 1,
            "fsdp": {},
        },
        # vLLM adds a token to scored prompts.
        "generate_config": {"max_model_len": NUM_TOKENS + 1, "max_num_seqs": 8, "kv_cache_mb": 16},
    }
    return load_config(values, 1)


def _train(trial: Trial, family: str, directory: Path) -> None:
    """Compute with transformers, by the unsharded model of trainer/fsdp/actor.py."""
    from transformers import AutoModelForCausalLM

    from hybrid_engine.backends.fsdp.attention import live_attention as of_transformers
    from hybrid_engine.backends.fsdp.attention import recorded, settings_left_out
    from hybrid_engine.backends.fsdp.internals import revert_weight_conversion
    from hybrid_engine.backends.fsdp.model_checks import set_epsilon_of_norms
    from hybrid_engine.backends.fsdp.names import model_of_config, packed_model

    write_config(directory, wide_config(family) | trial.change)
    trial.config = _job_config(directory, random_weights=True)
    table = table_for(trial.config.hf_config())
    # First without memory, because models of another type may have the sizes of their class.
    bare = model_of_config(directory, dtype=torch.float32)
    packed_model(bare, bare.state_dict(keep_vars=True), table)
    model = AutoModelForCausalLM.from_config(bare.config, dtype=torch.float32).eval()
    if settings_left_out(bare, bare.config._attn_implementation):
        model.set_attn_implementation("eager")
    set_epsilon_of_norms(model)
    randomise(model, family)
    trial.attention = of_transformers(model, recorded(model).calls)
    with torch.no_grad():
        trial.trained = _log_probs(model(_tokens()[None], use_cache=False).logits[0])
        saved = revert_weight_conversion(model, model.state_dict())
    trial.weights = {name: saved[name] for name in table.shapes if name in saved}


def _serve(trial: Trial, job: Job) -> None:
    """Compute with vLLM's model, constructed like in `layout_of_position`, but with memory."""
    from vllm.forward_context import set_forward_context

    assert trial.config is not None
    settings = inference_settings(trial.config, 1)
    table = table_for(trial.config.hf_config())
    with contextlib.ExitStack() as undo:
        for context in (torch_defaults(), process_settings_kept(), _rotary_embeddings_kept()):
            undo.enter_context(context)
        device_type = arguments.check_settings(settings, job)
        config = arguments.engine_config(
            settings, 0, device_type, load_format="dummy", enforce_eager=True
        )
        undo.callback(gc.collect)
        undo.callback(isolation.destroy_groups)
        undo.enter_context(_at_position(job, settings, config))
        undo.enter_context(internals.ROTATE.replaced(_on_rows))
        reads = arguments.reads_of(config)
        with (
            reads.checked(),
            internals.DEFAULT_DTYPE(config.model_config.dtype),
            torch.device("cpu"),
        ):
            model = internals.INITIALIZE_MODEL(vllm_config=config, model_config=config.model_config)
        undo.callback(_forget_layers, model)
        reads.require_known(model)
        require_positions(model, config.model_config.max_model_len)
        reads.stop()
        layers = config.compilation_config.static_forward_context
        layout = trace_without_memory(
            model, table.shapes, dict.fromkeys(table.shapes, torch.float32), 0
        )
        # The checks of the planner and of compute_check.
        unread = trial.weights.keys() - {shard.region.tensor for shard in layout.shards}
        if unread:
            raise PlanError(
                [
                    f"{name}: a training parameter that no inference rank reads"
                    for name in sorted(unread)
                ]
            )
        sides = (grouped(trial.attention), grouped(live_attention(model, layers)))
        unreached, _ = attention_differences(*sides, NUM_TOKENS, LENGTH)
        if unreached:
            raise ComputationError("; ".join(unreached))
        model.load_weights(trial.weights.items())
        support.process(model, config)
        for layer in layers.values():
            if hasattr(layer, "impl"):
                layer.forward = partial(
                    _latent_attention if hasattr(layer, "kv_b_proj") else _attention, layer
                )
        undo.enter_context(set_forward_context(None, config, num_tokens=NUM_TOKENS))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            hidden = model(_tokens(), torch.arange(NUM_TOKENS), None)
            trial.served = _log_probs(model.compute_logits(hidden)[:, : table.dims.vocab_size])


def _attention(layer: Any, *tensors: torch.Tensor, **_: Any) -> torch.Tensor:
    """Replace vLLM's kernel; `tensors`: query, key and value [tokens, heads * size]."""
    impl = layer.impl
    sizes = (layer.head_size, layer.head_size, layer.head_size_v)
    assert (layer.attn_type, impl.alibi_slopes, impl.sinks) == ("decoder", None, None)
    query, key, value = (
        tensor.unflatten(1, (-1, size)) for tensor, size in zip(tensors, sizes, strict=True)
    )
    return _attend(query, key, value, impl.scale, impl.sliding_window, impl.logits_soft_cap)


def _latent_attention(
    layer: Any, query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Replace latent attention; `rotated` is the part of the keys that all heads share."""
    heads = layer.kv_b_proj(latent)[0].unflatten(1, (layer.num_heads, -1))
    plain, value = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    key = torch.cat([plain, rotated.expand(-1, layer.num_heads, -1)], dim=-1)
    return _attend(query, key, value, layer.impl.scale, layer.sliding_window, None)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Causal attention of [tokens, heads, size] with shared keys; [tokens, heads * size]."""
    num_sharing = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(num_sharing, dim=1)
    value = value.repeat_interleave(num_sharing, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(NUM_TOKENS)[:, None] - torch.arange(NUM_TOKENS)
    is_visible = (distance >= 0) & (
        distance < (window if window is not None and window > 0 else NUM_TOKENS)
    )
    shares = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    # Kernels do not read invisible values, and 0 * NaN is NaN.
    return torch.einsum("hqk,khd->qhd", shares, value.nan_to_num()).flatten(1)


def _tokens() -> torch.Tensor:
    """Return tokens within the vocabulary of every change."""
    return torch.randint(60, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, _tokens()[1:, None])[:, 0]


def _differ(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two functions differ; NaN counts as a difference."""
    return not bool((left - right).abs().max() <= TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_change_is_computed_differently(
    engines: Ranks, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((unchanged, *verdicts),) = engines.launch(sweep, 1, str(tmp_path), family, timeout=1500)
    silent = [
        f"{verdict.change}: {verdict.text}" for verdict in verdicts if verdict.kind == ONE_SIDE
    ]
    with capsys.disabled():
        print(
            f"\n{family}: {len(verdicts)} changes, "
            f"{dict(Counter(verdict.kind for verdict in verdicts))}"
        )
        print("\n    ".join([f"silent differences: {len(silent)}", *silent]))
    assert unchanged.kind == SAME
    assert len(verdicts) >= 100
    assert silent == []
    accepted = [verdict for verdict in verdicts if verdict.kind in (SAME, BOTH)]
    for number, verdict in enumerate(random.Random(family).sample(accepted, NUM_WITH_ENGINES)):
        (gap,) = engines.launch(
            gap_of_engines, 1, str(tmp_path / f"engines {number}"), family, verdict.change
        )
        assert isinstance(gap, float), f"{verdict}, by real engines {gap}"
        assert gap <= TOLERANCE, verdict
