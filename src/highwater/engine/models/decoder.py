"""Decoders: a Hugging Face causal LM up to its last hidden states, then either statistics of
tokens, or one scalar for each token.

Shapes:  T packed tokens  N trained tokens  P positions with a scalar  E hidden size
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from highwater.engine.attention.registry import Attention
from highwater.engine.models.loss import LogitRange, token_statistics
from highwater.engine.models.requirements import not_by_attention
from highwater.engine.models.rope import follow_documents
from highwater.engine.models.router import follow_routers
from highwater.errors import ModelError
from highwater.model.families import LogitTransform
from highwater.nouns.objective import Lora
from highwater.nouns.settings import Loss
from highwater.nouns.trial import Weights


class MicroBatchStatistics(NamedTuple):
    """What a forward pass gives: statistics of the trained tokens, and the routers' loss."""

    logprobs_N: Tensor
    entropies_N: Tensor
    router_loss: Tensor | None
    """This rank's share of the routers' auxiliary loss, summed over tokens, times its coefficient;
    the caller divides it by the step's tokens. None without such a loss, or without gradients."""


class Decoder(nn.Module):
    """A causal LM up to its last hidden states; subclasses add the output."""

    gives_scalars = False
    """True for a ScalarModel. Use this, not isinstance, which fails for FSDP1's wrapper."""
    weights: Weights = "random"
    """Source of the model's first values."""
    lora: Lora | None = None
    """Settings of the model's adapters; None if the model itself is trained."""

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.attention = attention
        self.document_ropes = follow_documents(causal_lm)
        self.parameter_count = sum(p.numel() for p in causal_lm.parameters())
        """Parameters of the whole model, before it is sharded; tied ones count once."""

    def hidden_states(
        self, input_ids_T: Tensor, position_ids_T: Tensor, document_lengths: Sequence[int]
    ) -> Tensor:
        """Last hidden state of every token, after the final norm; shape (T, E)."""
        layout = self.attention.shared.layout_of(document_lengths)
        assert len(input_ids_T) == layout.tokens_per_rank, "a rank's tokens are its whole share"
        if self.document_ropes:
            parts = layout.share_of(self.attention.shared.rank).parts
            for rope in self.document_ropes:
                rope.parts = parts
        hidden_TE = self.backbone(
            input_ids=input_ids_T[None],
            position_ids=position_ids_T[None],
            use_cache=False,
            sequence_layout=layout,
        ).last_hidden_state[0]
        layers, callers = self.causal_lm.config.num_hidden_layers, len(self.attention.callers)
        if callers != layers:  # with another attention, documents would see each other
            why = f"{callers} of its {layers} layers attend through it"
            raise not_by_attention(self.causal_lm.config, why)
        return hidden_TE

    @property
    def architecture(self) -> str:
        """Name of the transformers class that loads the saved model."""
        return type(self.causal_lm).__name__

    @property
    def backbone(self) -> nn.Module:
        """Embedding, decoder layers and final norm."""
        return getattr(self.causal_lm, self.causal_lm.base_model_prefix)

    @property
    def head(self) -> nn.Linear:
        """Projection to the vocabulary."""
        return cast(nn.Linear, self.causal_lm.get_output_embeddings())

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers, first to last."""
        count = self.causal_lm.config.num_hidden_layers
        for module in self.backbone.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return module
        raise ModelError(
            f"{type(self.causal_lm).__name__} has no list of {count} decoder layers",
            hint="use a decoder-only model",
        )


class LanguageModel(Decoder):
    """A causal LM whose forward pass ends in statistics of the trained tokens, never in logits."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        attention: Attention,
        loss: Loss,
        logit_transform: LogitTransform,
    ) -> None:
        super().__init__(causal_lm, attention=attention)
        self.loss: Loss = loss
        self.logit_transform = logit_transform
        """Scale and cap that the family applies to its logits."""
        self.routers = follow_routers(causal_lm)
        self.logit_range: LogitRange | None = None
        """Range of the logits in passes that record a gradient; None if it is not asked for."""

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        trained_positions_N: Tensor,
        labels_N: Tensor,
        document_lengths: Sequence[int],
        logprob_gradient: float | None = None,
    ) -> MicroBatchStatistics:
        """Log-probabilities of ``labels_N`` and entropies, each read at its position; shape N,
        float32 or wider.

        ``logprob_gradient`` as in ``token_statistics``.
        """
        routers = self.routers if torch.is_grad_enabled() else None
        if routers is not None:
            shared = self.attention.shared
            share = shared.layout_of(document_lengths).share_of(shared.rank)
            routers.begin(
                torch.from_numpy(share.documents_T).to(input_ids_T.device),
                documents=len(document_lengths),
                is_padded=share.padding_tokens > 0,
            )
        hidden_TE = self.hidden_states(input_ids_T, position_ids_T, document_lengths)
        hidden_NE = hidden_TE.index_select(0, trained_positions_N)
        del hidden_TE
        statistics = token_statistics(
            hidden_NE,
            self.head.weight,
            labels_N,
            loss=self.loss,
            transform=self.logit_transform,
            logprob_gradient=logprob_gradient,
            logit_range=self.logit_range if torch.is_grad_enabled() else None,
        )
        router_loss = None if routers is None else routers.loss(self.attention.shared.every)
        return MicroBatchStatistics(statistics.logprobs_N, statistics.entropies_N, router_loss)


class ScalarModel(Decoder):
    """A causal LM with one scalar per token instead of logits: a critic or reward model."""

    gives_scalars = True

    def __init__(self, causal_lm: PreTrainedModel, *, attention: Attention) -> None:
        vocabulary = cast(nn.Linear, causal_lm.get_output_embeddings())
        name = next(name for name, module in causal_lm.named_modules() if module is vocabulary)
        causal_lm.set_submodule(name, nn.Identity())
        causal_lm.config.tie_word_embeddings = False
        causal_lm.config.num_labels = 1  # the saved model loads as a sequence or token classifier
        super().__init__(causal_lm, attention=attention)
        self.replaced_head = name
        """Name of the head that files may have and this model does not."""
        self.score = nn.Linear(
            vocabulary.in_features, 1, bias=False, device="meta", dtype=vocabulary.weight.dtype
        )
        self.parameter_count += vocabulary.in_features

    @property
    def architecture(self) -> str:
        """Name of the family's sequence classifier, or of its causal LM if there is none."""
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(
            self.causal_lm.config.model_type, super().architecture
        )

    @property
    def head(self) -> nn.Linear:
        """Projection from the hidden state to one scalar."""
        return self.score

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        positions_P: Tensor,
        document_lengths: Sequence[int],
    ) -> Tensor:
        """Scalar at each of ``positions_P``; shape P, float32 or wider."""
        hidden_TE = self.hidden_states(input_ids_T, position_ids_T, document_lengths)
        hidden_PE = hidden_TE.index_select(0, positions_P)
        del hidden_TE
        scalars_P = (hidden_PE @ self.head.weight.T)[:, 0]
        return scalars_P.to(torch.promote_types(scalars_P.dtype, torch.float32))
