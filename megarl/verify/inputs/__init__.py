"""What is verified: the arguments, layouts, token sequences, random adapters and tiny models."""
