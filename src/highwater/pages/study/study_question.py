"""What a study's report says of the question, and of the machines that it was asked on."""

from collections.abc import Iterator

from highwater.nouns.environment import ALLOCATOR_VARIABLES, Environment
from highwater.nouns.foreign_trainer import ForeignTrainer
from highwater.nouns.study import Question, Study
from highwater.pages.study.study_predictions import file_and_folder, ordered_by
from highwater.pages.study.study_report import StudyReport
from highwater.pages.study.tables import place
from highwater.pages.text_table import TextTable
from highwater.units import format_bytes, format_seconds, format_tokens


def question_table(report: StudyReport) -> TextTable:
    """The table of what was asked."""
    question = report.study.question
    grid, model = question.grid, question.model
    named = next(iter(question.cells)).settings
    rows = [
        ("model", f"{model.name}, {model.shape.model_type}, configuration {model.config_digest}"),
        ("native length", f"{format_tokens(grid.native_length_tokens)} tokens"),
        ("place", place(question)),
        ("memory of a GPU", format_bytes(question.device_total_bytes)),
        (
            "bound on it",
            format_bytes(question.memory_budget_bytes)
            if question.memory_budget_bytes
            else "none: the whole card",
        ),
        ("cells", "; ".join(cell.label_on(question.device) for cell in question.cells)),
        *(_of_the_engine(question) if question.foreign is None else _of(question.foreign)),
        ("lengths", _lengths(question)),
        ("search", _search(report.study)),
        (
            "steps of a trial",
            f"{question.steps} of {question.micro_batches} micro-batch{'es' * named.accumulates}",
        ),
        *(
            (("hyperparameters", " ".join(question.hyperparameters.flags)),)
            if question.hyperparameters.flags
            else ()
        ),
        ("ordered by", ordered_by(report)),
        (
            "study",
            "not recorded" if report.study.path is None else file_and_folder(report.study.path),
        ),
    ]
    return TextTable(
        title="the question", columns=("what", "value"), rows=tuple(rows), left_columns=2
    )


def _of_the_engine(question: Question) -> Iterator[tuple[str, str]]:
    """What this package's engine trains."""
    named = question.cells[0].settings
    yield (
        "training",
        f"{named.objective}, {named.strategy}, entropy {named.entropy}, recompute "
        f"{named.recompute}",
    )
    yield "sequences", _sequences(question)
    yield "data", question.data or "synthetic sequences"


def _of(foreign: ForeignTrainer) -> Iterator[tuple[str, str]]:
    """What is known of another trainer: how it is started."""
    yield "trainer", foreign.title
    if foreign.typed:
        yield "command", foreign.typed
    if foreign.base_config_path is not None:
        name = file_and_folder(foreign.base_config_path)
        yield "its configuration", f"{name}, {foreign.base_config_digest}"
    if foreign.done_pattern is not None:
        yield "steps are done", foreign.done_pattern or "by exit status 0"


def _sequences(question: Question) -> str:
    named = question.cells[0].settings
    if named.token_budget_tokens is not None:
        return (
            f"as many as a budget of {format_tokens(named.token_budget_tokens)} tokens holds, "
            f"for each GPU"
        )
    return f"{named.sequences_per_micro_batch} in each micro-batch"


def _lengths(question: Question) -> str:
    grid = question.grid
    step = f"steps of {format_tokens(grid.step_tokens)}"
    further = f", past the native length of {format_tokens(grid.beyond_step_tokens)}"
    beyond = further if grid.beyond_step_tokens != grid.step_tokens else ""
    return (
        f"{format_tokens(grid.start_tokens)} to {format_tokens(grid.max_tokens)} tokens in "
        f"{step}{beyond}"
    )


def _search(study: Study) -> str:
    question = study.question
    confirmed = (
        f", both trials of an edge repeated {question.confirm} times" if question.confirm else ""
    )
    margin = (
        f", a length has to leave {format_bytes(question.margin_bytes)}"
        if question.margin_bytes
        else ""
    )
    return f"{question.method}, proof {question.proof}{_within(study)}{confirmed}{margin}"


def _within(study: Study) -> str:
    """The longest time limit that the study met, and the others under which answers were given."""
    longest_s = study.longest_timeout_s
    if longest_s is None:
        return ""
    shorter = sorted(
        {limit_s for limit_s in study.answers_within_s if limit_s < longest_s}, reverse=True
    )
    count = study.answers_within_s.count
    counted = (
        f"{count(limit_s)} of {len(study.answers)} answers up to {format_seconds(limit_s)}"
        for limit_s in shorter
    )
    answers = f" ({', '.join(counted)})" if shorter else ""
    return f", full trials up to {format_seconds(longest_s)}{answers}"


def environment_tables(report: StudyReport) -> Iterator[TextTable]:
    """What the trials said of themselves, and each place where the search was started."""
    kernels = dict.fromkeys(
        trial.attention_kernel for trial in report.trials if trial.attention_kernel
    )
    allocators = dict.fromkeys(
        f"{trial.rung}: {trial.allocator}" for trial in report.trials if trial.allocator
    )
    rows = [
        ("device", ", ".join(report.device_names)),
        *((name, " and ".join(found)) for name, found in report.versions.items()),
    ]
    rows += [("attention", ", ".join(kernels)), ("allocator, as it told", "; ".join(allocators))]
    kept = tuple((name, value) for name, value in rows if value)
    if kept:
        yield TextTable(
            title="what the trials said that they ran with",
            columns=("what", "value"),
            rows=kept,
            left_columns=2,
        )
    environments = report.study.environments
    for number, found in enumerate(environments, 1):
        which = f", {number} of {len(environments)}" if len(environments) > 1 else ""
        yield TextTable(
            title=f"where the search was started{which}",
            columns=("what", "value"),
            rows=tuple(_environment(found)),
            left_columns=2,
        )


def _environment(found: Environment) -> Iterator[tuple[str, str]]:
    sizes = zip(found.gpu_names, found.gpu_memory_bytes, strict=True)
    counted = [f"{name}, {format_bytes(size)}" for name, size in sizes]
    yield (
        "GPUs",
        "; ".join(f"{counted.count(each)} x {each}" for each in dict.fromkeys(counted))
        or "none visible",
    )
    yield "driver", found.driver_version or "-"
    yield "host memory", format_bytes(found.host_memory_total_bytes)
    yield "CPU cores", str(found.cpu_cores)
    yield from found.versions.items()
    for name, value in found.variables.items():
        given = " (trials are given their rung's instead)" if name in ALLOCATOR_VARIABLES else ""
        yield f"{name} in the shell", f"{value}{given}"
    if not any(name in ALLOCATOR_VARIABLES for name in found.variables):
        yield f"{ALLOCATOR_VARIABLES[0]} in the shell", "not set (trials are given their rung's)"


def no_environment(report: StudyReport) -> str | None:
    """Why nobody knows where the search was started; None where it is known."""
    if report.study.environments:
        return None
    why = (
        "nothing ran in a dry run"
        if report.study.question.simulated
        else "the study is from before that was recorded"
    )
    return f"Where the search was started is not known: {why}."
