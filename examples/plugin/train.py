# SPDX-License-Identifier: Apache-2.0
"""Train LoRA in your own Megatron-Core script, laid out as Megatron-LM's ``pretrain_gpt.py`` and ``training.py``.

It uses mcore's layers, schedules, DDP, optimizer, learning rate and distributed checkpoints. megarl's lines are marked.
See README.md.
"""

import datetime
from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from peft import LoraConfig

from megarl.lora import LoraAdapter, apply_lora, load_peft_config
from megarl.model.weights.base_tensors import load_base
from megarl.model.weights.hf_folder import read_config
from megarl.parallel.device import backend, cuda_names, pick_device

from arguments import parse_args  # isort: skip
from checkpointing import load_base_checkpoint, load_checkpoint, save_checkpoint  # isort: skip


def initialize(args: Namespace) -> torch.device:
    """Do what Megatron-LM's ``initialize_megatron`` does."""
    device = pick_device("auto")  # megarl: also makes mcore run on a CPU host
    dist.init_process_group(backend(device), timeout=datetime.timedelta(minutes=args.distributed_timeout_minutes))
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return device


def core_transformer_config_from_args(args: Namespace, device: torch.device) -> TransformerConfig:
    """Do what Megatron-LM's function of that name does, for this example's arguments."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=not args.disable_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def model_provider(args: Namespace, device: torch.device) -> GPTModel:
    """Build this stage's model as Megatron-LM's ``model_provider`` does, without megarl."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    with cuda_names():  # does nothing on CUDA
        return GPTModel(
            core_transformer_config_from_args(args, device),
            get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm),
            vocab_size=-(-args.vocab_size // multiple) * multiple,
            max_sequence_length=args.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
        ).to(device)


def get_model(args: Namespace, device: torch.device) -> tuple[list, LoraAdapter]:
    """Wrap the stage as Megatron-LM's ``get_model`` does. LoRA goes on before DDP makes gradient buffers."""
    model = model_provider(args, device)
    hf = read_config(args.hf_model)
    if not args.pretrained_checkpoint:
        load_base([model], args.hf_model, hf)  # megarl: each rank reads its slices of the Hugging Face weights
    if args.load_adapter:
        config = load_peft_config(args.load_adapter)  # megarl
    else:
        targets = args.lora_target_modules
        config = LoraConfig(
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            target_modules=targets[0] if targets == ["all-linear"] else targets,
        )
    adapter = apply_lora([model], config, hf, seed=args.seed)  # megarl: freezes the base, adds the adapter
    if args.pretrained_checkpoint:
        load_base_checkpoint(args.pretrained_checkpoint, model, adapter)
    module = Float16Module(model.config, model) if args.bf16 else model
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
    )
    with cuda_names():
        return [DistributedDataParallel(model.config, ddp, module)], adapter


def get_optimizer(args: Namespace, model: list) -> tuple:
    """Return mcore's Adam over the adapter, and its learning-rate schedule."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    with cuda_names():
        optimizer = get_megatron_optimizer(config, model)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    return optimizer, scheduler


def sample(index: int, args: Namespace) -> torch.Tensor:
    """Return the ``[seq-length + 1]`` token ids of one of eight sequences. Put your data set here."""
    generator = torch.Generator().manual_seed(args.seed + index % 8)
    return torch.randint(args.vocab_size, (args.seq_length + 1,), generator=generator)


def batches(iteration: int, args: Namespace, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield this data-parallel rank's micro-batches ``[micro-batch-size, seq-length + 1]`` of an iteration."""
    mine = args.global_batch_size // mpu.get_data_parallel_world_size()
    first = iteration * args.global_batch_size + mpu.get_data_parallel_rank() * mine
    for start in range(first, first + mine, args.micro_batch_size):
        yield torch.stack([sample(start + place, args) for place in range(args.micro_batch_size)]).to(device)


def loss_func(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return the loss summed over the micro-batch, its number of tokens, and both for the report."""
    total, tokens = loss.float().sum(), torch.tensor(loss.numel(), dtype=torch.int, device=loss.device)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple:
    """Return the stage's output for a micro-batch, and the function that computes the loss from the last stage's."""
    tokens = next(data_iterator)
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_func


def run_batch(iteration: int, args: Namespace, model: list, device: torch.device, *, forward_only: bool) -> float:
    """Run forward (and backward) passes of a global batch on mcore's schedule; return its mean loss, on every rank."""
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(iteration, args, device),
        model=model,
        num_microbatches=args.global_batch_size // args.micro_batch_size // mpu.get_data_parallel_world_size(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(2, device=device)
    for one in outputs:
        total += one["lm loss"]
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    dist.broadcast(total, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    return float(total[0] / total[1])


def train_step(iteration: int, args: Namespace, model: list, optimizer, scheduler, device: torch.device) -> tuple:
    """Make one update; return ``(loss, gradient norm)``."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    loss = run_batch(iteration, args, model, device, forward_only=False)
    with cuda_names():
        _, norm, _ = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    return loss, norm


def main(given: Sequence[str] | None = None) -> list[float]:
    """Train an adapter; return the loss of every iteration."""
    args = parse_args(given)
    device = initialize(args)
    model, adapter = get_model(args, device)
    optimizer, scheduler = get_optimizer(args, model)
    if args.load_adapter:
        adapter.load(args.load_adapter, optimizer)  # megarl: the optimizer's fp32 copies too
    done = load_checkpoint(args.load, model, optimizer, scheduler) if args.load else 0
    losses = []
    for iteration in range(done, args.train_iters):
        loss, norm = train_step(iteration, args, model, optimizer, scheduler, device)
        losses.append(loss)
        if dist.get_rank() == 0 and (iteration + 1) % args.log_interval == 0:
            print(f" iteration {iteration + 1:8}/{args.train_iters:8} | lm loss: {loss:.6E} | grad norm: {norm:.3f}")
        if args.save and args.save_interval and (iteration + 1) % args.save_interval == 0:
            save_checkpoint(args.save, iteration + 1, model, optimizer, scheduler)
    if args.save_adapter:
        adapter.save(args.save_adapter)  # megarl: a plain PEFT directory
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
