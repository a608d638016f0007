"""A stock vLLM, seen from outside: vLLM's own arguments, loader and reload, and every tensor that it computes with.

Nothing of this backend's load format takes part. `verification/certify.py` runs each engine in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import cache_storages, distributions_of_prompt
from hybrid_engine.backends.vllm.weights import postload

_DEFAULTS = (
    *("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--no-enable-prefix-caching", "--max-logprobs", "-1"),
)
_PROMPTS = (4, 24)  # sequences, tokens of each

STEPS: Mapping[str, Callable[[Any, str], object]] = {
    "reload": lambda llm, path: llm.collective_rpc("reload_weights", kwargs={"weights_path": path}),
    "sleep 1": lambda llm, _: llm.sleep(level=1),
    "sleep 2": lambda llm, _: llm.sleep(level=2),
    "wake": lambda llm, _: llm.wake_up(),
}
"""vLLM's own calls, by name; the path is that of a checkpoint."""


def arguments_of(model: str, words: Sequence[str]) -> Any:
    """vLLM's `EngineArgs` of a command line; an invalid one ends the process with status 2, as in `vllm serve`."""
    from vllm import EngineArgs

    parser = EngineArgs.add_cli_args(internals.ARGUMENT_PARSER.load()(prog="hybrid-engine certify MODEL --"))
    return EngineArgs.from_cli_args(parser.parse_args([*_DEFAULTS, *words, "--model", model]))


def why_not(steps: Sequence[str]) -> str | None:
    """Why this build cannot take such steps; None where it can."""
    from vllm.platforms import current_platform

    if "wake" in steps and not current_platform.is_sleep_mode_available():
        return f"sleep and wake do nothing on {current_platform.device_type}"
    return None


def run(model: str, steps: Sequence[str], path: str, words: Sequence[str], directory: Path) -> None:
    """Build an engine that loads `model`, take the steps, and `observe` it before (if there are any) and after them.

    Args:
        steps: of `STEPS`, which are given `path`.
        words: vLLM's arguments, as on a command line.
        directory: what is observed goes into `before` and `after` there.
    """
    from vllm import LLM

    arguments = arguments_of(model, words)
    arguments.enable_sleep_mode |= "wake" in steps
    if arguments.enforce_eager:
        torch.compiler.set_stance("force_eager")  # else vLLM's samplers are compiled, for a minute
    llm = LLM.from_engine_args(arguments)
    if steps:
        observe(llm, directory / "before")
    for step in steps:
        STEPS[step](llm, path)
    observe(llm, directory / "after")


def observe(llm: Any, directory: Path) -> None:
    """Write log-probabilities of fixed prompts, [tokens, vocabulary] float32, and what each worker's model holds."""
    from vllm import SamplingParams

    directory.mkdir(parents=True)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    tokens = torch.randint(vocabulary, _PROMPTS, generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in tokens], params, use_tqdm=False)
    rows = [distributions_of_prompt(output.prompt_logprobs) for output in outputs]
    torch.save(torch.cat(rows), directory / "logprobs.pt")
    llm.collective_rpc(look, args=(str(directory),))  # after a forward pass, which may derive more


def look(worker: Any, directory: str) -> None:
    """Write copies of all that a worker's model computes with, to a file of its rank. Called in the worker.

    The file has `tensors` by path, `places` (equal for paths over the same memory) and `unseen`, what cannot be read.
    """
    runner = worker.model_runner
    modules = dict(runner.model.named_modules())
    found = postload.module_tensors(modules, modules)
    caches = {storage.data_ptr() for storage in cache_storages(runner)}
    copies: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for path, tensor in found.tensors.items():
        if tensor.numel() and not tensor.is_meta and tensor.untyped_storage().data_ptr() not in caches:
            places[path] = f"{tensor.data_ptr()} {tensor.dtype} {tensor.shape} {tensor.stride()}"
            if places[path] not in copies:
                copies[places[path]] = tensor.detach().cpu().contiguous().clone()
    tensors, unseen = _packed(modules)
    tensors |= {path: torch.tensor(number) for path, number in found.numbers.items() if isinstance(number, float)}
    tensors |= {path: copies[place] for path, place in places.items()}
    torch.save(
        {"tensors": tensors, "places": places, "unseen": unseen},
        Path(directory, f"rank{worker.rank}.pt"),
    )


@torch.no_grad()
def _packed(modules: Mapping[str, torch.nn.Module]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights [inputs, outputs] in oneDNN's packed copies, by path, and paths of what hides memory otherwise.

    A product with unit vectors is the weight, exactly: each element is one weight and zeros.
    """
    multiply, packed, unseen = internals.PACKED_PRODUCT.load(), {}, []
    for name, module in modules.items():
        is_plain = type(postload.post_load_method(module)).__name__.startswith("Unquantized")
        for path, handle in postload.module_tensors(modules, [name]).sealed.items():
            if is_plain and internals.PACKED_HANDLE.is_type_of(handle):
                dtype = next(module.parameters(recurse=False)).dtype
                packed[path] = multiply(handle, torch.eye(cast(Any, handle).k, dtype=dtype), None)
            else:
                unseen.append(path)
    return packed, unseen
