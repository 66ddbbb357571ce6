"""LoRA on 1, 2 and 4 gloo processes: loss and every gradient are peft's on the family's own class,
one document at a time; what is saved loads in peft and in transformers, and goes on.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("bitsandbytes", reason="a model in NF4 needs the qlora extra")
peft = pytest.importorskip("peft", reason="LoRA needs the lora extra")

import lora_objective_cases
import lora_saving_cases
from lora_cases import FAMILIES, LAYOUTS, OF_TEXT, cases_for, nf4_of, save_models
from rank_groups import RankGroups, assert_close
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

TOLERANCE = {"float64": 1e-10, "float32": 2e-5}
"""Norm-relative. In float32 both sides round, and of A's gradient both of its products."""
from engine_models import built
from highwater.engine.models.adapters import is_adapter
from highwater.engine.models.decoder import Decoder
from highwater.engine.models.weights import name_in_files
from highwater.engine.parallel import mesh as process_mesh
from highwater.engine.parallel.fsdp2 import local_shard
from highwater.errors import ModelError
from highwater.model.model import load_model
from highwater.nouns.layout import Layout
from highwater.nouns.objective import Lora, adapter_parameters
from tiny_models import SIZES


@pytest.fixture(scope="module")
def models(ranks: RankGroups) -> Path:
    return ranks.models(save_models)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_adapters_are_trained_as_peft_trains_them(processes, ranks, models):
    results = ranks.results("lora_cases", processes, models)
    assert_close(results, {case.name: TOLERANCE[case.dtype] for case in cases_for(processes)})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_objective_trains_what_merged_weights_would_have(processes, ranks, tmp_path):
    lora_objective_cases.save_models(tmp_path)
    results = ranks.results("lora_objective_cases", processes, tmp_path)
    cases = lora_objective_cases.cases_for(processes)
    assert_close(results, {c.name: TOLERANCE["float64"] for c in cases}, of=("loss", "gradient"))


@pytest.fixture(scope="module", params=[(1, 2), (2, 1)])
def saved(
    request: pytest.FixtureRequest,
    ranks: RankGroups,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What some processes saved, and others went on from."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("llama", "phi3", "qwen3_moe", "gemma4_text"):
        (folder / name).symlink_to(models / name)
    (folder / "packed").symlink_to(models / "llama")
    scalar = LlamaConfig(**SIZES | OF_TEXT, num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(scalar).save_pretrained(folder / "scalar")
    saved_by, resumed_by = request.param
    ranks.results("lora_saving_cases", saved_by, folder, "save")
    ranks.results("lora_saving_cases", resumed_by, folder, "resume")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", lora_saving_cases.MODELS)
def test_peft_loads_the_adapters_and_transformers_the_merged_model(saved, name):
    kind = AutoModelForSequenceClassification if name == "scalar" else AutoModelForCausalLM
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    base = kind.from_pretrained(saved / name, **how)
    if name == "packed":
        for own, weight in nf4_of(saved / name).items():
            base.get_parameter(own).data.copy_(weight)
    models = [peft.PeftModel.from_pretrained(base, saved / f"adapter-{name}").eval()]
    if name not in lora_saving_cases.UNMERGED:
        models.append(kind.from_pretrained(saved / f"merged-{name}", **how).eval())
    told = load_file(saved / f"told-{name}.safetensors")["told"]
    for model in models:
        torch.testing.assert_close(answer(model), told, rtol=2e-5, atol=2e-5)
    alone = kind.from_pretrained(saved / name, **how).eval()
    assert float((answer(alone) - told).abs().max()) > 1e-3, "the adapters change something"
    adapter_bytes, merged_bytes = map(int, (saved / f"bytes-{name}").read_text().split())
    for folder, said in ((f"adapter-{name}", adapter_bytes), (f"merged-{name}", merged_bytes)):
        if said:
            assert said == sum(path.stat().st_size for path in (saved / folder).iterdir())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", lora_saving_cases.MODELS)
def test_training_goes_on_from_the_shards(saved, name):
    runs = ("went-on", "resumed")
    went_on, resumed = (load_file(saved / f"{run}-{name}.safetensors") for run in runs)
    assert went_on.keys() == resumed.keys()
    for key, value in went_on.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-4, atol=1e-6, msg=key)


def answer(model: torch.nn.Module) -> torch.Tensor:
    """Log-probabilities of all tokens but the first, or the number of the last one."""
    ids = torch.tensor([lora_saving_cases.TOKENS])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    if len(logits) != ids.shape[1]:
        return logits
    return logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_all_linear_layers_are_counted_as_peft_has_them(models, family):
    """A linear router and what lies outside of the decoder layers among them, and nothing else."""
    config = AutoConfig.from_pretrained(models / family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lora = Lora(rank=4, alpha=8.0)
    asked = peft.LoraConfig(r=lora.rank, target_modules=lora.targets, task_type="CAUSAL_LM")
    counted, _ = peft.get_peft_model(model, asked).get_nb_trainable_parameters()
    assert adapter_parameters(load_model(str(models / family)).shape, lora) == counted


@pytest.mark.parametrize("targets", ["lm_head", "q_proj,nonsense", "embed_tokens", "mlp", "norm"])
def test_what_is_no_linear_layer_has_no_adapter(models, targets):
    with pytest.raises(ModelError, match="names no linear layer") as refused:
        adapted(models / "llama", Lora(rank=2, alpha=4, targets=targets))
    named = refused.value.hint.split("--lora-targets ")[1].split("`")[0]
    found = adapted(models / "llama", Lora(rank=2, alpha=4, targets=named)).named_parameters()
    assert sum(is_adapter(name) for name, _ in found) == 28


def test_files_of_the_backbone_alone_are_read_beside_adapters(models, tmp_path):
    """Their names lack the prefix that the model's have."""
    whole = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32)
    whole.model.save_pretrained(tmp_path)
    model = adapted(tmp_path, Lora(rank=2, alpha=4))
    assert model.weights == "saved"
    ours = {name_in_files(name): p for name, p in model.named_parameters() if not is_adapter(name)}
    for name, parameter in whole.named_parameters():
        assert torch.equal(local_shard(ours[name]), parameter), name


def adapted(directory: Path, lora: Lora) -> Decoder:
    with process_mesh.alone(torch.device("cpu")):
        mesh = process_mesh.shard_mesh(Layout(), torch.device("cpu"))
        return built(directory, mesh, torch.float32, lora=lora)
