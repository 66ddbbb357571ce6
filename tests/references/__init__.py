"""Plain references of every objective: float64 PyTorch over a list of documents and plain Hugging
Face models.

Written from the papers and from verl's and TRL's definitions, without having read the engine that
they judge:

- PPO (arXiv:1707.06347), dual clip (arXiv:1912.09729), GAE (arXiv:1506.02438): verl's
  ``trainer/ppo/core_algos.py``, TRL's PPO trainer
- GRPO (DeepSeekMath, arXiv:2402.03300), the mean over all tokens of a step (DAPO,
  arXiv:2503.14476): verl's "vanilla" with ``token-mean``, TRL's ``loss_type="dapo"``
- estimators of the divergence: http://joschu.net/blog/kl-approx.html, verl's ``kl_penalty``
- pairwise rewards (Bradley and Terry; InstructGPT, arXiv:2203.02155): TRL's reward trainer
- load balance of routers (Switch Transformers, arXiv:2101.03961, equations 4 to 6): transformers'
  ``load_balancing_loss_func``
- the supervised loss: Hugging Face's ``ForCausalLMLoss`` with ``num_items_in_batch``

No packing, no sharding, no micro-batches: each document runs alone through a model whose casts to
float32 are lifted.
"""
