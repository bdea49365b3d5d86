"""Read and write PEFT directories."""
