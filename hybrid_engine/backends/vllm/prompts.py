"""Prompts in the forms that transformers, TRL and verl use, and completions in the form of their prompts.

texts               ["What is 2 + 3?", …]
chats               [[{"role": "user", "content": "What is 2 + 3?"}], …], through the model's chat template
lists of token ids  [[12, 7, 9], …]; also arrays and one-dimensional tensors
a tensor [B, S]     token ids, and an attention mask of the same shape where they are padded
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import OTHER_NAMES, Completion, Sampling
from hybrid_engine.errors import ArgumentError, ConfigError, Violation, nearest, shortened

Message = Mapping[str, Any]
Prompts = torch.Tensor | Sequence[str] | Sequence[Sequence[Message]] | Sequence[Sequence[int]]

_REMEDY = "Pass texts, chats (lists of messages with role and content), lists of token ids, or a tensor [B, S]"
_REMEDY_FOR_ONE = "Pass a list of prompts; of a tokenizer's output its input_ids, with attention_mask=attention_mask"

STREAMING = "A server streams: set generate_config.servers and ask it yourself (docs/servers.md)"
"""Remedy where somebody wants tokens as they are drawn."""

_REMEDY_FOR_IDS = "Pass a list of token ids for each sequence: [[5, 6, 7]], not [5, 6, 7]"


class ChatArguments(TypedDict, total=False):
    """Arguments with which chats are rendered, as transformers' `apply_chat_template` takes them.

    Attributes:
        tools: that the model may call: functions with type hints and a docstring, or their JSON schemas.
        chat_template_kwargs: variables of the template, e.g. `{"enable_thinking": False}`; also `chat_template` and
            `documents`.
        add_generation_prompt: end where an answer begins; default: true, unless the last message is continued.
        continue_final_message: end within the last message, which the completion continues.
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


def token_ids_of(
    prompts: Prompts,
    tokenizer: ModelTokenizer,
    attention_mask: torch.Tensor | None = None,
    chat: ChatArguments | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, without padding.

    Args:
        prompts: all in one of the forms above.
        tokenizer: of texts and chats.
        attention_mask: [B, S], for a tensor: 0 where a prompt is padded, on either side. None: no padding.
        chat: what chats are rendered with.

    Raises ArgumentError naming every prompt of no such form or of another form than the first, a mask of another shape
    or without a tensor, texts without a tokenizer, chats without a template or that the template refuses, and what is
    no argument, or one for chats alone.
    """
    if violations := [_unknown_argument(name) for name in chat or () if name not in ChatArguments.__annotations__]:
        raise ArgumentError(violations)
    if isinstance(prompts, torch.Tensor):
        _require_none_given(chat)
        return _of_rows(prompts, attention_mask)
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        raise ArgumentError([Violation("prompts", f"got {shortened(prompts)}", _REMEDY_FOR_ONE)])
    if attention_mask is not None:
        remedy = "Leave it out: prompts in lists have no padding"
        raise ArgumentError([Violation("attention_mask", "is for prompts in a tensor [B, S]", remedy)])
    listed: list[Any] = list(prompts)
    form = _form_of_all(listed)
    if form == "a chat":
        return _encode_chats(listed, tokenizer, rendering_of(chat, tokenizer))
    _require_none_given(chat if listed else None)
    return tokenizer.encode(listed) if form == "a text" else [[int(token) for token in prompt] for prompt in listed]


def in_form_of(prompts: Prompts, completions: list[list[Completion]], pad_token_id: int) -> Any:
    """Completions of a tensor as a tensor [B * n, S + longest], of texts and chats as n texts each.

    Each row of the tensor is a prompt as it was passed and one of its completions, padded on the right with
    `pad_token_id`. Completions of token ids stay as they are.
    """
    if isinstance(prompts, torch.Tensor):
        rows = [
            torch.cat([prompt, prompt.new_tensor(one.token_ids)])
            for prompt, of_prompt in zip(prompts, completions, strict=True)
            for one in of_prompt
        ]
        if not rows:
            return prompts
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    if completions and form_of(prompts[0]) != "token ids":
        return [[one.text for one in of_prompt] for of_prompt in completions]
    return completions


def check_token_ids(
    prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], limit: int, vocabulary: int
) -> None:
    """Raise ArgumentError naming every prompt that is not token ids, is empty, too long or out of the vocabulary.

    Args:
        prompts: token ids, of each a list.
        max_tokens: to be generated after each, or a list of as many.
        limit: longest prompt and completion.
        vocabulary: number of tokens.
    """
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        raise ArgumentError([Violation("prompts", f"got {shortened(prompts)}", _REMEDY_FOR_IDS)])
    violations = []
    to_generate = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    for index, (prompt, num) in enumerate(zip(prompts, to_generate, strict=True)):
        if (form := form_of(prompt)) != "token ids":
            violations.append(Violation(f"prompts[{index}]", form, _REMEDY_FOR_IDS))
        elif not len(prompt):
            violations.append(Violation(f"prompts[{index}]", "it has no tokens", "Leave it out"))
        elif len(prompt) + num > limit:
            problem = f"{len(prompt)} tokens and {num} to generate, but {limit} fit together"
            violations.append(Violation(f"prompts[{index}]", problem, "Shorten it or raise max_model_len"))
        elif min(prompt) < 0 or max(prompt) >= vocabulary:
            problem = f"token ids from {min(prompt)} to {max(prompt)}, but the vocabulary has {vocabulary}"
            violations.append(Violation(f"prompts[{index}]", problem, "Use the model's tokenizer"))
    if violations:
        raise ArgumentError(violations)


def _of_rows(prompts: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    has_mask = isinstance(mask, torch.Tensor) and mask.shape == prompts.shape
    if prompts.dim() != 2 or not _is_integer(prompts.dtype) or not (mask is None or has_mask):
        masked = "" if mask is None else f" with a mask of shape {tuple(np.shape(mask))}"
        problem = f"{prompts.dtype} of shape {tuple(prompts.shape)}{masked}"
        raise ArgumentError([Violation("prompts", problem, "Pass token ids [B, S], and a mask of that shape")])
    if mask is None:
        rows: list[list[int]] = prompts.tolist()
        return rows
    return [row[keep].tolist() for row, keep in zip(prompts, mask.to(prompts.device).bool(), strict=True)]


def _form_of_all(prompts: Sequence[Any]) -> str:
    """The form that all prompts have; token ids where there are none."""
    forms = [form_of(prompt) for prompt in prompts] or ["token ids"]
    first = forms[0]
    violations = [
        Violation(f"prompts[{index}]", f"{form}, but prompts[0] is {first}" if form in _FORMS else form, _REMEDY)
        for index, form in enumerate(forms)
        if form not in _FORMS or (form != first and first in _FORMS)
    ]
    if violations:
        raise ArgumentError(violations)
    return first


def form_of(prompt: Any) -> str:
    """One of "a text", "a chat" and "token ids", or what is wrong."""
    if isinstance(prompt, str):
        return "a text"
    if isinstance(prompt, Mapping):
        if "role" in prompt:
            return "a message outside of a chat, which is a list of messages"
        return f"a dict of {', '.join(map(str, prompt)) or 'nothing'}; pass its text or its messages"
    if isinstance(prompt, torch.Tensor | np.ndarray):
        is_row = prompt.ndim == 1 and _is_integer(prompt.dtype)
        return "token ids" if is_row else f"{prompt.dtype} of shape {tuple(prompt.shape)}"
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        return f"{shortened(prompt)}, outside of a list" if isinstance(prompt, int) else f"got {shortened(prompt)}"
    if prompt and all(isinstance(part, Mapping) for part in prompt):
        faulty = [part for part in prompt if not isinstance(part.get("role"), str) or len(part) < 2]
        return f"a chat with a message without role or content, {shortened(faulty[0])}" if faulty else "a chat"
    kinds = {kind for kind in set(map(type, prompt)) if kind is bool or not issubclass(kind, int | np.integer)}
    return f"a list with {shortened(next(part for part in prompt if type(part) in kinds))}" if kinds else "token ids"


def _is_integer(dtype: torch.dtype | np.dtype[Any]) -> bool:
    if isinstance(dtype, torch.dtype):
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return np.issubdtype(dtype, np.integer)


_OF_PROMPTS = "Pass vllm.SamplingParams(prompt_logprobs=0) as `sampling`: completions have them"
_MEANT = {
    "generation_config": "Use sampling",
    "prompt_logprobs": _OF_PROMPTS,
    "return_logprobs": "Leave it out: every Completion has logprobs",
    "sampling_params": "Use sampling",
}
"""Arguments of others' calls -> remedy."""


def _unknown_argument(name: str) -> Violation:
    """Describe an argument that no call for completions takes."""
    problem = "is no argument of this call"
    if name == "stream":
        return Violation(name, f"{problem}: completions come back whole", STREAMING)
    if name in _MEANT:
        return Violation(name, problem, _MEANT[name])
    if name in (of_sampling := [*OTHER_NAMES, *(field.name for field in fields(Sampling))]):
        return Violation(name, problem, f"Pass Sampling({OTHER_NAMES.get(name, name)}=…)")
    close = nearest(name, [*ChatArguments.__annotations__, "sampling", "attention_mask", "data", *of_sampling])
    return Violation(name, problem, f"Did you mean {close}?" if close else "Leave it out")


def _require_none_given(chat: ChatArguments | None) -> None:
    """Raise ArgumentError naming what is for chats, where prompts are none."""
    given = [name for name, value in (chat or {}).items() if value]
    if given:
        remedy = "Leave it out, or pass lists of messages"
        raise ArgumentError([Violation(name, "is for chats, and the prompts are none", remedy) for name in given])


def rendering_of(chat: ChatArguments | None, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Keywords of `apply_chat_template`, with schemas in place of functions. Raises ArgumentError with all faults."""
    chat = chat or {}
    violations, tools = [], []
    given: Any = chat.get("tools") or ()
    variables: Any = chat.get("chat_template_kwargs") or {}
    if not isinstance(given, list | tuple):
        violations.append(Violation("tools", f"got {shortened(given)}", "Pass a list of functions or JSON schemas"))
        given = ()
    for index, tool in enumerate(given):
        try:
            tools.append(_schema_of(tool))
        except Exception as error:  # of transformers, which reads the docstring
            problem = f"no schema can be made of it: {error}"
            remedy = "Pass a function with type hints and a docstring that describes each argument, or a JSON schema"
            violations.append(Violation(f"tools[{index}]", problem, remedy))
    if not isinstance(variables, Mapping):
        remedy = "Pass a dict of variables of the template"
        violations.append(Violation("chat_template_kwargs", f"got {shortened(variables)}", remedy))
        variables = {}
    violations += [*_no_variables(variables, tools, tokenizer)]
    continues = bool(chat.get("continue_final_message"))
    begins = chat.get("add_generation_prompt", not continues)
    if continues and begins:
        problem = "true, but continue_final_message goes on in the last message"
        violations.append(Violation("add_generation_prompt", problem, "Leave one of them out"))
    if violations:
        raise ArgumentError(violations)
    own = {"tools": tools or None, "add_generation_prompt": begins, "continue_final_message": continues}
    return {**own, **variables}


def _no_variables(variables: Mapping[str, Any], tools: Sequence[Any], tokenizer: ModelTokenizer) -> Iterator[Violation]:
    """Report names that the template does not read, and so would ignore."""
    template = variables.get("chat_template") or (variables and tokenizer.template(tools))
    words = set(re.findall(r"\w+", str(template)))  # a variable that is read is among them
    for name in variables:
        key = f"chat_template_kwargs.{name}"
        if name in tokenizer.reserved:
            remedy = "Pass it as an argument" if name in ChatArguments.__annotations__ else "Leave it out"
            yield Violation(key, "is no variable of a template", remedy)
        elif name not in words | _READ_BESIDE:
            close = nearest(name, words)
            remedy = f"Did you mean {close}?" if close else "Leave it out"
            yield Violation(key, "is no variable of the model's template, which would ignore it", remedy)


def _schema_of(tool: object) -> Mapping[str, Any]:
    from transformers.utils import get_json_schema

    if isinstance(tool, Mapping):
        return dict(tool)
    if not callable(tool):
        raise TypeError(f"got {shortened(tool)}")
    schema: Mapping[str, Any] = get_json_schema(tool)
    return schema


def _encode_chats(
    chats: Sequence[Sequence[Message]], tokenizer: ModelTokenizer, rendering: Mapping[str, Any]
) -> list[list[int]]:
    violations, encoded = [], []
    for index, chat in enumerate(chats):
        try:
            encoded.append(tokenizer.encode_chat(chat, rendering))
        except ValueError as error:
            violations.append(Violation(f"prompts[{index}]", str(error), "Give it messages that the template takes"))
    if violations:
        raise ArgumentError(violations)
    return encoded


_READ_BESIDE = {"chat_template", "documents"}
"""Read by `apply_chat_template`, beside the variables of the template."""
_FORMS = ("a text", "a chat", "token ids")
"""Of a prompt, as messages name them."""
_ANSWER = "⁂answer⁂"
"""Stands for an answer in a chat that is rendered for what follows it."""


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
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # of any kind: tokenizers of all families read files of theirs
            raise self._missing(f"has no tokenizer that can be read ({error})") from error
        # Without files some classes still make one, of special tokens alone, which turns any text into nothing.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise self._missing("has no tokenizer")
        return tokenizer

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the tokenizer adds, if it is to."""
        if not texts:
            return []
        token_ids: list[list[int]] = self.loaded(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        return token_ids

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Names of what is said to `apply_chat_template` itself, and is no variable of a template."""
        parameters = inspect.signature(self.loaded.apply_chat_template).parameters
        named = {name for name, each in parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
        return frozenset(named - _READ_BESIDE)

    def template(self, tools: Sequence[Any]) -> str:
        """The template of chats with these tools; "" without one."""
        tokenizer = self.loaded
        found: str = tokenizer.get_chat_template(tools=tools or None) if tokenizer.chat_template else ""
        return found

    def encode_chat(self, messages: Sequence[Message], rendering: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat, by default up to where the assistant's answer begins.

        Raises ValueError with the template's own complaint, ArgumentError where the tokenizer has no template.
        """
        token_ids: list[int] = self._rendered(messages, rendering, return_dict=True)["input_ids"]
        return token_ids

    def encode_reply(
        self, chat: Sequence[Message], answer: Sequence[int], reply: Sequence[Message], rendering: Mapping[str, Any]
    ) -> list[int]:
        """Token ids that follow an answer to a chat, up to where the next answer begins: the end of a turn and the
        reply, as the template has them, without what the answer has drawn of them.

        The answer itself is not read: something else stands for it, and what the template puts behind that is
        tokenized. Raises as `encode_chat`, and ValueError for a template that leaves the answer out.
        """
        messages = [*chat, {"role": "assistant", "content": _ANSWER}, *reply]
        begins = {**rendering, "add_generation_prompt": True, "continue_final_message": False}
        _, found, behind = self._rendered(messages, begins, tokenize=False).rpartition(_ANSWER)
        if not found:
            raise ValueError("the model's chat template leaves out an answer that messages follow")
        (token_ids,) = self.encode([behind], add_special_tokens=False)
        return token_ids[self._num_drawn(token_ids, list(answer)) :]

    def _num_drawn(self, behind: list[int], answer: list[int]) -> int:
        """Count the tokens of `behind` that the answer has drawn already. A stop string may reach into the next
        message; an end token counts with the white space that the template puts before it."""
        for stop in range(min(len(behind) - 1, len(answer)), 0, -1):
            if behind[stop - 1] == answer[-1] and behind[:stop] == answer[-stop:]:
                return stop
        for start, token in enumerate(behind):
            if answer[-1:] == [token] and token in self.loaded.all_special_ids:
                return start + 1
            if self.loaded.decode([token]).strip():
                break
        return 0

    def _rendered(self, messages: Sequence[Message], rendering: Mapping[str, Any], **result: bool) -> Any:
        if not self.loaded.chat_template:
            problem = f"chats, but the tokenizer of {self.model_dir} has no chat template"
            remedy = "Save it there with `tokenizer.chat_template` set, or pass texts"
            raise ArgumentError([Violation("prompts", problem, remedy)])
        try:
            return self.loaded.apply_chat_template(list(messages), **rendering, **result)
        except Exception as error:  # a template is a program
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.loaded.decode(list(token_ids), skip_special_tokens=True)
        return text

    @contextlib.contextmanager
    def attached_to(self, llm: Any) -> Iterator[None]:
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
