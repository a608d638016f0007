"""Rewards of GRPO by `rl.train` on images: a small random model learns to name an image's colour.

    python -m benchmarks.image_grpo [--architecture Qwen3VLForConditionalGeneration] [--colours 4]
                                    [--steps 60] [--nproc 1] [--grey] [--json FILE]

Every step has an image of each colour, with noise of its own. The reward of a completion is the
share of its tokens that name the colour. Text alone has at most 1 / colours; `--grey` measures that
by images that are all grey. The first and every tenth row have the accuracy of greedy completions
for images that are not trained on.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from tests.zoo.vision_models import SMALL_VISION, WORDS, vision_environment, write_vision_model

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 220, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "purple": (220, 30, 220),
    "white": (220, 220, 220),
}
GREY = (128, 128, 128)
Row = Mapping[str, Any]
LENGTH = 64
"""Largest number of tokens of a prompt and its completion."""


def main() -> None:
    """Train, print and write the curve."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--architecture", choices=SMALL_VISION, default="Qwen3VLForConditionalGeneration"
    )
    parser.add_argument("--colours", type=int, default=4, help="2 to 6 (default: 4)")
    parser.add_argument("--steps", type=int, default=60, help="(default: 60)")
    parser.add_argument("--nproc", type=int, default=1, help="number of ranks (default: 1)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="(default: 0.003)")
    parser.add_argument("--grey", action="store_true", help="make all images grey")
    arguments = parser.parse_args()
    environment = vision_environment()
    if environment is None:
        parser.error("torchvision is missing: run `make env`")
    with tempfile.TemporaryDirectory(prefix="image-grpo-") as directory:
        job = {
            "model": str(write_vision_model(Path(directory), arguments.architecture)),
            **{name: getattr(arguments, name) for name in ("colours", "steps", "learning_rate")},
            "grey": arguments.grey,
        }
        rows = figures_of_ranks(
            "benchmarks.image_grpo", job, arguments.nproc, timeout=3600, environment=environment
        )
    for row in rows:
        figures = [f"{name} {row[name]:.3f}" for name in ("reward", "accuracy") if name in row]
        print(f"step {row['step']:g}: {', '.join(figures)}")
    write_figures(arguments.json, rows)


def run_rank(job: Mapping[str, Any]) -> None:
    """Train on this rank; rank 0 writes the rows of the steps."""
    rows = curve(**{key: value for key, value in job.items() if key != "out"})
    if os.environ["RANK"] == "0":
        Path(job["out"]).write_text(json.dumps(rows))


def curve(
    model: str, colours: int, steps: int, learning_rate: float, *, grey: bool = False
) -> Sequence[Row]:
    """Train on this rank; return the rows of the steps.

    Args:
        model: directory of `write_vision_model`.
        colours: number of colours, the first of `COLOURS`.
        steps: of GRPO.
        learning_rate: of Adam.
        grey: make all images grey.
    """
    from hybrid_engine import ActorHybridWorker, Sampling
    from hybrid_engine.rl import GrpoConfig, train

    names = list(COLOURS)[:colours]

    def prompts(number: int) -> list[dict[str, Any]]:
        return [
            prompt_of(name, len(COLOURS) * number + index, grey=grey)
            for index, name in enumerate(names)
        ]

    held_out = [prompt for number in range(4) for prompt in prompts(-1 - number)]

    def accuracy(worker: ActorHybridWorker) -> dict[str, float]:
        greedy = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
        groups = worker.generate_sequences([prompt["prompt"] for prompt in held_out], greedy)
        pairs = zip(held_out, groups, strict=True)
        return {
            "accuracy": sum(reward(prompt, group[0]) for prompt, group in pairs) / len(held_out)
        }

    settings = GrpoConfig(
        steps=steps,
        prompts_per_step=colours,
        samples_per_prompt=16,
        max_tokens=4,
        learning_rate=learning_rate,
        evaluate_every=10,
        evaluate_first=True,
        # keeps the names of all colours among the completions
        entropy_coefficient=0.03,
    )
    engines = {
        "model": model,
        "random_weights": True,
        "actor_config": {
            "fsdp": {},
            "params_dtype": "float32",
            "micro_batch_size": 16,
            "seq_length": LENGTH,
        },
        "generate_config": {
            "infer_tensor_parallel_size": 1,
            "max_model_len": LENGTH,
            "kv_cache_mb": 64,
        },
    }
    return train(engines, prompts, reward, settings, evaluate=accuracy)


def prompt_of(name: str, seed: int, *, grey: bool = False) -> dict[str, Any]:
    """Return the prompt of an image of a colour, with noise; `answer` is the token of its name."""
    import torch
    from PIL import Image

    generator = torch.Generator().manual_seed(seed % (1 << 63))
    base = torch.tensor(GREY if grey else COLOURS[name])
    noise = torch.randint(-30, 31, (64, 64, 3), generator=generator)
    image = Image.fromarray((base + noise).to(torch.uint8).numpy())
    content = [{"type": "image", "image": image}, {"type": "text", "text": "the image is"}]
    return {"prompt": [{"role": "user", "content": content}], "answer": 1 + WORDS.index(name)}


def reward(prompt: Mapping[str, Any], completion: Any) -> float:
    """Return the share of tokens that name the colour."""
    tokens: Sequence[int] = completion.token_ids
    return tokens.count(prompt["answer"]) / len(tokens)


if __name__ == "__main__":
    main_or_rank(main, run_rank)
