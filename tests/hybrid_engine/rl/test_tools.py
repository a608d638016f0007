"""Tools that a model calls, with vLLM's own parsers and a stand-in for its answers."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import Completion, Sampling
from hybrid_engine.backends.vllm.prompts import ModelTokenizer
from hybrid_engine.backends.vllm.tool_calls import ToolCall, ToolCallParser
from hybrid_engine.errors import ArgumentError
from hybrid_engine.rl import ToolEnvironment, by_name, converse
from hybrid_engine.rl.user_callbacks import run_callbacks
from tests.harness.errors import has_violation, violated
from tests.hybrid_engine.rl.test_conversations import CHATML, END, Engine
from tests.zoo.tokenizers import save_characters

pytestmark = pytest.mark.slow  # imports vLLM's parsers and transformers


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: time to wait.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    path = tmp_path_factory.mktemp("model")
    save_characters(path, CHATML)
    return ModelTokenizer(str(path))


def answer_of(tokenizer: ModelTokenizer, text: str) -> Completion:
    token_ids = tokenizer.encode([text + END])[0]
    return Completion(tuple(token_ids), (), "stop", tokenizer=tokenizer)


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


SUM = called("add", '{"a": 1, "b": 2}')


def contents_of(
    tokenizer: ModelTokenizer, text: str, *tools: Callable[..., Any], **options: Any
) -> list[str] | None:
    """Return what an environment of these tools replies to an answer."""
    reply = ToolEnvironment(tools or [add], "hermes", **options)(None)
    calls = [("prompt 0", reply, (answer_of(tokenizer, text),))]
    (messages,) = run_callbacks("environment", calls, 60)
    return None if messages is None else [message["content"] for message in messages]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"First. {SUM}"),
        ("pythonic", "[add(a=1, b=2)]"),
    ],
)
def test_calls_are_read_in_each_format(tokenizer: ModelTokenizer, parser: str, text: str) -> None:
    content, calls = ToolCallParser(parser).parse(answer_of(tokenizer, text))
    assert calls == [ToolCall("add", {"a": 1, "b": 2})]
    assert content.strip() == ("First." if "First" in text else "")


def test_special_tokens_that_begin_a_call_are_read(tmp_path: Path) -> None:
    """Completion.text has no special tokens; here every `<` is one."""
    save_characters(tmp_path, CHATML, additional_special_tokens=["<"])  # type: ignore[arg-type]
    answer = answer_of(ModelTokenizer(str(tmp_path)), SUM)
    assert "<" not in answer.text
    assert ToolCallParser("hermes").parse(answer)[1] == [ToolCall("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (SUM, "3"),
        (called("ad", "{}"), "error: .*but add"),
        (called("add", '{"a": 1}'), "error: .*missing 1 required"),
        (called("add", "[1, 2]"), "error: .*not an object"),
        (called("wait", '{"seconds": 9}'), "error: .*0.5 s"),
    ],
)
def test_results_and_mistakes_are_replies(
    tokenizer: ModelTokenizer, call: str, content: str
) -> None:
    contents = contents_of(tokenizer, call + SUM, add, wait, timeout_seconds=0.5)
    assert contents is not None
    assert re.match(content, contents[0])
    assert contents[1:] == ["3"]


def test_an_answer_without_calls_ends_the_conversation(tokenizer: ModelTokenizer) -> None:
    assert contents_of(tokenizer, "3") is None
    assert contents_of(tokenizer, called("add", "{}"), most_turns=1) is None


def test_tools_of_a_turn_run_together(tokenizer: ModelTokenizer) -> None:
    """Passes only if all calls of a plain function run at once; a pool has fewer threads."""
    barrier = threading.Barrier(60)

    def meet() -> str:
        """Meet the others."""
        barrier.wait(timeout=60)
        return "met"

    assert contents_of(tokenizer, called("meet", "{}") * 60, meet) == ["met"] * 60


def test_calls_that_never_return_do_not_hold_up_later_ones(tokenizer: ModelTokenizer) -> None:
    ended = threading.Event()

    def hang() -> str:
        """Hang."""
        ended.wait(60)
        return ""

    contents = contents_of(tokenizer, called("hang", "{}") * 60, hang, timeout_seconds=0.5)
    assert contents == ["error: no result after 0.5 s"] * 60
    assert contents_of(tokenizer, SUM) == ["3"]
    ended.set()


def test_a_tool_that_exits_is_named(tokenizer: ModelTokenizer) -> None:
    def leave() -> str:
        """Leave."""
        sys.exit(0)

    failed = has_violation(
        "environment", "callback-failed", "SystemExit for prompt 0: 0", f"{__file__}:"
    )
    with pytest.raises(ArgumentError, check=failed):
        contents_of(tokenizer, called("leave", "{}"), leave)


def test_a_conversation_with_tools(tokenizer: ModelTokenizer) -> None:
    engine = Engine(tokenizer, [called("add", '{"a": 20, "b": 3}'), "23"])
    prompt = {"prompt": [{"role": "user", "content": "20 + 3?"}], "environment": "numbers"}
    environment = by_name({"numbers": ToolEnvironment([add], "hermes"), "other": lambda _: None})  # type: ignore[dict-item,return-value]
    ((conversation,),) = converse(engine, [prompt], Sampling(max_tokens=200), environment)  # type: ignore[arg-type]
    assert conversation.text == "23"
    assert [(message["role"], message["content"]) for message in conversation.messages][2:] == [
        ("tool", "23"),
        ("assistant", "23"),
    ]
    with pytest.raises(
        ArgumentError, check=has_violation("prompts", "unknown-environment", "numbers, other")
    ):
        environment({"prompt": "?", "environment": "chess"})


SCHEMA = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    ("tools", "parser", "violations"),
    [
        ([add], "hermse", [("parser", "unknown-tool-parser")]),
        (
            [add, lambda x: x, time.sleep],
            "hermes",
            [("tools[1]", "no-tool-schema"), ("tools[2]", "no-tool-schema")],
        ),
        ([add, add], "hermes", [("tools[1]", "repeated-tool")]),
        ([add, SCHEMA], "hermes", [("tools[1]", "not-callable")]),
        (add, "hermes", [("tools", "not-a-list")]),
    ],
)
def test_unknown_parsers_and_tools_without_a_schema_are_refused(
    tools: Any, parser: str, violations: list[tuple[str, str]]
) -> None:
    with violated(ArgumentError, *violations) as caught:
        ToolEnvironment(tools, parser)
    assert ("hermes" in str(caught.value)) == (parser == "hermse"), "the parser that was meant"
