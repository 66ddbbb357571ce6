"""The processes that have imported PyTorch, transformers and the engine: commands are forked from
one, and ranks, traces and pieces of code from the other. There is one of each for all tests of a
process.
"""

from importlib.util import find_spec

from fork_server import COMMANDS, TESTS, ForkServer
from highwater.trials.trial_process import ON_THE_CPU

ANSWERING = ForkServer(
    *("forked_modules", *(main.partition(":")[0] for main in COMMANDS.values())),
    *("highwater.cli.doctor", "warmed_commands"),
    environment={**ON_THE_CPU, "PYTHONPATH": str(TESTS)},
)
"""It has answered what commands do."""
SERVER = ForkServer(
    *("safetensors.torch", "transformers.models.auto.modeling_auto", "transformers.trainer"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "qwen3_moe", "llama")),
    *("highwater.engine.models.build", "highwater.engine.training.checkpoint"),
    *("highwater.engine.training.rank_run", "highwater.engine.tracer.tracer"),
    *("highwater.engine.tracer.trinity_step", "highwater.engine.bench.attention.contenders"),
    *("layer", "trial_specs", "forked_modules", "warmed_weights"),
    *(name for name in ("bitsandbytes", "peft", "torchao.optim") if find_spec(name.split(".")[0])),
    environment={
        **ON_THE_CPU,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{TESTS.parent / 'benchmarks'}:{TESTS}",
    },
    forked_from=ANSWERING,
)
"""It hides every GPU, and has the allocator of what is measured on the CPU."""
