"""Small models of images and text, with tokenizer, processor and environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import LINEAR_ATTENTION, SIZES

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|end|>")
START, END, IMAGE, VIDEO, END_OF_TEXT = range(500, 505)
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
WORDS = (*COLOURS, "is", "the", "image", "user", "assistant", "?")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE_OF_TEMPLATE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
_TEXT = {**SIZES, "bos_token_id": None, "eos_token_id": END_OF_TEXT}
_QWEN_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TOWER = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "image_size": 56,
    "patch_size": 14,
}
SMALL_VISION: dict[str, Values] = {
    "Qwen2_5_VLForConditionalGeneration": {
        **_QWEN_TOKENS,
        "model_type": "qwen2_5_vl",
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": _QWEN_ROTARY,
        },
        "vision_config": {
            **_QWEN_TOWER,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "model_type": "qwen2_5_vl",
        },
    },
    "Qwen3VLForConditionalGeneration": {
        **_QWEN_TOKENS,
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_parameters": {**_QWEN_ROTARY, "mrope_interleaved": True},
        },
        "vision_config": {
            **_QWEN_TOWER,
            "patch_size": 16,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
            "model_type": "qwen3_vl",
        },
    },
    "Qwen3_5ForConditionalGeneration": {
        **_QWEN_TOKENS,
        "model_type": "qwen3_5",
        "text_config": {
            **_TEXT,
            **LINEAR_ATTENTION,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                **_QWEN_ROTARY,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {
            **_QWEN_TOWER,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "model_type": "qwen3_5_vision",
        },
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": IMAGE,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 64},
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 4,
        "text_config": {**_TEXT, "model_type": "gemma3_text"},
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
}


def write_vision_model(directory: Path, architecture: str) -> Path:
    """Write config.json, tokenizer and processor of a small model; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [architecture], "dtype": "float32", **SMALL_VISION[architecture]}
    image_of_template, files = _PROCESSORS[config["model_type"]](config["vision_config"])
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1))
    _save_tokenizer(directory, image_of_template)
    return directory


Processor = tuple[str, Values]
"""Text of an image in the chat template, and the processor's files: name -> content."""


def _qwen(processor: str, video_processor: str, tower: Mapping[str, Any]) -> Processor:
    patch = tower["patch_size"]
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    sizes = {
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": pixels,
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "processor_class": processor,
    }
    files = {
        "preprocessor_config": {**sizes, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config": {**sizes, "video_processor_type": video_processor},
    }
    return "<|vision_start|><|image_pad|><|vision_end|>", files


def _llava(tower: Mapping[str, Any]) -> Processor:
    size = tower["image_size"]
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        "processor_class": "LlavaProcessor",
    }
    text = {
        "processor_class": "LlavaProcessor",
        "patch_size": tower["patch_size"],
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": "<|image_pad|>",
    }
    return "<|image_pad|>", {"preprocessor_config": image, "processor_config": text}


def _gemma3(tower: Mapping[str, Any]) -> Processor:
    size = tower["image_size"]
    image = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        "processor_class": "Gemma3Processor",
    }
    text = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    return "<|vision_start|>", {"preprocessor_config": image, "processor_config": text}


_PROCESSORS: dict[str, Callable[[Mapping[str, Any]], Processor]] = {
    "qwen2_5_vl": partial(_qwen, "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": partial(_qwen, "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "qwen3_5": partial(_qwen, "Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "llava": _llava,
    "gemma3": _gemma3,
}


def _save_tokenizer(directory: Path, image_of_template: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # vLLM looks up newlines for Gemma 3; they are white space here, so no text has these tokens.
    words = (*WORDS, *("\n" * number for number in range(1, 5)))
    vocabulary = {"<unk>": 0} | {word: number for number, word in enumerate(words, 1)}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), START)}
    vocabulary |= {token: START + number for number, token in enumerate(SPECIAL)}
    by_words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start, end, image, video, _ = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=by_words,
        unk_token="<unk>",
        eos_token="<|end|>",
        extra_special_tokens={
            "boi_token": start,
            "eoi_token": end,
            "image_token": image,
            "video_token": video,
        },
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE_OF_TEMPLATE", image_of_template)
    tokenizer.save_pretrained(directory)


def required_environment() -> dict[str, str]:
    """Return `vision_environment()`; skip the test without torchvision."""
    environment = vision_environment()
    if environment is None:
        pytest.skip(
            "`make env` installs the torchvision of requirements-cpu-vision.txt, and it is not here"
        )
    return environment


def vision_environment() -> dict[str, str] | None:
    """Return variables of processes that find torchvision, for torch for CPUs; None without it."""
    installed = Path(os.environ.get("TORCHVISION_FOLDER", Path(sys.prefix) / "vision"))
    if not (installed / "torchvision").is_dir():
        return None
    folders = [REPO_ROOT / "tests" / "vision_path", installed, REPO_ROOT]
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([*map(str, folders), *inherited])
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
