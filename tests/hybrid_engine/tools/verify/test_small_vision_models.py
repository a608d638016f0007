"""`verify` and `certify` of small models of images and text with a published processor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import table_for
from hybrid_engine.tools.verify import certify, verify
from hybrid_engine.tools.verify.cases import case_of
from hybrid_engine.tools.verify.small_models import Divisors, reduced_config
from tests.harness.errors import has_violation, violated
from tests.hybrid_engine.tools.programs import run_python
from tests.hybrid_engine.tools.verify.test_verify import kinds
from tests.zoo.families import read_config, write_config
from tests.zoo.published_configs import PUBLISHED_VISION
from tests.zoo.vision_models import SMALL_VISION, required_environment, write_vision_model

QWEN3_VL = "Qwen3VLForConditionalGeneration"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_VISION)
def test_small_models_keep_tensors_and_vocabulary_of_published_ones(name: str) -> None:
    published = PUBLISHED_VISION[name]
    table = table_for(reduced_config(published, 4, Divisors((1, 2))))
    assert kinds(table) == kinds(table_for(published))
    assert table.dims.num_layers == 4
    # The tokenizer and the processor have their tokens at the end of the vocabulary.
    assert table.dims.vocab_size == table_for(published).dims.vocab_size
    assert table.placeholders == table_for(published).placeholders
    # Mostly vocabulary and tower.
    assert sum(map(math.prod, table.shapes.values())) < 0.05 * sum(
        map(math.prod, table_for(published).shapes.values())
    )


def test_layers_of_a_special_kind_keep_their_places() -> None:
    small = reduced_config(PUBLISHED_VISION["qwen3-vl"], 4)
    assert small["vision_config"]["deepstack_visual_indexes"] == [
        1,
        2,
        3,
    ]  # of 8, 16, 24 in 27 layers
    assert small["vision_config"]["out_hidden_size"] == small["text_config"]["hidden_size"]
    assert small["text_config"]["rope_parameters"]["mrope_section"] == [
        6,
        5,
        5,
    ]  # pairs of 32 elements


def test_models_without_a_processor_are_refused(tmp_path: Path) -> None:
    config = {"architectures": [QWEN3_VL], **SMALL_VISION[QWEN3_VL]}
    write_config(tmp_path, config)
    for call in (
        lambda: case_of("small", tmp_path, tmp_path / "small", 1, {"fsdp": {}}, {}),
        lambda: certify.prepare(tmp_path, "small", (), tmp_path / "scratch"),
    ):
        with violated(ConfigError, ("model", "needs-processor")):
            call()


@pytest.mark.slow
def test_a_package_that_vllm_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry

    from hybrid_engine.backends.vllm.isolation import register_model_class

    def load_model_cls() -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setitem(
        ModelRegistry.models,
        QWEN3_VL,
        SimpleNamespace(module_name="qwen3_vl", load_model_cls=load_model_cls),
    )
    model = write_vision_model(tmp_path, QWEN3_VL)
    needs = has_violation("model", "needs-package", QWEN3_VL, "torchvision")
    with pytest.raises(ConfigError, check=needs):
        register_model_class(str(model))


@pytest.fixture
def _torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = required_environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_torchvision")
def test_certify_of_a_model_of_images(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", QWEN3_VL)
    result = run_python("-m", "hybrid_engine", "certify", model, "--json", status=0, timeout=550)
    reload, *_, own = json.loads(result.stdout)["models"]["model"]
    assert (reload["status"], own["status"]) == ("equal", "equal")
    assert own["num_tensors"] == reload["num_tensors"] > 60


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_torchvision")
def test_verify_of_a_model_of_images(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "published", QWEN3_VL)
    config = read_config(model)
    config["text_config"] |= {"num_hidden_layers": 12, "hidden_size": 256}
    config["vision_config"] |= {
        "depth": 9,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [2, 5],
    }
    write_config(model, config)
    sizes = {"infer_tensor_parallel_size": 2}
    case = case_of("small", model, tmp_path / "small", 2, {"fsdp": {}}, sizes)
    (verdict,) = verify.run_cases([case], 2, 500)
    assert verdict.faults == []
    assert verdict.num_parameters > 3 * 2 * 60
    assert verdict.vllm is not None
