"""Messages to exact tokens: real conversations with tools turn by turn, and where a template rewrites the history."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.agents.trajectories import AgentItem, BadTrajectory, LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder, reward_record
from areno.data.chat_template import render
from areno.errors import DataError
from areno.server import errors
from areno.server.errors import PromptTooLong
from areno.server.messages import conversation_keys, read_messages
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import ConversationCache, EncodedPrompt, PromptBuilder
from areno.server.threads import ThreadPool
from areno.server.token_sources import TokenSource, expand_runs
from tests.helpers.conversations import OTHER, USER, turn_of
from tests.helpers.tokenizers import load_tokenizer

DATA = Path(__file__).parents[3] / "shared/data/toolcall/glaive_toolcall_en_demo.json"
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
N_CONVERSATIONS = 200


def real_conversations() -> Iterator[tuple[list[Any], list[Any]]]:
    """(messages, tools) in OpenAI's form; arguments are text, as clients send them."""
    if not DATA.exists():
        pytest.skip(f"the conversations are not at {DATA}")
    for row in json.loads(DATA.read_text(encoding="utf-8"))[:N_CONVERSATIONS]:
        tools = [{"type": "function", "function": tool} for tool in json.loads(row["tools"] or "[]")]
        messages: list[Any] = []
        for number, turn in enumerate(row["conversations"]):
            message: dict[str, Any] = {"role": ROLES[turn["from"]], "content": turn["value"]}
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                calls = [{"id": f"call_{number}", "type": "function", "function": function}]
                message = {"role": "assistant", "content": None, "tool_calls": calls}
            elif turn["from"] == "observation":
                message["tool_call_id"] = f"call_{number - 1}"
            messages.append(message)
        yield messages, tools


def made(name: str) -> PromptBuilder:
    tokenizer = load_tokenizer(name)
    return PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))


@pytest.mark.parametrize(
    ("name", "every"),
    [("qwen3", 6), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("qwen3", "qwen2.5", "minimind"))],
)
def test_rows_of_real_conversations_are_what_the_template_renders(name: str, every: int) -> None:
    conversations = made(name)
    tokenizer, end = conversations.tokenizer, "<|im_end|>"
    n_turns = n_joined = 0
    for messages, tools in list(real_conversations())[::every]:
        turns, expected = [], []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = read_messages(messages[:number]), read_messages(messages[: number + 1])
            asked = render(tokenizer, before, tools or None, None, True)
            written = render(tokenizer, after, tools or None)
            assert written.startswith(asked)
            said = written[len(asked) :].partition(end)[0] + end
            # What the client would send back of it: the empty reasoning of Qwen 3 is none.
            turns.append(turn_of(conversations, messages[:number], said, tools or None, message))
            expected.append((asked, said))
        if not turns:
            continue
        trajectory = RowBuilder(conversations, LossMaskPolicy(), len(conversations.tokenizer), "s").build_trajectory(
            turns
        )
        n_turns, n_joined = n_turns + len(turns), n_joined + len(turns) - len(trajectory.rows)
        # Every prompt is the template's own text, as tokens.
        for turn, (asked, _) in zip(turns, expected, strict=True):
            assert turn["tokens"]["prompt_token_ids"] == tokenizer.encode(asked, add_special_tokens=False)
        # Every row is the last prompt that led to it and what was said then; what was said in it is trained.
        ends = {tokenizer.encode(asked + said, add_special_tokens=False).__repr__() for asked, said in expected}
        said_tokens: list[int] = []
        for row in trajectory.rows:
            assert repr(row.tokens) in ends
            assert (row.trained == row.sampled).all()
            assert ((row.sources == TokenSource.SAMPLED) >= row.sampled).all()
            said_tokens += np.array(row.tokens)[row.sampled].tolist()
        assert sorted(said_tokens) == sorted(
            token for _, said in expected for token in tokenizer.encode(said, add_special_tokens=False)
        )
    assert n_turns > 400 / every
    if name != "qwen3":  # whose empty reasoning is not written again once a question follows
        assert n_joined > 0.6 * (n_turns - N_CONVERSATIONS / every)


def test_tokens_that_were_sampled_are_kept_however_their_text_would_be_encoded(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    first = conversations.build_prompt([USER])
    odd = [tiny.encode(letter, add_special_tokens=False)[0] for letter in "hello"]  # not how "hello" is encoded
    assert tiny.decode(odd) == "hello"
    assert odd != tiny.encode("hello")
    end = tiny.convert_tokens_to_ids("<|im_end|>")
    answer = {"role": "assistant", "content": "hello"}
    conversations.cache_turn(first, [*odd, end], frozenset([end]), answer)
    second = conversations.build_prompt([USER, answer, OTHER])
    assert second.tokens[: len(first.tokens) + 6] == [*first.tokens, *odd, end]
    assert tiny.decode(second.tokens) == second.text == render(tiny, [USER, answer, OTHER], None, None, True)
    other = conversations.build_prompt([USER, {"role": "assistant", "content": "hello!"}, OTHER])
    assert other.tokens == tiny.encode(other.text)  # nobody sampled this


def test_a_request_that_ends_with_the_sampled_turn_gets_a_prompt(tiny: Any) -> None:
    conversations = made("tiny")
    asked = read_messages([{"role": "user", "content": "hi"}])
    [answer] = read_messages([{"role": "assistant", "content": "hello"}])
    tokens = tiny.encode("hello<|im_end|>", add_special_tokens=False)
    conversations.cache_turn(conversations.build_prompt(asked), tokens, frozenset(tokens[-1:]), answer)
    expected = made("tiny").build_prompt([*asked, answer])
    assert conversations.build_prompt([*asked, answer]).text == expected.text
    assert asyncio.run(conversations.build_prompt_async([*asked, answer])).text == expected.text


def test_an_answer_that_was_cut_off_is_closed_by_the_template(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    first = conversations.build_prompt([USER])
    tokens, answer = tiny.encode("hel"), {"role": "assistant", "content": "hel"}
    conversations.cache_turn(first, tokens, frozenset([384]), answer)
    second = conversations.build_prompt([USER, answer, OTHER])
    assert second.tokens[: len(first.tokens) + len(tokens)] == first.tokens + tokens
    assert tiny.decode(second.tokens) == second.text


def test_reasoning_that_the_template_drops_begins_a_new_row(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    answer = {"role": "assistant", "content": "hi", "reasoning_content": "think hard"}
    said = "<think>\nthink hard\n</think>\n\nhi<|im_end|>"
    first = turn_of(conversations, [USER], said, None, answer)
    second = turn_of(conversations, [USER, answer, OTHER], "fine<|im_end|>", None)
    assert "think hard" not in tiny.decode(second["tokens"]["prompt_token_ids"])
    trajectory = RowBuilder(conversations, LossMaskPolicy(), len(conversations.tokenizer)).build_trajectory(
        [first, second]
    )
    expected = [len(tiny.encode(text)) for text in (said, "fine<|im_end|>")]
    assert [row.trained.sum() for row in trajectory.rows] == expected


def test_a_call_whose_json_the_template_writes_otherwise_stays_one_row(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    said = '<tool_call>{"name":"add",  "arguments":{"a":1}}</tool_call><|im_end|>'
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "two three"}
    first = turn_of(conversations, [USER], said, tools, answer)
    second = turn_of(conversations, [USER, answer, result], "ok<|im_end|>", tools)
    builder = RowBuilder(conversations, LossMaskPolicy(tool_results=True), len(conversations.tokenizer))
    trajectory = builder.build_trajectory([first, second])
    [row] = trajectory.rows
    text = tiny.decode(row.tokens)
    assert said in text
    record = reward_record(AgentItem("hello", {}, []), trajectory, tiny)
    assert tiny.decode(first["tokens"]["prompt_token_ids"]) + record.rendered_completion == text
    assert record.rendered_completion.startswith(said)
    assert "two three" in record.rendered_completion
    assert record.rendered_completion.endswith("ok<|im_end|>")
    trained = [tiny.decode([token]) for token, on in zip(row.tokens, row.trained, strict=True) if on]
    assert "".join(trained) == said + "two three" + "ok<|im_end|>"
    assert {TokenSource(source).name for source in row.sources} == {"TEMPLATE", "USER", "TOOL", "SAMPLED"}


@pytest.mark.parametrize("argument", ['"\\ud83d"', "[" * 2000 + "]" * 2000])
def test_a_call_that_no_template_could_write_stays_the_text_that_it_is(tiny: Any, argument: str) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    arguments = f'{{"a": {argument}}}'
    said = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "no such place"}
    first = turn_of(conversations, [USER], said, tools, answer)
    second = turn_of(conversations, [USER, answer, result], "ok<|im_end|>", tools)
    rows = (
        RowBuilder(conversations, LossMaskPolicy(), len(conversations.tokenizer)).build_trajectory([first, second]).rows
    )
    assert said in tiny.decode(rows[-1].tokens)


def test_a_turn_with_messages_that_the_template_refuses(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    turn = turn_of(conversations, [USER], "a<|im_end|>", None)
    known = list(conversations.cache._entries)
    builder = RowBuilder(conversations, LossMaskPolicy(), len(conversations.tokenizer))
    with pytest.raises(BadTrajectory, match=r"they say .*and you"):
        builder.build_trajectory([{**turn, "messages": [OTHER]}])
    monkeypatch.setattr(tiny, "chat_template", "{{ raise_exception('system first') }}")
    with pytest.raises(BadTrajectory, match=r"of the request .1 messages.: the chat template refuses .*first"):
        builder.build_trajectory([{**turn, "messages": [OTHER]}])
    assert list(conversations.cache._entries) == known  # which are the server's


def test_each_token_of_a_prompt_knows_where_it_comes_from(chatml: Any) -> None:
    conversations = PromptBuilder(chatml, parser_for_template(chatml.chat_template))
    system = {"role": "system", "content": " be\nkind "}
    answer = {"role": "assistant", "content": "hello", "tool_calls": [{"function": {"name": "user", "arguments": {}}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "user"}
    prompt = conversations.build_prompt([system, {"role": "user", "content": "user"}, answer, result])
    sources = expand_runs(prompt.sources)
    found = {}
    for source in (TokenSource.SYSTEM, TokenSource.USER, TokenSource.TOOL):
        of_source = [token for token, one in zip(prompt.tokens, sources, strict=True) if one == source]
        found[source] = chatml.decode(of_source).strip()
    assert found == {TokenSource.SYSTEM: "be\nkind", TokenSource.USER: "user", TokenSource.TOOL: "user"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LossMaskPolicy(), "so it is<tool_call>{}</tool_call><|im_end|>done<|im_end|>"),
        (LossMaskPolicy(assistant_text=False), "<tool_call>{}</tool_call><|im_end|>"),
        (LossMaskPolicy(assistant_tool_calls=False), "so it isdone<|im_end|>"),
        (LossMaskPolicy(final_assistant_text=False), "so it is<tool_call>{}</tool_call><|im_end|>"),
        (LossMaskPolicy(user_prompt=True), "helloso it is<tool_call>{}</tool_call><|im_end|>done<|im_end|>"),
    ],
)
def test_a_policy_says_which_spans_are_trained(tiny: Any, policy: LossMaskPolicy, expected: str) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = '{"name": "add", "arguments": {}}'
    function = {"name": "add", "arguments": "{}"}
    answer = {"role": "assistant", "content": "so it is", "tool_calls": [{"id": "c", "function": function}]}
    said = f"so it is<tool_call>{call}</tool_call><|im_end|>"
    first = turn_of(conversations, [USER], said, tools, answer)
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    second = turn_of(conversations, [USER, answer, result], "done<|im_end|>", tools)
    [row] = RowBuilder(conversations, policy, len(conversations.tokenizer)).build_trajectory([first, second]).rows
    assert tiny.decode(np.array(row.tokens)[row.trained].tolist()) == expected.format(call)


def test_several_conversations_of_one_agent_are_rows_of_their_own(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    one = turn_of(conversations, [USER], "a<|im_end|>", None)
    other = turn_of(conversations, [OTHER], "b<|im_end|>", None)
    further = turn_of(conversations, [USER, one["message"], OTHER], "c<|im_end|>", None)
    trajectory = RowBuilder(conversations, LossMaskPolicy(), len(conversations.tokenizer)).build_trajectory(
        [one, other, further]
    )
    assert [int(row.sampled.sum()) for row in trajectory.rows] == [4, 2]


def test_the_samples_of_a_prompt_share_its_tokens(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template), max_cached_tokens=1500)
    tool = {"type": "function", "function": {"name": "f"}}
    first = conversations.build_prompt([USER])
    assert conversations.build_prompt([dict(USER)]) is first
    assert conversations.build_prompt([USER], [tool]).text != first.text
    assert conversations.build_prompt([USER], None, {"enable_thinking": False}) is not first
    for number in range(6):
        conversations.build_prompt([{"role": "user", "content": str(number)}])
    again = conversations.build_prompt([USER])
    assert again is not first
    assert (again.text, again.tokens, again.sources) == (first.text, first.tokens, first.sources)


def test_a_long_text_becomes_tokens_beside_the_event_loop(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    long, short = [{"role": "user", "content": "hello " * 400}], [USER]
    encode, threads = conversations._encode_new_text, []

    def noted(draft: Any) -> Any:
        threads.append(threading.current_thread())
        time.sleep(0.02)
        return encode(draft)

    monkeypatch.setattr(conversations, "_encode_new_text", noted)

    async def all_of_them() -> list[EncodedPrompt]:
        left = asyncio.ensure_future(conversations.build_prompt_async(long))
        waiting = [asyncio.ensure_future(conversations.build_prompt_async(long)) for _ in range(3)]
        await asyncio.sleep(0)
        left.cancel()  # the others still get it
        among = await conversations.build_prompt_async(short)
        assert not any(each.done() for each in waiting)
        return [among, *await asyncio.gather(*waiting), await conversations.build_prompt_async(long)]

    among, *same = asyncio.run(all_of_them())
    assert sorted(thread is threading.main_thread() for thread in threads) == [False, True]
    assert all(each is same[0] for each in same)
    fresh = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    assert [among, same[0]] == [fresh.build_prompt(short), fresh.build_prompt(long)]

    answer = {"role": "assistant", "content": "hi " * 600}
    turn_of(fresh, long, "hi " * 600 + "<|im_end|>", None)
    later = [*long, answer, {"role": "user", "content": "and " * 400}]
    assert asyncio.run(fresh.build_prompt_async(later)) == fresh.build_prompt(later)


def test_an_error_in_the_thread_reaches_all_who_wait(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    long = [{"role": "user", "content": "hello " * 400}]

    def broken(draft: Any) -> Any:
        raise DataError("no tokens")

    async def both() -> list[Any]:
        return await asyncio.gather(*(conversations.build_prompt_async(long) for _ in range(2)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(conversations, "_encode_new_text", broken)
        assert [str(error) for error in asyncio.run(both())] == ["no tokens"] * 2
    assert asyncio.run(both())[0].tokens  # it is tried again


def test_a_prompt_that_nobody_waits_for_any_more_is_given_up(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template), threads=ThreadPool(1, "one"))
    encode, made, go_on = conversations._encode_new_text, [], threading.Event()

    def noted(draft: Any) -> Any:
        made.append(draft.text)
        assert go_on.wait(60)
        return encode(draft)

    monkeypatch.setattr(conversations, "_encode_new_text", noted)

    async def some_leave() -> EncodedPrompt:
        asked = [
            asyncio.ensure_future(conversations.build_prompt_async([{"role": "user", "content": f"{number} " * 1000}]))
            for number in (1, 2, 2, 3)
        ]
        while not made:
            await asyncio.sleep(0.001)
        for left in asked[:3]:
            left.cancel()
        await asyncio.gather(*asked[:3], return_exceptions=True)
        go_on.set()
        return await asked[3]

    prompt = asyncio.run(some_leave())
    assert len(made) == 2  # the first had begun
    assert "3 3 3" in prompt.text
    assert not conversations._pending


@pytest.mark.parametrize("n_words", [300, 300_000])
def test_a_prompt_that_is_too_long_is_refused_before_it_is_made(
    n_words: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template), max_prompt_tokens=200)
    n_characters = 0

    def counted(draft_or_text: Any, *asked: Any, **how: Any) -> Any:
        nonlocal n_characters
        n_characters += len(draft_or_text)
        return tiny(draft_or_text, *asked, **how)

    monkeypatch.setattr(conversations, "_encode_new_text", None)  # would be called for a prompt that fits
    monkeypatch.setattr(errors, "_count_tokens", lambda tokenizer, text: len(counted(text)["input_ids"]))
    long = [{"role": "user", "content": "hello " * n_words}]
    with pytest.raises(PromptTooLong, match="more than 200 tokens"):
        conversations.build_prompt(long)
    with pytest.raises(PromptTooLong, match="more than 200 tokens"):
        asyncio.run(conversations.build_prompt_async(long))
    assert 0 < n_characters <= 2 * min(errors.PIECE, 6 * n_words + 200)
    assert len(conversations.cache) == 0


def test_what_a_turn_leaves_room_for_is_counted(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template), max_prompt_tokens=900)
    turn_of(conversations, [USER], "hello " * 300 + "<|im_end|>", None)
    later = [USER, {"role": "assistant", "content": "hello " * 300}]
    assert len(conversations.build_prompt([*later, {"role": "user", "content": "hello " * 100}]).tokens) > 800
    with pytest.raises(PromptTooLong):
        conversations.build_prompt([*later, {"role": "user", "content": "hello " * 200}])


def test_private_use_characters_of_a_message_do_not_hide_where_it_stands(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    plain, marked = ({"role": "user", "content": f"one {mark} two"} for mark in ("", "\ue002\ue003\ue002 12"))
    for message in (plain, marked):
        prompt = conversations.build_prompt([message])
        user = expand_runs(prompt.sources) == TokenSource.USER
        tokens = [token for token, is_user in zip(prompt.tokens, user, strict=True) if is_user]
        assert tiny.decode(tokens) == message["content"]


def test_long_texts_count_for_the_key_of_a_conversation() -> None:
    def key(**message: Any) -> str:
        return conversation_keys([{"role": "user", **message}])[0]

    long, other = "a" * 5000, "a" * 4999 + "b"
    keys = {
        key(content=long),
        key(content=other),
        key(content=[len(long)]),
        key(content=long, name="a"),
        key(content=""),
        key(content=long, reasoning_content=other),
        key(content=other, reasoning_content=long),
    }
    assert len(keys) == 7
    assert key(content=long) == key(content="a" * 5000)


def test_what_is_remembered_has_a_limit(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template), max_cached_tokens=3000)
    for number in range(10):
        turn_of(conversations, [{"role": "user", "content": f"hello {number}"}], "a<|im_end|>", None)
    remembered = conversations.cache
    assert 0 < remembered.n_tokens <= 3000
    assert 6 < len(remembered) < 12  # of 20; short ones count, too
    long = turn_of(conversations, [{"role": "user", "content": "hello " * 500}], "a<|im_end|>", None)
    assert len(long["tokens"]["prompt_token_ids"]) > 1000
    assert 0 < remembered.n_tokens <= 3000
    assert len(remembered) <= 3


def test_a_tokenizer_without_a_template_cannot_chat(plain: Any) -> None:
    with pytest.raises(DataError, match="no chat template"):
        PromptBuilder(plain, parser_for_template(None)).build_prompt([USER])


def test_expected_prompts_are_made_until_somebody_asks_for_another(tiny: Any) -> None:
    conversations = PromptBuilder(tiny, parser_for_template(tiny.chat_template))
    rows = [[{"role": "user", "content": f"prompt {number}"}] for number in range(8)]

    async def begun(other: bool) -> int:
        conversations.cache = ConversationCache(1_000_000)
        task = asyncio.ensure_future(conversations.prefetch(rows))
        await asyncio.sleep(0)
        asked = [{"role": "user", "content": "another" if other else "prompt 5"}]
        assert (await conversations.build_prompt_async(asked)).tokens == conversations.build_prompt(asked).tokens
        await task
        return len(conversations.cache) - other

    assert asyncio.run(begun(other=False)) == len(rows)
    assert 0 < asyncio.run(begun(other=True)) < len(rows)
