"""`HybridEngine(model=...)`: a transformers model and the caller's training loop, on two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid_engine import Completion, HybridEngine, ReshardReport, Sampling
from hybrid_engine.assembly import _model_directory, _tokenizer_directory
from hybrid_engine.backends.vllm.prompts import ModelTokenizer
from hybrid_engine.errors import ArgumentError, ConfigError, ModelError, StateError
from hybrid_engine.switch.states import State
from tests.harness.errors import failing
from tests.harness.imports import left_out
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo import sharded_models
from tests.zoo.abilities import stored_and_loaded
from tests.zoo.families import read_config, served_config, write_config
from tests.zoo.tokenizers import save_numbers

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
SEED_ROLLOUT = {
    "tp_size": 2,
    "pp_size": 1,
    "dp_type": "none",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "kv_cache_mb": 16,
}
SEED_TRAIN = {"fsdp_config": {"mixed_precision": "amp", "sharding_strategy": "FULL_SHARD"}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights and a tokenizer of numbers."""
    path = write_config(
        tmp_path_factory.mktemp("model"), served_config("qwen2", torch_dtype="float32")
    )
    config = (path / "config.json").read_text()
    sharded_models.from_config(path).save_pretrained(path)
    (path / "config.json").write_text(config)
    save_numbers(path)
    return path


@on_engines(2)
@left_out("hybrid_engine.trainer")  # the loop is the user's
def test_the_seed_learns_what_it_generated(directory: Path) -> None:
    """Run the flow of the source document: generate, train on the completions, repeat."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = HybridEngine(
        model=model,
        rollout_config=SEED_ROLLOUT,
        train_config=SEED_TRAIN,
        enable_reshard=True,
        compress_reshard=True,
        compression_dtype=torch.bfloat16,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lines: list[str] = []

    @engine.on_reshard_start
    def log_reshard_start() -> None:  # hooks can omit the argument
        lines.append("resharding begins")

    @engine.on_reshard_end
    def log_reshard_end(report: ReshardReport) -> None:
        lines.append(report.direction)

    prompts = torch.arange(2, 18).reshape(2, 8)
    losses = []
    responses = []
    for _ in range(3):
        with engine.rollout_context(), engine.rollout_context():  # nested contexts switch once
            responses.append(engine.generate(prompts, GREEDY))
        assert engine.sharding.last_report is not None
        assert engine.sharding.last_report.bytes_received == engine.sharding.last_report.bytes_least
        with engine.train_context():
            optimizer.zero_grad()
            loss = model(input_ids=responses[0], labels=responses[0]).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert lines == 3 * ["resharding begins", "train->infer", "resharding begins", "infer->train"]
    assert responses[0].shape == (2, 12)
    assert torch.equal(responses[0][:, :8], prompts)
    assert engine.job.agreement.is_same(responses[0].flatten().tolist(), "responses")
    assert stored_and_loaded(engine, model)
    assert ModelTokenizer(str(engine.config.model)).encode(["5 6"]) == [[5, 6]]
    engine.shutdown()


@pytest.fixture(scope="module")
def rollout(directory: Path) -> Values:
    return {"model": str(directory), "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}


PADDED = torch.tensor([[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
IDS = [[5, 6, 7], [3, 4, 5, 6, 7]]


def sharded(directory: Path) -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return sharded_models.shard(sharded_models.from_config(directory))


@contextmanager
def in_rollout(rollout: Values) -> Iterator[HybridEngine]:
    """Generate with a sharded model."""
    model = sharded(Path(rollout["model"]))
    with HybridEngine(model=model, rollout_config=rollout) as engine, engine.rollout_context():
        yield engine


def answers(engine: HybridEngine, prompts: Any, **settings: Any) -> list[Completion]:
    return [completion for (completion,) in engine.generate(prompts, GREEDY, **settings)]


@on_engines(2)
def test_completions_have_the_form_of_the_prompts(rollout: Values) -> None:
    with in_rollout(rollout) as engine:
        ids = [list(completion.token_ids) for completion in answers(engine, IDS)]
        rows = engine.generate(PADDED, GREEDY, MASK)
        assert rows[:, :5].tolist() == PADDED.tolist()
        assert rows[:, 5:].tolist() == ids
        spelled = ["".join(map(str, tokens)) for tokens in ids]  # tokens are numbers without spaces
        texts = engine.generate(["5 6 7", "3 4 5 6 7"], GREEDY)
        assert [text.replace(" ", "") for (text,) in texts] == spelled
        # Chats are completed after their template.
        chat: Any = [{"role": "user", "content": "5 6"}]
        assert engine.generate([chat], GREEDY) == [[answers(engine, [[7, 5, 6, 8]])[0].text]]
        chat += [{"role": "assistant", "content": "3"}]
        continued = engine.generate([chat], GREEDY, continue_final_message=True)
        assert continued == [[answers(engine, [[7, 5, 6, 7, 3]])[0].text]]


@on_engines(2)
def test_the_engine_goes_on_after_an_error_of_the_caller(rollout: Values) -> None:
    model = sharded(Path(rollout["model"]))
    with HybridEngine(model=model, rollout_config=rollout) as engine:
        with pytest.raises(StateError):
            engine.generate(PADDED, GREEDY, MASK)
        with engine.rollout_context():
            before = engine.generate(PADDED, GREEDY, MASK)
            with pytest.raises(StateError):
                model(PADDED)
        with pytest.raises(RuntimeError, match="in the caller's loop"), engine.train_context():
            raise RuntimeError("in the caller's loop")
        with engine.rollout_context():
            assert torch.equal(engine.generate(PADDED, GREEDY, MASK), before)
    model(PADDED)  # works again


@on_engines(2)
def test_requests_can_use_a_tokenizer_in_vllm(rollout: Values) -> None:
    """vLLM has a tokenizer only during requests with parameters that need one."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    with in_rollout(rollout) as engine:

        def first(prompt: Sequence[int] = (3, 4, 5, 6, 7), **values: Any) -> Completion:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **values)
            ((completion,),) = engine.generate([prompt], params)
            return completion

        free = first(logprobs=3)
        assert free.prompt_token_ids == (3, 4, 5, 6, 7)
        assert free.text.replace(" ", "") == "".join(map(str, free.token_ids))
        assert [len(position) for position in free.top_logprobs] == [3, 3, 3, 3]
        for token, logprob, position in zip(
            free.token_ids, free.logprobs, free.top_logprobs, strict=True
        ):
            assert position[token] == logprob == max(position.values()), "greedy"
        assert (free.prompt_logprobs, free.prompt_top_logprobs) == ((), ())

        scored = first(prompt_logprobs=2)
        by_itself = engine.inference.prompt_logprobs([[3, 4, 5, 6, 7]])[0].tolist()
        assert scored.prompt_logprobs == pytest.approx(by_itself, abs=1e-6)
        tokens = scored.prompt_token_ids[1:]
        for token, logprob, top in zip(
            tokens, scored.prompt_logprobs, scored.prompt_top_logprobs, strict=True
        ):
            assert top[token] == logprob
            assert len(top) in (2, 3)

        one, two, *_ = map(str, free.token_ids)
        stopped = first(stop=[two])
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", two)
        assert stopped.token_ids == free.token_ids[:2]
        assert stopped.text.strip() == one
        (by_ours,) = engine.generate([[3, 4, 5, 6, 7]], replace(GREEDY, stop=two))[0]
        assert by_ours == replace(stopped, top_logprobs=(), logprobs=by_ours.logprobs)
        assert 1 in answers(engine, [[5, 6, 7]])[0].token_ids
        assert 1 not in first((5, 6, 7), bad_words=["1"]).token_ids
        choice = StructuredOutputsParams(choice=["57", "99"])
        assert first(structured_outputs=choice, stop_token_ids=[1]).text in choice.choice
        assert first(logprobs=3) == free
        (unlimited,) = engine.generate([[5] * 60], replace(GREEDY, max_tokens=None))[0]
        assert len(unlimited.token_ids) == 4, "max_model_len minus 60 tokens"
        with failing(ArgumentError, "refused-by-vllm", on=0):
            first(stop_token_ids=[5000])


@on_engines(2)
def test_ranks_can_have_different_prompts(rollout: Values) -> None:
    with in_rollout(rollout) as engine:
        expected = [completion.token_ids for completion in answers(engine, IDS)]
        rank = engine.job.rank
        prompts = IDS if rank else []
        completions = answers(engine, prompts, data="local")
        assert [completion.token_ids for completion in completions] == expected * rank
        assert [list(completion.prompt_token_ids) for completion in completions] == prompts


@on_engines(2)
def test_different_arguments_are_refused(rollout: Values) -> None:
    from vllm import SamplingParams

    with in_rollout(rollout) as engine:
        rank = engine.job.rank
        other_length = replace(GREEDY, max_tokens=4 + rank)
        other_bias = SamplingParams(max_tokens=2, logit_bias={5 + rank: 9.0})
        of_one = "local" if rank else "global"
        for prompts, sampling, data, code, message in (
            (
                [[5 + rank]],
                GREEDY,
                "global",
                "ranks-differ",
                "the ranks differ in prompts, in sampling or in `data`",
            ),
            (
                IDS if rank else [],
                other_length,
                "local",
                "ranks-differ",
                "the ranks differ in sampling",
            ),
            (
                [[5]],
                other_bias,
                "global",
                "ranks-differ",
                "the ranks differ in prompts, in sampling",
            ),
            ([[5]], GREEDY, of_one, "ranks-differ", "the ranks differ"),
            ([[5]], GREEDY, "mine", "unknown-value", "'mine' is unknown"),
        ):
            with failing(ArgumentError, code, f"data: {message}"):
                engine.generate(prompts, sampling, data=data)  # type: ignore[arg-type]


def train_copies(engine: HybridEngine | None, model: torch.nn.Module) -> list[torch.Tensor]:
    """Train a model in DDP, with rollouts in between; return its weights."""
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        if engine is not None:
            check_rollout(engine, model)
        rows = torch.arange(2, 18).reshape(2, 8) + dist.get_rank() + step
        optimizer.zero_grad()
        wrapped(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    return list(model.parameters())


def check_rollout(engine: HybridEngine, model: torch.nn.Module) -> None:
    with engine.rollout_context():
        answer = engine.generate(torch.arange(2, 10)[None], GREEDY)
        assert engine.job.agreement.is_same(answer.flatten().tolist(), "answers")
        with pytest.raises(StateError):
            model(torch.ones(1, 2, dtype=torch.int64))
    report = engine.sharding.last_report
    assert report.tensors_verified > 0
    assert report.bytes_received == 0, "each rank has all weights"
    engine.sharding.enter(State.TRAIN)


@on_engines(2)
def test_copies_of_a_model_train_the_same_as_without_an_engine(directory: Path) -> None:
    """Each rank's vLLM holds a half of the model."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    alone = train_copies(None, sharded_models.from_config(directory))
    model = sharded_models.from_config(directory)
    with HybridEngine(
        model=model, rollout_config={**SEED_ROLLOUT, "verify": "full"}, shard=False
    ) as engine:
        trained = train_copies(engine, model)
        assert all(map(torch.equal, trained, alone))


def model_with_other_settings(path: Path) -> torch.nn.Module:
    """Return a model with the tensors of the directory's config.json, and other settings."""
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}
    return sharded_models.from_config(path, rope_parameters=rope, rms_norm_eps=0.1)


@on_engines(2)
def test_vllm_computes_the_same_as_the_live_model(directory: Path, rollout: Values) -> None:
    model = model_with_other_settings(directory)
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = (
            model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        )
    with (
        HybridEngine(model=model, rollout_config=rollout, train_config={}) as engine,
        engine.rollout_context(),
    ):
        (scored,) = engine.inference.prompt_logprobs(tokens.tolist())
    torch.testing.assert_close(scored, expected, atol=1e-4, rtol=0)


def over_one_rank(path: Path) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "shards"))["shards"]
    return fully_shard(sharded_models.from_config(path), mesh=mesh)


# name -> (arguments, part of the error)
REFUSED: Mapping[str, tuple[Values, str]] = {
    "not resharded": ({"enable_reshard": False}, "enable_reshard: False"),
    "an unknown key": ({"rollout_config": {"tp_sise": 2}}, "tp_sise: unknown key"),
    "a size twice": (
        {"rollout_config": {"tp_size": 2, "infer_tensor_parallel_size": 2}},
        r"rollout_config\.tp_size: infer_tensor_parallel_size is the same setting",
    ),
    "an unknown dp_type": (
        {"rollout_config": {"dp_type": "some"}},
        r"rollout_config\.dp_type: 'some'",
    ),
    "more ranks than there are": ({"rollout_config": {"tp_size": 4}}, "infer_tensor_parallel_size"),
    "a wrong strategy": (
        {"train_config": {"fsdp_config": {"sharding_strategy": "ZERO", "mixed_precission": "amp"}}},
        r"train_config\.fsdp_config\.sharding_strategy.*Did you mean mixed_precision\?",
    ),
    "replicas without HYBRID_SHARD": (
        {"train_config": {"fsdp_config": {"replicas": 2}}},
        r"train_config\.fsdp_config\.replicas: 2 with sharding_strategy FULL_SHARD",
    ),
    "no such files": (
        {"rollout_config": {"model": "/nowhere"}},
        r"rollout_config\.model: /nowhere is not a directory",
    ),
    "nothing narrower": (
        {"compress_reshard": True, "compression_dtype": torch.float32},
        "compression_dtype is narrower than params_dtype",
    ),
    "sharded or not": (
        {"train_config": SEED_TRAIN, "shard": False},
        "train_config: configures sharding, but shard is False",
    ),
}


@on_engines(2)
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_configurations_are_refused_on_every_rank(directory: Path, name: str) -> None:
    settings, pattern = REFUSED[name]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with failing(ConfigError, pattern=pattern):
        HybridEngine(model=sharded_models.from_config(directory), **settings)


@on_engines(2)
def test_models_sharded_otherwise_are_refused_on_every_rank(directory: Path) -> None:
    with failing(
        ModelError, "already-sharded", "the model is sharded already: leave train_config out"
    ):
        HybridEngine(model=sharded(directory), train_config=SEED_TRAIN)
    with failing(ModelError, "not-on-all-ranks", "of 2: use a mesh of all ranks"):
        HybridEngine(model=over_one_rank(directory))


def test_a_model_of_the_hub_has_its_tokenizer(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is the live model's, which can have changed since loading."""
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    shutil.copytree(directory, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = AutoConfig.from_pretrained(directory)
    config.name_or_path = "org/tiny"
    config.vocab_size = 256
    model = SimpleNamespace(config=config)
    with ExitStack() as owner:
        directory_of_engine = _model_directory(model, owner)
        assert read_config(directory_of_engine)["vocab_size"] == 256
    assert ModelTokenizer(_tokenizer_directory(model, None)).encode(["5 6"]) == [[5, 6]]
