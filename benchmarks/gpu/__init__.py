"""What benchmarks/gpu_suite.py runs: cases, their parts, the rows they write, the reader of traces."""
