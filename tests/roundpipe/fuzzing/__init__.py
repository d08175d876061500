"""Random programs, each run in plain PyTorch and in RoundPipe: `python tests/roundpipe/fuzzing SEED` runs one."""
