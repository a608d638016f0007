"""Programs of a rank of test_vision.py: models of images and text, FSDP2 and vLLM.

    python -m tests.hybrid_engine.end_to_end.vision_ranks PROGRAM MODEL DIRECTORY

Rank 0 writes its observations to DIRECTORY/observed.json. These are programs, because the fork
server of other tests has imported vLLM without torchvision.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hybrid_engine import ActorHybridWorker, HybridConfig, Sampling, load_config
from hybrid_engine.errors import ArgumentError, BatchError
from hybrid_engine.rl import GrpoConfig, converse, train
from hybrid_engine.trainer.batches import build_batch, pack
from hybrid_engine.trainer.batches.image_rows import images_in

LENGTH = 96
SAMPLED = Sampling(n=2, temperature=0.7, max_tokens=6, seed=3, ignore_eos=True)
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0)}


def image_of(number: int, size: tuple[int, int] = (60, 90)) -> Any:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def chat_of(*images: Any, text: str = "is the image red ?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def configuration(model: Path, generate: Mapping[str, Any], **actor: Any) -> HybridConfig:
    values = {
        "model": str(model),
        "random_weights": True,
        "actor_config": {
            "fsdp": {},
            "params_dtype": "float32",
            "micro_batch_size": 2,
            "seq_length": LENGTH,
            "optimizer": {"lr": 1e-2},
            **actor,
        },
        "generate_config": {
            "max_model_len": LENGTH,
            "max_num_seqs": 8,
            "kv_cache_mb": 64,
            "bucket_mb": 1,
            "timeout_seconds": 120,
            **generate,
        },
    }
    return load_config(values, 2)


def cross_entropy(batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor) -> torch.Tensor:
    return -(log_probs * batch["weights"]).sum(1).mean()


def reference_log_probs(checkpoint: Path, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities [B, S] of the labels by transformers, row by row.

    Tokens of images and videos are left out, because neither engine draws them.
    """
    import transformers

    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    images = images_in(batch)
    assert images is not None
    rows = []
    for tokens, labels, temperature, inputs in zip(
        batch["tokens"], batch["labels"], batch["temperature"], images.rows, strict=True
    ):
        is_image = (tokens == model.config.image_token_id).long()[None]
        with torch.no_grad():
            logits = model(tokens[None], mm_token_type_ids=is_image, **inputs).logits[0]
        logits[:, [model.config.image_token_id, model.config.video_token_id]] -= 100
        rows.append((logits / temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0])
    return torch.stack(rows)


def switch(model: Path, directory: Path) -> dict[str, Any]:
    """Switch three times with steps between, and compare log-probabilities of three engines."""
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 2, "verify": "full"}))
    pair = chat_of(image_of(1, (40, 40)), image_of(2, (96, 56)))
    prompts = [chat_of(image_of(0)), pair, chat_of(image_of(0)), chat_of(image_of(3))]
    observed: dict[str, Any] = {"vllm": [], "transformers": []}
    for number in range(3):
        with worker.rollout_context():
            groups = worker.generate_sequences(prompts, SAMPLED)
            if number == 0:
                with pytest.raises(ArgumentError, match=r"prompts\[0\]: an image is .* found int"):
                    worker.generate_sequences([chat_of(7)], SAMPLED)
                with pytest.raises(ArgumentError, match="has tokens of images, but no images"):
                    worker.generate_sequences([list(groups[0][0].prompt_token_ids)], SAMPLED)
                with pytest.raises(ArgumentError, match="has images, and conversations are text alone"):
                    converse(worker, prompts, SAMPLED, lambda prompt: lambda answer: None)
        flat = [completion for group in groups for completion in group]
        batch = build_batch([completion.prompt_token_ids for completion in flat], flat, LENGTH)
        is_drawn = batch["mask"].bool()
        drawn = torch.tensor([completion.logprobs for completion in flat])
        checkpoint = directory / f"saved{number}"
        with worker.train_context():
            scores = worker.compute_log_probs(batch)
            worker.save_hf_checkpoint(checkpoint)
            if worker.rank == 0:
                expected = reference_log_probs(checkpoint, batch)
                observed["transformers"].append((scores - expected)[is_drawn].abs().max().item())
            observed["vllm"].append((scores[is_drawn].view(drawn.shape) - drawn).abs().max().item())
            worker.update(batch, cross_entropy)
    report = worker.sharding.last_report
    assert report is not None
    observed["surplus"] = report.bytes_received - report.bytes_least
    observed["files"] = sorted(path.name for path in checkpoint.iterdir())
    observed["image changes"] = groups[0][0].logprobs != groups[3][0].logprobs
    with worker.train_context():
        observed["refused"] = refusals(worker, batch, flat)
    worker.shutdown()
    return observed


def refusals(worker: ActorHybridWorker, batch: dict[str, torch.Tensor], flat: Any) -> list[str]:
    """Return the codes of errors for batches that the model cannot compute."""
    images = images_in(batch)
    assert images is not None
    some = type(images)([{}, *images.rows[1:]])
    fewer = type(images)(images.rows[1:])
    calls = [
        lambda: worker.compute_log_probs({**batch, "images": some}),  # type: ignore[dict-item]
        lambda: worker.compute_log_probs({**batch, "images": fewer}),  # type: ignore[dict-item]
        lambda: pack([completion.prompt_token_ids for completion in flat], flat, LENGTH),
    ]
    codes = []
    for call in calls:
        with pytest.raises(BatchError) as caught:
            call()
        codes.append(caught.value.findings[0].code)
    return codes


def replicas(model: Path, directory: Path) -> dict[str, Any]:
    """Generate on two replicas: the same completions as without an exchange of prompts."""
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 1}))
    prompts = [chat_of(image_of(number)) for number in range(3)]
    with worker.rollout_context():
        of_all = worker.generate_sequences(prompts, SAMPLED)
        of_rank = worker.generate_sequences(prompts[: 1 + worker.rank], SAMPLED, data="local")
    worker.shutdown()
    return {
        "same": of_all[0] == of_rank[0] or worker.rank == 1,
        "inputs": [sorted(group[0].image_inputs) for group in of_all],
    }


def color_reward(prompt: Mapping[str, Any], completion: Any) -> float:
    return completion.token_ids.count(prompt["answer"]) / len(completion.token_ids)


def learn(model: Path, directory: Path) -> dict[str, Any]:
    """Train by GRPO on two images of one color each; a completion is to name it."""
    prompts = [
        {"prompt": chat_of(Image.new("RGB", (56, 56), color), text="the image is"), "answer": number}
        for number, color in enumerate(COLORS.values(), 1)
    ]
    settings = GrpoConfig(steps=20, prompts_per_step=2, samples_per_prompt=16, max_tokens=4, learning_rate=3e-3)
    engines = configuration(model, {"infer_tensor_parallel_size": 2})
    rows = train(engines, prompts, color_reward, settings, out=directory / "run", trackers=())
    return {"rewards": [row["reward"] for row in rows], "difference": max(row["logprob_diff"] for row in rows)}


PROGRAMS = {"switch": switch, "replicas": replicas, "learn": learn}


def main(program: str, model: str, directory: str) -> None:
    observed = PROGRAMS[program](Path(model), Path(directory))
    if os.environ["RANK"] == "0":
        (Path(directory) / "observed.json").write_text(json.dumps(observed))


if __name__ == "__main__":
    main(*sys.argv[1:])
