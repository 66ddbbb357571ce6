"""Requests: flags, files and keywords are read in one place; each mistake is answered."""

import ast
import re
from itertools import pairwise

import msgspec
import pytest
import yaml
from studies import report_of

import highwater
from highwater.cli.flags import typed_values
from highwater.cli.grammar import commands, foreign_words, parse
from highwater.errors import UsageError
from highwater.model.held_bytes import host_state_bytes, step_flops
from highwater.model.model import load_model
from highwater.nouns.hyperparameters import DEFAULTS, NAMES, Hyperparameters
from highwater.nouns.layout import Layout
from highwater.nouns.objective import TRAITS, without_reference
from highwater.nouns.request import TOPICS, Request, request_from, taken_by
from highwater.nouns.settings import Settings
from highwater.nouns.study import Study
from highwater.pages.study_commands import find_words, try_words
from highwater.pages.study_page import question_table
from highwater.recommendation.candidates import query_of_prediction
from highwater.search.cell_outcomes import SearchEvent, TrialFinished
from places import ROOT, question_of
from tables import table
from trial_specs import answers_among

SOLD_BY = "memory size '80GB' is what cards are sold by, and their drivers report less"


@pytest.mark.parametrize(
    ("values", "said", "hint"), table("request", "a_mistake_is_told_in_the_users_words")
)
def test_a_mistake_is_told_in_the_users_words_with_the_nearest_thing_that_works(values, said, hint):
    with pytest.raises(UsageError, match=re.escape(said)) as refusal:
        request_from({"model": "Qwen3-0.6B", **values})
    assert hint in refusal.value.hint


@pytest.mark.parametrize("name", Request.__struct_fields__)
def test_a_wrong_type_of_any_setting_is_answered_with_a_line_or_a_keyword_that_works(name):
    good = {"model": "Qwen3-0.6B"}
    with pytest.raises(UsageError) as refusal:
        request_from({**good, name: {"a": 1}}, config_file="study.yaml")
    assert refusal.value.problem.startswith(f"study.yaml: {name} ")
    line = refusal.value.hint.split("`")[1]
    if line == "highwater schema":  # of some words none is like it, and the problem names them
        assert " is not one of " in refusal.value.problem
        return
    request_from({**good, **yaml.safe_load(line)}, config_file="study.yaml")
    with pytest.raises(UsageError) as refusal:
        request_from({**good, name: {"a": 1}}, keywords=True)
    keyword, value = refusal.value.hint.split("`")[1].split("=")
    request_from({**good, keyword: ast.literal_eval(value)}, keywords=True)


@pytest.mark.parametrize("value", [1, [1], (1,)])
@pytest.mark.parametrize("origin", [{}, {"config_file": "study.yaml"}], ids=str)
def test_one_number_is_a_list_of_one(value, origin):
    request = request_from({"model": "Qwen3-0.6B", "gpus": value, "ulysses": value}, **origin)
    assert (request.gpus, request.ulysses) == ((1,), (1,))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory", "80GB", SOLD_BY),
        ("headroom", "some", "headroom: 'some' is not a memory size"),
        ("start_length", "1", "start_length: a start length of 1 token"),
        ("timeout", "soon", "timeout: 'soon' is not a time"),
        ("gpus", 0, "gpus is 0"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_key_or_its_keyword(name, value, said):
    with pytest.raises(UsageError) as in_a_file:
        request_from({"model": "Qwen3-0.6B", name: value}, config_file="study.yaml")
    assert in_a_file.value.problem == f"study.yaml: {said}"
    with pytest.raises(UsageError) as in_python:
        request_from({"model": "Qwen3-0.6B", name: value}, keywords=True)
    assert in_python.value.problem == said
    assert "--" not in in_a_file.value.hint + in_python.value.hint


@pytest.mark.parametrize(
    ("origin", "hint"),
    [
        ({}, "--memory 80GiB"),
        ({"config_file": "study.yaml"}, "memory: 80GiB"),
        ({"keywords": True}, "memory='80GiB'"),
    ],
)
def test_a_memory_without_its_unit_is_answered_with_it_as_the_user_spells_it(origin, hint):
    with pytest.raises(UsageError) as refusal:
        request_from({"model": "Qwen3-0.6B", "memory": "80"}, **origin)
    assert refusal.value.hint == f"give the unit: `{hint}`"


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize(
    ("origin", "names"),
    [
        ({}, ("--sequences-per-micro-batch", "--token-budget")),
        ({"config_file": "study.yaml"}, ("sequences_per_micro_batch", "token_budget")),
        ({"keywords": True}, ("sequences_per_micro_batch", "token_budget")),
    ],
)
def test_a_token_budget_beside_a_number_of_sequences_is_refused(origin, names, sequences):
    both = {"model": "Qwen3-0.6B", "token_budget": "64k", "sequences_per_micro_batch": sequences}
    with pytest.raises(UsageError, match=names[0]) as refusal:
        request_from(both, **origin)
    assert tuple(refusal.value.hint.split("`")[1::2]) == names
    for left_out in names:
        name = left_out.removeprefix("--").replace("-", "_")
        request_from({key: value for key, value in both.items() if key != name}, **origin)


def test_the_question_of_one_micro_batch_is_another_one_whose_rungs_say_so():
    one, several = question_of(micro_batches=1), question_of()
    assert one.key != several.key
    assert question_of(micro_batches=2).key == several.key
    assert not any(cell.settings.accumulates for cell in one.cells)
    assert all(cell.settings.accumulates for cell in question_of(micro_batches=4).cells)
    assert all("one micro-batch" in cell.label for cell in one.cells)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_the_commands_of_a_study_name_its_micro_batches_once(micro_batches):
    question = question_of(micro_batches=micro_batches)
    spec = question.trial(question.cells[0], 8192)
    for words in (find_words(question), try_words(spec, question.model)):
        assert words.count("--micro-batches") == (micro_batches != 2)
        again = request_from(typed_values(parse(words[1:])))
        assert (again.micro_batches, again.accumulates) == (micro_batches, micro_batches > 1)


def test_settings_against_the_count_are_refused_and_a_guide_asks_for_one_again():
    question = question_of(micro_batches=1)
    spec = question.trial(question.cells[0], 8192)
    for wrong in ({"micro_batches": 2}, {"settings": Settings()}):
        with pytest.raises(UsageError, match="added up"):
            msgspec.structs.replace(spec, **wrong).__post_init__()
    found = highwater.predict("Qwen3-1.7B", gpus="1xH200-141GB", micro_batches=1)
    query = query_of_prediction(found)
    assert ("micro_batches", 1) in query.settings
    assert ("--micro-batches", "1") in pairwise(query.words(gpus=1, length_tokens=8192))


def test_a_search_from_python_answers_every_cell_and_can_be_followed(tmp_path):
    heard: list[SearchEvent] = []
    asked = {"gpus": [1, 2], "memory": "80GiB", "device": "cuda", "dry_run": True}
    asked["study"] = str(tmp_path / "s.jsonl")
    study = highwater.find("Qwen3-0.6B", **asked, on_event=heard.append)
    assert study.complete
    assert answers_among(heard) == list(study.answers)
    assert sum(isinstance(event, TrialFinished) for event in heard) == len(study.trials)
    recorded = highwater.open_study(tmp_path / "s.jsonl")
    assert msgspec.structs.replace(recorded, notes=study.notes) == study


NUMBERS = [name for name in NAMES if name != "kl_estimator"]
CRITIC = {"objective": "ppo", "critic": True, "entropy": "full"}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.1])
def test_a_number_out_of_its_range_is_refused_with_one_that_works(name, value):
    said = f"{name.replace('_', ' ')} is {value}, and has to be"
    with pytest.raises(UsageError, match=said) as refused:
        request_from({"model": "tiny", name: str(value)})
    flag, works = refused.value.hint.removeprefix("for example ").strip("`").split()
    assert flag == f"--{name.replace('_', '-')}"
    assert getattr(request_from({"model": "tiny", name: works}), name) == DEFAULTS[name]
    with pytest.raises(UsageError):
        Hyperparameters(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("adam_beta1", 1.0), ("adam_beta2", 1.5), ("adam_epsilon", 0.0), ("dual_clip", 1.0)),
        *(("clip_ratio_low", 1.01), ("value_clip", 0.0), ("discount", 1.01), ("gae_lambda", 2.0)),
        *(("dpo_beta", 0.0), ("dual_clip", 0.5)),
    ],
)
def test_the_ends_of_ranges_are_as_what_uses_them_needs(name, value):
    """0 switches off what can be."""
    with pytest.raises(UsageError, match="has to be"):
        Hyperparameters(**{name: value})
    off = ("weight_decay", "max_grad_norm", "dual_clip", "kl_coefficient", "learning_rate")
    assert Hyperparameters(**dict.fromkeys(off, 0.0)).weight_decay == 0


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_a_file_may_write_an_exponent_without_a_dot(text):
    said = {"model": "tiny", **yaml.safe_load(f"learning_rate: {text}")}
    assert request_from(said, config_file="study.yaml").learning_rate == 1e-6


@pytest.mark.parametrize(
    ("name", "value", "has_it"), table("hyperparameters", "a_number_that_the_loss_does_not_have")
)
def test_a_number_that_the_loss_does_not_have_is_refused(name, value, has_it):
    flag = f"--{name.replace('_', '-')}"
    for settings in ({}, {"objective": "rw", "sequences_per_micro_batch": 2}):
        with pytest.raises(UsageError, match="would change nothing") as refused:
            question_of(**{name: value}, **settings)
        assert refused.value.hint == f"leave `{flag}` out"
    assert getattr(question_of(**{name: value}, **has_it).hyperparameters, name) == value


@pytest.mark.parametrize("name", NAMES)
def test_another_number_is_another_question_of_the_same_cells(name):
    changed = {name: "k3" if name == "kl_estimator" else DEFAULTS[name] / 2 or 0.5}
    if name == "dual_clip":
        changed = {name: 0.0}
    settings = CRITIC if not name.startswith("kl") else {"objective": "grpo"}
    if name == "dpo_beta":
        settings = {"objective": "dpo", "sequences_per_micro_batch": 2}
    usual, other = question_of(**settings), question_of(**settings, **changed)
    assert usual.key != other.key
    assert usual.cells == other.cells
    trials = [each.trial(each.cells[0], 4096) for each in (usual, other)]
    assert trials[0].key != trials[1].key
    flag = f"--{name.replace('_', '-')}"
    for words in (find_words(other), try_words(trials[1], other.model)):
        value = words[words.index(flag) + 1]
        assert getattr(request_from({"model": "tiny", name: value}), name) == changed[name]
    assert not {flag} & {*find_words(usual), *try_words(trials[0], usual.model)}


def test_every_one_has_a_flag_and_a_report_says_which_were_changed():
    rows = (*TOPICS["optimizer"], *TOPICS["objective"])
    assert {row.name for row in rows} == set(NAMES)
    assert {row.commands for row in rows} == {("find", "try", "train")}
    for command in ("predict", "recommend", "emit"):
        assert not set(NAMES) & {row.name for row in taken_by(command)}
    assert not set(NAMES) & set(Settings.__struct_fields__), "rungs differ in memory"

    def rows(**changes: float) -> dict[str, str]:
        return dict(question_table(report_of(Study(question=question_of(**changes)))).rows)

    told = rows(learning_rate=1e-6, weight_decay=0)["hyperparameters"]
    assert told.split() == ["--learning-rate", "1e-06", "--weight-decay", "0.0"]
    assert "hyperparameters" not in rows()


SOURCE = ROOT / "src" / "highwater"
FORMULAS = SOURCE / "engine/training/step.py"
"""Where each objective's own formula is chosen."""


def settings_of(objective, **changes):
    together = TRAITS[objective].documents_together
    return Settings(objective=objective, sequences_per_micro_batch=2 * together, **changes)


def compared(path):
    """Constants that something is compared with in a file, by ``==``, ``in`` or ``case``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            within = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            within = [node.value]
        else:
            continue
        for each in within:
            yield from (leaf.value for leaf in ast.walk(each) if isinstance(leaf, ast.Constant))


def test_an_objective_is_asked_for_by_its_name_where_its_formula_is_chosen_alone():
    for path in set(SOURCE.rglob("*.py")) - {FORMULAS}:
        assert not {each for each in compared(path) if isinstance(each, str)} & set(TRAITS), path
    assert set(TRAITS) <= set(compared(FORMULAS))


@pytest.mark.parametrize("objective", TRAITS)
def test_a_row_says_what_settings_hold(objective):
    traits, settings = TRAITS[objective], settings_of(objective)
    shape = load_model("Qwen3-0.6B").shape
    assert settings.holds_logits is not traits.gives_scalars
    assert (host_state_bytes(shape, settings, layout=Layout(gpus=1)) > 0) is traits.has_reference
    once = step_flops(shape, length_tokens=8192, sequences=2, settings=Settings())
    asked = step_flops(shape, length_tokens=8192, sequences=2, settings=settings)
    assert asked * 3 == once * (4 if traits.has_reference else 3)


@pytest.mark.parametrize(("objective", "other"), [("grpo", "ppo"), ("dpo", "rw")])
def test_what_is_named_in_the_place_of_a_reference_has_the_same_data_and_none(objective, other):
    assert without_reference(objective) == other
    assert not TRAITS[other].has_reference
    assert TRAITS[other].pairs == TRAITS[objective].pairs
    assert {name for name in TRAITS if TRAITS[name].has_reference} == {"grpo", "dpo"}


FLAGS = {command: set(parser.flags()) for command, parser in commands().items()}
LENGTH = {"try": ("--length", "4k")}


def hint_of(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse(words)
    return error.value.hint


@pytest.mark.parametrize(
    ("command", "typed", "ours"), table("request", "words_of_others_and_our_flag")
)
def test_a_word_of_others_is_told_as_our_flag_which_then_works(command, typed, ours):
    beside = LENGTH.get(command, ())
    assert hint_of(command, "Qwen3-8B", *beside, *typed.split()) == f"use `{ours}`"
    if command not in ("train",):
        assert parse([command, "Qwen3-8B", *beside, *ours.split()])


@pytest.mark.parametrize(("word", "meant"), [("none", "false"), ("cpu", "true"), ("xyz", None)])
def test_a_word_for_offload_is_answered_with_one_that_works(word, meant):
    with pytest.raises(UsageError) as error:
        request_from(typed_values(parse(["predict", "Qwen3-8B", "--offload", word])))
    assert error.value.hint == f"for example `{' '.join(filter(None, ('--offload', meant)))}`"
    typed = [meant] if meant else []
    request_from(typed_values(parse(["predict", "Qwen3-8B", "--offload", *typed])))


@pytest.mark.parametrize("word", ["distill", "GKD"])
def test_distillation_is_told_to_be_sft(word):
    with pytest.raises(UsageError) as error:
        request_from({"model": "Qwen3-8B", "objective": word})
    assert "`--objective sft`" in error.value.hint


def test_the_model_that_a_command_names_is_in_the_hint():
    command = "python t.py --model_name_or_path Qwen/Qwen3-8B --l {length}"
    with pytest.raises(UsageError) as error:
        request_from({"trainer": "command", "command": command})
    assert "`highwater find Qwen/Qwen3-8B --trainer command " in error.value.hint


@pytest.mark.parametrize(
    ("typed", "rank"),
    [
        *(("Qwen3-8B --gpus 4090 --qlora", 16), ("--qlora Qwen3-8B --gpus 4090", 16)),
        *(("Qwen3-8B --qlora --lora 8 --json", 8), ("Qwen3-8B --lora 8 --qlora", 8)),
        *(("--qlora 32 Qwen3-8B", 32), ("Qwen3-8B --qlora=32 --json", 32)),
    ],
)
def test_qlora_is_a_spelling_of_lora_beside_a_model_in_nf4(typed, rank):
    settings = typed_values(parse(["predict", *typed.split()]))
    assert settings == {"model": "Qwen3-8B", "lora": str(rank), "lora_base": "nf4"}


@pytest.mark.parametrize("flag", ["--tried-to-allocate", "--gpu-memory", "--host-memory"])
@pytest.mark.parametrize("typed", ["{} 18.55 GiB Qwen3-8B", "Qwen3-8B {}=18.55 gib. --json"])
def test_a_size_is_pasted_in_two_words_as_errors_have_it(flag, typed):
    read = vars(parse(["predict", *typed.format(flag).split()]))
    assert (read["model"], read[flag[2:].replace("-", "_")].lower()) == ("Qwen3-8B", "18.55gib")


@pytest.mark.parametrize("typed", ["--lora Qwen3-8B --gpus 4090", "Qwen3-8B --gpus 4090 --lora"])
def test_a_rank_that_nobody_typed_is_16(typed):
    assert typed_values(parse(["predict", *typed.split()])) == {"model": "Qwen3-8B", "lora": "16"}


@pytest.mark.parametrize(
    ("command", "typed", "said"),
    [
        ("predict", "--lr 1e-5", "--learning-rate 1e-5"),
        ("recommend", "--max-steps 9", "--steps 9"),
        ("predict", "--weight-decay 0", "--weight-decay 0"),
    ],
)
def test_a_flag_of_other_commands_names_them(command, typed, said):
    hint = hint_of(command, "Qwen3-8B", *typed.split())
    assert hint == f"leave `{typed.split()[0]}` out: {said} is for find, try and train"


@pytest.mark.parametrize(
    "word",
    [
        *("rollout-n", "beta", "tp", "zero", "fp16", "lora-dropout", "logging-steps"),
        *("num-generations", "attn-implementation", "max-completion-length"),
        *("gradient-accumulation-steps", "teacher", "distill"),
    ],
)
def test_a_word_of_others_without_a_flag_is_never_taken_for_another_one(word):
    said = foreign_words()[word].split(" | ")[-1]
    assert hint_of("train", f"--{word}", "5") == said.replace("{}", "5")


@pytest.mark.parametrize(
    "word",
    ["model", "dtype", "wandb", "tensorboard", "epochs", "packing", "zero3", "fsdp", "deepspeed"],
)
def test_what_has_no_flag_says_who_does_it(word):
    hint = hint_of("train", "--" + word, "x")
    assert "did you mean" not in hint
    assert hint == foreign_words()[word]
    for flag in re.findall(r"`(--[\w-]+)", hint):
        assert flag in FLAGS["train"]


@pytest.mark.parametrize("word", ["--foo", "--loader", "--epsilon-greedy", "--x"])
def test_no_flag_is_guessed_from_another_word(word):
    assert hint_of("find", "Qwen3-8B", word, "1") == "`highwater find --help-all` lists every flag"


def test_no_word_of_others_is_a_flag_of_ours_and_every_flag_told_is_one():
    known = {"--qlora"}.union(*FLAGS.values())  # a spelling of two
    assert len(foreign_words()) >= 35
    for word, said in foreign_words().items():
        assert set(re.findall(r"--[a-z][\w-]*", said)) <= known, word
        told = {command for command, flags in FLAGS.items() if said.split()[0] in flags}
        if said.startswith(f"--{word} {{}} | "):
            continue  # a flag of ours, with what other commands have in its place
        own = {command for command in told or ("find", "train") if f"--{word}" in FLAGS[command]}
        assert not own or (word in ("length", "max-length") and own == {"predict"}), word
