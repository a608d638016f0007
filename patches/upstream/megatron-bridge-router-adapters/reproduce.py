"""Apply LoRA to a router whose two ranks have different tokens (sequence parallelism)."""

import importlib.util
import sys
import tempfile
import types

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
if not has_transformer_engine:
    # The package imports it. Nothing here needs it: leave out the package's __init__.
    package = sys.modules["megatron.bridge"] = types.ModuleType("megatron.bridge")
    package.__path__ = [f"{folder}/bridge" for folder in sys.modules["megatron"].__path__]

from megatron.bridge.peft import utils  # noqa: E402

utils.HAVE_TE = has_transformer_engine  # its classes are placeholders without

NUM_TOKENS, NUM_IN, NUM_EXPERTS, DIM = 6, 8, 4, 2


def gathered(part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts)


def run(rank: int, store: str, out: str) -> None:
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=NUM_IN,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    adapter = utils.ParallelLinearAdapter(
        dim=DIM,
        base_linear_name="mlp.router",
        activation="identity",
        row_init_method="normal",
        model_parallel_config=config,
        **vars(utils.get_adapter_attributes_from_linear(router)),
    )
    torch.manual_seed(0)
    tokens = torch.randn(NUM_TOKENS, 1, NUM_IN)
    output = gathered(adapter(tokens.chunk(2)[rank]))
    a, b = gathered(adapter.linear_in.weight), gathered(adapter.linear_out.weight)
    if rank == 0:
        torch.save(float((output - tokens @ a.T @ b.T).abs().max()), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", f"{folder}/out"), 2)
        difference = torch.load(f"{folder}/out")
    print(f"difference from B A x: {difference:.1e}")
    sys.exit(int(difference > 1e-5))
