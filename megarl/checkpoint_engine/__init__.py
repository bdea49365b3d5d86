"""The weight path from trainer to sampler: a protocol, its transports, and both ends."""
