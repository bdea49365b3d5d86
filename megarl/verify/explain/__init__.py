"""Name the first module, gradient or tensor that differs."""
