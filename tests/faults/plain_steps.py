"""A trainer: two steps of so many tokens, in PyTorch alone."""

import sys

import torch

length = int(sys.argv[1])
weight = torch.nn.Parameter(torch.zeros(256, 256))
for number in (1, 2):
    x = torch.randn(length, 256)
    loss = (torch.relu(x @ weight) + x).square().mean()
    loss.backward()
    weight.data -= 0.1 * weight.grad  # an optimizer would import Dynamo, of which nothing is asked
    weight.grad = None
    print(f"step {number}/2 loss {loss.item():.3f}", flush=True)  # noqa: T201
