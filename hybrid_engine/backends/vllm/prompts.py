"""Conversion of prompts, in the forms of transformers, TRL and verl, to token ids and back.

texts               ["What is 2 + 3?", …]
chats               [[{"role": "user", "content": "What is 2 + 3?"}], …], by the chat template
lists of token ids  [[12, 7, 9], …]; also arrays and one-dimensional tensors
a tensor [B, S]     token ids, and an attention mask of the same shape if they are padded
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import (
    OTHER_NAMES,
    Chat,
    Completion,
    Sampling,
    TokenIds,
    TokenLists,
)
from hybrid_engine.backends.vllm.images import ImagePrompt, has_images, image_prompt, images_of
from hybrid_engine.backends.vllm.tool_calls import Tool, schema_of
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    Violation,
    Violations,
    nearest,
    require_none,
    shortened,
)

Prompts = torch.Tensor | Sequence[str] | Sequence[Chat] | TokenIds

_REMEDY = (
    "Pass texts, chats (lists of messages with role and content), "
    "lists of token ids, or a tensor [B, S]"
)
_REMEDY_FOR_ONE = (
    "Pass a list of prompts; of a tokenizer's output its input_ids, "
    "with attention_mask=attention_mask"
)
_REMEDY_FOR_IDS = "Pass a list of token ids for each sequence: [[5, 6, 7]], not [5, 6, 7]"

STREAMING = "A server streams: set generate_config.servers and ask it yourself (docs/servers.md)"
"""Remedy for callers who want tokens as they are drawn."""

_ARGUMENTS_OF_CALL = ("sampling", "attention_mask", "data")
_ARGUMENT_REMEDIES = {
    "generation_config": "Use sampling",
    "prompt_logprobs": (
        "Pass vllm.SamplingParams(prompt_logprobs=0) as `sampling`: completions have them"
    ),
    "return_logprobs": "Leave it out: every Completion has logprobs",
    "sampling_params": "Use sampling",
}
"""Arguments of other libraries' calls -> remedy."""

_NOT_OF_TEMPLATE = {"chat_template", "documents"}
"""Keywords that `apply_chat_template` itself reads, in addition to the template's variables."""
_FORMS = ("a text", "a chat", "token ids")
"""Valid forms of a prompt, as messages name them."""
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_ANSWER = "⁂answer⁂"
"""Placeholder for an answer in a chat that is rendered for the text after it."""


Rendering = Mapping[str, Any]
"""Keywords of `apply_chat_template`."""


class ChatArguments(TypedDict, total=False):
    """Arguments for rendering chats, those of transformers' `apply_chat_template`.

    Attributes:
        tools: tools that the model may call: functions with type hints and a docstring, or their
            JSON schemas.
        chat_template_kwargs: variables of the template, e.g. `{"enable_thinking": False}`; also
            `chat_template` and `documents`.
        add_generation_prompt: end where an answer begins; default: true, unless the last message is
            continued.
        continue_final_message: end within the last message, which the completion continues.
    """

    tools: Sequence[Tool] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


def token_ids_of(
    prompts: Prompts,
    tokenizer: ModelTokenizer,
    attention_mask: torch.Tensor | None = None,
    chat: ChatArguments | None = None,
) -> TokenLists:
    """Return the token ids of each prompt, without padding.

    Args:
        prompts: all in one of the forms above.
        tokenizer: tokenizer of texts and chats.
        attention_mask: [B, S], for a tensor: 0 where a prompt is padded, on either side. None: no
            padding.
        chat: arguments for rendering chats.

    Raises ArgumentError naming every prompt of an invalid form or of another form than the first;
    for a mask of another shape or without a tensor; for texts without a tokenizer; for chats
    without a template or refused by it; and for unknown arguments, or chat arguments without chats.
    """
    unknown = [name for name in chat or () if name not in ChatArguments.__annotations__]
    require_none(map(_unknown_argument, unknown), ArgumentError)
    if isinstance(prompts, torch.Tensor):
        _require_unset(chat)
        return _of_rows(prompts, attention_mask)
    _require_list(prompts, _REMEDY_FOR_ONE)
    if attention_mask is not None:
        raise ArgumentError.of(
            "attention_mask",
            "is for prompts in a tensor [B, S]",
            "Leave it out: prompts in lists have no padding",
            code="mask-without-tensor",
        )
    listed: list[Any] = list(prompts)
    forms = [form_of(prompt) for prompt in listed] or ["token ids"]
    require_none(_faults_of_forms(listed, forms), ArgumentError)
    form = forms[0]
    if form == "a chat":
        return _encode_chats(listed, tokenizer, rendering_of(chat, tokenizer))
    # An empty list has no form, so chat arguments are fine.
    _require_unset(chat if listed else None)
    if form == "a text":
        return tokenizer.encode(listed)
    return [
        prompt if isinstance(prompt, ImagePrompt) else [int(token) for token in prompt]
        for prompt in listed
    ]


def in_form_of(prompts: Prompts, completions: list[list[Completion]], pad_token_id: int) -> Any:
    """Return completions in the form of their prompts.

    A tensor of prompts gives a tensor [B * n, S + longest]: each row is a prompt as it was passed
    and one of its completions, padded on the right with `pad_token_id`. Texts and chats give n
    texts each. Completions of token ids stay as they are.
    """
    if isinstance(prompts, torch.Tensor):
        rows = [
            torch.cat([prompt, prompt.new_tensor(completion.token_ids)])
            for prompt, of_prompt in zip(prompts, completions, strict=True)
            for completion in of_prompt
        ]
        if not rows:
            return prompts
        pad_sequence = torch.nn.utils.rnn.pad_sequence
        return pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    if completions and form_of(prompts[0]) != "token ids":
        return [[completion.text for completion in of_prompt] for of_prompt in completions]
    return completions


def check_token_ids(
    prompts: Sequence[Sequence[int]],
    max_tokens: int | Sequence[int],
    limit: int,
    vocabulary: int,
) -> None:
    """Raise ArgumentError naming every prompt that cannot be completed.

    Such a prompt is not a list of token ids, is empty, too long or out of the vocabulary.

    Args:
        prompts: a list of token ids each.
        max_tokens: tokens to generate after each, or a list with one number per prompt.
        limit: maximum number of tokens of a prompt and its completion.
        vocabulary: number of tokens in the vocabulary.
    """
    _require_list(prompts, _REMEDY_FOR_IDS)
    num_to_generate = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    require_none(_unusable_token_ids(prompts, num_to_generate, limit, vocabulary), ArgumentError)


def _unusable_token_ids(
    prompts: TokenIds,
    num_to_generate: Sequence[int],
    limit: int,
    vocabulary: int,
) -> Violations:
    for index, (prompt, num) in enumerate(zip(prompts, num_to_generate, strict=True)):
        key = f"prompts[{index}]"
        form = form_of(prompt)
        if form != "token ids":
            yield Violation(key, form, _REMEDY_FOR_IDS, code="not-token-ids")
        elif not len(prompt):
            yield Violation(key, "it has no tokens", "Leave it out", code="empty-prompt")
        elif len(prompt) + num > limit:
            yield Violation(
                key,
                f"{len(prompt)} tokens and {num} to generate, but {limit} fit together",
                "Shorten it, lower max_tokens, or raise max_model_len",
                code="prompt-too-long",
            )
        elif min(prompt) < 0 or max(prompt) >= vocabulary:
            span = f"{min(prompt)} to {max(prompt)}"
            yield Violation(
                key,
                f"token ids from {span}, but the vocabulary has {vocabulary}",
                "Use the model's tokenizer",
                code="out-of-vocabulary",
            )


def _require_list(prompts: object, remedy: str) -> None:
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        raise ArgumentError.of("prompts", f"got {shortened(prompts)}", remedy, code="not-a-list")


def _of_rows(prompts: torch.Tensor, mask: torch.Tensor | None) -> TokenLists:
    has_mask = isinstance(mask, torch.Tensor) and mask.shape == prompts.shape
    if prompts.dim() != 2 or not _is_integer(prompts.dtype) or not (mask is None or has_mask):
        masked = "" if mask is None else f" with a mask of shape {tuple(np.shape(mask))}"
        raise ArgumentError.of(
            "prompts",
            f"{prompts.dtype} of shape {tuple(prompts.shape)}{masked}",
            "Pass token ids [B, S], and a mask of that shape",
            code="wrong-shape",
        )
    if mask is None:
        rows: TokenLists = prompts.tolist()
        return rows
    # Padding may be on either side, so rows are indexed, not sliced.
    keep = mask.to(prompts.device).bool()
    return [row[row_keep].tolist() for row, row_keep in zip(prompts, keep, strict=True)]


def _faults_of_forms(prompts: Sequence[Any], forms: Sequence[str]) -> Violations:
    """Yield prompts without a valid form, and those of another form than the first."""
    first = forms[0]
    for index, form in enumerate(forms):
        key = f"prompts[{index}]"
        if form not in _FORMS:
            yield Violation(key, form, _REMEDY, code="invalid-prompt")
        elif form != first and first in _FORMS:  # an invalid first prompt is reported already
            yield Violation(
                key, f"{form}, but prompts[0] is {first}", _REMEDY, code="mixed-prompts"
            )
        elif form == "a text" and (half := _HALF_A_PAIR.search(prompts[index])):
            yield Violation(
                key,
                f"character {half.start()} is {half[0]!a}, half a surrogate pair",
                'Pass text.encode(errors="replace").decode(), or leave it out',
                code="not-unicode",
            )


def form_of(prompt: Any) -> str:
    """Return "a text", "a chat" or "token ids", or a description of an invalid prompt."""
    if isinstance(prompt, str):
        return "a text"
    if isinstance(prompt, Mapping):
        if "role" in prompt:
            return "a message outside of a chat, which is a list of messages"
        keys = ", ".join(map(str, prompt))
        return f"a dict of {keys or 'nothing'}; pass its text or messages, in `train` as `prompt`"
    if isinstance(prompt, torch.Tensor | np.ndarray):
        is_row = prompt.ndim == 1 and _is_integer(prompt.dtype)
        return "token ids" if is_row else f"{prompt.dtype} of shape {tuple(prompt.shape)}"
    if isinstance(prompt, int):
        return f"{shortened(prompt)}, outside of a list"
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        return f"got {shortened(prompt)}"
    if prompt and all(isinstance(part, Mapping) for part in prompt):
        for part in prompt:
            has_content = isinstance(part.get("content"), str | list | tuple | None)
            if not (isinstance(part.get("role"), str) and has_content) or len(part) < 2:
                return f"a chat with a message without role or content, {shortened(part)}"
        return "a chat"
    # Types first: a prompt has many tokens, and few types. bool is a subclass of int.
    wrong = {
        kind
        for kind in set(map(type, prompt))
        if kind is bool or not issubclass(kind, int | np.integer)
    }
    if wrong:
        part = next(part for part in prompt if type(part) in wrong)
        return f"a list with {shortened(part)}"
    return "token ids"


def _is_integer(dtype: torch.dtype | np.dtype[Any]) -> bool:
    if isinstance(dtype, torch.dtype):
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return np.issubdtype(dtype, np.integer)


def _unknown_argument(name: str) -> Violation:
    """Return the violation of an argument that calls for completions do not take."""
    problem = "is not an argument of this call"
    sampling_names = [*OTHER_NAMES, *(field.name for field in fields(Sampling))]
    if name == "stream":
        return Violation(
            name, f"{problem}: completions are returned whole", STREAMING, code="no-streaming"
        )
    if name in _ARGUMENT_REMEDIES:
        remedy = _ARGUMENT_REMEDIES[name]
    elif name in sampling_names:
        remedy = f"Pass Sampling({OTHER_NAMES.get(name, name)}=…)"
    else:
        known = [*ChatArguments.__annotations__, *_ARGUMENTS_OF_CALL, *sampling_names]
        close = nearest(name, known)
        remedy = f"Did you mean {close}?" if close else "Leave it out"
    return Violation(name, problem, remedy, code="unknown-argument")


def _require_unset(chat: ChatArguments | None) -> None:
    """Raise ArgumentError naming chat arguments that were passed without chats."""
    require_none(
        (
            Violation(
                name,
                "is for chats, and the prompts are none",
                "Leave it out, or pass lists of messages",
                code="argument-of-chats",
            )
            for name, value in (chat or {}).items()
            if value
        ),
        ArgumentError,
    )


def rendering_of(chat: ChatArguments | None, tokenizer: ModelTokenizer) -> Rendering:
    """Return keywords for `apply_chat_template`, with schemas in place of functions.

    Raises ArgumentError with every fault.
    """
    chat = chat or {}
    violations = []
    schemas = []
    tools: Any = chat.get("tools") or ()
    variables: Any = chat.get("chat_template_kwargs") or {}
    if not isinstance(tools, list | tuple):
        violations.append(
            Violation(
                "tools",
                f"got {shortened(tools)}",
                "Pass a list of functions or JSON schemas",
                code="not-a-list",
            )
        )
        tools = ()
    for index, tool in enumerate(tools):
        try:
            schemas.append(schema_of(tool))
        except Exception as error:  # transformers parses the docstring and raises various types
            violations.append(
                Violation(
                    f"tools[{index}]",
                    f"no schema can be made of it: {error}",
                    "Pass a function with type hints and a docstring that describes "
                    "each argument, or a JSON schema",
                    code="no-schema",
                )
            )
    if not isinstance(variables, Mapping):
        violations.append(
            Violation(
                "chat_template_kwargs",
                f"got {shortened(variables)}",
                "Pass a dict of variables of the template",
                code="not-a-mapping",
            )
        )
        variables = {}
    violations += _invalid_variables(variables, schemas, tokenizer)
    continues = bool(chat.get("continue_final_message"))
    begins = chat.get("add_generation_prompt", not continues)
    if continues and begins:
        violations.append(
            Violation(
                "add_generation_prompt",
                "true, but continue_final_message goes on in the last message",
                "Leave one of them out",
                code="conflicting-arguments",
            )
        )
    require_none(violations, ArgumentError)
    return {
        "tools": schemas or None,
        "add_generation_prompt": begins,
        "continue_final_message": continues,
        **variables,
    }


def _invalid_variables(
    variables: Mapping[str, Any],
    tools: Sequence[Any],
    tokenizer: ModelTokenizer,
) -> Violations:
    """Yield violations of names that the template does not read, and so would ignore."""
    is_read = variables or tools
    template = variables.get("chat_template") or (is_read and tokenizer.template(tools))
    # Every variable that the template reads is among its words.
    words = set(re.findall(r"\w+", str(template)))
    if tools and template and "tools" not in words:
        yield Violation(
            "tools",
            "the model's template does not read them, so the model would not know of them",
            "Leave them out, or pass a chat_template in chat_template_kwargs",
            code="tools-not-read",
        )
    for name in variables:
        key = f"chat_template_kwargs.{name}"
        if name in tokenizer.reserved:
            is_argument = name in ChatArguments.__annotations__
            yield Violation(
                key,
                "is not a variable of a template",
                "Pass it as an argument" if is_argument else "Leave it out",
                code="reserved-name",
            )
        elif name not in words | _NOT_OF_TEMPLATE:
            close = nearest(name, words)
            yield Violation(
                key,
                "is not a variable of the model's template, which would ignore it",
                f"Did you mean {close}?" if close else "Leave it out",
                code="unknown-variable",
            )


def _encode_chats(
    chats: Sequence[Chat],
    tokenizer: ModelTokenizer,
    rendering: Rendering,
) -> TokenLists:
    violations = []
    encoded: TokenLists = []
    for index, chat in enumerate(chats):
        try:
            if has_images(chat):
                encoded.append(tokenizer.encode_images(chat, rendering))
            else:
                encoded.append(tokenizer.encode_chat(chat, rendering))
        except ValueError as error:
            violations.append(
                Violation(
                    f"prompts[{index}]",
                    str(error),
                    "Give it messages that the template takes",
                    code="refused-by-template",
                )
            )
    require_none(violations, ArgumentError)
    return encoded


class ModelTokenizer:
    """The tokenizer in a model's directory, loaded at its first use; a pickled copy loads it again.

    Every use raises ConfigError if the directory has no tokenizer.
    """

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir

    def __getstate__(self) -> dict[str, str]:
        return {"model_dir": self.model_dir}

    @cached_property
    def loaded(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = self._read(AutoTokenizer, "tokenizer")
        # Without files some classes still make a tokenizer, of special tokens alone, which turns
        # any text into an empty list.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise self._missing("has no tokenizer")
        return tokenizer

    @cached_property
    def processor(self) -> Any:
        """The model's processor of images and text. Raises ConfigError if it has none."""
        from transformers import AutoProcessor, ProcessorMixin

        processor = self._read(AutoProcessor, "processor")
        if not isinstance(processor, ProcessorMixin):
            raise self._missing("has no processor of images")
        return processor

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        most_tokens: int | None = None,
    ) -> TokenLists:
        """Return the token ids of each text, by default with the tokenizer's special tokens.

        Half a surrogate pair, which has no UTF-8, becomes "?".

        `most_tokens`: texts are cut where they surely have more, since a huge one takes minutes.
        """
        if not texts:
            return []
        most = None if most_tokens is None else most_tokens * self._longest_token
        readable = [text[:most].encode(errors="replace").decode() for text in texts]
        encoding = self.loaded(readable, add_special_tokens=add_special_tokens)
        token_ids: TokenLists = encoding["input_ids"]
        return token_ids

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.loaded.get_vocab()))

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Parameters of `apply_chat_template` itself, which are not variables of a template."""
        parameters = inspect.signature(self.loaded.apply_chat_template).parameters.values()
        named = {
            parameter.name
            for parameter in parameters
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        return frozenset(named - _NOT_OF_TEMPLATE)

    def template(self, tools: Sequence[Any]) -> str:
        """Return the template of chats with these tools; "" without a template."""
        tokenizer = self.loaded
        if not tokenizer.chat_template:
            return ""
        template: str = tokenizer.get_chat_template(tools=tools or None)
        return template

    def encode_chat(self, messages: Chat, rendering: Rendering) -> list[int]:
        """Return the token ids of a chat, by default up to the start of the assistant's answer.

        Raises ValueError with the template's complaint, and ArgumentError if the tokenizer has no
        template.
        """
        text = self._rendered(messages, rendering)
        text.encode()  # raises for half a surrogate pair
        return self.encode([text], add_special_tokens=False)[0]

    def encode_images(self, messages: Chat, rendering: Rendering) -> ImagePrompt:
        """Return the prompt of a chat with images; as `encode_chat` otherwise."""
        images = images_of(messages)
        text = self._rendered(messages, rendering)
        text.encode()  # as `encode_chat`
        (token_ids,) = self.encode([text], add_special_tokens=False)
        try:
            return image_prompt(self.processor, text, token_ids, images)
        except ConfigError:
            raise
        except Exception as error:  # processors of all families raise various types
            raise ValueError(f"the model's processor refuses it: {error}") from error

    def encode_reply(
        self,
        chat: Chat,
        answer: Sequence[int],
        reply: Chat,
        rendering: Rendering,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids between an answer to a chat and the next answer.

        These are the end of the turn and the reply, as the template renders them, without tokens
        that the answer has drawn already. The answer is not decoded: the template is rendered with
        a placeholder, and the text after it is tokenized, of `most_tokens` as in `encode`.

        Raises as `encode_chat`, and ValueError for a template that omits the answer.
        """
        messages = [*chat, {"role": "assistant", "content": _ANSWER}, *reply]
        arguments = {**rendering, "add_generation_prompt": True, "continue_final_message": False}
        text = self._rendered(messages, arguments)
        _, placeholder, behind = text.rpartition(_ANSWER)
        if not placeholder:
            raise ValueError("the model's chat template leaves out an answer that messages follow")
        (token_ids,) = self.encode([behind], add_special_tokens=False, most_tokens=most_tokens)
        return token_ids[self._num_drawn(token_ids, list(answer)) :]

    def _num_drawn(self, behind: list[int], answer: list[int]) -> int:
        """Return the number of first tokens of `behind` that the answer has drawn already."""
        # A stop string may reach into the next message: the longest end of the answer that `behind`
        # begins with counts.
        for stop in range(min(len(behind) - 1, len(answer)), 0, -1):
            if behind[stop - 1] == answer[-1] and behind[:stop] == answer[-stop:]:
                return stop
        # An end token counts together with the white space that the template puts before it.
        for start, token in enumerate(behind):
            if answer[-1:] == [token] and token in self.loaded.all_special_ids:
                return start + 1
            if self.loaded.decode([token]).strip():
                break
        return 0

    def _rendered(self, messages: Chat, rendering: Rendering) -> str:
        if not self.loaded.chat_template:
            raise ArgumentError.of(
                "prompts",
                f"chats, but the tokenizer of {self.model_dir} has no chat template",
                "Save it there with `tokenizer.chat_template` set, or pass texts",
                code="no-chat-template",
            )
        try:
            messages = list(messages)
            return str(self.loaded.apply_chat_template(messages, **rendering, tokenize=False))
        except Exception as error:  # a template is a program
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.loaded.decode(list(token_ids), skip_special_tokens=True)
        return text

    @contextmanager
    def attached_to(self, llm: Any) -> Iterator[None]:
        """Attach this tokenizer, in this context, to a vLLM that was built without one."""
        tokenizer = internals.CACHED_TOKENIZER(self.loaded)
        # It stays attached here: grammars keep it, and it has no other use.
        internals.core_of(llm).structured_output_manager.tokenizer = tokenizer
        parts = (llm.llm_engine.renderer, llm.llm_engine.output_processor)
        with attributes_set(parts, tokenizer=tokenizer):
            yield

    def _read(self, auto: Any, name: str) -> Any:
        try:
            return auto.from_pretrained(
                self.model_dir,
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as error:  # classes of all families read files and raise various types
            raise self._missing(f"has no {name} that can be read ({error})") from error

    def _missing(self, problem: str) -> ConfigError:
        problem = f"{self.model_dir} {problem}"
        return ConfigError.of(
            "model",
            problem,
            "Name a directory that has the model's tokenizer, or pass token ids",
            code="no-tokenizer",
        )
