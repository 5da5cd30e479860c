"""The demo: `python -m examples.demo` kills a training run in the middle of a save, and restarts it."""
