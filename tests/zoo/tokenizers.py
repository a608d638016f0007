"""Tokenizers that need no external files."""

from __future__ import annotations

import string
from pathlib import Path

NUMBERS_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ "
    "raise_exception('no tools here') }}{% endif %}"
    "7 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}8{% endif %}"
)
CHARACTERS_TEMPLATE = (
    "{% if tools %}{{ '' }}{% endif %}"
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{{ suffix }}"
)


def save_numbers(path: Path, template: str | None = NUMBERS_TEMPLATE) -> None:
    """Save a tokenizer whose tokens are the numbers below 130; 9 is the end-of-sequence token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {"?": 0} | {str(number): number for number in range(1, 130)}, unk_token="?"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="9")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)


def save_characters(path: Path, template: str = CHARACTERS_TEMPLATE, **special: str) -> None:
    """Save a tokenizer of the 101 printable characters; `special` are names such as eos_token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        character: number for number, character in enumerate(["\0", *sorted(string.printable)])
    }
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="\0"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="\0", **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
