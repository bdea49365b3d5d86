"""The Megatron-Core side: building, loading, stepping and exporting one exact model."""
