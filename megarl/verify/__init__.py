# SPDX-License-Identifier: Apache-2.0
"""Implement `megarl verify`: compare a layout with one process of Hugging Face + PEFT. Importing it loads no torch.

Rule ----

The *truth* is Hugging Face + PEFT in one process, one sequence at a time, in float64 (in float32 if float64 does not
fit into memory). The *yardstick* is Hugging Face + PEFT in the dtype under test (``model.dtype``): its error shows how
far rounding alone moves the same arithmetic from the truth. One rule holds for all models and rows:

    error <= max(fixed bound of the row, slack * the yardstick's error in that row)

Float32: the fixed bounds are those of promise 1 (``compare.BOUNDS``). They decide for small models, whose errors stay
far below them. A large model may exceed them, and so may Hugging Face. The slack is 4, because the largest of very many
rounding errors varies by chance. Whatever the yardstick's error, no bound exceeds 100 times the fixed one.

The adapter after AdamW steps is a special case. Adam divides each element by its own size, so an element whose gradient
is rounding noise moves by up to the learning rate in either direction. Each element's second moment tells how far it
may move if its tensor's gradient is off by the slack times the error of Hugging Face's float32 gradient in that update
(``reference.sensitivity``). That much is subtracted from its error. Another row compares how far the adapter moved as a
whole, by norm over all tensors, and subtracts nothing.

Bfloat16: there are no fixed bounds, and the slack is 1.1: megarl may be no further from the truth than Hugging Face is.
With routers the slack is 2. A token whose experts tie within rounding goes to another expert; one such token outweighs
all rounding, and chance decides which tokens these are (two attention kernels of Hugging Face differ by up to 1.7 in
the gradients' error). No bound exceeds 0.75, because a lost tensor has an error of 1. A norm over all gradients would
hide one lost gradient of many experts, so each tensor must also pass alone, with slack 3. Tensors for which Hugging
Face's own gradient is off by more than half are left out and counted. Rows that must be exact have bound 0 in both
dtypes.

The batch is made so that omissions show: one sequence of 120 tokens among short ones, loss weights that differ by
sequence, a temperature of 0.8, weight decay, and updates of which some are clipped and some are not.

By default the command makes two updates on 4 samples (80 in bfloat16, where errors are averages); ``--full`` and
``--matrix`` make three on 10. The default leaves out the third update, and with it the second update from a checkpoint
whose moments come from two gradients, and six of the nine short sequences. It keeps the long sequence, the clipped
update and every row.

An error in float32 is the largest difference over the largest magnitude of the worst tensor. In bfloat16, where single
elements are noise, it is the norm of all differences over the norm of the truth.
"""
