"""Environments that run the tools which a model calls, and selection of environments by name."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import (
    ArgumentError,
    Violation,
    clipped,
    first_of,
    nearest,
    shortened,
)
from hybrid_engine.ranks.background import in_background
from hybrid_engine.rl.conversation_state import Environment
from hybrid_engine.rl.user_callbacks import is_coroutine_function

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Completion
    from hybrid_engine.backends.vllm.engine_settings import Message
    from hybrid_engine.backends.vllm.tool_calls import ToolCall

Reply = Callable[["Completion"], Awaitable["list[Message] | None"]]

_MOST_CHARACTERS = 500
"""Characters of an exception's text in a reply."""


class ToolEnvironment:
    """Environment that runs the calls of each answer; an answer without calls ends it.

        tools = [add, search]
        train(..., environment=ToolEnvironment(tools, parser="hermes"), tools=tools)

    All tools that the conversations of a turn call run at the same time: coroutine functions in one
    event loop, others in a thread each. The reply has a message of role `tool` for each call, with
    the result as text or JSON. Wrong names and arguments, and exceptions of tools, are such
    messages too: "error: ...". An answer in which the parser finds no call, also because it is
    malformed, ends the conversation.

    Args:
        tools: functions with type hints and a docstring, which get keyword arguments.
        parser: name of vLLM's parser of calls, as in `vllm serve --tool-call-parser`.
        timeout_seconds: time after which a call is answered with an error. A thread cannot be
            stopped: its result is dropped.
        most_turns: number of answers after which a conversation ends; None: no bound but
            `max_tokens`.

    Raises ArgumentError for an unknown parser, or tools that cannot be described.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        parser: str,
        *,
        timeout_seconds: float = 30.0,
        most_turns: int | None = None,
    ) -> None:
        from hybrid_engine.backends.vllm.tool_calls import ToolCallParser

        self._parser = ToolCallParser(parser, tools)
        problem = "is a schema, which cannot be run"
        remedy = "Pass the function"
        violations = [
            Violation(f"tools[{index}]", problem, remedy, code="not-callable")
            for index, tool in enumerate(tools)
            if not callable(tool)
        ]
        if violations:
            raise ArgumentError(violations)
        self._tools = {tool.__name__: tool for tool in tools}
        self._timeout_seconds = timeout_seconds
        self._most_turns = most_turns

    def __call__(self, prompt: Any) -> Reply:
        """Return the function that replies to the answers of one conversation."""
        num_turns = 0

        async def reply(answer: Completion) -> list[Message] | None:
            nonlocal num_turns
            num_turns += 1
            _, calls = self._parser.parse(answer)
            if not calls or num_turns == self._most_turns:
                return None
            contents = await asyncio.gather(*(self._content(call) for call in calls))
            return [
                {"role": "tool", "name": call.name, "content": content}
                for call, content in zip(calls, contents, strict=True)
            ]

        return reply

    async def _content(self, call: ToolCall) -> str:
        """Return the result of a call as a text."""
        tool = self._tools.get(call.name)
        problem = call.error
        if tool is None:
            suggestion = nearest(call.name, self._tools) or first_of(sorted(self._tools), 10)
            problem = f"there is no tool {clipped(call.name)!r}, but {suggestion}"
        if tool is None or problem:
            return f"error: {problem}"
        try:
            result = await asyncio.wait_for(_run(tool, call.arguments), self._timeout_seconds)
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except TimeoutError:
            return f"error: no result after {self._timeout_seconds:g} s"
        except Exception as error:  # of the tool, which got its arguments from the model
            text = clipped(f"{type(error).__name__}: {error}", _MOST_CHARACTERS)
            return f"error: {text}"


async def _run(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if is_coroutine_function(tool):
        return await tool(**arguments)
    # A thread of its own: the threads of a pool would be held by calls that never return, and the
    # process would wait for them when it exits.
    running = in_background(partial(tool, **arguments), "tool")
    result = await asyncio.shield(asyncio.wrap_future(running))
    return await result if inspect.isawaitable(result) else result


def by_name(environments: Mapping[str, Environment], column: str = "environment") -> Environment:
    """Return an environment that leaves each prompt to the one that its column names.

    Raises ArgumentError, when a prompt is drawn, if the column has none of the names.
    """

    def environment(prompt: Any) -> Any:
        name = prompt.get(column) if isinstance(prompt, Mapping) else None
        if not isinstance(name, str) or name not in environments:
            raise ArgumentError.of(
                "prompts",
                f"{column} of the prompt is {shortened(name)}",
                f"Use one of {first_of(sorted(environments), 10)}",
                code="unknown-environment",
            )
        return environments[name](prompt)

    return environment
