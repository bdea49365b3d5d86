# SPDX-License-Identifier: Apache-2.0
"""Config section ``parallel``: the layout of the trainer over ranks, with names as in Megatron-Core."""

from pydantic import Field

from megarl.config.base import Section


class ParallelConfig(Section):
    tensor: int = Field(1, ge=1)
    """Tensor parallel size (TP): attention heads and MLP columns are split."""
    pipeline: int = Field(1, ge=1)
    """Pipeline parallel size (PP): layers are split into stages."""
    virtual_pipeline: int = Field(1, ge=1)
    """Model chunks per pipeline stage (VPP); 1 is the plain 1F1B schedule."""
    context: int = Field(1, ge=1)
    """Context parallel size (CP): each sequence is padded to a multiple of twice this and split into that many chunks.
    Every rank gets two chunks, paired so that all ranks have equal work."""
    expert: int = Field(1, ge=1)
    """Expert parallel size (EP): experts are split."""
    expert_tensor: int = Field(1, ge=1)
    """Tensor parallel size within an expert (ETP)."""
    data: int = Field(1, ge=1)
    """Data parallel size (DP): number of copies of the model; they share each step's samples."""
    sequence: bool | None = None
    """Use sequence parallelism (SP). Default: on if ``tensor`` > 1."""
    response_share: float | None = Field(None, ge=0.0, le=1.0)
    """Share of the tokens that are response tokens. Only they have logits, so it says how many layers fewer the last
    pipeline stage should get (without ``virtual_pipeline``). Default: that of the longest prompt with the longest
    response of the sampler; 0.5 without a sampler."""

    @property
    def sequence_parallel(self) -> bool:
        """Return ``sequence``, or its default."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.pipeline * self.context * self.data
