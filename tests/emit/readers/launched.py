"""What accelerate's own launcher makes of a configuration file."""

import os
import socket
from contextlib import contextmanager

import accelerate.commands.launch as launch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.dataclasses import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


def launched(words):
    """The processes' environment; only their start is left out."""
    found = {}
    launch.multi_gpu_launcher = lambda arguments: found.update(
        prepare_multi_gpu_env(arguments), PROCESSES=arguments.num_processes
    )
    launch.deepspeed_launcher = lambda arguments: found.update(
        prepare_deepspeed_cmd_env(arguments)[1], PROCESSES=arguments.num_processes
    )
    launch.launch_command(launch.launch_command_parser().parse_args([*words, "train.py"]))
    return {name: str(value) for name, value in found.items()}


@contextmanager
def environment(variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def alone():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port = each.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(each) for name, each in variables.items()}


def shared(words):
    """How states and sequences are shared, offloaded and recomputed, by a process's own objects."""
    return made(launched(words))


def made(variables):
    with environment(variables):
        common = {
            "gpus": int(variables["PROCESSES"]),
            "mixed_precision": variables["ACCELERATE_MIXED_PRECISION"],
        }
        if variables.get("ACCELERATE_USE_DEEPSPEED") == "true":
            zero = DeepSpeedPlugin().deepspeed_config["zero_optimization"]
            sequences = ParallelismConfig()
            assert sequences.total_size == common["gpus"]
            devices = {zero[name]["device"] for name in ("offload_param", "offload_optimizer")}
            assert len(devices) == 1
            return {
                **common,
                "strategy": f"zero{zero['stage']}",
                "sp": sequences.sp_size,
                "offload": devices == {"cpu"},
            }
        if variables.get("ACCELERATE_USE_FSDP") != "true":
            return {**common, "strategy": "ddp", "sp": 1, "offload": False, "recompute": False}
        plugin, mesh = FullyShardedDataParallelPlugin(), ParallelismConfig()
        is_asked = variables.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true"
        assert not is_asked or mesh.total_size == common["gpus"]
        return {
            **common,
            "strategy": f"fsdp{plugin.fsdp_version}",
            "sp": mesh.cp_size if is_asked else 1,
            "copies": mesh.dp_replicate_size if is_asked else 1,
            "passes_on": bool(mesh.cp_handler) and mesh.cp_handler.cp_comm_strategy == "alltoall",
            "offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "recompute": plugin.activation_checkpointing,
            "on_host": getattr(plugin, "activation_checkpointing_offload", False),
        }
