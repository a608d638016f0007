"""What the ranks of the vLLM tests do: functions for tests/harness/launch.py that return what the tests assert on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from tests.hybrid_engine.backends.vllm import vllm_support as support
from tests.zoo.checkpoint_shapes import checkpoint_dtypes
from tests.zoo.families import served_config

# What vLLM's CPU kernels for latent attention compute: heads of 512 + 64, rotary scaling as in published configs.
COMPUTABLE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SMALL_BLOCKS: dict[str, Any] = {"extra": {"block_size": 32}}
"""Of the KV cache, so that each of LONG fills one and the prefix cache has something to keep."""

PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
LONG = [list(range(index, index + 40)) for index in range(3)]


def _engine(directory: str, config: dict[str, Any], **settings: Any) -> Any:
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings

    chosen = InferenceSettings(directory, max_model_len=64, max_num_seqs=8, kv_cache_bytes=16 << 20, **settings)
    dtypes = checkpoint_dtypes(config)
    return InferenceEngine(chosen, support.checkpoint_shapes(config), Job.join(600), dtypes=dtypes)


def _sizes(**sizes: Any) -> InferenceParallelism:
    """Parallel sizes of all ranks."""
    return InferenceParallelism(dist.get_world_size(), **sizes)


def native_answers(directory: str, checkpoint: str, num_tp: int) -> tuple[list[Any], list[Any]]:
    """Greedy completions and prompt log-probabilities of a natively loaded vLLM in this process, which then ends."""
    engine = _native_engine(directory, checkpoint, num_tp)
    engine.adaptor.require_ready = lambda: None
    answers = _answers(engine)
    engine.shutdown()
    return answers


def _native_engine(directory: str, checkpoint: str, num_tp: int) -> Any:
    """An InferenceEngine around vLLM's own loader: its weights come from the checkpoint."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from hybrid_engine.backends.vllm.weights import loader

    capturing_loader = loader._loader_class()

    class NativeLoader(capturing_loader):
        """Captures, then loads the checkpoint as vLLM does."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            self.load_config.load_format = "safetensors"
            DefaultModelLoader(self.load_config).load_weights(model, model_config)

    original, loader._loader_class = loader._loader_class, lambda: NativeLoader
    formats = _registered_formats()
    formats.pop(loader.LOAD_FORMAT, None)
    try:
        return _engine(checkpoint, support.QWEN3, sizes=_sizes(tensor=num_tp), **SMALL_BLOCKS)
    finally:
        loader._loader_class = original
        formats.pop(loader.LOAD_FORMAT, None)


def _registered_formats() -> dict[str, Any]:
    from vllm.model_executor import model_loader

    return model_loader._LOAD_FORMAT_TO_MODEL_LOADER


def after_failures(engine: Any, sampling: Any) -> dict[str, Any]:
    """Calls that end half-way, at several depths of vLLM and by Ctrl-C; after each, what new calls answer.

    Every rank fails at the same place; alone it would leave the others of its replica waiting.
    """
    core = engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    places = {
        "adding": (core, "add_request", MemoryError),
        "step": (engine.llm.llm_engine, "step", MemoryError),
        "forward": (runner.model, "forward", MemoryError),
        "sampling": (runner, "sample_tokens", MemoryError),
        "bookkeeping": (core.scheduler, "update_from_output", MemoryError),
        "Ctrl-C": (core.scheduler, "schedule", KeyboardInterrupt),
    }
    result = {}
    for name, (owner, method, error) in places.items():
        engine.manual_seed(5)
        with _failing(owner, method, error, after=2 if name != "forward" else 0):
            raised = _error_of(lambda: engine.generate(LONG, sampling))
        fresh = [[c.token_ids for c in row] for row in engine.generate(PROMPTS, sampling)]
        same = _greedy(engine, LONG)  # not from blocks that the failed call was to compute
        engine.reset_caches()
        result[name] = {"raised": raised, "sample": fresh, "long": same, "answers": _answers(engine)}
    return result


@contextlib.contextmanager
def _failing(owner: Any, method: str, error: type[BaseException], after: int) -> Iterator[None]:
    """Inside, `method` does its work so many times; then it raises, or this process gets the signal of Ctrl-C."""
    original, counted = getattr(owner, method), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(counted) >= after:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("no memory")
        return original(*args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    had_own = method in vars(owner)
    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original) if had_own else delattr(owner, method)
        signal.signal(signal.SIGINT, handler)


def _error_of(call: Any) -> str | None:
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return None


def _one_fails(engine: Any, sampling: Any) -> tuple[str | None, bool]:
    """One of two replicas fails half-way: the error here, and whether the next call draws as if there had been none."""

    def drawn() -> list[Any]:
        return [[c.token_ids for c in row] for row in engine.generate_over_replicas(PROMPTS, sampling)]

    engine.manual_seed(5)
    expected = drawn()
    engine.manual_seed(5)
    with _failing(engine.llm.llm_engine, "step", MemoryError, after=2 if engine.dp_rank == 1 else 1000):
        raised = _error_of(drawn)
    return raised, drawn() == expected


def _left_over(engine: Any, sampling: Any) -> dict[str, str]:
    """What the engine says to a request that somebody added to vLLM past it; then it is gone."""
    from vllm import SamplingParams

    from hybrid_engine.backends.vllm.requests import require_answers
    from hybrid_engine.errors import StateError

    result = {}
    engine.llm.llm_engine.add_request("foreign", {"prompt_token_ids": [1, 2]}, SamplingParams(detokenize=False))
    for call in ("generate", "reset_caches", "release"):
        try:
            getattr(engine, call)(*((PROMPTS, sampling) if call == "generate" else ()))
        except StateError as error:
            result[call] = str(error)
    engine.abandon_requests()
    engine.reset_caches()
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(2)
    try:
        engine.reset_caches()
    except StateError as error:
        result["blocks"] = str(error)
    pool.free_blocks(blocks)
    try:
        require_answers([], PROMPTS, 1)
    except StateError as error:
        result["none"] = str(error)
    return result


def _answers(engine: Any) -> tuple[list[Any], list[Any]]:
    return _greedy(engine, PROMPTS), [row.tolist() for row in engine.prompt_logprobs(PROMPTS)]


def _greedy(engine: Any, prompts: list[list[int]]) -> list[Any]:
    from hybrid_engine.backends.vllm import Sampling

    greedy = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [
        [(completion.token_ids, completion.logprobs) for completion in row] for row in engine.generate(prompts, greedy)
    ]


def cycles(directory: str, num_tp: int) -> dict[str, Any]:
    """Three switches with changing weights on one engine, after a native engine lived in the same process."""
    from hybrid_engine.backends.vllm import Sampling
    from hybrid_engine.backends.vllm.process.shm_cleanup import nbytes_needed
    from hybrid_engine.errors import ConfigError, StateError

    support.join_group()
    world, set_num_threads = dist.group.WORLD, torch.set_num_threads
    base, config = Path(directory), support.QWEN3
    weights = [support.random_weights(config, seed) for seed in range(3)]
    checkpoints = [support.write_checkpoint(base / f"weights{i}", config, each) for i, each in enumerate(weights)]
    native = native_answers(directory, checkpoints[2], num_tp)
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    # Against the order of the native engine: where gathers must follow the positions, not the ranks.
    order = tuple(reversed(range(num_tp)))
    before = shared_mappings()  # of the native engine: vLLM keeps them as long as the process lives
    engine = _engine(checkpoints[0], config, sizes=_sizes(tensor=num_tp, rank_order=order), **SMALL_BLOCKS)
    shared = {name: nbytes for name, nbytes in shared_mappings().items() if name not in before}
    result: dict[str, Any] = {"native": native, "differences": [], "errors": [], "tp_rank": engine.tp_rank}

    def expect(error: type[Exception], call: Any) -> None:
        try:
            call()
        except error as caught:
            result["errors"].append(str(caught))

    sampling = Sampling(n=2, max_tokens=8, ignore_eos=True)
    expect(StateError, lambda: engine.generate(PROMPTS, sampling))
    for values, checkpoint in zip(weights, checkpoints, strict=True):
        filled = support.fill_by_records(engine.adaptor, values)
        engine.reset_caches()
        result["differences"] += support.differences(filled, support.native_parameters(engine, checkpoint))
    result["answers"] = _answers(engine)
    engine.manual_seed(5)
    result["sample"] = [[c.token_ids for c in row] for row in engine.generate(PROMPTS, sampling)]
    engine.manual_seed(5)
    result["sample again"] = [[c.token_ids for c in row] for row in engine.generate(PROMPTS, sampling)]
    result["long"] = _greedy(engine, LONG)
    result["failures"] = after_failures(engine, sampling)
    result["left over"] = _left_over(engine, sampling)
    result["empty"] = engine.generate([], sampling)
    expect(ConfigError, lambda: engine.generate([[], [1] * 60, [500]], sampling))
    resident = engine.adaptor.resident_nbytes()
    engine.release()
    result["memory"] = (resident, engine.adaptor.nbytes, engine.adaptor.resident_nbytes())
    expect(StateError, lambda: engine.generate(PROMPTS, sampling))
    groups = sorted({buffer.group for buffer in engine.adaptor.layout().buffers.values()})
    expect(StateError, lambda: engine.adaptor.commit(groups[:1]))
    engine.adaptor.allocate(groups)
    engine.adaptor.commit(groups[:-1])
    expect(StateError, lambda: engine.generate(PROMPTS, sampling))
    support.fill_by_records(engine.adaptor, weights[2])
    engine.reset_caches()
    result["answers after release"] = _answers(engine)
    result["random state kept"] = torch.equal(random_state, torch.get_rng_state())
    engine.shutdown()
    engine.shutdown()
    expect(StateError, lambda: engine.generate(PROMPTS, sampling))
    dist.barrier()
    result["process as before"] = dist.group.WORLD is world and torch.set_num_threads is set_num_threads
    result["shared with a name"] = [name for name in shared if not name.endswith("(deleted)")]
    result["shared"] = sorted(nbytes for name, nbytes in shared.items() if "cpushm" in name)
    result["shared by computation"] = [nbytes_needed(engine.settings, "cpu")] * num_tp if num_tp > 1 else []
    dist.barrier()  # before the next function makes an engine
    return result


def shared_mappings() -> dict[str, int]:
    """What this process has mapped from /dev/shm: name -> bytes. The kernel adds "(deleted)" to a name taken away."""
    mapped: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/dev/shm/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            mapped[name] = mapped.get(name, 0) + end - start
    return mapped


def samplings() -> int:
    """vLLM itself takes whatever a `Sampling` can be; how many were tried."""
    from hybrid_engine.backends.vllm import Sampling
    from hybrid_engine.backends.vllm.requests import sampling_params

    extremes: dict[str, Sequence[Any]] = {
        "n": (1, 16384),
        "temperature": (1e-5, 1, 2.0),
        "top_p": (1e-9, 1),
        "top_k": (0, 2**31 - 1),
        "max_tokens": (1, 2**31 - 1),
        "seed": (None, 0, 2**62),
        "logprobs": (False, True),
        "stop_token_ids": ((), (0, 2**31 - 1)),
        "ignore_eos": (False, True),
    }
    tried = [
        Sampling(temperature=0),
        *(Sampling(**dict(zip(extremes, values, strict=True))) for values in itertools.product(*extremes.values())),
    ]
    assert all(sampling_params(each).n == each.n for each in tried)
    return len(tried)


def replicas(directory: str) -> dict[str, Any]:
    """Two replicas: failures on one rank or both, then unequal and missing prompts."""
    from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling
    from hybrid_engine.errors import HybridEngineError

    support.join_group()
    job, config = Job.join(600), support.LLAMA
    rank = job.rank
    path = support.write_config(Path(directory) / "llama", config)
    shapes = support.checkpoint_shapes(config)
    lacking = {name: shape for name, shape in shapes.items() if "layers.1.self_attn.k_proj" not in name}
    misshapen = {**shapes, "model.layers.0.mlp.up_proj.weight": (95, 64)}
    unknown = support.write_config(Path(directory) / "unknown", {**config, "architectures": ["NoSuchModel"]})
    result: dict[str, Any] = {"errors": {}}

    def attempt(name: str, where: str, tensors: Any, **settings: Any) -> None:
        try:
            InferenceEngine(InferenceSettings(where, max_model_len=64, **settings), tensors, job)
        except HybridEngineError as error:
            result["errors"][name] = (type(error).__name__, str(error))

    attempt("world", path, shapes, sizes=InferenceParallelism(3))
    attempt("no experts", path, shapes, sizes=_sizes(expert=2))
    attempt("unknown", unknown, shapes, sizes=_sizes())
    attempt("lacking", path, lacking, sizes=_sizes())
    attempt("one rank", path, misshapen if rank == 1 else shapes, sizes=_sizes())
    engine = _engine(path, config, sizes=_sizes())
    result["place"] = (engine.dp_rank, engine.pp_rank, engine.tp_rank)
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    sampling = Sampling(n=4, max_tokens=6, ignore_eos=True)
    result["counts"] = [len(engine.generate(PROMPTS[: 1 + 2 * rank], sampling)) for _ in range(2)]
    result["none on rank 1"] = len(engine.generate(PROMPTS if rank == 0 else [], sampling))
    result["sample"] = [completion.token_ids for completion in engine.generate(PROMPTS[:1], sampling)[0]]
    result["over replicas"] = _one_fails(engine, sampling)
    seeded = Sampling(n=1, max_tokens=6, ignore_eos=True, seed=3)
    result["seeded"] = engine.generate(PROMPTS[:1], seeded)[0][0].token_ids
    stopped = Sampling(temperature=0.0, max_tokens=6, stop_token_ids=tuple(range(130)))
    result["stopped"] = engine.generate(PROMPTS[:1], stopped)[0][0]
    engine.shutdown()
    result["refused"] = [
        _refused(Path(directory), support.LLAMA, pipeline=2),
        _refused(Path(directory), support.QWEN3_MOE, expert=2),
    ]
    return result


def orders(directory: str, chosen: Sequence[tuple[int, ...] | None]) -> list[dict[str, Any]]:
    """Two replicas of two ranks each, in several orders: who is where, and greedy answers."""
    support.join_group()
    config, results = support.LLAMA, []
    path = support.write_config(Path(directory) / "llama", config)
    for order in chosen:
        engine = _engine(path, config, sizes=_sizes(tensor=2, rank_order=order))
        support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
        results.append({"place": (engine.dp_rank, engine.tp_rank), "answers": _answers(engine)})
        engine.shutdown()
    return results


def _refused(directory: Path, config: dict[str, Any], **sizes: int) -> tuple[bool, str]:
    """An engine that takes weights but cannot generate on CPU: whether it took them, and the error."""
    from hybrid_engine.backends.vllm import Sampling
    from hybrid_engine.errors import StateError

    path = support.write_config(directory / config["model_type"], config)
    engine = _engine(path, config, sizes=_sizes(**sizes))
    support.fill_by_records(engine.adaptor, support.random_weights(config, 0))
    is_ready = support.is_ready(engine.adaptor)
    try:
        engine.generate(PROMPTS, Sampling())
    except StateError as error:
        return is_ready, str(error)
    finally:
        engine.shutdown()
    return is_ready, "it generated"


def quantised(directory: str, num_tp: int) -> dict[str, Any]:
    """fp8 weights over two switches and a release, beside a vLLM that loads the same checkpoint by itself."""
    from hybrid_engine.backends.vllm.process.isolation import destroy_groups
    from hybrid_engine.errors import HybridEngineError

    support.join_group()
    base = Path(directory)
    # As a quantised checkpoint's config would say; the weights of training are not.
    config = {**support.QWEN3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    weights = [support.random_weights(config, seed) for seed in range(2)]
    path = support.write_checkpoint(base / "weights", support.QWEN3, weights[1])
    result: dict[str, Any] = {"errors": {}, "native": _plain_answers(path, num_tp, "fp8_per_channel")}
    destroy_groups()
    engine_path = support.write_config(base / "config", config)
    for quantization in ("fp8_per_channel", None):
        engine = _engine(engine_path, config, sizes=_sizes(tensor=num_tp), quantization=quantization)
        for values in weights:
            support.fill_by_records(engine.adaptor, values)
            engine.reset_caches()
        result[str(quantization)] = _answers(engine)
        native = support.native_parameters(engine, path)
        engine.release()
        result[f"{quantization} released"] = engine.adaptor.resident_nbytes()
        filled = support.fill_by_records(engine.adaptor, weights[1])
        engine.reset_caches()
        result[f"{quantization} differences"] = support.differences(filled, native)
        result[f"{quantization} again"] = _answers(engine)
        layer = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0]
        result[f"{quantization} dtype"] = str(layer.mlp.down_proj.weight.dtype)
        engine.shutdown()
    moe = support.write_config(base / "experts", support.QWEN3_MOE)
    for where, model, method in (
        (engine_path, support.QWEN3, "fp8"),
        (engine_path, support.QWEN3, "no such"),
        (moe, support.QWEN3_MOE, "fp8_per_channel"),
    ):
        try:
            _engine(where, model, sizes=_sizes(tensor=num_tp), quantization=method).shutdown()
        except HybridEngineError as error:
            result["errors"][method] = (type(error).__name__, str(error))
    return result


def _plain_answers(checkpoint: str, num_tp: int, quantization: str) -> list[tuple[Any, Any]]:
    """Greedy tokens and their log-probabilities from vLLM without anything of ours."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        quantization=quantization,
        skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=num_tp,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        kv_cache_memory_bytes=16 << 20,
    )
    llm.llm_engine.engine_core._finalizer.detach()  # at collection it would end the default process group
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    return [
        (
            tuple(choice.token_ids),
            tuple(at[token].logprob for at, token in zip(choice.logprobs, choice.token_ids, strict=True)),
        )
        for choice in choices
    ]


def memory(directory: str) -> dict[str, Any]:
    """Resident memory of a rank in MB, over three releases and switches, and the bytes of its weights."""
    support.join_group()
    config = {
        **support.LLAMA,
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
    }
    engine = _engine(support.write_config(Path(directory) / "large", config), config)
    weights = support.random_weights(config, 0)
    result: dict[str, Any] = {"weights": engine.adaptor.nbytes / 1e6, "released": [], "committed": []}
    for _ in range(3):
        engine.release()
        result["released"].append(_resident())
        support.write_by_records(engine.adaptor, weights)
        result["committed"].append(_resident())
    engine.shutdown()
    return result


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def transformers_oracle(directory: str, num_tp: int, families: Sequence[str]) -> dict[str, float]:
    """Greatest difference of vLLM's and transformers' float32 log-probabilities over two switches, by family."""
    support.join_group()
    result: dict[str, float] = {}
    for name in families:
        config = {**served_config(name), **(COMPUTABLE if "deepseek" in name else {}), "torch_dtype": "float32"}
        weights = [support.random_weights(config, seed, torch.float32) for seed in range(2)]
        places = [Path(directory, f"{name} {seed}") for seed in range(2)]
        paths = [support.write_checkpoint(*each) for each in zip(places, (config, config), weights, strict=True)]
        # First, for vLLM changes the classes of models that it takes from transformers.
        expected = [_reference_distributions(path) for path in paths]
        engine = _engine(paths[0], config, dtype="float32", sizes=_sizes(tensor=num_tp))
        gaps = []
        for values, theirs in zip(weights, expected, strict=True):
            support.fill_by_records(engine.adaptor, values)
            engine.reset_caches()
            gaps += [_gap(*pair) for pair in zip(engine.prompt_distributions(PROMPTS), theirs, strict=True)]
            gaps.append(_greatest_gap_while_decoding(engine))
        result[name] = max(gaps)
        engine.shutdown()
    return result


def _reference_distributions(path: str) -> list[torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1) for tokens in PROMPTS]


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def _greatest_gap_while_decoding(engine: Any) -> float:
    """Between the log-probabilities of drawn tokens and those of the same tokens in a prompt: other kernels."""
    from hybrid_engine.backends.vllm import Sampling

    row = engine.generate(PROMPTS[:1], Sampling(temperature=0.0, max_tokens=6, ignore_eos=True))[0][0]
    (whole,) = engine.prompt_logprobs([[*PROMPTS[0], *row.token_ids]])
    return _gap(torch.tensor(row.logprobs), whole[-6:])
