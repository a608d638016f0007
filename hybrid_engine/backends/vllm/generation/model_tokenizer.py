"""The model's own tokenizer: for prompts, for the text of completions, and for vLLM where a request needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ArgumentError, ConfigError, Violation


class ModelTokenizer:
    """The tokenizer in a model's directory, loaded at its first use. A copy by pickle loads its own.

    Every use raises ConfigError where the directory has none.
    """

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir

    def __getstate__(self) -> dict[str, str]:
        return {"model_dir": self.model_dir}

    @cached_property
    def loaded(self) -> Any:
        """Transformers' tokenizer."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of any kind: tokenizers of all families read files of theirs
            raise self._missing(f"has no tokenizer that can be read ({error})") from error
        # Without files some classes still make one, of special tokens alone, which turns any text into nothing.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise self._missing("has no tokenizer")
        return tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the tokenizer adds."""
        token_ids: list[list[int]] = self.loaded(list(texts))["input_ids"] if texts else []
        return token_ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a chat up to where the assistant's answer begins.

        Raises ValueError with the template's own complaint, ArgumentError where the tokenizer has no template.
        """
        if not self.loaded.chat_template:
            problem = f"chats, but the tokenizer of {self.model_dir} has no chat template"
            remedy = "Save it there with `tokenizer.chat_template` set, or pass texts"
            raise ArgumentError([Violation("prompts", problem, remedy)])
        try:
            encoded = self.loaded.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template is a program
            raise ValueError(f"the model's chat template refuses it: {error}") from error
        token_ids: list[int] = encoded["input_ids"]
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self.loaded.decode(list(token_ids), skip_special_tokens=True)
        return text

    @contextlib.contextmanager
    def lent_to(self, llm: Any) -> Iterator[None]:
        """Within this context a vLLM that was built without a tokenizer has this one, in all its parts."""
        tokenizer = internals.CACHED_TOKENIZER.load()(self.loaded)
        parts = (llm.llm_engine.renderer, llm.llm_engine.output_processor)
        manager = internals.core_of(llm).structured_output_manager
        manager.tokenizer = tokenizer  # its grammars keep it, and it is read for nothing else
        for part in parts:
            part.tokenizer = tokenizer
        try:
            yield
        finally:
            for part in parts:
                part.tokenizer = None

    def _missing(self, problem: str) -> ConfigError:
        remedy = "Name a directory that has the model's tokenizer, or pass token ids"
        return ConfigError([Violation("model", f"{self.model_dir} {problem}", remedy)])
