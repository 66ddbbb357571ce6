"""Declared settings: each setting of a request is one row."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from highwater.cli.config import config_schema
from highwater.cli.flags import CommandFlags, typed_values
from highwater.cli.grammar import commands, parse
from highwater.nouns import declaration
from highwater.nouns.hyperparameters import DEFAULTS
from highwater.nouns.request import DECLARED, Request, request_from, setting_flags, taken_by
from highwater.nouns.settings import PATTERN_FIELDS, Settings
from highwater.nouns.trainer import OF_OTHERS
from highwater.nouns.training import TrainingRequest

ROWS = list(DECLARED.values())
FIELDS = {field.name: field for field in msgspec.structs.fields(Request)}
GRAMMAR = commands()
REFERENCE = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
COMMANDS: tuple[declaration.CommandName, ...] = get_args(declaration.CommandName)


def each(rows: list[declaration.Setting]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def names(command: declaration.CommandName) -> list[str]:
    return [row.name for row in taken_by(command)]


def value_of(row: declaration.Setting) -> Any:
    """A value that works, and is not the default where there is another."""
    if row.kind is None:
        default = FIELDS[row.name].default
        return next(choice for choice in row.choices if choice != default)
    default = DEFAULTS.get(row.name, FIELDS[row.name].default)
    return row.example or row.kind.example or default


@pytest.mark.parametrize("command", GRAMMAR)
def test_every_flag_of_a_command_is_a_declared_field(command):
    flags = {row.flag for row in (*ROWS, *CommandFlags.declared, *TrainingRequest.declared)}
    assert {flag for flag in GRAMMAR[command].flags() if flag != "--help"} <= flags


def test_a_noun_keeps_the_defaults_of_its_declared_fields():
    class Kept(declaration.DeclaredRecord, frozen=True, kw_only=True):
        tokens: int = declaration.setting(3, "tokens", declaration.COUNT)
        model: str = declaration.setting(
            declaration.REQUIRED, "model", declaration.MODEL, name="which"
        )
        beside: int = 1

    assert Kept(model="m") == Kept(tokens=3, model="m", beside=1)
    with pytest.raises(TypeError, match="model"):
        Kept()
    tokens, model = Kept.declared
    assert (tokens.name, tokens.sets) == ("tokens", "tokens")
    assert (tokens.type, tokens.default) == (int, 3)
    assert (model.name, model.sets) == ("which", "model")


@each(ROWS)
def test_a_setting_is_in_the_grammar_of_the_commands_that_take_it_and_of_no_other(row):
    assert row.commands
    for command in COMMANDS:
        found = [action for action in GRAMMAR[command]._actions if action.dest == row.name]
        is_taken = command in row.commands
        assert bool(found) == is_taken
        if is_taken:
            said = (found[0].help or "").replace("%%", "%")
            assert said.startswith(row.helps.get(command, row.help))
            assert found[0].option_strings == ([] if row.name == "model" else [row.flag])


@each(ROWS)
def test_a_setting_is_in_the_reference_and_in_the_schema(row):
    shown = "`MODEL`" if row.name == "model" else f"`{row.flag}`"
    for command in row.commands:
        lines = REFERENCE.partition(f"## highwater {command}\n")[2].partition("\n## ")[0]
        (line,) = (line for line in lines.splitlines() if line.startswith(f"| {shown} "))
        assert f"| {row.helps.get(command, row.help)}" in line
    entry = config_schema()["$defs"]["Request"]["properties"][row.name]
    assert entry["description"] == row.help
    default = FIELDS[row.name].default
    if default is not msgspec.NODEFAULT and default is not None:
        assert msgspec.to_builtins(default) == entry["default"]


@each(ROWS)
def test_what_a_setting_is_shown_as_is_read_from_a_command_line_a_file_and_python(row):
    value = value_of(row)
    good = {"model": "Qwen3-0.6B"}
    of_a_file = request_from({**good, row.name: value}, config_file="study.yaml")
    assert request_from({**good, row.name: value}, keywords=True) == of_a_file
    if row.name == "model":
        return
    words = [*good.values(), *declaration.words_of({row.name: value})]
    command = row.commands[0]
    typed = parse([command, *words, *(["--length", "4k"] if command == "try" else [])])
    assert request_from(typed_values(typed)) == of_a_file


OF_A_RUNG = [row for row in ROWS if row.sets in Settings.__struct_fields__]


@each([row for row in OF_A_RUNG if row.name not in OF_OTHERS])  # no trial of ours has these
def test_the_flags_of_a_rung_name_it_again(row):
    usual = Settings(objective="ppo", sequences_per_micro_batch=2)
    if row.name in PATTERN_FIELDS:
        usual = msgspec.structs.replace(usual, attention="block_sparse")
    if row.name.startswith("lora_"):
        usual = msgspec.structs.replace(usual, lora=8, save_hf="last")
    if row.name == "parameters":
        usual = msgspec.structs.replace(usual, optimizer="adamw-bf16", accumulates=False)
    value = "host" if row.name == "activations" else value_of(row)  # no rung has "auto"
    asked = request_from({"model": "Qwen3-0.6B", row.name: value}, keywords=True)
    rung = msgspec.structs.replace(usual, **{row.sets: getattr(asked, row.sets)})
    typed = typed_values(parse(["try", "Qwen3-0.6B", "--length", "4k", *setting_flags(rung)]))
    again = request_from(typed)
    for field in Settings.__struct_fields__:
        if field != "sequences_per_micro_batch" or rung.token_budget_tokens is None:
            named = again if field in ("allocator", "loss") else again.settings
            assert getattr(named, field) == getattr(rung, field)


@each([row for row in ROWS if row.labels])
def test_a_label_tells_what_is_not_the_default_and_nothing_of_what_is(row):
    usual = msgspec.structs.fields(Settings)
    default = next(field.default for field in usual if field.name == row.sets)
    assert row.label_of(default) == ""
    assert row.sets in Settings.__struct_fields__
    told = [row.label_of(value) for value in row.labels if value != default]
    assert all(told) or row.other_label
    assert len(set(told)) == len(told)


def test_a_recommendation_takes_what_a_configuration_does_and_a_switch_no_value():
    of_both, of_a_prediction = names("recommend"), names("predict")
    assert [name for name in of_both if name != "trainer_config"] == names("emit")
    assert set(of_both) < set(of_a_prediction)
    more = [row.name for row in taken_by("predict", but_not="recommend")]
    assert more == [name for name in of_a_prediction if name not in of_both]
    for row in ROWS:
        assert (row.kind is declaration.SWITCH) == (FIELDS[row.name].type is bool)
