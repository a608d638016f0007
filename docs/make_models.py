"""Makes the table of docs/models.md: which model works with which trainer and feature.

A cell is "no" if the rules of a configuration, or the first switch, refuse it for a config.json of
the architecture, "yes" if a test runs it with both engines, and "experimental" otherwise.

Run `make docs` after a change of families, rules or tests of models; a test compares.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybrid_engine.config import load_config
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.models.derived import takes_images
from hybrid_engine.models.families import TABLES
from hybrid_engine.models.quantization_configs import block_config
from tests.hybrid_engine.backends.fsdp.test_derived_models import EXCLUDED
from tests.hybrid_engine.end_to_end.test_derived_megatron import MODELS, WITH_TORCHVISION
from tests.hybrid_engine.models.small_configs import SMALL, VARIANTS, small_config, variant_config
from tests.hybrid_engine.serving.test_servers import CASES
from tests.zoo.families import served_config
from tests.zoo.published_configs import PUBLISHED, QWEN_1_5_MOE
from tests.zoo.vision_models import SMALL_VISION

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- made by make_models.py -->\n\n", "\n<!-- end -->\n"

NAMES = {
    "AfmoeForCausalLM": "Trinity",
    "DeepseekV2ForCausalLM": "V2, V2-Lite",
    "DeepseekV3ForCausalLM": "V3, R1",
    "DeepseekV32ForCausalLM": "V3.2",
    "Gemma3ForCausalLM": "text only",
    "Gemma3ForConditionalGeneration": "with images",
    "Gemma4ForCausalLM": "text only",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM-4.5 to 4.7",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GlmForCausalLM": "GLM-4 of 2024",
    "GlmMoeDsaForCausalLM": "GLM-5",
    "LlamaForCausalLM": "Llama 2 to 3.2, SmolLM2",
    "NemotronHForCausalLM": "without experts",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
}
"""Architecture -> the models that its name does not show."""

SWITCHED = {config["architectures"][0] for config in PUBLISHED.values()}
"""What `make matrix` switches from both trainers, by a written name table."""
DERIVED = {*SMALL, *SMALL_VISION, *(name for name, _ in VARIANTS.values())} - {*EXCLUDED}
"""What a test switches from FSDP2, by a derived table."""
ATTACHED = {model.architecture for model in (*MODELS, *WITH_TORCHVISION)}
STAND_INS = {"MiniMaxM2ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"}
STAND_INS |= {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
"""Architectures whose test has kernels of its own, or changes vLLM, because a CPU has none."""
DIFFERING = {"Cohere2ForCausalLM", "Ernie4_5_MoeForCausalLM"}
"""Architectures that vLLM computes otherwise than transformers: the first switch refuses them."""
SERVED = {served_config(case.family)["architectures"][0] for case in CASES.values()}
# tests/hybrid_engine/tools/verify/matrix.py, and test_lora.py of backends/fsdp.
ADAPTED = {f"{name}ForCausalLM" for name in ("Llama", "Qwen3", "Qwen3Moe", "Mixtral")}
ADAPTED |= {"DeepseekV2ForCausalLM", "GptOssForCausalLM"}

FSDP2 = {"actor_config": {"fsdp": {}}}
SERVER = {"generate_config": {"servers": ["http://127.0.0.1:8000"]}}


def texts() -> dict[Path, str]:
    """Return the whole page, of which all but the table is written by hand."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return {PAGE: before + BEGIN + table() + END + rest.partition(END)[2]}


def table() -> str:
    """Return a row for all architectures that can do the same."""
    able = defaultdict[tuple[str, ...], list[str]](list)
    for architecture, config in sorted(_configs().items()):
        able[tuple(_cells(architecture, config))].append(_shown(architecture))
    lines = ["| `architectures` in config.json | " + " | ".join(ABILITIES) + " |"]
    lines.append("|---" * (len(ABILITIES) + 1) + "|")
    order = ("yes", "experimental", "no")
    for cells in sorted(able, key=lambda cells: [order.index(cell) for cell in cells]):
        lines.append(f"| {', '.join(able[cells])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _configs() -> dict[str, Mapping[str, Any]]:
    """Return architecture -> contents of a config.json."""
    published = (*PUBLISHED.values(), QWEN_1_5_MOE)
    configs = {config["architectures"][0]: config for config in published}
    configs |= {architecture: small_config(architecture) for architecture in SMALL}
    for name, (architecture, _) in VARIANTS.items():
        # Published files have more keys than the small ones.
        if architecture not in configs or "quantization_config" in variant_config(name):
            configs[architecture] = variant_config(name)
    vision = {name: {**config, "architectures": [name]} for name, config in SMALL_VISION.items()}
    if missing := TABLES.keys() - configs.keys():
        raise ValueError(f"no config.json of {sorted(missing)}: add one to published_configs.yaml")
    return {**configs, **vision}


def _shown(architecture: str) -> str:
    names = NAMES.get(architecture)
    return f"`{architecture}`" + (f" ({names})" if names else "")


def _cells(architecture: str, config: Mapping[str, Any]) -> list[str]:
    if architecture in DIFFERING:
        return ["no"] * len(ABILITIES)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(config)))
        return [able(architecture, config, directory) for able in ABILITIES.values()]


def _is_accepted(directory: str, *sections: Mapping[str, Any], own_loop: bool = False) -> bool:
    values: dict[str, Any] = {"model": directory}
    for section in sections:
        values |= section
    try:
        load_config(values, 2, own_weights=True, own_loop=own_loop)
    except HybridEngineError:
        return False
    return True


def _word(is_accepted: bool, has_run: bool) -> str:
    return ("yes" if has_run else "experimental") if is_accepted else "no"


def _fsdp(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    has_run = architecture in SWITCHED | DERIVED and architecture != "ApertusForCausalLM"
    return _word(_is_accepted(directory, FSDP2), has_run)


def _megatron(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    return _word(_is_accepted(directory), architecture in SWITCHED)


def _attach(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    has_run = architecture in (SWITCHED | ATTACHED) - STAND_INS
    return _word(_is_accepted(directory, own_loop=True), has_run)


def _server(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    # A server takes no prompts with images, so their models are of no use there.
    is_accepted = _is_accepted(directory, FSDP2, SERVER) and not takes_images(config)
    return _word(is_accepted, architecture in SERVED)


def _images(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    # vLLM's attention on CPUs does not compute Gemma's images, and GPUs have not run them.
    return _word(takes_images(config), not architecture.startswith("Gemma3"))


def _lora(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    return _word(_is_accepted(directory, FSDP2), architecture in ADAPTED)


def _eight_bits(architecture: str, config: Mapping[str, Any], directory: str) -> str:
    try:
        block_config(config, "fp8")
    except HybridEngineError:
        return "no"
    # On CPUs kernels of torch stood in for vLLM's.
    return "experimental"


ABILITIES: Mapping[str, Callable[[str, Mapping[str, Any], str], str]] = {
    "FSDP2": _fsdp,
    "Megatron": _megatron,
    "`attach`": _attach,
    "server": _server,
    "images": _images,
    "LoRA": _lora,
    "8 bits": _eight_bits,
}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text)
