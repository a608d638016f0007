"""A custom trainer: every rank has the whole model and a plain optimizer; vLLM gets its weights.

    hybrid-engine run --nproc-per-node 2 examples/own_trainer.py

`MyTrainer` is all that a switch requires. hybrid_engine/ports.py lists the calls in their order.
"""

import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

from hybrid_engine import HybridEngine, Sampling, load_config
from hybrid_engine.backends.training_side import GuardedState, WholeTensors
from hybrid_engine.memory.offload_items import OffloadItem


class MyTrainer(GuardedState):
    """Provides the weights, their version, and the tensors that can leave the device."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.version = 0
        self.weights = WholeTensors(model.state_dict(keep_vars=True), rank, [model])
        self.watch([model], [optimizer])  # raises StateError if they are used while off the device

    def offload_items(self) -> Iterator[OffloadItem]:
        yield from self.weights.offload_items()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield OffloadItem(f"{name}.grad", "grad", parameter.grad)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value.numel() > 1:  # the step count of Adam stays
                    yield OffloadItem(f"{key} of {name}", "optimizer", value)

    def step(self, rows: torch.Tensor) -> float:
        """Take an optimizer step; gradients are summed over ranks, each with different rows."""
        loss: torch.Tensor = self.model(rows, labels=rows).loss
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.version += 1
        return loss.item()


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    names = {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "float32"}
    hf_config = Qwen2Config(**sizes, **heads, **names, vocab_size=512)
    model = AutoModelForCausalLM.from_config(hf_config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as directory:
        hf_config.save_pretrained(directory)  # no weights: they come from the trainer
        generate = {"infer_tensor_parallel_size": 2, "max_model_len": 64, "max_num_seqs": 8}
        values = {
            "model": directory,
            "actor_config": {"params_dtype": "float32"},
            "generate_config": {**generate, "verify": "full"},
        }
        config = load_config(values, own_loop=True, own_weights=True)
        with HybridEngine.around(
            lambda job: MyTrainer(model.to(job.device), optimizer, job.rank), config
        ) as engine:
            assert isinstance(engine.train, MyTrainer)
            for number in range(4):
                with engine.train_context():
                    rows = (torch.arange(8)[:, None] + torch.arange(16) + number + engine.rank) % 12
                    losses = [engine.train.step(rows.to(engine.job.device)) for _ in range(10)]
                with engine.rollout_context():  # the trainer's state is off the device
                    sampling = Sampling(temperature=0.0, max_tokens=6)
                    (answer,) = engine.generate([[3, 4, 5]], sampling)
                if engine.rank == 0:
                    tokens = list(answer[0].token_ids)
                    print(f"loss {losses[-1]:.3f}: after 3, 4, 5 comes {tokens}", flush=True)


if __name__ == "__main__":
    main()
