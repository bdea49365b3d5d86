# SPDX-License-Identifier: Apache-2.0
"""`megarl verify`: a layout against one process of Hugging Face + PEFT, by numbers. Importing it loads no torch.

What passes
-----------
The truth is Hugging Face + PEFT, one process, one sequence at a time, in float64 (in float32 where float64 does not fit
into memory). Hugging Face + PEFT in the dtype under test (``model.dtype``) gives the yardstick: how far from the truth
the very same arithmetic ends up by rounding alone. One rule holds for all models and rows:

    error <= max(fixed bound of the row, slack * the yardstick's error in that row)

In float32 the fixed bounds are those of promise 1 (``compare.BOUNDS``), and they decide: a healthy small model stays
far below them. A large one may not, and neither does Hugging Face; the slack is 4, because the largest of very many
roundings is a matter of chance. Whatever the yardstick's error, no bound exceeds 100 times the fixed one. The adapter
after AdamW steps is different: Adam divides each element by its own size, so an element whose gradient is rounding
noise moves by up to the learning rate either way. From each element's second moment follows how far it may move if its
tensor's gradient is off by the slack times what Hugging Face's in float32 is off in that update
(``reference.sensitivity``): that much is not counted. How far the adapter moved as a whole has a row of its own, by
norm over all tensors, where nothing is excused.

In bfloat16 there are no fixed bounds and the slack is 1.1: megarl may be no further from the truth than Hugging Face
is. With routers it is 2: a token whose experts tie within rounding goes to another expert, one such token outweighs all
rounding, and which tokens do is chance (two attention kernels of Hugging Face itself differ by up to 1.7 in the
gradients' error). No bound exceeds 0.75: a tensor that is lost is off by 1. All gradients together would hide a lost
one of many experts, so each tensor has to pass alone too, with slack 3; those of which Hugging Face's own are off by
more than half are left out and counted. Rows that must be exact have bound 0 in both.

The batch is made so that what is left out shows: one sequence of 120 tokens among short ones, loss weights that differ
by sequence, a temperature of 0.8, weight decay, and updates of which some are clipped and some are not.

The command's default makes two updates on 4 samples (80 in bfloat16, where errors are averages); ``--full`` and
``--matrix`` make three on 10. What the default leaves out: the third update, hence a second one from a checkpoint's
moments that are of two gradients, and six of the nine short sequences. The long one, the clipped update and every row
stay.

An error is the largest difference over the largest magnitude of the worst tensor in float32; in bfloat16, where single
elements are noise, the norm of all differences over the norm of the truth.
"""
