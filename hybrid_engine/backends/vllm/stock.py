"""A stock vLLM under observation: its arguments, loader, reload, and all tensors it computes with.

This backend's load format is not involved. `tools/verify/certify.py` runs each engine in a separate
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.config_reads import ConfigReads
from hybrid_engine.backends.vllm.requests import (
    cache_storages,
    completions_of,
    prompt_distributions,
)
from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.tracing import NamedModules
from hybrid_engine.ranks.torch_internals import TensorDict

_DEFAULTS = (
    *("--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--no-enable-prefix-caching"),
    *("--max-logprobs", "-1"),
)
_PROMPTS = (4, 24)  # sequences, tokens of each

STEPS: Mapping[str, Callable[[Any, str], object]] = {
    "reload": lambda llm, path: llm.collective_rpc("reload_weights", kwargs={"weights_path": path}),
    "sleep 1": lambda llm, _: llm.sleep(level=1),
    "sleep 2": lambda llm, _: llm.sleep(level=2),
    "wake": lambda llm, _: llm.wake_up(),
}
"""vLLM's own calls by name; the path is that of a checkpoint."""


def arguments_of(model: str, words: Sequence[str]) -> Any:
    """Return vLLM's `EngineArgs` of a command line.

    An invalid command line ends the process with status 2, as in `vllm serve`.
    """
    from vllm import EngineArgs

    parser = internals.ARGUMENT_PARSER(prog="hybrid-engine certify MODEL --")
    parser = EngineArgs.add_cli_args(parser)
    command_line = [*_DEFAULTS, *words, "--model", model]
    if not ConfigReads(model).takes_images:  # whose processor needs the tokenizer
        command_line.insert(0, "--skip-tokenizer-init")
    return EngineArgs.from_cli_args(parser.parse_args(command_line))


def why_not(steps: Sequence[str]) -> str | None:
    """Return the reason why this build of vLLM does not support these steps; None if it does."""
    from vllm.platforms import current_platform

    if "wake" in steps and not current_platform.is_sleep_mode_available():
        return f"sleep and wake do nothing on {current_platform.device_type}"
    return None


def run(model: str, steps: Sequence[str], path: str, words: Sequence[str], directory: Path) -> None:
    """Build an engine that loads `model`, run the steps, and `observe` it before and after them.

    Without steps it is observed once.

    Args:
        model: directory of the model.
        steps: names in `STEPS`, called with `path`.
        path: a checkpoint.
        words: vLLM's arguments, as on a command line.
        directory: receives the observations in `before` and `after`.
    """
    from vllm import LLM

    arguments = arguments_of(model, words)
    arguments.enable_sleep_mode |= "wake" in steps
    if arguments.enforce_eager:
        # Otherwise vLLM's samplers are compiled, which takes a minute.
        torch.compiler.set_stance("force_eager")
    llm = LLM.from_engine_args(arguments)
    if steps:
        observe(llm, directory / "before")
    for step in steps:
        STEPS[step](llm, path)
    observe(llm, directory / "after")


def observe(llm: Any, directory: Path) -> None:
    """Write log-probabilities of fixed prompts and the tensors of each worker's model.

    Log-probabilities are [tokens, vocabulary] float32, in logprobs.pt.
    """
    from vllm import SamplingParams

    directory.mkdir(parents=True)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, _PROMPTS, generator=generator).tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [prompt_distributions(*completions_of(output, params)) for output in outputs]
    torch.save(torch.cat(rows), directory / "logprobs.pt")
    # After a forward pass, because layers may derive tensors in their first one.
    llm.collective_rpc(look, args=(str(directory),))


def look(worker: Any, directory: str) -> None:
    """Write copies of all tensors that a worker's model computes with, to a file of its rank.

    Called in the worker. The file has `tensors` by path, `places` (equal for paths over the same
    memory) and `unseen`, paths of objects that cannot be read.
    """
    runner = worker.model_runner
    modules = dict(runner.model.named_modules())
    contents = postload.module_tensors(modules, modules)
    caches = {storage.data_ptr() for storage in cache_storages(runner)}
    copies: TensorDict = {}
    places: dict[str, str] = {}
    for path, tensor in contents.tensors.items():
        if not tensor.numel() or tensor.is_meta:
            continue
        if tensor.untyped_storage().data_ptr() in caches:
            continue
        place = f"{tensor.data_ptr()} {tensor.dtype} {tensor.shape} {tensor.stride()}"
        places[path] = place
        if place not in copies:
            copies[place] = tensor.detach().cpu().contiguous().clone()
    tensors, unseen = _packed(modules)
    for path, number in contents.numbers.items():
        if isinstance(number, float):
            tensors[path] = torch.tensor(number)
    for path, place in places.items():
        tensors[path] = copies[place]
    torch.save(
        {"tensors": tensors, "places": places, "unseen": unseen},
        Path(directory, f"rank{worker.rank}.pt"),
    )


@torch.no_grad()
def _packed(modules: NamedModules) -> tuple[TensorDict, list[str]]:
    """Return weights [inputs, outputs] of oneDNN's packed copies, and paths of sealed objects.

    The product of a packed weight with unit vectors is exactly the weight: each element of it is a
    sum of one weight and zeros.
    """
    multiply = internals.PACKED_PRODUCT
    packed = {}
    unseen = []
    for name, module in modules.items():
        method = postload.post_load_method(module)
        is_plain = type(method).__name__.startswith("Unquantized")
        for path, handle in postload.module_tensors(modules, [name]).sealed.items():
            if is_plain and internals.PACKED_HANDLE.is_type_of(handle):
                dtype = next(module.parameters(recurse=False)).dtype
                unit_vectors = torch.eye(cast(Any, handle).k, dtype=dtype)
                packed[path] = multiply(handle, unit_vectors, None)
            else:
                unseen.append(path)
    return packed, unseen
