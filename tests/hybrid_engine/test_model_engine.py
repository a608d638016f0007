"""`HybridEngine(model=...)`: a transformers model and the caller's training loop, on two ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from hybrid_engine.switch.states import State
from tests.harness.imports import left_out
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.ranks.test_agreement import refusal_of
from tests.zoo import sharded_models
from tests.zoo.abilities import stored_and_loaded
from tests.zoo.families import served_config, write_config
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


@left_out("hybrid_engine.trainer")  # the loop is the user's
def the_seed(directory: str) -> Values:
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
    def log_reshard_start() -> None:
        lines.append("resharding begins")

    @engine.on_reshard_end
    def log_reshard_end(report: ReshardReport) -> None:
        lines.append(report.direction)

    prompts = torch.arange(2, 18).reshape(2, 8)
    losses, surplus, responses = ([] for _ in range(3))
    for _ in range(3):
        with engine.rollout_context(), engine.rollout_context():  # nested contexts switch once
            responses.append(engine.generate(prompts, GREEDY))
        assert engine.sharding.last_report is not None
        surplus.append(engine.sharding.last_report.bytes_received - engine.sharding.last_report.bytes_least)
        with engine.train_context():
            optimizer.zero_grad()
            loss = model(input_ids=responses[0], labels=responses[0]).loss
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    stored = stored_and_loaded(engine, model)
    tokens = ModelTokenizer(str(engine.config.model)).encode(["5 6"])
    engine.shutdown()
    weights = [parameter.to_local().clone() for parameter in model.parameters()]
    return {
        **{"lines": lines, "losses": losses, "surplus": surplus, "responses": responses},
        **{"weights": weights, "stored": stored, "tokens": tokens},
    }


def refusals(directory: str) -> dict[str, str]:
    dist.init_process_group("gloo")
    model = sharded_models.from_config(Path(directory))
    errors = {name: refusal_of(partial(HybridEngine, model=model, **settings)) for name, settings in REFUSED.items()}
    sharded = sharded_models.shard(sharded_models.from_config(Path(directory)))
    errors["sharded twice"] = refusal_of(lambda: HybridEngine(model=sharded, train_config=SEED_TRAIN))
    errors |= {name: refusal_of(partial(HybridEngine, model=make(Path(directory)))) for name, make in ODD.items()}
    errors["gap"] = str(_gap(directory))
    return errors


def over_one_rank(path: Path) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "shards"))["shards"]
    return fully_shard(sharded_models.from_config(path), mesh=mesh)


ODD: Mapping[str, Callable[[Path], torch.nn.Module]] = {
    "over one rank": over_one_rank,
}


def forms(directory: str) -> Values:
    """Generate from all forms of prompts with a sharded model, and make calls that are refused."""
    dist.init_process_group("gloo")
    path = Path(directory)
    model = sharded_models.shard(sharded_models.from_config(path))
    engine = HybridEngine(
        model=model, rollout_config={"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}
    )
    padded = torch.tensor([[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    results = {"outside": refusal_of(lambda: engine.generate(padded, GREEDY))}
    with engine.rollout_context():
        results["ids"] = [
            [completion.token_ids for completion in completions]
            for completions in engine.generate([[5, 6, 7], [3, 4, 5, 6, 7]], GREEDY)
        ]
        results["rows"] = engine.generate(padded, GREEDY, mask)
        results["texts"] = engine.generate(["5 6 7", "3 4 5 6 7"], GREEDY)
        results["chats"] = engine.generate([[{"role": "user", "content": "5 6"}]], GREEDY)
        (results["of the template"],) = engine.generate([[7, 5, 6, 8]], GREEDY)
        continued: Any = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "3"}]
        results["continued"] = engine.generate([continued], GREEDY, continue_final_message=True)
        (results["in its middle"],) = engine.generate([[7, 5, 6, 7, 3]], GREEDY)
        results |= _with_sampling_params(engine)
        results |= _with_local_data(engine)
        results["training"] = refusal_of(lambda: model(padded))
    try:
        with engine.train_context():
            raise RuntimeError("in the caller's loop")
    except RuntimeError:
        pass
    with engine.rollout_context():
        results["after an error"] = engine.generate(padded, GREEDY, mask)
    engine.shutdown()
    model(padded)  # works again
    return results


def copies(directory: str, with_engine: bool) -> Values:
    """Train a model in DDP with or without switches; each rank's vLLM holds a half of it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharded_models.from_config(Path(directory))
    wrapped = DistributedDataParallel(model)
    results: Values = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ExitStack() as ends:
        if with_engine:
            rollout = {**SEED_ROLLOUT, "verify": "full"}
            engine = ends.enter_context(HybridEngine(model=model, rollout_config=rollout, shard=False))
        for step in range(2):
            if with_engine:
                with engine.rollout_context():
                    results[f"answer {step}"] = engine.generate(torch.arange(2, 10)[None], GREEDY)
                    results[f"misuse {step}"] = refusal_of(lambda: model(torch.ones(1, 2, dtype=torch.int64)))
                report = engine.sharding.last_report
                results[f"report {step}"] = (report.tensors_verified, report.bytes_received)
                engine.sharding.enter(State.TRAIN)
            rows = torch.arange(2, 18).reshape(2, 8) + dist.get_rank() + step
            optimizer.zero_grad()
            wrapped(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
    results["weights"] = [parameter.detach().clone() for parameter in model.parameters()]
    return results


def model_with_other_settings(path: Path) -> torch.nn.Module:
    """Return a model with the tensors of the directory's config.json, and other settings."""
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}
    return sharded_models.from_config(path, rope_parameters=rope, rms_norm_eps=0.1)


def _gap(directory: str) -> float:
    """Return the largest difference of log-probabilities between that model and its vLLM."""
    model = model_with_other_settings(Path(directory))
    tokens = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
    rollout_config = {"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}
    with HybridEngine(model=model, rollout_config=rollout_config, train_config={}) as engine, engine.rollout_context():
        (scored,) = engine.inference.prompt_logprobs(tokens.tolist())
    return float((scored - expected).abs().max())


def _with_sampling_params(engine: HybridEngine[Any]) -> Values:
    """Generate with vLLM's parameters, some of which need a tokenizer inside vLLM.

    vLLM has a tokenizer only during these requests.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def first(prompt: Sequence[int] = (3, 4, 5, 6, 7), **values: Any) -> Completion:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, **values)
        ((completion,),) = engine.generate([prompt], params)
        return completion

    free = first(logprobs=3)
    second = str(free.token_ids[1])
    choice = StructuredOutputsParams(choice=["57", "99"])
    return {
        "free": free,
        "stopped": first(stop=[second]),
        "without bad words": first((5, 6, 7), bad_words=["1"]),
        "chosen": first(structured_outputs=choice, stop_token_ids=[1]),
        "free again": first(logprobs=3),
        "unlimited": engine.generate([[5] * 60], replace(GREEDY, max_tokens=None))[0][0],
        "ours stopped": engine.generate([[3, 4, 5, 6, 7]], replace(GREEDY, stop=second))[0][0],
        "scored": first(prompt_logprobs=2),
        "scored by itself": engine.inference.prompt_logprobs([[3, 4, 5, 6, 7]])[0].tolist(),
        "out of range": refusal_of(lambda: first(stop_token_ids=[5000])),
    }


def _with_local_data(engine: HybridEngine[Any]) -> Values:
    """Generate from each rank's prompts, none on one rank; pass different arguments, which are
    refused.
    """
    from vllm import SamplingParams

    rank = engine.job.rank
    prompts = [[5, 6, 7], [3, 4, 5, 6, 7]] if rank else []
    completions = engine.generate(prompts, GREEDY, data="local")
    return {
        "local": [list(completion.token_ids) for (completion,) in completions],
        "local prompts": [completion.prompt_token_ids for (completion,) in completions],
        "other prompts": refusal_of(lambda: engine.generate([[5 + rank]], GREEDY)),
        "other sampling": refusal_of(
            lambda: engine.generate(prompts, replace(GREEDY, max_tokens=4 + rank), data="local")
        ),
        "other bias": refusal_of(
            lambda: engine.generate([[5]], SamplingParams(max_tokens=2, logit_bias={5 + rank: 9.0}))
        ),
        "other data": refusal_of(lambda: engine.generate([[5]], GREEDY, data="local" if rank else "global")),
        "no such data": refusal_of(lambda: engine.generate([[5]], GREEDY, data="mine")),  # type: ignore[arg-type]
    }


REFUSED: Mapping[str, Values] = {
    "not resharded": {"enable_reshard": False},
    "an unknown key": {"rollout_config": {"tp_sise": 2}},
    "a size twice": {"rollout_config": {"tp_size": 2, "infer_tensor_parallel_size": 2}},
    "an unknown dp_type": {"rollout_config": {"dp_type": "some"}},
    "more ranks than there are": {"rollout_config": {"tp_size": 4}},
    "a wrong strategy": {"train_config": {"fsdp_config": {"sharding_strategy": "ZERO", "mixed_precission": "amp"}}},
    "replicas without HYBRID_SHARD": {"train_config": {"fsdp_config": {"replicas": 2}}},
    "no such files": {"rollout_config": {"model": "/nowhere"}},
    "nothing narrower": {"compress_reshard": True, "compression_dtype": torch.float32},
    "sharded or not": {"train_config": SEED_TRAIN, "shard": False},
}
MESSAGES = {
    "not resharded": ["enable_reshard: False"],
    "an unknown key": ["tp_sise: unknown key"],
    "a size twice": ["rollout_config.tp_size: infer_tensor_parallel_size is the same setting"],
    "an unknown dp_type": ["rollout_config.dp_type: 'some'"],
    "more ranks than there are": ["infer_tensor_parallel_size"],
    "a wrong strategy": ["train_config.fsdp_config.sharding_strategy", "Did you mean mixed_precision?"],
    "replicas without HYBRID_SHARD": ["train_config.fsdp_config.replicas: 2 with sharding_strategy FULL_SHARD"],
    "nothing narrower": ["float32 is not narrower than the training dtype float32"],
    "sharded or not": ["ConfigError", "train_config: configures sharding, but shard is False"],
    "over one rank": ["ModelError", "of 2: use a mesh of all ranks"],
    "no such files": ["ConfigError", "rollout_config.model: /nowhere is not a directory"],
    "sharded twice": ["ModelError", "the model is sharded already: leave train_config out"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory with weights and a tokenizer of numbers."""
    path = write_config(tmp_path_factory.mktemp("model"), served_config("qwen2", torch_dtype="float32"))
    config = (path / "config.json").read_text()
    sharded_models.from_config(path).save_pretrained(path)
    (path / "config.json").write_text(config)
    save_numbers(path)
    return str(path)


@pytest.fixture(scope="module")
def seed_by_rank(engines: Ranks, directory: str) -> list[Values]:
    return engines.launch(the_seed, 2, directory)


@pytest.fixture(scope="module")
def forms_by_rank(engines: Ranks, directory: str) -> list[Values]:
    return engines.launch(forms, 2, directory)


@pytest.fixture(scope="module")
def errors(engines: Ranks, directory: str) -> list[dict[str, str]]:
    return engines.launch(refusals, 2, directory)


def test_the_seed_learns_what_it_generated(seed_by_rank: list[Values]) -> None:
    for results in seed_by_rank:
        assert results["losses"][2] < results["losses"][1] < results["losses"][0]
        assert results["surplus"] == [0, 0, 0]
        assert results["responses"][0].shape == (2, 12)
        assert torch.equal(results["responses"][0][:, :8], torch.arange(2, 18).reshape(2, 8))
        assert torch.equal(results["responses"][0], seed_by_rank[0]["responses"][0])


def test_copies_of_a_model_train_the_same_as_without_an_engine(engines: Ranks, directory: str) -> None:
    calls = {"with": (copies, (directory, True)), "without": (copies, (directory, False))}
    outcomes = engines.launch_in_turn(2, calls)
    for rank, (results, plain) in enumerate(zip(outcomes["with"], outcomes["without"], strict=True)):
        assert all(map(torch.equal, results["weights"], plain["weights"]))
        for step in range(2):
            verified, received = results[f"report {step}"]
            assert verified > 0
            assert received == 0, "each rank has all weights"
            assert "StateError" in results[f"misuse {step}"]
            assert torch.equal(results[f"answer {step}"], outcomes["with"][1 - rank][f"answer {step}"])


def test_the_engine_stores_weights(seed_by_rank: list[Values]) -> None:
    for results in seed_by_rank:
        assert results["stored"]
        assert results["tokens"] == [[5, 6]]


def test_hooks_can_omit_the_argument(seed_by_rank: list[Values]) -> None:
    once = ["resharding begins", "train->infer", "resharding begins", "infer->train"]
    assert all(results["lines"] == 3 * once for results in seed_by_rank)


def test_completions_have_the_form_of_the_prompts(forms_by_rank: list[Values]) -> None:
    for results in forms_by_rank:
        ids = [list(tokens) for (tokens,) in results["ids"]]
        assert [row[5:].tolist() for row in results["rows"]] == ids
        assert results["rows"][:, :5].tolist() == [[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]]
        spelled = ["".join(map(str, tokens)) for tokens in ids]  # tokens are numbers without spaces
        assert [text.replace(" ", "") for (text,) in results["texts"]] == spelled
        assert torch.equal(results["after an error"], results["rows"])


def test_a_model_of_the_hub_has_its_tokenizer(directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert json.loads((directory_of_engine / "config.json").read_text())["vocab_size"] == 256
    assert ModelTokenizer(_tokenizer_directory(model, None)).encode(["5 6"]) == [[5, 6]]


def test_vllm_computes_the_same_as_the_live_model(errors: list[dict[str, str]]) -> None:
    assert all(float(messages["gap"]) < 1e-4 for messages in errors)


def test_chats_are_completed_after_their_template(forms_by_rank: list[Values]) -> None:
    for results in forms_by_rank:
        ((text,),) = results["chats"]
        assert text == results["of the template"][0].text
        ((text,),) = results["continued"]
        assert text == results["in its middle"][0].text


def test_completions_contain_prompts_and_log_probabilities(forms_by_rank: list[Values]) -> None:
    for results in forms_by_rank:
        free = results["free"]
        assert free.prompt_token_ids == (3, 4, 5, 6, 7)
        assert free.text.replace(" ", "") == "".join(map(str, free.token_ids))
        assert [len(position) for position in free.top_logprobs] == [3, 3, 3, 3]
        for token, logprob, position in zip(free.token_ids, free.logprobs, free.top_logprobs, strict=True):
            assert position[token] == logprob == max(position.values()), "greedy"
        scored = results["scored"]
        assert scored.prompt_logprobs == pytest.approx(results["scored by itself"], abs=1e-6)
        assert (free.prompt_logprobs, free.prompt_top_logprobs) == ((), ())
        tokens = scored.prompt_token_ids[1:]
        for token, logprob, top in zip(tokens, scored.prompt_logprobs, scored.prompt_top_logprobs, strict=True):
            assert top[token] == logprob
            assert len(top) in (2, 3)


def test_requests_can_use_a_tokenizer_in_vllm(forms_by_rank: list[Values]) -> None:
    for results in forms_by_rank:
        free = results["free"]
        stopped = results["stopped"]
        first, second, *_ = map(str, free.token_ids)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", second)
        assert stopped.token_ids == free.token_ids[:2]
        assert stopped.text.strip() == first
        assert results["ours stopped"] == replace(stopped, top_logprobs=(), logprobs=results["ours stopped"].logprobs)
        assert 1 in results["ids"][0][0]
        assert 1 not in results["without bad words"].token_ids
        assert results["chosen"].text in ("57", "99")
        assert results["free again"] == free
        assert len(results["unlimited"].token_ids) == 4, "max_model_len minus 60 tokens"


def test_ranks_can_have_different_prompts(forms_by_rank: list[Values]) -> None:
    first, second = forms_by_rank
    assert first["local"] == []
    assert second["local"] == [list(tokens) for (tokens,) in second["ids"]]
    assert second["local prompts"] == [(5, 6, 7), (3, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("out of range", "ArgumentError"),
        ("other prompts", "data: the ranks differ in prompts, in sampling or in `data`"),
        ("other sampling", "data: the ranks differ in sampling"),
        ("other bias", "data: the ranks differ in prompts, in sampling"),
        ("other data", "data: the ranks differ"),
        ("no such data", "data: 'mine' is unknown"),
        ("outside", "StateError: "),
        ("training", "StateError: "),
    ],
)
def test_invalid_calls_are_refused(forms_by_rank: list[Values], call: str, message: str) -> None:
    assert all(message in results[call] for results in forms_by_rank)


@pytest.mark.parametrize("name", MESSAGES)
def test_invalid_engines_are_refused_on_every_rank(errors: list[dict[str, str]], name: str) -> None:
    for messages in errors:
        assert all(message in messages[name] for message in MESSAGES[name]), messages[name]
