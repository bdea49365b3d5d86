# SPDX-License-Identifier: Apache-2.0
"""Triton kernels whose result for a token does not depend on the other tokens. Import them where Triton is installed.

Three rules make that so:

- A reduction walks its terms in one order, in tiles of one size. Neither the number of tokens nor their places change
  tile, split or order.
- Both processes run one compiled kernel. Triton compiles another one if an argument is 1 or a multiple of 16, so the
  numbers of tokens are not specialised, and rows that are not aligned to 16 bytes are copied first.
- Multiplications and additions are not fused (``enable_fp_fusion=False``), so that the compiler has no choice.
"""
