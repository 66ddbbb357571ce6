"""Two ranks that share one sequence, in one micro-batch: Ulysses, a ring and torch's own context
parallelism, in one run; ``--ranks 4`` has four share it.

``python docs/results/context_parallel/two_ranks.py`` measures on two GPUs; ``--links left-out``
runs rank 0 of them alone, on one GPU: every kernel and every allocation is there, what crosses
a link is not. The other rank answers with what it was sent, so that losses mean nothing. Each case
is a process of its own for each rank. Those of one length live beside each other and take turns,
since a GPU's clock falls as it warms: a case that ran after the others would look slower. In a turn
one step is timed, after one that takes memory anew; then the others get it. ``two_ranks.json``
beside this file gets a row for each case, with what a trace predicted of it, by ``--predict trace``
(no GPU), before; ``--predict formula`` does without. ``--table`` only prints; ``--only`` names
cases. Predicted is the fullest rank's, the last one; traced is rank 0's own.

torch's: Hugging Face's model, FSDP2 over both ranks (float32, computed in bfloat16),
``context_parallel`` around cuDNN's attention, recomputation per layer, Liger's fused loss
(liger-kernel 0.8.5). TRL's (``--trl``): its SFTTrainer with its own loss, accelerate's FSDP2 and
context parallelism, layers recomputed. ``--layers`` shortens the model.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, NamedTuple

FILE = Path(__file__).with_suffix(".json")
GIB = 1024**3
TURNS = 3
EXPANDABLE = dict.fromkeys(
    ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
)
"""Variables of the allocator that every case has."""
TURN_S = 120
"""Seconds that a turn may take at the most, or the building of a model."""
LENGTHS = (32_768, 131_072, 262_144)


class Case(NamedTuple):
    """One contender at one length."""

    model: str
    layers: int
    length_tokens: int
    shared_by: str
    """ulysses, ring, torch or trl."""
    recompute: str
    links: str
    activations: str = "gpu"
    head_groups: int = 1
    ranks: int = 2

    @property
    def placed(self) -> str:
        """Where its activations lie, if not on the GPU, and its head groups."""
        grouped = f", {self.head_groups} head groups" if self.head_groups > 1 else ""
        return (", activations on the host" if self.activations == "host" else "") + grouped

    @property
    def name(self) -> str:
        """The case in words."""
        return (
            f"{self.model}, {self.layers} layers, {self.length_tokens} tokens, {self.shared_by}, "
            f"{self.recompute}{self.placed}, links {self.links}"
            + (f", {self.ranks} ranks" if self.ranks > 2 else "")
        )

    @property
    def is_ours(self) -> bool:
        """Whether the engine takes the step, so that a trace predicts it."""
        return self.shared_by in ("ulysses", "ring")


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--links", choices=("there", "left-out"), default="there")
    parser.add_argument(
        "--predict", choices=("trace", "formula"), help="predict so, measure nothing"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", nargs="+", help="words, one of which a case's name has")
    parser.add_argument("--host", action="store_true", help="also with activations on the host")
    parser.add_argument("--trl", action="store_true", help="also TRL's context parallelism")
    parser.add_argument("--ranks", type=int, default=2, help="that share the sequence")
    parser.add_argument("--gpu", default="H200-141GB", help="what predictions are for")
    parser.add_argument("--apart", action="store_true", help="one after the other, not in turns")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        _serve(Case(*json.loads(arguments.run)))
        return
    file = arguments.file
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    for length in () if arguments.table else arguments.lengths:
        cases = _cases(arguments, length)
        of_cases = [rows.setdefault(case.name, {"case": case._asdict()}) for case in cases]
        if arguments.predict:
            for case, row in zip(cases, of_cases, strict=True):
                if case.is_ours:
                    row["predicted"] = _predicted(case, arguments.gpu, arguments.predict)
        else:
            together = [(case,) for case in cases] if arguments.apart else [cases]
            done = (each for some in together for each in _measured(some, arguments.turns))
            for row, measured in zip(of_cases, done, strict=True):
                row["measured"] = measured
                file.write_text(json.dumps(rows, indent=1) + "\n")
        file.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


def _cases(arguments: argparse.Namespace, length: int) -> list[Case]:
    kinds = [
        (shared_by, recompute)
        for recompute in ("layer", "all-but-attention")
        for shared_by in ("ulysses", "ring", "torch")
        if (shared_by, recompute) != ("torch", "all-but-attention")
    ]
    model, layers, links = arguments.model, arguments.layers, arguments.links
    if arguments.trl:
        kinds.append(("trl", "layer"))
    cases = [Case(model, layers, length, *kind, links, ranks=arguments.ranks) for kind in kinds]
    if arguments.host:
        ours = [case for case in cases if case.is_ours]
        cases += [case._replace(activations="host") for case in ours]
        grouped = [case for case in ours if case.shared_by == "ulysses"]
        groups = 8 // arguments.ranks  # one key/value head each, of eight
        cases += [case._replace(activations="host", head_groups=groups) for case in grouped]
    words = arguments.only or [""]
    return [case for case in cases if any(word in case.name for word in words)]


def _measured(cases: Sequence[Case], turns: int) -> list[dict[str, Any]]:
    """What rank 0 of each case reports, or why it does not."""
    with TemporaryDirectory() as folder:
        contenders = [Contender(case, Path(folder, str(i))) for i, case in enumerate(cases)]
        try:
            for contender in contenders:
                contender.await_model()
            for _ in range(turns):
                for contender in contenders:
                    contender.take_turn()
            return [contender.report() for contender in contenders]
        finally:
            for contender in contenders:
                contender.end()


class Contender:
    """The processes of one case. One that fails is told, and does not end the others."""

    def __init__(self, case: Case, folder: Path) -> None:
        """Start them; they build their models beside each other."""
        folder.mkdir()
        self._failed: str | None = None
        command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(case)]
        store = {"HIGHWATER_STORE": str(folder / "store"), "WORLD_SIZE": str(case.ranks)}
        started = case.ranks if case.links == "there" else 1
        self._errors = [(folder / f"errors-{rank}").open("w+") for rank in range(started)]
        self._ranks = [
            subprocess.Popen(
                command,
                env=os.environ | EXPANDABLE | store | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank, errors in enumerate(self._errors)
        ]

    def await_model(self) -> None:
        """Wait until it is built."""
        self._answer()

    def take_turn(self) -> None:
        """Two steps, of which the second is timed."""
        self._ask("turn")

    def report(self) -> dict[str, Any]:
        """What rank 0 measured; ``failed`` where it could not."""
        answer = self._ask("report")
        return {"failed": self._failed} if answer is None else answer

    def end(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def _ask(self, what: str) -> dict[str, Any] | None:
        if self._failed is not None:
            return None
        with suppress(BrokenPipeError):  # a rank that is gone answers nothing below
            for rank in self._ranks:
                print(what, file=rank.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any] | None:
        """The next line of JSON from rank 0; its last words become ``failed`` where none comes."""
        told = self._ranks[0].stdout or ()
        late = Timer(TURN_S, self._ranks[0].kill)
        late.start()
        try:
            line = next((line for line in told if line.startswith(('{"', "{}"))), None)
        finally:
            late.cancel()
        if line is not None:
            return json.loads(line)
        self._errors[0].seek(0)
        self._failed = " ".join(self._errors[0].read().split())[-600:] or f"not in {TURN_S} s"
        self.end()
        return None


def spec_of(case: Case, folder: str) -> Any:
    """The trial of the case, of a model as deep as it says."""
    from highwater.model.model import load_model
    from highwater.nouns.layout import Layout
    from highwater.nouns.settings import Settings
    from highwater.nouns.trial import TrialSpec

    config = json.loads(Path(load_model(case.model).directory, "config.json").read_text())
    config["num_hidden_layers"] = case.layers
    for name in ("layer_types",):
        if name in config:
            config[name] = config[name][: case.layers]
    Path(folder, "config.json").write_text(json.dumps(config))
    model = load_model(folder)
    degrees = {f"{case.shared_by}_degree": case.ranks} if case.is_ours else {}
    layout = Layout(gpus=case.ranks, **degrees)
    return TrialSpec(
        model_name=case.model,
        model_directory=model.directory,
        config_digest=model.config_digest,
        device="cuda",
        layout=layout,
        settings=Settings(
            recompute=case.recompute,
            loss="chunked",
            allocator="expandable",
            accumulates=False,
            activations=case.activations,
            attention_head_groups=case.head_groups,
            token_budget_tokens=case.length_tokens // layout.context_degree,  # of one sequence
        ),
        length_tokens=case.length_tokens,
        micro_batches=1,
    )


def _predicted(case: Case, gpu: str, how: str) -> dict[str, Any]:
    """What the trace, or the formula alone, says of a whole trial on so many GPUs of this kind."""
    import highwater

    with TemporaryDirectory() as folder:
        spec = spec_of(case, folder)
        began = time.monotonic()
        (cell,) = highwater.predict(
            folder,
            gpus=f"{case.ranks}x{gpu}",
            length=case.length_tokens,
            ulysses=[spec.layout.ulysses_degree],
            ring=[spec.layout.ring_degree],
            recompute=case.recompute,
            activations=case.activations,
            attention_head_groups=case.head_groups,
            loss="chunked",
            allocator="expandable",
            micro_batches=1,
            offload=False,
            exact=how == "trace",
        ).cells
        found = {
            "formula_allocated_bytes": cell.footprint.allocated_bytes,
            "device_used_bytes": cell.device_used_bytes,
            "within_s": round(time.monotonic() - began, 1),
        }
        if cell.replayed is None:
            return found
        last, first = (_traced_peak_bytes(spec, rank) for rank in (case.ranks - 1, 0))
    return found | {
        "allocated_bytes": cell.replayed.peak_allocated_bytes,
        "allocated_by_rank_0_bytes": cell.replayed.peak_allocated_bytes - last + first,
        "reserved_bytes": cell.replayed.peak_reserved_bytes,
    }


def _traced_peak_bytes(spec: Any, rank: int) -> int:
    """What is alive at a rank's peak by its own trace; predictions are of the fullest rank."""
    from highwater.nouns.codec import from_json, to_json
    from highwater.nouns.events import Allocate, EventLog, Free, TraceOrder

    with TemporaryDirectory() as folder:
        order, target = Path(folder, "order.json"), Path(folder, "events.json")
        order.write_text(to_json(TraceOrder(spec=spec, rank=rank)))
        words = ["-m", "highwater.engine.tracer.tracer", str(order), str(target)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, *words], env=os.environ | hidden, check=True)
        log = from_json(target.read_bytes(), EventLog)
    sizes: dict[int, int] = {}
    alive = most = 0
    for event in log.events:
        if isinstance(event, Allocate):
            sizes[event.id] = event.bytes
            alive += event.bytes
            most = max(most, alive)
        elif isinstance(event, Free):
            alive -= sizes.pop(event.id)
    return most


def _serve(case: Case) -> None:
    """Be one rank: build, then take turns as they are asked for, and report at the end."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    import torch
    import torch.distributed as dist

    from highwater.engine.parallel import mesh as process_mesh
    from process_environment import environment

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if case.links == "there":
        process_mesh.join(device)
    else:
        leave_links_out()
    times: list[float] = []
    losses: list[str] = []
    with TemporaryDirectory() as folder:
        spec = spec_of(case, folder)
        step = {"torch": _torchs, "trl": TrlStep}.get(case.shared_by, ours)(spec, device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _say({})
        for asked in sys.stdin:
            if asked.strip() == "report":
                break
            for _ in range(2):
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                losses.append(str(float(step())))
                torch.cuda.synchronize(device)
                seconds = time.perf_counter() - began
            seconds = getattr(step, "last_step_s", seconds)
            times.append(seconds)
            torch.cuda.empty_cache()
            _say({"step_time_s": seconds})
    _say(
        {
            "step_times_s": times,
            "losses": losses,
            "allocated_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.max_memory_reserved(device),
            "retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
            "environment": environment(),
        }
    )
    if case.links == "there":
        dist.barrier()
    os._exit(0)


def leave_links_out() -> None:
    """Be rank 0 of two, of which the other answers at once, with what it was sent.

    Memory that nobody writes may hold NaN, and a GPU computes faster on those: its clock follows
    its power, and its power the bits that change.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def all_to_all(result: Any, source: Any, **_: Any) -> None:
        result.copy_(source)

    def batch(transfers: Any) -> list[Any]:
        sent, received = ([t.tensor for t in transfers if t.op is op] for op in (isend, irecv))
        for there, here in zip(sent, received, strict=True):
            here.copy_(there)
        return []

    isend, irecv = dist.isend, dist.irecv
    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def ours(spec: Any, device: Any) -> Any:
    """A step of the engine's."""
    import torch

    from highwater.engine.attention.dense import select_kernel
    from highwater.engine.data.batches import batches
    from highwater.engine.parallel import mesh as process_mesh
    from highwater.engine.training.rank_context import RankContext
    from highwater.engine.training.rank_run import assemble, rehearsal_batch, rehearse
    from highwater.engine.training.step import train_step
    from highwater.model.model import load_model

    shape = load_model(spec.model_directory).shape
    mesh = process_mesh.shard_mesh(spec.layout, device)
    heads = {name: getattr(shape, name) for name in ("query_heads", "kv_heads", "head_dim")}
    context = RankContext(
        device=device,
        kernel=select_kernel(device, torch.bfloat16, **heads),
        mesh=mesh,
        shared=process_mesh.sequence_groups(spec.layout, mesh),
        nccl_bytes=0,
    )
    training = assemble(spec, context)
    rehearse(training, rehearsal_batch(spec, context))
    source = batches(spec, vocab_size=training.policy.causal_lm.config.vocab_size, data_rank=0)

    def step() -> Any:
        return train_step(training, [context.share_of(next(source))], enter=lambda _: None)[0]

    return step


def _torchs(spec: Any, device: Any) -> Any:
    """A step of Hugging Face's model, with what PyTorch has for it."""
    import torch
    import torch.nn.functional as F
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    def attend(module: Any, query: Any, key: Any, value: Any, _: Any, **options: Any) -> Any:
        groups = module.num_key_value_groups
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options["scaling"]
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("torchs", attend)
    config = AutoConfig.from_pretrained(spec.model_directory, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="torchs"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ranks",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02) if "norm" not in name else parameter.fill_(1)
    model.train()
    # the head's weight is the root's, and gathered while the root's forward runs: so is the loss
    of_tokens, head = LigerFusedLinearCrossEntropyLoss(), model.lm_head
    inside: dict[str, Any] = {}
    head.forward = lambda hidden: of_tokens(
        head.weight, hidden.flatten(0, 1), inside["labels"].flatten()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    random = torch.Generator(device=device).manual_seed(0)
    length, vocabulary = spec.length_tokens, config.vocab_size

    def step() -> Any:
        ids = torch.randint(vocabulary, (1, length), generator=random, device=device)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(length, device=device)[None]
        buffers = [ids, labels, positions]
        with (
            context_parallel(
                mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ),
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        ):
            inside["labels"] = labels
            loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


class TrlStep:
    """TRL's steps: its trainer takes two of them in the first call, as one loop."""

    def __init__(self, spec: Any, device: Any) -> None:
        import torch
        from accelerate.utils import ParallelismConfig
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            PreTrainedTokenizerFast,
            TrainerCallback,
        )
        from trl import SFTConfig, SFTTrainer

        config = AutoConfig.from_pretrained(spec.model_directory, local_files_only=True)
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))  # noqa: S106 - a word, no secret
        ends = dict.fromkeys(("eos_token", "pad_token"), "<end>")
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (8, spec.length_tokens), generator=random)
        layers = type(model.model.layers[0]).__name__
        ranks = int(os.environ["WORLD_SIZE"])
        # accelerate asks for them and takes the group that is there
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        outer, self._losses = self, []

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize(device)
                self.began = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize(device)
                outer.last_step_s = time.perf_counter() - self.began

            def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
                outer._losses += [logs["loss"]] if logs and "loss" in logs else []

        self._trainer = SFTTrainer(
            model,
            args=SFTConfig(
                output_dir=str(Path(spec.model_directory) / f"trl-{os.environ['RANK']}"),
                max_steps=2,
                per_device_train_batch_size=1,
                learning_rate=1e-5,
                optim="adamw_torch_fused",
                bf16=True,
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                gradient_checkpointing=False,  # FSDP's own below
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                fsdp=True,
                fsdp_config={
                    "version": 2,
                    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "transformer_layer_cls_to_wrap": [layers],
                    "reshard_after_forward": True,
                    "activation_checkpointing": True,
                    "cpu_ram_efficient_loading": False,
                },
                parallelism_config=ParallelismConfig(cp_size=ranks),
            ),
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **ends),
            callbacks=[Clock()],
        )

    def __call__(self) -> float:
        """The loss of the last step taken."""
        if not self._losses:
            self._trainer.train()
        return self._losses[-1]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One row a case."""
    head = (
        "| tokens | layers | shared by | recomputed | links | step s | to Ulysses | allocated GiB "
        "| traced | predicted | reserved GiB | predicted |\n|" + "---|" * 12 + "\n"
    )
    lines: list[str] = []
    for row in rows.values():
        case, measured = Case(**row["case"]), row.get("measured", {})
        times = measured.get("step_times_s")
        plain = case._replace(
            shared_by="ulysses", recompute="layer", activations="gpu", head_groups=1
        )
        beside = rows.get(plain.name, {})
        base = beside.get("measured", {}).get("step_times_s")
        seconds = median(times) if times else None
        foretold = row.get("predicted", {})
        cells = (
            f"{case.length_tokens:,}",
            str(case.layers),
            case.shared_by,
            case.recompute + case.placed,
            case.links,
            f"{seconds:.2f}" if seconds else measured.get("failed", "-"),
            f"{median(base) / seconds:.3f}" if seconds and base else "-",
            _gib(measured.get("allocated_bytes")),
            _gib(foretold.get("allocated_by_rank_0_bytes")),
            _gib(foretold.get("allocated_bytes")),
            _gib(measured.get("reserved_bytes")),
            _gib(foretold.get("reserved_bytes")),
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(lines)


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.3f}"


if __name__ == "__main__":
    main()
