"""Share of the weights that an optimizer step changes, and the speed of encoding it as deltas.

    python -m benchmarks.deltas [--layers N] [--steps N] [--json FILE]

A transformers model in the shapes of Qwen2.5-0.5B, with fewer layers and random weights in float32,
takes steps of AdamW on random tokens. After each step its weights in bfloat16, as a switch sends
them, are compared with those before the step, in messages of 32 MiB. Everything runs in one thread
of one process.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.transports.deltas import apply, encode

LEARNING_RATE = 1e-6
MESSAGE_NBYTES = 32 << 20


def main() -> None:
    """Print a line per step, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    write_figures(arguments.json, measure(arguments.layers, arguments.steps))


def measure(num_layers: int, num_steps: int) -> dict[str, Any]:
    """Return the changed share of weights per step, and the rates of encoding and applying it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        num_hidden_layers=num_layers,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    sent = _served(model)  # the weights that vLLM holds
    first = sent.clone()
    steps: list[dict[str, float]] = []
    for step in range(num_steps):
        tokens = torch.randint(0, config.vocab_size, (2, 64))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        current = _served(model)
        steps.append({"step": step + 1, **_compare(current, sent)})
        print(", ".join(f"{name} {value:.4g}" for name, value in steps[-1].items()), flush=True)
        sent = current
    total = float((sent.view(torch.int16) != first.view(torch.int16)).float().mean())
    print(f"changed by all steps together: {total:.4%}")
    return {"weights": sent.numel() // 2, "steps": steps, "changed by all steps": total}


def _compare(current: torch.Tensor, sent: torch.Tensor) -> dict[str, float]:
    """Encode the changes and apply them to `sent`."""
    num_changed = nbytes = 0
    encoding = applying = 0.0
    for new, old in zip(current.split(MESSAGE_NBYTES), sent.split(MESSAGE_NBYTES), strict=True):
        started = time.process_time()
        delta, changed = encode(new.numpy(), old.numpy())
        encoding += time.process_time() - started
        num_changed += changed
        nbytes += len(delta)
        if len(delta) < new.numel():  # else too much changed: the message is sent whole
            started = time.process_time()
            apply(delta, old.numpy())
            applying += time.process_time() - started
            assert torch.equal(old, new)
    return {
        "changed": num_changed / current.numel() * 2,  # a weight has 2 bytes
        "nbytes": nbytes / current.numel(),
        "GB/s encoded": current.numel() / encoding / 1e9,
        "GB/s applied": current.numel() / applying / 1e9,
    }


def _served(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights in bfloat16, viewed as bytes."""
    flats = [parameter.detach().to(torch.bfloat16).view(-1) for parameter in model.parameters()]
    return torch.cat(flats).view(torch.uint8)


if __name__ == "__main__":
    main()
