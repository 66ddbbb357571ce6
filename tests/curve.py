"""Two ways to train a tiny model on the same text: our engine's, and Hugging Face's."""

from pathlib import Path
from typing import cast

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine_models import built, packed
from highwater.engine.attention.dense import select_kernel
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.training.optimizers import make_optimizer
from highwater.engine.training.step import Training, train_step
from highwater.nouns.hyperparameters import Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.settings import Settings
from tiny_models import sized

STEPS = 200
HYPERPARAMETERS = Hyperparameters(learning_rate=1e-4)
"""At 1e-3 this model amplifies the rounding of the first steps a thousandfold: the curves would
tell of chaos, not of gradients."""
TEXT = Path(__file__).parents[1] / "LICENSE"
"""Real text, 11 KB of it, a byte a token."""
DOCUMENT_TOKENS = (64, 33, 95)
MICRO_BATCHES = 2


def save_model(folder: Path, *, times: int = 1) -> str:
    """A tiny model for bytes, in float32, or one so many times as wide."""
    torch.manual_seed(0)
    sizes = sized(256, 32 * times, 2, (4, 2), intermediate_size=64 * times, head_dim=32)
    config = Qwen3Config(**sizes, max_position_embeddings=256, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def text_batches() -> list[list[list[Tensor]]]:
    """By step and micro-batch: documents of several lengths, cut from the text, over and over."""
    ids = torch.tensor(list(TEXT.read_bytes()))
    start, steps = 0, []
    for _ in range(STEPS):
        micro_batches = []
        for _ in range(MICRO_BATCHES):
            documents = []
            for length in DOCUMENT_TOKENS:
                documents.append(ids[start : start + length])
                start = (start + length) % (len(ids) - max(DOCUMENT_TOKENS))
            micro_batches.append(documents)
        steps.append(micro_batches)
    return steps


def our_curve(
    directory: str,
    device: torch.device,
    compute_dtype: torch.dtype,
    settings: Settings | None = None,
    *,
    steps: int = STEPS,
) -> Tensor:
    """The loss of so many steps; packed, sharded, recomputed, chunked. A process group has to be
    there. Of ``settings`` it has the optimizer, and what parameters are kept in.
    """
    settings = settings or Settings()
    mesh = process_mesh.shard_mesh(Layout(), device)
    model = built(
        directory,
        mesh,
        compute_dtype,
        kernel=select_kernel(device, compute_dtype, query_heads=4, kv_heads=2, head_dim=32),
        length_tokens=128,
        loss="chunked",
        master_dtype=torch.bfloat16 if settings.parameters == "bf16" else torch.float32,
    )
    keeps = settings.keeps_gradients
    training = Training(
        policy=model,
        optimizer=make_optimizer(
            model, HYPERPARAMETERS, name=settings.optimizer, keeps_gradients=keeps
        ),
        mesh=mesh,
        hyperparameters=HYPERPARAMETERS,
        keeps_gradients=keeps,
    )
    losses = []
    for micro_batches in text_batches()[:steps]:
        if not settings.accumulates:
            micro_batches = [[ids for documents in micro_batches for ids in documents]]
        step = [packed(*documents) for documents in micro_batches]
        losses.append(float(train_step(training, step)[0]))
    return torch.tensor(losses, dtype=torch.float64)


def hugging_face_curve(directory: str, device: torch.device, compute_dtype: torch.dtype) -> Tensor:
    """The loss of every step: autocast, one document at a time, nothing packed."""
    model = (
        AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
        .to(device)
        .train()
    )
    decays = transformers.Trainer.get_decay_parameter_names(cast(transformers.Trainer, None), model)
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if name in decays],
            "weight_decay": HYPERPARAMETERS.weight_decay,
        },
        {
            "params": [p for name, p in model.named_parameters() if name not in decays],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=HYPERPARAMETERS.learning_rate)
    losses = []
    for micro_batches in text_batches():
        documents = [ids for micro_batch in micro_batches for ids in micro_batch]
        trained = sum(len(ids) - 1 for ids in documents)
        total = 0.0
        for ids in documents:
            row = ids[None].to(device)
            with torch.autocast(
                device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16
            ):
                loss = (
                    model(input_ids=row, labels=row, use_cache=False).loss
                    * (len(ids) - 1)
                    / trained
                )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), HYPERPARAMETERS.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return torch.tensor(losses, dtype=torch.float64)
