"""Data plane: benchmarks; each prints ratios within one run and writes JSON."""
