"""Gated DeltaNet: a decoder layer's linear attention by engine/attention/gated_delta, which keeps
packed documents apart; ranks share it by heads, by a ring, or both.

Projections are the family's own. A key head stays with the value heads that share it: Ulysses
exchanges all their projections together, and a rank convolves the channels of its own heads.

A ring distributes chunks of every document to its ranks, so that causal attention is equal work for
all (engine/parallel/sequence_layout). A state would be sent from chunk to chunk of each document, 4
MB a chunk and layer of Qwen3.5-9B, however short documents are. So tokens are sent to the row's
order before the projections, and back after them: each rank then has one slice of the row, and
sends only one state to the next rank.

Shapes:  B 1  T tokens of this rank  S tokens of the row  E hidden size  G key heads  r value heads
         of a key head  H = G r value heads  V size of a value head  C channels of the convolution
"""

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from highwater.engine.attention.gated_delta import DeltaHeads, gated_delta
from highwater.engine.attention.registry import Attention
from highwater.engine.parallel.collectives import gather_heads, routed, scatter_heads
from highwater.engine.parallel.sequence_layout import SequenceLayout
from highwater.errors import MachineError, ModelError
from highwater.nouns.objective import DELTA, DELTA_JOINED

_OTHERS = {"conv1d", "norm", "out_proj"}
_PROOF_SIZES = {
    "hidden_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_PROOF_LENGTHS = (41, 70, 1)
"""Tokens of the proof's documents, of which one is longer than a chunk."""
_PROOF_TOLERANCE = 1e-4
"""Tolerance in float32, in which families compute whatever the inputs' dtype; another formula is
far off."""


class GatedDeltaNet(nn.Module):
    """Linear attention with a family's parameter names; decoder layers call it like their own."""

    def __init__(self, theirs: nn.Module, attention: Attention) -> None:
        """Use the parameters and children of ``theirs`` as those of this module."""
        super().__init__()
        own: Any = theirs
        for name, parameter in theirs.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in theirs.named_children():
            self.add_module(name, child)
        self.heads = DeltaHeads(
            key_heads=own.num_k_heads,
            value_heads=own.num_v_heads,
            key_size=own.head_k_dim,
            value_size=own.head_v_dim,
        )
        self.attention = attention

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: object = None,
        attention_mask: Tensor | None = None,
        sequence_layout: SequenceLayout | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the output, (B, T, E)."""
        assert cache_params is None, "training keeps no state from one forward pass to the next"
        assert attention_mask is None, "what pads a row is a document of its own"
        assert sequence_layout is not None, "documents are told apart"
        assert len(hidden_states) == 1, "documents are packed into one row"
        self.attention.callers.add(self)
        x_TE, shared = hidden_states.squeeze(0), self.attention.shared
        if shared.ring is None:
            return self._of_row(x_TE, sequence_layout)[None]
        assert shared.every is not None, "who is in a ring shares sequences"
        to_row, back = sequence_layout.routes_of(shared.rank, x_TE.device)
        ordered_TE = routed(x_TE, to_row, back, shared.every)
        out_TE = self._of_row(ordered_TE, sequence_layout)
        return routed(out_TE, back, to_row, shared.every)[None]

    def _of_row(self, x_TE: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the output, (T, E), for this rank's tokens in the order of the row."""
        own: Any = self
        *heads_TGX, beta_TGr, rate_TGr = self._projected(x_TE)
        wide = torch.promote_types(x_TE.dtype, torch.float32)
        decay_Gr, bias_Gr = (
            each.unflatten(0, (self.heads.key_heads, -1)) for each in (own.A_log, own.dt_bias)
        )
        decay_TGr = -decay_Gr.to(wide).exp() * F.softplus(rate_TGr.to(wide) + bias_Gr)
        rates = (decay_TGr, beta_TGr.to(wide).sigmoid())
        group = self.attention.shared.ulysses
        if group is None:
            out_THV = self._attended(heads_TGX, rates, layout, rank=0, degree=1)
        else:
            degree, rank = dist.get_world_size(group), dist.get_rank(group)
            sizes = [each.shape[-1] for each in heads_TGX]
            whole_SgX = _traded(torch.cat(heads_TGX, dim=-1), group).split(sizes, dim=-1)
            rates = _traded(torch.cat(rates, dim=-1), group).chunk(2, dim=-1)
            out_SHV = self._attended(whole_SgX, rates, layout, rank=rank, degree=degree)
            out_THV = gather_heads(out_SHV[None], group, degree)[0]
        return own.out_proj(out_THV.flatten(1))

    def _projected(self, x_TE: Tensor) -> list[Tensor]:
        """Return queries, keys, values and gates by key heads, TGX, then beta and the decay's input
        by value heads, TGr, both before their activations.
        """
        own, heads = cast(Any, self), self.heads
        keys = heads.key_size
        values = heads.value_heads // heads.key_heads * heads.value_size

        def by_heads(projected_TX: Tensor) -> Tensor:
            return projected_TX.unflatten(-1, (heads.key_heads, -1))

        if hasattr(self, DELTA_JOINED[0]):
            qkvz_TGX, ba_TGx = (by_heads(getattr(own, name)(x_TE)) for name in DELTA_JOINED)
            return [*qkvz_TGX.split((keys, keys, values, values), dim=-1), *ba_TGx.chunk(2, dim=-1)]
        qkv_TC, *others = (getattr(own, name)(x_TE) for name in DELTA)
        return [by_heads(each) for each in (*qkv_TC.split(heads.channels, dim=-1), *others)]

    def _attended(
        self,
        heads_SGX: Sequence[Tensor],
        rates: Sequence[Tensor],
        layout: SequenceLayout,
        *,
        rank: int,
        degree: int,
    ) -> Tensor:
        """Return the output of this rank's share of the heads, SHV: for the whole row, or in a ring
        for its slice of the row.
        """
        own, heads = cast(Any, self), self.heads
        *qkv, gate_SGX = heads_SGX
        channels = own.conv1d.weight.squeeze(1).split(heads.channels)
        parts = (each.chunk(degree)[rank] for each in channels)
        log_decay_SH, beta_SH = (each.flatten(1) for each in rates)
        return gated_delta(
            torch.cat([each.flatten(1) for each in qkv], dim=1),
            gate_SGX.flatten(1).unflatten(1, (-1, heads.value_size)),
            log_decay_SH,
            beta_SH,
            torch.cat([*parts]),
            own.norm.weight,
            heads=heads._replace(
                key_heads=heads.key_heads // degree, value_heads=heads.value_heads // degree
            ),
            document_lengths=layout.padded_lengths,
            norm_epsilon=own.norm.variance_epsilon,
            ring=self.attention.shared.ring,
        )


def _traded(tensor_TGX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all key heads of this rank's tokens for all tokens of its own key heads: SgX."""
    degree = dist.get_world_size(group)
    return scatter_heads(tensor_TGX.transpose(0, 1)[None], group, degree)[0].transpose(0, 1)


def fuse_delta_nets(causal_lm: PreTrainedModel, attention: Attention) -> None:
    """Replace every gated DeltaNet of a family's model by ours, in place.

    Raises ModelError for a layer that computes something else, and MachineError if the family's
    class does not run, so that ours cannot be compared.
    """
    proven: set[type[nn.Module]] = set()
    for parent in list(causal_lm.modules()):
        for name, theirs in list(parent.named_children()):
            children = {child for child, _ in theirs.named_children()}
            if children not in ({*DELTA, *_OTHERS}, {*DELTA_JOINED, *_OTHERS}):
                continue
            if type(theirs) not in proven:
                _prove(theirs, causal_lm.config)
                proven.add(type(theirs))
            ours = GatedDeltaNet(theirs, attention)
            if (ranks := ours.attention.shared.ulysses) is not None:
                heads = ours.heads.key_heads
                assert heads % dist.get_world_size(ranks) == 0, "such layouts are refused"
            setattr(parent, name, ours)


def _prove(theirs: nn.Module, config: PreTrainedConfig) -> None:
    """Raise ModelError unless ours gives, for packed documents, the same outputs as a small module
    of the class for each document alone; MachineError if that class does not run.
    """
    generator = torch.Generator().manual_seed(0)
    kind: Any = type(theirs)
    small_config = copy.copy(config)
    for field, size in _PROOF_SIZES.items():
        setattr(small_config, field, size)
    with torch.device("cpu"), torch.no_grad():
        small = kind(small_config, cast(Any, theirs).layer_idx).to(torch.float32)
        for parameter in small.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        inputs = [
            torch.randn(1, tokens, small.hidden_size, generator=generator)
            for tokens in _PROOF_LENGTHS
        ]
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it would warn that its path is slow, which ours is not
        try:
            expected = torch.cat([small(each) for each in inputs], dim=1)
        except Exception as error:
            raise MachineError(
                f"{kind.__name__} of transformers does not run on this CPU, so that nothing shows "
                f"that ours computes the same: {error}",
                hint="uninstall flash-linear-attention and causal-conv1d: training here uses "
                "neither",
            ) from error
        finally:
            logging.set_verbosity(verbosity)
        layout = SequenceLayout(_PROOF_LENGTHS)
        ours = GatedDeltaNet(small, Attention("proof", set()))
        found = ours(torch.cat(inputs, dim=1), sequence_layout=layout)
    if not torch.allclose(found, expected, rtol=_PROOF_TOLERANCE, atol=_PROOF_TOLERANCE):
        raise ModelError(
            f"{kind.__name__} of {config.model_type} computes something else than the gated delta "
            "rule that trains here",
            hint="use a family that was compared, for example `highwater find Qwen3-0.6B`",
        )
