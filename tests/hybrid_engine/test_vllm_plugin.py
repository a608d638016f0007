"""The entry point of vLLM's plug-ins, in separate processes: it changes them for good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hybrid_engine.tools.programs import run_python
from tests.zoo.families import write_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
PRELUDE = """
import importlib, json, pickle, sys

def state():
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    loading = importlib.import_module("vllm.model_executor.model_loader")
    transfer = importlib.import_module("vllm.distributed.weight_transfer")
    return {
        "gate": hasattr(core.resume_scheduler, "__wrapped__"),
        "format": "hybrid_engine" in loading._LOAD_FORMAT_TO_MODEL_LOADER,
        "transfer": "hybrid_engine" in transfer.WeightTransferEngineFactory._registry,
    }

def configured(**arguments):
    from vllm import EngineArgs
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    return EngineArgs(sys.argv[1], skip_tokenizer_init=True, **arguments).create_engine_config()

def print_last(value):
    print()
    print(json.dumps(value))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture
def run(model: Path) -> Callable[[str], dict[str, object]]:
    """Return a function that runs code in a new process, and returns the value that it printed
    last."""

    def run_code(code: str) -> dict[str, object]:
        done = run_python("-c", PRELUDE + code, model, status=0, timeout=300)
        return json.loads(done.stdout.splitlines()[-1])

    return run_code


def test_other_engines_of_the_environment_are_left_alone(
    run: Callable[[str], dict[str, object]],
) -> None:
    code = """
def refusal(**arguments):
    try:
        configured(**arguments)
    except Exception as error:
        return error.code

config = configured()
loaded = [name for name in sys.modules if name.startswith("hybrid_engine.")]
without_format = refusal(weight_transfer_config={"backend": "hybrid_engine"})
from hybrid_engine.backends.vllm import internals
internals.missing_for_servers = lambda: ["a name"]
without_names = refusal(load_format="hybrid_engine")
print_last({
    **state(), "mode": config.model_config.logprobs_mode, "loaded": loaded,
    "without format": without_format,
    "without names": without_names, "others": configured().load_config.load_format,
})
"""
    result = run(code)
    loaded = result.pop("loaded")
    assert loaded == [
        "hybrid_engine.errors",
        "hybrid_engine.ranks",
        "hybrid_engine.ranks.uncaught",
        "hybrid_engine.serving",
        "hybrid_engine.vllm_plugin",
    ]
    assert result == {
        "gate": False,
        "format": False,
        "transfer": False,
        "mode": "raw_logprobs",
        "without format": "wrong-load-format",
        "without names": "names-are-missing",
        "others": "auto",
    }


def test_a_process_that_gets_the_configuration_is_prepared(
    run: Callable[[str], dict[str, object]], model: Path
) -> None:
    code = """
config = configured(load_format="hybrid_engine")
pickle.dump(config, open(sys.argv[1] + "/configuration", "wb"))
print_last({**state(), "mode": config.model_config.logprobs_mode})
"""
    is_prepared = {"gate": True, "format": True, "transfer": True}
    assert run(code) == {**is_prepared, "mode": "processed_logprobs"}
    # A process without plug-ins, such as an actor.
    other = """
config = pickle.load(open(sys.argv[1] + "/configuration", "rb"))
again = pickle.loads(pickle.dumps(config)).load_config.load_format
print_last({**state(), "again": type(again).__name__})
"""
    assert run(other) == {**is_prepared, "again": "GatedFormat"}
