"""Programs of a rank of test_vision.py: models of images and text, FSDP2 and vLLM.

    python -m tests.hybrid_engine.end_to_end.vision_ranks PROGRAM MODEL DIRECTORY

Rank 0 writes its observations to DIRECTORY/observed.json. These are programs, because the fork
server of other tests has imported vLLM without torchvision.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hybrid_engine import ActorHybridWorker, HybridConfig, Sampling, load_config
from hybrid_engine.backends.vllm.prompts import ModelTokenizer, rendering_of
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import ArgumentError, BatchError, ComputationError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl import converse
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.batches import build_batch, pack
from hybrid_engine.trainer.batches.image_rows import images_in
from tests.harness.values import Values
from tests.zoo.vision_models import IMAGE, VIDEO

LENGTH = 96
SAMPLED = Sampling(n=2, temperature=0.7, max_tokens=6, seed=3, ignore_eos=True)


def image_of(number: int, size: tuple[int, int] = (60, 90)) -> Any:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def chat_of(*images: Any, text: str = "is the image red ?") -> list[Values]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def configuration(model: Path, generate: Mapping[str, Any], **actor: Any) -> HybridConfig:
    config = json.loads((model / "config.json").read_text())
    # vLLM's gated delta nets take no other dtype on a CPU.
    rounded = {"compress_reshard": True, "compression_dtype": "bfloat16"} if config["model_type"] == "qwen3_5" else {}
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
            **rounded,
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
    names = inspect.signature(model.forward).parameters
    undrawn = [IMAGE, VIDEO] if hasattr(model.config, "video_token_id") else [IMAGE]
    images = images_in(batch)
    assert images is not None
    rows = []
    for tokens, labels, temperature, inputs in zip(
        batch["tokens"], batch["labels"], batch["temperature"], images.rows, strict=True
    ):
        is_image = (tokens == IMAGE).long()[None]
        further = {**inputs, "mm_token_type_ids": is_image, "token_type_ids": is_image}
        with torch.no_grad():
            logits = model(tokens[None], **{name: further[name] for name in further if name in names}).logits[0]
        logits[:, undrawn] -= 100
        rows.append((logits / temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0])
    return torch.stack(rows)


def switch(model: Path, directory: Path) -> Values:
    """Switch three times with steps between, and compare log-probabilities of three engines."""
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 2, "verify": "full"}))
    pair = chat_of(image_of(1, (40, 40)), image_of(2, (96, 56)))
    prompts = [chat_of(image_of(0)), pair, chat_of(image_of(0)), chat_of(image_of(3))]
    observed: Values = {"vllm": [], "transformers": []}
    for number in range(3):
        # The same images: if a switch kept vLLM's cache of features, its log-probabilities would differ by 0.4.
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


def trainer_alone(model: Path, directory: Path) -> Values:
    """Switch a model whose images vLLM cannot compute here; compare text, and images in training."""
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 2, "verify": "full"}))
    tokenizer = ModelTokenizer(str(model))
    pair = chat_of(image_of(1, (40, 40)), image_of(2, (96, 56)))
    chats = [pair, chat_of(image_of(0)), pair, chat_of(image_of(3))]
    pictured = [tokenizer.encode_images(chat, rendering_of(None, tokenizer)) for chat in chats]
    observed: Values = {"vllm": [], "transformers": []}
    for number in range(2):
        with worker.rollout_context():
            with pytest.raises(ArgumentError) as caught:
                worker.generate_sequences(chats, SAMPLED)
            groups = worker.generate_sequences([chat_of(), chat_of(text="is")], SAMPLED)
        observed["refused"] = [str(finding) for finding in caught.value.findings]
        answers = [completion for group in groups for completion in group]
        batch = build_batch([answer.prompt_token_ids for answer in answers], answers, LENGTH)
        drawn = torch.tensor([answer.logprobs for answer in answers])
        pairs = zip(pictured, answers, strict=True)
        about_images = [replace(answer, image_inputs=prompt.inputs) for prompt, answer in pairs]
        images = build_batch(pictured, about_images, LENGTH)
        checkpoint = directory / f"saved{number}"
        with worker.train_context():
            of_text = worker.compute_log_probs(batch)[batch["mask"].bool()]
            scores = worker.compute_log_probs(images)
            worker.save_hf_checkpoint(checkpoint)
            expected = reference_log_probs(checkpoint, images)
            observed["vllm"].append((of_text.view(drawn.shape) - drawn).abs().max().item())
            observed["transformers"].append((scores - expected)[images["mask"].bool()].abs().max().item())
            worker.update(images, cross_entropy)
    worker.shutdown()
    return observed


def refusals(worker: ActorHybridWorker, batch: TensorDict, flat: Any) -> list[str]:
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


def replicas(model: Path, directory: Path) -> Values:
    """Generate on two replicas: the same completions as without an exchange of prompts.

    First the trainer computes images in another way, and text as before.
    """
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 1}))
    tower = worker.train.model.get_submodule("model.visual")  # type: ignore[attr-defined]
    with attributes_set(tower.modules(), eps=0.5), pytest.raises(ComputationError) as caught:
        worker.sharding.enter(State.INFER)
    prompts = [chat_of(image_of(number)) for number in range(3)]
    with worker.rollout_context():
        of_all = worker.generate_sequences(prompts, SAMPLED)
        of_rank = worker.generate_sequences(prompts[: 1 + worker.rank], SAMPLED, data="local")
    worker.shutdown()
    return {
        "refused": "vLLM, given an image, does not compute" in str(caught.value),
        "same": of_all[0] == of_rank[0] or worker.rank == 1,
        "inputs": [sorted(group[0].image_inputs) for group in of_all],
    }


def frozen(model: Path, directory: Path) -> Values:
    """Switch three times with steps between, while the vision tower is frozen."""
    kept = {"incremental": "auto", "incremental_mb": 64, "verify": "full"}
    configured = configuration(model, {"infer_tensor_parallel_size": 2, **kept}, frozen_parameters=["model.visual.*"])
    worker = ActorHybridWorker(configured)
    # Weights of vLLM are float32.
    shards = worker.inference.adaptor.layout().shards
    tower = [4 * shard.region.numel for shard in shards if ".visual." in shard.region.tensor]
    observed: Values = {"tower": sum(tower), "read": [], "skipped": [], "logprobs": []}
    for _ in range(3):
        with worker.rollout_context():
            report = worker.sharding.last_report
            assert report is not None
            observed["read"].append(report.bytes_own + report.bytes_received)
            observed["skipped"].append(report.bytes_skipped)
            groups = worker.generate_sequences([chat_of(image_of(0)), chat_of(image_of(1))], SAMPLED)
        answers = [completion for group in groups for completion in group]
        batch = build_batch([answer.prompt_token_ids for answer in answers], answers, LENGTH)
        drawn = torch.tensor([answer.logprobs for answer in answers])
        with worker.train_context():
            scores = worker.compute_log_probs(batch)[batch["mask"].bool()]
            observed["logprobs"].append((scores.view(drawn.shape) - drawn).abs().max().item())
            worker.update(batch, cross_entropy)
            worker.save_checkpoint(directory / "checkpoint")
            worker.load_checkpoint(directory / "checkpoint")
    worker.shutdown()
    return observed


PROGRAMS = {"frozen": frozen, "switch": switch, "trainer_alone": trainer_alone, "replicas": replicas}


def main(program: str, model: str, directory: str) -> None:
    observed = PROGRAMS[program](Path(model), Path(directory))
    if os.environ["RANK"] == "0":
        (Path(directory) / "observed.json").write_text(json.dumps(observed))


if __name__ == "__main__":
    main(*sys.argv[1:])
