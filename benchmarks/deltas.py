"""Shares of weights that steps of an optimizer change, and how fast they are encoded and applied, without processes.

    python -m benchmarks.deltas [--layers N] [--steps N] [--json FILE]

A transformers model in the shapes of Qwen2.5-0.5B, with fewer layers and random weights in float32, takes steps of
AdamW on random tokens. What is compared is its weights in bfloat16, as a switch sends them, in messages of 32 MiB.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.transports.deltas import apply, encode

LEARNING_RATE, MESSAGE_NBYTES = 1e-6, 32 << 20


def main() -> None:
    """Print every step, write JSON for `--json`."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    write_figures(arguments.json, measure(arguments.layers, arguments.steps))


def measure(num_layers: int, num_steps: int) -> dict[str, Any]:
    """Shares of weights and bytes by step, and GB of weights in a second of one thread's own time."""
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
    sent, steps = _served(model), list[dict[str, float]]()
    first = sent.clone()
    for step in range(num_steps):
        tokens = torch.randint(0, config.vocab_size, (2, 64))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        now = _served(model)
        steps.append({"step": step + 1, **_compare(now, sent)})
        print(", ".join(f"{name} {value:.4g}" for name, value in steps[-1].items()), flush=True)
        sent = now
    since = float((sent.view(torch.int16) != first.view(torch.int16)).float().mean())
    print(f"since the first: {since:.4%}")
    return {"weights": sent.numel() // 2, "steps": steps, "since the first": since}


def _compare(now: torch.Tensor, sent: torch.Tensor) -> dict[str, float]:
    num_changed = nbytes = 0
    encoding = applying = 0.0
    for new, old in zip(now.split(MESSAGE_NBYTES), sent.split(MESSAGE_NBYTES), strict=True):
        started = time.process_time()
        delta, changed = encode(new, old)
        encoding += time.process_time() - started
        num_changed += changed
        nbytes += new.numel() if delta is None else delta.numel()
        if delta is not None:
            started = time.process_time()
            apply(delta, old)
            applying += time.process_time() - started
            assert torch.equal(old, new)
    rates = {
        "GB/s encoded": now.numel() / encoding / 1e9,
        "GB/s applied": now.numel() / applying / 1e9,
    }
    return {"changed": num_changed / now.numel() * 2, "nbytes": nbytes / now.numel(), **rates}


def _served(model: torch.nn.Module) -> torch.Tensor:
    """All weights in bfloat16, as bytes."""
    return torch.cat(
        [each.detach().to(torch.bfloat16).view(-1) for each in model.parameters()]
    ).view(torch.uint8)


if __name__ == "__main__":
    main()
