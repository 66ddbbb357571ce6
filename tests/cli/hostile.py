"""Commands with hostile values, run one after another in this process."""

import contextlib
import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from highwater.cli.app import main
from highwater.cli.grammar import commands
from tables import table
from tiny_models import TINY

CPU_SECONDS = 20
"""Of one command; what takes longer hangs."""
ROOT = Path(__file__).parents[2]
BASES = {
    command: [str(ROOT / word) if "/" in word else word for word in words.split()]
    for command, words in table("hostile", "bases").items()
}
"""Commands that answer without a GPU, and start nothing. That of ``bench`` has two reasons to
refuse, after everything is read: a value of one flag leaves the other."""
LONG = "x" * 300
NUMBERS = (
    *table("hostile", "numbers"),
    *("9" * 310, "-" + "9" * 310, "9" * 4301, f"{'9' * 400}.{'9' * 400}", "9" * 310 + "h"),
    *("1" * 310 + "GiB", "9" * 310 + "k", "1h" * 200, "9" * 310 + "xA100-80GB"),
)
PLACES = (*table("hostile", "places"), LONG, f"{LONG}/x", "a/" * 3000, f"{LONG}.html")
HEADER = "gpu,settings,gpus,sp,model,max_model_len\n"
FILES = {
    "tiny/config.json": json.dumps(TINY),
    "nested/config.json": json.dumps(TINY)[:-1] + ', "x": ' + "[" * 2000 + "]" * 2000 + "}",
    "endless/config.json": json.dumps(TINY)[:-1] + ', "rope_theta": ' + "9" * 5000 + "}",
    "locked/config.json": json.dumps(TINY),
    "locked.txt": "x",
    "nested.json": "[" * 2000 + "]" * 2000,
    "nested.jsonl": '{"a":' * 2000 + "1" + "}" * 2000 + "\n",
    "nested.csv": "[" * 2000,
    "nested.yaml": "model: " + "[" * 2000 + "]" * 2000,
    "tags.yaml": "model: !!python/object/apply:os.system ['id']\n",
    "date.yaml": "memory: 2020-13-45\n",
    "tagged.yaml": "offload: !!bool maybe\n",
    "set.yaml": "gpus: !!set {1, 2}\n",
    "binary.yaml": "study: !!binary x\n",
    "infinite.yaml": "gpus: .inf\ntimeout: .nan\n",
    "long.yaml": f"steps: {'9' * 310}\n",
    "longer.yaml": f"steps: {'9' * 5000}\n",
    "half.yaml": 'study: "\\ud800"\n',
    "zero.yaml": 'log_dir: "a\\0b"\n',
    "long.csv": f"{HEADER}A100-80GB,vanilla,{'9' * 310},1,Qwen3-8B,1\n",
    "field.csv": f"{HEADER}{'x' * 200_000},vanilla,1,1,Qwen3-8B,1\n",
    "zero.csv": f"{HEADER}\0,vanilla,1,1,{LONG},1\n",
}


class Hanging(BaseException):
    """A command has had its time."""


def prepare() -> None:
    """Write what the places name; what is locked nobody may read or enter."""
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content, encoding="utf-8")
    Path("loop").symlink_to("loop")
    Path("locked").chmod(0)
    Path("locked.txt").chmod(0)


def cases(*, is_every: bool) -> Iterator[list[str]]:
    turn = cycle((*NUMBERS, *PLACES))
    for command, words in BASES.items():
        for action in commands()[command].arguments:
            if action.nargs == 0:
                continue
            for value in (*NUMBERS, *PLACES) if is_every else islice(turn, 1):
                if action.option_strings:
                    yield [command, *words, f"{action.option_strings[-1]}={value}"]
                else:
                    yield [command, value, *(word for word in words if word != "Qwen3-0.6B")]


def ended(words: list[str]) -> tuple[object, str, str]:
    """How the command ended, what it answered, and what it said beside it."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: object = main(words)
    except Hanging:
        return "hangs", "", "hangs"
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is a fault
        return "raises", "", repr(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return code, out.getvalue(), err.getvalue()


def fault_of(words: list[str]) -> tuple[object, str | None]:
    """Its exit code, and what is wrong with how the command ended."""
    code, _, said = ended(words)
    if code in ("hangs", "raises"):
        return code, said
    if code not in (0, 1, 2, 3, 4) or "Traceback" in said:
        return code, f"exit code {code}: {said[-2000:]}"
    if code in (2, 3) and not ("error: " in said and "\nhint: " in said):
        return code, f"exit code {code} without an error and its hint: {said}"
    return code, None


def _hang(*_: object) -> None:
    raise Hanging


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    prepare()
    signal.signal(signal.SIGVTALRM, _hang)
    if sys.argv[1:] and sys.argv[1] != "every":
        sys.stdout.write(json.dumps([ended(words) for words in json.loads(sys.argv[1])]) + "\n")
        sys.exit()
    found = [(words, *fault_of(words)) for words in cases(is_every="every" in sys.argv)]
    faults = [
        ([word[:60] for word in words], fault) for words, _, fault in found if fault is not None
    ]
    codes = Counter(str(code) for _, code, _ in found)
    sys.stdout.write(json.dumps({"cases": len(found), "codes": codes, "faults": faults}) + "\n")
