"""Apply LoRA to linear_fc2 of an expert that is split over two ranks."""

import importlib.util
import sys
import tempfile
import types

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
if not has_transformer_engine:
    # The package imports it. Nothing here needs it: leave out the package's __init__.
    package = sys.modules["megatron.bridge"] = types.ModuleType("megatron.bridge")
    package.__path__ = [f"{folder}/bridge" for folder in sys.modules["megatron"].__path__]

from megatron.bridge.peft import utils  # noqa: E402

utils.HAVE_TE = has_transformer_engine  # its classes are placeholders without

NUM_IN, NUM_OUT, DIM = 8, 4, 2


def gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts, dim)


def run(rank: int, store: str, out: str) -> None:
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=NUM_OUT,
        num_attention_heads=2,
        num_moe_experts=2,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    options = {
        "init_method": torch.nn.init.normal_,
        "bias": False,
        "input_is_parallel": True,
        "skip_bias_add": True,
    }
    base = RowParallelLinear(NUM_IN, NUM_OUT, config=config, is_expert=True, **options)
    attributes = vars(utils.get_adapter_attributes_from_linear(base, is_expert=True))
    adapter = utils.ParallelLinearAdapter(
        dim=DIM,
        base_linear_name="mlp.experts.linear_fc2",
        activation="identity",
        row_init_method="normal",
        model_parallel_config=config,
        is_expert=True,
        **attributes,
    )
    torch.manual_seed(0)
    tokens = torch.randn(6, NUM_IN)
    outputs = []
    for layer in (lambda part: base(part)[0], adapter):
        output = layer(tokens.chunk(2, dim=1)[rank]).detach()
        dist.all_reduce(output)  # as the token dispatcher does with the outputs of experts
        outputs.append(output)
    a, b = gathered(adapter.linear_in.weight, 1), gathered(adapter.linear_out.weight, 0)
    expected = (tokens @ gathered(base.weight, 1).T, tokens @ a.T @ b.T)
    if rank == 0:
        differences = [
            float((output - right).abs().max())
            for output, right in zip(outputs, expected, strict=True)
        ]
        torch.save(differences, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", f"{folder}/out"), 2)
        of_base, of_adapter = torch.load(f"{folder}/out")
    print(f"difference from W x: {of_base:.1e}, from B A x: {of_adapter:.1e}")
    sys.exit(int(of_adapter > 1e-5))
