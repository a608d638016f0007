"""Small models of images and text, with tokenizer and processor, and the environment they run in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.models.small_configs import SIZES

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|end|>")
START, END, IMAGE, VIDEO, END_OF_TEXT = range(500, 505)
WORDS = ("red", "green", "blue", "is", "the", "image", "user", "assistant", "?")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 96,
    "out_hidden_size": 128,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TEXT = {**SIZES, "bos_token_id": None, "eos_token_id": END_OF_TEXT}
SMALL_VISION: dict[str, dict[str, Any]] = {
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": _ROTARY,
        },
        "vision_config": {
            **_TOWER,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "model_type": "qwen2_5_vl",
        },
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_parameters": {**_ROTARY, "mrope_interleaved": True},
        },
        "vision_config": {
            **_TOWER,
            "patch_size": 16,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
            "model_type": "qwen3_vl",
        },
    },
}
_PROCESSORS = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLProcessor",
    "Qwen3VLForConditionalGeneration": "Qwen3VLProcessor",
}


def write_vision_model(directory: Path, architecture: str) -> Path:
    """Write config.json, tokenizer and processor of a small model; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": [architecture], "dtype": "float32", **_TOKENS, **SMALL_VISION[architecture]}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(directory)
    patch = SMALL_VISION[architecture]["vision_config"]["patch_size"]
    pixels = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": pixels,
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "processor_class": _PROCESSORS[architecture],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {**image, "video_processor_type": "Qwen2VLVideoProcessor"}
    del video["image_processor_type"]
    if "Qwen3" in architecture:
        video["video_processor_type"] = "Qwen3VLVideoProcessor"
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0} | {word: number for number, word in enumerate(WORDS, 1)}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), START)}
    vocabulary |= {token: START + number for number, token in enumerate(SPECIAL)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<|end|>", additional_special_tokens=list(SPECIAL[:4])
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


def vision_environment() -> dict[str, str] | None:
    """Return variables of processes that find torchvision, for torch for CPUs; None without it."""
    installed = Path(os.environ.get("TORCHVISION_FOLDER", Path(sys.prefix) / "vision"))
    if not (installed / "torchvision").is_dir():
        return None
    folders = [REPO_ROOT / "tests" / "vision_path", installed, REPO_ROOT]
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([*map(str, folders), *inherited])
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
