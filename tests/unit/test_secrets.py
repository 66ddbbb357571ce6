"""What looks like a secret is in no report; what only resembles one stays."""

import pytest
from studies import REAL, report_of, study_of, trial

from highwater import study_report
from highwater.report.secrets import HIDDEN, without_secrets
from highwater.spec.codec import to_json
from highwater.spec.trial import LogEnd, Outcome

SECRETS = (
    "HF_TOKEN=hf_abcdefghijklmnopqrst",
    'headers: {"Authorization": "Bearer abcdefgh12345678"}',
    "loading with token hf_abcdefghijklmnopqrst",
    "api_key='Zm9vYmFyYmF6'",
    "WANDB_API_KEY: 0123456789abcdef0123456789abcdef01234567",
    "https://user:hunter22@mirror.example/simple",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "--password=correct-horse",
    "password: swordfish",
    "mail: {'password': 'sword-fish'}",
    "db password=tuna",
    "PASSWD: 123456",
    "client_secret: swordfish",
    "api_key: swordfish",
    "token: swordfish",
    '"hf_token": "swordfish"',
    "highwater find --hf-token swordfish",
)


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(text: str) -> None:
    hidden = without_secrets(text)
    assert HIDDEN in hidden
    study = study_of(trial(8192, Outcome.CRASHED, text=text), command=("highwater", "find", text))
    document = to_json(report_of(study, LogEnd(lines=(text,))))
    value = text.split("=")[-1].split()[-1].strip("\"'}")
    assert value not in document


@pytest.mark.parametrize(
    "text",
    [
        "65,536 tokens: memory ran out: rank 0, forward: OutOfMemoryError: CUDA out of memory",
        "65,536 tokens: none of 3 attempts told whether it fits; the last: rank 0 was ended by signal 11 (SIGSEGV)",
        "vanilla, 1 GPU: memory-only proof of 98,304 tokens, 77.66 GiB at the peak",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "--token-budget 16384 token_budget=16384, tokenizer=Qwen2TokenizerFast",
        "logs/qwen3-0.6b-79gib-full/Qwen3-0.6B/gpu-1/sp-1/vanilla/model_len-188416.log",
        "ValueError: a start length of 1 token: use 2 or more",
        "eos_token: <|im_end|>, max_token: 512, password=None, 'api_key': null",
        "--token-budget 16384 --per-token 3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_texts_of_real_studies_hold_nothing_that_is_taken_for_a_secret() -> None:
    for path in REAL:
        assert HIDDEN not in to_json(study_report(path).study)
