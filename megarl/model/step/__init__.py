"""One training step: pack samples, run the pipeline schedule, replay CUDA graphs."""
