"""`HybridEngine(model=...)`: a transformers model, the caller's own loop, and an engine for the rest; two ranks."""

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
from tests.harness.absent import left_out
from tests.harness.launch import Outcomes, Ranks
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
def the_seed(directory: str, rollout_config: Mapping[str, Any] = SEED_ROLLOUT) -> dict[str, Any]:
    """The flow of the source document: roll out, train on what came, again."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = HybridEngine(
        model=model,
        rollout_config=rollout_config,
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
    losses, received, responses, prefetched = [], [], [], []
    for _ in range(3):
        with engine.rollout_context(), engine.rollout_context():  # one inside the other switches once
            responses.append(engine.generate(prompts, GREEDY))
        assert engine.sharding.last_report is not None
        received.append(engine.sharding.last_report.bytes_received - engine.sharding.last_report.bytes_least)
        with engine.train_context():
            optimizer.zero_grad()
            loss = model(input_ids=responses[0], labels=responses[0]).loss
            loss.backward()
            optimizer.step()
            prefetched.append(engine.sharding.last_report.bytes_prefetched)
        losses.append(loss.item())
    stored = stored_and_loaded(engine, model)
    tokens = ModelTokenizer(str(engine.config.model)).encode(["5 6"])  # of what a checkpoint gets beside its weights
    engine.shutdown()
    weights = [parameter.to_local().clone() for parameter in model.parameters()]
    return {
        **{"lines": lines, "losses": losses, "surplus": received, "responses": responses},
        **{"prefetched": prefetched, "weights": weights, "stored": stored, "tokens": tokens},
    }


def refusals(directory: str) -> dict[str, str]:
    dist.init_process_group("gloo")
    model = sharded_models.from_config(Path(directory))
    found = {name: refusal_of(partial(HybridEngine, model=model, **settings)) for name, settings in REFUSED.items()}
    sharded = sharded_models.shard(sharded_models.from_config(Path(directory)))
    found["sharded twice"] = refusal_of(lambda: HybridEngine(model=sharded, train_config=SEED_TRAIN))
    found |= {name: refusal_of(partial(HybridEngine, model=make(Path(directory)))) for name, make in ODD.items()}
    found["gap"] = str(_gap(directory))
    return found


def several_dtypes(path: Path) -> torch.nn.Module:
    model = sharded_models.from_config(path)
    model.lm_head.bfloat16()
    return model


def over_one_rank(path: Path) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "shards"))["shards"]
    return fully_shard(sharded_models.from_config(path), mesh=mesh)


def config_changed_since(path: Path) -> torch.nn.Module:
    model = sharded_models.from_config(path)
    model.config.rms_norm_eps = 0.1
    return model


ODD: Mapping[str, Callable[[Path], torch.nn.Module]] = {
    "several dtypes": several_dtypes,
    "over one rank": over_one_rank,
    "config changed since": config_changed_since,
}


def forms(directory: str) -> dict[str, Any]:
    """A model that is sharded already, prompts in all forms, and what is refused between the contexts."""
    dist.init_process_group("gloo")
    path = Path(directory)
    model = sharded_models.shard(sharded_models.from_config(path))
    engine = HybridEngine(
        model=model, rollout_config={"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}
    )
    padded = torch.tensor([[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = {"outside": refusal_of(lambda: engine.generate(padded, GREEDY))}
    with engine.rollout_context():
        found["ids"] = [
            [one.token_ids for one in each] for each in engine.generate([[5, 6, 7], [3, 4, 5, 6, 7]], GREEDY)
        ]
        found["rows"] = engine.generate(padded, GREEDY, mask)
        found["texts"] = engine.generate(["5 6 7", "3 4 5 6 7"], GREEDY)
        found["chats"] = engine.generate([[{"role": "user", "content": "5 6"}]], GREEDY)
        (found["of the template"],) = engine.generate([[7, 5, 6, 8]], GREEDY)
        continued: Any = [{"role": "user", "content": "5 6"}, {"role": "assistant", "content": "3"}]
        found["continued"] = engine.generate([continued], GREEDY, continue_final_message=True)
        (found["in its middle"],) = engine.generate([[7, 5, 6, 7, 3]], GREEDY)
        found |= _with_sampling_params(engine)
        found |= _with_local_data(engine)
        found["mixed"] = refusal_of(lambda: engine.generate(["5", [6]], GREEDY))
        found["a mask for lists"] = refusal_of(lambda: engine.generate([[5]], GREEDY, mask))
        found["training"] = refusal_of(lambda: model(padded))
        found["mask"] = refusal_of(lambda: engine.generate(padded, GREEDY, mask[:1]))
    try:
        with engine.train_context():
            raise RuntimeError("in the caller's loop")
    except RuntimeError:
        pass
    with engine.rollout_context():
        found["after an error"] = engine.generate(padded, GREEDY, mask)
    engine.shutdown()
    model(padded)  # the caller's, as before
    return found


def copies(directory: str, with_engine: bool) -> dict[str, Any]:
    """A model in DDP, whole on each of two ranks, of which vLLM has a half on each; training, with switches or not."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharded_models.from_config(Path(directory))
    wrapped, found = DistributedDataParallel(model), dict[str, Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ExitStack() as ends:
        if with_engine:
            rollout = {**SEED_ROLLOUT, "verify": "full"}
            engine = ends.enter_context(HybridEngine(model=model, rollout_config=rollout, shard=False))
        for step in range(2):
            if with_engine:
                with engine.rollout_context():
                    found[f"answer {step}"] = engine.generate(torch.arange(2, 10)[None], GREEDY)
                    found[f"misuse {step}"] = refusal_of(lambda: model(torch.ones(1, 2, dtype=torch.int64)))
                report = engine.sharding.last_report
                found[f"report {step}"] = (report.tensors_verified, report.bytes_received)
                engine.sharding.enter(State.TRAIN)
            rows = torch.arange(2, 18).reshape(2, 8) + dist.get_rank() + step
            optimizer.zero_grad()
            wrapped(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
    found["weights"] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def told_otherwise(path: Path) -> torch.nn.Module:
    """Another model than that of the directory's config.json, with the same tensors."""
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0}
    return sharded_models.from_config(path, rope_parameters=rope, rms_norm_eps=0.1)


def _gap(directory: str) -> float:
    """Greatest difference of a log-probability between that model and vLLM beside it."""
    model, tokens = told_otherwise(Path(directory)), torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
    rollout_config = {"model": directory, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}
    with HybridEngine(model=model, rollout_config=rollout_config, train_config={}) as engine, engine.rollout_context():
        (scored,) = engine.inference.prompt_logprobs(tokens.tolist())
    return float((scored - expected).abs().max())


def _with_sampling_params(engine: HybridEngine[Any]) -> dict[str, Any]:
    """vLLM's own, with what needs a tokenizer inside vLLM: it has none before, and none after."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

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
        "delta": refusal_of(lambda: first(output_kind=RequestOutputKind.DELTA, prompt_logprob_token_ids=[[1]])),
        "stream": refusal_of(lambda: engine.generate([[5]], GREEDY, stream=True)),  # type: ignore[call-arg]
        "scored": first(prompt_logprobs=2),
        "scored by itself": engine.inference.prompt_logprobs([[3, 4, 5, 6, 7]])[0].tolist(),
        "out of range": refusal_of(lambda: first(stop_token_ids=[5000])),
        "no sampling": refusal_of(lambda: engine.generate([[5]], {"max_tokens": 3})),  # type: ignore[arg-type]
    }


def _with_local_data(engine: HybridEngine[Any]) -> dict[str, Any]:
    """Each rank its own prompts, one of them none; and what is refused where ranks should pass the same."""
    from vllm import SamplingParams

    rank = engine.job.rank
    own = [[5, 6, 7], [3, 4, 5, 6, 7]] if rank else []
    completions = engine.generate(own, GREEDY, data="local")
    return {
        "local": [list(one.token_ids) for (one,) in completions],
        "local prompts": [one.prompt_token_ids for (one,) in completions],
        "other prompts": refusal_of(lambda: engine.generate([[5 + rank]], GREEDY)),
        "other sampling": refusal_of(lambda: engine.generate(own, replace(GREEDY, max_tokens=4 + rank), data="local")),
        "other bias": refusal_of(
            lambda: engine.generate([[5]], SamplingParams(max_tokens=2, logit_bias={5 + rank: 9.0}))
        ),
        "other data": refusal_of(lambda: engine.generate([[5]], GREEDY, data="local" if rank else "global")),
        "no such data": refusal_of(lambda: engine.generate([[5]], GREEDY, data="mine")),  # type: ignore[arg-type]
    }


REFUSED: Mapping[str, dict[str, Any]] = {
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
    "several dtypes": [
        "ModelError",
        "in float32, first model.embed_tokens.weight; 1 in bfloat16, first lm_head.weight",
    ],
    "over one rank": ["ModelError", "of 2: use a mesh of all ranks"],
    "config changed since": ["ModelError", "variance_epsilon is 1e-06", "0.1"],
    "no such files": ["ConfigError", "rollout_config.model: /nowhere is not a directory"],
    "sharded twice": ["ModelError", "the model is sharded already: leave train_config out"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model directory with weights and a tokenizer for which a number is a token."""
    path = write_config(tmp_path_factory.mktemp("model"), served_config("qwen2", torch_dtype="float32"))
    config = (path / "config.json").read_text()
    sharded_models.from_config(path).save_pretrained(path)
    (path / "config.json").write_text(config)
    save_numbers(path)
    return str(path)


@pytest.fixture(scope="module")
def seeds(engines: Ranks, directory: str) -> Outcomes:
    """The seed as it is, and with training state that moves ahead of time."""
    ahead = {**SEED_ROLLOUT, "prefetch": "auto"}
    return engines.launch_in_turn(2, {"plain": (the_seed, (directory,)), "ahead": (the_seed, (directory, ahead))})


@pytest.fixture
def of_the_seed(seeds: Outcomes) -> list[dict[str, Any]]:
    return seeds["plain"]


@pytest.fixture(scope="module")
def of_forms(engines: Ranks, directory: str) -> list[dict[str, Any]]:
    return engines.launch(forms, 2, directory)


@pytest.fixture(scope="module")
def errors(engines: Ranks, directory: str) -> list[dict[str, str]]:
    return engines.launch(refusals, 2, directory)


def test_the_seed_learns_what_it_generated(of_the_seed: list[dict[str, Any]]) -> None:
    for found in of_the_seed:
        assert found["losses"][2] < found["losses"][1] < found["losses"][0]
        assert found["surplus"] == [0, 0, 0]
        assert found["responses"][0].shape == (2, 12)
        assert torch.equal(found["responses"][0][:, :8], torch.arange(2, 18).reshape(2, 8))
        assert torch.equal(found["responses"][0], of_the_seed[0]["responses"][0])


def test_copies_of_a_model_train_as_without_an_engine(engines: Ranks, directory: str) -> None:
    calls = {"with": (copies, (directory, True)), "without": (copies, (directory, False))}
    outcomes = engines.launch_in_turn(2, calls)
    for rank, (found, plain) in enumerate(zip(outcomes["with"], outcomes["without"], strict=True)):
        assert all(map(torch.equal, found["weights"], plain["weights"]))
        for step in range(2):
            verified, received = found[f"report {step}"]
            assert verified > 0
            assert received == 0, "each rank has all of it"
            assert "StateError" in found[f"misuse {step}"]
            assert torch.equal(found[f"answer {step}"], outcomes["with"][1 - rank][f"answer {step}"])


def test_prefetch_changes_nothing_but_the_time(seeds: Outcomes) -> None:
    for plain, ahead in zip(seeds["plain"], seeds["ahead"], strict=True):
        assert ahead["losses"] == plain["losses"]
        for name in ("responses", "weights"):
            assert all(map(torch.equal, ahead[name], plain[name]))
        assert plain["prefetched"] == [0, 0, 0]
        parameters, *with_optimizer = ahead["prefetched"]
        assert all(nbytes > 2 * parameters for nbytes in with_optimizer), "with two moments each, from the second on"


def test_the_engine_stores_weights(of_the_seed: list[dict[str, Any]]) -> None:
    for found in of_the_seed:
        assert found["stored"]
        assert found["tokens"] == [[5, 6]]


def test_hooks_may_take_no_argument(of_the_seed: list[dict[str, Any]]) -> None:
    once = ["resharding begins", "train->infer", "resharding begins", "infer->train"]
    assert all(found["lines"] == 3 * once for found in of_the_seed)


def test_prompts_are_answered_in_their_own_form(of_forms: list[dict[str, Any]]) -> None:
    for found in of_forms:
        ids = [list(one) for (one,) in found["ids"]]
        assert [row[5:].tolist() for row in found["rows"]] == ids
        assert found["rows"][:, :5].tolist() == [[9, 9, 5, 6, 7], [3, 4, 5, 6, 7]]
        spelled = ["".join(map(str, one)) for one in ids]  # this tokenizer's words are numbers, without spaces
        assert [text.replace(" ", "") for (text,) in found["texts"]] == spelled
        assert torch.equal(found["after an error"], found["rows"])


def test_a_model_of_the_hub_brings_its_tokenizer(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration is the live model's, which may have changed since it was loaded."""
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    shutil.copytree(directory, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = AutoConfig.from_pretrained(directory)
    config.name_or_path, config.vocab_size = "org/tiny", 256
    model = SimpleNamespace(config=config)
    with ExitStack() as owner:
        made = _model_directory(model, owner)
        assert json.loads((made / "config.json").read_text())["vocab_size"] == 256
    assert ModelTokenizer(_tokenizer_directory(model, None)).encode(["5 6"]) == [[5, 6]]


def test_vllm_computes_what_the_live_model_does(errors: list[dict[str, str]]) -> None:
    assert all(float(found["gap"]) < 1e-4 for found in errors)


def test_chats_are_completed_behind_their_template(of_forms: list[dict[str, Any]]) -> None:
    for found in of_forms:
        ((text,),) = found["chats"]
        assert text == found["of the template"][0].text
        ((text,),) = found["continued"]
        assert text == found["in its middle"][0].text


def test_completions_say_what_they_are_of(of_forms: list[dict[str, Any]]) -> None:
    for found in of_forms:
        free = found["free"]
        assert free.prompt_token_ids == (3, 4, 5, 6, 7)
        assert free.text.replace(" ", "") == "".join(map(str, free.token_ids))
        assert [len(position) for position in free.top_logprobs] == [3, 3, 3, 3]
        for token, logprob, position in zip(free.token_ids, free.logprobs, free.top_logprobs, strict=True):
            assert position[token] == logprob == max(position.values()), "greedy"
        scored = found["scored"]
        assert scored.prompt_logprobs == pytest.approx(found["scored by itself"], abs=1e-6)
        assert (free.prompt_logprobs, free.prompt_top_logprobs) == ((), ())
        tokens = scored.prompt_token_ids[1:]
        for token, logprob, top in zip(tokens, scored.prompt_logprobs, scored.prompt_top_logprobs, strict=True):
            assert top[token] == logprob
            assert len(top) in (2, 3)


def test_vllm_has_a_tokenizer_where_a_request_needs_one(of_forms: list[dict[str, Any]]) -> None:
    for found in of_forms:
        free, stopped = found["free"], found["stopped"]
        first, second, *_ = map(str, free.token_ids)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", second)
        assert stopped.token_ids == free.token_ids[:2]
        assert stopped.text.strip() == first
        assert found["ours stopped"] == replace(stopped, top_logprobs=(), logprobs=found["ours stopped"].logprobs)
        assert 1 in found["ids"][0][0]
        assert 1 not in found["without bad words"].token_ids
        assert found["chosen"].text in ("57", "99")
        assert found["free again"] == free
        assert len(found["unlimited"].token_ids) == 4, "what 60 tokens leave of max_model_len"


def test_each_rank_may_have_prompts_of_its_own(of_forms: list[dict[str, Any]]) -> None:
    first, second = of_forms
    assert first["local"] == []
    assert second["local"] == [list(one) for (one,) in second["ids"]]
    assert second["local prompts"] == [(5, 6, 7), (3, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mixed", "prompts[1]: token ids, but prompts[0] is a text"),
        ("a mask for lists", "attention_mask: is for prompts in a tensor [B, S]"),
        ("delta", "sampling.output_kind: DELTA, but completions are returned whole"),
        ("delta", "sampling.prompt_logprob_token_ids: completions do not carry it"),
        ("delta", "A server streams: set generate_config.servers"),
        ("stream", "stream: is not an argument of this call: completions are returned whole"),
        ("out of range", "ArgumentError"),
        ("out of range", "sampling: vLLM refuses it: token_id(s) [5000] in stop_token_ids"),
        ("no sampling", "sampling: got {'max_tokens': 3}"),
        ("other prompts", "data: the ranks differ in prompts, in sampling or in `data`"),
        ("other sampling", "data: the ranks differ in sampling"),
        ("other bias", "data: the ranks differ in prompts, in sampling"),
        ("other data", "data: the ranks differ"),
        ("no such data", "data: 'mine' is unknown"),
        ("outside", "StateError: "),
        ("training", "StateError: "),
        ("mask", "prompts: torch.int64 of shape (2, 5) with a mask of shape (1, 5)"),
    ],
)
def test_calls_in_the_wrong_place_are_refused(of_forms: list[dict[str, Any]], call: str, message: str) -> None:
    assert all(message in found[call] for found in of_forms)


@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_built_is_refused_on_every_rank(errors: list[dict[str, str]], name: str) -> None:
    for found in errors:
        assert all(message in found[name] for message in MESSAGES[name]), found[name]
