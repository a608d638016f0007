"""Rounds of switches with a frozen embedding and head, for test_incremental.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine
from hybrid_engine.backends.vllm import InferenceEngine
from hybrid_engine.backends.vllm.native_load import native_parameters
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.switch.states import SwitchContexts
from tests.zoo import sharded_models, workers
from tests.zoo.tiny_models import label_log_probs, token_batch

INCREMENTAL = {"incremental": "auto", "incremental_mb": 2, "bucket_mb": 1}
TP2 = {"tensor_model_parallel_size": 2}
INFER_TP2 = {"infer_tensor_parallel_size": 2}
PROMPT = [list(range(2, 14))]
Action = Callable[[], object]


@dataclass(frozen=True)
class Round:
    """Observations of a switch to vLLM on one rank.

    Attributes:
        read, skipped: bytes of this rank's vLLM weights.
        different: parameters that differ from vLLM's own load.
        logprobs: distributions over a prompt.
    """

    read: int
    skipped: int
    different: list[str]
    logprobs: list[torch.Tensor]


class Rounds:
    """Switches an engine back and forth, and checks vLLM's weights.

    Args:

        engine: of either trainer.
        inference: its vLLM.
        save: writes the training weights as a checkpoint, in `train_context`.
        path: of the checkpoint.
        adapter: name of the adapter to compute with.
    """

    def __init__(
        self, engine: SwitchContexts, inference: InferenceEngine, save: Action, path: Path, adapter: str | None = None
    ) -> None:
        self._engine = engine
        self._inference = inference
        self._save = save
        self._path = path
        self._adapter = adapter
        self._committed: TensorDict = {}

    def run(self, action: Action | None = None) -> Round:
        """Run `action` in `train_context`, then a rollout."""
        sharding = self._engine.sharding
        with self._engine.train_context():
            if action is not None:
                action()
            self._save()
        with self._inference.adaptor.observed(self._keep), self._engine.rollout_context():
            report = sharding.last_report
            native = native_parameters(self._inference, str(self._path))
            logprobs = self._inference.prompt_distributions(PROMPT, self._adapter)
        assert report is not None
        assert self._committed.keys() == native.keys()
        return Round(
            report.bytes_own + report.bytes_received,
            report.bytes_skipped,
            [name for name, tensor in native.items() if not torch.equal(tensor, self._committed[name])],
            logprobs,
        )

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._committed[name] = tensor.detach().clone()


def with_fsdp(model_path: Path) -> dict[str, Round]:
    """Run FSDP2 rounds. `requires_grad_(False)` freezes; the optimizer has all parameters, as
    usual.
    """
    path = Path(model_path)
    model = sharded_models.from_config(path)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for module in ends:
        module.requires_grad_(False)
    rollout = {"tp_size": 2, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16, **INCREMENTAL}
    engine = HybridEngine(model=model, rollout_config=rollout, train_config={})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    vocab_size = ends[0].num_embeddings

    def step() -> None:
        batch = {name: tensor % vocab_size for name, tensor in token_batch(dist.get_rank(), 2, 16).items()}
        optimizer.zero_grad()
        (-label_log_probs(model(batch["tokens"]).logits, batch["labels"]).mean()).backward()
        optimizer.step()

    def unfreeze() -> None:
        ends[0].requires_grad_(True)
        step()
        ends[0].requires_grad_(False)  # before any switch, which must still send the change

    def load() -> None:
        model.load_state_dict({name: tensor.detach() * 2 for name, tensor in model.state_dict().items()})

    def write_unseen() -> None:
        ends[1].weight.data.to_local().copy_(ends[1].weight.data.to_local() + 1)

    rounds = Rounds(engine, engine.inference, lambda: sharded_models.save(model, path, torch.float32), path)
    rounds_by_name = {
        "first": rounds.run(),
        "step": rounds.run(step),
        "another": rounds.run(step),
        "none": rounds.run(),
        "forgotten": rounds.run(engine.sharding._forget_sent),
        "written": rounds.run(write_unseen),
        "unfrozen": rounds.run(unfreeze),
        "loaded": rounds.run(load),
    }
    engine.shutdown()
    return rounds_by_name


def with_adapters(model_path: Path, directory: Path) -> dict[str, Round]:
    """Run Megatron rounds with LoRA, delivered separately.

    vLLM's base weights equal the first round's, to which LoRA adds nothing yet.
    """
    actor = {**TP2, "lora": {"rank": 8}}
    worker = workers.build_worker(model_path, actor, {**INFER_TP2, **INCREMENTAL, "lora_delivery": "adapter"})
    path = directory / "base"

    def save_once() -> None:
        if worker.train.version == 0:
            worker.save_hf_checkpoint(path)

    def step() -> None:
        worker.update(workers.batch(seed=0), workers.cross_entropy)

    rounds = Rounds(worker, worker.inference, save_once, path, worker.adapter)
    rounds_by_name = {"first": rounds.run(), "step": rounds.run(step), "another": rounds.run(step)}
    rounds_by_name |= {"none": rounds.run(), "forgotten": rounds.run(worker.sharding._forget_sent)}
    worker.shutdown()
    return rounds_by_name
