"""A process that imports this has compiled what transformers knows of the names of weights, 900
regular expressions: what is forked from it reads a model without them.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")
