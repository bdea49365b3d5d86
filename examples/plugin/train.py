"""LoRA on your own Megatron-Core script: a plain GPTModel, mcore's own layers, a plain loop. See README.md."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from peft import LoraConfig

from megarl.lora import apply_lora
from megarl.model.base_tensors import load_base
from megarl.model.hf_folder import read_config
from megarl.parallel.device import backend, cuda_names, pick_device


def build(hf: dict, device: torch.device) -> GPTModel:
    """Your model: nothing of megarl in it."""
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=device.type == "cpu",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    with cuda_names():  # mcore on a CPU host; nothing on CUDA
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=hf["vocab_size"],
            max_sequence_length=hf["max_position_embeddings"],
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=hf.get("rope_parameters", hf)["rope_theta"],
        ).to(device)


def main(model_path: str, adapter_path: str, steps: int = 5) -> list[float]:
    """Train an adapter on one fixed batch, save and load it; the losses of each step and of the loaded adapter."""
    device = pick_device("auto")
    dist.init_process_group(backend(device))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    hf = read_config(model_path)
    model = build(hf, device)
    load_base([model], model_path, hf)
    adapter = apply_lora([model], LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), hf)
    optimizer = torch.optim.AdamW([parameter for _, parameter in adapter.parameters()], lr=1e-3)
    tokens = torch.arange(64, device=device)[None] % hf["vocab_size"]
    positions = torch.arange(64, device=device)[None]
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device).triu(1)

    def loss_of_batch() -> torch.Tensor:
        return model(tokens, positions, mask, labels=tokens.roll(-1, 1))[:, :-1].mean()

    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    adapter.save(adapter_path)  # peft and vLLM load it as it is
    adapter.load(adapter_path)  # so does any other layout
    losses.append(loss_of_batch().item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3])
