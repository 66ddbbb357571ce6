"""Rotary modules whose frequencies depend on the length."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, Phi3Config, PhimoeConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from engine_models import on_meta
from highwater.engine.models.build import read_config
from highwater.engine.models.pretrained import text_config
from highwater.engine.models.rope import DocumentRope, PhimoeRope, follow_documents, scale_rope
from highwater.engine.parallel.sequence_layout import PADDING, Part, Route, SequenceLayout
from highwater.errors import ModelError
from highwater.model.model import load_model
from highwater.model.model_place import catalog_names
from highwater.model.rope import ends_at_native, yarn
from tiny_models import SIZES

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
LONG = SIZES | {"original_max_position_embeddings": 16, "pad_token_id": 0}


def phi3(**rope: Any) -> Phi3Config:
    return Phi3Config(
        **LONG, rope_parameters={"rope_type": "longrope", **FACTORS, "rope_theta": 1e4, **rope}
    )


def phimoe() -> PhimoeConfig:
    scales = {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 16}
    return PhimoeConfig(
        **LONG, rope_parameters={"rope_type": "longrope", **FACTORS, **scales, "rope_theta": 1e4}
    )


def dynamic() -> LlamaConfig:
    rope = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}
    return LlamaConfig(**SIZES | {"max_position_embeddings": 16}, rope_parameters=rope)


@pytest.mark.parametrize(
    ("around", "kind", "config"),
    [
        (DocumentRope, Phi3RotaryEmbedding, phi3()),
        (DocumentRope, LlamaRotaryEmbedding, dynamic()),
        (PhimoeRope, PhimoeRotaryEmbedding, phimoe()),
    ],
)
def test_every_document_has_the_cosines_that_it_has_alone(around, kind, config):
    ours, x = around(kind(config)), torch.zeros(1, 1, dtype=torch.float64)
    for lengths in ((17, 16, 1, 40, 40, 15), (64,), (3, 16)):
        ours.parts = [Part(length, length) for length in lengths]
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        alone = [kind(config)(x, torch.arange(length)[None]) for length in lengths]
        for got, wanted in zip(ours(x, position_ids=places), zip(*alone, strict=True), strict=True):
            assert torch.equal(got, torch.cat(wanted, dim=1)), lengths


def test_a_ranks_share_knows_whole_documents_and_none_of_before_stays():
    layout = SequenceLayout((5, 1, 6, 2), ulysses_degree=2)
    shares = [layout.share_of(rank).parts for rank in (0, 1)]
    assert shares == [(Part(5, 5), Part(1, 1), Part(6, 1)), (Part(6, 5), Part(2, 2))]
    rotary = Phi3RotaryEmbedding(phi3())
    before = {name: t.clone() for name, t in rotary.named_buffers()}
    ours = DocumentRope(rotary)
    ours.parts = [Part(41, 41), Part(5, 5)]
    ours(torch.zeros(1, 1), torch.zeros(1, 46, dtype=torch.long))
    assert {name for name, _ in rotary.named_buffers()} == set(before)
    assert all(torch.equal(t, before[name]) for name, t in rotary.named_buffers())


def test_yarn_that_is_asked_for_takes_the_place_of_a_models_own_scaling(tmp_path):
    phi3().save_pretrained(tmp_path)
    for rope, length, kind in (
        ("auto", 64, "longrope"),
        ("yarn", 64, "yarn"),
        ("yarn", 128, "yarn"),
    ):
        model = on_meta(read_config(str(tmp_path), length_tokens=length, rope=rope))
        assert bool(model.document_ropes) == (kind == "longrope")
        assert kind == "longrope" or model.backbone.rotary_emb.rope_type == kind


def test_other_rope_is_left_alone_or_refused():
    assert on_meta(Qwen3Config(**SIZES)).document_ropes == []

    class Silent(nn.Module):
        config = phi3()

    with pytest.raises(ModelError, match=r"phi3 .* longrope"):
        follow_documents(Silent())


@pytest.mark.parametrize("rope", ["auto", "yarn"])
@pytest.mark.parametrize("name", catalog_names())
def test_the_block_is_the_engines(name, rope):
    model = load_model(name)
    native = model.shape.native_length_tokens
    for length in (native // 2, native, native + 4096, 8 * native):
        if length > native and ends_at_native(model, rope):
            continue  # refused
        config = text_config(Path(model.directory)) or AutoConfig.from_pretrained(model.directory)
        before = json.dumps(config.rope_parameters, default=str)
        scale_rope(config, length_tokens=length, rope=rope)
        found = yarn(model, length_tokens=length, rope=rope)
        if found is None:
            assert json.dumps(config.rope_parameters, default=str) == before
        else:
            assert config.rope_parameters == found.rope_parameters, (
                "a base that config.json leaves out is its family's"
            )
            assert config.max_position_embeddings == found.max_position_embeddings == length


LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=9).map(tuple)
DEGREES = st.integers(1, 5)


@given(LENGTHS, DEGREES, DEGREES)
def test_what_is_cut_is_whole_again(lengths, ulysses, ring):
    layout = SequenceLayout(lengths, ulysses, ring)
    held = [layout.share_of(rank).positions_T for rank in range(layout.degree)]
    assert {len(each) for each in held} == {layout.tokens_per_rank}
    together = torch.from_numpy(np.concatenate(held))
    is_token = together != PADDING
    assert sorted(together[is_token].tolist()) == list(range(sum(lengths)))
    rows = torch.randn(len(together), 2)
    assert torch.equal(layout.restored(rows)[together[is_token]], rows[is_token])


@given(LENGTHS, DEGREES, DEGREES)
def test_on_its_route_every_token_comes_into_the_rows_order_and_back(lengths, ulysses, ring):
    layout = SequenceLayout(lengths, ulysses, ring)
    held = [torch.from_numpy(layout.share_of(rank).positions_T) for rank in range(layout.degree)]
    routes = [layout.routes_of(rank, torch.device("cpu")) for rank in range(layout.degree)]
    ordered = travelled(held, [there for there, _ in routes])
    row = torch.cat(ordered)
    assert {len(each) for each in ordered} == {layout.tokens_per_rank}
    assert row[row != PADDING].tolist() == list(range(sum(lengths)))
    again = travelled(ordered, [back for _, back in routes])
    assert all(map(torch.equal, again, held))


def travelled(tensors: list[Tensor], routes: list[Route]) -> list[Tensor]:
    """What all ranks have behind an all-to-all on these routes."""
    parts = [
        tensor[route.leaving_T].split(route.sent)
        for tensor, route in zip(tensors, routes, strict=True)
    ]
    found: list[Tensor] = []
    for rank, route in enumerate(routes):
        received = [each[rank] for each in parts]
        assert [len(each) for each in received] == route.received
        found.append(torch.cat(received)[route.arriving_T])
    return found


@given(LENGTHS, DEGREES, DEGREES)
def test_a_rank_knows_document_and_offset_of_every_token_that_it_holds(lengths, ulysses, ring):
    layout = SequenceLayout(lengths, ulysses, ring)
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    offsets = [offset for length in lengths for offset in range(length)]
    for rank in range(layout.degree):
        share = layout.share_of(rank)
        told = zip(
            *(t.tolist() for t in (share.positions_T, share.documents_T, share.offsets_T)),
            strict=True,
        )
        for position, document, offset in told:
            if position == PADDING:
                assert document == len(lengths)
            else:
                assert (document, offset) == (documents[position], offsets[position])
        assert sum(part.tokens for part in share.parts) == layout.tokens_per_rank
        real = share.positions_T[share.positions_T != PADDING]
        assert bool((np.diff(real) > 0).all()), "in the order of the row"


@given(LENGTHS, st.integers(2, 5))
def test_over_a_ring_every_rank_has_the_same_causal_work(lengths, ring):
    layout = SequenceLayout(lengths, ring_degree=ring)
    work = [int((layout.share_of(rank).offsets_T + 1).sum()) for rank in range(layout.degree)]
    assert len(set(work)) == 1


def test_ranks_of_a_ring_hold_the_chunks_that_the_published_order_gives_them():
    layout = SequenceLayout((8, 4), ring_degree=2)
    assert layout.share_of(0).positions_T.tolist() == [0, 1, 6, 7, 8, 11]
    assert layout.share_of(1).positions_T.tolist() == [2, 3, 4, 5, 9, 10]
    mixed = SequenceLayout((8, 4), ulysses_degree=2, ring_degree=2)
    assert [mixed.share_of(rank).positions_T.tolist() for rank in range(4)] == [
        *([0, 1, 6], [7, 8, 11]),
        *([2, 3, 4], [5, 9, 10]),
    ]


def test_a_million_tokens_of_a_thousand_documents_are_cut_without_a_loop_over_them(record_property):
    layout = SequenceLayout((1049,) * 1000, ulysses_degree=2, ring_degree=3)
    began = time.perf_counter()
    row = torch.from_numpy(np.concatenate([layout.share_of(rank).positions_T for rank in range(6)]))
    restored = layout.restored(row)
    took_s = time.perf_counter() - began
    record_property("counted", f"1,049,000 tokens of 1,000 documents, 6 ranks: {took_s:.2f} s")
    assert torch.equal(restored, torch.arange(1_049_000))
