"""The grammar of ``highwater``: its commands and their flags. Those that set a request are written
from the settings' declarations.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from highwater.cli.flags import add_settings, add_trained
from highwater.cli.parser import Parser, parse_strictly
from highwater.emit.emitted import Target
from highwater.errors import UsageError
from highwater.spec.attention_bench import DIRECTIONS, IMPLEMENTATIONS, BenchDtype
from highwater.spec.declaration import CommandName
from highwater.spec.declared_settings import DECLARED
from highwater.spec.settings import TRAINED_OTHERWISE
from highwater.spec.trainer import OURS, TRAINERS
from highwater.spec.trial import Device
from highwater.version import __version__

_COMMANDS = {
    "find": "the longest context that a model trains with here, by real trials",
    "try": "one trial of one length",
    "predict": "the longest context of every rung on GPUs that need not be here, in a second; "
    "nothing is run",
    "guide": "the simplest settings for each length, from studies, known capacities and "
    "predictions: a page for the team",
    "recommend": "the simplest settings that train a length on some GPUs, why simpler ones do "
    "not, what the next would buy",
    "emit": "the recommended settings as another trainer's configuration, or a folder to take away",
    "show": "a study: as a table, in the published layout, as its final lines, or as JSON",
    "report": "a page about one study: trials, brackets, memory, predictions, failures, commands; "
    "as HTML, Markdown, CSV or JSON",
    "profile": "what was alive in a PyTorch memory snapshot, at its peak or when memory ran out: "
    "of any program; two side by side",
    "models": "the models of the catalog: names, ids on the Hub, sizes, native lengths",
    "gpus": "the kinds of GPUs of the catalog: memory, bf16 FLOP/s, and where each figure is from",
    "doctor": "GPUs, versions, free memory, and what to do",
    "bench": "attention: the longest sequence that each attention holds here, what it costs there, "
    "and a report",
    "schema": "the JSON Schema of --config files",
    "compare-search": "trials that each search method takes to find the capacities of a known "
    "table",
}
_EXAMPLES = {
    "find": "highwater find Qwen3-0.6B",
    "try": "highwater try Qwen3-0.6B --length 32k",
    "predict": "highwater predict Qwen3-8B --gpus 4xA100-80GB",
    "guide": "highwater guide --predict Qwen3-8B --gpus 4xA100-80GB",
    "recommend": "highwater recommend Qwen3-8B --gpus 4xH20-96GB --length 64k",
    "emit": "highwater emit --for trinity Qwen3-8B --gpus 8xH20-96GB --rollout-gpus 2 --length 32k",
    "profile": "highwater profile snapshot.pickle",
    "models": "highwater models qwen3",
    "gpus": "highwater gpus h100",
    "bench": "highwater bench attention --device cpu",
    "compare-search": "highwater compare-search capacities.csv",
}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What was typed after ``highwater``. Raises UsageError, with the nearest word that works."""
    parser, commands = _parsers()
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = get_close_matches(words[0], commands, n=1, cutoff=0.4)
        raise UsageError(
            f"there is no command {words[0]!r}",
            hint=f"use `{commands[near[0] if near else 'find'].example}`",
        )
    arguments = parse_strictly(
        commands[words[0]] if words and words[0] in commands else parser, words, whole=parser
    )
    arguments.command_line = ("highwater", *words)
    return arguments


def usage() -> str:
    """The help of ``highwater`` itself."""
    return _parsers()[0].format_help()


def commands() -> dict[str, Parser]:
    """The grammar of each command, by its name."""
    return _parsers()[1]


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="highwater",
        example="highwater find Qwen3-0.6B",
        description="The longest context you can train a model with, on these GPUs, and with "
        "which settings.",
    )
    parser.add_argument("--version", action="version", version=f"highwater {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands = {
        name: subparsers.add_parser(
            name,
            help=text,
            description=f"{name}: {text}",
            example=_EXAMPLES.get(name, f"highwater {name}"),
        )
        for name, text in _COMMANDS.items()
    }
    for name, add_flags in _FLAGS.items():
        add_flags(commands[name])
    return parser, commands


def _find_flags(parser: Parser) -> None:
    _model_and_config(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration that asks the same, and exit",
    )
    add_settings(parser, "find", "trial", heading="a trial")
    add_settings(parser, "find", "lengths", "search", heading="the search")
    _hyperparameters(parser, "find")


def _try_flags(parser: Parser) -> None:
    _model_and_config(parser)
    parser.add_argument(
        "--length", metavar="TOKENS", required=True, help="tokens of one sequence, for example 32k"
    )
    add_settings(parser, "try", "trial", heading="the trial")
    _hyperparameters(parser, "try")


def _hyperparameters(parser: Parser, command: CommandName) -> None:
    add_settings(parser, command, "optimizer", heading="the optimizer, which changes no memory")
    add_settings(
        parser,
        command,
        "objective",
        heading="what --objective grpo, ppo and dpo weigh and clip, which changes no memory",
    )


def _predict_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser)
    parser.add_argument(
        "--length", metavar="TOKENS", help="turn it round: which rungs fit this length"
    )
    _basis_flags(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="bytes by term at the peak; with --exact tensors by operator",
    )
    parser.add_argument(
        "--against",
        metavar="CSV",
        help="compare with known capacities: gpu, settings, gpus, sp, model, max_model_len",
    )
    add_settings(parser, "predict", "trial", "lengths", "search", heading="settings and lengths")


def _basis_flags(parser: Parser) -> None:
    """What a prediction is made from, besides the formula."""
    parser.add_argument(
        "--exact",
        action="store_true",
        help="trace the engine's own steps on fake tensors, minutes instead of milliseconds",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="with --exact: write every allocation for PyTorch's viewer, "
        "https://pytorch.org/memory_viz",
    )
    parser.add_argument(
        "--calibrate",
        metavar="STUDY",
        nargs="+",
        action="extend",
        default=[],
        help="studies that `highwater find` wrote: intervals are learned from their trials too",
    )
    parser.add_argument(
        "--constants",
        metavar="FILE",
        help="what `highwater doctor --measure --json` printed on such GPUs: context, cuBLAS and "
        "NCCL as read there",
    )


def _guide_flags(parser: Parser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a study's file, a CSV of known capacities (gpu, settings, gpus, sp, model, "
        "max_model_len; 0: nothing fits, empty: "
        "unknown), or the .json of `highwater predict --json`",
    )
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument(
        "--predict",
        metavar="MODEL",
        help="models whose capacities are predicted by formula",
        **several,
    )
    _kind_of_gpus(parser, "4xA100-80GB 8xH100-80GB", **several)
    _trainer(parser)
    parser.add_argument(
        "--sequences-per-micro-batch",
        metavar="N",
        type=int,
        help="what is predicted is of so many; 2: as `recommend` by default; default: as `predict`",
    )
    for name, what, default in (
        ("ulysses", "these ulysses degrees", "as `predict`"),
        ("ring", "these ring degrees", "no ring"),
        ("copies", "so many copies of the states", "one"),
    ):
        text = f"what is predicted has {what}; default: {default}"
        parser.add_argument(f"--{name}", metavar="N", type=int, help=text, **several)
    add_trained(parser, TRAINED_OTHERWISE)
    _output(parser, "a page (.html), or Markdown (.md); default: print it")
    parser.add_argument("--json", action="store_true", help="print its rows as one JSON document")


def _recommend_flags(parser: Parser) -> None:
    _gpus_that_need_not_be_here(parser)
    _trainer(parser)
    _length_and_rollout(parser)
    _studies(parser)
    parser.add_argument(
        "--list",
        dest="list_",
        action="store_true",
        help="every rung that fits, with what each costs",
    )
    add_settings(parser, "recommend", "trial", "lengths", "search", heading="settings")


def _emit_flags(parser: Parser) -> None:
    parser.add_argument(
        "--for", dest="for_", choices=get_args(Target), required=True, help="whose configuration"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write all files into a folder, with a script that starts the training and a page of "
        "what to check; nothing that is there is written over",
    )
    _gpus_that_need_not_be_here(parser)
    _length_and_rollout(parser)
    _studies(parser)
    add_settings(parser, "emit", "trial", "lengths", "search", heading="settings")


def _studies(parser: Parser) -> None:
    parser.add_argument(
        "--study",
        dest="studies",
        metavar="STUDY",
        nargs="+",
        action="extend",
        default=[],
        help="studies that `highwater find` wrote: what they measured is taken, the rest predicted",
    )


def _length_and_rollout(parser: Parser) -> None:
    parser.add_argument(
        "--length", metavar="TOKENS", help="tokens of one sequence, for example 64k"
    )
    parser.add_argument(
        "--rollout-gpus",
        metavar="K",
        type=int,
        default=0,
        help="of the GPUs, those that roll out: the others are the trainer's",
    )


def _trainer(parser: Parser) -> None:
    parser.add_argument(
        "--trainer",
        choices=tuple(TRAINERS),
        default=OURS,
        help=f"whose step is predicted (default: {OURS})",
    )


def _gpus_that_need_not_be_here(parser: Parser) -> None:
    _model(parser)
    _json(parser)
    _kind_of_gpus(parser, "4xA100-80GB")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="a machine's memory; default: not a limit"
    )
    parser.add_argument(
        "--reserved",
        metavar="SIZE",
        default="0",
        help="what others take of each GPU, for example 20GiB",
    )


def _kind_of_gpus(parser: Parser, example: str, **several: Any) -> None:
    text = (
        f"for example {example}, or 2x8xH100-80GB of two machines; default: this machine's; "
        "`highwater gpus` lists the kinds"
    )
    parser.add_argument("--gpus", dest="cluster", metavar="[[M x] N x]KIND", help=text, **several)
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one GPU as its driver reports it, for a kind of no catalog",
    )


def _show_flags(parser: Parser) -> None:
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="a study's file; default: the newest one"
    )
    parser.add_argument(
        "--as",
        dest="as_",
        choices=("table", "published", "lines", "json"),
        default="table",
        help="how to show it",
    )
    _newest_study(parser)


def _report_flags(parser: Parser) -> None:
    parser.add_argument(
        "study", nargs="?", metavar="STUDY", help="a study's file; default: the newest one"
    )
    _output(parser, ".html, .md, .csv or .json; default: print Markdown")
    _json(parser)
    _newest_study(parser)


def _profile_flags(parser: Parser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a snapshot that `torch.cuda.memory._dump_snapshot` wrote, a timeline of "
        "`highwater predict --exact`, or a folder of ranks' snapshots, of which the fullest is "
        "shown; two: side by side",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page into a new file: timeline and flame graph"
    )
    _json(parser)


def _model_and_config(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags override it")
    _json(parser)


def _model(parser: Parser) -> None:
    model = DECLARED["model"]
    parser.add_argument(model.name, nargs="?", metavar="MODEL", help=model.help)


def _json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _output(parser: Parser, forms: str) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help=f"write it into a new file: {forms}")


def _newest_study(parser: Parser) -> None:
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        default="./logs",
        help="where to look for the newest study (default: ./logs)",
    )


def _catalog_flags(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="list those whose names have it; default: all"
    )
    _json(parser)


def _doctor_flags(parser: Parser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="read on the GPUs what libraries take of their memory, half a minute each count",
    )
    _json(parser)


def _bench_flags(parser: Parser) -> None:
    parser.add_argument(
        "subject", choices=("attention",), metavar="SUBJECT", help="what is measured: attention"
    )
    parser.add_argument(
        "--device", choices=get_args(Device), help="where; default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each GPU, or of each process on the CPU, its runtime included: 8GiB on a "
        "big card stands in for a small one; default: all, on the CPU what is free",
    )
    parser.add_argument(
        "--gpus",
        metavar="N",
        type=int,
        default=1,
        help="from 2 on also DataParallel, ring and Ulysses; on the CPU processes (default: 1)",
    )
    parser.add_argument(
        "--heads", metavar="N", type=int, default=2, help="query heads (default: 2)"
    )
    parser.add_argument(
        "--kv-heads", metavar="N", type=int, help="key and value heads; default: as many"
    )
    parser.add_argument(
        "--head-dim", metavar="N", type=int, default=32, help="size of a head (default: 32)"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(BenchDtype),
        help="default: bf16, on the CPU fp32, on GPUs without bf16 fp16",
    )
    parser.add_argument(
        "--same-qkv",
        action="store_true",
        help="queries, keys and values are one tensor, counted once: the published setting",
    )
    parser.add_argument(
        "--lengths",
        metavar="TOKENS",
        nargs="+",
        help="measure at these lengths alone; default: doubling, then bisection to the longest",
    )
    parser.add_argument(
        "--max-length",
        metavar="TOKENS",
        help="longest length to try; default: 16m tokens, on the CPU 4k",
    )
    parser.add_argument(
        "--implementations",
        metavar="NAME",
        nargs="+",
        default=[],
        help=f"who takes part, by name or family: {', '.join(IMPLEMENTATIONS)}; default: all",
    )
    parser.add_argument("--only", choices=DIRECTIONS, help="one direction; default: both")
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="longest time of one pass; default: 60s, on the CPU 10s",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the report: JSON, Markdown, HTML and plots; default: a new one below "
        "./logs/attention",
    )
    parser.add_argument(
        "--allow-busy", action="store_true", help="also on GPUs that somebody else uses"
    )
    _json(parser)


def _compare_search_flags(parser: Parser) -> None:
    parser.add_argument(
        "table", metavar="CSV", help="columns gpu, settings, gpus, sp, model, max_model_len"
    )
    _json(parser)


_FLAGS: Mapping[str, Callable[[Parser], None]] = {
    "find": _find_flags,
    "try": _try_flags,
    "predict": _predict_flags,
    "guide": _guide_flags,
    "recommend": _recommend_flags,
    "emit": _emit_flags,
    "show": _show_flags,
    "report": _report_flags,
    "profile": _profile_flags,
    "models": _catalog_flags,
    "gpus": _catalog_flags,
    "doctor": _doctor_flags,
    "bench": _bench_flags,
    "compare-search": _compare_search_flags,
}
"""The function that adds the flags of each command, by the command's name; ``schema`` has none."""
