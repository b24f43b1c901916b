"""Saving and loading model folders: round trips through transformers, and every way a folder can be wrong."""

from __future__ import annotations

import json
import math
import os
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from areno.errors import CheckpointError
from areno.layers.attention import PackedAttend
from areno.models import folder as hub
from areno.models.folder import add_eos_token_ids
from areno.models.registry import build_model, load_config
from areno.models.saving import write_tensors
from areno.models.transformer import Transformer
from areno.models.weights import load_weights
from tests.helpers import tiny_shape
from tests.helpers.saving import save_weights

SHAPE = {**tiny_shape.SHAPE, "vocab_size": 64, "head_dim": 16}
KINDS = {
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
}


def write_model(folder: Path, kind: str = "qwen3", tied: bool = False) -> transformers.PreTrainedModel:
    """A random transformers model, saved to `folder`."""
    torch.manual_seed(0)
    config = KINDS[kind](**SHAPE, tie_word_embeddings=tied)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(folder)
    return reference


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    model = build_model(load_config(folder), dtype=dtype, device="cpu")
    load_weights(model, folder)
    return model


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of model.safetensors; "__" in a keyword stands for "."."""
    tensors = load_file(folder / "model.safetensors")
    for keyword, tensor in changes.items():
        name = keyword.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_we_save(kind: str, tied: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "in", kind, tied)
    model = build_model(load_config(tmp_path / "in"), dtype=torch.float32, device="cpu")
    model.init_weights(seed=7)
    save_weights(model, tmp_path / "out", source=tmp_path / "in")
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(1, 41)
    attend = PackedAttend(torch.tensor([0, 40], dtype=torch.int32), 40, "sdpa")
    with torch.no_grad():
        logits = model.logits(model(tokens, torch.arange(40), attend))
        torch.testing.assert_close(logits, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)
    assert (tmp_path / "out/generation_config.json").read_bytes() == (
        tmp_path / "in/generation_config.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("own", "config_ids", "ends", "expected"),
    [
        ({"eos_token_id": 5, "top_p": 0.9}, [5, 7], [7], {"eos_token_id": [5, 7], "top_p": 0.9}),
        ({"eos_token_id": [5, 7]}, [5, 7], [7], {"eos_token_id": [5, 7]}),
        ({"top_p": 0.9}, [5], [5], {"top_p": 0.9}),
        ({"top_p": 0.9}, [5], [6], {"top_p": 0.9, "eos_token_id": [5, 6]}),
        (None, [5], [6], {"eos_token_id": [5, 6]}),
        (None, [5], [5], None),
    ],
)
def test_the_ends_of_turns_are_listed(own: Any, config_ids: Any, ends: Any, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    if own is not None:
        file.write_text(json.dumps(own))
    add_eos_token_ids(tmp_path, config_ids, ends)
    assert (json.loads(file.read_text()) if file.exists() else None) == expected
    if expected is not None and "eos_token_id" in expected:
        assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == expected["eos_token_id"]


def test_small_shards_and_their_index(tmp_path: Path) -> None:
    reference = write_model(tmp_path / "in")
    save_weights(load(tmp_path / "in"), tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(tmp_path.glob("out/model-*-of-*.safetensors"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert not (tmp_path / "out/model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in reference.state_dict().values())
    for file in files:
        with safe_open(file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            sizes = [tensors.get_tensor(name).nbytes for name in tensors.keys()]  # noqa: SIM118
            assert sum(sizes) <= 20_000 or len(sizes) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    ours = load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), load(tmp_path / "in").parameters(), strict=True))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_dtype_of_the_saved_folder(key: str | None, tmp_path: Path) -> None:
    write_model(tmp_path / "in", "llama")
    values = json.loads((tmp_path / "in/config.json").read_text())
    values.pop("dtype", None)
    if key:
        values[key] = "float32"
    values["unsloth_version"] = "1.2"  # a field that nothing reads
    (tmp_path / "in/config.json").write_text(json.dumps(values))
    save_weights(load(tmp_path / "in", torch.bfloat16), tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())
    assert saved == {**values, key or "torch_dtype": "bfloat16"}
    assert {tensor.dtype for tensor in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_bf16_weights_load_into_fp32_and_back(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    half = load(tmp_path / "in", torch.bfloat16)
    save_weights(half, tmp_path / "half")
    wide = load(tmp_path / "half")
    for a, b in zip(half.parameters(), wide.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(a.float(), b)


def test_companions_come_from_the_first_folder_that_has_them(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer.json").chmod(0o444)
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "additional_chat_templates/rag.jinja").write_text("rag")
    (tokenizer / "README.md").write_text("stays behind")
    (tmp_path / "model/vocab.json").write_text("{}")
    (tmp_path / "model/merges.txt").write_text("")
    save_weights(load(tmp_path / "model"), tmp_path / "out", source=[tokenizer, tmp_path / "model"])
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates",
        "additional_chat_templates/rag.jinja",
    }
    assert os.access(tmp_path / "out/tokenizer.json", os.W_OK)


# --- folders that are wrong ---


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors and model\.safetensors\.index\.json.*actor\.init_from_scratch"
    ):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 900, -100])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(tmp_path)


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_tensors(tmp_path, model__layers__1__mlp__up_proj__weight=None, model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"lack (?=.*model\.layers\.1\.mlp\.up_proj\.weight)(?=.*model\.norm)"):
        load(tmp_path)
    write_model(tmp_path)
    edit_tensors(tmp_path, model__layers__1__self_attn__q_proj__bias=torch.ones(64))
    with pytest.raises(CheckpointError, match=r"hold model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_harmless_extra_tensors_are_let_pass(tmp_path: Path) -> None:
    write_model(tmp_path, tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    extra = {"lm_head__weight": embedding, "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(8)}
    edit_tensors(tmp_path, **extra)
    assert torch.equal(load(tmp_path).lm_head.weight, embedding)


def test_a_tied_model_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers would use this head."""
    write_model(tmp_path, tied=True)
    edit_tensors(tmp_path, lm_head__weight=torch.ones(64, 32))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load(tmp_path)


def test_a_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_tensors(tmp_path, model__embed_tokens__weight=torch.zeros(65, 32))
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has shape \(65, 32\), expected \(64, 32\)"):
        load(tmp_path)


@pytest.mark.parametrize("layers", [1, 5])
def test_another_number_of_layers_is_named(layers: int, tmp_path: Path) -> None:
    write_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": layers}))
    with pytest.raises(CheckpointError, match=f"says num_hidden_layers={layers}, the weight files have 2 layers"):
        load(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(number: float, tmp_path: Path) -> None:
    tensors = write_model(tmp_path).state_dict()
    bias, matrix = tensors["model.norm.weight"], tensors["model.layers.1.self_attn.v_proj.weight"]
    bias[31], matrix[-1, -1] = number, number
    edit_tensors(tmp_path, model__norm__weight=bias, model__layers__1__self_attn__v_proj__weight=matrix)
    expected = r": model\.layers\.1\.self_attn\.v_proj\.weight, model\.norm\.weight: numbers that are nan, infinite or"
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointError, match=expected):
            load(tmp_path, dtype)


def test_weights_that_do_not_fit_the_dtype_are_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_tensors(tmp_path, model__norm__weight=torch.full((32,), 1e5))
    load(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: numbers .* beyond float16"):
        load(tmp_path, torch.float16)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    edit_tensors(tmp_path, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8"):
        load(tmp_path)


def test_an_index_that_lists_an_absent_file_or_is_broken(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    save_weights(load(tmp_path / "in"), tmp_path / "out", max_shard_bytes=20_000)
    next((tmp_path / "out").glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors is missing"):
        load(tmp_path / "out")
    for broken in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}'):
        (tmp_path / "out/model.safetensors.index.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"index\.json is not a safetensors index"):
            load(tmp_path / "out")
    for name in ("../in/model.safetensors", str(tmp_path / "in/model.safetensors"), "..\\a.safetensors", "config.json"):
        (tmp_path / "out/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match=r"index\.json: weight_map names .*; expected plain names of"):
            load(tmp_path / "out")
    (tmp_path / "out/model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read as JSON"):
        load(tmp_path / "out")


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    model = load(tmp_path / "in")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*file/out.*saver\.path"):
        save_weights(model, tmp_path / "file/out")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*/proc"):
        save_weights(model, "/proc/areno-out")


def test_a_disk_that_fills_up_while_writing_weights(tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk: config.json still fits, the weights do not."""
    write_model(tmp_path / "in")
    model = load(tmp_path / "in")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the model to .*out: "):
            save_weights(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out/config.json").exists()
    assert not (tmp_path / "out/model.safetensors").exists()


def test_paths_that_are_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        hub.resolve_model_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        hub.resolve_model_folder("./nowhere/at/all")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        hub.resolve_model_folder(tmp_path / "file")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve_model_folder("~/model") == tmp_path / "model"


def test_a_hub_id_without_network_says_so_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to try again"))
    with pytest.raises(CheckpointError, match=r"owner/never-downloaded .*ConnectionError.*actor\.path"):
        hub.resolve_model_folder("owner/never-downloaded")


def test_weights_are_written_without_a_copy(tmp_path: Path) -> None:
    """Before safetensors 0.8, a file took its size in host memory once more."""
    tensors = {"one": torch.ones(4_000_000), "two": torch.ones(4_000_000)}
    tracemalloc.start()
    try:
        write_tensors(tensors, {}, tmp_path / "model.safetensors", None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "model.safetensors").stat().st_size > 32_000_000
    assert peak < 1_000_000


def test_saved_files_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "in")
    model = load(tmp_path / "in")
    synced: dict[int, int] = {}  # inode -> size when it was synced
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    save_weights(model, tmp_path / "out", max_shard_bytes=10_000)
    files = list((tmp_path / "out").iterdir())
    assert len(files) > 3
    assert all(synced[file.stat().st_ino] == file.stat().st_size for file in files)
    assert (tmp_path / "out").stat().st_ino in synced


def test_equal_weights_are_found_in_the_type_of_the_first_folder(tmp_path: Path) -> None:
    """A step that bfloat16 does not hold is no difference; another tensor is one."""
    weights = {"a": torch.full((3,), 0.02), "b": torch.arange(4.0)}
    folders = {}
    for name, tensors in {
        "start": weights,
        "moved": {**weights, "a": weights["a"] + 1e-6},
        "far": {**weights, "a": weights["a"] + 1e-3},
        "more": {**weights, "c": torch.zeros(1)},
    }.items():
        for dtype in (torch.float32, torch.bfloat16):
            folder = folders[name, dtype] = tmp_path / f"{name}-{dtype}"
            folder.mkdir()
            save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / "model.safetensors")
    start = folders["start", torch.float32]
    same = {key: hub.has_same_weights(folder, start) for key, folder in folders.items()}
    assert {key for key, is_same in same.items() if is_same} == {
        *(("start", dtype) for dtype in (torch.float32, torch.bfloat16)),
        ("moved", torch.bfloat16),
    }
