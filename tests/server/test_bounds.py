"""Bounds of what clients send, and the work that they take."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from areno.schema.values import format_value
from areno.server import errors, json_bodies
from areno.server.errors import ApiError, exceeds_depth, exceeds_size, has_more_tokens
from areno.server.json_bodies import decompress, read_json
from tests.helpers.tokenizers import shared_tokenizer


def nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value, 2] if kind == "list" else {"a": value, "b": {}}
    return value


@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth(kind: str) -> None:
    assert [exceeds_depth(nested(levels, kind), 5) for levels in (0, 1, 4)] == [False] * 3
    assert [exceeds_depth(nested(levels, kind), 5) for levels in (6, 100, 100_000)] == [True] * 3
    assert not exceeds_depth(nested(5, "list"), 5)
    assert exceeds_depth([[[]]], 2)
    assert not exceeds_depth([[]], 2)


def test_size() -> None:
    assert not exceeds_size({"abc": ["de", 1, None]}, 11)
    assert exceeds_size({"abc": ["de", 1, None]}, 10)
    assert exceeds_size("a" * 11, 10)
    assert exceeds_size([1] * 11, 10)
    assert exceeds_size({str(number): None for number in range(4)}, 10)
    assert not exceeds_size([nested(2, "list")], 100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["hello world " * 5000, "a" * 50_000, "\U0001f600" * 9000, " " * 50_000, "<|im_end|>" * 3000]
)
def test_tokens_are_counted_in_pieces_without_a_wrong_refusal(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiny", "plain", "qwen3"):
        tokenizer = shared_tokenizer(name)
        n = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for piece in (9_999, errors.PIECE):
            monkeypatch.setattr(errors, "PIECE", piece)
            assert not has_more_tokens(tokenizer, text, n)
            assert has_more_tokens(tokenizer, text, n // 2) or len(text) <= n // 2  # which is short enough to try


@pytest.mark.parametrize("most", [0, 10**9])
def test_json_is_the_same_by_both_scanners(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MAX_PARTS", most)
    value = {"a": [1, -2.5, 1e300, "\u00e9\n", None, True, {"": []}], "b": {"c": "d"}}
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert read_json(json.dumps(value, ensure_ascii=False).encode(encoding)) == value
    for text in ("", "{", "[1,]", "NaN", '{"a": Infinity}', "1" * 5000, '"\n"', "\ufeff\ufeff1", "[" * 100_000):
        with pytest.raises(ApiError) as caught:
            read_json(text.encode())
        assert caught.value.status == 400
        assert len(caught.value.message) < 300
    with pytest.raises(ApiError, match="not valid JSON"):
        read_json(b"\xff\xfe\xff")
    with pytest.raises(ApiError, match="nested more than 128 levels"):
        read_json(json.dumps(nested(129, "list")).encode())
    assert read_json(json.dumps(nested(128, "list")).encode())


def test_the_number_of_lists_and_objects_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MAX_PARTS", 10)
    monkeypatch.setattr(json_bodies, "MAX_OBJECTS", 10)
    assert read_json(json.dumps([{}] * 9).encode()) == [{}] * 9
    with pytest.raises(ApiError, match="more than 10 lists and objects"):
        read_json(json.dumps([{}] * 10).encode())


@pytest.mark.parametrize("wbits", [31, 15, -15])
def test_a_packed_body(wbits: int) -> None:
    def packed(data: bytes) -> bytes:
        packing = zlib.compressobj(wbits=wbits)
        return packing.compress(data) + packing.flush()

    encoding, data = "gzip" if wbits == 31 else "deflate", b'{"a": 1}' * 100
    assert decompress(packed(data), encoding, 800) == data
    for damaged in (b"", packed(data)[:-9], packed(data)[:9] + b"\xff\xff", packed(data) + b"more"):
        with pytest.raises(ApiError, match=f"the body is not valid {encoding}"):
            decompress(damaged, encoding, 800)
    with pytest.raises(ApiError, match="more than 799 bytes"):
        decompress(packed(data), encoding, 799)
    with pytest.raises(ApiError, match="more than 1000 bytes"):
        decompress(packed(b"\0" * 100_000_000), encoding, 1000)
    with pytest.raises(ApiError, match="Content-Encoding is 'br'"):
        decompress(data, "br", 800)


def test_of_a_large_value_the_beginning_is_shown() -> None:
    for value in ("a" * 10**7, [1] * 10**6, {str(n): n for n in range(10**5)}, nested(300, "list"), [["a" * 500] * 99]):
        shown = format_value(value)
        assert len(shown) == 80
        assert shown.endswith("...")
        assert shown[:77] == repr(value)[:77]
    assert format_value(["a", {"b": 1}, 2.5]) == "['a', {'b': 1}, 2.5]"
    assert format_value("a" * 78) == repr("a" * 78)
