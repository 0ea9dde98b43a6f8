"""How fast batches come, without a model: what `dali-stream bench` and benchmarks/streaming.py measure.

measure  what one rank sees
report   the ranks' figures put together, per node
"""
