"""Small random models of images and text: FSDP2 on two ranks, real vLLM, real processors.

    python -m tests.hybrid_engine.end_to_end.test_vision DIRECTORY  # a rank

The ranks run a program, because the fork server of other tests has imported vLLM without
torchvision.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hybrid_engine import ActorHybridWorker, Completion, HybridConfig, Sampling, load_config
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import ArgumentError, BatchError, ComputationError
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl import converse
from hybrid_engine.switch.states import State
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.trainer.batches import build_batch, pack
from hybrid_engine.trainer.batches.image_rows import images_in
from tests.harness.values import Values
from tests.hybrid_engine.tools.programs import run_python
from tests.zoo import workers
from tests.zoo.families import read_config
from tests.zoo.vision_models import (
    IMAGE,
    SMALL_VISION,
    VIDEO,
    required_environment,
    write_vision_model,
)

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

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
    config = read_config(model)
    # vLLM's gated delta nets take no other dtype on a CPU.
    rounded = (
        {"compress_reshard": True, "compression_dtype": "bfloat16"}
        if config["model_type"] == "qwen3_5"
        else {}
    )
    values = workers.settings(
        str(model),
        {"fsdp": {}, "params_dtype": "float32", "seq_length": LENGTH, **actor},
        {
            "max_model_len": LENGTH,
            "max_num_seqs": 8,
            "kv_cache_mb": 64,
            "bucket_mb": 1,
            **rounded,
            **generate,
        },
    )
    return load_config({"random_weights": True, **values}, 2)


def cross_entropy(batch: Batch, log_probs: torch.Tensor) -> torch.Tensor:
    return -(log_probs * batch["weights"]).sum(1).mean()


def reference_log_probs(checkpoint: Path, batch: Batch) -> torch.Tensor:
    """Return log-probabilities [B, S] of the labels by transformers, row by row.

    Tokens of images and videos are left out, because neither engine draws them.
    """
    import transformers

    architecture = read_config(checkpoint)["architectures"][0]
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
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
            logits = model(
                tokens[None], **{name: further[name] for name in further if name in names}
            ).logits[0]
        logits[:, undrawn] -= 100
        rows.append((logits / temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0])
    return torch.stack(rows)


def answered(groups: list[list[Completion]]) -> tuple[list[Completion], TensorDict, torch.Tensor]:
    """Return the completions, a batch of them, and vLLM's log-probabilities of their tokens in a
    row.
    """
    answers = [completion for group in groups for completion in group]
    batch = build_batch([answer.prompt_token_ids for answer in answers], answers, LENGTH)
    return answers, batch, torch.tensor([answer.logprobs for answer in answers]).flatten()


def switch(model: Path, directory: Path) -> None:
    """Switch twice with a step between, and compare log-probabilities of three engines."""
    worker = ActorHybridWorker(
        configuration(model, {"infer_tensor_parallel_size": 2, "verify": "full"})
    )
    pair = chat_of(image_of(1, (40, 40)), image_of(2, (96, 56)))
    prompts = [chat_of(image_of(0)), pair, chat_of(image_of(0)), chat_of(image_of(3))]
    # vLLM computes Qwen3.5 in bfloat16.
    tolerance = 0.05 if worker.config.generate_config.compress_reshard else 1e-5
    for number in range(2):
        # The same images: if a switch kept vLLM's cache of features, its log-probabilities would
        # differ by 0.4.
        with worker.rollout_context():
            groups = worker.generate_sequences(prompts, SAMPLED)
            if number == 0:
                with pytest.raises(ArgumentError, match=r"prompts\[0\]: an image is .* found int"):
                    worker.generate_sequences([chat_of(7)], SAMPLED)
                with pytest.raises(ArgumentError, match="has tokens of images, but no images"):
                    worker.generate_sequences([list(groups[0][0].prompt_token_ids)], SAMPLED)
                with pytest.raises(
                    ArgumentError, match="has images, and conversations are text alone"
                ):
                    converse(worker, prompts, SAMPLED, lambda prompt: lambda answer: None)
        flat, batch, drawn = answered(groups)
        is_drawn = batch["mask"].bool()
        checkpoint = directory / f"saved{number}"
        with worker.train_context():
            scores = worker.compute_log_probs(batch)
            worker.save_hf_checkpoint(checkpoint)
            if worker.rank == 0:
                expected = reference_log_probs(checkpoint, batch)
                assert (scores - expected)[is_drawn].abs().max() < 1e-5
            assert (scores[is_drawn] - drawn).abs().max() < tolerance
            worker.update(batch, cross_entropy)
    report = worker.sharding.last_report
    assert report.bytes_received == report.bytes_least
    assert {"preprocessor_config.json", "tokenizer.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
    assert groups[0][0].logprobs != groups[3][0].logprobs, "the image has no effect"
    with worker.train_context():
        check_refusals(worker, batch, flat)
    worker.shutdown()


def trainer_alone(model: Path, directory: Path) -> None:
    """Switch a model whose images vLLM cannot compute; compare text, and images in training."""
    from hybrid_engine.backends.vllm.prompts import ModelTokenizer, rendering_of

    worker = ActorHybridWorker(
        configuration(model, {"infer_tensor_parallel_size": 2, "verify": "full"})
    )
    tokenizer = ModelTokenizer(str(model))
    pair = chat_of(image_of(1, (40, 40)), image_of(2, (96, 56)))
    chats = [pair, chat_of(image_of(0)), pair, chat_of(image_of(3))]
    pictured = [tokenizer.encode_images(chat, rendering_of(None, tokenizer)) for chat in chats]
    for number in range(2):
        with worker.rollout_context():
            with pytest.raises(ArgumentError) as caught:
                worker.generate_sequences(chats, SAMPLED)
            groups = worker.generate_sequences([chat_of(), chat_of(text="is")], SAMPLED)
        refused = [str(finding) for finding in caught.value.findings]
        assert [text.partition(", ")[0] for text in refused] == [
            f"prompts[{index}]: has images" for index in range(4)
        ]
        assert "vLLM's attention here (CPU_ATTN) is causal within images, too" in refused[0]
        answers, batch, drawn = answered(groups)
        pairs = zip(pictured, answers, strict=True)
        about_images = [replace(answer, image_inputs=prompt.inputs) for prompt, answer in pairs]
        images = build_batch(pictured, about_images, LENGTH)
        checkpoint = directory / f"saved{number}"
        with worker.train_context():
            of_text = worker.compute_log_probs(batch)[batch["mask"].bool()]
            scores = worker.compute_log_probs(images)
            worker.save_hf_checkpoint(checkpoint)
            expected = reference_log_probs(checkpoint, images)
            assert (of_text - drawn).abs().max() < 1e-5
            # The trainer computes images, with attention in both directions.
            assert (scores - expected)[images["mask"].bool()].abs().max() < 1e-5
            worker.update(images, cross_entropy)
    worker.shutdown()


def check_refusals(worker: ActorHybridWorker, batch: TensorDict, flat: Any) -> None:
    """Check the codes of errors for batches that the model cannot compute."""
    images = images_in(batch)
    assert images is not None
    rows_of = type(images)
    calls = {
        "rows-without-images": lambda: worker.compute_log_probs(
            {**batch, "images": rows_of([{}, *images.rows[1:]])}
        ),
        "wrong-number-of-rows": lambda: worker.compute_log_probs(
            {**batch, "images": rows_of(images.rows[1:])}
        ),
        "images-unsupported": lambda: pack(
            [completion.prompt_token_ids for completion in flat], flat, LENGTH
        ),
    }
    for code, call in calls.items():
        with pytest.raises(BatchError) as caught:
            call()
        assert caught.value.findings[0].code == code


def replicas(model: Path, directory: Path) -> None:
    """Generate on two replicas: the same completions as without an exchange of prompts.

    First the trainer computes images in another way, and text as before.
    """
    worker = ActorHybridWorker(configuration(model, {"infer_tensor_parallel_size": 1}))
    tower = worker.train.model.get_submodule("model.visual")  # type: ignore[attr-defined]
    with attributes_set(tower.modules(), eps=0.5), pytest.raises(ComputationError) as caught:
        worker.sharding.enter(State.INFER)
    assert "vLLM, given an image, does not compute" in str(caught.value)
    prompts = [chat_of(image_of(number)) for number in range(3)]
    with worker.rollout_context():
        of_all = worker.generate_sequences(prompts, SAMPLED)
        of_rank = worker.generate_sequences(prompts[: 1 + worker.rank], SAMPLED, data="local")
    worker.shutdown()
    assert of_all[0] == of_rank[0] or worker.rank == 1
    assert [sorted(group[0].image_inputs) for group in of_all] == [
        ["image_grid_thw", "pixel_values"]
    ] * 3


def frozen(model: Path, directory: Path) -> None:
    """Switch twice with a step between, while the vision tower is frozen."""
    kept = {"incremental": "auto", "incremental_mb": 64, "verify": "full"}
    configured = configuration(
        model, {"infer_tensor_parallel_size": 2, **kept}, frozen_parameters=["model.visual.*"]
    )
    worker = ActorHybridWorker(configured)
    # Weights of vLLM are float32.
    shards = worker.inference.adaptor.layout().shards
    tower = sum(4 * shard.region.numel for shard in shards if ".visual." in shard.region.tensor)
    moved = []
    for _ in range(2):
        with worker.rollout_context():
            report = worker.sharding.last_report
            moved.append((report.bytes_own + report.bytes_received, report.bytes_skipped))
            groups = worker.generate_sequences(
                [chat_of(image_of(0)), chat_of(image_of(1))], SAMPLED
            )
        _, batch, drawn = answered(groups)
        with worker.train_context():
            scores = worker.compute_log_probs(batch)[batch["mask"].bool()]
            assert (scores - drawn).abs().max() < 1e-5
            worker.update(batch, cross_entropy)
            worker.save_checkpoint(directory / "checkpoint")
            worker.load_checkpoint(directory / "checkpoint")
    of_first = moved[0][0]
    assert moved == [(of_first, 0), (of_first - tower, tower)]
    worker.shutdown()


QWEN3_VL = "Qwen3VLForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"


def main(directory: str) -> None:
    """Check all cases; one that is wrong ends this rank."""
    cases = [
        # Log-probabilities are those of transformers in both engines.
        *((switch, name) for name in SMALL_VISION if name != GEMMA),
        # vLLM would compute images otherwise, and they are refused.
        (trainer_alone, GEMMA),
        # Replicas exchange prompts with images.
        (replicas, QWEN3_VL),
        # A frozen vision tower is sent once.
        (frozen, QWEN3_VL),
    ]
    for check, architecture in cases:
        print(f"{check.__name__}: {architecture}")
        check(Path(directory, architecture), Path(directory, check.__name__, architecture))


def test_images_are_trained_and_generated(tmp_path: Path) -> None:
    environment = required_environment()
    for architecture in SMALL_VISION:
        write_vision_model(tmp_path / architecture, architecture)
    ended = run_ranks(["-m", __name__, str(tmp_path)], 2, 800, environment=environment)
    assert ended.status == 0, ended.output


def test_grpo_learns_what_only_images_show(tmp_path: Path) -> None:
    environment = required_environment()
    out = tmp_path / "rows.json"
    command = "benchmarks.image_grpo", "--steps", 40, "--json", out
    run_python("-m", *command, status=0, timeout=500, **environment)
    _, *rows = json.loads(out.read_text())
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.1
    # Of four colors, text alone names at most one.
    assert sum(rewards[-5:]) / 5 > 0.35
    assert max(row["logprob_diff"] for row in rows) < 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
