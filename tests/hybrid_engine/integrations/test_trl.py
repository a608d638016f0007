"""TRL's trainers with our engine at their extension points; without TRL, error messages.

AsyncGRPOTrainer computes attention by FlashAttention 3, which has no CPU build. A stand-in with the
same arguments computes the segments one after the other. Everything else is TRL's, including the
process that samples and scores.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from hybrid_engine.errors import ConfigError, DependencyError, HybridEngineError, StateError
from hybrid_engine.integrations import accelerated, require_tested
from hybrid_engine.integrations import trl as ours
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.invitation import PROOF_HEADER, TOKEN, proof_of_request
from tests.harness.errors import has_code, has_violation, violated, violations_of
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, REQUEST, serving
from tests.hybrid_engine.integrations.installed import pretend_version
from tests.hybrid_engine.tools.programs import run_python
from tests.zoo.tiny_models import save_model
from tests.zoo.tokenizers import save_characters

NUM_STEPS = 3
WITH_TOKENIZER = [argument for argument in PLAIN if argument != "--skip-tokenizer-init"]
CLOSE = 1e-5
"""Tolerance of float32 log-probabilities of vLLM and trainer; measured: 2e-6."""


def missing_requirement() -> str | None:
    try:
        require_tested("trl", ours.TESTED_VERSION, ours.INSTALL)
    except DependencyError as error:
        return str(error)
    return None


MISSING = missing_requirement()
with_trl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


# -- runs ------------------------------------------------------------------------------------------


def write_model(directory: Path) -> str:
    """Write a Qwen3 of random weights, of sizes that vLLM's kernels support, and its tokenizer."""
    from transformers import AutoTokenizer

    save_model(directory, "qwen3", head_dim=32, max_position_embeddings=128)
    save_characters(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = "\0"
    tokenizer.eos_token = "\n"
    tokenizer.save_pretrained(directory)
    return str(directory)


def share_of_letters(completions: Sequence[Any], **_: Any) -> list[float]:
    """Reward that differs between the completions of a prompt."""
    texts = [
        completion if isinstance(completion, str) else completion[-1]["content"]
        for completion in completions
    ]
    return [sum(map(str.isalpha, text)) / 8 for text in texts]


def settings(out: str, **more: Any) -> Values:
    common = {
        "output_dir": out,
        "max_steps": NUM_STEPS,
        "max_completion_length": 8,
        "num_generations": 4,
    }
    common |= {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
    }
    return {**common, "use_cpu": True, "bf16": False, "logging_steps": 1, **more}


def rows(trainer: Any, *names: str) -> list[list[float]]:
    """Return the logged figures of each step."""
    return [[log[name] for name in names] for log in trainer.state.log_history if "loss" in log]


def clone_parameters(model: Any) -> TensorDict:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def full_parameters(trainer: Any) -> TensorDict:
    """Return the trained parameters, with shards gathered."""
    parameters = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    for name, parameter in parameters.items():
        if hasattr(parameter, "full_tensor"):
            parameters[name] = parameter.full_tensor()
    return parameters


def colocated_grpo(
    model: str, out: str, tensor_parallel_size: int = 1, is_sharded: bool = False
) -> Values:
    """Train; return TRL's log-probability differences by step, and the trained parameters."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_list([{"prompt": text} for text in ("abc", "hello", "1+1=", "xyz")] * 8)
    config = GRPOConfig(
        **settings(
            out,
            use_vllm=True,
            vllm_max_model_length=64,
            vllm_tensor_parallel_size=tensor_parallel_size,
        )
    )
    reports = []
    states = []
    with ours.colocated(verify="full"):
        trainer = GRPOTrainer(
            model=model, reward_funcs=share_of_letters, args=config, train_dataset=data
        )
        before = clone_parameters(trainer.model)
        if is_sharded:
            shard_by_fsdp2(trainer)
        llm = trainer.vllm_generation.llm
        sync = trainer.vllm_generation.sync_weights

        def sync_and_record() -> None:
            sync()
            reports.append(llm.engine.sharding.last_report)
            states.append(str(llm.engine.sharding.state))

        trainer.vllm_generation.sync_weights = sync_and_record
        trainer.train()
        states.append(str(llm.engine.sharding.state))
        kinds = {type(parameter).__name__ for parameter in trainer.model.parameters()}
    trained = full_parameters(trainer)
    return {
        "differences": rows(trainer, "sampling/sampling_logp_difference/max"),
        "losses": rows(trainer, "loss", "grad_norm"),
        "versions": [report.version for report in reports],
        "verified": [report.tensors_verified for report in reports],
        "surplus": [report.bytes_received - report.bytes_least for report in reports],
        "seconds": [report.seconds for report in reports],
        "states": states,
        "kinds": kinds,
        "trained": sum(not torch.equal(before[name], after) for name, after in trained.items()),
        "parameters": len(before),
    }


def shard_by_fsdp2(trainer: Any) -> None:
    """Make accelerate shard the model when it prepares it, which it never does on a CPU
    otherwise."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    state = trainer.accelerator.state
    state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    trainer.is_fsdp_enabled = True


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """TRL's attention without FlashAttention, for tensors of [1, heads, tokens, head_dim].

    Queries are at the end of each segment's keys.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    bounds_q = tree_cu_seqlens_q.tolist()
    bounds_k = tree_cu_seqlens_k.tolist()
    for (q0, q1), (k0, k1) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        index = tree_kv_index[k0:k1]
        keys, values = (
            tensor[index].repeat_interleave(groups, 1).transpose(0, 1) for tensor in (key, value)
        )
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril((k1 - k0) - (q1 - q0))
        output = torch.nn.functional.scaled_dot_product_attention(
            query[q0:q1].transpose(0, 1), keys, values, mask, scale=scaling
        )
        out[q0:q1] = output.transpose(0, 1)
    return out.unsqueeze(0), None


def async_grpo(model: str, out: str, url: str) -> Values:
    from datasets import Dataset
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}]} for text in ("abc", "xyz")] * 8
    )
    config = AsyncGRPOConfig(**settings(out, vllm_server_base_url=url, dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template  # TRL parses completions by its templates
    versions = []
    torch.cuda.get_device_name = lambda device=None: "no GPU"  # TRL looks up the GPU's peak rate
    with ours.WeightTransfer(verify="full") as transfer:
        trainer = AsyncGRPOTrainer(
            model=model,
            reward_funcs=share_of_letters,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            weight_transfer=transfer,
        )
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        transfer.attach(trainer)
        resume = transfer.resume

        def resume_and_record() -> None:
            resume()
            versions.append(transfer.engine.sharding.served)

        transfer.resume = resume_and_record  # type: ignore[method-assign]
        trainer.train()
        response = HttpServer(url, 60).complete(REQUEST)
    seconds = [row[0] for row in rows(trainer, "perf/weight_sync_s")]
    (choice,) = response["choices"]
    tokens = [*REQUEST["prompt"], *choice["token_ids"]]
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    with torch.no_grad():
        log_probs = trained(torch.tensor([tokens])).logits[0].log_softmax(-1)
    start = len(REQUEST["prompt"])
    expected = [log_probs[at - 1, tokens[at]].item() for at in range(start, len(tokens))]
    drawn = choice["logprobs"]["token_logprobs"]
    return {
        "versions": versions,
        "seconds": seconds,
        "first ratio": rows(trainer, "ratio")[0][0],
        "difference": max(abs(a - b) for a, b in zip(expected, drawn, strict=True)),
        "grad norms": rows(trainer, "grad_norm"),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def assert_trained(results: Values) -> None:
    assert [difference for (difference,) in results["differences"]] == pytest.approx(
        [0.0] * NUM_STEPS, abs=CLOSE
    )
    assert results["versions"] == list(range(NUM_STEPS))
    assert results["verified"] == [results["parameters"]] * NUM_STEPS, "bit by bit"
    assert results["surplus"] == [0] * NUM_STEPS, "bytes above the minimum"
    assert results["states"] == ["infer"] * NUM_STEPS + ["train"]
    assert results["trained"] == results["parameters"]


@with_trl
def test_grpo_generates_with_our_weights(engines: Ranks, model: str, tmp_path: Path) -> None:
    assert_trained(engines.run_alone(colocated_grpo, model, str(tmp_path)))


@with_trl
def test_copies_and_shards_reach_two_ranks_of_vllm(
    engines: Ranks, model: str, tmp_path: Path
) -> None:
    """DDP and accelerate's FSDP2, with equal results."""
    results = {
        kind: engines.launch(colocated_grpo, 2, model, str(tmp_path / kind), 2, kind == "shards")[0]
        for kind in ("copies", "shards")
    }
    for kind, result in results.items():
        assert_trained(result)
        assert result["kinds"] == {"DTensor" if kind == "shards" else "Parameter"}
    for copies, shards in zip(
        results["copies"]["losses"], results["shards"]["losses"], strict=True
    ):
        assert shards == pytest.approx(copies, abs=1e-4)


@with_trl
@pytest.mark.long
def test_the_example_says_that_it_uses_the_engine_and_learns() -> None:
    output = run_python("examples/trl_sums.py", status=0, timeout=400).stdout
    assert "[Reshard] direction=train->infer" in output
    first, *_, last = output.split()[-10:]
    assert float(first) < 0.6
    assert float(last) > 0.75


@with_trl
@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_async_grpo_publishes_to_a_server(
    engines: Ranks, model: str, tmp_path: Path, num_ranks: int
) -> None:
    with serving(model, tmp_path, *WITH_TOKENIZER, *FILLED) as server:
        results, *_ = engines.launch(
            async_grpo, num_ranks, model, str(tmp_path / "out"), server.url, timeout=400
        )
    assert results["versions"] == list(range(NUM_STEPS + 1))
    assert results["first ratio"] == pytest.approx(1.0, abs=CLOSE)
    assert results["difference"] < CLOSE
    assert all(norm > 0 for (norm,) in results["grad norms"])


@with_trl
@pytest.mark.long
def test_async_grpo_requires_our_load_format(engines: Ranks, model: str, tmp_path: Path) -> None:
    with serving(model, tmp_path, *WITH_TOKENIZER) as server:
        refused = engines.run_alone(
            refusal_of, model, str(tmp_path / "out"), server.url, timeout=400
        )
    assert refused == [("vllm_server_base_url", "wrong-load-format")]


def refusal_of(model: str, out: str, url: str) -> list[tuple[str, str]]:
    try:
        async_grpo(model, out, url)
    except ConfigError as error:
        return violations_of(error)
    return []


# -- without TRL -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda: ours.colocated().__enter__(), ours.WeightTransfer])
def test_a_missing_or_untested_version_is_reported(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(monkeypatch, None)
    with pytest.raises(DependencyError, check=has_code("needs-package", "pip install '.[trl]'")):
        call()
    pretend_version(monkeypatch, "1.160.0")
    with pytest.raises(
        DependencyError, check=has_code("untested-version", "trl 1.160.0", "1.16 was tested")
    ):
        call()


def accelerator(how: str = "NO", fsdp_version: int | None = None) -> Any:
    plugin = None if fsdp_version is None else SimpleNamespace(fsdp_version=fsdp_version)
    state = SimpleNamespace(fsdp_plugin=plugin)
    return SimpleNamespace(
        distributed_type=f"DistributedType.{how}",
        state=state,
        unwrap_model=lambda model: model,
        process_index=0,
    )


def generation(**changes: Any) -> Any:
    plain = {
        "accelerator": accelerator(),
        "mode": "colocate",
        "model_impl": "vllm",
        "logprobs": 0,
        "model": None,
    }
    plain |= {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 8,
        "max_model_length": None,
    }
    return SimpleNamespace(**{**plain, "trust_remote_code": False, **changes})


REFUSED: dict[str, tuple[Values, list[tuple[str, str]]]] = {
    "several at once": (
        {"mode": "server", "model_impl": "transformers", "logprobs": 5},
        [(key, "unsupported-value") for key in ("vllm_mode", "vllm_model_impl", "logprobs")],
    ),
    "DeepSpeed": ({"accelerator": accelerator("DEEPSPEED")}, [("accelerate", "not-supported")]),
    "FSDP1": ({"accelerator": accelerator("FSDP", 1)}, [("accelerate", "not-supported")]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused(name: str) -> None:
    changes, violations = REFUSED[name]
    with violated(ConfigError, *violations), ExitStack() as ends:
        ours._ColocatedLlm(generation(**changes), {}, ends)


def test_adopts_fsdp2_and_settings_of_trl() -> None:
    with ExitStack() as ends:
        llm = ours._ColocatedLlm(
            generation(accelerator=accelerator("FSDP", 2)), {"max_num_seqs": 4}, ends
        )
        assert llm._config["infer_tensor_parallel_size"] == 2
        assert llm._config["max_num_seqs"] == 4, "arguments of the caller override"


def images_of_rank_1() -> tuple[str, list[tuple[str, str]], str]:
    with closing(Job.join(60.0)) as job:
        prompts = [{"prompt_token_ids": [1], **({"multi_modal_data": {}} if job.rank == 1 else {})}]
        try:
            accelerated.request_outputs(SimpleNamespace(job=job), prompts, [None])  # type: ignore[arg-type]
        except HybridEngineError as error:
            return type(error).__name__, violations_of(error), str(error)
    return "", [], ""


def test_images_of_one_rank_end_the_rollout_of_all(ranks: Ranks) -> None:
    first, second = ranks.launch(images_of_rank_1, 2)
    assert second[:2] == ("ConfigError", [("dataset", "not-supported")])
    assert first[:2] == ("RemoteError", [])
    assert "dataset: has images" in first[2], "the other rank's error"


def test_a_transfer_belongs_to_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It authenticates to the server by the token."""
    pretend_version(monkeypatch, f"{ours.TESTED_VERSION}.0")
    transfer = ours.WeightTransfer(server_max_lag=4)
    with pytest.raises(StateError, check=has_code("not-attached", "attach(trainer)")):
        transfer.init_weight_transfer()
    arguments = SimpleNamespace(vllm_server_base_url="http://127.0.0.1:8000", weight_sync_steps=2)
    monkeypatch.setenv(TOKEN, "secret")
    sent = []

    def send(adapter: HTTPAdapter, request: PreparedRequest, **_: Any) -> Response:
        sent.append(request)
        response = Response()
        response.status_code = 200
        response.raw = io.BytesIO(b'{"vllm_config": {"load_config": {"load_format": "auto"}}}')
        return response

    monkeypatch.setattr(HTTPAdapter, "send", send)
    client = SimpleNamespace(wait_for_server_ready=lambda: None)
    trainer = SimpleNamespace(
        accelerator=accelerator(), args=arguments, model=SimpleNamespace(), vllm_client=client
    )
    transfer.attach(trainer)
    assert transfer._config["servers"] == ["http://127.0.0.1:8000"]
    assert transfer._config["server_max_lag"] == 4, "arguments of the caller override"
    refused = has_violation(
        "vllm_server_base_url", "wrong-load-format", "auto", "--load-format hybrid_engine"
    )
    with pytest.raises(ConfigError, check=refused):
        transfer.init_weight_transfer()
    target = "/server_info?config_format=json"
    assert [(request.path_url, request.headers[PROOF_HEADER]) for request in sent] == [
        (target, proof_of_request("GET", target, b""))
    ]
    trainer.model.peft_config = {"default": object()}
    with pytest.raises(ConfigError, check=has_violation("peft_config", "not-supported")):
        transfer.attach(trainer)
