"""Calls of tools in answers, by vLLM's own parsers of each model's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.engine_settings import Completion
from hybrid_engine.errors import ArgumentError, Violation, clipped, nearest, require_none, shortened

Tool = Mapping[str, Any] | Callable[..., Any]
"""JSON schema of a function, or a function with type hints and a docstring."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: name of the tool.
        arguments: keyword arguments; empty if there is an `error`.
        error: why the arguments cannot be read; "" if they can.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""


class ToolCallParser:
    """Parser of the calls in a model's answers.

    Args:
        name: name of a parser of vLLM, such as "hermes"; as in `vllm serve --tool-call-parser`.
        tools: functions with type hints and a docstring, or their JSON schemas; some formats need
            the types of arguments.

    Raises ArgumentError for an unknown name, and for tools that cannot be described.
    """

    def __init__(self, name: str, tools: Iterable[Tool] = ()) -> None:
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if name not in known:
            suggestion = nearest(name, known)
            raise ArgumentError.of(
                "parser",
                f"vLLM has no parser {clipped(str(name))!r}",
                f"Did you mean {suggestion}?" if suggestion else f"Use one of {known}",
                code="unknown-tool-parser",
            )
        schemas = _schemas_of(tools)
        self._class = ToolParserManager.get_tool_parser(name)
        self._request = internals.CHAT_REQUEST(messages=[], model="", tools=schemas or None)

    def parse(self, answer: Completion) -> tuple[str, list[ToolCall]]:
        """Return the text beside the calls, and the calls in their order."""
        text = answer.drawn_text
        if text is None:
            # The last token of a stopped completion is the stop token.
            is_stopped = answer.finish_reason == "stop"
            token_ids = answer.token_ids[:-1] if is_stopped else answer.token_ids
            # Special tokens begin calls in some formats.
            text = _loaded(answer).decode(token_ids, skip_special_tokens=False)
        # New for each answer: parsers keep the state of one answer.
        parser = self._class(_loaded(answer), self._request.tools)
        extracted = parser.extract_tool_calls(text, self._request)
        calls = [_call_of(call.function) for call in extracted.tool_calls]
        return extracted.content or "", calls


def schema_of(tool: object) -> Mapping[str, Any]:
    """Return the JSON schema of a tool. Raises various types: transformers parses the docstring."""
    from transformers.utils import get_json_schema

    if isinstance(tool, Mapping):
        return tool
    if not callable(tool):
        raise TypeError(f"got {shortened(tool)}")
    schema: Mapping[str, Any] = get_json_schema(tool)
    return schema


def _schemas_of(tools: Iterable[Tool]) -> list[Any]:
    """Return the JSON schemas of tools. Raises ArgumentError with all that have none."""
    if not hasattr(tools, "__iter__"):
        raise ArgumentError.of("tools", f"got {shortened(tools)}", "Pass a list", code="not-a-list")
    schemas: list[Any] = []
    violations = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        key = f"tools[{index}]"
        try:
            schemas.append(schema_of(tool))
        except Exception as error:  # of transformers' reader of signatures and docstrings
            violations.append(
                Violation(
                    key,
                    f"has no schema: {clipped(str(error))}",
                    "Give it type hints, and a docstring with a line for each argument",
                    code="no-tool-schema",
                )
            )
            continue
        name = schemas[-1].get("function", {}).get("name")
        if name in names:
            violations.append(
                Violation(
                    key, f"there is another tool {name!r}", "Rename one", code="repeated-tool"
                )
            )
        names.add(name)
    require_none(violations, ArgumentError)
    return schemas


def _loaded(answer: Completion) -> Any:
    """Return the tokenizer of transformers."""
    tokenizer: Any = answer.tokenizer
    return tokenizer.loaded


def _call_of(function: Any) -> ToolCall:
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return ToolCall(function.name, {}, f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(function.name, {}, "the arguments are not an object")
    return ToolCall(function.name, arguments)
