"""What a token costs at the peak of a layer's recomputation and backward pass: an upper bound that
a kept copy would break.
"""

import json

import pytest
from forked_python import forked

MEASURE = (
    "import json; from layer import measure; print(json.dumps(measure({model!r}, device='cpu')))"
)
"""In a process of its own: it joins a process group."""


def test_one_layers_backward_pass_holds_no_product_of_the_mlp_and_no_copy_of_the_attention():
    row = measured("Qwen3-0.6B")
    hidden, queries, keys = 2 * 1024, 2 * 16 * 128, 2 * 8 * 128
    # q before and after its norm and rotation, the output, its gradient and q's; k and v, k before,
    # and their gradients; the layer's normed input and the residual's gradient; cosines and sines,
    # which all layers share.
    floor = 5 * queries + 5 * keys + 2 * hidden + 2 * 2 * 128
    assert floor <= row["layer_bytes_per_token"] < 1.01 * floor
    assert "attention" in row["during"]
    assert sum(item["bytes_per_token"] for item in row["alive"]) == pytest.approx(
        row["bytes_per_token"]
    )


def measured(model: str) -> dict:
    done = forked(MEASURE.format(model=model))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
