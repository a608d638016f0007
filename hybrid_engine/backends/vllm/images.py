"""Prompts with images: token ids for vLLM and the trainer, and tensors for the trainer.

    [{"role": "user", "content": [{"type": "image", "image": image},
                                  {"type": "text", "text": "What is this?"}]}]

A chat template writes one token for an image. The model's processor replaces it by as many as the
image has in the model. vLLM takes the prompt before that, and replaces it itself; the trainer takes
it after that, with the processor's tensors.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid_engine.backends.vllm.engine_settings import Chat, Message, TokenIds
from hybrid_engine.errors import Violation, Violations
from hybrid_engine.messages import Record
from hybrid_engine.ranks.torch_internals import Tensors


class PackedImage(Record, frozen=True):
    """An RGB image in a message.

    Attributes:
        width, height: pixels.
        content: 3 bytes a pixel, row by row.
    """

    width: int
    height: int
    content: bytes


class ImagePrompt(list[int]):
    """Token ids of a prompt as the model computes it, with all tokens of its images.

    Attributes:
        unexpanded: token ids with one token for an image, as vLLM takes them.
        images: RGB images of PIL.
        inputs: tensors of the images for transformers' model, such as `pixel_values`.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        unexpanded: Sequence[int],
        images: Sequence[Any],
        inputs: Tensors,
    ) -> None:
        super().__init__(token_ids)
        self.unexpanded = list(unexpanded)
        self.images = tuple(images)
        self.inputs = inputs

    @cached_property
    def packed(self) -> list[PackedImage]:
        """The images, for a message."""
        return [PackedImage(image.width, image.height, image.tobytes()) for image in self.images]

    @cached_property
    def digest(self) -> str:
        """Digest of the images' pixels."""
        digest = hashlib.blake2b(digest_size=16)
        for image in self.packed:
            digest.update(f"{image.width} {image.height} ".encode() + image.content)
        return digest.hexdigest()


def unpacked(images: Sequence[PackedImage]) -> list[Any]:
    """Return the images of a message."""
    from PIL import Image

    return [Image.frombytes("RGB", (image.width, image.height), image.content) for image in images]


def has_images(chat: Chat) -> bool:
    """Return whether a message of a chat has an image."""
    return next(_image_parts(chat), None) is not None


def noise_chat() -> Chat:
    """Return a chat with an image of noise, always the same."""
    from PIL import Image

    image = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(3 * 64 * 64))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is in the image?"}]
    return [{"role": "user", "content": parts}]


def images_of(chat: Chat) -> list[Any]:
    """Return the images of a chat, in order, as RGB.

    Raises ValueError for what is neither an image of PIL nor a file of one.
    """
    from PIL import Image, ImageOps

    images = []
    for part in _image_parts(chat):
        image = part.get("image")
        if isinstance(image, str | Path):
            try:
                image = Image.open(image)
            except OSError as error:
                raise ValueError(f"its image cannot be read: {error}") from error
        if not isinstance(image, Image.Image):
            raise ValueError(
                'an image is {"type": "image", "image": ...} with an image of PIL or the path '
                f"of a file, found {type(image).__name__}"
            )
        try:
            # Photos may be stored rotated.
            images.append(ImageOps.exif_transpose(image).convert("RGB"))
        except OSError as error:
            raise ValueError(f"image {len(images)} cannot be read: {error}") from error
    return images


def image_prompt(
    processor: Any,
    text: str,
    unexpanded: Sequence[int],
    images: Sequence[Any],
) -> ImagePrompt:
    """Return a prompt whose images the processor has made tensors of.

    Args:
        processor: of the model, a `ProcessorMixin` of transformers.
        text: the prompt as the chat template renders it.
        unexpanded: token ids of `text`.
        images: RGB images of PIL, in the order of their places in the text.
    """
    inputs = dict(
        processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=False)
    )
    # The others have a value for each token, and follow from the tokens.
    names = [name for name in processor.image_processor.model_input_names if name in inputs]
    token_ids = inputs["input_ids"][0].tolist()
    return ImagePrompt(token_ids, unexpanded, images, {name: inputs[name] for name in names})


def image_refusal(layers: Iterable[Any]) -> str:
    """Return why vLLM would compute images otherwise than their model; "" if it would not.

    Some models attend in both directions within an image, and not all attention of vLLM does.

    `layers`: layers of a live model, of attention and others.
    """
    causal = {
        layer.attn_backend.get_name()
        for layer in layers
        if getattr(layer, "use_mm_prefix", False) and not layer.attn_backend.supports_mm_prefix()
    }
    if not causal:
        return ""
    return (
        "the tokens of an image attend to each other in this model, and vLLM's attention here "
        f"({', '.join(sorted(causal))}) is causal within images, too"
    )


def image_faults(prompts: TokenIds, placeholders: Collection[int], refusal: str) -> Violations:
    """Yield prompts whose images vLLM cannot compute, or that have tokens of images without them.

    Args:
        prompts: token ids, such as those of an earlier prompt with images.
        placeholders: token ids in whose places the model puts images and the like.
        refusal: why the engine takes no images, such as of `image_refusal`; "" if it does.
    """
    for index, prompt in enumerate(prompts):
        key = f"prompts[{index}]"
        if isinstance(prompt, ImagePrompt):
            if refusal:
                yield Violation(
                    key,
                    f"has images, and {refusal}",
                    "Use text, or vLLM in the training processes, on a GPU",
                    code="images-unsupported",
                )
        elif not set(placeholders).isdisjoint(prompt):
            yield Violation(
                key,
                "has tokens of images, but no images",
                "Pass a chat with the images; several turns have text alone",
                code="tokens-without-images",
            )


def _image_parts(chat: Chat) -> Iterator[Message]:
    for message in chat:
        content = message.get("content")
        if isinstance(content, str):
            continue
        for part in content or ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                yield part
