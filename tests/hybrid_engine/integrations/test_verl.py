"""Our classes instead of verl's manager, actors and worker; without verl, error messages.

Packages: `pip install --no-deps verl==0.9.1`, TransferQueue, pylatexenc, tensordict 0.10, pyvers,
orjson, hydra-core, omegaconf, antlr4-python3-runtime 4.9.3, codetiming, torchdata, datasets,
pandas, pyarrow and transformers 5.19, which is newer than verl allows. With Megatron: megatron-core
0.16.1 and mbridge 0.15.1, or `pip install --no-deps megatron-bridge==0.3.1 six`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError, DependencyError, StateError
from hybrid_engine.integrations import require_tested
from tests.harness.errors import has_code, has_violation, has_violations, refused
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.harness.vllm_server import ENVIRONMENT, FILLED, PLAIN, serving
from tests.hybrid_engine.integrations.installed import pretend_version
from tests.zoo.tiny_models import save_model
from tests.zoo.tokenizers import save_characters

OURS = "hybrid_engine.integrations.verl"
NUM_UPDATES = 3
WITH_TOKENIZER = [argument for argument in PLAIN if argument != "--skip-tokenizer-init"]
ENGINES = {
    "fsdp2": ("FSDPEngineWithLMHead", ["DTensor"]),
    "mbridge": ("MegatronEngineWithLMHead", ["DistributedDataParallel"]),
    "megatron-bridge": ("MegatronEngineWithLMHead", ["DistributedDataParallel"]),
}
"""Builder of the model -> verl's engine, and the types of the live modules."""
RUNS = [
    *itertools.product(["standalone", "hybrid"], ["fsdp2", "mbridge"]),
    ("hybrid", "megatron-bridge"),
]
CLOSE = 1e-5
"""Tolerance of float32 log-probabilities of vLLM and trainer."""


def missing_requirement() -> str | None:
    """Return why verl cannot be imported; None if it can."""
    try:
        require_tested("verl", "0.9.1", "verl==0.9.1")
        import_module("verl.checkpoint_engine.base")
    except DependencyError as error:
        return str(error)
    except ImportError as error:
        return f"verl cannot be imported: {error}"
    return None


MISSING = missing_requirement()
with_verl = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def ours() -> Any:
    return import_module(OURS)


# -- runs ------------------------------------------------------------------------------------------


def environment(stand_ins: str) -> dict[str, str]:
    """Return the environment of a program that runs verl on this machine."""
    paths = [str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **ENVIRONMENT,
        "RAY_memory_monitor_refresh_ms": "0",
        "PYTHONPATH": os.pathsep.join(paths),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": stand_ins,
        "VERL_ENGINE_VENDOR": "hybrid_engine",
    }


@with_verl
@pytest.mark.long
@pytest.mark.engines
@pytest.mark.parametrize(("mode", "builder"), RUNS)
def test_updates_of_verls_manager_reach_a_server(tmp_path: Path, mode: str, builder: str) -> None:
    """Servers keep their weights (`standalone`), or release them when put to sleep (`hybrid`).

    `builder`: FSDP2, or the bridge that builds Megatron's model.
    """
    if builder == "megatron-bridge":
        try:
            require_tested("megatron-bridge", "0.3.1", "megatron-bridge==0.3.1")
        except DependencyError as error:
            pytest.skip(str(error))
    model = tmp_path / "model"
    out = tmp_path / "out.json"
    save_model(model, "qwen3", head_dim=32, max_position_embeddings=128)
    save_characters(model)
    settings = environment("tests.hybrid_engine.integrations.verl_on_cpu")
    with serving(model, tmp_path, *WITH_TOKENIZER, *FILLED) as server:
        command = [sys.executable, "-m", "tests.hybrid_engine.integrations.verl_run"]
        command += [str(model), server.url, str(out), mode, builder]
        subprocess.run(command, env=settings, cwd=REPO_ROOT, timeout=500, check=True)
    results = json.loads(out.read_text())
    keeps_weights = mode == "standalone"
    for step, update in enumerate(results["updates"]):
        assert update["difference"] < CLOSE
        assert update["calls"] == (
            ["abort", f"step {step}", "resume"] if keeps_weights else [f"step {step}"]
        )
        assert update["metrics"]["hybrid_engine/bytes_received"] > 0
        assert update["num_different"] == [0, 0], "tensors that differ from verl's"
        norms = [norm for norm in update["norms"] if norm is not None]
        assert norms == pytest.approx([norms[0]] * len(norms))
        assert norms[0] > 0
        for rank in update["after update"]:
            assert (rank["engine"], rank["kinds"]) == ENGINES[builder]
            assert rank["state"] == ("train" if keeps_weights else "infer")
            assert rank["verified"] == rank["tensors"], "bit by bit"
            assert rank["ordinary"] == [], "tensors without elastic memory"
            assert rank["version"] == step
            assert rank["surplus"] == 0, "bytes above the minimum"
        assert [rank["state"] for rank in update["after sleep"]] == ["train"] * 2
    drawn = [update["drawn"] for update in results["updates"]]
    assert drawn[0] != drawn[1] != drawn[2], "weights must differ"
    assert results["weights"] == (
        {"weight_version": str(NUM_UPDATES - 1)} if keeps_weights else {"weight_version": "none"}
    )


NUM_TOKENS = 4


def share_of_digits(solution_str: str, **_: Any) -> float:
    """Return the reward of a text; verl imports this function by its path."""
    return sum(map(str.isdigit, solution_str)) / NUM_TOKENS


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TRAINER: Values = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 16,
    "data.max_prompt_length": 8,
    "data.max_response_length": NUM_TOKENS,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.optim.lr": 1e-2,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 64,
    f"{ACTOR}.use_torch_compile": False,
    f"{ACTOR}.fsdp_config.use_torch_compile": False,
    f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 4,
    f"{ROLLOUT}.dtype": "float32",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.max_model_len": 32,
    f"{ROLLOUT}.enforce_eager": True,
    f"{ROLLOUT}.free_cache_engine": False,
    f"+{ROLLOUT}.enable_sleep_mode": False,
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": 1 << 26,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64,
    f"{ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": __file__,
    "reward.custom_reward_function.name": share_of_digits.__name__,
    "trainer.logger": "console",
    "trainer.n_gpus_per_node": 1,
    "trainer.device": "cpu",
    "trainer.total_training_steps": 6,
    "trainer.val_before_train": False,
    "trainer.resume_mode": "disable",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""Settings of verl's trainer for a machine whose CPU counts as a GPU for Ray."""
WITH_ENGINE: Values = {
    f"{ROLLOUT}.load_format": "hybrid_engine",
    f"+{ROLLOUT}.engine_kwargs.vllm.weight_transfer_config.backend": "hybrid_engine",
    f"{ROLLOUT}.checkpoint_engine.backend": "hybrid_engine",
    f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.hybrid_engine.verify": "full",
}
"""Settings that docs/frameworks.md adds."""


@with_verl
@pytest.mark.long
@pytest.mark.engines
def test_verls_trainer_learns_with_its_own_server(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    save_model(tmp_path / "model", "llama", head_dim=32, max_position_embeddings=128)
    save_characters(tmp_path / "model")
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate("abcdefghijklmnop" * 8)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    files = {
        "data.train_files": tmp_path / "rows.parquet",
        "data.val_files": tmp_path / "rows.parquet",
    }
    settings = {
        **TRAINER,
        **WITH_ENGINE,
        **files,
        "actor_rollout_ref.model.path": tmp_path / "model",
    }
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        env=environment("tests.hybrid_engine.integrations.verl_trainer_on_cpu"),
        cwd=tmp_path,
        timeout=550,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert "[Reshard] direction=train->infer version=0 " in ended.stdout
    rewards = [float(value) for value in re.findall(r"critic/rewards/mean:([\d.]+)", ended.stdout)]
    assert len(rewards) == 6
    assert rewards[-1] > rewards[0] + 0.1
    differences = re.findall(r"rollout_probs_diff_max:([\d.e-]+)", ended.stdout)
    assert max(map(float, differences)) < CLOSE


# -- contracts -------------------------------------------------------------------------------------


@with_verl
def test_verl_has_the_replaced_classes(ours: Any) -> None:
    from verl.checkpoint_engine import base
    from verl.workers.config import CheckpointEngineConfig
    from verl.workers.rollout.replica import RolloutMode, RolloutReplica

    assert base.CheckpointEngineRegistry.get(ours.NAME) is ours.Publisher
    assert not ours.Publisher.__abstractmethods__
    for name in ("prepare", "build_topology", "send_weights", "receive_weights", "finalize"):
        expected = inspect.signature(getattr(base.CheckpointEngine, name)).parameters.keys()
        assert inspect.signature(getattr(ours.Publisher, name)).parameters.keys() == expected, name
    for name, method in vars(ours.Manager).items():
        if inspect.isroutine(method) and name != "_on_actors":
            expected = inspect.signature(
                getattr(base.CheckpointEngineManager, name)
            ).parameters.keys()
            assert inspect.signature(method).parameters.keys() == expected, name
    update = inspect.getsource(base.CheckpointEngineManager.update_weights)
    called = ("abort_replicas()", "release_kv_cache_replicas()", "build_process_group(rollout)")
    called += (
        "actor_wg.update_weights(global_steps=global_steps, mode=self.backend)",
        "resume_generation_replicas()",
    )
    assert [call for call in called if call not in update] == []
    assert {
        "backend",
        "custom_backend_module",
        "engine_kwargs",
    } <= CheckpointEngineConfig.__dataclass_fields__.keys()
    assert RolloutMode.HYBRID.value == "hybrid"
    assert isinstance(RolloutReplica.server_address, property)


@with_verl
def test_verls_trainers_import_our_manager(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package = import_module("verl.checkpoint_engine")
    monkeypatch.setattr(package, "CheckpointEngineManager", None)
    ours.register_classes()
    assert package.CheckpointEngineManager is ours.Manager
    root = Path(str(import_module("verl").__file__)).parent
    for trainer in ("trainer_base.py", "trainer_separate_async.py"):
        source = (root / "trainer/ppo/v1" / trainer).read_text()
        assert "from verl.checkpoint_engine import CheckpointEngineManager" in source


@with_verl
def test_an_empty_delta_stream_calls_no_worker_of_vllm(ours: Any) -> None:
    """Our `delta_flush` relies on this.

    The source is read, since importing verl's rollout needs another vLLM.
    """
    source = (
        Path(str(import_module("verl").__file__)).parent
        / "workers/rollout/vllm_rollout/vllm_rollout.py"
    )
    before, _, after = source.read_text().partition("except StopAsyncIteration:")
    assert f'wire_format == "{ours.Publisher.wire_format}"' in before
    ends, _, _ = after.partition("return")
    assert "set_global_steps" in ends
    assert "_execute_method" not in ends


@with_verl
def test_verl_reads_plugins_and_vendors_by_these_names() -> None:
    root = Path(str(import_module("verl").__file__)).parent
    assert '_entry_points(group="verl.plugins")' in (root / "__init__.py").read_text()
    assert "VERL_ENGINE_VENDOR" in (root / "workers/engine/base.py").read_text()
    actor = (root / "workers/engine_workers.py").read_text()
    assert (
        "self.checkpoint_engine.send_weights(per_tensor_param, global_steps=global_steps)" in actor
    )


# -- without its workers ---------------------------------------------------------------------------


def engine(strategy: str = "fsdp2", **offloads: bool) -> Any:
    offloads = {"param": False, "optimizer": False, "policy": False, **offloads}
    return SimpleNamespace(
        engine_config=SimpleNamespace(strategy=strategy, offload_policy=offloads["policy"]),
        is_param_offload_enabled=offloads["param"],
        is_optimizer_offload_enabled=offloads["optimizer"],
        module=None,
    )


def megatron_engine(**settings: Any) -> Any:
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig, QATEngineConfig

    return SimpleNamespace(
        engine_config=McoreEngineConfig(qat=QATEngineConfig(enable=True), **settings),
        optimizer_config=McoreOptimizerConfig(lr=1e-3, use_precision_aware_optimizer=True),
        model_config=SimpleNamespace(lora={"rank": 8}),
        is_param_offload_enabled=True,
        is_optimizer_offload_enabled=True,
        module=[],
    )


@with_verl
def test_unsupported_settings_are_refused(ours: Any) -> None:
    publisher = ours.Publisher(bucket_size=1)
    wrong_engine = has_violation(
        "actor.strategy", "wrong-engine", "export VERL_ENGINE_VENDOR=hybrid_engine"
    )
    with pytest.raises(ConfigError, check=wrong_engine):
        publisher._build_engine(iter(()))
    refused = has_violations(
        ("actor.strategy", "unsupported-value"),
        ("actor.fsdp_config.param_offload", "unsupported-value"),
        ("actor.fsdp_config.optimizer_offload", "unsupported-value"),
        ("actor.fsdp_config.offload_policy", "unsupported-value"),
        ("servers", "no-servers"),
    )
    with pytest.raises(ConfigError, check=refused) as caught:
        publisher._build_engine(
            ours.LiveWeights(engine("fsdp", param=True, optimizer=True, policy=True), ())
        )
    assert "Export VERL_ENGINE_VENDOR=hybrid_engine in all" in str(caught.value)


@with_verl
def test_unsupported_settings_of_megatrons_engine_are_refused(ours: Any) -> None:
    """They are refused when the actor is built; a reference model may have them."""
    section = ("param_offload", "optimizer_offload", "use_megatron_fsdp", "qat.enable")
    keys = [f"actor.megatron.{key}" for key in section]
    keys += ["actor.optim.use_precision_aware_optimizer", "model.lora.rank"]
    built = []

    class Theirs:
        def initialize(self) -> None:
            built.append(self)

    kind = type("Both", (ours.ElasticMegatronEngine, Theirs), {})
    actor = kind()
    reference = kind()
    vars(actor).update(vars(megatron_engine(use_megatron_fsdp=True)))
    vars(reference).update(vars(megatron_engine(use_megatron_fsdp=True, forward_only=True)))
    weights = ours.LiveWeights(actor, ())
    refused = has_violations(*((key, "unsupported-value") for key in keys), exactly=False)
    for build in (actor.initialize, lambda: ours.Publisher(bucket_size=1)._build_engine(weights)):
        with pytest.raises(ConfigError, check=refused):
            build()
    reference.initialize()
    assert built == [reference]


@with_verl
def test_another_backend_is_refused(ours: Any) -> None:
    """verl's default trainers pass "naive" to the manager, whatever the replicas have."""
    trainers = SimpleNamespace(backend="naive", custom_backend_module=None)
    configured = SimpleNamespace(backend=ours.NAME)
    replica = SimpleNamespace(config=SimpleNamespace(checkpoint_engine=configured))
    ours.Manager(trainers, None, [replica])
    configured.backend = "nccl"
    key = "rollout.checkpoint_engine.backend"
    with pytest.raises(ConfigError, check=has_violation(key, "unsupported-value", "Use hybrid")):
        ours.Manager(trainers, None, [replica])


@with_verl
def test_live_weights_include_verls_tensors(ours: Any) -> None:
    class Theirs:
        def get_per_tensor_param(self, layered_summon: bool = False) -> tuple[Any, str]:
            return iter([("weight", layered_summon)]), "adapter"

    kind = type("Both", (ours.TaggedEngine, Theirs), {})
    weights, adapter = kind().get_per_tensor_param(layered_summon=True)
    assert (list(weights), adapter) == ([("weight", True)], "adapter")
    assert isinstance(weights.engine, Theirs)


@with_verl
def test_rank_0_prints_the_first_switch(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = SimpleNamespace(seconds=1.0, bytes_received=2)
    for is_master in (True, False):
        publisher = ours.Publisher(bucket_size=1, is_master=is_master)
        publisher.engine = SimpleNamespace(sharding=SimpleNamespace(enter=lambda _: report))
        for _ in range(2):
            asyncio.run(publisher.send_weights(()))
    assert capsys.readouterr().out == f"{report}\n"


@with_verl
def test_replicas_cannot_change(ours: Any) -> None:
    publisher = ours.Publisher(bucket_size=1)
    publisher.init_process_group(["http://127.0.0.1:1"])
    publisher.init_process_group(["http://127.0.0.1:2"])
    publisher.engine = object()
    with refused(StateError, "different-servers", "127.0.0.1:1", "127.0.0.1:2"):
        publisher.init_process_group(["http://127.0.0.1:1"])


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, None)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    with refused(DependencyError, "needs-package", "verl is not installed"):
        import_module(OURS)


def test_an_untested_version_is_reported_also_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl drops errors of a plug-in's import, so the registered stub raises them again."""
    registered = {}
    registry = SimpleNamespace(
        register=lambda name: functools.partial(registered.__setitem__, name)
    )
    base = SimpleNamespace(CheckpointEngineRegistry=registry)
    for name, module in {
        "verl": None,
        "verl.checkpoint_engine": None,
        "verl.checkpoint_engine.base": base,
    }.items():
        monkeypatch.setitem(sys.modules, name, module or SimpleNamespace(__path__=[]))
    pretend_version(monkeypatch, "0.97.3")
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    untested = has_code("untested-version", "verl 0.97.3", "0.9.1 was tested")
    with pytest.raises(DependencyError, check=untested):
        import_module(OURS)
    with pytest.raises(DependencyError, check=untested):
        registered["hybrid_engine"](bucket_size=1)
