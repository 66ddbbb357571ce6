"""The Python interface: the only place that joins searches, runners, predictors and stores.

```python
import highwater

study = highwater.find("Qwen3-0.6B", gpus=[1], memory="80GiB")
for answer in study.answers:
    print(answer.cell.label, answer.capacity_tokens)
```
"""
