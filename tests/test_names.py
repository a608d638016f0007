"""Names in backquotes in documents and docstrings exist."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.harness.launch import REPO_ROOT

# Names in files of installed libraries that no code here uses.
IN_LIBRARIES = {
    "megatron/core/model_parallel_config.py": "cross_entropy_loss_fusion",
    "megatron/core/optimizer/distrib_optimizer.py": "dp_reshardable",
    "megatron/core/transformer/multi_token_prediction.py": (
        "multi_token_prediction.mtp_on_this_rank"
    ),
    "megatron/core/transformer/transformer_block.py": (
        "transformer_block.TransformerBlock.has_final_layernorm_in_this_stage"
    ),
    "torch/distributed/checkpoint/state_dict.py": "_extra_state",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": "FSDPParamGroup",
    "transformers/data/data_collator.py": "DataCollatorWithFlattening",
    "vllm/config/model.py": "ModelConfig sleep_mode_backend",
    "vllm/distributed/weight_transfer/base.py": "VLLMWeightSyncClient",
    "vllm/engine/arg_utils.py": "EngineArgs.get_batch_defaults",
    "vllm/model_executor/layers/linear.py": "output_dim",
    "vllm/model_executor/layers/logits_processor.py": "LogitsProcessor",
    "vllm/outputs.py": "CompletionOutput RequestOutput",
    "vllm/v1/worker/utils.py": "request_memory",
}

# Names of software that is not installed here, but mentioned in comparisons and explanations.
ELSEWHERE = {
    "TRL": "environment_factory generation_batch_size",
    "TRL, options": "eval_on_start",
    "TRL, too": "rollout_func get_server_info vllm_enable_sleep_mode",
    "verl": "algorithm.norm_adv_by_std_in_grpo",
    "verl, too": "rollout.multi_turn save_freq",
    "verl's trainer": "trainer.test_freq",
    "NeMo-RL": "nccl_reshard",
    "Megatron-Bridge": "get_conversion_tasks",
    "megatron-core 0.19": "_remove_glu_interleaving",
    "CUDA, NCCL, Hugging Face, Slurm": "cudaGetLastError NCCL_SOCKET_IFNAME KillWait",
    "composed names of columns": "critic_seconds reward_seconds",
    "placeholders": "held_out_NAME loss_NAME reward_NAME linear_fc1.weightN",
}

PROGRAMS = ("hybrid_engine", "megatron_patches", "examples", "benchmarks")
FOLDERS = (*PROGRAMS, "tests", "docs", "deploy")
CODE = (
    *(f"{folder}/**/*.{ending}" for folder in FOLDERS for ending in ("py", "yaml")),
    "*.py",
    "Makefile",
    "*.toml",
)
PAGES = ("*.md", "docs/*.md", "examples/**/*.md", "patches/*.md")
NOT_READ = ("CHANGELOG.md", "configuration.md")  # History; generated from existing fields.

FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
DOCSTRING = re.compile(r'""".*?"""', re.DOTALL)
COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
QUOTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\([^`\n]*\))?`")
MEMBER = re.compile(r"(?<![\w.`])[A-Z]\w*[a-z]\w*(?:\.[a-z_]\w*)+")
CLASS = re.compile(r"^ *class (\w+)(?:\[[^\n]*?\])?(?:\(([^)]*)\))?:", re.MULTILINE)


def files(*globs: str) -> list[Path]:
    return [path for glob in globs for path in sorted(REPO_ROOT.glob(glob)) if path.is_file()]


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def words_of(path: Path) -> frozenset[str]:
    """Return the words of a file's code, without docstrings and comments."""
    text = text_of(path)
    code = COMMENT.sub("", DOCSTRING.sub("", text)) if path.suffix == ".py" else text
    return frozenset(re.findall(r"\w+", code))


def mentioned_names() -> Iterator[tuple[str, str]]:
    """Yield (name, file) of each mentioned name; in docstring diagrams only members of classes."""
    for page in files(*PAGES):
        if page.name not in NOT_READ:
            yield from names_in(FENCE.sub("", text_of(page)), page)
    for module in files(*(f"{folder}/**/*.py" for folder in PROGRAMS)):
        yield from names_in(text_of(module), module)
        for docstring in DOCSTRING.findall(text_of(module)):
            yield from (
                (name, str(module.relative_to(REPO_ROOT))) for name in MEMBER.findall(docstring)
            )


def names_in(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for name, call in QUOTED.findall(text):
        if call or "." in name or "_" in name.strip("_") or re.search("[a-z][A-Z]", name):
            yield name, str(path.relative_to(REPO_ROOT))


def test_names_exist() -> None:
    used = set[str]().union(*(words_of(path) for path in files(*CODE) if path != Path(__file__)))
    for page in files(*PAGES):
        used.update(
            word for block in FENCE.findall(text_of(page)) for word in re.findall(r"\w+", block)
        )
    for path in files("*", *(f"{folder}/**/*" for folder in FOLDERS)):
        used.update(re.findall(r"\w+", path.name))
    classes = defaultdict[str, list[tuple[Path, list[str]]]](list)
    for module in files(*(f"{folder}/**/*.py" for folder in PROGRAMS)):
        for name, bases in CLASS.findall(text_of(module)):
            classes[name].append((module, re.findall(r"\w+", bases)))

    def has(owner: str, member: str) -> bool:
        """Return whether the module of a class, or of one of its bases, contains the word."""
        return any(
            member in words_of(module)
            or any(base != owner and has(base, member) for base in bases if base in classes)
            for module, bases in classes[owner]
        )

    def exists(name: str) -> bool:
        parts = name.split(".")
        members = [(owner, member) for owner, member in pairwise(parts) if owner in classes]
        return used.issuperset(parts) and all(has(owner, member) for owner, member in members)

    excepted = {
        name for names in (*IN_LIBRARIES.values(), *ELSEWHERE.values()) for name in names.split()
    }
    mentioned = list(mentioned_names())
    assert len(mentioned) > 2000
    missing = {name: where for name, where in mentioned if not exists(name)}
    assert {name: where for name, where in missing.items() if name not in excepted} == {}
    assert excepted - missing.keys() == set(), "exceptions that are not needed"


def test_names_of_libraries_used_only_in_documents_exist() -> None:
    for file, names in IN_LIBRARIES.items():
        package, _, inside = file.partition("/")
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        assert spec.submodule_search_locations is not None, package
        paths = [Path(folder) / inside for folder in spec.submodule_search_locations]
        path = next(path for path in paths if path.is_file())
        words = {path.stem, *re.findall(r"\w+", path.read_text())}
        assert {part for name in names.split() for part in name.split(".")} - words == set(), file
